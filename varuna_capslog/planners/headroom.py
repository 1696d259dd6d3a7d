"""What of a device's memory the stages may use: its capacity less what a profile says is kept beside the tensors.

An estimated profile may hold the condition `headroom`: `{"fixed_bytes": b, "fragmentation": f}`. A stage of p allocated
bytes then makes the process reserve p f + b (context, communicator buffers, gaps of the caching allocator).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from varuna_capslog.errors import CapslogError
from varuna_capslog.profiles.record import Profile

__all__ = ["usable_bytes"]


def usable_bytes(profile: Profile, capacity: int) -> int:
    """Return the allocated bytes that fit into `capacity`: floor((capacity - b) / f), at least 0; all without headroom.

    Raises CapslogError for a headroom that is not of that form.
    """
    headroom = profile.conditions.get("headroom")
    if headroom is None:
        return capacity
    fixed = headroom.get("fixed_bytes", 0) if isinstance(headroom, Mapping) else None
    factor = headroom.get("fragmentation", 1.0) if isinstance(headroom, Mapping) else None
    if not isinstance(fixed, int) or not isinstance(factor, (int, float)) or fixed < 0 or not 1 <= factor < math.inf:
        raise CapslogError(
            f"conditions.headroom of the profile is {headroom!r}; it must hold fixed_bytes, at least 0, and "
            "fragmentation, at least 1"
        )
    return max(0, math.floor((capacity - fixed) / factor))
