"""Byte counts, rates and durations as text ("16GiB", "1GiB/s", "0.1ms") and as numbers. Ambiguous units are refused."""

from __future__ import annotations

import math
import re
import reprlib
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

from varuna_capslog.base import fields
from varuna_capslog.base.errors import CapslogError

__all__ = [
    "format_bytes",
    "format_percent",
    "format_seconds",
    "parse_bytes",
    "parse_capacity",
    "parse_memory",
    "parse_rate",
    "parse_seconds",
    "unit_of",
    "with_unit",
]

_LEAST_BARE = 1 << 20
"""Least bytes of a capacity or a rate without a unit: with a smaller number, the unit was forgotten."""

_UNITS = {
    "": 1,
    "b": 1,
    **{f"{prefix}b": 1000**power for power, prefix in enumerate("kmgtp", start=1)},
    **{f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgtp", start=1)},
}
_BINARY_NAMES = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_SECONDS = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "min": 60.0, "h": 3600.0}
_DURATION = re.compile(r"([0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]{1,3})?)\s*(\D*)")
_BITS = re.compile(r"([0-9]+(?:\.[0-9]*)?)\s*([kmg]?)(?:bit(?:/s)?|bps)", re.IGNORECASE)
_BITS_OR_BYTES = re.compile(r"([0-9.]+)\s*([KMGT])b(?:/s)?")
_QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]{1,3})?)\s*([A-Za-z]*)")


def parse_bytes(value: str | int | float, name: str = "byte count") -> int:
    """Return the whole number of bytes that `value` stands for; errors call the value `name`.

    A number without a unit is bytes; KiB to PiB are powers of 1024, kB to PB powers of 1000, in any letter case. A
    fraction of a byte is cut off. Raises CapslogError for anything else, for the ambiguous "16G", and for values that
    are not above zero.
    """
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise CapslogError(f"{name} is {reprlib.repr(value)}; write a size such as 16GiB or 16000000000")
    match = _QUANTITY.fullmatch(str(value).strip())
    if match is None:
        raise CapslogError(f"{name} is {value!r}, which is not a size above zero; write one such as 16GiB or 500MiB")
    number, unit = match.groups()
    factor = _UNITS.get(unit.lower())
    if factor is None:
        hint = (
            f"{number}{unit}iB (1024) or {number}{unit}B (1000)" if unit.lower() in "kmgtp" else "B, KiB, MiB, GiB, GB"
        )
        raise CapslogError(f"{name} is {value!r}: the unit {unit!r} is not known; write {hint}")
    count = int(Decimal(number) * factor)
    if not 0 < count < 1 << 63:
        raise CapslogError(f"{name} is {value!r}; it must be at least one byte, and below 2^63")
    return count


def parse_memory(value: str | int | float, name: str) -> int:
    """Return a memory size in bytes like `parse_bytes`, with its errors; below 1 MiB it needs a unit."""
    count = parse_bytes(value, name)
    if count < _LEAST_BARE and not str(value).strip().lower().endswith("b"):
        raise CapslogError(f"{name} is {value}, without a unit; write {value}GiB or {value}MiB, or {value}B for bytes")
    return count


def with_unit(size: int | str | Sequence[int | str] | None) -> Any:
    """Return a byte count, or a list of them, in a form that `parse_memory` reads back; text and None unchanged."""
    if isinstance(size, int):
        return f"{size}B" if 0 < size < _LEAST_BARE else size
    return size if size is None or isinstance(size, str) else [with_unit(part) for part in size]


def parse_capacity(value: str | int | float, name: str = "capacity") -> int | list[int]:
    """Return one byte count for all devices, or a list (`16GiB*3,24GiB`: three devices of 16 GiB, one of 24 GiB)."""
    if isinstance(value, str) and ("," in value or "*" in value):
        parts = enumerate(_repeated(value, name))
        return [parse_memory(part, f"{name} of device {device}") for device, part in parts]
    return parse_memory(value, name)


