"""The last steps that a rank applied, kept so that no line of metrics.jsonl is lost together with its writer.

One rank writes the lines. It may be lost after a step was applied everywhere and before its line was written; the rank
that writes afterwards then finds the line here.
"""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Generic, TypeVar

from varuna_capslog.base import files

__all__ = ["RecentSteps"]

_KEPT = 3
"""Steps. A writer is lost at most one step behind the others; the rest is reserve."""

Line = TypeVar("Line")


class RecentSteps(Generic[Line]):
    """What `metrics` should hold of the last steps; `Line` is whatever the caller writes a line from."""

    def __init__(self, metrics: Path) -> None:
        self._metrics = metrics
        self._lines: deque[tuple[int, Line]] = deque(maxlen=_KEPT)

    def add(self, step: int, line: Line) -> None:
        """Keeps what a step's line is written from, on every rank, also where another one writes it."""
        self._lines.append((step, line))

    def missing(self, last: int) -> list[Line]:
        """What the file lacks of these steps up to step `last`, the oldest first."""
        if not self._lines or not self._metrics.exists():
            written = set()
        else:
            written = {line.get("step") for line in files.last_lines(self._metrics)}
        return [line for step, line in self._lines if step <= last and step not in written]
