"""A step as one row of numbers, in an order in which everything can happen, for who plays it again and again.

Which instruction comes when does not depend on seconds. So the order is found once per schedule, and a play is one pass
over the row that adds seconds.
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

__all__ = ["OrderedStep", "Piece", "Times", "ordered"]

_RECEIVE, _SEND, _WORK, _WORK_BEHIND_LOAD, _OFFLOAD, _LOAD = range(6)
_CODES = {"O": _OFFLOAD, "L": _LOAD, **dict.fromkeys("RBI", _WORK_BEHIND_LOAD)}


class Piece(NamedTuple):
    """What actions have in common that take equally long; keeps: their microbatch's forward keeps its graph."""

    kind: str
    stage: int
    keeps: bool


class Times(NamedTuple):
    """begins, ends: of each instruction of the row, receives left out. copies: (number of the instruction, begin, end)
    of those that run beside the computation. step_seconds: the end of the last action."""

    begins: list[float]
    ends: list[float]
    copies: list[tuple[int, float, float]]
    step_seconds: float


@dataclass(frozen=True)
class OrderedStep:
    """A step that does not deadlock.

    instructions: each with its rank, in an order in which every receive comes behind its send.
    works, ways: what the seconds of a play are counted by.
    """

    lowered: Lowered
    instructions: list[tuple[int, Instruction]]
    works: list[Piece]
    ways: list[Edge]
    _row: list[tuple[int, int, int, int, int]]
    _messages: int

    def play(
        self, work: Sequence[float], transfer: Sequence[float], handover: Sequence[float], copies_beside: bool
    ) -> Times:
        """Every rank has a core of its own, so that one pass tells when everything happens.

        Args:
            work: seconds of each of `works`. transfer, handover: of a message of each of `ways`.
            copies_beside: as in `simulate`.
        """
        ranks = len(self.lowered.programs)
        clock, last, link = [0.0] * ranks, [0.0] * ranks, dict.fromkeys(self.lowered.channels, 0.0)
        links, arrival = list(link.values()), [0.0] * self._messages
        begins, ends = [0.0] * len(self._row), [0.0] * len(self._row)
        copies: list[tuple[int, float, float]] = []
        free, leaving, back = [0.0] * ranks, [0.0] * ranks, dict[tuple[int, int], float]()
        for place, (what, rank, one, two, three) in enumerate(self._row):
            now = clock[rank]
            if what == _RECEIVE:
                if arrival[one] > now:
                    clock[rank] = arrival[one]
                continue
            if what == _SEND:
                begin = max(now, links[two])
                clock[rank] = now = now + handover[three]
                end = max(begin + transfer[three], now)
                links[two] = arrival[one] = end
            elif not copies_beside:
                begin, end = now, now + work[one]
                clock[rank] = last[rank] = end
            elif what in (_OFFLOAD, _LOAD):
                begin = max(now, free[rank])
                free[rank] = end = begin + work[one]
                copies.append((place, begin, end))
                if what == _LOAD:
                    back[two, three] = end
                else:
                    leaving[rank] = end
                begin = end = last[rank] = now
            else:
                begin = max(now, back.get((two, three), 0.0)) if what == _WORK_BEHIND_LOAD else now
                last[rank] = end = begin + work[one]
                # what left beside this action must be away before the rank goes on
                clock[rank] = max(end, leaving[rank])
                leaving[rank] = 0.0
            begins[place], ends[place] = begin, end
        return Times(begins, ends, copies, max(last, default=0.0))


def ordered(
    schedule: Sequence[Sequence[Action]], gradients: Collection[Edge] | None = None, graph: StageGraph | None = None
) -> OrderedStep:
    """The step of a (validated) schedule; the arguments are those of `lower`. Steps of late are remembered.

    Raises `CapslogError` for a schedule that deadlocks.
    """
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
    works: dict[Piece, int] = {}
    ways: dict[Edge, int] = {}
    channels = {pair: number for number, pair in enumerate(lowered.channels)}
    # a receive's message is the very one that is sent
    messages = {id(one): number for number, one in enumerate(itertools.chain(*lowered.channels.values()))}
    row = []
    for rank, one in instructions:
        if isinstance(one, Recv):
            row.append((_RECEIVE, rank, messages[id(one.message)], 0, 0))
        elif isinstance(one, SendInstruction):
            way = ways.setdefault(one.message.way, len(ways))
            row.append((_SEND, rank, messages[id(one.message)], channels[rank, one.peer], way))
        else:
            work = Piece(one.kind, one.stage, (one.stage, one.microbatch) in keeping)
            code, call = _CODES.get(one.kind, _WORK), -1 if one.microbatch is None else one.microbatch
            row.append((code, rank, works.setdefault(work, len(works)), one.stage, call))
    return OrderedStep(lowered, instructions, list(works), list(ways), row, len(messages))
