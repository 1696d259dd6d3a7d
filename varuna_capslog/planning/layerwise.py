"""The plan of a planner that chooses cuts and memory intervals: `budget`, `dawnpiper`, `vpipe`.

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
from varuna_capslog.memory.costs import NEVER
from varuna_capslog.memory.headroom import Headroom
from varuna_capslog.memory.range_bytes import RangeBytes
from varuna_capslog.planners import BUDGET, LAYERWISE
from varuna_capslog.planners.exact import fewest_devices
from varuna_capslog.planners.layerwise import Layerwise, StageChoice
from varuna_capslog.planners.seconds import Link
from varuna_capslog.planning.fastest import SCHEDULES_TRIED, PlanOf, fastest_plan, schedule_bound
from varuna_capslog.planning.nearby import LOOPED, WIDER
from varuna_capslog.planning.playing import with_step_seconds
from varuna_capslog.planning.problem import Problem
from varuna_capslog.planning.ranks import Known, fold_plan, judged
from varuna_capslog.planning.verdict import check_devices, judge_ranks
from varuna_capslog.plans.parts import MemoryInterval, PlanStage, Units, ranges_of
from varuna_capslog.plans.plan import Plan
from varuna_capslog.profiles.conditions import why_few
from varuna_capslog.profiles.record import Profile
from varuna_capslog.schedules import RunShape
from varuna_capslog.schedules.shape import AUTO_SCHEDULE

__all__ = ["all_away", "layerwise_plan", "least_seconds", "saying_what_fits"]


# -- Choice of the layers whose optimizer moments wait in the host tier: as few bytes as the devices allow.
#
# A plan for devices that are too small otherwise is searched with the moments of all layers away; here those that the
# devices have room for come back.


def all_away(plan: Plan) -> Plan:
    """The plan with the moments of all layers in the host tiers."""
    return dataclasses.replace(plan, stages=tuple(_away(stage, frozenset(stage.numbers)) for stage in plan.stages))


def with_room_used(profile: Profile, plan: Plan, run: RunShape, ranges: RangeBytes) -> Plan:
    """A plan that fits with all moments away, and still does with those on the devices that these have room for.

    The moments of the largest layers come back first, so that few copies are left.

    Args:
        ranges: of the profile, with the moments of all layers on the device.
    """
    headroom, stages = Headroom.of(profile), list(plan.stages)
    range_bytes: Known = {}
    for rank, fold in enumerate(fold_plan(profile, plan, run, range_bytes)):
        numbers = [number for number, stage in enumerate(stages) if stage.rank == rank]
        layers = frozenset(layer for number in numbers for layer in stages[number].numbers)
        limit, sizes, away = plan.ranks[rank].capacity_bytes, ranges.moments.of(layers, layers), layers
        usable = NEVER if limit is None else headroom.usable(limit)
        begun, most = ranges.resident(layers, layers), max(fold.bytes, default=0)
        at_end = begun + ranges.update(layers, layers)
        for layer in sorted(sizes, key=lambda layer: -sizes[layer]):
            less = away - {layer}
            resident = ranges.resident(layers, less)
            # at the end of the step the moments come back: its bytes rise by a known amount
            end = fold.end_bytes + resident + ranges.update(layers, less) - at_end
            if max(most + resident - begun, end) <= usable:
                away = less
        for number in numbers:
            stages[number] = _away(stages[number], away.intersection(stages[number].numbers))
    candidate = dataclasses.replace(plan, stages=tuple(stages))
    return candidate if judged(profile, candidate, run, known=range_bytes).fits else plan


def _away(stage: PlanStage, layers: frozenset[int]) -> PlanStage:
    intervals = []
    for first, end in stage.layers:
        numbers = sorted(layers.intersection(range(first, end)))
        intervals += [MemoryInterval(*piece, "host") for piece in ranges_of(numbers)] if numbers else []
    return dataclasses.replace(stage, moments=tuple(intervals))


# -- the plan of a planner that chooses cuts and memory intervals


def layerwise_plan(problem: Problem, planner: str) -> Plan:
    """The plan of a planner of `LAYERWISE` for one pipeline of the problem, not judged yet.

    Only where the link says what messages cost may `budget`, where it chooses the schedule, give a device several
    stages, which send more of them. Where the host tier is the device's own memory nothing is offloaded.

    Raises:
        CapslogError: the profile lacks seconds or runs, which are named; more devices than layers.
    """
    profile, devices, run, link, tier = problem.profile, problem.width, problem.share, problem.link, problem.tier
    check_devices(devices, profile)
    begun = time.perf_counter()
    names = _schedules(run, link) if planner == BUDGET else (run.settled().schedule,)
    if names == (LOOPED,) and STAGES_PER_RANK * devices > profile.num_layers:
        raise CapslogError(
            f"{devices} devices with {STAGES_PER_RANK} stages each, but only {profile.num_layers} layers; every stage "
            f"holds at least one layer, so set devices lower, or choose schedule 1f1b{why_few(profile.conditions)}"
        )
    shape = dataclasses.replace(run, schedule="1f1b" if names[0] in WIDER else names[0])
    has_tier = not tier.is_device(profile)
    chain = Layerwise.of_profile(profile, shape, devices, problem.usable, link, has_tier, problem.speeds)

    def plan_of(stages: Sequence[StageChoice], shape: RunShape) -> Plan:
        return Plan(
            profile.num_layers,
            tuple(
                PlanStage(
                    ((stage.first, stage.end),),
                    (number % devices,),
                    memory=stage.intervals,
                    seconds=stage.seconds,
                    in_flight=stage.in_flight,
                )
                for number, stage in enumerate(stages)
            ),
            Units(shape.num_microbatches, shape.microbatch_size, shape.num_blocks),
            shape.schedule,
            ranks=problem.devices[:devices],
            planner=planner,
            model=profile.model,
            profile_digest=profile.digest,
        )

    if planner == BUDGET:
        plan = fastest_plan(problem, chain, plan_of, names)
        if plan.step_seconds is None and has_tier and plan.fits is not True:
            remaining = problem.search_seconds and max(0.0, problem.search_seconds - (time.perf_counter() - begun))
            limited = dataclasses.replace(problem, search_seconds=remaining)
            plan = _with_waiting_moments(limited, chain, plan_of, names) or plan
    else:
        plan = plan_of(LAYERWISE[planner](chain), dataclasses.replace(run, schedule=names[0]))
    return dataclasses.replace(plan, search_seconds=time.perf_counter() - begun)


def _schedules(run: RunShape, link: Link) -> tuple[str, ...]:
    """Return the run's schedule, or those that `budget` chooses from where the run leaves it open."""
    if run.schedule != AUTO_SCHEDULE:
        return (run.schedule,)
    loops = link.bandwidth is not None or link.latency_seconds > 0
    return (*SCHEDULES_TRIED, *(name for name in WIDER if loops or name != LOOPED))


