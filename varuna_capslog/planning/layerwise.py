"""The plan of a planner that chooses cuts and what becomes of every layer: `budget`, `dawnpiper`, `vpipe`.

Such a plan has memory intervals, so it is of the full form, one stage per rank, and judged by its ranks (`ranks`).
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.base.units import format_bytes
from varuna_capslog.config.defaults import STAGES_PER_RANK
from varuna_capslog.memory import AUTO, resolve
from varuna_capslog.memory.headroom import Headroom
from varuna_capslog.memory.inflight import RANKS
from varuna_capslog.planners import BUDGET, LAYERWISE, with_microbatches
from varuna_capslog.planners.exact import fewest_devices
from varuna_capslog.planners.layerwise import Layerwise, StageChoice
from varuna_capslog.planners.seconds import Link
from varuna_capslog.planning.fastest import SCHEDULES_TRIED, PlanOf, fastest_plan, schedule_bound
from varuna_capslog.planning.placed.graphs import faster_plan
from varuna_capslog.planning.playing import with_step_seconds
from varuna_capslog.planning.ranks import judged, with_stage_bytes
from varuna_capslog.planning.verdict import HostMemory, capacities_of_devices, check_devices, judge_ranks, usable_bytes
from varuna_capslog.planning.waiting_moments import all_away, with_room_used
from varuna_capslog.planning.wider import LOOPED, WIDER
from varuna_capslog.plans.parts import PlanRank, PlanStage, Units
from varuna_capslog.plans.plan import Plan
from varuna_capslog.profiles.conditions import why_few
from varuna_capslog.profiles.record import Profile
from varuna_capslog.schedules import RunShape
from varuna_capslog.schedules.shape import AUTO_SCHEDULE

__all__ = [
    "budget_plan",
    "check_memory",
    "judged_layerwise_plan",
    "judged_whole",
    "layerwise_plan",
    "least_seconds",
    "saying_what_fits",
]


def layerwise_plan(
    profile: Profile,
    devices: int | Sequence[float],
    planner: str,
    capacity: int | Sequence[int] | None,
    run: RunShape,
    link: Link | None = None,
    tier: HostMemory | None = None,
    limit_seconds: float | None = None,
) -> Plan:
    """The plan of a planner of `LAYERWISE`, not judged yet.

    Args:
        devices: how many, all of one speed; or the speed of each beside the fastest, above 0 and at most 1, which
            `budget` counts.
        capacity: bytes of every device, or one number per device; None: no limit, so that nothing is treated.
        run: of one pipeline, whose schedule `budget` chooses where it is `AUTO_SCHEDULE`. Where its number of
            microbatches is not known, the search counts `DEFAULT_MICROBATCHES_PER_STAGE` per stage.
        link: also to the host tier; without a host_bandwidth copies take no time. Only where it says what messages cost
            may `budget`, where it chooses the schedule, give a device several stages, which send more of them.
        tier: where offloaded tensors wait; default: in the memory of the host. Where that is the device's own memory
            nothing is offloaded.
        limit_seconds: when `budget` is to end its search; default: when it has searched all that it does.

    Raises CapslogError naming the seconds or runs that the profile lacks, and for more devices than layers.
    """
    speeds = None if isinstance(devices, int) else tuple(devices)
    devices = devices if isinstance(devices, int) else len(devices)
    check_devices(devices, profile)
    capacities, usable = capacities_of_devices(capacity, devices), usable_bytes(profile, capacity, devices)
    has_tier = not (tier or HostMemory()).is_device(profile)
    begun = time.perf_counter()
    names = _schedules(run, link) if planner == "budget" else (run.settled().schedule,)
    if names == (LOOPED,) and STAGES_PER_RANK * devices > profile.num_layers:
        raise CapslogError(
            f"{devices} devices with {STAGES_PER_RANK} stages each, but only {profile.num_layers} layers; every stage "
            f"holds at least one layer, so set devices lower, or choose schedule 1f1b{why_few(profile.conditions)}"
        )
    first = "1f1b" if names[0] in WIDER else names[0]
    shape = dataclasses.replace(with_microbatches(run, devices), schedule=first)
    chain = Layerwise.of_profile(profile, shape, devices, usable, link, has_tier, speeds)
    limits = [None] * devices if capacities is None else capacities
    own = [None] * devices if speeds is None else speeds

    def plan_of(stages: Sequence[StageChoice], shape: RunShape) -> Plan:
        count = shape.num_microbatches
        return Plan(
            profile.num_layers,
            tuple(
                PlanStage(
                    ((one.first, one.end),),
                    (number % devices,),
                    memory=one.intervals,
                    seconds=one.seconds,
                    in_flight=one.in_flight,
                )
                for number, one in enumerate(stages)
            ),
            Units(count, shape.microbatch_size, None if count is None else shape.num_blocks),
            shape.schedule,
            ranks=tuple(PlanRank(capacity_bytes=size, speed=speed) for size, speed in zip(limits, own, strict=True)),
            planner=planner,
            model=profile.model,
            profile_digest=profile.digest,
        )

    if planner == "budget":
        found = fastest_plan(profile, chain, plan_of, names, link, tier, limit_seconds)
        if found.step_seconds is None and has_tier and found.fits is not True:
            left = None if limit_seconds is None else max(0.0, limit_seconds - (time.perf_counter() - begun))
            found = _with_waiting_moments(profile, chain, plan_of, names, link, tier, left) or found
        if run.num_microbatches is None:
            found = dataclasses.replace(found, units=Units(None, run.microbatch_size, None))
    else:
        found = plan_of(LAYERWISE[planner](chain), dataclasses.replace(run, schedule=names[0]))
    return dataclasses.replace(found, search_seconds=time.perf_counter() - begun)


def budget_plan(
    profile: Profile,
    devices: int,
    capacity: int | Sequence[int] | None,
    run: RunShape,
    link: Link | None = None,
    tier: HostMemory | None = None,
    limit_seconds: float | None = None,
    blocks: str = "priced",
) -> Plan:
    """The plan of planner `budget` for devices that no other pipeline uses, not judged yet: where nobody has chosen the
    schedule, of one line of stages or of stages with branches and replicas.

    The arguments are those of `layerwise_plan`, and of `faster_plan`.
    """
    begun = time.perf_counter()
    found = layerwise_plan(profile, devices, BUDGET, capacity, run, link, tier, limit_seconds)
    if run.schedule == AUTO_SCHEDULE:
        until = None if limit_seconds is None else begun + limit_seconds
        found = faster_plan(profile, found, devices, capacity, run, link, until, blocks)
    return dataclasses.replace(found, search_seconds=time.perf_counter() - begun)


def _schedules(run: RunShape, link: Link | None) -> tuple[str, ...]:
    """That of a run, or what `budget` chooses from."""
    if run.schedule != AUTO_SCHEDULE:
        return (run.schedule,)
    loops = link is not None and (link.bandwidth is not None or link.latency_seconds > 0)
    return (*SCHEDULES_TRIED, *(name for name in WIDER if loops or name != LOOPED))


def least_seconds(profile: Profile, devices: int, run: RunShape, link: Link | None = None) -> float:
    """No plan of planner `budget` for so many devices has a shorter step, whatever their memory and speeds.

    The arguments are those of `layerwise_plan`. It takes some hundredths of a second.
    """
    shape = dataclasses.replace(with_microbatches(run, devices), schedule="1f1b")
    chain = Layerwise.of_profile(profile, shape, devices, None, link)
    return min(schedule_bound(profile, chain, name) for name in _schedules(run, link))


def _with_waiting_moments(
    profile: Profile,
    chain: Layerwise,
    plan_of: PlanOf,
    schedules: Sequence[str],
    link: Link | None,
    tier: HostMemory | None,
    limit_seconds: float | None,
) -> Plan | None:
    """The fastest plan of those whose optimizer's moments wait in the host tier, as few bytes of them as must; where
    none fits, the one that lacks least. None where the profile does not tell the moments. The arguments are those of
    `fastest_plan`.
    """
    assert chain.question is not None, "made by Layerwise.of_profile"
    ranges = chain.question.ranges
    if not ranges.moments.known:
        return None

    def away(stages: Sequence[StageChoice], shape: RunShape) -> Plan:
        return all_away(plan_of(stages, shape))

    found = fastest_plan(profile, chain.with_waiting_moments(), away, schedules, link, tier, limit_seconds)
    if found.step_seconds is None:
        return found
    run = dataclasses.replace(chain.question.run, schedule=found.schedule or chain.question.run.schedule)
    found = with_step_seconds(profile, with_room_used(profile, found, run, ranges), run, link)
    notes: tuple[str, ...] = ()
    if link is None or link.host_bandwidth is None:
        notes = (
            "the copies of moments to the host tier and back are not counted in the step: no pipeline.host_bandwidth",
        )
    return dataclasses.replace(
        found,
        proven=False if found.proven else found.proven,
        search_space=f"{found.search_space}; moments of some layers in the host tier",
        notes=(*found.notes, *notes),
    )


def judged_layerwise_plan(
    profile: Profile,
    devices: int,
    planner: str,
    memory: str,
    capacity: int | Sequence[int] | None,
    run: RunShape,
    link: Link | None = None,
    limit_seconds: float | None = None,
) -> Plan:
    """`layerwise_plan`, and whether it fits.

    memory: "auto" or "ranks". Raises CapslogError for any other, as these plans have no bytes by it.
    """
    check_memory(planner, memory)
    if planner == BUDGET:
        found = budget_plan(profile, devices, capacity, run, link, None, limit_seconds)
    else:
        found = layerwise_plan(profile, devices, planner, capacity, run, link)
    return judged_whole(profile, found, devices, run)


def judged_whole(profile: Profile, found: Plan, devices: int, run: RunShape) -> Plan:
    """A plan for all devices, and whether it fits; run: without the schedule that the plan has chosen."""
    run = dataclasses.replace(run, schedule=found.schedule or run.schedule)
    return saying_what_fits(profile, with_stage_bytes(judged(profile, found, with_microbatches(run, devices))), run)


def check_memory(planner: str, memory: str) -> None:
    """Raises CapslogError for a memory model that does not know memory intervals."""
    if memory not in (AUTO, RANKS):
        raise CapslogError(
            f"memory is {memory!r}, but the plans of planner {planner!r} have memory intervals, whose bytes only "
            f"memory model {RANKS!r} knows; choose {RANKS} or auto"
        )


def saying_what_fits(profile: Profile, plan: Plan, run: RunShape) -> Plan:
    """A judged plan; where it lacks memory, its note says how many devices, or how much on each, would do."""
    sizes = [one.bytes for one in plan.ranks]
    if plan.fits is not False or plan.shortfall is None or None in sizes:
        return plan
    headroom = Headroom.of(profile)
    verdict = judge_ranks(plan, [size or 0 for size in sizes], headroom)
    if verdict is None or verdict.fits:  # what lacks is in the host tier
        return plan
    least = min(verdict.capacities)
    costs = resolve(AUTO, profile, dataclasses.replace(run, schedule="varuna"))[1]
    enough, count = fewest_devices(costs, headroom.usable(least)), profile.num_layers
    alone = [headroom.device(costs.stage_bytes(layer, layer + 1, layer, count)) for layer in range(count)]
    largest = max(range(count), key=lambda layer: alone[layer])
    why = f"layer {largest} ({profile.layers[largest].name}) alone needs {format_bytes(alone[largest])} there"
    # another planner's numbers, by a closed form: this one would have to search for every number of devices
    sentence = verdict.sentence(enough, why if alone[largest] > least else None, "planner exact under schedule varuna")
    note = f"{sentence}; with {format_bytes(max(verdict.needed))} on every device this plan fits"
    return dataclasses.replace(plan, notes=(note,), shortfall=verdict.shortfall(enough))
