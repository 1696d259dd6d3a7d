"""Solves a `Problem`: calls a planner, judges and simulates its plan. Rehearsals need torch, and are passed in."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.memory.costs import NEVER, Headroom
from varuna_capslog.memory.inference import INFERENCE, is_for_inference
from varuna_capslog.planners import BUDGET
from varuna_capslog.planning.cuts import cut_plan, going_round
from varuna_capslog.planning.fastest import saying_what_fits
from varuna_capslog.planning.placed.equal_pipelines import lacking, shared_round
from varuna_capslog.planning.playing import SAME, with_step_seconds
from varuna_capslog.planning.problem import Problem
from varuna_capslog.planning.registry import REGISTRY, Planner, planner_named
from varuna_capslog.planning.verdict import check_by_fold, judge_by_fold, judge_rehearsal, with_stage_bytes, within_tier
from varuna_capslog.plans.plan import Plan
from varuna_capslog.schedules.shape import AUTO_SCHEDULE

__all__ = ["Protection", "solve"]

Rehearsal = Callable[[Plan], Sequence[int]]
"""Plan -> peak bytes of each rank, or of each stage in the short form, from a run of every rank's program."""

_HINT_SECONDS = 10.0
"""Limit of the search for another planner to name in a note, where a planner finds no plan that fits."""

_CONTAINED = {"cuts": 64, "intervals": 128}
"""Planner shape -> largest layers x devices at which `budget` calls such planners, whose plans its search contains."""

_SEARCHES = 3
"""Largest number of searches, each for devices of less memory than before."""


class Protection(Protocol):
    """Protection of a run whose members change, as in `membership/placing`."""

    def plan(self, capacities: Sequence[int] | None) -> Plan | None:
        """Return the plan that a member would propose for all devices, with room for protection, not judged; None where
        that is not known. capacities: bytes of each device of a pipeline; None: no limit.
        """

    def reserve(self, plan: Plan, find: Callable[..., Plan]) -> tuple[Plan, list[int]]:
        """Return the plan, judged with the bytes beside training, and the bytes of each stage's snapshot.

        find: cuts one pipeline again, for another `capacity` or with `cuts`.
        """


def solve(
    problem: Problem,
    planner: str,
    rehearsal: Rehearsal | None = None,
    protection: Protection | None = None,
    weighs_others: bool = True,
    answers: Mapping[str, Plan] | None = None,
) -> Plan:
    """Return a judged plan with its step: of the planner, or of the problem's cuts or plan. It may not fit.

    Planner `budget` also calls quick planners (`Planner.quick_up_to`), so that none of these has a faster plan that
    fits; planners whose plans its own search contains, only up to the sizes of `_CONTAINED`. Where another planner
    finds no plan that fits, a note names `exact` or `budget` if that planner finds one.

    Args:
        rehearsal: its peaks finally decide if ranks fit, where the profile is an estimate or the device a CPU.
        protection: of a run whose members change.
        weighs_others: as above; False for callers that solve many problems to compare them.
        answers: planner -> plan that this function returned for this problem, so that `budget` does not search again.

    Raises CapslogError for an unknown planner, and for a problem that it cannot answer.
    """
    if is_for_inference(problem.profile):
        name = planner if planner == "throughput" else "exact"
        plan = cut_plan(dataclasses.replace(problem, memory=INFERENCE), name)
        return dataclasses.replace(plan, purpose=INFERENCE, schedule=None)
    begun, entry = time.perf_counter(), planner_named(planner)
    if not problem.is_given:
        entry.check_memory(problem.memory)
    alone = problem.is_given or problem.members_change or problem.pipelines > 1
    if planner != BUDGET or alone or not weighs_others:
        plan = _answered(problem, entry, rehearsal, protection)
        asks = plan.fits is False and planner != BUDGET and not alone and weighs_others
        return _naming_another(problem, plan, planner) if asks else plan
    until = None if problem.search_seconds is None else begun + problem.search_seconds
    return _fastest(problem, rehearsal, begun, until, answers or {})


