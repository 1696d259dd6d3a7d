"""The plan that a run with planner `pipedream`, `piper`, `graphpipe`, `capture`, `madpipe` or `auto` begins with."""

from __future__ import annotations

from collections.abc import Callable

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.config.settings import Config
from varuna_capslog.planners import AUTOMATIC, BALANCED, LAYERWISE, WHOLE_RUN
from varuna_capslog.planners.seconds import Link
from varuna_capslog.planning.automatic import automatic_plan
from varuna_capslog.planning.placed import check_ranks_memory, placed_plan
from varuna_capslog.planning.ranks import with_stage_bytes
from varuna_capslog.plans.plan import Plan
from varuna_capslog.profiles.record import Profile
from varuna_capslog.schedules import RunShape

__all__ = [
    "asks_automatic",
    "asks_replicated",
    "check_automatic",
    "check_replicated",
    "plan_automatic",
    "plan_replicated",
    "with_units_of",
]


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
    if pipeline.planner == AUTOMATIC and config.elastic.enabled:
        raise CapslogError(
            f"pipeline.planner={AUTOMATIC} does not go with elastic.enabled=true: which planner is fastest is not "
            "searched anew at a change; choose planner budget, throughput or joint"
        )
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
            config.elastic.enabled,
            "after a membership change pipelines of equal stages are searched; choose planner throughput or joint",
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
    plan = automatic_plan(profile, pipeline.devices, pipeline.memory, pipeline.capacity, run, link, limit)
    config = with_units_of(config, plan)
    if not plan.short and (judged := judge(plan, config)).fits is not None:
        plan = with_stage_bytes(judged) if plan.planner in LAYERWISE else judged
    return plan, config


def with_units_of(config: Config, plan: Plan) -> Config:
    """The config with the accumulation blocks and the schedule of the plan, where a planner has chosen these."""
    if not (asks_replicated(config) or asks_automatic(config)):
        return config
    found = {"schedule": plan.schedule} | ({"recompute": False} if plan.planner in WHOLE_RUN else {})
    train = config.train.model_copy(update={"accumulation_blocks": plan.units.blocks or config.num_blocks})
    pipeline = config.pipeline.model_copy(update=found)
    return config.model_copy(update={"train": train, "pipeline": pipeline})
