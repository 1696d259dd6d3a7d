"""Text of a plan: the fields of a file in both forms, and their values. The rules of a plan are not checked here."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any

from varuna_capslog.base import fields
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.plans.parts import MemoryInterval, PlanRank, PlanStage, Shortfall, Units

__all__ = ["BOTH", "FORMAT", "FULL", "parts_of", "plain"]


# -- Plans of the older format plan/1, read as plan/2.
#
# Its short form is that of plan/2. Its full form named a pipeline for each stage and, in `microbatches_of_pipeline`,
# the microbatches of each pipeline; both become blocks. The predictions of pipeline 0 (`stage_bytes`,
# `stage_seconds`) become fields of its stages. Fields that have no unambiguous form in plan/2 are refused by name.


FORMAT_1 = "varuna-capslog/plan/1"

_STAGE = ("pipeline", "layers", "ranks", "parallel", "memory_actions", "microbatch_size", "bytes", "seconds")


def as_plan_2(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return the same plan with the fields of plan/2. Raises CapslogError naming the field that cannot be read."""
    fields_of_plan = {name: item for name, item in value.items() if name not in ("stages", "microbatches_of_pipeline")}
    if value.get("stages") is None:
        if value.get("microbatches_of_pipeline") is not None:
            raise CapslogError("microbatches_of_pipeline is given, but no stages; leave it out")
        if fields_of_plan.pop("actions", None) is not None:
            raise CapslogError("actions are given, but no stages; name the stages, too")
        return fields_of_plan
    for name in SHORT:
        fields_of_plan.pop(name, None)
    rows = enumerate(fields.listed(value["stages"], "stages"))
    pairs = [_stage(row, f"stages[{i}]", value.get("microbatch_size")) for i, row in rows]
    pipeline_of, stages = [pipeline for pipeline, _ in pairs], [stage for _, stage in pairs]
    first = [number for number, pipeline in enumerate(pipeline_of) if pipeline == 0]
    for number, predicted in zip(first, _predictions([stages[number] for number in first], value), strict=False):
        new_fields = {name: item for name, item in predicted.items() if getattr(stages[number], name) is None}
        stages[number] = dataclasses.replace(stages[number], **new_fields)
    if isinstance(shortfall := fields_of_plan.get("shortfall"), Mapping) and "stage" in shortfall:
        number = fields.whole(shortfall["stage"], "shortfall.stage")
        if number >= len(first):
            raise CapslogError(f"shortfall.stage is {number}, but the last stage is {len(first) - 1}")
        fields_of_plan["shortfall"] = dict(shortfall) | {"stage": first[number]}
    units, blocks_of = _units(value, 1 + max(pipeline_of, default=0))
    num_ranks = 1 + max((rank for stage in stages for rank in stage.ranks), default=0)
    return fields_of_plan | {
        "schedule": value.get("schedule") or ("varuna" if value.get("actions") is None else None),
        "units": units,
        "stages": [
            dataclasses.asdict(dataclasses.replace(stage, blocks=blocks_of[pipeline]))
            for pipeline, stage in zip(pipeline_of, stages, strict=True)
        ],
        "ranks": [{"capacity_bytes": limit} for limit in _capacities(value.get("capacity_bytes"), num_ranks)],
    }


def _stage(row: Any, where: str, size: Any) -> tuple[int, PlanStage]:
    """Return the pipeline of a stage of plan/1, and the stage."""
    if not isinstance(row, Mapping):
        raise CapslogError(f"{where}: a JSON object is needed here")
    fields.within(where, lambda: fields.refuse_unknown(row, _STAGE))
    for name in ("pipeline", "layers", "ranks"):
        if name not in row:
            raise CapslogError(f"{where}: field {name!r} is missing")
    actions = row.get("memory_actions", {})
    if not isinstance(actions, Mapping):
        raise CapslogError(f"{where}: memory_actions must be an object that maps layers to recompute or offload")
    if actions:
        raise CapslogError(
            f"{where}: memory_actions is {dict(actions)}, which does not say where an interval of layers ends; write "
            "the plan as plan/2 with memory intervals [first layer, end, kind]"
        )
    if row.get("microbatch_size") not in (None, size):
        raise CapslogError(
            f"{where}: microbatch_size is {row['microbatch_size']} and the plan's is {size}; write the plan as plan/2, "
            "where a stage may have a grain of its own"
        )
    kept = {name: row[name] for name in ("layers", "ranks", "parallel", "bytes", "seconds") if name in row}
    pipeline = fields.whole(row["pipeline"], f"{where}: pipeline", most=fields.MOST_CALLS - 1)
    return pipeline, fields.build(PlanStage, kept | {"memory": None}, where)


