"""Plans of one stage per device, or of several that go round the devices: their cuts, what each stage holds by a
closed form, and whether that fits. Nothing here imports torch, so that such a plan takes milliseconds.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

from varuna_capslog.base import fields
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.memory import MEMORY_MODELS, StageCosts, resolve
from varuna_capslog.memory.headroom import Headroom
from varuna_capslog.memory.inflight import RANKS
from varuna_capslog.planners import find_cuts
from varuna_capslog.planners.exact import fewest_devices
from varuna_capslog.planning.limits import with_limits
from varuna_capslog.planning.problem import Problem
from varuna_capslog.planning.ranks import fold_plan
from varuna_capslog.planning.stage_seconds import stage_seconds
from varuna_capslog.planning.verdict import check_devices, judge, predictable
from varuna_capslog.plans.parts import PlanRank, Units
from varuna_capslog.plans.pipelines import stages_of_pipelines
from varuna_capslog.plans.plan import Plan
from varuna_capslog.profiles.conditions import why_few
from varuna_capslog.profiles.record import Profile
from varuna_capslog.schedules import RunShape

__all__ = ["cut_plan", "going_round"]

_SEARCH_LONG = ("mcap-bf", "mcap-bo", "throughput")
"""Planners that are not asked again for the number of devices that would do."""
_MORE_DEVICES = 8
"""A planner is asked for at most so many more devices than `exact` needs."""


def cut_plan(problem: Problem, planner: str) -> Plan:
    """The plan of one pipeline of the problem, one stage per device, judged by its memory model.

    Where the memory model does not describe the schedule, recomputation and stage inputs of the run, `fits` and the
    predicted bytes are None and `notes` says why. A plan that does not fit says what is missing, and how many devices
    of the smallest capacity would do with the planner.

    Args:
        planner: of `find_cuts`; not asked where cuts are given.

    Raises:
        CapslogError: more devices than layers, cuts of another number of stages, an unknown memory model, and one that
            the profile cannot feed.
    """
    profile, devices, capacities, usable = problem.profile, problem.width, problem.capacities, problem.usable
    check_devices(devices, profile)
    run = problem.share.settled()
    memory, costs = resolve(problem.memory, profile, run)
    search_seconds = None
    if problem.cuts is not None:
        cuts = list(fields.cut_list(problem.cuts, profile.num_layers))
        if len(cuts) != devices:
            raise CapslogError(f"cuts is {cuts} for {devices} devices; give the first layer of each device's stage")
    else:
        begun = time.perf_counter()
        cuts = find_cuts(planner, profile, costs, run, devices, usable, problem.link, problem.speeds)
        search_seconds = time.perf_counter() - begun

    notes = _gaps(profile, memory, run)
    stage_bytes, fits, shortfall = None, None, None
    if not notes:
        stage_bytes = _stage_bytes(profile, memory, costs, run, cuts)
        verdict = judge(stage_bytes, capacities, Headroom.of(profile))
        fits = verdict is None or verdict.fits
        if verdict is not None and not fits:
            cut_planner = "exact" if problem.cuts is not None else planner
            enough, way = _enough_devices(problem, cut_planner, memory, costs, run)
            shortfall, notes = verdict.shortfall(enough), [verdict.sentence(enough, way=way)]
    alike = capacities is None or len(set(capacities)) == 1
    return Plan.of_cuts(
        profile.num_layers,
        cuts,
        planner=None if search_seconds is None else planner,
        memory_model=memory,
        model=profile.model,
        profile_digest=profile.digest,
        schedule=run.schedule,
        num_microbatches=run.num_microbatches,
        microbatch_size=run.microbatch_size,
        stage_bytes=stage_bytes,
        peak_bytes=None if stage_bytes is None else max(stage_bytes),
        stage_seconds=_stage_seconds(profile, cuts),
        capacity_bytes=None if capacities is None else capacities[0] if alike else tuple(capacities),
        fits=fits,
        shortfall=shortfall,
        search_seconds=search_seconds,
        notes=tuple(notes),
    )


def going_round(problem: Problem, planner: str) -> Plan:
    """The plan, not judged, whose stages go round the devices, `stages_per_rank` times; under schedule `1f1b-star` with
    the limits that follow from their seconds. The cuts are given, or those that the planner finds for as many stages.
    """
    profile, devices = problem.profile, problem.width
    stages, name = devices * problem.stages_per_rank, None
    cuts = problem.cuts
    if cuts is None:
        if stages > profile.num_layers:
            raise CapslogError(
                f"{devices} devices with {problem.stages_per_rank} stages each, but only {profile.num_layers} layers; "
                f"every stage holds at least one layer, so set pipeline.stages_per_rank or pipeline.devices lower"
                f"{why_few(profile.conditions)}"
            )
        rounds = dataclasses.replace(problem, devices=(PlanRank(),) * stages * problem.pipelines, stages_per_rank=1)
        cuts, name = cut_plan(rounds, planner).cut_list, planner
    cuts = fields.cut_list(cuts, profile.num_layers)
    run = problem.run
    plan = Plan(
        profile.num_layers,
        stages_of_pipelines(
            profile.num_layers, cuts, problem.pipelines, run.num_blocks, [at % devices for at in range(len(cuts))]
        ),
        Units(run.num_microbatches, run.microbatch_size, run.num_blocks),
        run.schedule,
        ranks=problem.devices if any(device != PlanRank() for device in problem.devices) else (),
        model=profile.model or "",
        planner=name,
        profile_digest=profile.digest,
    )
    return with_limits(profile, plan, run, problem.link) if run.limits_by_plan else plan


def _enough_devices(
    problem: Problem, planner: str, memory: str, costs: StageCosts, run: RunShape
) -> tuple[int | None, str | None]:
    """Return the smallest number of devices of the smallest capacity that would do, and the planner for it: the one
    asked, unless it searches long or needs many more than `exact`. (None, None) where no cut list fits.
    """
    profile, usable = problem.profile, min(problem.usable or [0])
    least = fewest_devices(costs, usable)
    if least is None:
        return None, None
    for name in [name for name in dict.fromkeys((planner, "exact")) if name not in _SEARCH_LONG]:
        for count in range(least, min(profile.num_layers, least + _MORE_DEVICES) + 1):
            cuts = find_cuts(name, profile, costs, run, count, [usable] * count, problem.link)
            if max(_stage_bytes(profile, memory, costs, run, cuts)) <= usable:
                return count, f"planner {name}"
    return least, "planner exact"


def _stage_bytes(
    profile: Profile, memory: str, costs: StageCosts, run: RunShape, cuts: Sequence[int]
) -> tuple[int, ...]:
    """The bytes of one stage per rank by the memory model."""
    if memory != RANKS:
        return tuple(costs.peaks(cuts))
    pipeline = Plan.of_cuts(profile.num_layers, cuts, schedule=run.schedule, num_microbatches=run.num_microbatches)
    return tuple(rank.peak_bytes for rank in fold_plan(profile, pipeline, run))


def _stage_seconds(profile: Profile, cuts: Sequence[int]) -> tuple[float, ...] | None:
    """Seconds of the forward and the backward of one microbatch on each stage; None where the profile lacks some."""
    if not profile.timed:
        return None
    seconds = stage_seconds(profile, Plan.of_cuts(profile.num_layers, cuts).stages)
    return tuple(forward + backward for forward, backward in zip(seconds.forward, seconds.backward, strict=True))


def _gaps(profile: Profile, memory: str, run: RunShape) -> list[str]:
    """Reasons why the memory model has no numbers for this run; empty if it has."""
    gaps = []
    if (gap := MEMORY_MODELS[memory].gap(run)) is not None:
        gaps.append(f"fits and peak_bytes are unknown: {gap}")
    gaps += predictable(profile, run.microbatch_size)
    return gaps
