"""Checks the conditions of a profile that this library computes with; other names may hold any JSON value."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from varuna_capslog.base import fields
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.schedules.shape import STAGE_INPUTS

__all__ = [
    "CACHE_BYTES",
    "DECODE_SECONDS",
    "HYBRID_LETTERS",
    "JOINED",
    "JOINED_PARTS",
    "KEPT_WHOLE",
    "LAST_HOLDS",
    "MOMENTS",
    "ONE_MICROBATCH",
    "PART_SECONDS",
    "PURPOSE",
    "UPDATE_RATE",
    "checked",
    "kept_copies",
    "why_few",
]

UPDATE_RATE = "update_seconds_per_parameter_byte"
"""Condition: cost of norm, clipping and optimizer, in seconds per byte of parameters."""

PURPOSE = "purpose"
"""Condition: "inference" in a profile of forwards alone; profiles of training do not have it."""
CACHE_BYTES = "cache_bytes_of_a_sequence"
"""Condition: bytes of keys and values that each layer keeps per sequence, in a profile for inference."""
DECODE_SECONDS = "decode_seconds"
"""Condition: seconds of each layer for the next token of every sequence of a forward, in a profile for inference."""

JOINED = "joined_variants"
"""Condition: the variants whose neighbouring layers pass tensors to each other without conversion."""

KEPT_WHOLE = "kept_whole"
"""Condition: the parts of a captured model that run as Python, or that are one layer, with the reasons."""

JOINED_PARTS = "joined_parts"
"""Condition: name of a layer that holds several parts of the model -> its other parts, which no cut can separate."""

HYBRID_LETTERS = "hybrid_letters"
"""Condition: the modules of each layer of a hybrid model in the letters of Megatron's patterns (`model/names`), with |
between layers.
"""

LAST_HOLDS = "last_layer"
"""Condition: all modules of the last layer, whose name is that of the first module."""

MOMENTS = "moments"
"""Condition: the dtype in which moments are stored, if the update uses another dtype."""

PART_SECONDS = "seconds_of_parts"
"""Condition: rows [layer, parts, seconds] for the layers and parts of the given plan: the seconds by which recomputing
the parts lengthens the layer's backward.
"""
ONE_MICROBATCH = "one_microbatch"
"""Condition: numbers of the layers that take one microbatch per call, since several together change their result; in
profiles that have runs of larger calls."""

_MOST = 100
"""Largest factor: more than any allocator reserves per allocated byte or any optimizer keeps per parameter byte, and
small enough that products of bytes stay finite."""


def checked(conditions: Any) -> dict[str, Any]:
    """Return the conditions, numbers as int or float. Raises CapslogError naming a condition of wrong type or range."""
    if not isinstance(conditions, Mapping):
        raise CapslogError("conditions must be an object that maps names to values")
    checked_conditions = dict(conditions)
    fields.json_value(checked_conditions, "conditions")
    for name, check in _CHECKS.items():
        if name in checked_conditions:
            checked_conditions[name] = check(checked_conditions[name], f"conditions.{name}")
    return checked_conditions


def kept_copies(conditions: Mapping[str, Any]) -> tuple[float, float]:
    """Return the bytes kept beside a trained parameter and its gradient, as multiples of the parameter's bytes: of the
    optimizer (2, as with AdamW, where the condition is missing), and of a 16-bit copy.
    """
    return conditions.get("optimizer_copies", 2), conditions.get("weight_copies", 0)


def _headroom(value: Any, name: str) -> Any:
    """Check the bytes beyond a stage's peak, as `memory.costs` reads them; "parts" only explains them."""
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
    return {key: numbers.get(key, field) for key, field in value.items()}


def _copies(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= _MOST:
        raise CapslogError(
            f"{name} is {value!r}; it is what is kept beside the parameters in parts of their bytes, so give a number "
            f"from 0 to {_MOST}"
        )
    return float(value)


def _texts(value: Any, name: str) -> list[str]:
    return [fields.text(text, f"{name}[{i}]") for i, text in enumerate(fields.listed(value, name))]


def _parts(value: Any, name: str) -> dict[str, list[str]]:
    if not isinstance(value, Mapping):
        raise CapslogError(f"{name} must be an object that maps names of layers to lists of names")
    return {layer: _texts(parts, f"{name}.{layer}") for layer, parts in value.items()}


def _times(value: Any, name: str) -> list[float]:
    return [fields.seconds(time, f"{name}[{i}]") for i, time in enumerate(fields.listed(value, name))]


def _seconds_of_parts(value: Any, name: str) -> list[list[Any]]:
    rows = [fields.listed(row, f"{name}[{i}]", length=3) for i, row in enumerate(fields.listed(value, name))]
    return [
        [fields.whole(layer, name), _texts(parts, f"{name}[{i}][1]"), fields.seconds(took, f"{name}[{i}][2]")]
        for i, (layer, parts, took) in enumerate(rows)
    ]


def _sizes(value: Any, name: str) -> list[int]:
    return [fields.whole(size, f"{name}[{i}]") for i, size in enumerate(fields.listed(value, name))]


_CHECKS: dict[str, Callable[[Any, str], Any]] = {
    "accumulation_blocks": partial(fields.whole, minimum=1),
    "device": fields.text,
    "headroom": _headroom,
    "limits": _texts,
    HYBRID_LETTERS: fields.text,
    JOINED: _texts,
    JOINED_PARTS: _parts,
    KEPT_WHOLE: _texts,
    LAST_HOLDS: _texts,
    MOMENTS: fields.text,
    PART_SECONDS: _seconds_of_parts,
    ONE_MICROBATCH: _sizes,
    "microbatch_size": partial(fields.whole, minimum=1),
    "optimizer_copies": _copies,
    "recompute": fields.boolean,
    "weight_copies": _copies,
    "stage_inputs": partial(fields.choice, allowed=STAGE_INPUTS),
    CACHE_BYTES: _sizes,
    DECODE_SECONDS: _times,
    PURPOSE: partial(fields.choice, allowed=("inference",)),
    UPDATE_RATE: fields.seconds,
}


def why_few(conditions: Mapping[str, Any]) -> str:
    """Return the reasons why a captured model has no more layers, for the end of a sentence; "" without any."""
    return "".join(f"; {text}" for text in conditions.get(KEPT_WHOLE, []))