def _answered(
    problem: Problem, entry: Planner, rehearsal: Rehearsal | None, protection: Protection | None = None
) -> Plan:
    """Plan of one planner, or of the problem's cuts or plan, judged and simulated."""
    if problem.stages_per_rank is None:
        return _of_any_rounds(problem, entry, rehearsal, protection)
    profile, run = problem.profile, problem.run
    rounds = len(problem.placement) > problem.width or run.limits_by_plan or problem.shares_moments
    if problem.plan is not None:
        plan = _judged(problem, problem.plan, rehearsal)
    elif rounds and (problem.cuts is not None or entry.shape == "cuts"):
        placed = shared_round if problem.shares_moments else going_round
        plan = _judged(problem, placed(problem, entry.name), rehearsal)
    elif problem.cuts is not None or entry.shape == "cuts":
        plan = cut_plan(problem, entry.name)
    elif entry.shape == "intervals":
        plan = _with_room(problem, entry, rehearsal, protection)
    else:
        plan = dataclasses.replace(entry.answer(problem), step_seconds=None)  # simulated below, as every plan
        verdict = plan if plan.short else _judged(problem, plan, rehearsal)
        if entry.shape == "stages" or verdict.fits is not None:  # else the memory model of `joint` has judged
            plan = verdict
    snapshots = [0] * len(plan.stages)
    if protection is not None:
        plan, snapshots = protection.reserve(plan, functools.partial(_cut_anew, problem, entry.name))
    if plan.short:
        by_stages, confirmed = plan, _rehearsed_stages(problem, plan, rehearsal, snapshots)
        plan = confirmed or check_by_fold(profile, plan, problem.memory, problem.share.settled())
        plan = within_tier(profile, plan, problem.share.settled(), problem.tier)
        if by_stages.fits and plan.fits is False and problem.cuts is None:
            plan = _of_smaller_stages(problem, by_stages, plan, entry, rehearsal, protection) or plan
    if plan.step_seconds is not None:
        return plan
    return with_step_seconds(profile, plan, (problem.share if plan.short else run).settled(), problem.link)


def _of_any_rounds(
    problem: Problem, entry: Planner, rehearsal: Rehearsal | None, protection: Protection | None
) -> Plan:
    """Best plan of one planner with 1, 2, 4, ... stages on every rank; ties are broken by fewer stages."""
    best, count = None, 1
    while best is None or count * problem.width <= problem.profile.num_layers:
        plan = _answered(dataclasses.replace(problem, stages_per_rank=count), entry, rehearsal, protection)
        if best is None or _beats(problem, plan, best):
            best = plan
        count *= 2
    return best


def _naming_another(problem: Problem, plan: Plan, planner: str) -> Plan:
    """Return a plan that does not fit, with a note that names planner `exact` or `budget` if its plan fits: a heuristic
    that finds no such plan does not prove that there is none.
    """
    limited = dataclasses.replace(problem, search_seconds=min(problem.search_seconds or _HINT_SECONDS, _HINT_SECONDS))
    for name in ("exact", BUDGET):
        try:
            other = None if name == planner else _answered(limited, REGISTRY[name], None)
        except CapslogError:
            continue
        if other is not None and other.fits:
            notes = [note.replace("nothing fits: ", "does not fit: ") for note in plan.notes]
            return dataclasses.replace(plan, notes=(*notes, f"this planner found none; planner {name} has a plan"))
    return plan


def _cut_anew(
    problem: Problem, planner: str, capacity: int | Sequence[int] | None = None, cuts: Sequence[int] | None = None
) -> Plan:
    """Plan of one pipeline for another capacity, or with other cuts."""
    chosen = problem.cuts if cuts is None else tuple(cuts)
    return cut_plan(dataclasses.replace(problem.with_capacity(capacity), cuts=chosen), planner)


def _of_smaller_stages(
    problem: Problem,
    plan: Plan,
    refused: Plan,
    entry: Planner,
    rehearsal: Rehearsal | None,
    protection: Protection | None,
) -> Plan | None:
    """Cut again with lower and lower limits, for a plan that fits by its memory model but whose ranks lack memory.
    Return the first plan that fits, or None. refused: the plan as judged by its ranks.
    """
    capacities, device = problem.capacities or [], Headroom.of(problem.profile).device
    limits = capacities
    while plan.fits:
        sizes: Sequence[int] = plan.stage_bytes or ()
        lacks = lacking(refused, capacities, Headroom.of(problem.profile)) if refused.ranks else []
        if not any(lacks):  # refused for another reason than bytes of ranks
            lacks, sizes = [1] * len(sizes), [max(sizes)] * len(sizes)
        rows = zip(limits, sizes, lacks, strict=True)
        limits = [min(limit, device(size) - 1) if lack else limit for limit, size, lack in rows]
        plan = cut_plan(problem.with_capacity(limits), entry.name)
        if plan.fits:
            refused = _answered(dataclasses.replace(problem, cuts=plan.cuts), entry, rehearsal, protection)
            if refused.fits:
                return dataclasses.replace(refused, planner=entry.name, search_seconds=plan.search_seconds)
    return None


def _rehearsed_stages(problem: Problem, plan: Plan, rehearsal: Rehearsal | None, beside: Sequence[int]) -> Plan | None:
    """Rehearse an estimate's short-form plan that fits by its memory model; None without a rehearsal or a capacity."""
    limited = plan.fits and problem.capacities is not None
    if not limited or rehearsal is None or problem.profile.source != "estimated":
        return None
    find = functools.partial(_cut_anew, problem, plan.planner or "exact")
    return judge_rehearsal(plan, rehearsal(plan), beside, Headroom.of(problem.profile), find)


