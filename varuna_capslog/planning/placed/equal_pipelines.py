"""Planner `budget` for several equal pipelines, which share the accumulation blocks of a step: one plan for all. Each
of several pipelines also keeps the gradients of all its blocks until they are exchanged.
"""

from __future__ import annotations

import dataclasses
import time
from collections import defaultdict
from collections.abc import Sequence

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.memory.costs import Headroom
from varuna_capslog.planners import BUDGET
from varuna_capslog.planners.fleet import waiting_blocks
from varuna_capslog.planning.cuts import going_round
from varuna_capslog.planning.fastest import layerwise_plan
from varuna_capslog.planning.playing import SAME, moment_bytes, with_step_seconds
from varuna_capslog.planning.problem import Problem
from varuna_capslog.planning.verdict import judge_by_fold
from varuna_capslog.plans.parts import MemoryInterval, PlanRank, PlanStage, Units, ranges_of
from varuna_capslog.plans.plan import Plan
from varuna_capslog.profiles.record import Profile, with_beside
from varuna_capslog.schedules import RunShape

__all__ = ["equal_pipelines_plan", "lacking", "shared_round", "with_shared_moments"]


# -- Distribution of optimizer states (moments) over replicas: about as many bytes on each.
#
# `replicated` uses it for plans that do not fit if every replica keeps all moments, a run with `pipeline.zero` for all
# plans.


def with_shared_moments(profile: Profile, plan: Plan) -> Plan | None:
    """Return the plan where only one holder keeps the moments of each layer: from the largest layer on, the holder that
    keeps the fewest bytes so far. None where no layer with several holders has known moments. Layers that share
    parameters keep their moments on all holders, as the engine requires.
    """
    sizes, apart = moment_bytes(profile), {layer for parameter in profile.shared for layer in parameter.layers}
    holders = defaultdict[int, list[int]](list)
    for number, stage in enumerate(plan.stages):
        for layer in stage.numbers:
            holders[layer].append(number)
    several = [layer for layer, numbers in holders.items() if len(numbers) > 1 and layer not in apart]
    shared = [layer for layer in several if sizes.get(layer)]
    if not shared:
        return None
    kept: dict[int, int] = defaultdict(int)
    for layer in holders.keys() - set(shared):
        for number in holders[layer]:
            kept[plan.stages[number].rank] += sizes.get(layer) or 0
    elsewhere: dict[int, set[int]] = defaultdict(set)
    for layer in sorted(shared, key=lambda layer: (-(sizes[layer] or 0), layer)):
        keeper = min(holders[layer], key=lambda number: kept[plan.stages[number].rank])
        kept[plan.stages[keeper].rank] += sizes[layer] or 0
        for number in set(holders[layer]) - {keeper}:
            elsewhere[number].add(layer)
    stages = tuple(_leaving(stage, elsewhere[number]) for number, stage in enumerate(plan.stages))
    return dataclasses.replace(plan, stages=stages)


def _leaving(stage: PlanStage, layers: set[int]) -> PlanStage:
    """Return the stage whose rank keeps no moments of these layers."""
    pieces = tuple(MemoryInterval(*piece, "replica") for piece in ranges_of(sorted(layers))) if layers else ()
    return dataclasses.replace(stage, moments=pieces)


# -- planner `budget` for several equal pipelines


_ROUNDS = 4
"""Largest number of searches, each with less memory than before, until all pipelines fit."""


def equal_pipelines_plan(problem: Problem) -> Plan:
    """Return the plan of planner `budget` for the problem's equal pipelines, not judged yet.

    A stage has the capacity of its smallest device and the speed of its slowest. The pipelines share the optimizer's
    moments of every layer where the problem requires it; else only if no plan fits otherwise, and the members do not
    change.

    Raises CapslogError as `layerwise_plan`, and for accumulation blocks that cannot be shared evenly.
    """
    search, several = _EqualPipelines(problem), problem.pipelines > 1
    if problem.shares_moments:
        return search.plan(True)
    plan = search.plan(False)
    may_share = several and not problem.members_change and any(moment_bytes(problem.profile).values())
    if not may_share or plan.step_seconds is not None:
        return plan
    shared = search.plan(True)
    return plan if shared.step_seconds is None else shared


