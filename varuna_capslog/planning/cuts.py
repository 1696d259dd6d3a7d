"""Plans of one stage per device, or of several that go round the devices: cuts, bytes of each stage, and whether they
fit. The bytes have a closed form and torch is not imported, so that such a plan takes milliseconds.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from itertools import pairwise

from varuna_capslog.base import fields
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.memory import MEMORY_MODELS, StageCosts, resolve
from varuna_capslog.memory.costs import Headroom
from varuna_capslog.memory.inflight import RANKS
from varuna_capslog.planners import find_cuts
from varuna_capslog.planners.exact import fewest_devices
from varuna_capslog.planners.seconds import LayerSeconds, Link
from varuna_capslog.planning.chunks import fastest_chunks, plan_of_rounds
from varuna_capslog.planning.playing import message_bytes, stage_seconds
from varuna_capslog.planning.problem import Problem
from varuna_capslog.planning.verdict import check_devices, fold_plan, judge, prediction_gaps
from varuna_capslog.plans.parts import PlanRank
from varuna_capslog.plans.plan import Plan
from varuna_capslog.profiles.conditions import why_few
from varuna_capslog.profiles.record import Profile
from varuna_capslog.schedules import RunShape, StageGraph

__all__ = ["cut_plan", "going_round", "in_flight_of_period", "with_limits"]


# -- The limits of schedule `1f1b-star`: the fewest microbatches in flight that keep a period.
#
# In the steady state every stage runs one forward and one backward in each period T, at the same times of every
# period. Let D be the seconds from the start of a microbatch's forward to the start of its backward on a stage.
# Forward (f) and backward (b) do not overlap on the stage, so that D lies between f + (g - 1) T and g T - b for a
# whole number g, and g microbatches are in flight. D includes the seconds of the later stages and of the messages (c):
#
# D(last) = f(last); D(s) >= D(s + 1) + f(s) + c(s + 1) + b(s + 1) + c(s + 1)
#
# From the last stage to the first, the smallest D within these ranges gives the smallest g of every stage.
# T is at least the seconds of the slowest stage, and of the slowest message.
#
# MadPipe (Sec. 4.1) gives the same limits where a group of stages ends exactly with a period. Otherwise its groups
# leave the rest of the period unused and need more in flight: in 76 of 400 random pipelines
# (`benchmarks/schedules/limits.py`).


_ROUNDING = 1e-9


def in_flight_of_period(
    forward: Sequence[float], backward: Sequence[float], transfer: Sequence[float], period: float | None = None
) -> list[int]:
    """Return the smallest number of microbatches in flight of every stage of one pipeline, one stage per rank.

    forward, backward: seconds of every stage; the backward includes recomputation.
    transfer: seconds of a message over the cut before each stage, in either direction; entry 0 is not used.
    period: seconds of one microbatch in the steady state; default and minimum: those of the slowest stage or link. A
        longer period needs fewer microbatches. Raises CapslogError for a shorter period.
    """
    busy = [f + b for f, b in zip(forward, backward, strict=True)]
    shortest = max([*busy, *transfer[1:]])
    period = shortest if period is None else period
    if period < shortest * (1 - _ROUNDING):
        raise CapslogError(
            f"a period of {period:g} s is too short: the slowest stage or link takes {shortest:g} s; give one that is "
            "not shorter"
        )
    if period <= 0:
        return [1] * len(busy)
    counts, away = [1], forward[-1]
    for stage in range(len(busy) - 2, -1, -1):
        away += forward[stage] + 2 * transfer[stage + 1] + backward[stage + 1]
        count = max(counts[-1], math.ceil((away + backward[stage]) / period - _ROUNDING))
        away = max(away, forward[stage] + (count - 1) * period)
        counts.append(count)
    return counts[::-1]


def with_limits(profile: Profile, plan: Plan, run: RunShape, link: Link | None = None) -> Plan:
    """Return the plan with the limit of every stage for schedule `1f1b-star`, computed for each path of microbatches by
    itself. With direct routes, all lines of stages that wait for each other have one period: the slowest stage or link.

    run: for stages whose memory the plan leaves open. link: between two ranks; default: transfers take no time.

    Raises CapslogError naming the layer whose seconds the profile lacks, and for grains above 1.
    """
    if any(stage.grain > 1 for stage in plan.stages):
        raise CapslogError(
            "the limits of 1f1b-star are known for one microbatch per call, and the plan has grains; choose 1f1b"
        )
    direct, seconds = plan.routes == "direct", stage_seconds(profile, plan.stages, run)
    if direct:
        graph = plan.stage_graph(profile.known_edges)
        lines, transfer = graph.lines(), _sent(profile, plan, graph, link)
    else:
        lines, transfer = list(plan.paths()), _relayed(profile, plan, link)
    recompute_seconds = [
        row if stage.recomputes(run) else 0.0 for row, stage in zip(seconds.recompute or (), plan.stages, strict=True)
    ]
    backward = [took + more for took, more in zip(seconds.backward, recompute_seconds, strict=True)]
    period = None
    if direct:
        busy = [f + b for f, b in zip(seconds.forward, backward, strict=True)]
        period = max(*busy, *(transfer(*edge) for line in lines for edge in pairwise(line)), 0.0)
    limits: dict[int, int] = {}
    for line in lines:
        counts = in_flight_of_period(
            [seconds.forward[stage] for stage in line],
            [backward[stage] for stage in line],
            [0.0, *(transfer(stage, following) for stage, following in pairwise(line))],
            period,
        )
        for stage, limit in zip(line, counts, strict=True):
            limits[stage] = max(limit, limits.get(stage, 1))
    calls = plan.num_microbatches
    stages = [
        dataclasses.replace(stage, in_flight=limits[number] if calls is None else min(calls, limits[number]))
        for number, stage in enumerate(plan.stages)
    ]
    return dataclasses.replace(plan, stages=tuple(stages))


Transfers = Callable[[int, int], float]
"""(stage, next stage) -> seconds of a message between them, the mean of both directions."""


def _relayed(profile: Profile, plan: Plan, link: Link | None) -> Transfers:
    transfer = LayerSeconds.of_profile(profile, link).transfer

    def seconds(stage: int, following: int) -> float:
        return (
            0.0
            if plan.stages[stage].rank == plan.stages[following].rank
            else float(transfer[plan.stages[following].first])
        )

    return seconds


def _sent(profile: Profile, plan: Plan, graph: StageGraph, link: Link | None) -> Transfers:
    sizes, link = message_bytes(profile, plan.stages, graph, plan.routes), link or Link()

    def seconds(stage: int, following: int) -> float:
        if plan.stages[stage].rank == plan.stages[following].rank:
            return 0.0
        ways = [sizes[way] or 0 for way in ((stage, following), (following, stage)) if way in sizes]
        return sum(map(link.seconds, ways)) / 2

    return seconds


# -- plans of cuts


_SEARCH_LONG = ("mcap-bf", "mcap-bo", "throughput")
"""Planners whose search is too long to repeat for the smallest sufficient number of devices."""
_MORE_DEVICES = 8
"""Largest number of devices, beyond what `exact` needs, for which another planner is tried."""


def cut_plan(problem: Problem, planner: str) -> Plan:
    """Return the plan of one pipeline, one stage per device, judged by its memory model.

    Where the memory model does not describe the run's schedule, recomputation and stage inputs, `fits` and the
    predicted bytes are None and `notes` says why. The notes of a plan that does not fit say what is missing, and how
    many devices of the smallest capacity are enough with the planner.

    planner: of `find_cuts`; not called where the problem has cuts.

    Raises CapslogError for more devices than layers, cuts of another number of stages, an unknown memory model, and a
    memory model whose inputs the profile lacks.
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
    """Return the plan, not judged, whose stages go round the devices `stages_per_rank` times, with the problem's cuts
    or the planner's; under schedule `1f1b-star` with the limits that follow from the stages' seconds. Two equal cuts
    mean a stage without layers, so that its device is left out.
    """
    profile, devices = problem.profile, problem.width
    stages, name = len(problem.placement), None
    cuts = problem.cuts
    if cuts is None:
        if stages > profile.num_layers:
            count = problem.stages_per_rank
            how = f"{count} stages each" if isinstance(count, int) else f"{stages} stages in all"
            raise CapslogError(
                f"{devices} devices with {how}, but only {profile.num_layers} layers; every stage holds at least one "
                "layer, so set pipeline.stages_per_rank (also as a list, with one number for each device) or "
                f"pipeline.devices lower{why_few(profile.conditions)}"
            )
        places = problem.devices if stages == devices else (PlanRank(),) * stages * problem.pipelines
        rounds = dataclasses.replace(problem, devices=places, stages_per_rank=1)
        cuts, name = cut_plan(rounds, planner).cut_list, planner
        if planner == "throughput" and stages > devices and profile.timed:
            cuts = fastest_chunks(problem, cuts)
    fields.cut_list(list(dict.fromkeys(cuts)), profile.num_layers)
    plan = dataclasses.replace(plan_of_rounds(problem, cuts), planner=name)
    return with_limits(profile, plan, problem.run, problem.link) if problem.run.limits_by_plan else plan


