"""From a profile and a number of devices to a plan: the planner's cuts, what they cost, and whether they fit.

The command, the start of a run and a running elastic training call `plan`, and `joint_plan` for several pipelines. The
planners choose, `verdict` judges; nothing here imports torch, so that a plan is re-decided in milliseconds.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import ParamSpec

from varuna_capslog.base import fields
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.base.units import format_bytes
from varuna_capslog.memory import AUTO, MEMORY_MODELS, NEVER, StageCosts, resolve
from varuna_capslog.memory.headroom import Headroom
from varuna_capslog.memory.inflight import RANKS
from varuna_capslog.planners import EVERY_PLANNER, LAYERWISE, WHOLE_RUN, find_cuts
from varuna_capslog.planners.exact import fewest_devices
from varuna_capslog.planners.joint import Device, JointPlan, NoFleet, best_fleet
from varuna_capslog.planners.seconds import Link
from varuna_capslog.planning.layerwise import judged_layerwise_plan
from varuna_capslog.planning.placed import judged_placed_plan
from varuna_capslog.planning.ranks import fold_plan
from varuna_capslog.planning.stage_seconds import stage_seconds
from varuna_capslog.planning.verdict import capacities_of_devices, check_devices, judge, predictable, usable_bytes
from varuna_capslog.plans.parts import Shortfall
from varuna_capslog.plans.plan import Plan
from varuna_capslog.profiles.record import Profile
from varuna_capslog.schedules import DEFAULT_RUN, RunShape

__all__ = ["joint_plan", "plan", "plan_of_equals"]

P = ParamSpec("P")

_SEARCH_LONG = ("mcap-bf", "mcap-bo", "throughput")
"""Planners that are not asked again for the number of devices that would do."""
_MORE_DEVICES = 8
"""Than `exact` needs, at most, for which a planner is asked."""


def plan(
    profile: Profile,
    devices: int,
    planner: str = "exact",
    memory: str = AUTO,
    capacity: int | Sequence[int] | None = None,
    run: RunShape = DEFAULT_RUN,
    link: Link | None = None,
    cuts: Sequence[int] | None = None,
) -> Plan:
    """Cut the profiled chain into one stage per device.

    planner, memory: a name in EVERY_PLANNER and one in MEMORY_MODELS, or "auto" (see `memory.AUTO`). The plans of
        planners in LAYERWISE have memory intervals, those of REPLICATED several replicas of a stage, those of MADPIPE
        several stages of a rank, and all these are judged by memory model `ranks`.
    capacity: bytes of every device, or one number per device; None plans for the smallest peak alone, and fits is true.
        Where the profile states a headroom, what is compared is a stage's peak with it (`memory.headroom`).
    run: of one pipeline. Where the memory model does not describe its schedule, recomputation and stage inputs, the cut
        list is planned all the same, but `fits` and the predicted bytes are None and `notes` says why. The number and
        the size of the microbatches are written into the plan; the size must be the one that the profile holds for, and
        schedules that keep several microbatches on a device need the number.
    link: between two stages, for planners that need seconds; None means transfers that take no time.
    cuts: the first layer of each stage, to predict a given cut list; `planner` is not asked then.

    A plan that does not fit is an answer too: fits is False and `shortfall` names the stage that lacks most and the
    smallest number of devices (of the smallest capacity given) that would do, with the planner that its note names.

    Raises CapslogError for more devices than layers, unknown names, capacities or cuts that do not match the devices,
    and a memory model that the profile cannot feed.
    """
    devices = fields.whole(devices, "devices", minimum=1)
    fields.refuse_unknown([planner], EVERY_PLANNER, "planner")
    if planner in WHOLE_RUN and cuts is None:
        return judged_placed_plan(profile, devices, planner, memory, capacity, run, link)
    check_devices(devices, profile)
    if planner in LAYERWISE and cuts is None:
        return judged_layerwise_plan(profile, devices, planner, memory, capacity, run, link)
    run = run.settled()
    capacities, one_each = capacities_of_devices(capacity, devices), isinstance(capacity, (list, tuple))
    usable = usable_bytes(profile, capacity, devices)
    memory, costs = resolve(memory, profile, run)

    search_seconds = None
    if cuts is not None:
        chosen = list(fields.cut_list(cuts, profile.num_layers))
        if len(chosen) != devices:
            raise CapslogError(f"cuts is {chosen} for {devices} devices; give the first layer of each device's stage")
    else:
        begun = time.perf_counter()
        chosen = find_cuts(planner, profile, costs, run, devices, usable, link)
        search_seconds = time.perf_counter() - begun

    notes = _gaps(profile, memory, run)
    stage_bytes, fits, shortfall = None, None, None
    if not notes:
        stage_bytes = _bytes_of_stages(profile, memory, costs, run, chosen)
        verdict = judge(stage_bytes, capacities, Headroom.of(profile))
        fits = verdict is None or verdict.fits
        if verdict is not None and not fits:
            asked = "exact" if cuts is not None else planner
            enough, way = _enough_devices(asked, profile, memory, costs, run, min(usable or [0]), link)
            shortfall, notes = verdict.shortfall(enough), [verdict.sentence(enough, way=way)]
    return Plan.of_cuts(
        profile.num_layers,
        chosen,
        planner=None if search_seconds is None else planner,
        memory_model=memory,
        model=profile.model,
        profile_digest=profile.digest,
        schedule=run.schedule,
        num_microbatches=run.num_microbatches,
        microbatch_size=run.microbatch_size,
        stage_bytes=stage_bytes,
        peak_bytes=None if stage_bytes is None else max(stage_bytes),
        stage_seconds=_stage_seconds(profile, chosen),
        capacity_bytes=None if capacities is None else tuple(capacities) if one_each else capacities[0],
        fits=fits,
        shortfall=shortfall,
        search_seconds=search_seconds,
        notes=tuple(notes),
    )


def _enough_devices(
    planner: str, profile: Profile, memory: str, costs: StageCosts, run: RunShape, usable: int, link: Link | None
) -> tuple[int | None, str | None]:
    """How few devices, each with so many usable bytes, would do, and with which planner: the one that was asked, unless
    it searches long or needs many more than `exact`. None where no cut list fits.
    """
    least = fewest_devices(costs, usable)
    if least is None:
        return None, None
    for name in [one for one in dict.fromkeys((planner, "exact")) if one not in _SEARCH_LONG]:
        for count in range(least, min(profile.num_layers, least + _MORE_DEVICES) + 1):
            cuts = find_cuts(name, profile, costs, run, count, [usable] * count, link)
            if max(_bytes_of_stages(profile, memory, costs, run, cuts)) <= usable:
                return count, f"planner {name}"
    return least, "planner exact"


def _bytes_of_stages(
    profile: Profile, memory: str, costs: StageCosts, run: RunShape, cuts: Sequence[int]
) -> tuple[int, ...]:
    """The bytes of one stage per rank by the memory model."""
    if memory != RANKS or run.num_microbatches is None:
        return tuple(costs.peaks(cuts))
    pipeline = Plan.of_cuts(profile.num_layers, cuts, schedule=run.schedule, num_microbatches=run.num_microbatches)
    return tuple(one.peak_bytes for one in fold_plan(profile, pipeline, run))


def _or_smallest_peak(find: Callable[P, JointPlan | NoFleet]) -> Callable[P, JointPlan]:
    """A search for a fleet that answers also where none fits: with the smallest-peak pipeline over all devices, whose
    plan says `fits` False and the shortfall.
    """

    def search(*arguments: P.args, **options: P.kwargs) -> JointPlan:
        begun = time.perf_counter()
        found = find(*arguments, **options)
        if isinstance(found, JointPlan):
            return found
        answer = dataclasses.replace(_smallest_peak(found), planner="joint", search_seconds=time.perf_counter() - begun)
        return JointPlan(answer, (), None, None, found.max_stages, (), found.run.num_blocks)

    return search


joint_plan = _or_smallest_peak(best_fleet)
"""Pipelines of any length for any devices; the arguments are those of `planners.joint.best_fleet`."""


def plan_of_equals(
    profile: Profile,
    devices: int,
    memory: str,
    capacity: int | Sequence[int] | None,
    run: RunShape,
    link: Link | None = None,
) -> Plan:
    """The plan of `joint` for devices of one speed; one accumulation block in `run` leaves their number to the search.

    The other arguments are as in `plan`, but for the number of microbatches, which is known.
    """
    limits = capacities_of_devices(capacity, devices)
    machines = [Device(size) for size in limits] if limits else [Device()] * devices
    samples = run.microbatches * profile.conditions.get("microbatch_size", 1)
    blocks = run.num_blocks if run.num_blocks > 1 else None
    return joint_plan(profile, machines, samples, blocks, run.settled(), memory, link).plan


def _smallest_peak(found: NoFleet) -> Plan:
    """The smallest-peak pipeline over as many devices as there are layers, and what it lacks."""
    profile, blocks = found.profile, found.run.num_blocks
    used = sorted(found.devices, key=lambda one: one.capacity or NEVER, reverse=True)[: profile.num_layers]
    capacities = [one.capacity or NEVER - 1 for one in used]
    answer = plan(profile, len(used), "exact", found.memory, capacities, found.run)
    if not answer.fits:
        return answer
    # It lacks the gradients of a second block, which the planner of one pipeline does not know.
    usable = [NEVER if one.capacity is None else Headroom.of(profile).usable(one.capacity) for one in used]
    verdict = judge(found.stage_bytes(answer.cut_list), usable, Headroom())
    assert verdict is not None
    lack = f"stage {verdict.worst} needs {format_bytes(verdict.lacking)} more for the gradients that wait"
    note = f"does not fit: {lack} until all {blocks} accumulation blocks are added; use 1 block"
    shortfall = Shortfall(verdict.worst, max(1, verdict.lacking))
    return dataclasses.replace(answer, fits=False, shortfall=shortfall, notes=(note,))


def _stage_seconds(profile: Profile, cuts: Sequence[int]) -> tuple[float, ...] | None:
    """Seconds of the forward and the backward of one microbatch on each stage; None where the profile lacks some."""
    if not profile.timed:
        return None
    found = stage_seconds(profile, Plan.of_cuts(profile.num_layers, cuts).stages)
    return tuple(forward + backward for forward, backward in zip(found.forward, found.backward, strict=True))


def _gaps(profile: Profile, memory: str, run: RunShape) -> list[str]:
    """Why the memory model has no numbers for this run; empty if it has."""
    gaps = []
    if (gap := MEMORY_MODELS[memory].gap(run)) is not None:
        gaps.append(f"fits and peak_bytes are unknown: {gap}")
    gaps += predictable(profile, run.microbatch_size)
    return gaps
