"""Many choices of intervals for ranges of layers, side by side in arrays; which of them a search may leave out.

A choice is left out where another one is as good in everything that counts (`undominated`), or, where there are too
many, where another one is nearly as good (`thinned`). The latter then also stands for the former: beside its own
numbers it has lower ones, which no choice that it stands for is below. Behind the same segments, sums of lower numbers
stay lower. So the search knows how much it may have missed.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from varuna_capslog.memory.segments import Sums

__all__ = ["ON_DEVICE", "Kin", "Labels", "Thinning", "fewer", "joined", "undominated"]

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

    first: its first layer. state, phase: before the next segment, see `fronts`.
    source, parent: the cut before its last segment, and which of the labels there is the rest of it; kind: of the last
        segment. No last segment: -1.
    again: [V, N], seconds of forwards that run again. sums: [V, N] each, of its segments.
    V is 1, or 2 where labels are thinned: its own numbers, and the lower ones.
    """

    first: Numbers
    state: Numbers
    phase: Numbers
    source: Numbers
    parent: Numbers
    kind: Numbers
    again: Floats
    sums: Sums

    def __len__(self) -> int:
        return len(self.first)

    def __getitem__(self, chosen: Any) -> Labels:
        """Some of them."""
        own: dict[str, Any] = {name: getattr(self, name)[..., chosen] for name in _OWN}
        return Labels(**own, sums=Sums(*(column[..., chosen] for column in self.sums)))


_OWN = [field.name for field in fields(Labels) if field.name != "sums"]


def joined(some: list[Labels]) -> Labels:
    """All of them, in this order."""
    own: dict[str, Any] = {name: np.concatenate([getattr(one, name) for one in some], axis=-1) for name in _OWN}
    columns = zip(*(one.sums for one in some), strict=True)
    return Labels(**own, sums=Sums(*(np.concatenate(column, axis=-1) for column in columns)))


def undominated(points: Floats, before: Floats | None = None) -> tuple[Numbers, Numbers]:
    """The points [N, D] for which no other is as small or smaller in every coordinate; of equal ones the first.

    before: [B, D], more points that may be smaller, which are not looked for.

    Returns their numbers, rising, and for each point the one that is smaller: a number of `before`, or B + the place of
    a found one. What was found is so itself.
    """
    own = np.empty((0, points.shape[1])) if before is None else before
    if len(points) == 1:  # a quarter of all calls
        smaller = (own <= points).all(axis=1)
        one = int(smaller.argmax()) if smaller.any() else len(own)
        return np.arange(int(one == len(own))), np.array([one])
    order = np.lexsort(points.T[::-1])
    ordered, kept, size = points[order], [own], len(own)
    stands, found = np.full(len(points), -1), [np.empty(0, dtype=np.intp)]
    for begin in range(0, len(ordered), _BLOCK):
        block, numbers = ordered[begin : begin + _BLOCK], order[begin : begin + _BLOCK]
        done = 0
        for some in kept:
            for part in range(0, len(some), 4 * _BLOCK):
                if len(block):
                    smaller = _as_small(some[part : part + 4 * _BLOCK], block)
                    which = smaller.argmax(axis=1)
                    beaten = smaller[np.arange(len(block)), which]
                    stands[numbers[beaten]] = done + part + which[beaten]
                    block, numbers = block[~beaten], numbers[~beaten]
            done += len(some)
        if not len(block):
            continue
        # a point is only beaten by those before it in this order
        smaller = _as_small(block, block) & np.tri(len(block), k=-1, dtype=np.bool_)
        free: NDArray[np.bool_] = ~np.any(smaller, axis=1)
        places = size + np.cumsum(free) - 1
        stands[numbers] = np.where(free, places, places[(smaller & free[None]).argmax(axis=1)])
        size += int(free.sum())
        kept.append(block[free])
        found.append(numbers[free])
    numbers = np.concatenate(found)
    rising = np.argsort(numbers)
    rank = np.empty(len(own) + len(numbers), dtype=np.intp)
    rank[: len(own)] = np.arange(len(own))
    rank[len(own) + rising] = len(own) + np.arange(len(numbers))
    return numbers[rising], rank[stands]


