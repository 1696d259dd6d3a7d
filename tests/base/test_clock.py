"""The time of day of a process; no module of the library reads the machine's clock directly."""

from __future__ import annotations

import re
import time
from pathlib import Path

from varuna_capslog.base import clock

LIBRARY = Path(__file__).resolve().parents[2] / "varuna_capslog"
NOT_OF_A_RUN = ("reports/", "base/clock.py")
"""The readers of a run's files, and the clock itself."""

ASKS = re.compile(r"\btime\.(time|time_ns|localtime|gmtime)\b|datetime\.now|utcnow|from time import")


def test_a_process_may_be_given_another_time_of_day_and_gets_the_machine_s_again() -> None:
    clock.use(lambda: 5.0)
    try:
        assert clock.wall_seconds() == 5.0
    finally:
        clock.use(None)
    assert abs(clock.wall_seconds() - time.time()) < 5.0


def asked(text: str) -> list[int]:
    """Return the lines that read the time of day."""
    return [number for number, line in enumerate(text.splitlines(), 1) if ASKS.search(line)]


def test_whoever_wants_the_time_of_day_asks_the_clock_that_a_test_can_turn() -> None:
    places = []
    for path in sorted(LIBRARY.rglob("*.py")):
        name = str(path.relative_to(LIBRARY))
        if not name.startswith(NOT_OF_A_RUN):
            places += [f"{name}:{line}" for line in asked(path.read_text(encoding="utf-8"))]
    assert not places, "a machine's clock may jump: wait and measure with time.monotonic, tell times by base/clock"
    assert asked("import time\nbegan = time.time()") == [2], "it would be seen"
