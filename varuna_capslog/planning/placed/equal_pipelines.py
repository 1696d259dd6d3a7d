"""Planner `budget` for several equal pipelines, which share the accumulation blocks of a step: one plan for all.

`planning/layerwise` searches one pipeline; beside what it holds alone, each of several keeps the gradients of all its
blocks until they are exchanged. `start/layerwise_start` asks for the config's replicas, `membership/budgeted` for what
the devices could be after a change.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.memory.headroom import Headroom
from varuna_capslog.planners import BUDGET
from varuna_capslog.planners.pipelines import waiting_blocks
from varuna_capslog.planners.seconds import Link
from varuna_capslog.planning.layerwise import layerwise_plan
from varuna_capslog.planning.placed.shared_moments import with_shared_moments
from varuna_capslog.planning.playing import SAME, with_step_seconds
from varuna_capslog.planning.ranks import judged
from varuna_capslog.planning.stage_seconds import moment_bytes
from varuna_capslog.planning.verdict import HostMemory
from varuna_capslog.plans.parts import PlanRank, PlanStage, Units
from varuna_capslog.plans.plan import Plan
from varuna_capslog.profiles.beside import with_beside
from varuna_capslog.profiles.record import Profile
from varuna_capslog.schedules import RunShape

__all__ = ["equal_pipelines_plan", "lacking"]

_ROUNDS = 4
"""Searches, each with less memory than the one before, until the pipelines fit together."""


def equal_pipelines_plan(
    profile: Profile,
    replicas: int,
    devices: Sequence[PlanRank],
    run: RunShape,
    link: Link | None = None,
    tier: HostMemory | None = None,
    limit_seconds: float | None = None,
    may_share: bool = False,
) -> Plan:
    """The plan of planner `budget` for so many equal pipelines, not judged yet.

    Args:
        replicas: divides the accumulation blocks of the run.
        devices: capacity and speed of each, pipeline after pipeline. A stage keeps to the smallest of its devices and
            is as fast as the slowest.
        run: the whole step, its number of microbatches known where there are several pipelines.
        link, tier, limit_seconds: as in `layerwise_plan`.
        may_share: where nothing fits otherwise, the pipelines share the optimizer's moments of every layer, if that
            helps. For runs whose members do not change.

    Raises CapslogError as `layerwise_plan`, and for accumulation blocks that cannot be shared evenly.
    """
    search = _EqualPipelines(profile, replicas, devices, run, link, tier, limit_seconds)
    plan = search.plan(False)
    if not may_share or plan.step_seconds is not None or replicas == 1 or not any(moment_bytes(profile).values()):
        return plan
    shared = search.plan(True)
    return plan if shared.step_seconds is None else shared


class _EqualPipelines:
    """The search; the arguments are those of `equal_pipelines_plan`."""

    def __init__(
        self,
        profile: Profile,
        replicas: int,
        devices: Sequence[PlanRank],
        run: RunShape,
        link: Link | None,
        tier: HostMemory | None,
        limit_seconds: float | None,
    ) -> None:
        if run.num_blocks % replicas:
            raise CapslogError(
                f"{replicas} pipelines cannot share {run.num_blocks} accumulation block(s) evenly; set "
                "train.accumulation_blocks to a multiple of them"
            )
        self._profile, self._replicas, self._run, self._link, self._tier = profile, replicas, run, link, tier
        self._ranks, self._width = tuple(devices), len(devices) // replicas
        self._devices: int | list[float] = self._width
        if any(one.speed is not None for one in devices):
            speeds = [1.0 if one.speed is None else one.speed for one in devices]
            self._devices = [min(speeds[at :: self._width]) for at in range(self._width)]
        self._until = None if limit_seconds is None else time.perf_counter() + limit_seconds

    def plan(self, shares: bool) -> Plan:
        """The plan; its step is None where nothing fits.

        shares: each pipeline keeps an equal part of the moments, as far as layers can be given out so.
        """
        begun, profile, replicas, run = time.perf_counter(), self._profile, self._replicas, self._run
        share = run if replicas == 1 else run.share(replicas)
        beside = _waiting_bytes(profile, run, share)
        if shares:
            own = moment_bytes(profile)
            beside = [more - (own.get(at) or 0) * (replicas - 1) // replicas for at, more in enumerate(beside)]
        held, smallest = with_beside(profile, beside), _by_stage(self._ranks, self._width)
        limits = [size for size in smallest if size is not None]
        usable: list[int] | None = limits if len(limits) == self._width else None
        for _ in range(_ROUNDS):
            left = None if self._until is None else max(0.0, self._until - time.perf_counter())
            found = layerwise_plan(held, self._devices, BUDGET, usable, share, self._link, self._tier, left)
            if shares and any(stage.moments for stage in found.stages):  # which wait in the host tier
                found = dataclasses.replace(found, step_seconds=None)
            plan = self._together(found)
            if shares and found.step_seconds is not None:
                plan = with_shared_moments(profile, plan) or plan
            if replicas == 1 or usable is None or found.step_seconds is None:
                break
            lack = lacking(judged(profile, plan, run, tier=self._tier), smallest, Headroom.of(profile))
            if not any(lack):
                break
            usable = [max(1, size - more) for size, more in zip(usable, lack, strict=True)]
        if replicas > 1 and found.step_seconds is not None:  # which is its own where it was found to fit
            plan = self._with_step(plan, found, shares)
        return dataclasses.replace(plan, search_seconds=time.perf_counter() - begun)

    def _with_step(self, plan: Plan, found: Plan, shares: bool) -> Plan:
        """The plan with its own step, and with the bound of one pipeline, below which no other one is."""
        plan = with_step_seconds(self._profile, plan, self._run, self._link)
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
            ranks=self._ranks,
            profile_digest=self._profile.digest,
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
