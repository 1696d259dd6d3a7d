"""Numbers as a report writes them: bytes, seconds, scores, times, and unknown values.

The page's sections call these so that one kind of number looks alike everywhere. Pictures have axes instead.
"""

from __future__ import annotations

from datetime import datetime, timezone

__all__ = ["UNKNOWN", "duration", "moment", "percent", "plain", "plural", "significant"]

UNKNOWN = "\N{EN DASH}"
"""The text of a table for a number that is in no file."""


def duration(seconds: float | None, digits: int = 3) -> str:
    """Return seconds in the unit that people would use: 12.3 ms, 4.56 s, 3 min 20 s, 2 h 05 min."""
    if seconds is None:
        return UNKNOWN
    if seconds < 60:
        factor, unit = (1, "s") if seconds >= 1 else (1e3, "ms") if seconds >= 1e-3 else (1e6, "µs")
        return f"{significant(seconds * factor, digits)} {unit}"
    minutes, remaining_seconds = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {remaining_seconds:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def percent(share: float) -> str:
    """A signed share of 1 as percent: +1.3 %."""
    return f"{100 * share:+.1f} %"


def significant(value: float | None, digits: int = 3) -> str:
    """Return a number with this many significant digits, without an exponent where people would not use one."""
    if value is None:
        return UNKNOWN
    if value and not 1e-3 <= abs(value) < 10**6:
        return f"{value:.{digits - 1}e}"
    whole_digits = len(str(int(abs(value)))) if abs(value) >= 1 else 0
    return f"{value:.{max(0, digits - whole_digits)}f}" if whole_digits else f"{value:.{digits}g}"


def plain(value: object) -> str:
    """A value from a JSON file, for people: text as it is, numbers shortened, lists and objects in one line."""
    if isinstance(value, float):
        return significant(value, 4)
    if isinstance(value, dict):
        return ", ".join(f"{key} {plain(entry)}" for key, entry in value.items())
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(plain(entry) for entry in value)}]"
    return UNKNOWN if value is None else str(value)


def plural(number: int, noun: str, ending: str = "s") -> str:
    """1 step, 2 steps; 2 microbatches with the ending "es"."""
    return f"{number:,} {noun}{'' if number == 1 else ending}"


def moment(seconds: float | None) -> str:
    """A time since 1970 as date and time of day in UTC."""
    try:
        return UNKNOWN if seconds is None else f"{datetime.fromtimestamp(seconds, tz=timezone.utc):%Y-%m-%d %H:%M:%S}"
    except (OverflowError, OSError, ValueError):  # no calendar has it
        return UNKNOWN