def _enough_devices(
    problem: Problem, planner: str, memory: str, costs: StageCosts, run: RunShape
) -> tuple[int | None, str | None]:
    """Return the smallest sufficient number of devices of the smallest capacity, and the planner for it: `planner`,
    unless its search is long or it needs many more devices than `exact`. (None, None) where no cut list fits.
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
    """Bytes of each stage by the memory model."""
    if memory != RANKS:
        return tuple(costs.peaks(cuts))
    pipeline = Plan.of_cuts(profile.num_layers, cuts, schedule=run.schedule, num_microbatches=run.num_microbatches)
    return tuple(rank.peak_bytes for rank in fold_plan(profile, pipeline, run))


def _stage_seconds(profile: Profile, cuts: Sequence[int]) -> tuple[float, ...] | None:
    """Seconds of forward plus backward of one microbatch on each stage; None where the profile lacks some."""
    if not profile.timed:
        return None
    seconds = stage_seconds(profile, Plan.of_cuts(profile.num_layers, cuts).stages)
    return tuple(forward + backward for forward, backward in zip(seconds.forward, seconds.backward, strict=True))


def _gaps(profile: Profile, memory: str, run: RunShape) -> list[str]:
    """Reasons why the memory model has no bytes for this run; empty if it has."""
    gaps = []
    if (gap := MEMORY_MODELS[memory].gap(run)) is not None:
        gaps.append(f"fits and peak_bytes are unknown: {gap}")
    gaps += prediction_gaps(profile, run.microbatch_size)
    return gaps
