"""The plan that a run with planner `pipedream`, `piper`, `graphpipe`, `capture`, `madpipe` or `auto` begins with."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.config.settings import Config
from varuna_capslog.planners import AUTOMATIC, BALANCED, BUDGET, LAYERWISE, WHOLE_RUN
from varuna_capslog.planners.seconds import Link
from varuna_capslog.planning.automatic import automatic_plan
from varuna_capslog.planning.layerwise import layerwise_plan
from varuna_capslog.planning.placed import check_ranks_memory, placed_plan
from varuna_capslog.planning.ranks import with_stage_bytes
from varuna_capslog.plans.plan import Plan
from varuna_capslog.profiles.record import Profile
from varuna_capslog.schedules import RunShape
from varuna_capslog.start.choices import with_choices_of

__all__ = [
    "ELASTIC",
    "asks_automatic",
    "asks_replicated",
    "check_automatic",
    "check_replicated",
    "plan_automatic",
    "plan_replicated",
]

ELASTIC = (
    "planner auto of an elastic run compares what is searched anew at every change: plans of budget, also with "
    "branches and replicas, of joint, and of throughput in equal pipelines"
)
"""What a plan of such a run says."""


def asks_replicated(config: Config) -> bool:
    """Whether such a planner chooses the stages."""
    pipeline = config.pipeline
    return pipeline.planner in WHOLE_RUN and pipeline.cuts is None and pipeline.plan is None


def asks_automatic(config: Config) -> bool:
    """Whether all planners are asked."""
    pipeline = config.pipeline
    return pipeline.planner == AUTOMATIC and pipeline.cuts is None and pipeline.plan is None


def check_automatic(config: Config) -> None:
    """Raises CapslogError for a run in which planners cannot be compared, by the key that says so."""
    pipeline = config.pipeline
    if not asks_automatic(config):
        return
    _refuse(config)
    if RunShape.of_config(config).limits_by_plan:
        raise CapslogError(
            f"pipeline.planner={AUTOMATIC} does not go with pipeline.schedule={pipeline.schedule}: the limits of that "
            "schedule follow from cuts that are known; choose 1f1b, or auto"
        )


def check_replicated(config: Config) -> None:
    """Raises CapslogError for a run whose stages cannot have replicas, by the key that says so, and for an
    elastic one with a planner that only balances."""
    pipeline = config.pipeline
    if pipeline.planner in BALANCED and config.elastic.enabled:
        raise CapslogError(
            f"pipeline.planner={pipeline.planner} does not go with elastic.enabled=true: it knows no capacities to "
            "keep to after a membership change; choose planner throughput or exact"
        )
    if not asks_replicated(config):
        return
    check_ranks_memory(pipeline.planner, pipeline.memory)
    _refuse(config)


def _refuse(config: Config) -> None:
    """Raises CapslogError for what does not go with planners that share all devices out."""
    pipeline = config.pipeline
    rules = {
        f"engine={config.engine}": (config.engine == "varuna", "Varuna runs equal pipelines; set engine=capslog"),
        f"pipeline.replicas={pipeline.replicas}": (
            pipeline.replicas > 1,
            "it shares all devices out itself; set replicas=1 and devices to all of them",
        ),
        f"pipeline.stages_per_rank={pipeline.rounds}": (
            pipeline.rounds > 1,
            "it says itself how many stages a rank has; set 1",
        ),
        "elastic.enabled=true": (
            config.elastic.enabled and pipeline.planner != AUTOMATIC,
            "it is not asked anew after a membership change; choose planner budget, joint or auto",
        ),
    }
    for key, (wrong, why) in rules.items():
        if wrong:
            raise CapslogError(f"pipeline.planner={pipeline.planner} does not go with {key}: {why}")


def plan_replicated(config: Config, profile: Profile, link: Link | None = None) -> Plan:
    """The planner's plan, not judged yet; it chooses the accumulation blocks where the config has one, which is
    what null means for one pipeline.
    """
    pipeline, run = config.pipeline, RunShape.of_config(config)
    blocks = config.num_blocks if config.num_blocks > 1 else None
    return placed_plan(profile, pipeline.devices, pipeline.planner, pipeline.capacity, run, link, blocks)


def plan_automatic(
    config: Config, profile: Profile, link: Link | None, judge: Callable[[Plan, Config], Plan]
) -> tuple[Plan, Config]:
    """The fastest plan of all planners, and the config with the constants of the run that it chose.

    judge: says whether a plan of the full form fits, by more than the planner knew.
    """
    pipeline, run = config.pipeline, RunShape.of_config(config)
    limit = pipeline.search_seconds
    if config.elastic.enabled:
        return _plan_elastic(config, profile, judge), config
    plan = automatic_plan(profile, pipeline.devices, pipeline.memory, pipeline.capacity, run, link, limit)
    config = with_choices_of(config, plan)
    if not plan.short and (judged := judge(plan, config)).fits is not None:
        plan = with_stage_bytes(judged) if plan.planner in LAYERWISE else judged
    return plan, config


def _plan_elastic(config: Config, profile: Profile, judge: Callable[[Plan, Config], Plan]) -> Plan:
    """What the members of an elastic run would choose for its devices, judged. The run keeps the config's own
    constants, and every generation its plan's.
    """
    from varuna_capslog.membership.protection import budget_with_reserves

    pipeline, run = config.pipeline, RunShape.of_config(config)
    found = budget_with_reserves(config, profile)
    if found is None:  # says what the profile lacks, or what protection takes is not known
        found = layerwise_plan(profile, pipeline.devices, BUDGET, pipeline.capacity, run)
    found = dataclasses.replace(found, fits=None, shortfall=None, notes=())
    plan = with_stage_bytes(judge(found, with_choices_of(config, found)))
    return dataclasses.replace(plan, notes=(*plan.notes, ELASTIC))
