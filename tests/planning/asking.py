"""Calls of `solve` and of single searches for tests: one pipeline, positional arguments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from varuna_capslog.memory import AUTO
from varuna_capslog.planners.seconds import Link
from varuna_capslog.planning import fastest
from varuna_capslog.planning.placed import equal_pipelines
from varuna_capslog.planning.problem import Problem
from varuna_capslog.planning.solve import solve
from varuna_capslog.planning.verdict import HostMemory
from varuna_capslog.plans.parts import PlanRank
from varuna_capslog.plans.plan import Plan
from varuna_capslog.profiles.record import Profile
from varuna_capslog.schedules import DEFAULT_RUN, RunShape

__all__ = ["equal_pipelines_plan", "judged_layerwise_plan", "layerwise_plan", "plan"]

Capacity = int | Sequence[int] | None


def plan(
    profile: Profile,
    devices: int,
    planner: str = "exact",
    memory: str = AUTO,
    capacity: Capacity = None,
    run: RunShape = DEFAULT_RUN,
    link: Link | None = None,
    cuts: Sequence[int] | None = None,
) -> Plan:
    """Return the planner's own plan; `budget` does not weigh the plans of other planners."""
    problem = Problem.of(profile, devices, capacity, run, link, memory=memory, cuts=cuts)
    return solve(problem, planner, weighs_others=False)


def layerwise_plan(
    profile: Profile,
    devices: int | Sequence[float],
    planner: str,
    capacity: Capacity,
    run: RunShape,
    link: Link | None = None,
    tier: HostMemory | None = None,
    limit_seconds: float | None = None,
) -> Plan:
    """devices: their number, or the speed of each."""
    speeds = None if isinstance(devices, int) else devices
    count = devices if isinstance(devices, int) else len(devices)
    problem = Problem.of(profile, count, capacity, run, link, speeds=speeds)
    problem = replace(problem, tier=tier or HostMemory(), search_seconds=limit_seconds)
    return fastest.layerwise_plan(problem, planner)


def equal_pipelines_plan(
    profile: Profile,
    pipelines: int,
    devices: Sequence[PlanRank],
    run: RunShape,
    link: Link | None = None,
    may_share: bool = False,
) -> Plan:
    """Return a plan that is not judged. may_share: the members do not change, so moments may be shared."""
    problem = Problem(
        profile, tuple(devices), run, pipelines=pipelines, link=link or Link(), members_change=not may_share
    )
    return equal_pipelines.equal_pipelines_plan(problem)


def judged_layerwise_plan(
    profile: Profile,
    devices: int,
    planner: str,
    memory: str,
    capacity: Capacity,
    run: RunShape,
    link: Link | None = None,
    limit_seconds: float | None = None,
) -> Plan:
    """Return one line of stages with memory intervals, judged and simulated."""
    problem = Problem.of(profile, devices, capacity, run, link, memory=memory)
    problem = replace(problem, blocks_open=False, search_seconds=limit_seconds)
    return solve(problem, planner, weighs_others=False)
