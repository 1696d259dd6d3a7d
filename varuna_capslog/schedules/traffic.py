"""Lifetime of a step's messages in memory: from the action at which each arrives, or is made, until it is freed.

The executor posts receives ahead and frees a sent message as soon as a later message of the peer proves its arrival;
both follow from the lists of actions alone. Steps have tens of thousands of actions, so this module uses arrays, with
one element per action, call or message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from varuna_capslog.schedules.actions import Action
from varuna_capslog.schedules.stage_graph import StageGraph

__all__ = ["POSTED_AHEAD", "POSTED_AHEAD_BYTES", "Messages", "RankActions", "StageLink", "StepActions", "messages_of"]

Numbers = NDArray[np.int64]

POSTED_AHEAD, POSTED_AHEAD_BYTES = 2, 1 << 20
"""Least number of receives that the executor posts ahead, and bytes up to which it posts more. Posting in the middle of
a computation wakes gloo's thread and costs half a millisecond; posting at the beginning of a step is almost free.
"""


@dataclass(frozen=True)
class RankActions:
    """List of a rank: stage, kind (its letter's number) and call of every action; a U has call -1. All [n]."""

    stages: Numbers
    kinds: Numbers
    calls: Numbers

    @classmethod
    def of(cls, actions: Sequence[Action]) -> RankActions:
        """Return the arrays of a list."""
        calls = [-1 if action.microbatch is None else action.microbatch for action in actions]
        letters = "".join([action.kind for action in actions]).encode()
        return cls(
            np.array([action.stage for action in actions], dtype=np.int64),
            np.frombuffer(letters, dtype=np.uint8).astype(np.int64),
            np.array(calls, dtype=np.int64),
        )

    def __len__(self) -> int:
        return len(self.stages)

    def where(self, kinds: str, stage: int | None = None) -> Numbers:
        """Return the positions of all actions of these kinds, rising; with `stage`, of this stage alone."""
        matches = np.zeros(len(self.kinds), dtype=np.bool_)
        for kind in kinds:  # np.isin takes several times as long for so few
            matches |= self.kinds == ord(kind)
        return np.flatnonzero(matches if stage is None else matches & (self.stages == stage))


@dataclass(frozen=True)
class StageLink:
    """Messages between two stages, one per call of the stage with the smaller grain. Stage `below` reads outputs of
    stage `above`. above_calls, below_calls: message -> the call of each stage.
    """

    above: int
    below: int
    above_calls: Numbers
    below_calls: Numbers


@dataclass(frozen=True)
class StepActions:
    """Actions of a step, by rank, and the route of every microbatch through its stages."""

    rows: Sequence[RankActions]
    graph: StageGraph

    @classmethod
    def of(cls, actions: Sequence[Sequence[Action]], graph: StageGraph) -> StepActions:
        """Return the step of these lists. Recent steps are cached, so do not write to the arrays."""
        return _step_of(tuple(map(tuple, actions)), graph)

    def at(self, kind: str, stage: int) -> Numbers:
        """Return call -> position of its action of this kind in the list of the stage's rank; -1 if there is none."""
        if (kind, stage) not in self._places:
            self._places[kind, stage] = self._find(kind, stage)
        return self._places[kind, stage]

    def _find(self, kind: str, stage: int) -> Numbers:
        row = self.rows[self.graph.ranks[stage]]
        positions = row.where(kind, stage)
        positions_of_calls = np.full(
            len(self.graph.microbatches[stage]) // self.graph.grains[stage], -1, dtype=np.int64
        )
        positions_of_calls[row.calls[positions]] = positions
        return positions_of_calls

    @cached_property
    def _places(self) -> dict[tuple[str, int], Numbers]:
        return {}

    @cached_property
    def _messages(self) -> dict[tuple[bool, ...], Messages]:
        return {}

    @cached_property
    def forwards(self) -> list[Numbers]:
        """stage -> the positions of F."""
        return [self.at("F", stage) for stage in range(len(self.graph.ranks))]

    @cached_property
    def backwards(self) -> list[Numbers]:
        """stage -> the positions of B, or of I where the backward is split."""
        return [np.maximum(self.at("B", stage), self.at("I", stage)) for stage in range(len(self.graph.ranks))]

    @cached_property
    def weights(self) -> list[Numbers]:
        """stage -> the positions of W; -1 where the backward is whole."""
        return [self.at("W", stage) for stage in range(len(self.graph.ranks))]

    @cached_property
    def links(self) -> list[StageLink]:
        """The links of all edges of the graph, in its order."""
        graph = self.graph
        numbers = {route: number for number, route in enumerate(dict.fromkeys(graph.routes))}
        taken = np.array([numbers[route] for route in graph.routes], dtype=np.int64)
        microbatches = [np.array(row, dtype=np.int64) for row in graph.microbatches]
        links = []
        for above, below in graph.edges:
            ways = [number for route, number in numbers.items() if (above, below) in graph.edges_of(route)]
            ends, step = (above, below), min(graph.grains[above], graph.grains[below])
            common = np.flatnonzero(np.isin(taken, ways))[::step]
            calls = (np.searchsorted(microbatches[stage], common) // graph.grains[stage] for stage in ends)
            links.append(StageLink(above, below, *calls))
        return links

    def is_local(self, link: StageLink) -> bool:
        """Return True where both stages are on one rank, so that no message travels."""
        return self.graph.ranks[link.above] == self.graph.ranks[link.below]


@lru_cache(maxsize=64)
def _step_of(actions: tuple[tuple[Action, ...], ...], graph: StageGraph) -> StepActions:
    return StepActions([RankActions.of(row) for row in actions], graph)


@dataclass(frozen=True)
class Messages:
    """Lifetime of every message: [kind][link] -> positions of its messages in the lists; "F" activation, "B" gradient.

    begins: on the receiving rank, from which position its buffer counts; -1: no message travels.
    ends: on the sending rank, where it is freed; the list's length if nothing proves its arrival before; -1 likewise.
    """

    begins: dict[str, list[Numbers]]
    ends: dict[str, list[Numbers]]


def messages_of(step: StepActions, sizes: Mapping[str, Sequence[int]], ahead: bool) -> Messages:
    """Return the lifetime of the messages of a step. sizes: "F" and "B" -> link -> bytes of an activation, and of a
    gradient; a message of -1 bytes is not sent. ahead: receives are posted ahead in the memory that is counted; else
    they count from the action that needs them, and lifetimes depend only on which messages are sent: these are cached
    with the step, so do not write to the arrays.
    """
    if ahead:
        return _messages_of(step, sizes, ahead)
    sent = tuple(size >= 0 for kind in "FB" for size in sizes[kind])
    if sent not in step._messages:
        step._messages[sent] = _messages_of(step, sizes, ahead)
    return step._messages[sent]


def _messages_of(step: StepActions, sizes: Mapping[str, Sequence[int]], ahead: bool) -> Messages:
    empty = {kind: [np.full(len(link.above_calls), -1, dtype=np.int64) for link in step.links] for kind in "FB"}
    messages = Messages(empty, {kind: [row.copy() for row in rows] for kind, rows in empty.items()})
    # the messages that one action sends, and those that it needs, are in the order of the other side's stage and call
    ranks, most = step.graph.ranks, 1 + max(map(len, step.forwards))
    later = most * len(ranks)
    # one column per message: source rank, target rank, where it is made and where it is needed (position * later +
    # place), kind, link, number, bytes
    columns = [np.zeros((8, 0), dtype=np.int64)]
    for number, link in enumerate(step.links):
        ends = (link.above, link.above_calls), (link.below, link.below_calls)
        for kind, positions in (("F", step.forwards), ("B", step.backwards)):
            if step.is_local(link) or sizes[kind][number] < 0:
                continue
            (source, sent), (target, needed) = ends if kind == "F" else ends[::-1]
            same = np.ones(len(sent), dtype=np.int64)
            made = positions[source][sent] * later + target * most + needed
            taken = positions[target][needed] * later + source * most + sent
            row = [same * ranks[source], same * ranks[target], made, taken, same * ord(kind), same * number]
            columns.append(np.array([*row, np.arange(len(sent)), same * sizes[kind][number]]))
    table = np.concatenate(columns, axis=1)
    table = table[:, np.lexsort((table[2], table[1], table[0]))]
    received, released = _channels(table, [len(row) for row in step.rows], later)
    begun = _posted(table, received, later, len(step.rows)) if ahead else received // later
    for kind in "FB":
        for number in range(len(step.links)):
            selected = (table[4] == ord(kind)) & (table[5] == number)
            messages.begins[kind][number][table[6][selected]] = begun[selected]
            messages.ends[kind][number][table[6][selected]] = released[selected]
    return messages


def _channels(table: Numbers, lengths: Sequence[int], later: int) -> tuple[Numbers, Numbers]:
    """Return, for every message, position and place at which it is received, and position at which its sender frees it.
    later: the number of places per position.
    """
    received = np.zeros(table.shape[1], dtype=np.int64)
    channels: dict[tuple[int, int], slice] = {}
    keys = table[0] * len(lengths) + table[1]
    borders = np.flatnonzero(np.diff(keys)) + 1
    for first, end in zip([0, *borders], [*borders, len(keys)], strict=True):
        if end > first:
            part = slice(int(first), int(end))
            channels[int(table[0, first]), int(table[1, first])] = part
            # a receiver takes the messages of a peer in the order in which they are sent
            received[part] = np.minimum.accumulate(table[3, part][::-1])[::-1]
    released = np.zeros_like(received)
    for (source, target), part in channels.items():
        back = channels.get((target, source))
        released[part] = lengths[source]
        if back is None:
            continue
        # for each message that the peer sends: the number of these messages that it has received before
        counts = np.searchsorted(received[part] // later, table[2, back] // later, side="right")
        proof = np.searchsorted(counts, np.arange(part.stop - part.start), side="right")
        proven = proof < back.stop - back.start
        released[part][proven] = received[back][proof[proven]] // later
    return received, released


def _posted(table: Numbers, received: Numbers, later: int, num_ranks: int) -> Numbers:
    """Return, for every message, the position at which its receive is posted: 0 before the first action."""
    begun = np.zeros_like(received)
    for rank in range(num_ranks):
        selected = np.flatnonzero(table[1] == rank)
        selected = selected[np.argsort(received[selected], kind="stable")]
        total = np.append(0, np.cumsum(table[7, selected]))
        done = np.arange(len(selected) + 1)
        # number of receives posted so far, after `done` received messages
        small = np.searchsorted(total, total[done] + POSTED_AHEAD_BYTES, side="right") - 1
        posted = np.maximum.accumulate(np.minimum(np.maximum(small, done + POSTED_AHEAD), len(selected)))
        after = np.searchsorted(posted, np.arange(len(selected)), side="right")
        at = np.append(0, received[selected] // later)
        begun[selected] = at[after]
    return begun
