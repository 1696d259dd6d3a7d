"""Equal pipelines as a plan, and a plan read as equal pipelines: the shape that most runs have."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from varuna_capslog.plans.parts import PlanStage, Units
from varuna_capslog.plans.plan import Plan

__all__ = ["pipelines_of", "plan_of_pipelines"]


def plan_of_pipelines(
    num_layers: int, cuts: Sequence[int], replicas: int, units: Units, schedule: str | None = None
) -> Plan:
    """The plan of so many pipelines of the same cuts; stage s of pipeline r runs on rank r * len(cuts) + s.

    cuts: the first layer of each stage, beginning with 0.
    units: of the whole step; the pipelines share its blocks evenly and in order.

    What a stage keeps between forward and backward is left to the config. Raises CapslogError as `Plan`.
    """
    share, ends = (units.blocks or replicas) // replicas, (*cuts[1:], num_layers)
    stages = [
        PlanStage(
            ((first, end),),
            (replica * len(cuts) + number,),
            None if replicas == 1 else tuple(range(replica * share, (replica + 1) * share)),
            memory=None,
        )
        for replica in range(replicas)
        for number, (first, end) in enumerate(zip(cuts, ends, strict=True))
    ]
    return Plan(num_layers, tuple(stages), units, schedule)


def pipelines_of(plan: Plan) -> tuple[tuple[int, ...], int] | None:
    """The cuts and the number of the equal pipelines that a plan is; None where it says anything more than that."""
    if plan.actions is not None or plan.variants or plan.routes != "relay":
        return None
    stages = tuple(dataclasses.replace(stage, bytes=None, seconds=None) for stage in plan.stages)
    firsts = [stage.layers[0][0] for stage in stages]
    replicas = firsts.count(0)
    cuts = firsts[: len(firsts) // max(1, replicas)]
    if cuts[:1] != [0] or cuts != sorted(set(cuts)) or (plan.units.blocks or replicas) % replicas:
        return None
    expected = plan_of_pipelines(plan.num_layers, cuts, replicas, plan.units)
    return (tuple(cuts), replicas) if stages == expected.stages else None
