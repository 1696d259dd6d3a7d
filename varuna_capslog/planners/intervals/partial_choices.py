"""Choices of intervals for ranges of layers, as arrays; dominance and thinning drop some of them during the search.

A choice is dropped where another is as good in every number (`undominated`), or, where there are too many, nearly as
good (`Thinning`). The kept choice then stands for the dropped one: it also has lower bounds of the numbers of all
choices for which it stands. Lower sums stay lower when the same segments are added, so these bounds hold to the end.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from varuna_capslog.memory.segments import Sums

__all__ = [
    "ON_DEVICE",
    "WHOLE",
    "Dominance",
    "Finished",
    "PartialChoices",
    "Thinning",
    "by_first",
    "fewer",
    "joined",
    "undominated",
]


Floats = NDArray[np.float64]
Numbers = NDArray[np.intp]
ON_DEVICE = ("waits", "held", "back", "again")
"""Members of `Sums` from which the next segment subtracts those of its inputs that earlier segments hold."""
_COARSER_SECONDS = 4.0
"""Factor by which `Thinning` rounds seconds more coarsely than bytes, since a few bytes too many make a choice useless.
"""
_BLOCK = 256
"""Points that are compared with one another at a time."""


@dataclass(frozen=True)
class PartialChoices:
    """N labels, each a choice for the layers from some first layer up to the same cut. whole: [6, N], integers by the
    names of `WHOLE`: the first layer; the state and phase before the next segment (`interval_search`); the cut before
    the last segment, the index of the label there that it extends, and its kind: -1 without a segment.
    numbers: [1 + C, V, N], seconds of recomputed forwards, and the sums `names` of the segments. V is 1, or 2 where
    labels are thinned: the label's numbers, and their lower bounds. names: the counted members of `Sums`; others are 0.
    """

    whole: Numbers
    numbers: Floats
    names: tuple[str, ...]

    def __len__(self) -> int:
        return self.whole.shape[1]

    def __getitem__(self, chosen: Any) -> PartialChoices:
        """Return the chosen labels."""
        return PartialChoices(self.whole[:, chosen], self.numbers[..., chosen], self.names)

    @property
    def first(self) -> Numbers:
        """First layer of each label, [N]."""
        return self.whole[0]

    @property
    def state(self) -> Numbers:
        """State before the next segment, [N]."""
        return self.whole[1]

    @property
    def phase(self) -> Numbers:
        """Phase before the next segment, [N]."""
        return self.whole[2]

    @property
    def again(self) -> Floats:
        """Seconds of recomputed forwards, [V, N]."""
        return self.numbers[0]

    @property
    def sums(self) -> Sums:
        """Sums of the segments, [V, N] each."""
        return Sums(**dict(zip(self.names, self.numbers[1:], strict=True)))


WHOLE = ("first", "state", "phase", "source", "parent", "kind")
"""The rows of `PartialChoices.whole`."""


def joined(some: Sequence[PartialChoices]) -> PartialChoices:
    """Concatenate labels in this order."""
    if len(some) == 1:
        return some[0]
    integers = np.concatenate([labels.whole for labels in some], axis=-1)
    return PartialChoices(integers, np.concatenate([labels.numbers for labels in some], axis=-1), some[0].names)


def by_first(some: Sequence[PartialChoices]) -> PartialChoices:
    """Concatenate labels, sorted by first layer; labels of the same first layer stay in this order."""
    labels = joined(some)
    return labels[np.argsort(labels.first, kind="stable")] if len(some) > 1 else labels


def undominated(points: Floats, classes: Numbers, may: NDArray[np.bool_]) -> Numbers:
    """Return for each of the points [N, D] the index of the point that stands for it: the point itself, or an
    undominated point that is at most as large in every coordinate and whose class may stand for its class. If points
    may stand for each other, the first does. classes: [N], class number of each point. may: [K, K], True where
    points of the first class may stand for points of the second, and on the diagonal; transitive. A class comes
    behind all classes that may stand for it (`Dominance.classes`).
    """
    order = np.lexsort((classes, *points.T[::-1]))  # a point is dominated only by points before it
    columns, classes = np.ascontiguousarray(points[order].T), classes[order]

    def as_small(some: Numbers, others: Numbers) -> NDArray[np.bool_]:
        """Return [others, some]: True where a point of `some` may stand for one of `others`."""
        may_stand: NDArray[np.bool_] = may.T[classes[others][:, None], classes[some]]
        for column in columns[1:]:  # in the first column, all points before are at most as large
            may_stand &= column[some] <= column[others][:, None]
        return may_stand

    stands, kept = np.empty(len(order), dtype=np.intp), list[Numbers]()
    for begin in range(0, len(order), _BLOCK):
        block = np.arange(begin, min(begin + _BLOCK, len(order)))
        for some in kept:
            smaller = as_small(some, block)
            which = smaller.argmax(axis=1)
            beaten = smaller[np.arange(len(block)), which]
            stands[block[beaten]] = some[which[beaten]]
            block = block[~beaten]
        smaller = as_small(block, block) & np.tri(len(block), k=-1, dtype=np.bool_)
        free = ~smaller.any(axis=1)
        if len(block):
            stands[block] = np.where(free, block, block[(smaller & free).argmax(axis=1)])
            kept.append(block[free])
    stand_ins = np.empty_like(order)
    stand_ins[order] = order[stands]
    return stand_ins


@dataclass(frozen=True)
class Dominance:
    """Dominance between N labels of different states. Label y may stand for x where (1) they are of one family, (2) x
    keeps or y does not, (3) their outputs are equal or y has none, and (4) their phases are equal or y's is 0. Then any
    segment that may follow x may follow y, and adds at most the outputs of x more to y's device bytes than to x's.
    """

    family: Numbers
    keeps: NDArray[np.bool_]
    outputs: Floats
    phase: Numbers

    @cached_property
    def classes(self) -> tuple[Numbers, NDArray[np.bool_]]:
        """Class of each label [N] (labels equal in all columns), and the relation `may` [K, K] of `undominated`."""
        columns = self.phase, self.outputs, self.keeps, self.family
        order = np.lexsort(columns)
        changes = np.any([np.diff(column[order]) != 0 for column in columns], axis=0)
        begins, numbers = np.flatnonzero(np.concatenate([[True], changes])), np.empty(len(order), dtype=np.intp)
        numbers[order] = np.concatenate([[0], np.cumsum(changes)])
        phase, outputs, keeps, family = (column[order[begins]] for column in columns)
        may = (family[:, None] == family) & (keeps[:, None] <= keeps)
        may &= (outputs[:, None] == 0) | (outputs[:, None] == outputs)
        return numbers, may & ((phase[:, None] == 0) | (phase[:, None] == phase))


@dataclass(frozen=True)
class Thinning:
    """Drops labels, for each first layer separately. points: [N, D], coordinates of each label: seconds, then bytes;
    device bytes less those of the label's outputs. extremes: [E, D], weights of sums of these coordinates; the label
    with the least sum is always kept. most: labels kept per first layer, beside these; 0: any number. steps: [L], by
    first layer: fraction of a coordinate's span within which labels count as equal; updated in place for the next cut.
    """

    points: Floats
    extremes: Floats
    dominance: Dominance
    most: int
    steps: Floats

    def stand_ins(self, first: Numbers) -> Numbers:
        """Return for each label the index of the label that stands for it, which may be its own."""
        order = np.argsort(first, kind="stable")
        begins = np.flatnonzero(np.diff(first[order], prepend=-1))
        stands, of_first = np.arange(len(first)), first[order[begins]]
        parts = np.split(order, begins[1:])
        crowded = np.array([len(part) > 2 * self.most for part in parts]) & (self.most > 0)
        if crowded.any():
            sorted_points, row = self.points[order], np.repeat(np.arange(len(parts)), list(map(len, parts)))
            low, high = (best.reduceat(sorted_points, begins) for best in (np.minimum, np.maximum))
            span = np.where(high > low, high - low, 1.0)
            steps = np.where(crowded, self.steps[of_first], 0.0)
            span[:, 0] *= _COARSER_SECONDS
            scaled = sorted_points / (span * np.where(crowded, steps, 1.0)[:, None])[row]
            boxes = np.where(crowded[row, None], np.floor(scaled), sorted_points)
            stands[order] = order[self._first_of_box(order, row, boxes, _totals(scaled))]
        behind, (classes, may) = np.arange(len(first)), self.dominance.classes
        for number, part in enumerate(parts):
            remaining, layer = part[stands[part] == part], int(of_first[number])
            while True:
                points = self.points[remaining]
                if crowded[number]:
                    points = points / (span[number] * self.steps[layer])
                    best = np.argsort(_totals(points), kind="stable")
                    remaining, points = remaining[best], np.floor(points[best])
                by = undominated(points, classes[remaining], may)
                behind[remaining] = remaining[by]
                stands[part] = behind[stands[part]]
                remaining = remaining[by == np.arange(len(by))]
                if len(remaining) <= self.most or self.steps[layer] >= 1.0 or not crowded[number]:
                    break
                self.steps[layer] *= 2.0
            if crowded[number]:
                self.steps[layer] /= 2.0 if 2 * len(remaining) < self.most else 1.0
                least = part[np.argmin(self.points[part] @ self.extremes.T, axis=0)]
                stands[least] = least
        return stands

    def _first_of_box(self, order: Numbers, row: Numbers, boxes: Floats, total: Floats) -> Numbers:
        """Return for each place of `order` the place of the label with the least total in the same box and class."""
        columns = [row, self.dominance.classes[0][order], *boxes.T]
        mixed = np.zeros(len(order))
        for column in columns:  # labels of one box have equal numbers; others collide only by chance
            mixed = (mixed * 0.6180339887 + column) * 0.7548776662 % 1e6
        by_box = np.lexsort((total, mixed))
        changes = np.any([np.diff(column[by_box], prepend=np.nan) != 0 for column in map(np.asarray, columns)], axis=0)
        firsts = np.empty(len(order), dtype=np.intp)
        firsts[by_box] = by_box[np.maximum.accumulate(np.where(changes, np.arange(len(order)), 0))]
        return firsts


def _totals(points: Floats) -> Floats:
    """Return the sum of each point's coordinates, column by column, which takes a third of the time of `np.sum`."""
    return functools.reduce(np.add, points.T)