def _predictions(stages: list[PlanStage], value: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return `bytes` and `seconds` of each stage of pipeline 0, from the lists that a plan has beside its `cuts`."""
    if "cuts" not in value:
        raise CapslogError("field 'cuts' is missing")
    cuts = fields.cut_list(value["cuts"], None)
    if all(len(stage.layers) == 1 for stage in stages) and cuts != tuple(stage.first for stage in stages):
        raise CapslogError("stages of pipeline 0 do not begin where cuts says; make the two agree")
    check_size = partial(fields.whole, minimum=None)
    sizes = fields.column(value.get("stage_bytes"), "stage_bytes", check_size, len(cuts), "stages")
    times = fields.column(value.get("stage_seconds"), "stage_seconds", fields.seconds, len(cuts), "stages")
    if None not in (value.get("stage_bytes"), value.get("peak_bytes")) and value["peak_bytes"] != max(sizes):
        raise CapslogError(f"peak_bytes is {value['peak_bytes']}, but the largest of stage_bytes is {max(sizes)}")
    return [{"bytes": size, "seconds": seconds} for size, seconds in zip(sizes, times, strict=True)]


def _units(value: Mapping[str, Any], pipelines: int) -> tuple[dict[str, Any], list[tuple[int, ...] | None]]:
    """Return the units of a step, and the blocks of each pipeline: each of its microbatches becomes a block."""
    count, groups = value.get("num_microbatches"), value.get("microbatches_of_pipeline")
    units = {"per_step": count, "samples": value.get("microbatch_size"), "blocks": None}
    if count is not None:
        count = fields.whole(count, "num_microbatches", 1, fields.MOST_CALLS)
    if groups is None:
        own_blocks: list[tuple[int, ...] | None] = [(number,) for number in range(pipelines)]
        return units | {"blocks": pipelines if pipelines > 1 else None}, own_blocks if pipelines > 1 else [None]
    name = "microbatches_of_pipeline"
    groups = [
        [fields.whole(microbatch, name) for microbatch in fields.listed(group, name)]
        for group in fields.listed(groups, name)
    ]
    together = sorted(number for group in groups for number in group)
    if len(groups) != pipelines or together != list(range(count or len(together))):
        raise CapslogError("microbatches_of_pipeline must give each microbatch to exactly one of the plan's pipelines")
    if pipelines == 1:
        return units, [None]
    return units | {"blocks": count}, [tuple(sorted(group)) for group in groups]


def _capacities(value: Any, num_ranks: int) -> list[int | None]:
    """Return the bytes of each rank's device. value: one number for all ranks, or a list that may be shorter."""
    if not isinstance(value, (list, tuple)):
        limit = None if value is None else fields.whole(value, "capacity_bytes", minimum=1)
        return [limit] * num_ranks
    limits = [fields.whole(limit, f"capacity_bytes[{i}]", minimum=1) for i, limit in enumerate(value)]
    return [*limits, *[None] * (num_ranks - len(limits))]


# -- the text of a plan


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
    """Return the arguments of `Plan` (full form) or `Plan.of_cuts` (short). Raises CapslogError naming the field."""
    if not isinstance(value, Mapping):
        raise CapslogError("a JSON object is needed; is this a plan?")
    if value.get("format") == FORMAT_1:
        value = as_plan_2(value)
    elif value.get("format") != FORMAT:
        raise CapslogError(f"format is {value.get('format')!r}; this version reads {FORMAT!r} and {FORMAT_1!r}")
    fields.refuse_unknown(value, ["format", "purpose", "parallel", *BOTH, *SHORT, *FULL])
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
        return value.entries
    if isinstance(value, Shortfall):
        named = dataclasses.asdict(value)
        return {name: item for name, item in named.items() if name not in ("stage", "rank") or item is not None}
    if dataclasses.is_dataclass(value):
        named = {item.name: plain(getattr(value, item.name)) for item in dataclasses.fields(value)}
        # left out where empty, so that files of plans without moments or speeds do not change
        return {name: item for name, item in named.items() if name not in ("moments", "speed") or item}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return dict(value) if isinstance(value, Mapping) else value
