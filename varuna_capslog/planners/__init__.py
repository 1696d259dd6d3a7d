"""From a profile and a number of devices to a plan: one planner per file, one table of their names.

The command line and the elastic supervisor call `plan`; a planner itself is a plain function on numbers. Nothing here
imports torch, so that a plan is re-decided in milliseconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from varuna_capslog.base import fields
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.base.units import format_bytes
from varuna_capslog.memory import AUTO, MEMORY_MODELS, RunShape, StageCosts, resolve
from varuna_capslog.memory.headroom import Headroom
from varuna_capslog.planners.capslog import capslog_cuts
from varuna_capslog.planners.capslog_tb import capslog_tb_cuts
from varuna_capslog.planners.exact import exact_cuts, fewest_devices
from varuna_capslog.planners.mcap import mcap_bf_cuts, mcap_bo_cuts
from varuna_capslog.planners.seconds import Link
from varuna_capslog.planners.throughput import Run, throughput_cuts
from varuna_capslog.planners.varuna import varuna_cuts
from varuna_capslog.plans.plan import Plan, Shortfall
from varuna_capslog.profiles.record import Profile

__all__ = ["PLANNERS", "PLANNER_NAMES", "Planner", "plan", "usable_bytes"]

Planner = Callable[[StageCosts, int, Sequence[int] | None], list[int]]
"""(stage costs, number of devices, capacity of each device in bytes or None) -> first layer of each stage.

