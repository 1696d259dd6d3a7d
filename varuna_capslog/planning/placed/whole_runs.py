"""Plans of planners that divide all devices into pipelines and replicas themselves: `budget` and `joint`."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.base.units import format_bytes
from varuna_capslog.memory import NEVER
from varuna_capslog.memory.costs import Headroom
from varuna_capslog.planners import BUDGET, JOINT
from varuna_capslog.planners.joint import Device, JointPlan, NoFleet, best_fleet, best_fleet_of_run
from varuna_capslog.planners.replicas import NEEDS_TENSORS, REPLICATED, GraphCosts, ReplicatedStage
from varuna_capslog.planning.cuts import cut_plan
from varuna_capslog.planning.placed.equal_pipelines import equal_pipelines_plan
from varuna_capslog.planning.placed.replicated import PlacedIntervals, StagesPlayed, frame_of
from varuna_capslog.planning.playing import SAME, even_share_seconds
from varuna_capslog.planning.problem import Problem
from varuna_capslog.planning.verdict import judge
from varuna_capslog.plans.parts import Shortfall
from varuna_capslog.plans.plan import Plan
from varuna_capslog.profiles.record import Profile
from varuna_capslog.schedules.shape import AUTO_SCHEDULE

__all__ = ["GRAPH_SCHEDULES", "budget_plan", "faster_plan"]


# -- Planner `budget` beyond one line of stages: branches side by side, and replicas of single stages.
#
# The stages are those of planner `graphpipe`, or in long lines of layers those of `pipedream`. Both assume that all
# activations are kept. Under a capacity they are also called for layers that save fewer bytes, and stages that do not
# fit get memory intervals (`replicated`).


GRAPH_SCHEDULES = (AUTO_SCHEDULE, "1f1b")
"""Schedules of a run for which such stages are evaluated: their action lists are those of 1f1b."""

_BRANCHES = 0.9
"""Branches are evaluated where the longest path through the layers takes at most this part of their seconds."""
_QUICK = 128
"""Largest layers x devices at which `graphpipe` takes a tenth of a second at most for a line of layers."""
_SAVED = (1.0, 0.4, 0.0)
"""Parts of their bytes that layers save, for each of which stages are searched under a capacity."""


def faster_plan(problem: Problem, line: Plan, until: float | None = None) -> Plan:
    """Return a plan with branches or replicas that is faster than `line`, or fits where that does not; else `line`.
    Replicas share the accumulation blocks of the step; where devices leave and join, each keeps all its moments.

    line: of planner `budget`; without `step_seconds` where nothing fits. until: end of the search, time.perf_counter().
    """
    profile, devices, count = problem.profile, problem.width, problem.blocks
    if devices == 1 or not profile.timed or problem.run.schedule not in GRAPH_SCHEDULES:
        return line
    branches, planner = _longest_way(profile) <= _BRANCHES, _asked_for_stages(profile, devices)
    shape = dataclasses.replace(problem.run, schedule="1f1b")
    bound, step = even_share_seconds(profile, shape.microbatches, devices), line.step_seconds
    if not (branches or count != 1) or (step is not None and step <= bound * (1 + SAME)):
        return line
    usable = problem.usable
    try:
        least = None if usable is None else min(usable)
        costs = GraphCosts.of_profile(profile, devices, shape.microbatches, least, count, problem.link)
        intervals = None if usable is None else PlacedIntervals(profile, shape)
    except CapslogError:  # the profile has what a line needs, but lacks bytes of messages or gradients
        return line
    line_of_layers = profile.edges == [(layer, layer + 1) for layer in range(profile.num_layers - 1)]
    routes = "direct" if planner in NEEDS_TENSORS and not line_of_layers else "relay"
    frame = frame_of(problem, shape, BUDGET, routes)
    search = StagesPlayed(profile, shape, problem.link, frame, costs, intervals, not problem.members_change)
    search.beat(line, problem.longest)
    for stages in _answers(costs, planner):
        if until is not None and time.perf_counter() >= until:
            break
        search.weigh(stages)
    if search.best is not None and search.best.plan is not line:
        search.settle()
    best = search.best
    if best is None or best.lack or best.plan is line:
        return line
    return dataclasses.replace(
        best.plan,
        bound_seconds=min(bound, best.step),
        proven=best.step <= bound * (1 + SAME),
        search_space=f"all plans on {devices} devices",
    )


def _asked_for_stages(profile: Profile, devices: int) -> str:
    """Planner of the stages: `graphpipe` where branches are worth its search or it is quick, else `pipedream`."""
    quick = profile.num_layers * devices <= _QUICK
    return "graphpipe" if profile.tensors and (quick or _longest_way(profile) <= _BRANCHES) else "pipedream"


def _answers(costs: GraphCosts, planner: str) -> Iterator[list[ReplicatedStage]]:
    """Yield the stages to evaluate: of layers that keep everything, then of layers that save fewer bytes."""
    find, yielded = REPLICATED[planner], list[list[ReplicatedStage]]()
    for part in _SAVED if costs.usable is not None else _SAVED[:1]:
        try:
            answers = find(dataclasses.replace(costs, saved=tuple(round(part * size) for size in costs.saved)))
        except CapslogError:  # a graph that cannot be searched
            break
        for stages in answers:
            if stages not in yielded:
                yielded.append(stages)
                yield stages


def _longest_way(profile: Profile) -> float:
    """Part of a model's seconds that the longest path through its layers takes; 1 where no branches are known."""
    if not profile.timed or not profile.tensors:
        return 1.0
    pairs = zip(profile.column("forward_seconds"), profile.column("backward_seconds"), strict=True)
    seconds = [float(forward + backward) for forward, backward in pairs]
    way = list(seconds)  # of the longest path that ends with each layer
    for writer, reader in profile.edges:
        way[reader] = max(way[reader], way[writer] + seconds[reader])
    return max(way) / sum(seconds) if any(seconds) else 1.0