def _judged(problem: Problem, plan: Plan, rehearsal: Rehearsal | None) -> Plan:
    """Return a full-form plan with the bytes of each rank and stage, whether they fit, and what is enough."""
    run = dataclasses.replace(problem.run, schedule=plan.schedule or problem.run.settled().schedule)
    confirm = None if rehearsal is None else lambda: rehearsal(plan)
    verdict = with_stage_bytes(judge_by_fold(problem.profile, plan, run, confirm, problem.tier))
    treats = problem.plan is None and plan.planner in REGISTRY and REGISTRY[plan.planner].shape == "intervals"
    return saying_what_fits(problem.profile, verdict, run) if treats else verdict


def _with_room(problem: Problem, entry: Planner, rehearsal: Rehearsal | None, protection: Protection | None) -> Plan:
    """Return the judged plan of a planner that chooses memory intervals. Where its ranks need a little more memory than
    the search counted, the search is repeated for devices with that much less; if no plan fits, return the first.
    """
    limits, first, less = problem.capacities, None, problem
    for _ in range(_SEARCHES):
        answer = protection.plan(less.capacities) if protection is not None and entry.name == BUDGET else None
        answer = answer or entry.answer(less)
        searched = answer.step_seconds is not None
        if limits is not None and less is not problem:
            answer = dataclasses.replace(answer, ranks=problem.devices)
        plan = _judged(problem, dataclasses.replace(answer, fits=None, shortfall=None), rehearsal)
        first = first or plan
        if plan.fits is not False:
            return plan
        lack = [] if limits is None else lacking(plan, limits, Headroom.of(problem.profile))
        if not searched or not any(lack):  # the search itself found nothing that fits
            break
        sizes = less.capacities or []
        less = less.with_capacity([max(1, size - more) for size, more in zip(sizes, lack, strict=True)])
    assert first is not None
    return first


def _fastest(
    problem: Problem, rehearsal: Rehearsal | None, begun: float, until: float | None, answers: Mapping[str, Plan]
) -> Plan:
    """Return the plan of planner `budget`, or a better plan of another planner. Others are called while the best plan
    is slower than a lower bound, the step's work shared evenly, and only if the problem's size makes their search
    quick; after the time `until` none is called.
    """
    refused, best = None, None
    try:
        best = _answered(problem, REGISTRY[BUDGET], rehearsal)
    except CapslogError as error:
        refused = error
    profile, devices, line = problem.profile, problem.width, best
    if refused is not None and not profile.timed:
        raise refused
    if best is not None and best.fits is None and problem.capacities is not None:
        return best
    bound, size = problem.even_share_seconds, profile.num_layers * devices
    for entry in REGISTRY.values():
        if entry.name == BUDGET or not entry.is_quick(problem) or size > _CONTAINED.get(entry.shape, size):
            continue
        if problem.speeds is not None and entry.name != "joint":
            continue
        if until is not None and time.perf_counter() >= until:
            break
        reached = None if best is None or best.fits is False else best.step_seconds or 0.0
        if reached is not None and reached <= bound * (1 + SAME):
            break
        longest = min((seconds for seconds in (reached, problem.longest) if seconds is not None), default=None)
        try:
            plan = answers.get(entry.name) or _answered(dataclasses.replace(problem, longest=longest), entry, None)
        except CapslogError:
            continue
        same_run = problem.run.schedule in (AUTO_SCHEDULE, plan.schedule)
        if (
            same_run
            and _beats(problem, plan, best)
            and _beats(problem, confirmed := _confirmed(problem, plan, rehearsal), best)
        ):
            best = confirmed
    if best is None:
        assert refused is not None
        raise refused
    if best is line or best.fits is False or best.step_seconds is None:
        return best
    why = "faster than that of budget" if refused is None else f"budget has none: {refused}"
    note = f"the plan of planner {best.planner}: {why}"
    return dataclasses.replace(
        best,
        bound_seconds=min(bound, best.step_seconds),
        proven=best.step_seconds <= bound * (1 + SAME),
        search_space=f"all plans on {devices} devices",
        search_seconds=time.perf_counter() - begun,
        notes=(*best.notes, note),
    )


def _confirmed(problem: Problem, plan: Plan, rehearsal: Rehearsal | None) -> Plan:
    """Confirm a plan that fits under a capacity by the rehearsal of its ranks."""
    if plan.short:
        return _rehearsed_stages(problem, plan, rehearsal, [0] * len(plan.stages)) or plan
    if rehearsal is None or not plan.fits or problem.capacities is None:
        return plan
    return _judged(problem, plan, rehearsal)


def _beats(problem: Problem, plan: Plan, best: Plan | None) -> bool:
    """True where a plan lacks fewer bytes than the best, or as many and is faster; no limit: none lacks any."""
    if best is None:
        return True
    fits = (True, None) if problem.capacities is None else (True,)
    lacks = [
        0 if candidate.fits in fits else candidate.shortfall.bytes if candidate.shortfall is not None else NEVER
        for candidate in (plan, best)
    ]
    if lacks[0] != lacks[1] or plan.step_seconds is None or best.step_seconds is None:
        return lacks[0] < lacks[1]
    return plan.step_seconds * (1 + SAME) < best.step_seconds
