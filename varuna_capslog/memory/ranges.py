"""The ranges of layers that can be a stage within some bytes, and their bytes at every place of a pipeline.

These are values of `StageCosts.matrix`, for searches that need them at a hundred places of a pipeline: of a thousand
layers few ranges are short enough to matter, and only those are computed. `planners.exact` reads them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from varuna_capslog.memory.costs import Bytes, StageCosts
from varuna_capslog.memory.inflight import InflightCosts, waiting

__all__ = ["Ranges", "ranges_within"]

_Parts = Sequence[tuple[Sequence[int], Bytes]]


@dataclass(frozen=True)
class Ranges:
    """N ranges of layers in rising order of (first, end), and what their bytes are made of.

    firsts, ends: [N]; layers first .. end-1.
    alone: [N]; the bytes that do not depend on the stage.
    parts: for each part that does, how often it counts at every stage, and its bytes [N].
    """

    num_layers: int
    firsts: NDArray[np.int64]
    ends: NDArray[np.int64]
    alone: Bytes
    parts: _Parts

    def bytes(self, stage: int, chosen: slice) -> Bytes:
        """Return the bytes of some of the ranges as this stage; do not write to them."""
        sizes = self.alone[chosen]
        for counts, part in self.parts:
            if counts[stage]:
                sizes = sizes + counts[stage] * part[chosen]
        return sizes

    def within(self, most: int, stages: int) -> Ranges:
        """Return, perhaps with others, the ranges of at most `most` bytes as one of the first `stages` stages."""
        kept = (_least(self.alone, self.parts, stages) <= most).nonzero()[0]
        alone, parts = _chosen(self.alone, self.parts, kept)
        return replace(self, firsts=self.firsts[kept], ends=self.ends[kept], alone=alone, parts=parts)


@dataclass(frozen=True)
class _Asked(Ranges):
    """Ranges whose bytes follow no rule: they are computed at every place."""

    costs: StageCosts
    stages: int

    def bytes(self, stage: int, chosen: slice) -> Bytes:
        return self.costs.matrix(stage, self.stages)[self.firsts[chosen], self.ends[chosen]]

    def within(self, most: int, stages: int) -> Ranges:
        return self


def ranges_within(costs: StageCosts, stages: int, most: int) -> Ranges:
    """Return, perhaps with others, every range that takes at most `most` bytes as some stage of `stages`."""
    num_layers = costs.num_layers
    if isinstance(costs, InflightCosts):
        counts = np.array(waiting(costs.run, stages, costs.one_memory)).T.tolist()
        parts = [(count, part) for count, part in zip(counts, costs.parts, strict=True) if any(count)]
        alone = costs.alone
    elif costs.position_free:
        alone, parts = costs.matrix(), []
    else:
        firsts, ends = np.triu_indices(num_layers)
        return _Asked(num_layers, firsts, ends + 1, ends, (), costs, stages)
    # flat: one number per range, which is gathered faster than two
    alone, parts = alone.ravel(), [(count, part.ravel()) for count, part in parts]
    kept = (_least(alone, parts, stages) <= most).nonzero()[0]
    firsts = kept // (num_layers + 1)
    return Ranges(num_layers, firsts, kept - firsts * (num_layers + 1), *_chosen(alone, parts, kept))


def _least(alone: Bytes, parts: _Parts, stages: int) -> Bytes:
    """No range takes less as one of the first `stages` stages."""
    least = alone
    for counts, part in parts:
        low, high = min(counts[:stages]), max(counts[:stages])
        if low or part.min(initial=0) < 0:
            least = least + np.minimum(low * part, high * part)
    return least


def _chosen(alone: Bytes, parts: _Parts, kept: NDArray[np.int64]) -> tuple[Bytes, _Parts]:
    return alone[kept], [(counts, part[kept]) for counts, part in parts]
