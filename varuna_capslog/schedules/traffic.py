"""When the messages of a step take memory: from the action at which each arrives, or is made, until it is let go.

The executor posts receives ahead and releases what it has sent as soon as a later message of the peer proves that it
was received; both follow from the lists of actions alone. The fold of a rank's memory calls `messages_of` with steps of
tens of thousands of actions, so everything here is arrays, one element per action, call or message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from varuna_capslog.schedules.actions import Action

__all__ = ["POSTED_AHEAD", "POSTED_AHEAD_BYTES", "Messages", "RankActions", "StepActions", "messages_of"]

Numbers = NDArray[np.int64]

POSTED_AHEAD, POSTED_AHEAD_BYTES = 2, 1 << 20
"""The executor posts so many receives ahead at least, and more while they are small. Posting in the middle of a
computation wakes gloo's thread and costs half a millisecond; all at the beginning of a step cost next to nothing.
"""


@dataclass(frozen=True)
class RankActions:
    """One rank's list: stage, kind (its letter's number) and call of every action; a U has call -1. All [n]."""

    stages: Numbers
    kinds: Numbers
    calls: Numbers

    @classmethod
    def of(cls, actions: Sequence[Action]) -> RankActions:
        """The arrays of a list."""
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
        """Positions of all actions of these kinds, rising."""
        found = np.isin(self.kinds, [ord(kind) for kind in kinds])
        return np.flatnonzero(found if stage is None else found & (self.stages == stage))


@dataclass(frozen=True)
class StepActions:
    """The actions of a step and the way of every microbatch through its stages.

    rows: by rank. ranks: stage -> rank. paths: block -> its stages in order. of_block: microbatches of a block.
    """

    rows: Sequence[RankActions]
    ranks: Sequence[int]
    paths: Sequence[Sequence[int]]
    of_block: int

    @cached_property
    def microbatches(self) -> list[Numbers]:
        """stage -> the microbatches of its calls, rising."""
        blocks: list[list[int]] = [[] for _ in self.ranks]
        for block, path in enumerate(self.paths):
            for stage in path:
                blocks[stage].append(block)
        within = np.arange(self.of_block)
        return [(np.array(own, dtype=np.int64)[:, None] * self.of_block + within).ravel() for own in blocks]

    def at(self, kind: str, stage: int) -> Numbers:
        """call -> position of its action of this kind in the list of the stage's rank; -1 where there is none."""
        row = self.rows[self.ranks[stage]]
        positions = row.where(kind, stage)
        found = np.full(len(self.microbatches[stage]), -1, dtype=np.int64)
        found[row.calls[positions]] = positions
        return found

    @cached_property
    def forwards(self) -> list[Numbers]:
        """stage -> the positions of F."""
        return [self.at("F", stage) for stage in range(len(self.ranks))]

    @cached_property
    def backwards(self) -> list[Numbers]:
        """stage -> the positions of B, or of I where the backward is split."""
        return [np.maximum(self.at("B", stage), self.at("I", stage)) for stage in range(len(self.ranks))]

    @cached_property
    def weights(self) -> list[Numbers]:
        """stage -> the positions of W; -1 where the backward is whole."""
        return [self.at("W", stage) for stage in range(len(self.ranks))]

    def neighbours(self, stage: int, step: int) -> tuple[Numbers, Numbers]:
        """The stages behind (`step` 1) or before (-1) each call and the number of their call; -1 where there is
        none.
        """
        microbatches = self.microbatches[stage]
        stages = np.full(len(microbatches), -1, dtype=np.int64)
        calls = np.full(len(microbatches), -1, dtype=np.int64)
        for block, path in enumerate(self.paths):
            if stage in path and 0 <= (place := list(path).index(stage) + step) < len(path):
                stages[microbatches // self.of_block == block] = path[place]
        for other in np.unique(stages[stages >= 0]):
            there = stages == other
            calls[there] = np.searchsorted(self.microbatches[other], microbatches[there])
        return stages, calls


@dataclass(frozen=True)
class Messages:
    """The life of every message, by stage and call; positions are those of the lists of actions.

    begins[kind][stage]: on the rank that receives: the position from which the buffer of the call's input ("F") or of
        the gradient of its output ("B") counts; -1 where it comes from a stage of the same rank, or from none.
    ends[kind][stage]: on the rank that sends: the position at which the call's output ("F") or the gradient of its
        input ("B") is let go; the length of the list where nothing confirms it before the end; -1 as above.
    """

    begins: dict[str, list[Numbers]]
    ends: dict[str, list[Numbers]]


def messages_of(step: StepActions, sizes: Mapping[str, Sequence[int]], ahead: bool) -> Messages:
    """The life of the messages of a step.

    Args:
        sizes: "F" and "B" -> stage -> bytes of the activation, and of the gradient, across the cut before it; a
            gradient of -1 bytes is not sent.
        ahead: whether receives are posted ahead in the memory that is counted (else they count from the action that
            needs them).
    """
    count = len(step.ranks)
    empty = {kind: [np.full(len(row), -1, dtype=np.int64) for row in step.microbatches] for kind in "FB"}
    found = Messages(empty, {kind: [row.copy() for row in rows] for kind, rows in empty.items()})
    # one column per message: source rank, its position, target rank, position of need, kind, sender, call, receiver,
    # call, bytes
    columns = [np.zeros((10, 0), dtype=np.int64)]
    ranks = np.array(step.ranks, dtype=np.int64)
    for stage in range(count):
        for kind, direction, positions in (("F", 1, step.forwards), ("B", -1, step.backwards)):
            others, calls = step.neighbours(stage, direction)
            here = np.flatnonzero((others >= 0) & (ranks[others] != ranks[stage]))
            for other in np.unique(others[here]):
                size = sizes[kind][int(other) if kind == "F" else stage]
                if size < 0:
                    continue
                own = here[others[here] == other]
                needed, same = positions[other][calls[own]], np.ones(len(own), dtype=np.int64)
                row = [same * ranks[stage], positions[stage][own], same * ranks[other], needed, same * ord(kind)]
                columns.append(np.array([*row, same * stage, own, same * other, calls[own], same * size]))
    table = np.concatenate(columns, axis=1)
    table = table[:, np.lexsort((table[1], table[2], table[0]))]
    received, released = _channels(table, [len(row) for row in step.rows])
    begun = _posted(table, received, len(step.rows)) if ahead else received
    for kind in "FB":
        for stage in range(count):
            into = (table[4] == ord(kind)) & (table[7] == stage)
            found.begins[kind][stage][table[8][into]] = begun[into]
            out = (table[4] == ord(kind)) & (table[5] == stage)
            found.ends[kind][stage][table[6][out]] = released[out]
    return found


def _channels(table: Numbers, lengths: Sequence[int]) -> tuple[Numbers, Numbers]:
    """For every message the position at which it is received, and that at which its sender lets it go."""
    received = np.zeros(table.shape[1], dtype=np.int64)
    channels: dict[tuple[int, int], slice] = {}
    keys = table[0] * len(lengths) + table[2]
    borders = np.flatnonzero(np.diff(keys)) + 1
    for first, end in zip([0, *borders], [*borders, len(keys)], strict=True):
        if end > first:
            part = slice(int(first), int(end))
            channels[int(table[0, first]), int(table[2, first])] = part
            # a receiver takes the messages of a peer in the order in which they are sent
            received[part] = np.minimum.accumulate(table[3, part][::-1])[::-1]
    released = np.zeros_like(received)
    for (source, target), part in channels.items():
        back = channels.get((target, source))
        released[part] = lengths[source]
        if back is None:
            continue
        # how many of these the peer had received before it sent each of its own
        known = np.searchsorted(received[part], table[1, back], side="right")
        proof = np.searchsorted(known, np.arange(part.stop - part.start), side="right")
        proven = proof < back.stop - back.start
        released[part][proven] = received[back][proof[proven]]
    return received, released


def _posted(table: Numbers, received: Numbers, num_ranks: int) -> Numbers:
    """For every message the position at which its receive is posted: 0 for those posted before the first action."""
    begun = np.zeros_like(received)
    for rank in range(num_ranks):
        own = np.flatnonzero(table[2] == rank)
        own = own[np.argsort(received[own], kind="stable")]
        total = np.append(0, np.cumsum(table[9, own]))
        done = np.arange(len(own) + 1)
        # having received `done` messages, so many are posted in all
        small = np.searchsorted(total, total[done] + POSTED_AHEAD_BYTES, side="right") - 1
        posted = np.maximum.accumulate(np.minimum(np.maximum(small, done + POSTED_AHEAD), len(own)))
        after = np.searchsorted(posted, np.arange(len(own)), side="right")
        at = np.append(0, received[own])
        begun[own] = at[after]
    return begun
