"""Stage costs: the bytes of every possible stage in one run. Memory models compute them, and planners read them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from varuna_capslog.profiles.record import Profile

__all__ = ["NEVER", "Bytes", "Headroom", "RangeCosts", "StageCosts", "full_matrix", "only_ranges", "peaks_of", "raised"]

Bytes = NDArray[np.int64]

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
        """True where the bytes are the same for every (stage, stages)."""
        ...

    def stage_bytes(self, first: int, end: int, stage: int = 0, stages: int = 1) -> int:
        """Return the peak bytes of one stage."""
        ...

    def matrix(self, stage: int = 0, stages: int = 1) -> Bytes:
        """Return [L, L + 1]: `stage_bytes` at [first, end], NEVER where end <= first. Shared: do not write to it."""
        ...

    def peaks(self, cuts: Sequence[int]) -> list[int]:
        """Return the peak bytes of each stage of a cut list."""
        return peaks_of(self, cuts)


def peaks_of(costs: StageCosts, cuts: Sequence[int]) -> list[int]:
    """Return the peak bytes of each stage of a cut list (first layer of each stage, beginning with 0)."""
    places = enumerate(zip(cuts, [*cuts[1:], costs.num_layers], strict=True))
    return [costs.stage_bytes(first, end, stage, len(cuts)) for stage, (first, end) in places]


def full_matrix(costs: StageCosts, stage: int = 0, stages: int = 1) -> Bytes:
    """Return `costs.matrix`, for costs without a faster way, by O(L^2) calls of `stage_bytes`."""
    matrix = np.full((costs.num_layers, costs.num_layers + 1), NEVER, dtype=np.int64)
    for first in range(costs.num_layers):
        for end in range(first + 1, costs.num_layers + 1):
            matrix[first, end] = costs.stage_bytes(first, end, stage, stages)
    return matrix


def only_ranges(matrix: Bytes, nothing: int = NEVER) -> Bytes:
    """Return a copy of a matrix [L, L + 1] with `nothing` where end <= first, which is no range."""
    return np.where(np.tri(*matrix.shape, dtype=np.bool_), nothing, matrix)


@dataclass(frozen=True)
class RangeCosts(StageCosts):
    """Peak bytes of every range of layers, equal at all places. range_bytes: [L, L + 1], NEVER where end <= first."""

    range_bytes: Bytes
    position_free: ClassVar[bool] = True

    @property
    def num_layers(self) -> int:
        """L, the number of layers."""
        return len(self.range_bytes)

    def stage_bytes(self, first: int, end: int, stage: int = 0, stages: int = 1) -> int:
        """Return the peak bytes of layers first .. end-1."""
        return int(self.range_bytes[first, end])

    def matrix(self, stage: int = 0, stages: int = 1) -> Bytes:
        """Return the bytes of every stage; see `StageCosts`."""
        return self.range_bytes


def raised(costs: StageCosts, more: Bytes) -> RangeCosts:
    """Return costs with more bytes for every range of layers at every place. more: [L, L + 1], 0 where end <= first."""
    if isinstance(costs, RangeCosts):
        return replace(costs, range_bytes=costs.range_bytes + more)
    assert costs.position_free
    return RangeCosts(costs.matrix() + more)


# -- Bytes that a device needs beyond the peak of its stage: device context, communication buffers, allocator fragments.
#
# reserved = allocated * fragmentation
# device = reserved + fixed_bytes          (compared with the device's capacity)


class Headroom(NamedTuple):
    """`conditions["headroom"]` of an estimated profile, without its "parts", which explain the numbers
    (`profiling.estimation.headroom`). A measured profile has none, and nothing is added.
    """

    fixed_bytes: int = 0
    fragmentation: float = 1.0

    @classmethod
    def of(cls, profile: Profile) -> Headroom:
        """Return the headroom of the profile's conditions (checked by `profiles.conditions`); no bytes if absent."""
        stated = profile.conditions.get("headroom", {})
        return cls(**{name: stated[name] for name in cls._fields if name in stated})

    def reserved(self, peak_bytes: int) -> int:
        """Return the bytes that the allocator holds for a stage of this peak."""
        return math.ceil(peak_bytes * self.fragmentation)

    def device(self, peak_bytes: int) -> int:
        """Return the bytes that a stage of this peak takes of its device."""
        return self.reserved(peak_bytes) + self.fixed_bytes

    def usable(self, capacity: int) -> int:
        """Return the largest peak that fits on a device of this capacity."""
        peak = max(0, int((capacity - self.fixed_bytes) / self.fragmentation))
        # Division rounds, so the result is checked with `device`.
        while peak > 0 and self.device(peak) > capacity:
            peak -= 1
        return peak
