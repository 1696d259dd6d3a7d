"""The segments of a chain and the states between them, as arrays that the search reads.

A segment's bytes depend on the segments before it only through `memory.segments.Before`. Choices up to one cut that are
equal in this are in one state.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import fields
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from varuna_capslog.memory.range_bytes import BackwardWork, RangeBytes
from varuna_capslog.memory.segments import Before, Beside, CallSegment
from varuna_capslog.planners.intervals.choice import runs_again
from varuna_capslog.planners.seconds import LayerSeconds
from varuna_capslog.plans.parts import INTERVAL_KINDS, KEEP, MemoryInterval

__all__ = ["KINDS", "SegmentTable", "States"]

KINDS = (KEEP, *INTERVAL_KINDS)
_WORKS = ("backward", "first_backward", "input_half")
_NUMBERS = tuple(field.name for field in fields(CallSegment) if field.name not in ("part", "kept", *_WORKS))
_COLUMNS = len(_NUMBERS) + len(_WORKS) * len(BackwardWork._fields)


class SegmentTable:
    """Every segment [first, end) of every kind.

    numbers: kind -> [numbers of CallSegment, L, L + 1]. again: [L, L + 1], seconds of recomputing the layers.
    """

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
        """Return True where the layers before a cut have a backward."""
        return end == self.ranges.num_layers or self.ranges.carries[end]

    def taken(self, kind: str) -> NDArray[np.float64]:
        """Return [L, L + 1]: bytes of a segment of this kind that go to the host tier."""
        taken: NDArray[np.float64] = self.numbers[KINDS.index(kind), _NUMBERS.index("taken")]
        return taken

    def behind(self, kind: int, firsts: NDArray[np.intp], end: int) -> CallSegment:
        """Return the segments of this kind from each of `firsts` to `end`, as one segment with arrays for numbers."""
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
    """The states of choices, numbered over all cuts.

    Attributes:
        cut: of each state. before: of any choice in it. keeps: True where its last segment is of kind KEEP.
        beside: bytes of the next segment's inputs that these choices hold or give away. outputs: the part of it on the
            device that is the last segment's outputs, which matters for the next segment only.
        family: states of the same number differ in `keeps` and `outputs` alone.

    later: bytes that calls give away count, since all of them leave together.
    """

    def __init__(self, ranges: RangeBytes, later: bool) -> None:
        self._ranges, self._later = ranges, later
        self._families: dict[tuple[int, int, Beside], int] = {}
        self._numbers: dict[tuple[int, bool, Beside, Beside], int] = {}
        self._behind: dict[tuple[int, int, int, int], int] = {}
        self._pairs: dict[tuple[MemoryInterval | None, MemoryInterval | None], int] = {}
        self._passing: list[int] = []
        """For each state, the number of the pair of segments whose inputs may pass."""
        self.cut: list[int] = []
        self.before: list[Before] = []
        self.keeps: list[bool] = []
        self.beside: list[Beside] = []
        self.outputs: list[int] = []
        self.family: list[int] = []
        self._columns: Columns | None = None

    def columns(self) -> Columns:
        """Return the columns of the states so far, which the search reads."""
        if self._columns is None or len(self._columns.keeps) < len(self.cut):
            self._columns = Columns(
                np.array(self.keeps, dtype=np.bool_),
                np.array(self.beside, dtype=np.float64).T,
                np.array(self.outputs, dtype=np.float64),
                np.array(self.family, dtype=np.intp),
            )
        return self._columns

    def number(self, cut: int, before: Before, keeps: bool) -> int:
        """Return the number of the state of choices up to a cut."""
        # The further apart two cuts are, the fewer tensors pass both. So equal bytes at this cut mean equal tensors at
        # this cut and all later ones.
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
            self.beside.append(Beside(*map(max, outputs, passed)))
            self.outputs.append(outputs.stay)
            family = cut, outputs.taken, passed
            self.family.append(self._families.setdefault(family, len(self._families)))
        return self._numbers[key]

    def behind(self, state: int, kind: int, end: int, kept: bool) -> int:
        """Return the state behind one more segment."""
        # the last segment so far no longer matters then, unless frozen layers follow it
        key = (self.cut[state], self._passing[state], kind, end) if kept else (state, -1, kind, end)
        if key not in self._behind:
            part = MemoryInterval(self.cut[state], end, KINDS[kind])
            self._behind[key] = self.number(end, self.before[state].behind(part, kept), KINDS[kind] == KEEP)
        return self._behind[key]
