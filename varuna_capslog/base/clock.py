"""The time of day: for lines that people read, and for deadlines that come from outside. Nothing else goes by it.

The clock of a machine may jump, by hours where it is corrected. Whatever waits or measures uses `time.monotonic`. Tests
give a process another time of day with `use`; the machine's clock is never set.
"""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["use", "wall_seconds"]

_others: list[Callable[[], float]] = []


def wall_seconds() -> float:
    """Seconds since 1970, as this process takes it to be."""
    return _others[-1]() if _others else time.time()


def use(source: Callable[[], float] | None) -> None:
    """From now on `wall_seconds` is what this says; None: the machine's clock again."""
    _others[:] = [] if source is None else [source]
