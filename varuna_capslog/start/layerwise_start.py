"""The plan that a run with planner `budget`, `dawnpiper` or `vpipe` begins with: pipelines with memory intervals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.config.defaults import STAGES_PER_RANK
from varuna_capslog.config.settings import Config
from varuna_capslog.memory.headroom import Headroom
from varuna_capslog.planners import BUDGET, LAYERWISE
from varuna_capslog.planners.seconds import Link
from varuna_capslog.planning.layerwise import budget_plan, check_memory, layerwise_plan
from varuna_capslog.planning.placed.equal_pipelines import equal_pipelines_plan, lacking
from varuna_capslog.planning.verdict import HostMemory, capacities_of_devices
from varuna_capslog.planning.wider import LOOPED
from varuna_capslog.plans.parts import PlanRank
from varuna_capslog.plans.plan import Plan
from varuna_capslog.profiles.record import Profile
from varuna_capslog.schedules import RunShape
from varuna_capslog.start.choices import with_choices_of

__all__ = ["asks_layerwise", "check_layerwise", "configured_link", "plan_layerwise"]

_SEARCHES = 3
"""Each for devices of less memory than the one before."""


def asks_layerwise(config: Config) -> bool:
    """Whether such a planner chooses the cuts."""
    pipeline = config.pipeline
    return pipeline.planner in LAYERWISE and pipeline.cuts is None and pipeline.plan is None


def check_layerwise(config: Config) -> None:
    """Raises CapslogError for a run that cannot have such pipelines, by the key that says so."""
    if not asks_layerwise(config):
        return
    pipeline = config.pipeline
    check_memory(pipeline.planner, pipeline.memory)
    goes_round = pipeline.planner == BUDGET and pipeline.schedule == LOOPED and not config.elastic.enabled
    rules = {
        f"engine={config.engine}": (config.engine == "varuna", "Varuna runs no memory intervals; set engine=capslog"),
        f"pipeline.replicas={pipeline.replicas}": (
            pipeline.replicas > 1 and pipeline.planner != BUDGET,
            "it plans one pipeline; set replicas=1, or choose planner budget",
        ),
        f"pipeline.stages_per_rank={pipeline.rounds}": (
            pipeline.rounds > 1 and not (goes_round and pipeline.rounds == STAGES_PER_RANK),
            "it plans one stage per rank; set 1",
        ),
        f"pipeline.schedule={pipeline.schedule}": (
            pipeline.planner != BUDGET and RunShape.of_config(config).limits_by_plan,
            "the limits of that schedule follow from cuts that are known; choose 1f1b",
        ),
        "elastic.enabled=true": (
            config.elastic.enabled and pipeline.planner != BUDGET,
            "its search does not know what protection takes; choose planner budget",
        ),
    }
    for key, (wrong, why) in rules.items():
        if wrong:
            raise CapslogError(f"pipeline.planner={pipeline.planner} does not go with {key}: {why}")


def configured_link(config: Config, link: Link | None) -> Link:
    """The link, with what the config says where it says nothing itself."""
    said, unsaid = Link.of_config(config), Link()
    if link is None:
        return said
    names = [field.name for field in fields(Link) if getattr(link, field.name) == getattr(unsaid, field.name)]
    return replace(link, **{name: getattr(said, name) for name in names})


def plan_layerwise(config: Config, profile: Profile, link: Link, judge: Callable[[Plan, Config], Plan]) -> Plan:
    """The planner's plan, judged; in an elastic run with a capacity, one in which protection has room.

    Where the programs of its ranks need a little more than the search took them to, it is searched again for devices
    that have so much less; the first plan is the answer where none of these fits.

    Args:
        judge: a plan, and the config with what it has chosen, -> whether it fits, by more than the search knows.
    """
    limits = capacities_of_devices(config.pipeline.capacity, config.pipeline.devices)
    first, less = None, config
    for _ in range(_SEARCHES):
        found = _searched(less, profile, link)
        if limits is not None and less is not config:
            sizes = limits * config.pipeline.replicas
            ranks = [replace(one, capacity_bytes=size) for one, size in zip(found.ranks, sizes, strict=True)]
            found = replace(found, ranks=tuple(ranks))
        plan = judge(found, with_choices_of(config, found))
        first = first or plan
        if plan.fits is not False:
            return plan
        lack = lacking(plan, limits, Headroom.of(profile)) if limits is not None else []
        if found.step_seconds is None or not any(lack):  # the search itself has found nothing that fits
            break
        sizes = capacities_of_devices(less.pipeline.capacity, config.pipeline.devices) or []
        spared = [max(1, size - more) for size, more in zip(sizes, lack, strict=True)]
        less = config.model_copy(update={"pipeline": config.pipeline.model_copy(update={"capacity": spared})})
    assert first is not None
    return first


def _searched(config: Config, profile: Profile, link: Link) -> Plan:
    """The planner's plan, not judged."""
    if config.elastic.enabled:
        from varuna_capslog.membership.protection import budget_with_reserves

        if (found := budget_with_reserves(config, profile)) is not None:
            return replace(found, fits=None, shortfall=None, notes=())
    pipeline, run = config.pipeline, RunShape.of_config(config)
    tier = HostMemory.of_config(config)
    limit, name = pipeline.search_seconds, pipeline.planner
    if pipeline.replicas > 1:
        limits = capacities_of_devices(pipeline.capacity, pipeline.devices)
        one = [PlanRank(capacity_bytes=limits[at] if limits else None) for at in range(pipeline.devices)]
        shares, every = not config.elastic.enabled, one * pipeline.replicas
        return equal_pipelines_plan(profile, pipeline.replicas, every, run, link, tier, limit, shares)
    if name == BUDGET and not config.elastic.enabled:
        return budget_plan(profile, pipeline.devices, pipeline.capacity, run, link, tier, limit)
    return layerwise_plan(profile, pipeline.devices, name, pipeline.capacity, run, link, tier, limit)
