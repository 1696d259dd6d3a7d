"""Equal ranges of layers: where a chain repeats itself, the search copies the choices of an earlier range.

Labels for layers first .. cut-1 depend only on the numbers of the segments of these layers. Where the layers `distance`
earlier have equal numbers, the search copies their labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from varuna_capslog.planners.intervals.partial_choices import PartialChoices
from varuna_capslog.planners.intervals.tables import States

__all__ = ["Copies", "EqualRanges"]

_SAME_SECONDS = 1e-12
"""Differences of running sums up to this share of the whole chain's seconds are rounding."""


@dataclass(frozen=True)
class EqualRanges:
    """For each first layer g, [L]: the ranges g .. cut-1 with cut <= until[g] equal the ranges `distance[g]` layers
    earlier; distance 0: there are no equal ranges.
    """

    distance: NDArray[np.intp]
    until: NDArray[np.intp]

    @classmethod
    def of(
        cls,
        numbers: NDArray[np.float64],
        seconds: NDArray[np.float64],
        at_cuts: NDArray[np.float64],
        firsts: NDArray[np.bool_],
    ) -> EqualRanges:
        """Compare the ranges of each first layer with earlier ranges; the longest match counts, then the nearest.

        Equal ranges have equal `numbers`, [C, L, L + 1] of every segment, to the last bit; equal `seconds`,
        [D, L, L + 1], but for rounding; and equal `at_cuts`, [E, L + 1] of every cut, before and behind each layer.
        firsts: [L], True for the first layers that are searched. O(C L^3).
        """
        size = numbers.shape[1]
        distance, until = np.zeros((2, size), dtype=np.intp)
        tolerance = _SAME_SECONDS * max(1e-300, float(np.abs(seconds).max(initial=0.0)))
        order = np.arange(size + 1)
        for by in range(1, size):
            count = size - by
            # single layers first, which is fast: at most distances no layer equals another layer
            earlier, later = (numbers[:, order[at : at + count], order[at + 1 : at + count + 1]] for at in (0, by))
            layers_equal = (earlier == later).all(axis=0)
            if not (layers_equal & firsts[:count] & firsts[by:]).any():
                continue
            cuts = (at_cuts[:, : count + 1] == at_cuts[:, by:]).all(axis=0)
            same = (numbers[:, :count, : count + 1] == numbers[:, by:, by:]).all(axis=0) & cuts
            same &= (np.abs(seconds[:, :count, : count + 1] - seconds[:, by:, by:]) <= tolerance).all(axis=0)
            differs = ~same & (order[: count + 1] > order[:count, None])
            # the last end before a segment from each layer differs; then the least of these from each first layer on
            ends = np.where(differs.any(axis=1), differs.argmax(axis=1), count + 1) - 1
            reach = np.minimum.accumulate(ends[::-1])[::-1] + by
            longer = firsts[:count] & firsts[by:] & cuts[:count] & (reach > order[by:size]) & (reach > until[by:])
            distance[by:][longer], until[by:][longer] = by, reach[longer]
        return cls(distance, until)


class Copies:
    """Copies the labels of equal ranges. The search must `note` the labels of every cut, in order.

    states: of all labels. steps, in the methods: those of `Thinning`, copied with the labels.
    """

    def __init__(self, equal: EqualRanges, states: States) -> None:
        self._equal, self._states = equal, states
        self._begins: list[NDArray[np.intp]] = []
        """For each cut, the index of the first label of each first layer."""
        self._steps: list[NDArray[np.float64]] = []

    def note(self, labels: PartialChoices, steps: NDArray[np.float64]) -> None:
        """Record the labels at the next cut."""
        self._begins.append(np.searchsorted(labels.first, np.arange(len(steps))))
        self._steps.append(steps.copy())

    def up_to(
        self, cut: int, steps: NDArray[np.float64], lists: Sequence[Sequence[PartialChoices]]
    ) -> tuple[list[list[PartialChoices]], NDArray[np.bool_]]:
        """Return, for each of `lists`, the labels of first layers whose range up to the cut equals an earlier range;
        and [L], True for the other first layers. lists: labels at each earlier cut, sorted by first layer; an empty
        list has no copies. `parent` indexes labels of the first list.
        """
        equal = self._equal
        copies = (equal.distance > 0) & (np.arange(len(steps)) < cut) & (cut <= equal.until)
        copied: list[list[PartialChoices]] = [[] for _ in lists]
        for by in np.unique(equal.distance[copies]).tolist():
            chosen = copies & (equal.distance == by)
            earlier = np.append(chosen, np.zeros(by, dtype=np.bool_))[by:]
            sources = [labels[cut - by] for labels in lists if labels]
            sources = [labels[earlier[labels.first]] for labels in sources]
            before = np.unique(np.concatenate([labels.state for labels in sources])).tolist()
            moved = [self._states.moved(state, by) for state in before]
            states = [state for state in moved if state is not None]
            if len(states) < len(moved):  # the tensors that pass by all these layers differ
                equal.until[chosen], copies[chosen] = cut - 1, False
                continue
            steps[chosen] = self._steps[cut - by][np.flatnonzero(chosen) - by]
            later = np.zeros(1 + max(before, default=0), dtype=np.intp)
            later[before] = states
            for labels, some in zip(sources, copied, strict=False):
                some.append(self._moved(labels, by, later))
        return copied, ~copies

    def _moved(self, labels: PartialChoices, by: int, states: NDArray[np.intp]) -> PartialChoices:
        """Return the labels of the equal range `by` layers later. states: earlier state -> later state."""
        first, state, phase, source, parent, kind = labels.whole
        begins = np.array(self._begins)
        parent = parent - begins[source, first] + begins[source + by, first + by]
        columns = first + by, states[state], phase, source + by, parent, kind
        return PartialChoices(np.array(columns), labels.numbers, labels.names)
