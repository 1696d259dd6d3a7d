"""Many choices of intervals for ranges of layers, side by side in arrays; which of them a search may leave out.

A choice is left out where another one is as good in everything that counts (`undominated`), or, where there are too
many, where another one is nearly as good (`thinned`). The latter then also stands for the former: beside its own
numbers it has lower ones, which no choice that it stands for is below. Behind the same segments, sums of lower numbers
stay lower. So the search knows how much it may have missed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from varuna_capslog.memory.segments import Sums

__all__ = ["ON_DEVICE", "WHOLE", "Kin", "Labels", "Thinning", "fewer", "joined", "undominated"]

Floats = NDArray[np.float64]
Numbers = NDArray[np.intp]
ON_DEVICE = ("waits", "held", "back", "again")
"""Those of `Sums` from which the next segment takes away what it finds there of its inputs."""
_COARSER_SECONDS = 4.0
"""How much coarser seconds are told apart than bytes: a few bytes too many, and a choice does not fit at all."""
_BLOCK = 256
"""Points that are compared with one another at a time."""


@dataclass(frozen=True)
class Labels:
    """One entry per choice for the layers from a first one up to one cut.

    whole: [6, N], whole numbers by the names of `WHOLE`: its first layer; its state and phase before the next segment,
        see `fronts`; the cut before its last segment (source), and which of the labels there is the rest of it
        (parent); the kind of the last segment. No last segment: -1.
    numbers: [1 + C, V, N], seconds of forwards that run again, and of its segments the sums `names`.
    names: those of `Sums` that the search counts; the others are 0.
    V is 1, or 2 where labels are thinned: its own numbers, and the lower ones.
    """

    whole: Numbers
    numbers: Floats
    names: tuple[str, ...]

    def __len__(self) -> int:
        return self.whole.shape[1]

    def __getitem__(self, chosen: Any) -> Labels:
        """Some of them."""
        return Labels(self.whole[:, chosen], self.numbers[..., chosen], self.names)

    @property
    def first(self) -> Numbers:
        """[N], the first layer of each."""
        return self.whole[0]

    @property
    def state(self) -> Numbers:
        """[N], before the next segment."""
        return self.whole[1]

    @property
    def phase(self) -> Numbers:
        """[N], before the next segment."""
        return self.whole[2]

    @property
    def again(self) -> Floats:
        """[V, N], seconds of forwards that run again."""
        return self.numbers[0]

    @property
    def sums(self) -> Sums:
        """[V, N] each."""
        return Sums(**dict(zip(self.names, self.numbers[1:], strict=True)))


WHOLE = ("first", "state", "phase", "source", "parent", "kind")
"""The rows of `Labels.whole`."""


def joined(some: Sequence[Labels]) -> Labels:
    """All of them, in this order."""
    if len(some) == 1:
        return some[0]
    whole = np.concatenate([one.whole for one in some], axis=-1)
    return Labels(whole, np.concatenate([one.numbers for one in some], axis=-1), some[0].names)


def undominated(points: Floats, kin: Numbers, may: NDArray[np.bool_]) -> Numbers:
    """For each of the points [N, D] one that stands for it: itself, or one that is as small or smaller in every
    coordinate, of a class that may stand for its own, and for which no other one stands. Of points that may stand for
    each other it is the first.

    kin: [N], of each point the number of its class. may: [K, K], whether points of one class may stand for those of
    another, themselves included; a class comes behind all that may stand for it, and these include all that may stand
    for one of them (`Kin.classes`).
    """
    order = np.lexsort((kin, *points.T[::-1]))  # a point is only beaten by those before it
    columns, kin = np.ascontiguousarray(points[order].T), kin[order]

    def as_small(some: Numbers, others: Numbers) -> NDArray[np.bool_]:
        """[others, some]: whether the latter may stand for the former."""
        found: NDArray[np.bool_] = may.T[kin[others][:, None], kin[some]]
        for column in columns:
            found &= column[some] <= column[others][:, None]
        return found

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
    found = np.empty_like(order)
    found[order] = order[stands]
    return found


@dataclass(frozen=True)
class Kin:
    """Which labels may stand for which: y for x where they are of one family, x keeps or y does not, their outputs are
    as many or y has none, and their phases are the same or y's is 0.

    What may follow x may then follow y, and adds to the bytes on the device at most x's outputs less than to y's.

    family, keeps, outputs, phase: [N].
    """

    family: Numbers
    keeps: NDArray[np.bool_]
    outputs: Floats
    phase: Numbers

    @cached_property
    def classes(self) -> tuple[Numbers, NDArray[np.bool_]]:
        """[N], the number of each label's class, which has those that are alike in all this; and [K, K], whether labels
        of one class may stand for those of another. A class comes behind all others that may stand for it.
        """
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
    """Leaves out labels, of each first layer by itself.

    points: [N, D], what counts of each label: seconds, then bytes, lessened by its outputs where they are bytes on the
        device.
    extremes: [E, D], weights of sums of these numbers; the label of the least sum stays in any case.
    most: labels of one first layer, beside the extreme ones; 0: any number.
    steps: [L], by first layer: what part of the span of a number is no difference. Changed, for the next cut.
    """

    points: Floats
    extremes: Floats
    kin: Kin
    most: int
    steps: Floats

    def stand_ins(self, first: Numbers) -> Numbers:
        """For each label the one that stands for it, itself where none does."""
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
            stands[order] = order[self._first_of_box(order, row, boxes, scaled.sum(axis=1))]
        behind, (kin, may) = np.arange(len(first)), self.kin.classes
        for number, part in enumerate(parts):
            left, layer = part[stands[part] == part], int(of_first[number])
            while True:
                own = self.points[left]
                if crowded[number]:
                    own = own / (span[number] * self.steps[layer])
                    best = np.argsort(own.sum(axis=1), kind="stable")
                    left, own = left[best], np.floor(own[best])
                by = undominated(own, kin[left], may)
                behind[left] = left[by]
                stands[part] = behind[stands[part]]
                left = left[by == np.arange(len(by))]
                if len(left) <= self.most or self.steps[layer] >= 1.0 or not crowded[number]:
                    break
                self.steps[layer] *= 2.0
            if crowded[number]:
                self.steps[layer] /= 2.0 if 2 * len(left) < self.most else 1.0
                least = part[np.argmin(self.points[part] @ self.extremes.T, axis=0)]
                stands[least] = least
        return stands

    def _first_of_box(self, order: Numbers, row: Numbers, boxes: Floats, total: Floats) -> Numbers:
        """For each place of `order` the place of the label of least total among those alike that share its box."""
        columns = [row, self.kin.classes[0][order], *boxes.T]
        mixed = np.zeros(len(order))
        for column in columns:  # labels of one box have one number; others may have the same one by chance
            mixed = (mixed * 0.6180339887 + column) * 0.7548776662 % 1e6
        by_box = np.lexsort((total, mixed))
        changes = np.any([np.diff(column[by_box], prepend=np.nan) != 0 for column in map(np.asarray, columns)], axis=0)
        found = np.empty(len(order), dtype=np.intp)
        found[by_box] = by_box[np.maximum.accumulate(np.where(changes, np.arange(len(order)), 0))]
        return found


def fewer(labels: Labels, stands: Numbers, kin: Kin) -> Labels:
    """The labels that stand for themselves, by their first layers, with the lower numbers of those they stand for."""
    kept = np.flatnonzero(stands == np.arange(len(labels)))
    kept = kept[np.argsort(labels.first[kept], kind="stable")]
    found = labels[kept]
    if labels.numbers.shape[1] == 1:
        return found
    place = np.zeros(len(labels), dtype=np.intp)
    place[kept] = np.arange(len(kept))
    by_place = np.argsort(place[stands], kind="stable")
    borders = np.flatnonzero(np.diff(place[stands[by_place]], prepend=-1))
    less = np.where((kin.keeps != kin.keeps[stands]) | (kin.outputs != kin.outputs[stands]), kin.outputs, 0.0)
    on_device = np.array([False, *(name in ON_DEVICE for name in labels.names)])
    lower = (labels.numbers[:, 1] - on_device[:, None] * less)[:, by_place]
    found.numbers[:, 1] = np.minimum.reduceat(lower, borders, axis=-1)
    return found