# -- planners that distribute all devices themselves


def budget_plan(problem: Problem, planner: str = BUDGET) -> Plan:
    """Return a line of stages with memory intervals, or stages with branches and replicas where these are faster."""
    until = None if problem.search_seconds is None else time.perf_counter() + problem.search_seconds
    plan = equal_pipelines_plan(problem)
    if problem.pipelines == 1 and problem.speeds is None:
        plan = faster_plan(problem, plan, until)
    return dataclasses.replace(plan, planner=planner)


def joint_plan(problem: Problem, planner: str = JOINT) -> Plan:
    """Return pipelines of any length, if possible with room for the bytes beside training; where none fits, the
    pipeline with the smallest peak, which states what it lacks.
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
    """Pipeline with the smallest peak on at most as many devices as layers, and what it lacks."""
    profile, blocks = problem.profile, fleet.run.num_blocks
    used = sorted(fleet.devices, key=lambda device: device.capacity or NEVER, reverse=True)[: profile.num_layers]
    sizes = [device.capacity or NEVER - 1 for device in used]
    single = Problem.of(profile, len(used), sizes, fleet.run, problem.link, memory=fleet.memory)
    plan = cut_plan(single, "exact")
    if plan.fits:
        # planner `exact` does not count the gradients of a second block
        usable = [NEVER if device.capacity is None else Headroom.of(profile).usable(device.capacity) for device in used]
        verdict = judge(fleet.stage_bytes(plan.cut_list), usable, Headroom())
        assert verdict is not None
        lack = f"stage {verdict.worst} needs {format_bytes(verdict.lacking)} more for the gradients that wait"
        note = f"does not fit: {lack} until all {blocks} accumulation blocks are added; use 1 block"
        shortfall = Shortfall(verdict.worst, max(1, verdict.lacking))
        plan = dataclasses.replace(plan, fits=False, shortfall=shortfall, notes=(note,))
    return plan
