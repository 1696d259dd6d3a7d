"""Bytes that a device needs beyond the peak of its stage: context, communication buffers, unusable allocator segments.

reserved = allocated * fragmentation
device = reserved + fixed_bytes          (compared with the device's capacity)
"""

from __future__ import annotations

import math
from typing import NamedTuple

from varuna_capslog.profiles.record import Profile

__all__ = ["Headroom"]


class Headroom(NamedTuple):
    """`conditions["headroom"]` of a profile. A measured profile has none, and nothing is added. Its "parts" explain the
    numbers (`profiling.estimation.headroom`).
    """

    fixed_bytes: int = 0
    fragmentation: float = 1.0

    @classmethod
    def of(cls, profile: Profile) -> Headroom:
        """Return the headroom of the profile's conditions (checked by `profiles.conditions`); none without an entry."""
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
