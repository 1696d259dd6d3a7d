"""The sign of life that a host keeps in the store: a count, and for how long the run has been going on.

Every host counts the seconds since the first generation with its own monotonic clock; a host that came later goes on
from the others' signs. So a worker that joins knows how old the run is, and no time of day has a part in it.
"""

from __future__ import annotations

import math

from varuna_capslog.elastic.store.log import MembershipStore

__all__ = ["age_of", "run_age", "sign_of"]


def sign_of(beat: int, age_seconds: float) -> str:
    """A sign: unlike that of any other beat of this host."""
    return f"{beat} {age_seconds:.3f}"


def age_of(sign: str | None) -> float:
    """Seconds of the run by a sign; 0 where there is none yet, or it is no sign of this version."""
    try:
        seconds = float((sign or "").split(" ")[1])
    except (IndexError, ValueError):
        return 0.0
    return seconds if math.isfinite(seconds) else 0.0


def run_age(store: MembershipStore, host: str) -> float:
    """For how many seconds the run has been going on, by the newest sign of this host. Raises StoreGone."""
    return age_of(store.signs_of([host])[host])
