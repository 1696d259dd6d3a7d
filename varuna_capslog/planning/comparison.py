"""Every planner's answer to one question, side by side: peak, margin, simulated step time, search time.

`capslog compare` calls it. A planner that has no answer keeps its row, with the reason.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from varuna_capslog.base import fields
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.planners import MADPIPE
from varuna_capslog.planning.placed.periodic import two_versions_note
from varuna_capslog.planning.playing import SAME, even_share_seconds
from varuna_capslog.planning.problem import Problem
from varuna_capslog.planning.registry import REGISTRY
from varuna_capslog.planning.simulation import simulate_plan
from varuna_capslog.planning.solve import solve
from varuna_capslog.planning.verdict import check_devices, judge_plan
from varuna_capslog.plans.plan import Plan

__all__ = ["BudgetPoint", "Row", "budget_front", "compare"]


@dataclass(frozen=True)
class Row:
    """Answer of a planner.

    plan: None where the planner has none.
    peak_bytes, margin_bytes: of the largest stage, and the least that a stage leaves of its device (below 0: does not
        fit); None where the memory model or the capacity is missing.
    step_seconds, bubble_fraction: simulated; None where the profile has no seconds.
    search_seconds: measured here.
    bound_seconds, proven: no plan of the planner's search space is faster than the bound, and the plan is that fast;
        for planners that say none the work of the step, shared out evenly. None where the step is not known.
    reason: why something is missing, a sentence; of `madpipe` also what it promises as printed; None where there is
        nothing to say.
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

    def to_json(self) -> dict[str, Any]:
        """Return the row for programs; of the plan its cut list, whether it fits, and its stage bytes."""
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
    """Ask every planner, or those of `names`, in that order. A planner that searches long has a row without a plan
    where `names` is None.

    Args:
        progress: called with (planners done, all planners, the one that is asked now) before each planner.

    Raises:
        CapslogError: unknown names; more devices than layers.
    """
    chosen = list(REGISTRY) if names is None else list(names)
    fields.refuse_unknown(chosen, list(REGISTRY), "planner")
    check_devices(problem.width, problem.profile)
    left_out = [name for name in chosen if names is None and REGISTRY[name].long_search]
    rows = {
        name: Row(name, reason=f"not asked, since it searches for up to a minute; --planners {name} asks it")
        for name in left_out
    }
    planners = [name for name in chosen if name not in left_out]
    for number, name in enumerate(planners):
        progress(number, len(planners), name)
        rows[name] = _row(problem, name)
    return [rows[name] for name in chosen]


def _row(problem: Problem, name: str) -> Row:
    profile = problem.profile
    try:
        plan = solve(problem, name)
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
    step, bound, proven = plan.step_seconds, plan.bound_seconds, plan.proven
    if step is not None and bound is None:
        bound = even_share_seconds(profile, problem.run.microbatches, plan.num_ranks)
        proven = step <= bound * (1 + SAME)
    verdict = judge_plan(plan, profile)
    margin = None if verdict is None else min(verdict.margins)
    seconds = plan.search_seconds
    return Row(name, plan, plan.peak_bytes, margin, step, bubble, seconds, bound, proven, "; ".join(reasons) or None)


# -- The front of budget against step time, for planners that choose cuts and memory intervals together.
#
# A point's budget is the smallest capacity of every device within which its plan fits, so that the same plan serves
# all budgets up to the next point's. Unlike the front of cuts alone (`planners.throughput.pareto_front`) there may be
# a plan for every few bytes; the front asks for a given number of capacities, in equal ratios from all kept to all
# treated.


POINTS = 16
"""Capacities that are asked for, at most."""


@dataclass(frozen=True)
class BudgetPoint:
    """A plan with the seconds of its step, and the bytes that each device must have for it."""

    budget_bytes: int
    step_seconds: float
    plan: Plan


def budget_front(
    find: Callable[[int | None], Plan], needed: Callable[[Plan], int], capacity: int | None = None, points: int = POINTS
) -> list[BudgetPoint]:
    """Return the points from the smallest budget to the smallest step time; empty if nothing fits.

    No two points have the same budget or step time, and each that follows has a larger budget and a smaller step time.

    Args:
        find: capacity of every device in bytes (None: no limit) -> the plan, with its bytes, `fits` and
            `step_seconds`; one that does not fit is the plan that lacks least.
        needed: a plan -> the bytes that its largest rank needs of a device, headroom included.
        capacity: the largest budget; None: as much as the plan without a limit needs.
        points: how many capacities to ask for, 2 or more.
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
