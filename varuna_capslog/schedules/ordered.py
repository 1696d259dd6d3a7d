"""A step as a row of numbers in an executable order, for callers that simulate it again and again.

The order of the instructions does not depend on seconds, so a simulation is one pass over the row that adds seconds.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.schedules.actions import Action, graph_keeping_forwards
from varuna_capslog.schedules.lower import Instruction, Lowered, Recv, SendInstruction, find_deadlock, in_turn, lower
from varuna_capslog.schedules.stage_graph import Edge, StageGraph

__all__ = ["ActionCostKey", "OrderedStep", "Times", "ordered"]

_RECEIVE, _SEND, _WORK, _WORK_BEHIND_LOAD, _OFFLOAD, _LOAD = range(6)
_CODES = {"O": _OFFLOAD, "L": _LOAD, **dict.fromkeys("RBI", _WORK_BEHIND_LOAD)}


class ActionCostKey(NamedTuple):
    """Key of actions that take equally long; keeps: the forward of their microbatch keeps its graph."""

    kind: str
    stage: int
    keeps: bool


class Times(NamedTuple):
    """Times of a simulated step. begins, ends: of each instruction of the row, receives left out. copies: (number of
    the instruction, begin, end) of copies beside the computation. step_seconds: the end of the last action.
    """

    begins: list[float]
    ends: list[float]
    copies: list[tuple[int, float, float]]
    step_seconds: float


@dataclass(frozen=True)
class OrderedStep:
    """A step that does not deadlock. instructions: each with its rank, every receive behind its send. works, ways: the
    keys of action costs and of message costs, in the order of the arguments of `play`.
    """

    lowered: Lowered
    instructions: list[tuple[int, Instruction]]
    works: list[ActionCostKey]
    ways: list[Edge]
    _row: list[tuple[int, int, int, int, int]]
    _messages: int

    def play(
        self, work: Sequence[float], transfer: Sequence[float], handover: Sequence[float], copies_beside: bool
    ) -> Times:
        """Return the times of the step, in one pass, since every rank has its own core. work: seconds of each of
        `works`. transfer, handover: of a message of each of `ways`. copies_beside: as in `simulate`.
        """
        ranks = len(self.lowered.programs)
        clock, last, link = [0.0] * ranks, [0.0] * ranks, dict.fromkeys(self.lowered.channels, 0.0)
        links, arrival = list(link.values()), [0.0] * self._messages
        begins, ends = [0.0] * len(self._row), [0.0] * len(self._row)
        copies: list[tuple[int, float, float]] = []
        free, leaving, back = [0.0] * ranks, [0.0] * ranks, dict[tuple[int, int], float]()
        for place, (code, rank, message_or_work, link_or_stage, way_or_call) in enumerate(self._row):
            now = clock[rank]
            if code == _RECEIVE:
                if arrival[message_or_work] > now:
                    clock[rank] = arrival[message_or_work]
                continue
            if code == _SEND:
                begin = max(now, links[link_or_stage])
                clock[rank] = now = now + handover[way_or_call]
                end = max(begin + transfer[way_or_call], now)
                links[link_or_stage] = arrival[message_or_work] = end
            elif not copies_beside:
                begin, end = now, now + work[message_or_work]
                clock[rank] = last[rank] = end
            elif code in (_OFFLOAD, _LOAD):
                begin = max(now, free[rank])
                free[rank] = end = begin + work[message_or_work]
                copies.append((place, begin, end))
                if code == _LOAD:
                    back[link_or_stage, way_or_call] = end
                else:
                    leaving[rank] = end
                begin = end = last[rank] = now
            else:
                begin = max(now, back.get((link_or_stage, way_or_call), 0.0)) if code == _WORK_BEHIND_LOAD else now
                last[rank] = end = begin + work[message_or_work]
                # an offload beside this action must end before the rank goes on
                clock[rank] = max(end, leaving[rank])
                leaving[rank] = 0.0
            begins[place], ends[place] = begin, end
        return Times(begins, ends, copies, max(last, default=0.0))


def ordered(
    schedule: Sequence[Sequence[Action]], gradients: Collection[Edge] | None = None, graph: StageGraph | None = None
) -> OrderedStep:
    """Return the step of a (validated) schedule, cached; arguments: see `lower`. Raises CapslogError for a deadlock."""
    return _ordered(tuple(map(tuple, schedule)), None if gradients is None else frozenset(gradients), graph)


@lru_cache(maxsize=64)
def _ordered(
    schedule: tuple[tuple[Action, ...], ...], gradients: frozenset[Edge] | None, graph: StageGraph | None
) -> OrderedStep:
    lowered = lower(schedule, gradients, graph)
    instructions = list(in_turn(lowered))
    if len(instructions) < sum(map(len, lowered.programs)):
        raise CapslogError(f"the schedule deadlocks: {find_deadlock(lowered)}; reorder the lists of these ranks")
    keeping = graph_keeping_forwards(schedule)
    works: dict[ActionCostKey, int] = {}
    ways: dict[Edge, int] = {}
    channels = {pair: number for number, pair in enumerate(lowered.channels)}
    # a receive and its send have the same message object
    messages = {id(message): number for number, message in enumerate(itertools.chain(*lowered.channels.values()))}
    row = []
    for rank, instruction in instructions:
        if isinstance(instruction, Recv):
            row.append((_RECEIVE, rank, messages[id(instruction.message)], 0, 0))
        elif isinstance(instruction, SendInstruction):
            way = ways.setdefault(instruction.message.way, len(ways))
            row.append((_SEND, rank, messages[id(instruction.message)], channels[rank, instruction.peer], way))
        else:
            work = ActionCostKey(
                instruction.kind, instruction.stage, (instruction.stage, instruction.microbatch) in keeping
            )
            code, call = (
                _CODES.get(instruction.kind, _WORK),
                -1 if instruction.microbatch is None else instruction.microbatch,
            )
            row.append((code, rank, works.setdefault(work, len(works)), instruction.stage, call))
    return OrderedStep(lowered, instructions, list(works), list(ways), row, len(messages))
