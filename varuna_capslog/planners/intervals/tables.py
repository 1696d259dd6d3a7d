"""The segments of a chain and the states between them, as arrays that the search reads.

A segment's bytes depend on the segments before it only through `memory.segments.PrecedingSegments`: choices up to one
cut in which these hold the same bytes are in one state.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from varuna_capslog.base import fields
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.memory.range_bytes import BackwardWork, RangeBytes
from varuna_capslog.memory.segments import CallSegment, PrecedingSegments, SharedInputs, Treatment, treated
from varuna_capslog.planners.seconds import LayerSeconds
from varuna_capslog.plans.parts import INTERVAL_KINDS, KEEP, MemoryInterval, pieces_of

__all__ = [
    "DEFAULT_HANDLING",
    "KINDS",
    "Handling",
    "IntervalChoice",
    "SegmentTable",
    "States",
    "again_seconds",
    "bytes_of",
    "combined_seconds",
    "others_bytes",
    "stage_bytes",
]


# -- Bytes and seconds of a given choice of memory intervals for one stage, and how the stage handles its calls.
#
# `interval_search` adds up the same numbers segment by segment.


@dataclass(frozen=True)
class Handling:
    """Properties of a stage's action list, and the cost of copies.

    recomputed, later, split: as in `memory.segments.treated`: the list has an R for every call; it has an O for every
    call; its backwards are in two halves. at_once: every backward directly follows its forward, so that the last
    segment keeps its graph.
    calls: number per step; each leaves its running statistics. waiting_blocks: gradient sums of the stage's parameters
    held beside the current sum: 0 with one block, 1 with several where no other rank holds the layers, else the number
    of blocks less 1.
    host_bandwidth: bytes per second between a rank and its host tier; None: copies take no time. copies_beside: copies
    overlap with the computation, and a call takes the longer of the two times; else it takes their sum.
    """

    recomputed: bool = False
    later: bool = False
    split: bool = False
    calls: int = 1
    waiting_blocks: int = 0
    host_bandwidth: float | None = None
    copies_beside: bool = True
    at_once: bool = False

    def __post_init__(self) -> None:
        fields.whole(self.calls, "calls", minimum=1)
        fields.whole(self.waiting_blocks, "waiting_blocks")
        if self.host_bandwidth is not None and not 0 < self.host_bandwidth < float("inf"):
            raise CapslogError(f"host_bandwidth is {self.host_bandwidth}; give bytes per second above 0, or none")


DEFAULT_HANDLING = Handling()


@dataclass(frozen=True)
class IntervalChoice:
    """The cheapest intervals that the search has for a stage. seconds: of one call. bound_seconds: no choice that fits
    is faster; equal to `seconds` where the search was exact. bytes: by `stage_bytes`. moved_bytes: that one call copies
    to the host tier, and again back, by `treated`; a simulated step (`planning.playing.copy_seconds`) counts sums of
    `saved_bytes`, which may differ a little. again_seconds: of recomputed forwards; part of `seconds`, or hidden by
    copies.
    """

    intervals: tuple[MemoryInterval, ...]
    seconds: float
    bound_seconds: float
    bytes: int
    moved_bytes: int
    again_seconds: float


def stage_bytes(
    ranges: RangeBytes,
    first: int,
    end: int,
    intervals: Sequence[MemoryInterval],
    in_flight: int,
    handling: Handling = DEFAULT_HANDLING,
    at_least: bool = False,
) -> int:
    """Return the peak bytes of a stage with these intervals and `in_flight` calls in flight, by `treated`: the sum of

        resident bytes, running statistics of all calls, gradients of parameters
        + bytes of the other calls in flight while they wait
        + the most bytes that any action of the current call needs, with all that this call holds

    In a list with an O, one waiting call also counts the bytes of its copy, which may be on its way; where backwards
    are split, each waiting call may be between its two halves. In these two parts a list may take less, never more.
    at_least: count only the bytes of each waiting call that stay on the device.

    Bytes that depend on other stages are left out: messages on their way, inputs that a neighbour on the same rank also
    holds, the gradient exchange and the update at the end of the step, and an R that runs earlier than directly before
    its backward. `memory.fold` counts them. Raises CapslogError where the profile lacks the halves of a split backward.
    """
    modes = handling.recomputed, handling.later, handling.at_once, handling.split
    treatment = treated(ranges, ((first, end),), intervals, *modes)
    return bytes_of(treatment, ranges, first, end, in_flight, handling, at_least)


def bytes_of(
    treatment: Treatment,
    ranges: RangeBytes,
    first: int,
    end: int,
    in_flight: int,
    handling: Handling = DEFAULT_HANDLING,
    at_least: bool = False,
) -> int:
    """Return `stage_bytes` of calls of this treatment."""
    gradients = ranges.made(first, end)
    gradient_out = 0 if end == ranges.num_layers else ranges.gradient[end]
    waits, back = treatment.held - treatment.away, treatment.held - treatment.away + treatment.host
    forward = ranges.crossing[first] + treatment.forward
    actions = [forward, back + treatment.recompute, back + treatment.grown + gradient_out]
    if treatment.halves is None:
        actions.append(treatment.backward)
        first_backward = treatment.first_backward
    else:
        actions += [treatment.halves.inputs, treatment.halves.weights]
        first_backward = treatment.halves.first_weights
    between = 0 if treatment.halves is None else treatment.halves.between
    others = others_bytes(handling, in_flight, waits, treatment.held, treatment.host, between)
    others = (in_flight - 1) * waits if at_least else others
    resident = ranges.resident(range(first, end)) + handling.calls * ranges.statistics(first, end)
    return (
        resident
        + handling.waiting_blocks * gradients
        + int(others)
        + max(first_backward, *(a + gradients for a in actions))
    )


def others_bytes(handling: Handling, in_flight: int, waits: Any, held: Any, host: Any, between: Any) -> Any:
    """Return the bytes of the waiting calls, which are all calls in flight except the current call. The arguments are
    members of `Sums`, also as arrays. The result never falls where an argument rises.
    """
    each = np.maximum(waits, between)
    if not handling.later or in_flight < 2:
        return (in_flight - 1) * each
    return (in_flight - 2) * each + np.maximum(each, np.maximum(held, waits + host))


def again_seconds(
    ranges: RangeBytes, seconds: LayerSeconds, first: int, end: int, intervals: Sequence[MemoryInterval]
) -> float:
    """Return the seconds of one call's recomputed forwards. Two kinds of recompute intervals add no time: the engine
    does not recompute layers to which no gradient comes back; and it leaves out the first forward of an interval that
    ends with the loss and has no running statistics, since nothing reads the outputs.
    """
    return sum(
        float(seconds.forward[interval.end] - seconds.forward[interval.first])
        for interval in pieces_of(first, end, intervals)
        if interval.recomputes and runs_again(ranges, interval.first, interval.end)
    )


def runs_again(ranges: RangeBytes, first: int, end: int) -> bool:
    """Return True where recomputing these layers takes time; see `again_seconds`."""
    if end == ranges.num_layers:
        return ranges.statistics(first, end) > 0
    return ranges.carries[end]


def combined_seconds(handling: Handling, compute: Any, moved_bytes: Any) -> Any:
    """Return the seconds of a call that computes and moves bytes to the host tier and back; also for arrays."""
    if handling.host_bandwidth is None:
        return compute
    copies = 2 * moved_bytes / handling.host_bandwidth
    return np.maximum(compute, copies) if handling.copies_beside else compute + copies


# -- The segments of a chain and the states between them


KINDS = (KEEP, *INTERVAL_KINDS)
_WORKS = ("backward", "first_backward", "input_half")
_NUMBERS = tuple(field.name for field in dataclasses.fields(CallSegment) if field.name not in ("part", "kept", *_WORKS))
_COLUMNS = len(_NUMBERS) + len(_WORKS) * len(BackwardWork._fields)


class SegmentTable:
    """Every segment [first, end). numbers: [kinds, fields of `CallSegment`, L, L + 1]. again: seconds to recompute."""

    def __init__(
        self,
        ranges: RangeBytes,
        seconds: LayerSeconds,
        split: bool,
        within: NDArray[np.bool_] | None = None,
        kinds: Collection[str] = KINDS,
    ) -> None:
        """Compute the numbers of all segments of these kinds, or of those for which `within[first, end]` is True."""
        size = ranges.num_layers
        self.ranges = ranges
        self.numbers = np.zeros((len(KINDS), _COLUMNS, size, size + 1))
        self.again = np.zeros((size, size + 1))
        there = np.triu(np.ones((size, size + 1), dtype=np.bool_), k=1)
        for first, end in np.argwhere(there if within is None else there & within).tolist():
            for kind in kinds:
                segment = CallSegment.of(ranges, MemoryInterval(first, end, kind), split)
                works = (size for name in _WORKS for size in getattr(segment, name))
                numbers = [*(getattr(segment, name) for name in _NUMBERS), *works]
                self.numbers[KINDS.index(kind), :, first, end] = numbers
            if runs_again(ranges, first, end):
                self.again[first, end] = seconds.forward[end] - seconds.forward[first]

    def kept(self, end: int) -> bool:
        """Return True where the layers before the cut have a backward."""
        return end == self.ranges.num_layers or self.ranges.carries[end]

    def taken(self, kind: str) -> NDArray[np.float64]:
        """Return [L, L + 1]: bytes of a segment of this kind that go to the host tier."""
        taken: NDArray[np.float64] = self.numbers[KINDS.index(kind), _NUMBERS.index("taken")]
        return taken

    def behind(self, kind: int, firsts: NDArray[np.intp], end: int) -> CallSegment:
        """Return the segments of this kind from each of `firsts` to `end`, as one `CallSegment` of arrays."""
        part = MemoryInterval(end - 1, end, KINDS[kind])
        rows = self.numbers[kind, :, firsts, end].T
        numbers, works = rows[: len(_NUMBERS)], rows[len(_NUMBERS) :].reshape(len(_WORKS), -1, len(firsts))
        of_works = {name: BackwardWork(*row) for name, row in zip(_WORKS, works, strict=True)}
        return CallSegment(part, self.kept(end), **dict(zip(_NUMBERS, numbers, strict=True)), **of_works)


class Columns(NamedTuple):
    """Columns of all states, [N] or [2, N]; see `States`."""

    keeps: NDArray[np.bool_]
    beside: NDArray[np.float64]
    outputs: NDArray[np.float64]
    family: NDArray[np.intp]


class States:
    """The states of choices, numbered over all cuts; each list has an entry per state. before: of any choice in it.
    keeps: True where the last segment is of kind KEEP. beside: bytes of the next segment's inputs that these choices
    hold on the device or offload. outputs: the last segment's outputs in `beside` on the device, which matter for the
    next segment only. family: states of one family differ only in `keeps` and `outputs`. later: offloaded inputs
    count, since an O moves all of a call's bytes together.
    """

    def __init__(self, ranges: RangeBytes, later: bool) -> None:
        self._ranges, self._later = ranges, later
        self._families: dict[tuple[int, int, SharedInputs], int] = {}
        self._numbers: dict[tuple[int, bool, SharedInputs, SharedInputs], int] = {}
        self._behind: dict[tuple[int, int, int, int], int] = {}
        self._pairs: dict[tuple[MemoryInterval | None, MemoryInterval | None], int] = {}
        self._passing: list[int] = []
        """For each state, the number of the pair of segments whose inputs may pass."""
        self.cut: list[int] = []
        self.before: list[PrecedingSegments] = []
        self.keeps: list[bool] = []
        self.beside: list[SharedInputs] = []
        self.outputs: list[int] = []
        self.family: list[int] = []
        self._columns = Columns(np.zeros(0, np.bool_), np.zeros((2, 0)), np.zeros(0), np.zeros(0, np.intp))

    def columns(self) -> Columns:
        """Return the columns of the states so far, which the search reads."""
        known = len(self._columns.keeps)
        if known < len(self.cut):
            added = Columns(
                np.array(self.keeps[known:], dtype=np.bool_),
                np.array(self.beside[known:], dtype=np.float64).T,
                np.array(self.outputs[known:], dtype=np.float64),
                np.array(self.family[known:], dtype=np.intp),
            )
            both = zip(self._columns, added, strict=True)
            self._columns = Columns(*(np.concatenate(parts, axis=-1) for parts in both))
        return self._columns

    def number(self, cut: int, before: PrecedingSegments, keeps: bool) -> int:
        """Return the number of the state of choices up to a cut."""
        # The further apart two cuts are, the fewer tensors pass both. So equal bytes at this cut mean equal tensors at
        # this cut and all later cuts.
        outputs, passed = before.outputs(self._ranges), before.passed(self._ranges, cut)
        if not self._later:
            outputs, passed = outputs._replace(taken=0), passed._replace(taken=0)
        key = cut, keeps, outputs, passed
        if key not in self._numbers:
            self._numbers[key] = len(self.cut)
            self.cut.append(cut)
            self.before.append(before)
            self._passing.append(self._pairs.setdefault((before.stays, before.leaves), len(self._pairs)))
            self.keeps.append(keeps)
            self.beside.append(SharedInputs(*map(max, outputs, passed)))
            self.outputs.append(outputs.stay)
            family = cut, outputs.taken, passed
            self.family.append(self._families.setdefault(family, len(self._families)))
        return self._numbers[key]

    def behind(self, state: int, kind: int, end: int, kept: bool) -> int:
        """Return the state behind one more segment."""
        # behind a new segment, the last segment so far no longer matters, unless the new one is frozen
        key = (self.cut[state], self._passing[state], kind, end) if kept else (state, -1, kind, end)
        if key not in self._behind:
            part = MemoryInterval(self.cut[state], end, KINDS[kind])
            self._behind[key] = self.number(end, self.before[state].behind(part, kept), KINDS[kind] == KEEP)
        return self._behind[key]

    def moved(self, state: int, by: int) -> int | None:
        """Return the state of the same choices `by` layers later, behind equal layers; None where it differs."""
        parts = (part and replace(part, first=part.first + by, end=part.end + by) for part in self.before[state])
        later = self.number(self.cut[state] + by, PrecedingSegments(*parts), self.keeps[state])
        same = (self.beside[later], self.outputs[later]) == (self.beside[state], self.outputs[state])
        return later if same else None
