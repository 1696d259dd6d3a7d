"""The finished choices of all ranges of layers in one array, so that a question about all ranges is one pass."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from varuna_capslog.planners.intervals.labels import Labels, joined

__all__ = ["Finished"]

Floats = NDArray[np.float64]
Numbers = NDArray[np.intp]


@dataclass(frozen=True)
class Finished:
    """All finished choices, sorted by their ends, then by their first layers.

    num_layers: L. labels: N choices. ends: [N], the cut at which each ends.
    first, end: [R], of each range that has a choice. begins: [R], index of its first choice. places: slice of the
        choices of each range.
    """

    num_layers: int
    labels: Labels
    ends: Numbers
    first: Numbers
    end: Numbers
    begins: Numbers
    places: dict[tuple[int, int], slice]

    @classmethod
    def of(cls, by_end: Sequence[Labels]) -> Finished:
        """Make the array of `by_end`: for each cut the choices that end there, by their first layers."""
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