class _EqualPipelines:
    """Search for one plan that all pipelines share."""

    def __init__(self, problem: Problem) -> None:
        replicas, run = problem.pipelines, problem.run
        if run.num_blocks % replicas:
            raise CapslogError(
                f"{replicas} pipelines cannot share {run.num_blocks} accumulation block(s) evenly; set "
                "train.accumulation_blocks to a multiple of them"
            )
        self._problem, self._replicas, self._width, self._run = problem, replicas, problem.width, run
        self._smallest = _by_stage(problem.devices, self._width)
        speeds = [1.0 if device.speed is None else device.speed for device in problem.devices]
        slowest = [min(speeds[at :: self._width]) for at in range(self._width)]
        self._slowest = None if set(slowest) == {1.0} else slowest
        limit = problem.search_seconds
        self._until = None if limit is None else time.perf_counter() + limit

    def plan(self, shares: bool) -> Plan:
        """Return the plan; its step is None where nothing fits. shares: each pipeline keeps an equal part of the
        moments, as far as whole layers allow.
        """
        begun, problem, replicas, run = time.perf_counter(), self._problem, self._replicas, self._run
        profile, share = problem.profile, problem.share
        held = _held(problem, shares)
        limits = [size for size in self._smallest if size is not None]
        usable: list[int] | None = limits if len(limits) == self._width else None
        for _ in range(_ROUNDS):
            remaining = None if self._until is None else max(0.0, self._until - time.perf_counter())
            single = Problem.of(held, self._width, usable, share, problem.link, speeds=self._slowest)
            single = dataclasses.replace(single, tier=problem.tier, search_seconds=remaining)
            single_plan = layerwise_plan(single, BUDGET)
            if shares and any(stage.moments for stage in single_plan.stages):  # moments are in the host tier
                single_plan = dataclasses.replace(single_plan, step_seconds=None)
            plan = self._together(single_plan)
            if shares and (single_plan.step_seconds is not None or problem.shares_moments):
                plan = with_shared_moments(profile, plan) or plan
            if replicas == 1 or usable is None or single_plan.step_seconds is None:
                break
            lack = lacking(judge_by_fold(profile, plan, run, tier=problem.tier), self._smallest, Headroom.of(profile))
            if not any(lack):
                break
            usable = [max(1, size - more) for size, more in zip(usable, lack, strict=True)]
        if replicas > 1 and single_plan.step_seconds is not None:  # a single pipeline has its step already
            plan = self._with_step(plan, single_plan, shares)
        return dataclasses.replace(plan, search_seconds=time.perf_counter() - begun)

    def _with_step(self, plan: Plan, single_plan: Plan, shares: bool) -> Plan:
        """Return the plan with its own step, and with the bound of a single pipeline, which all pipelines share."""
        plan = with_step_seconds(self._problem.profile, plan, self._run, self._problem.link)
        if shares and not self._problem.shares_moments:
            note = "replicas share the optimizer's moments (stages[].moments), which do not fit otherwise"
            plan = dataclasses.replace(plan, notes=(*plan.notes, note))
        if single_plan.bound_seconds is None or plan.step_seconds is None:
            return plan
        space = f"{single_plan.search_space}, in {self._replicas} equal pipelines"
        proven = plan.step_seconds <= single_plan.bound_seconds * (1 + SAME)
        return dataclasses.replace(plan, proven=proven, search_space=space)

    def _together(self, single_plan: Plan) -> Plan:
        """Repeat the stages of a plan for every pipeline, each with its devices and its blocks."""
        replicas, run = self._replicas, self._run
        share = run.num_blocks // replicas

        def at(stage: PlanStage, replica: int) -> PlanStage:
            blocks = None if replicas == 1 else tuple(range(replica * share, (replica + 1) * share))
            return dataclasses.replace(stage, ranks=(replica * self._width + stage.rank,), blocks=blocks)

        return dataclasses.replace(
            single_plan,
            stages=tuple(at(stage, replica) for replica in range(replicas) for stage in single_plan.stages),
            units=Units(run.num_microbatches, run.microbatch_size, single_plan.units.blocks and run.num_blocks),
            ranks=self._problem.devices,
            profile_digest=self._problem.profile.digest,
        )


def _by_stage(devices: Sequence[PlanRank], width: int) -> list[int | None]:
    """Smallest capacity of each stage's devices."""
    sizes = [device.capacity_bytes for device in devices]
    rows = [[size for size in sizes[at::width] if size is not None] for at in range(width)]
    return [min(row) if row else None for row in rows]


def _held(problem: Problem, shares: bool) -> Profile:
    """Return the profile with the bytes that several pipelines add to each layer. shares: the pipelines share the
    moments evenly.
    """
    profile, replicas = problem.profile, problem.pipelines
    waiting = _waiting_bytes(profile, problem.run, problem.share)
    if shares:
        moments = moment_bytes(profile)
        waiting = [more - (moments.get(at) or 0) * (replicas - 1) // replicas for at, more in enumerate(waiting)]
    return with_beside(profile, waiting)


def shared_round(problem: Problem, planner: str) -> Plan:
    """Return the plan of cuts, not judged, whose pipelines share the optimizer's moments."""
    plan = going_round(dataclasses.replace(problem, profile=_held(problem, True)), planner)
    plan = dataclasses.replace(plan, profile_digest=problem.profile.digest)
    return with_shared_moments(problem.profile, plan) or plan


def _waiting_bytes(profile: Profile, run: RunShape, share: RunShape) -> list[int]:
    """Bytes of each layer's gradients on one of several pipelines, beyond those on a single pipeline."""
    many = waiting_blocks(profile, share.num_blocks, run.num_blocks)
    more = many - waiting_blocks(profile, share.num_blocks, share.num_blocks)
    return [more * (layer.parameter_bytes or 0) for layer in profile.layers]


def lacking(plan: Plan, limits: Sequence[int | None], headroom: Headroom) -> list[int]:
    """Bytes that the fullest device of each stage lacks in a judged plan; 0 where the device has enough.
    limits: bytes of the devices of one pipeline.
    """
    if plan.fits is not False:
        return [0] * len(limits)
    sizes = [max(rank.bytes or 0 for rank in plan.ranks[at :: len(limits)]) for at in range(len(limits))]
    return [max(0, headroom.device(size) - limit) if limit else 0 for size, limit in zip(sizes, limits, strict=True)]