def fewer(labels: PartialChoices, stands: Numbers, dominance: Dominance) -> PartialChoices:
    """Return the labels that stand for themselves, sorted by first layer, with lower bounds of all they stand for."""
    kept = np.flatnonzero(stands == np.arange(len(labels)))
    kept = kept[np.argsort(labels.first[kept], kind="stable")]
    thinned = labels[kept]
    if labels.numbers.shape[1] == 1:
        return thinned
    place = np.zeros(len(labels), dtype=np.intp)
    place[kept] = np.arange(len(kept))
    by_place = np.argsort(place[stands], kind="stable")
    borders = np.flatnonzero(np.diff(place[stands[by_place]], prepend=-1))
    other_keeps = dominance.keeps != dominance.keeps[stands]
    other_outputs = dominance.outputs != dominance.outputs[stands]
    less = np.where(other_keeps | other_outputs, dominance.outputs, 0.0)
    on_device = np.array([False, *(name in ON_DEVICE for name in labels.names)])
    lower = (labels.numbers[:, 1] - on_device[:, None] * less)[:, by_place]
    thinned.numbers[:, 1] = np.minimum.reduceat(lower, borders, axis=-1)
    return thinned


# -- The finished choices of all ranges of layers in one array, so that a question about all ranges is one pass.