def least_seconds(problem: Problem) -> float:
    """Lower bound in seconds of the step of planner `budget` for one pipeline of the problem, whatever the devices'
    memory and speeds. Computing it takes some hundredths of a second.
    """
    run = problem.share
    shape = dataclasses.replace(run, schedule="1f1b")
    chain = Layerwise.of_profile(problem.profile, shape, problem.width, None, problem.link)
    return min(schedule_bound(problem.profile, chain, name) for name in _schedules(run, problem.link))


def _with_waiting_moments(problem: Problem, chain: Layerwise, plan_of: PlanOf, schedules: Sequence[str]) -> Plan | None:
    """Return the fastest plan whose optimizer moments wait in the host tier, as few bytes of them as must; where none
    fits, the one that lacks least. None where the profile does not tell the moments. The arguments are those of
    `fastest_plan`.
    """
    assert chain.question is not None, "made by Layerwise.of_profile"
    ranges = chain.question.ranges
    if not ranges.moments.known:
        return None

    def away(stages: Sequence[StageChoice], shape: RunShape) -> Plan:
        return all_away(plan_of(stages, shape))

    profile, link = problem.profile, problem.link
    plan = fastest_plan(problem, chain.with_waiting_moments(), away, schedules)
    if plan.step_seconds is None:
        return plan
    run = dataclasses.replace(chain.question.run, schedule=plan.schedule or chain.question.run.schedule)
    plan = with_step_seconds(profile, with_room_used(profile, plan, run, ranges), run, link)
    notes: tuple[str, ...] = ()
    if link.host_bandwidth is None:
        notes = (
            "the copies of moments to the host tier and back are not counted in the step: no pipeline.host_bandwidth",
        )
    return dataclasses.replace(
        plan,
        proven=False if plan.proven else plan.proven,
        search_space=f"{plan.search_space}; moments of some layers in the host tier",
        notes=(*plan.notes, *notes),
    )


def saying_what_fits(profile: Profile, plan: Plan, run: RunShape) -> Plan:
    """A judged plan; where it lacks memory, its note says how many devices, or how much on each, would do."""
    sizes = [rank.bytes for rank in plan.ranks]
    if plan.fits is not False or plan.shortfall is None or None in sizes:
        return plan
    headroom = Headroom.of(profile)
    verdict = judge_ranks(plan, [size or 0 for size in sizes], headroom)
    if verdict is None or verdict.fits:  # the host tier lacks memory, not the devices
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
