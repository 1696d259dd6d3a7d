"""Actions for later moments of a chaos run, in the thread of the run."""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Callable

__all__ = ["Agenda"]


class Agenda:
    """Functions with the moments at which they are due; for equal moments, the one added first is called first."""

    def __init__(self) -> None:
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()

    def later(self, seconds: float, do: Callable[[], None]) -> None:
        """Have `run_due` call `do` after `seconds`."""
        heapq.heappush(self._due, (time.monotonic() + seconds, next(self._count), do))

    def run_due(self) -> None:
        """Call all functions that are due by now, in the order of their moments."""
        now = time.monotonic()
        while self._due and self._due[0][0] <= now:
            heapq.heappop(self._due)[2]()
