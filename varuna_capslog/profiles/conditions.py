"""What a profile's conditions must be where this library computes with them; other names may hold any JSON value.

`record.Profile` calls `checked` for every profile, so memory models, planners and the simulation read the conditions
as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from varuna_capslog.base import fields
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.schedules.shape import STAGE_INPUTS

__all__ = [
    "CACHE_BYTES",
    "JOINED",
    "KEPT_WHOLE",
    "LAST_HOLDS",
    "MOMENTS",
    "PURPOSE",
    "UPDATE_RATE",
    "checked",
    "kept_copies",
    "why_few",
]

UPDATE_RATE = "update_seconds_per_parameter_byte"
"""Where a profile's conditions say what norm, clipping and optimizer cost: seconds per byte of parameters."""

PURPOSE = "purpose"
"""Where a profile of forwards alone says "inference"; profiles of training say nothing."""
CACHE_BYTES = "cache_bytes_of_a_sequence"
"""Where a profile for inference says what each layer keeps of keys and values, per sequence."""

JOINED = "joined_variants"
"""Where a profile names the variants whose neighbours do not convert what they hand to each other."""

KEPT_WHOLE = "kept_whole"
"""Where a profile says which parts of a captured model run as a whole, as Python, or are one layer, and why."""

LAST_HOLDS = "last_layer"
"""Where a profile names all modules of its last layer, which has the name of the first of them."""

MOMENTS = "moments"
"""Where a profile says in which type moments are kept, if it is another one than they are stepped in."""

_MOST = 100
"""More than any allocator reserves beyond what it hands out or an optimizer keeps, and what products of bytes stay
finite with."""


def checked(conditions: Any) -> dict[str, Any]:
    """Return the conditions; numbers that are computed with become int or float.

    Raises CapslogError naming a condition that does not have the type or the range that its reader needs.
    """
    if not isinstance(conditions, Mapping):
        raise CapslogError("conditions must be an object that maps names to values")
    found = dict(conditions)
    fields.json_value(found, "conditions")
    for name, check in _CHECKS.items():
        if name in found:
            found[name] = check(found[name], f"conditions.{name}")
    return found


def kept_copies(conditions: Mapping[str, Any]) -> tuple[float, float]:
    """What is kept of a trained parameter beside itself and its gradient, in parts of its bytes: by the optimizer (2
    where the conditions say nothing, as with AdamW), and as a copy of 16 bits.
    """
    return conditions.get("optimizer_copies", 2), conditions.get("weight_copies", 0)


def _headroom(value: Any, name: str) -> Any:
    """Bytes beyond a stage's peak, as `memory.headroom` reads them; "parts" is for people."""
    if not isinstance(value, Mapping):
        raise CapslogError(f'{name} must be an object such as {{"fixed_bytes": 0, "fragmentation": 1.0}}')
    fields.refuse_unknown(value, ["fixed_bytes", "fragmentation", "parts"], f"field of {name}")
    fixed = fields.whole(value.get("fixed_bytes", 0), f"{name}.fixed_bytes")
    fragmentation = fields.seconds(value.get("fragmentation", 1.0), f"{name}.fragmentation")
    if not 1 <= fragmentation <= _MOST:
        raise CapslogError(
            f"{name}.fragmentation is {fragmentation}; a device reserves at least what it allocates, so give a factor "
            f"from 1 to {_MOST}"
        )
    numbers = {"fixed_bytes": fixed, "fragmentation": fragmentation}
    return {key: numbers.get(key, one) for key, one in value.items()}


def _copies(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= _MOST:
        raise CapslogError(
            f"{name} is {value!r}; it is what is kept beside the parameters in parts of their bytes, so give a number "
            f"from 0 to {_MOST}"
        )
    return float(value)


def _texts(value: Any, name: str) -> list[str]:
    return [fields.text(one, f"{name}[{i}]") for i, one in enumerate(fields.listed(value, name))]


def _sizes(value: Any, name: str) -> list[int]:
    return [fields.whole(one, f"{name}[{i}]") for i, one in enumerate(fields.listed(value, name))]


_CHECKS: dict[str, Callable[[Any, str], Any]] = {
    "accumulation_blocks": partial(fields.whole, minimum=1),
    "device": fields.text,
    "headroom": _headroom,
    "limits": _texts,
    JOINED: _texts,
    KEPT_WHOLE: _texts,
    LAST_HOLDS: _texts,
    MOMENTS: fields.text,
    "microbatch_size": partial(fields.whole, minimum=1),
    "optimizer_copies": _copies,
    "recompute": fields.boolean,
    "weight_copies": _copies,
    "stage_inputs": partial(fields.choice, allowed=STAGE_INPUTS),
    CACHE_BYTES: _sizes,
    PURPOSE: partial(fields.choice, allowed=("inference",)),
    UPDATE_RATE: fields.seconds,
}


def why_few(conditions: Mapping[str, Any]) -> str:
    """Why a captured model has no more layers, for the end of a sentence; empty where nobody knows a reason."""
    return "".join(f"; {text}" for text in conditions.get(KEPT_WHOLE, []))
