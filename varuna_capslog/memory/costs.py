"""What a planner asks of a memory model: the bytes of every stage that could be, for one run.

The models beside this file make `StageCosts` from a profile and a `RunShape`; planners read them. No profile is read
and nothing is searched here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = ["NEVER", "RaisedCosts", "StageCosts", "full_matrix", "peaks_of"]

NEVER = 1 << 62
"""The bytes of a stage that is not allowed. The bytes of real stages stay below a quarter of this number."""


class StageCosts(Protocol):
    """Peak bytes of layers first .. end-1 as stage `stage` of `stages`, for 0 <= first < end <= num_layers."""

    @property
    def num_layers(self) -> int:
        """L, the number of layers."""
        ...

    @property
    def position_free(self) -> bool:
        """Whether the bytes are the same for every (stage, stages)."""
        ...

    def stage_bytes(self, first: int, end: int, stage: int = 0, stages: int = 1) -> int:
        """Return the peak bytes of one stage."""
        ...

    def matrix(self, stage: int = 0, stages: int = 1) -> NDArray[np.int64]:
        """Return [L, L + 1]: entry [first, end] is `stage_bytes(first, end, stage, stages)`, NEVER where end <= first.

        The array may be shared between calls; do not write to it.
        """
        ...

    def peaks(self, cuts: Sequence[int]) -> list[int]:
        """Return the peak bytes of each stage of a cut list."""
        return peaks_of(self, cuts)


def peaks_of(costs: StageCosts, cuts: Sequence[int]) -> list[int]:
    """Return the peak bytes of each stage of a cut list (first layer of each stage, beginning with 0)."""
    places = enumerate(zip(cuts, [*cuts[1:], costs.num_layers], strict=True))
    return [costs.stage_bytes(first, end, stage, len(cuts)) for stage, (first, end) in places]


def full_matrix(costs: StageCosts, stage: int = 0, stages: int = 1) -> NDArray[np.int64]:
    """Return `costs.matrix` by asking for every stage; for costs that have no faster way. O(L^2) calls."""
    matrix = np.full((costs.num_layers, costs.num_layers + 1), NEVER, dtype=np.int64)
    for first in range(costs.num_layers):
        for end in range(first + 1, costs.num_layers + 1):
            matrix[first, end] = costs.stage_bytes(first, end, stage, stages)
    return matrix


@dataclass(frozen=True)
class RaisedCosts(StageCosts):
    """Stage costs with more bytes for every range of layers, at every place.

    more: [L, L + 1], 0 where end <= first.
    """

    costs: StageCosts
    more: NDArray[np.int64]

    @property
    def num_layers(self) -> int:
        """L, the number of layers."""
        return self.costs.num_layers

    @property
    def position_free(self) -> bool:
        """As the costs without more."""
        return self.costs.position_free

    def stage_bytes(self, first: int, end: int, stage: int = 0, stages: int = 1) -> int:
        """Return the peak bytes of one stage."""
        return self.costs.stage_bytes(first, end, stage, stages) + int(self.more[first, end])

    def matrix(self, stage: int = 0, stages: int = 1) -> NDArray[np.int64]:
        """Return the bytes of every stage, [L, L + 1]; see `StageCosts`."""
        return np.asarray(self.costs.matrix(stage, stages) + self.more)