def _repeated(value: str, name: str) -> list[str]:
    parts = []
    for part in value.split(","):
        size, star, times = part.partition("*")
        if star and not (re.fullmatch(r"\s*[0-9]{1,6}\s*", times) and 0 < int(times) <= fields.MOST_RANKS):
            many = f"how many devices, 1 to {fields.MOST_RANKS}, such as 16GiB*3"
            raise CapslogError(f"{name} is {value!r}; behind * must stand {many}")
        parts += [size.strip()] * (int(times) if star else 1)
    return parts


def parse_rate(value: str | int | float, name: str = "bandwidth") -> int:
    """Return bytes per second from a `parse_bytes` size ("/s" optional), or bits as in 100Mbit or 1Gbps (powers of
    1000). Raises CapslogError like `parse_bytes`, also for the ambiguous 1Gb/s (bits or bytes), and for text without a
    unit below 1 MiB.
    """
    text = str(value).strip()
    if match := _BITS_OR_BYTES.fullmatch(text):
        number, prefix = match.groups()
        raise CapslogError(f"{name} is {value!r}, bits or bytes; write {number}{prefix}bit/s or {number}{prefix}B/s")
    if match := _BITS.fullmatch(text):
        return parse_bytes(float(match[1]) * 1000 ** (" kmg".index(match[2].lower() or " ")) / 8, name)
    rate = parse_bytes(text[:-2] if text.lower().endswith("/s") else text, name)
    if isinstance(value, str) and rate < _LEAST_BARE and text[-1].isdigit():
        hint = f"write {text}Gbit/s or {text}GB/s, or {text}B/s for bytes"
        raise CapslogError(f"{name} is {text}, without a unit; {hint}")
    return rate


def parse_seconds(value: str | int | float, name: str = "duration") -> float:
    """Return seconds from a number with the unit s (or none), ms, us, min or h. Raises CapslogError for other text."""
    match = _DURATION.fullmatch(str(value).strip())
    seconds = float(match[1]) * _SECONDS.get(match[2].lower(), math.nan) if match else math.nan
    if not math.isfinite(seconds):
        raise CapslogError(f"{name} is {value!r}; write seconds such as 0.1ms, 30s or 2min")
    return seconds


def parse_latency(value: str | int | float, name: str) -> float:
    """Return the seconds of a message's latency, like `parse_seconds`, but refuse a whole number from 1 on without a
    unit: the unit was forgotten. A float, as in a run's files, means seconds.
    """
    seconds = parse_seconds(value, name)
    if seconds >= 1 and str(value).strip().isdigit():
        raise CapslogError(f"{name} is {value}, which means seconds; write the unit: {value}us, {value}ms or {value}s")
    return seconds


def format_bytes(count: int) -> str:
    """Return bytes as text in the largest binary unit that keeps the number at 1 or above: 6646312345 -> 6.19 GiB. The
    text is rounded to two decimals, so do not parse it back; files hold whole bytes.
    """
    size, unit = unit_of(count)
    digits = f"{abs(count) / size:.2f}".rstrip("0").rstrip(".")
    return f"{'-' if count < 0 else ''}{digits} {unit}"


def format_percent(share: float) -> str:
    """Return a share as text in percent, two digits below 10 %: 0.0312 -> 3.1 %, 1.029 -> 103 %."""
    percent = share * 100
    return f"{percent:.2g} %" if abs(percent) < 9.95 else f"{percent:.0f} %"


def format_seconds(seconds: float) -> str:
    """Return seconds as text: 1.234 s, 56.7 ms."""
    return f"{seconds:.4g} s" if seconds >= 1 else f"{seconds * 1e3:.4g} ms"


def unit_of(count: int) -> tuple[int, str]:
    """Return bytes and name of the largest binary unit that keeps `count` bytes at 1 or above."""
    power = 0
    while round(abs(count) / 1024**power, 2) >= 1024 and power < len(_BINARY_NAMES) - 1:
        power += 1
    return 1024**power, _BINARY_NAMES[power]
