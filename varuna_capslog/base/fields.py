"""Checks of values from a file. Records (profiles/record.py, plans/plan.py) call the checks from their constructors, so
that no invalid record exists, whether from a file or from code. A check raises CapslogError for an invalid value.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, TypeVar

from varuna_capslog.base.errors import CapslogError

__all__ = [
    "MOST_CALLS",
    "MOST_LAYERS",
    "MOST_MICROBATCHES",
    "MOST_RANKS",
    "boolean",
    "build",
    "choice",
    "column",
    "cut_list",
    "digest",
    "file_name",
    "interval",
    "json_value",
    "listed",
    "mapping",
    "refuse_unknown",
    "seconds",
    "text",
    "whole",
    "within",
]

T = TypeVar("T")

_MOST = (1 << 63) - 1
"""The largest whole number in a file: the largest signed 64-bit integer."""

MOST_LAYERS = 100_000
"""Most layers of a chain and rows of a profile. A captured model has at most one layer per operator, some thousands."""

MOST_RANKS = 100_000
"""Most ranks of a plan: the largest clusters have as many GPUs."""

MOST_MICROBATCHES = 1 << 13
"""Most microbatches of one stage in a step. Where there are more, larger microbatches are better: the largest published
minibatches have some thousand samples for each pipeline."""

MOST_CALLS = 1 << 18
"""Most calls of a step: microbatches, counted once for each stage that they pass. Each call is one action or more in
the lists that engine, simulator and exports keep. The largest published step has 3,072 microbatches on 64 stages,
196,608 calls (Narayanan et al., SC 2021, Table 1: a trillion parameters)."""

_MOST_SECONDS = 1e18
"""Most seconds: more than the age of the universe, but sums and products of such numbers stay finite."""

_SHOWN = 200
"""Most characters of a value that a message shows."""


def refuse_unknown(names: Iterable[str], allowed: Sequence[str], kind: str = "field") -> None:
    """Raise CapslogError for the first name in `names` that is not `allowed`, and suggest the nearest one."""
    for name in names:
        if name not in allowed:
            near = difflib.get_close_matches(str(name), allowed, n=1)
            advice = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(allowed)}"
            raise CapslogError(f"unknown {kind} {name!r}; {advice}")


def within(where: str, make: Callable[[], T]) -> T:
    """Return `make()`; put `where` (a file, a row) before the message of a CapslogError that it raises."""
    try:
        return make()
    except CapslogError as error:
        raise type(error)(f"{where}: {error}") from error


def build(record: type[T], value: Any, where: str) -> T:
    """Make the dataclass `record` from a JSON object; refuse unknown and missing fields by name."""

    def make() -> T:
        if not isinstance(value, Mapping):
            raise CapslogError(f"a JSON object is needed here, not {_kind(value)}")
        fields = dataclasses.fields(record)  # type: ignore[arg-type]
        refuse_unknown(value, [field.name for field in fields])
        for field in fields:
            required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
            if required and field.name not in value:
                raise CapslogError(f"field {field.name!r} is missing")
        return record(**value)

    return within(where, make)


def whole(value: Any, name: str, minimum: int | None = 0, most: int = _MOST) -> int:
    """Return `value` as an int; it must be a whole number from `minimum` (None: any) to `most`."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise CapslogError(f"{name} is {_show(value)}; it must be a whole number")
    if minimum is not None and value < minimum:
        raise CapslogError(f"{name} is {_show(value)}; it must be at least {minimum}")
    if abs(value) > most:
        rule = "below 2^63" if most == _MOST else f"at most {most}"
        raise CapslogError(f"{name} is {_show(value)}; it must be {rule}")
    return value


