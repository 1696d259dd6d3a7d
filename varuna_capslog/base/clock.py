"""Time of day, for lines that people read and for deadlines from outside. A machine's clock may jump by hours: code
that waits or measures uses `time.monotonic`. Tests replace a process's time of day with `use`.
"""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["use", "wall_seconds"]

_others: list[Callable[[], float]] = []


def wall_seconds() -> float:
    """Return the seconds since 1970, from the machine's clock or the source given to `use`."""
    return _others[-1]() if _others else time.time()


def use(source: Callable[[], float] | None) -> None:
    """Make `wall_seconds` return `source()`; None: the machine's clock again."""
    _others[:] = [] if source is None else [source]
