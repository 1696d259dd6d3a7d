"""Reads the cuts of a plan for Varuna. Everything else that a plan may set is refused by the name of its field."""

from __future__ import annotations

from typing import Any

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.plans.parts import PlanStage
from varuna_capslog.plans.plan import Plan
from varuna_capslog.plans.plan_text import plain

__all__ = ["cuts_of"]

_SCHEDULE = "varuna"


def cuts_of(plan: Plan) -> tuple[int, ...]:
    """Return the cuts of a plan of one stage per rank in the order of the chain, every stage recomputed as a whole.

    Raises:
        CapslogError: the plan says something that Varuna would not do; the message names the field and its value.
    """
    ours = {"schedule": plan.schedule or _SCHEDULE, "routes": plan.routes, "variants": plan.variants}
    theirs: dict[str, tuple[Any, str]] = {
        "schedule": (_SCHEDULE, f"Varuna has a schedule of its own: give {_SCHEDULE}"),
        "routes": ("relay", "Varuna hands tensors from stage to stage: give relay"),
        "variants": ({}, "Varuna runs the layers as they are: leave it out"),
    }
    for name, (runs, advice) in theirs.items():
        if ours[name] != runs:
            raise CapslogError(f"{name} is {plain(ours[name])!r}; {advice}")
    if plan.actions is not None:
        raise CapslogError(f"actions are given for {len(plan.actions)} ranks; Varuna has a schedule of its own")
    begin = 0
    for number, stage in enumerate(plan.stages):
        _check_stage(number, stage, begin)
        begin = stage.end
    return plan.cut_list


def _check_stage(number: int, stage: PlanStage, begin: int) -> None:
    one_piece = len(stage.layers) == 1 and stage.first == begin
    rules = {
        "blocks": (stage.blocks is None, "in Varuna every stage serves all blocks: leave it out"),
        "grain": (stage.grain == 1, "in Varuna all stages take the same microbatches: give 1"),
        "in_flight": (stage.in_flight is None, "Varuna has limits of its own: leave it out"),
        "parallel": (stage.parallel["kind"] == "none", "Varuna does not split layers: leave it out"),
        "layers": (one_piece, f"Varuna's stages follow each other: stage {number} begins with layer {begin}"),
        "ranks": (stage.ranks == (number,), f"Varuna runs stage {number} on rank {number}"),
        "memory": (
            stage.memory is None or (bool(stage.memory) and stage.whole),
            "Varuna recomputes whole stages and does nothing else",
        ),
        "moments": (not stage.moments, "Varuna keeps the optimizer's moments on the device: leave it out"),
    }
    for name, (runs, advice) in rules.items():
        if not runs:
            raise CapslogError(f"stages[{number}].{name} is {plain(getattr(stage, name))}; {advice}")
