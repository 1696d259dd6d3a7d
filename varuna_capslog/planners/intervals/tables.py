"""The segments of a chain and the states between them, as arrays that the search reads.

A segment's bytes depend on those before it only by what `memory.segments.Before` says of them. Before a cut, choices in
which that is the same are in one state.
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

    numbers: kind -> [numbers of CallSegment, L, L + 1]. again: [L, L + 1], seconds of running the layers again.
    """

    def __init__(
        self,
        ranges: RangeBytes,
        seconds: LayerSeconds,
        split: bool,
        within: NDArray[np.bool_] | None = None,
        kinds: Collection[str] = KINDS,
    ) -> None:
        """Find the numbers of all segments of these kinds, or of those for which `within[first, end]` is true."""
        size = ranges.num_layers
        self.ranges = ranges
        self.numbers = np.zeros((len(KINDS), _COLUMNS, size, size + 1))
        self.again = np.zeros((size, size + 1))
        there = np.triu(np.ones((size, size + 1), dtype=np.bool_), k=1)
        for first, end in np.argwhere(there if within is None else there & within).tolist():
            for kind in kinds:
                one = CallSegment.of(ranges, MemoryInterval(first, end, kind), split)
                works = (size for name in _WORKS for size in getattr(one, name))
                numbers = [*(getattr(one, name) for name in _NUMBERS), *works]
                self.numbers[KINDS.index(kind), :, first, end] = numbers
            if runs_again(ranges, first, end):
                self.again[first, end] = seconds.forward[end] - seconds.forward[first]

    def kept(self, end: int) -> bool:
        """Whether the layers before a cut have a backward."""
        return end == self.ranges.num_layers or self.ranges.carries[end]

    def taken(self, kind: str) -> NDArray[np.float64]:
        """[L, L + 1]: bytes of a segment of this kind that go to the host tier."""
        found: NDArray[np.float64] = self.numbers[KINDS.index(kind), _NUMBERS.index("taken")]
        return found

    def behind(self, kind: int, firsts: NDArray[np.intp], end: int) -> CallSegment:
        """The segments of this kind from each of these layers to `end`, as one with arrays for numbers."""
        part = MemoryInterval(end - 1, end, KINDS[kind])
        found = self.numbers[kind, :, firsts, end].T
        numbers, works = found[: len(_NUMBERS)], found[len(_NUMBERS) :].reshape(len(_WORKS), -1, len(firsts))
        of_works = {name: BackwardWork(*row) for name, row in zip(_WORKS, works, strict=True)}
        return CallSegment(part, self.kept(end), **dict(zip(_NUMBERS, numbers, strict=True)), **of_works)


class Columns(NamedTuple):
    """[N], or [2, N], of all states; see `States`."""

    keeps: NDArray[np.bool_]
    beside: NDArray[np.float64]
    outputs: NDArray[np.float64]
    family: NDArray[np.intp]


class States:
    """The states that choices may be in, numbered over all cuts.

    Attributes:
        cut: of each. before: of one of the choices in it. keeps: whether its last segment is of kind KEEP.
        beside: what these choices hold or give away of a next segment's inputs. outputs: the part of it on the device
            that is the last segment's outputs, which matters for the next segment only.
        family: states with one number differ in `keeps` and `outputs` alone.

    later: what calls give away counts, since all of it leaves together.
    """

    def __init__(self, ranges: RangeBytes, later: bool) -> None:
        self._ranges, self._later = ranges, later
        self._families: dict[tuple[int, int, Beside], int] = {}
        self._numbers: dict[tuple[int, bool, Beside, Beside], int] = {}
        self._behind: dict[tuple[int, int, int, int], int] = {}
        self._pairs: dict[tuple[MemoryInterval | None, MemoryInterval | None], int] = {}
        self._passing: list[int] = []
        """Of each state the number of the segments whose inputs may pass."""
        self.cut: list[int] = []
        self.before: list[Before] = []
        self.keeps: list[bool] = []
        self.beside: list[Beside] = []
        self.outputs: list[int] = []
        self.family: list[int] = []
        self._columns: Columns | None = None

    def columns(self) -> Columns:
        """All that the search reads of the states so far."""
        if self._columns is None or len(self._columns.keeps) < len(self.cut):
            self._columns = Columns(
                np.array(self.keeps, dtype=np.bool_),
                np.array(self.beside, dtype=np.float64).T,
                np.array(self.outputs, dtype=np.float64),
                np.array(self.family, dtype=np.intp),
            )
        return self._columns

    def number(self, cut: int, before: Before, keeps: bool) -> int:
        """Of the state in which choices are before a cut."""
        # Tensors that pass both of two cuts: the further these are apart, the fewer they are. So the same bytes at this
        # cut are the same tensors at this and all later ones.
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
        """The state behind one more segment."""
        # what the last segment so far is no longer matters then, unless frozen layers follow it
        key = (self.cut[state], self._passing[state], kind, end) if kept else (state, -1, kind, end)
        if key not in self._behind:
            part = MemoryInterval(self.cut[state], end, KINDS[kind])
            self._behind[key] = self.number(end, self.before[state].behind(part, kept), KINDS[kind] == KEEP)
        return self._behind[key]
