"""Plans of planners that share all devices out themselves: `budget`, beyond one line of stages, and `joint`."""

from __future__ import annotations

import dataclasses
import time

from varuna_capslog.base.units import format_bytes
from varuna_capslog.memory import NEVER
from varuna_capslog.memory.headroom import Headroom
from varuna_capslog.planners import BUDGET, JOINT
from varuna_capslog.planners.joint import Device, JointPlan, NoFleet, best_fleet, best_fleet_of_run
from varuna_capslog.planning.cuts import cut_plan
from varuna_capslog.planning.placed.equal_pipelines import equal_pipelines_plan
from varuna_capslog.planning.placed.graphs import faster_plan
from varuna_capslog.planning.problem import Problem
from varuna_capslog.planning.verdict import judge
from varuna_capslog.plans.parts import Shortfall
from varuna_capslog.plans.plan import Plan

__all__ = ["budget_plan", "joint_plan"]


def budget_plan(problem: Problem, planner: str = BUDGET) -> Plan:
    """A line of stages with memory intervals, or stages with branches and replicas where these are faster. The plan
    names the planner so.
    """
    until = None if problem.search_seconds is None else time.perf_counter() + problem.search_seconds
    plan = equal_pipelines_plan(problem)
    if problem.pipelines == 1 and problem.speeds is None:
        plan = faster_plan(problem, plan, until)
    return dataclasses.replace(plan, planner=planner)


def joint_plan(problem: Problem, planner: str = JOINT) -> Plan:
    """Pipelines of any length, with room for what lies beside training where there is some; where none fits, the
    smallest-peak pipeline, which says what it lacks. The plan names the planner so.
    """
    profile, run, memory, link = problem.profile, problem.run.settled(), problem.memory, problem.link
    devices = [Device(device.capacity_bytes, device.speed or 1.0) for device in problem.devices]
    if problem.blocks_open:
        samples = run.microbatches * profile.conditions.get("microbatch_size", 1)
        fleet = best_fleet(profile, devices, samples, None, run, memory, link)
    else:
        fleet = best_fleet_of_run(profile, devices, run, memory, link, problem.beside or None)
        if problem.beside and isinstance(fleet, NoFleet):
            fleet = best_fleet_of_run(profile, devices, run, memory, link)
    plan = fleet.plan if isinstance(fleet, JointPlan) else _smallest_peak(problem, fleet)
    return dataclasses.replace(plan, planner=planner)


def _smallest_peak(problem: Problem, fleet: NoFleet) -> Plan:
    """The smallest-peak pipeline over as many devices as there are layers, and what it lacks."""
    profile, blocks = problem.profile, fleet.run.num_blocks
    used = sorted(fleet.devices, key=lambda device: device.capacity or NEVER, reverse=True)[: profile.num_layers]
    sizes = [device.capacity or NEVER - 1 for device in used]
    single = Problem.of(profile, len(used), sizes, fleet.run, problem.link, memory=fleet.memory)
    plan = cut_plan(single, "exact")
    if plan.fits:
        # it lacks the gradients of a second block, which the planner of one pipeline does not know
        usable = [NEVER if device.capacity is None else Headroom.of(profile).usable(device.capacity) for device in used]
        verdict = judge(fleet.stage_bytes(plan.cut_list), usable, Headroom())
        assert verdict is not None
        lack = f"stage {verdict.worst} needs {format_bytes(verdict.lacking)} more for the gradients that wait"
        note = f"does not fit: {lack} until all {blocks} accumulation blocks are added; use 1 block"
        shortfall = Shortfall(verdict.worst, max(1, verdict.lacking))
        plan = dataclasses.replace(plan, fits=False, shortfall=shortfall, notes=(note,))
    return plan