def _as_small(some: Floats, points: Floats) -> NDArray[np.bool_]:
    """[points, some]: whether the latter is as small or smaller in every coordinate."""
    found = some[:, 0] <= points[:, :1]
    for column in range(1, points.shape[1]):
        found &= some[:, column] <= points[:, column : column + 1]
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

    def parts(self, some: Numbers) -> list[Numbers]:
        """Some labels in parts that are alike in all this, before each part all that may stand for it."""
        columns = self.phase[some], self.outputs[some], self.keeps[some], self.family[some]
        order = np.lexsort(columns)
        changes = np.any([np.diff(column[order]) != 0 for column in columns], axis=0)
        return np.split(some[order], np.flatnonzero(changes) + 1)

    def may_stand(self, one: int, other: int) -> bool:
        """Whether the label `one` may stand for the other."""
        return bool(
            self.family[one] == self.family[other]
            and self.keeps[one] <= self.keeps[other]
            and self.outputs[one] in (0.0, self.outputs[other])
            and self.phase[one] in (0, self.phase[other])
        )


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
        for number, part in enumerate(parts):
            left, layer = part[stands[part] == part], int(of_first[number])
            behind = np.arange(len(first))
            width: Floats | None
            while True:
                width = span[number] * self.steps[layer] if crowded[number] else None
                kept, behind[left] = self._undominated(left, width)
                stands[part] = behind[stands[part]]
                if len(kept) <= self.most or self.steps[layer] >= 1.0 or not crowded[number]:
                    break
                self.steps[layer] *= 2.0
                left = kept
            if crowded[number]:
                self.steps[layer] /= 2.0 if 2 * len(kept) < self.most else 1.0
                least = part[np.argmin(self.points[part] @ self.extremes.T, axis=0)]
                stands[least] = least
        return stands

    def _first_of_box(self, order: Numbers, row: Numbers, boxes: Floats, total: Floats) -> Numbers:
        """For each place of `order` the place of the label of least total among those alike that share its box."""
        kin = self.kin
        columns = [row, *(one[order] for one in (kin.family, kin.keeps, kin.outputs, kin.phase)), *boxes.T]
        mixed = np.zeros(len(order))
        for column in columns:  # labels of one box have one number; others may have the same one by chance
            mixed = (mixed * 0.6180339887 + column) * 0.7548776662 % 1e6
        by_box = np.lexsort((total, mixed))
        changes = np.any([np.diff(column[by_box], prepend=np.nan) != 0 for column in map(np.asarray, columns)], axis=0)
        found = np.empty(len(order), dtype=np.intp)
        found[by_box] = by_box[np.maximum.accumulate(np.where(changes, np.arange(len(order)), 0))]
        return found

    def _undominated(self, some: Numbers, width: Floats | None) -> tuple[Numbers, Numbers]:
        """Those of some labels that no other one stands for, and for each the one that does."""
        done: list[tuple[Numbers, Floats]] = []
        other = np.empty(len(some), dtype=np.intp)
        place = {int(label): number for number, label in enumerate(some)}
        for part in self.kin.parts(some):
            own = self.points[part]
            if width is not None:
                best = np.argsort((own / width).sum(axis=1), kind="stable")
                part, own = part[best], np.floor(own[best] / width)
            better = [one for one in done if self.kin.may_stand(int(one[0][0]), int(part[0]))]
            kept, which = undominated(own, np.concatenate([theirs for _, theirs in better]) if better else None)
            if len(kept):
                done.append((part[kept], own[kept]))
            other[[place[label] for label in part.tolist()]] = np.concatenate(
                [*(numbers for numbers, _ in better), part[kept]]
            )[which]
        return np.concatenate([numbers for numbers, _ in done]), other


def fewer(labels: Labels, stands: Numbers, kin: Kin) -> Labels:
    """The labels that stand for themselves, by their first layers, with the lower numbers of those they stand for."""
    kept = np.flatnonzero(stands == np.arange(len(labels)))
    kept = kept[np.argsort(labels.first[kept], kind="stable")]
    found = labels[kept]
    if len(labels.again) == 1:
        return found
    place = np.zeros(len(labels), dtype=np.intp)
    place[kept] = np.arange(len(kept))
    by_place = np.argsort(place[stands], kind="stable")
    borders = np.flatnonzero(np.diff(place[stands[by_place]], prepend=-1))
    less = np.where((kin.keeps != kin.keeps[stands]) | (kin.outputs != kin.outputs[stands]), kin.outputs, 0.0)

    def both(column: Floats, on_device: bool) -> Floats:
        lower = column[1] - less if on_device else column[1]
        return np.stack([column[0, kept], np.minimum.reduceat(lower[by_place], borders)])

    sums = {name: both(column, name in ON_DEVICE) for name, column in labels.sums._asdict().items()}
    return replace(found, again=both(labels.again, False), sums=Sums(**sums))
