"""Planner `budget` for several equal pipelines, which share the accumulation blocks of a step: one plan for all.

`planning/layerwise` searches one pipeline; beside what it holds alone, each of several keeps the gradients of all its
blocks until they are exchanged. `membership/budgeted` asks as well, for what the devices could be after a change.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.memory.headroom import Headroom
from varuna_capslog.planners import BUDGET
from varuna_capslog.planners.pipelines import waiting_blocks
from varuna_capslog.planning.layerwise import layerwise_plan
from varuna_capslog.planning.placed.shared_moments import with_shared_moments
from varuna_capslog.planning.playing import SAME, with_step_seconds
from varuna_capslog.planning.problem import Problem
from varuna_capslog.planning.ranks import judged
from varuna_capslog.planning.stage_seconds import moment_bytes
from varuna_capslog.plans.parts import PlanRank, PlanStage, Units
from varuna_capslog.plans.plan import Plan
from varuna_capslog.profiles.beside import with_beside
from varuna_capslog.profiles.record import Profile
from varuna_capslog.schedules import RunShape

__all__ = ["equal_pipelines_plan", "lacking"]

_ROUNDS = 4
"""Searches, each with less memory than the one before, until the pipelines fit together."""


def equal_pipelines_plan(problem: Problem) -> Plan:
    """The plan of planner `budget` for the equal pipelines of the problem, not judged yet.

    A stage keeps to the smallest of its devices and is as fast as the slowest. Where nothing fits otherwise, the
    pipelines share the optimizer's moments of every layer, if that helps and the members do not change.

    Raises:
        CapslogError: as `layerwise_plan`; accumulation blocks that cannot be shared evenly.
    """
    search, several = _EqualPipelines(problem), problem.pipelines > 1
    plan = search.plan(False)
    may_share = several and not problem.members_change and any(moment_bytes(problem.profile).values())
    if not may_share or plan.step_seconds is not None:
        return plan
    shared = search.plan(True)
    return plan if shared.step_seconds is None else shared


class _EqualPipelines:
    """The search."""

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
        """The plan; its step is None where nothing fits.

        shares: each pipeline keeps an equal part of the moments, as far as layers can be given out so.
        """
        begun, problem, replicas, run = time.perf_counter(), self._problem, self._replicas, self._run
        profile, share = problem.profile, problem.share
        beside = _waiting_bytes(profile, run, share)
        if shares:
            own = moment_bytes(profile)
            beside = [more - (own.get(at) or 0) * (replicas - 1) // replicas for at, more in enumerate(beside)]
        held = with_beside(profile, beside)
        limits = [size for size in self._smallest if size is not None]
        usable: list[int] | None = limits if len(limits) == self._width else None
        for _ in range(_ROUNDS):
            left = None if self._until is None else max(0.0, self._until - time.perf_counter())
            one = Problem.of(held, self._width, usable, share, problem.link, speeds=self._slowest)
            one = dataclasses.replace(one, tier=problem.tier, search_seconds=left)
            found = layerwise_plan(one, BUDGET)
            if shares and any(stage.moments for stage in found.stages):  # which wait in the host tier
                found = dataclasses.replace(found, step_seconds=None)
            plan = self._together(found)
            if shares and found.step_seconds is not None:
                plan = with_shared_moments(profile, plan) or plan
            if replicas == 1 or usable is None or found.step_seconds is None:
                break
            lack = lacking(judged(profile, plan, run, tier=problem.tier), self._smallest, Headroom.of(profile))
            if not any(lack):
                break
            usable = [max(1, size - more) for size, more in zip(usable, lack, strict=True)]
        if replicas > 1 and found.step_seconds is not None:  # which is its own where it was found to fit
            plan = self._with_step(plan, found, shares)
        return dataclasses.replace(plan, search_seconds=time.perf_counter() - begun)

    def _with_step(self, plan: Plan, found: Plan, shares: bool) -> Plan:
        """The plan with its own step, and with the bound of one pipeline, below which no other one is."""
        plan = with_step_seconds(self._problem.profile, plan, self._run, self._problem.link)
        if shares:
            note = "replicas share the optimizer's moments (stages[].moments), which do not fit otherwise"
            plan = dataclasses.replace(plan, notes=(*plan.notes, note))
        if found.bound_seconds is None or plan.step_seconds is None:
            return plan
        space = f"{found.search_space}, in {self._replicas} equal pipelines"
        proven = plan.step_seconds <= found.bound_seconds * (1 + SAME)
        return dataclasses.replace(plan, proven=proven, search_space=space)

    def _together(self, one: Plan) -> Plan:
        """So many times the stages of a plan, each with its devices and its blocks."""
        replicas, run = self._replicas, self._run
        share = run.num_blocks // replicas

        def at(stage: PlanStage, replica: int) -> PlanStage:
            blocks = None if replicas == 1 else tuple(range(replica * share, (replica + 1) * share))
            return dataclasses.replace(stage, ranks=(replica * self._width + stage.rank,), blocks=blocks)

        return dataclasses.replace(
            one,
            stages=tuple(at(stage, replica) for replica in range(replicas) for stage in one.stages),
            units=Units(run.num_microbatches, run.microbatch_size, one.units.blocks and run.num_blocks),
            ranks=self._problem.devices,
            profile_digest=self._problem.profile.digest,
        )


def _by_stage(devices: Sequence[PlanRank], width: int) -> list[int | None]:
    """The smallest capacity of each stage's devices."""
    sizes = [one.capacity_bytes for one in devices]
    rows = [[size for size in sizes[at::width] if size is not None] for at in range(width)]
    return [min(row) if row else None for row in rows]


def _waiting_bytes(profile: Profile, run: RunShape, share: RunShape) -> list[int]:
    """By layer, the gradients that one of several pipelines keeps and a single one of as many blocks does not."""
    many = waiting_blocks(profile, share.num_blocks, run.num_blocks)
    more = many - waiting_blocks(profile, share.num_blocks, share.num_blocks)
    return [more * (layer.parameter_bytes or 0) for layer in profile.layers]


def lacking(plan: Plan, limits: Sequence[int | None], headroom: Headroom) -> list[int]:
    """By stage, what the fullest of its devices lacks in a judged plan; 0 where it fits, or lacks something else.

    limits: bytes of the devices of one pipeline.
    """
    if plan.fits is not False:
        return [0] * len(limits)
    sizes = [max(one.bytes or 0 for one in plan.ranks[at :: len(limits)]) for at in range(len(limits))]
    return [max(0, headroom.device(size) - limit) if limit else 0 for size, limit in zip(sizes, limits, strict=True)]