def seconds(value: Any, name: str) -> float:
    """Return `value` as a float; it must be a finite number of seconds of at least 0."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= _MOST_SECONDS:
        raise CapslogError(f"{name} is {_show(value)}; it must be a number of seconds from 0 to {_MOST_SECONDS:g}")
    return float(value)


def boolean(value: Any, name: str) -> bool:
    """Return `value`, which must be true or false."""
    if not isinstance(value, bool):
        raise CapslogError(f"{name} is {_show(value)}; it must be true or false")
    return value


def json_value(value: Any, name: str) -> None:
    """Refuse a value that JSON cannot hold, such as infinity."""
    try:
        json.dumps(value, allow_nan=False, sort_keys=True)
    except (TypeError, ValueError, RecursionError) as error:
        raise CapslogError(f"{name} is nothing that JSON can hold: {error}; give plain, finite values") from error


def text(value: Any, name: str) -> str:
    """Return `value`, which must be a non-empty string."""
    if not isinstance(value, str) or not value:
        raise CapslogError(f"{name} is {_show(value)}; it must be a non-empty string")
    return value


def digest(value: Any, name: str) -> str:
    """Return `value`, which must be `sha256:` and 1 to 64 hexadecimal digits."""
    if not isinstance(value, str) or not re.fullmatch("sha256:[0-9a-f]{1,64}", value):
        raise CapslogError(f"{name} is {_show(value)}; it must be sha256: and hexadecimal digits, as a profile has it")
    return value


def choice(value: Any, name: str, allowed: Sequence[str]) -> str:
    """Return `value`, which must be one of the `allowed` words."""
    if not isinstance(value, str) or value not in allowed:
        raise CapslogError(f"{name} is {_show(value)}; it must be one of {', '.join(allowed)}")
    return value


def file_name(value: Any, name: str) -> str:
    """Return `value`, which must be a plain file name: 1 to 200 letters, digits, `_`, `.` and `-`, not only dots."""
    if not re.fullmatch(r"[A-Za-z0-9_.-]{1,200}", text(value, name)) or not value.strip("."):
        raise CapslogError(f"{name} is {_show(value)}; it must be the name of a file in the same folder")
    return str(value)


def listed(value: Any, name: str, most: int | None = None, length: int | None = None) -> list[Any]:
    """Return `value` as a list; it must be a list or tuple of at most `most`, or exactly `length`, entries."""
    if not isinstance(value, (list, tuple)):
        raise CapslogError(f"{name} is {_kind(value)}; it must be a list")
    if most is not None and len(value) > most:
        raise CapslogError(f"{name} has {len(value)} entries; it may have at most {most}")
    if length is not None and len(value) != length:
        raise CapslogError(f"{name} has {len(value)} entries; it must have {length}")
    return list(value)


def mapping(value: Any, name: str) -> dict[str, Any]:
    """Return `value` as a dict; it must be a JSON object."""
    if not isinstance(value, Mapping):
        raise CapslogError(f"{name} is {_kind(value)}; it must be an object")
    return dict(value)


def column(value: Any, name: str, check: Callable[[Any, str], Any], length: int, unit: str) -> list[Any]:
    """Return the checked entries of a list of `length` entries, one per `unit`; for None, `length` times None."""
    if value is None:
        return [None] * length
    checked = [check(cell, f"{name}[{i}]") for i, cell in enumerate(listed(value, name))]
    if len(checked) != length:
        raise CapslogError(f"{name} has {len(checked)} entries, but there are {length} {unit}")
    return checked


def cut_list(cuts: Any, num_layers: int | None, name: str = "cuts") -> tuple[int, ...]:
    """Return the first layer of each stage: 0 first, rising strictly, below `num_layers` (None: unknown)."""
    numbers = tuple(whole(cut, f"{name}[{i}]") for i, cut in enumerate(listed(cuts, name)))
    if not numbers or numbers[0] != 0:
        raise CapslogError(f"{name} is {list(numbers)}; it must begin with 0, the first layer of the first stage")
    for before, cut in pairwise(numbers):
        if cut <= before:
            raise CapslogError(
                f"{name} is {list(numbers)}; {cut} follows {before}, but cuts must rise: each stage holds a layer"
            )
    if num_layers is not None and numbers[-1] >= num_layers:
        raise CapslogError(
            f"{name} is {list(numbers)}; no stage can begin at {numbers[-1]}, the last layer is {num_layers - 1}"
        )
    return numbers


def interval(value: Any, name: str) -> tuple[int, int]:
    """Return `value` as layers (first, end), `end` not included; it must be two whole numbers with first < end."""
    pair = listed(value, name)
    if len(pair) != 2:
        raise CapslogError(f"{name} has {len(pair)} entries; it must be [first, end]")
    first, end = whole(pair[0], f"{name}[0]"), whole(pair[1], f"{name}[1]")
    if first >= end:
        raise CapslogError(
            f"{name} is [{first}, {end}]; the first layer must come before the end, which is not included"
        )
    return first, end


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", tuple: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number" if isinstance(value, (int, float)) else type(value).__name__)


def _show(value: Any) -> str:
    if not isinstance(value, (str, int, float, bool)):
        return "null" if value is None else _kind(value)
    shown = repr(value)
    return shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}..."
