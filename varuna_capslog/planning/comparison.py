"""Compares all planners' answers to one problem: peak, margin, simulated step time, search time."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from varuna_capslog.base import fields
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.planners import BUDGET, MADPIPE
from varuna_capslog.planning.placed.periodic import two_versions_note
from varuna_capslog.planning.playing import SAME
from varuna_capslog.planning.problem import Problem
from varuna_capslog.planning.registry import REGISTRY
from varuna_capslog.planning.simulation import simulate_plan
from varuna_capslog.planning.solve import solve
from varuna_capslog.planning.verdict import check_devices, judge_plan
from varuna_capslog.plans.plan import Plan

__all__ = ["BudgetPoint", "Row", "budget_front", "compare"]


@dataclass(frozen=True)
class Row:
    """Result of a planner; a planner without a plan also has a row, with the reason.

    peak_bytes: of the largest stage or rank. margin_bytes: the smallest margin of a device; below 0: it does not fit.
    step_seconds, bubble_fraction: simulated. search_seconds: measured here.
    bound_seconds: the work of the step without recomputation, divided evenly among the devices: a lower bound for all
        rows. proven: the plan reaches it.
    reason: why a value is None; for `madpipe` also the period that its paper promises.
    asked: False for a planner that was left out because its search takes long.
    """

    planner: str
    plan: Plan | None = None
    peak_bytes: int | None = None
    margin_bytes: int | None = None
    step_seconds: float | None = None
    bubble_fraction: float | None = None
    search_seconds: float | None = None
    bound_seconds: float | None = None
    proven: bool | None = None
    reason: str | None = None
    asked: bool = True

    @property
    def fits(self) -> bool | None:
        """True where the plan fits every device; None without a plan or a capacity, or where it is not known."""
        limited = self.plan is not None and any(rank.capacity_bytes is not None for rank in self.plan.ranks)
        return self.plan.fits if self.plan is not None and limited else None

    def to_json(self) -> dict[str, Any]:
        """Return the row for programs, with the plan's cut list, `fits` and stage bytes."""
        record = {
            column.name: getattr(self, column.name) for column in dataclasses.fields(self) if column.name != "plan"
        }
        plan = {} if self.plan is None else self.plan.to_json()
        return record | {name: plan.get(name) for name in ("cuts", "fits", "stage_bytes")}


def compare(
    problem: Problem,
    names: Sequence[str] | None = None,
    progress: Callable[[int, int, str], None] = lambda done, total, name: None,
) -> list[Row]:
    """Return a row for each planner of `names`, or for all planners, in that order. Without `names`, planners whose
    search of this problem is not quick (`Planner.quick_up_to`) are not called.

    progress: called with (planners done, all planners, name) before each planner. `budget` is called last, since it
        compares its plan with those of the others.

    Raises CapslogError for unknown names, and for more devices than layers.
    """
    chosen = list(REGISTRY) if names is None else list(names)
    fields.refuse_unknown(chosen, list(REGISTRY), "planner")
    check_devices(problem.width, problem.profile)
    left_out = [name for name in chosen if names is None and not REGISTRY[name].is_quick(problem)]
    why = (
        f"not asked, since its search may take long for {problem.profile.num_layers} layers on {problem.width} devices"
    )
    rows = {name: Row(name, reason=f"{why}; --planners {name} asks it", asked=False) for name in left_out}
    planners = sorted((name for name in chosen if name not in left_out), key=lambda name: name == BUDGET)
    for number, name in enumerate(planners):
        progress(number, len(planners), name)
        rows[name] = _row(problem, name, rows)
    return [rows[name] for name in chosen]


def _row(problem: Problem, name: str, others: Mapping[str, Row]) -> Row:
    profile, answers = problem.profile, {name: row.plan for name, row in others.items() if row.plan is not None}
    try:
        # no note needs to name another planner, since the other rows show whose plans fit
        plan = solve(problem, name, weighs_others=name == BUDGET, answers=answers)
    except CapslogError as error:
        return Row(name, reason=str(error))
    reasons, bubble = list(plan.notes), None
    try:
        run = problem.run
        bubble = simulate_plan(
            profile, plan, recompute=run.recompute, run=run.settled(), link=problem.link
        ).bubble_fraction
    except CapslogError as error:
        reasons.append(str(error))
    if name == MADPIPE and (note := two_versions_note(problem)) is not None:
        reasons.append(note)
    step, bound, proven = plan.step_seconds, None, None
    if step is not None:
        bound = problem.even_share_seconds
        proven = step <= bound * (1 + SAME)
    verdict = judge_plan(plan, profile, problem.tier)
    margin = None if verdict is None else min(verdict.margins)
    seconds = plan.search_seconds
    return Row(name, plan, plan.peak_bytes, margin, step, bubble, seconds, bound, proven, "; ".join(reasons) or None)


# -- The Pareto front of budget against step time, for planners that choose cuts and memory intervals together.
#
# A point's budget is the smallest capacity of every device at which its plan fits; the plan holds for all budgets up to
# the next point. Unlike in the front of cuts alone (`planners.throughput.pareto_front`), a few more bytes may give
# another plan, so only a fixed number of capacities is tried, in equal ratios from the largest to the least budget.


POINTS = 16
"""Default number of capacities to try."""


@dataclass(frozen=True)
class BudgetPoint:
    """Plan, its step, and the bytes that it needs on each device."""

    budget_bytes: int
    step_seconds: float
    plan: Plan


def budget_front(
    find: Callable[[int | None], Plan], needed: Callable[[Plan], int], capacity: int | None = None, points: int = POINTS
) -> list[BudgetPoint]:
    """Return the points by strictly rising budget and strictly falling step time; empty if nothing fits.

    Args:
        find: capacity of every device in bytes (None: no limit) -> the plan, with bytes, `fits` and `step_seconds`;
            where none fits, the plan that lacks least.
        needed: plan -> bytes that its largest rank needs of a device, headroom included.
        capacity: the largest budget; None: as much as the plan without a limit needs.
        points: number of capacities to try, 2 or more.
    """
    first = find(capacity)
    if first.fits is False:
        return []
    plans, largest, least = [first], needed(first), needed(find(1))
    for number in range(1, points):
        limit = round(largest * (min(least, largest) / largest) ** (number / (points - 1)))
        if limit < needed(plans[-1]) and (plan := find(limit)).fits:
            plans.append(plan)
    front: list[BudgetPoint] = []
    for plan in sorted(plans, key=needed):
        assert plan.step_seconds is not None, "a planner that treats layers needs the profile's seconds"
        if not front or plan.step_seconds < front[-1].step_seconds:
            front.append(BudgetPoint(needed(plan), plan.step_seconds, plan))
    return front
