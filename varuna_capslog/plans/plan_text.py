"""The text of a plan: the fields that a file may have, in both forms, and the values that they mean.

`plans/plan.Plan` reads and writes its files with these functions; they do not check the rules of a plan.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from varuna_capslog.base import fields
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.plans import plan_1
from varuna_capslog.plans.parts import MemoryInterval, PlanRank, PlanStage, Shortfall, Units

__all__ = ["BOTH", "FORMAT", "FULL", "parts_of", "plain"]

FORMAT = "varuna-capslog/plan/2"

BOTH = (
    "planner",
    "memory_model",
    "model",
    "profile_digest",
    "num_layers",
    "schedule",
    "peak_bytes",
    "step_seconds",
    "fits",
    "shortfall",
    "search_seconds",
    "bound_seconds",
    "proven",
    "search_space",
)
SHORT = ("cuts", "num_microbatches", "microbatch_size", "stage_bytes", "stage_seconds", "capacity_bytes")
FULL = ("units", "stages", "variants", "routes", "actions", "ranks")


def parts_of(value: Any) -> dict[str, Any]:
    """Return the arguments of `Plan` (full form, with `cuts` where the file has it) or of `Plan.of_cuts` (short form).

    Raises CapslogError naming the field.
    """
    if not isinstance(value, Mapping):
        raise CapslogError("a JSON object is needed; is this a plan?")
    if value.get("format") == plan_1.FORMAT:
        value = plan_1.as_plan_2(value)
    elif value.get("format") != FORMAT:
        raise CapslogError(f"format is {value.get('format')!r}; this version reads {FORMAT!r} and {plan_1.FORMAT!r}")
    fields.refuse_unknown(value, ["format", "purpose", *BOTH, *SHORT, *FULL])
    parts = {name: item for name, item in value.items() if name != "format"}
    if parts.get("shortfall") is not None:
        parts["shortfall"] = fields.build(Shortfall, parts["shortfall"], "shortfall")
    return _short_form(parts) if parts.get("stages") is None else _full_form(parts)


def _short_form(parts: dict[str, Any]) -> dict[str, Any]:
    for name in ("num_layers", "cuts"):
        if name not in parts:
            raise CapslogError(f"field {name!r} is missing")
    for name in FULL:
        if parts.pop(name, None):
            raise CapslogError(f"{name} belongs to the full form of a plan, but 'stages' is missing; give both")
    return parts


def _full_form(parts: dict[str, Any]) -> dict[str, Any]:
    for name in ("num_layers", "units"):
        if parts.get(name) is None:
            raise CapslogError(f"field {name!r} is missing")
    if parts.get("schedule") is None and parts.get("actions") is None:
        raise CapslogError("neither schedule nor actions is there; give one of them")
    for name in SHORT[1:]:
        if parts.pop(name, None) is not None:
            raise CapslogError(f"{name} belongs to the short form of a plan; leave it out beside 'stages'")
    for name, record in (("stages", PlanStage), ("ranks", PlanRank)):
        rows = enumerate(fields.listed(parts.get(name) or [], name))
        parts[name] = tuple(fields.build(record, row, f"{name}[{i}]") for i, row in rows)
    if not parts["stages"]:
        raise CapslogError("stages is empty; leave it out for one stage per rank")
    parts["units"] = fields.build(Units, parts["units"], "units")
    for name in ("variants", "routes"):
        if parts.get(name) is None:
            parts.pop(name, None)
    return parts


def plain(value: Any) -> Any:
    """Return a value in the form of JSON: records as objects, intervals and tuples as lists."""
    if isinstance(value, MemoryInterval):
        return [value.first, value.end, value.kind]
    if isinstance(value, Shortfall):
        named = dataclasses.asdict(value)
        return {name: item for name, item in named.items() if name not in ("stage", "rank") or item is not None}
    if dataclasses.is_dataclass(value):
        named = {item.name: plain(getattr(value, item.name)) for item in dataclasses.fields(value)}
        # left out where there are none, so that files of plans without them stay as they were
        return {name: item for name, item in named.items() if name not in ("moments", "speed") or item}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return dict(value) if isinstance(value, Mapping) else value
