"""The plan that a run with planner `pipedream`, `piper`, `graphpipe` or `capture` begins with: stages with replicas."""

from __future__ import annotations

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.config.settings import Config
from varuna_capslog.planners import BALANCED, REPLICATED
from varuna_capslog.planners.seconds import Link
from varuna_capslog.planning.replicated import check_ranks_memory, replicated_plan
from varuna_capslog.plans.plan import Plan
from varuna_capslog.profiles.record import Profile
from varuna_capslog.schedules import RunShape

__all__ = ["asks_replicated", "check_replicated", "plan_replicated", "with_units_of"]


def asks_replicated(config: Config) -> bool:
    """Whether such a planner chooses the stages."""
    pipeline = config.pipeline
    return pipeline.planner in REPLICATED and pipeline.cuts is None and pipeline.plan is None


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
    rules = {
        f"engine={config.engine}": (config.engine == "varuna", "Varuna runs equal pipelines; set engine=capslog"),
        f"pipeline.replicas={pipeline.replicas}": (
            pipeline.replicas > 1,
            "it gives every stage replicas of its own; set replicas=1 and devices to all of them",
        ),
        f"pipeline.stages_per_rank={pipeline.rounds}": (pipeline.rounds > 1, "it plans one stage per rank; set 1"),
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
    return replicated_plan(profile, pipeline.devices, pipeline.planner, pipeline.capacity, run, link, blocks)


def with_units_of(config: Config, plan: Plan) -> Config:
    """The config with the accumulation blocks and the schedule of its planner's plan."""
    if not asks_replicated(config):
        return config
    train = config.train.model_copy(update={"accumulation_blocks": plan.units.blocks})
    pipeline = config.pipeline.model_copy(update={"schedule": plan.schedule, "recompute": False})
    return config.model_copy(update={"train": train, "pipeline": pipeline})