A planner cuts into exactly as many stages as there are devices, at most one per layer, also where nothing fits.
"""

PLANNERS: dict[str, Planner] = {
    "varuna": varuna_cuts,
    "mcap-bf": mcap_bf_cuts,
    "mcap-bo": mcap_bo_cuts,
    "capslog": capslog_cuts,
    "capslog-tb": capslog_tb_cuts,
    "exact": exact_cuts,
}

PLANNER_NAMES = (*PLANNERS, "throughput")
"""Every planner of `plan`: those of the table, which look at bytes alone, and those that need seconds too."""

DEFAULT_MICROBATCHES_PER_STAGE = 4
"""What `throughput` plans for where the number of microbatches is not known."""

STAGE_INPUTS = ("host", "device")


def plan(
    profile: Profile,
    devices: int,
    planner: str = "exact",
    memory: str = AUTO,
    capacity: int | Sequence[int] | None = None,
    schedule: str = "varuna",
    num_microbatches: int | None = None,
    microbatch_size: int | None = None,
    recompute: bool = True,
    stage_inputs: str = "host",
    link: Link | None = None,
    cuts: Sequence[int] | None = None,
) -> Plan:
    """Cut the profiled chain into one stage per device.

    planner, memory: a name in PLANNER_NAMES and one in MEMORY_MODELS, or "auto" (see `memory.AUTO`).
    capacity: bytes of every device, or one number per device; None plans for the smallest peak alone, and fits is true.
        Where the profile states a headroom, what is compared is a stage's peak with it (`memory.headroom`).
    schedule, recompute, stage_inputs ("host" or "device"): what the run keeps in memory. Where the memory model does
    not describe it, the cut list is planned all the same, but `fits` and the predicted bytes are None and `notes` says
    why.
    num_microbatches, microbatch_size: written into the plan; the size must be the one that the profile holds for. The
    number is that of one pipeline's step; schedules that keep several microbatches on a device need it.
    link: between two stages, for planners that need seconds; None means transfers that take no time.
    cuts: the first layer of each stage, to predict a given cut list; `planner` is not asked then.

    A plan that does not fit is an answer too: fits is False and `shortfall` names the stage that lacks most and the
    smallest number of devices (of the smallest capacity given, cut by `exact`) that would do.

    Raises CapslogError for more devices than layers, unknown names, capacities or cuts that do not match the devices,
    and a memory model that the profile cannot feed.
    """
    devices = fields.whole(devices, "devices", minimum=1)
    fields.refuse_unknown([planner], PLANNER_NAMES, "planner")
    fields.choice(stage_inputs, "stage_inputs", STAGE_INPUTS)
    if devices > profile.num_layers:
        raise CapslogError(
            f"{devices} devices but only {profile.num_layers} layers; every stage holds at least one layer, "
            f"so use at most {profile.num_layers} devices or a chain with more cut points"
        )
    capacities = _capacities(capacity, devices)
    headroom = Headroom.of(profile)
    usable = usable_bytes(profile, capacity, devices)
    memory, costs = resolve(memory, profile, RunShape(num_microbatches, schedule, recompute, stage_inputs))

    search_seconds = None
    if cuts is not None:
        cuts = _checked(cuts, devices, profile.num_layers)
    else:
        begun = time.perf_counter()
        if planner == "throughput":
            step = Run(schedule, num_microbatches or DEFAULT_MICROBATCHES_PER_STAGE * devices, recompute)
            cuts = throughput_cuts(profile, costs, step, devices, usable, link)
        else:
            cuts = PLANNERS[planner](costs, devices, usable)
        search_seconds = time.perf_counter() - begun

    notes = _gaps(profile, memory, schedule, recompute, stage_inputs, microbatch_size)
    stage_bytes, fits, shortfall = None, None, None
    if not notes:
        stage_bytes = costs.peaks(cuts)
        shortfall = None if capacities is None else _shortfall(costs, stage_bytes, capacities, headroom)
        fits = shortfall is None
        if shortfall is not None and capacities is not None:
            notes = [_sentence(shortfall, stage_bytes, capacities, headroom)]
    return Plan(
        num_layers=profile.num_layers,
        cuts=tuple(cuts),
        planner=None if search_seconds is None else planner,
        memory_model=memory,
        model=profile.model,
        profile_digest=profile.digest,
        schedule=schedule,
        num_microbatches=num_microbatches,
        microbatch_size=microbatch_size,
        stage_bytes=None if stage_bytes is None else tuple(stage_bytes),
        peak_bytes=None if stage_bytes is None else max(stage_bytes),
        capacity_bytes=_as_given(capacity, capacities),
        fits=fits,
        shortfall=shortfall,
        search_seconds=search_seconds,
        notes=tuple(notes),
    )


def usable_bytes(profile: Profile, capacity: int | Sequence[int] | None, devices: int) -> list[int] | None:
    """What a stage's peak may be on each device: the capacity (as `plan` takes it) less the profile's headroom."""
    capacities = _capacities(capacity, devices)
    headroom = Headroom.of(profile)
    return None if capacities is None else [headroom.usable(size) for size in capacities]


def _checked(cuts: Sequence[int], devices: int, num_layers: int) -> list[int]:
    """The given cut list, checked."""
    checked = fields.cut_list(cuts, num_layers)
    if len(checked) != devices:
        raise CapslogError(
            f"cuts is {list(checked)} for {devices} devices; give the first layer of each device's stage"
        )
    return list(checked)


def _capacities(capacity: int | Sequence[int] | None, devices: int) -> list[int] | None:
    """The capacity of each device in bytes."""
    if capacity is None:
        return None
    if isinstance(capacity, (list, tuple)):
        if len(capacity) != devices:
            raise CapslogError(f"{len(capacity)} capacities for {devices} devices; give one for all, or one for each")
        return [fields.whole(row, f"capacity of device {i}", minimum=1) for i, row in enumerate(capacity)]
    return [fields.whole(capacity, "capacity", minimum=1)] * devices


def _as_given(capacity: int | Sequence[int] | None, capacities: list[int] | None) -> int | tuple[int, ...] | None:
    """The checked capacities in the form in which they were given: one number, or one per device."""
    if capacities is None:
        return None
    return tuple(capacities) if isinstance(capacity, (list, tuple)) else capacities[0]


def _gaps(
    profile: Profile, memory: str, schedule: str, recompute: bool, stage_inputs: str, microbatch_size: int | None
) -> list[str]:
    """Why the memory model has no numbers for this run; empty if it has."""
    gaps = []
    if (gap := MEMORY_MODELS[memory].gap(schedule, recompute, stage_inputs)) is not None:
        gaps.append(f"fits and peak_bytes are unknown: {gap}")
    gaps += [
        f"fits and peak_bytes are unknown: the estimate is too low for {limit}; measure the profile instead "
        "(profile.source=measured)"
        for limit in profile.conditions.get("limits", [])
    ]
    profiled = profile.conditions.get("microbatch_size")
    if None not in (microbatch_size, profiled) and microbatch_size != profiled:
        gaps.append(
            f"fits and peak_bytes are unknown: the profile holds for microbatch_size {profiled}, "
            f"not {microbatch_size}; profile with that size"
        )
    return gaps


def _shortfall(
    costs: StageCosts, stage_bytes: Sequence[int], capacities: Sequence[int], headroom: Headroom
) -> Shortfall | None:
    """The stage that exceeds its own device most, or None if none does."""
    excess = [headroom.reserved(used) - size for used, size in zip(stage_bytes, capacities, strict=True)]
    worst = max(excess)
    if worst <= 0:
        return None
    return Shortfall(excess.index(worst), worst, fewest_devices(costs, headroom.usable(min(capacities))))


def _sentence(shortfall: Shortfall, stage_bytes: Sequence[int], capacities: Sequence[int], headroom: Headroom) -> str:
    """The shortfall for people."""
    stage, devices = shortfall.stage, shortfall.devices_that_fit
    peak, reserved = stage_bytes[stage], headroom.reserved(stage_bytes[stage])
    lack = (
        f"stage {stage} needs {format_bytes(reserved)} of {format_bytes(capacities[stage])}, "
        f"{format_bytes(shortfall.bytes)} too much"
        + (f" ({format_bytes(peak)} and its headroom)" if reserved != peak else "")
    )
    if devices is None:
        return f"nothing fits: {lack}, and no number of devices would do, since each stage holds at least one layer"
    return f"does not fit: {lack}; {devices} device(s) of {format_bytes(min(capacities))} would do with planner exact"
