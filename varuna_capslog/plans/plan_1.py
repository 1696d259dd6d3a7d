"""Plans of the older format plan/1, read as plan/2.

Its short form is that of plan/2. Its full form named a pipeline for each stage and, in `microbatches_of_pipeline`, the
microbatches of each pipeline; both become blocks. What plan/2 says in another way and cannot be told from the older
words is refused by field.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from varuna_capslog.base import fields
from varuna_capslog.base.errors import CapslogError

__all__ = ["FORMAT", "as_plan_2"]

FORMAT = "varuna-capslog/plan/1"

_STAGE = ("pipeline", "layers", "ranks", "parallel", "memory_actions", "microbatch_size", "bytes", "seconds")
_SHORT_ONLY = ("cuts", "num_microbatches", "microbatch_size", "stage_bytes", "stage_seconds", "capacity_bytes")


def as_plan_2(value: Mapping[str, Any]) -> dict[str, Any]:
    """The same plan in the words of plan/2. Raises CapslogError naming the field that cannot be read."""
    rest = {name: item for name, item in value.items() if name not in ("stages", "microbatches_of_pipeline")}
    if value.get("stages") is None:
        if value.get("microbatches_of_pipeline") is not None:
            raise CapslogError("microbatches_of_pipeline is given, but no stages; leave it out")
        if rest.pop("actions", None) is not None:
            raise CapslogError("actions are given, but no stages; name the stages, too")
        return rest
    stages = [
        _stage(row, f"stages[{i}]", value.get("microbatch_size"))
        for i, row in enumerate(fields.listed(value["stages"], "stages"))
    ]
    pipelines = 1 + max((stage["pipeline"] for stage in stages), default=0)
    count, groups = value.get("num_microbatches"), value.get("microbatches_of_pipeline")
    blocks: int | None
    if groups is None and pipelines > 1:
        groups, blocks = [[number] for number in range(pipelines)], pipelines
    else:
        blocks = count if pipelines > 1 else None
    if groups is not None:
        together = sorted(number for group in fields.listed(groups, "microbatches_of_pipeline") for number in group)
        if len(groups) != pipelines or together != list(range(blocks or count or len(together))):
            raise CapslogError(
                "microbatches_of_pipeline must give each microbatch to exactly one of the plan's pipelines"
            )
    for stage in stages:
        pipeline = stage.pop("pipeline")
        stage["blocks"] = sorted(groups[pipeline]) if groups is not None and pipelines > 1 else None
    capacity, num_ranks = value.get("capacity_bytes"), 1 + max(max(stage["ranks"], default=0) for stage in stages)
    limits = list(capacity) if isinstance(capacity, (list, tuple)) else [capacity] * num_ranks
    limits += [None] * (num_ranks - len(limits))
    for name in _SHORT_ONLY:
        rest.pop(name, None)
    if isinstance(shortfall := rest.get("shortfall"), Mapping) and "stage" in shortfall:
        stage_number = fields.whole(shortfall["stage"], "shortfall.stage")
        if stage_number >= len(stages):
            raise CapslogError(f"shortfall.stage is {stage_number}, but the last stage is {len(stages) - 1}")
    return rest | {
        "schedule": value.get("schedule") or ("varuna" if value.get("actions") is None else None),
        "units": {"per_step": count, "samples": value.get("microbatch_size"), "blocks": blocks},
        "stages": stages,
        "ranks": [{"capacity_bytes": limit} for limit in limits],
    }


def _stage(row: Any, where: str, size: Any) -> dict[str, Any]:
    """A stage of plan/1, its pipeline still beside it."""
    if not isinstance(row, Mapping):
        raise CapslogError(f"{where}: a JSON object is needed here")
    fields.within(where, lambda: fields.refuse_unknown(row, _STAGE))
    for name in ("pipeline", "layers", "ranks"):
        if name not in row:
            raise CapslogError(f"{where}: field {name!r} is missing")
    if row.get("memory_actions"):
        raise CapslogError(
            f"{where}: memory_actions is {dict(row['memory_actions'])}, which does not say where an interval of layers "
            "ends; write the plan as plan/2 with memory intervals [first layer, end, kind]"
        )
    if row.get("microbatch_size") not in (None, size):
        raise CapslogError(
            f"{where}: microbatch_size is {row['microbatch_size']} and the plan's is {size}; write the plan as plan/2, "
            "where a stage may have a grain of its own"
        )
    kept = {name: row[name] for name in ("layers", "ranks", "parallel", "bytes", "seconds") if name in row}
    return {"pipeline": fields.whole(row["pipeline"], f"{where}: pipeline"), **kept, "memory": None}