@dataclass(frozen=True)
class Finished:
    """All finished choices, sorted by end, then by first layer. num_layers: L. labels: N choices. ends: [N], the cut at
    which each choice ends. first, end: [R], of each range that has a choice. begins: [R], index of the range's first
    choice. places: slice of the choices of each range.
    """

    num_layers: int
    labels: PartialChoices
    ends: Numbers
    first: Numbers
    end: Numbers
    begins: Numbers
    places: dict[tuple[int, int], slice]

    @classmethod
    def of(cls, by_end: Sequence[PartialChoices]) -> Finished:
        """Make the array of `by_end`: for each cut the choices that end there, sorted by first layer."""
        labels, size = joined(by_end), len(by_end)
        ends = np.repeat(np.arange(size), [len(choices) for choices in by_end])
        begins = np.flatnonzero(np.diff(ends * size + labels.first, prepend=-1))
        first, end = labels.first[begins], ends[begins]
        borders = itertools.pairwise([*begins.tolist(), len(labels)])
        keys = zip(first.tolist(), end.tolist(), strict=True)
        places = dict(zip(keys, itertools.starmap(slice, borders), strict=True))
        return cls(size - 1, labels, ends, first, end, begins, places)

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """First layer and end of each range that has a choice."""
        return list(self.places)

    def least(self, numbers: Floats) -> Floats:
        """Return [V, L, L + 1]: the least of `numbers` [V, N] over the choices of each range; infinite without any."""
        least = np.full((len(numbers), self.num_layers, self.num_layers + 1), np.inf)
        if len(self.labels):
            least[:, self.first, self.end] = np.minimum.reduceat(numbers, self.begins, axis=1)
        return least
