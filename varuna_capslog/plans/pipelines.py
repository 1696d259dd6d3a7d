"""Conversions between equal pipelines and plans; most runs are equal pipelines."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from varuna_capslog.plans.parts import PlanStage, Units
from varuna_capslog.plans.plan import Plan

__all__ = ["pipelines_of", "plan_of_pipelines", "stages_of_pipelines"]


def stages_of_pipelines(
    num_layers: int, cuts: Sequence[int], replicas: int, blocks: int, placement: Sequence[int] | None = None
) -> tuple[PlanStage, ...]:
    """Return the stages of `replicas` pipelines of the same cuts, which share the blocks evenly and in order.

    cuts: the first layer of each stage, beginning with 0.
    placement: stage -> device of the pipeline; default: stage s on device s. Device d of pipeline r is rank
        r * devices + d.

    The stages' `memory` is None, so that the config decides about recomputation.
    """
    devices, ends = list(range(len(cuts)) if placement is None else placement), (*cuts[1:], num_layers)
    share, width = blocks // replicas, max(devices) + 1
    return tuple(
        PlanStage(
            ((first, end),),
            (replica * width + device,),
            None if replicas == 1 else tuple(range(replica * share, (replica + 1) * share)),
            memory=None,
        )
        for replica in range(replicas)
        for first, end, device in zip(cuts, ends, devices, strict=True)
    )


def plan_of_pipelines(
    num_layers: int, cuts: Sequence[int], replicas: int, units: Units, schedule: str | None = None
) -> Plan:
    """Return the plan of `replicas` pipelines of the same cuts; stage s of pipeline r is on rank r * len(cuts) + s.

    cuts: as for `stages_of_pipelines`.
    units: of the whole step.

    Raises CapslogError as `Plan`.
    """
    stages = stages_of_pipelines(num_layers, cuts, replicas, units.blocks or replicas)
    return Plan(num_layers, stages, units, schedule)


def pipelines_of(plan: Plan) -> tuple[tuple[int, ...], int] | None:
    """Return the cuts and the number of the plan's equal pipelines; None for a plan that is not of this form."""
    if plan.actions is not None or plan.variants or plan.routes != "relay":
        return None
    stages = tuple(dataclasses.replace(stage, bytes=None, seconds=None) for stage in plan.stages)
    firsts = [stage.first for stage in stages]
    replicas = firsts.count(0)
    cuts = firsts[: len(firsts) // max(1, replicas)]
    if cuts[:1] != [0] or cuts != sorted(set(cuts)) or (plan.units.blocks or replicas) % replicas:
        return None
    expected = plan_of_pipelines(plan.num_layers, cuts, replicas, plan.units)
    return (tuple(cuts), replicas) if stages == expected.stages else None
