"""The front of budget against step time, for planners that choose cuts and memory intervals together.

A point's budget is the smallest capacity of every device within which its plan fits, so that the same plan serves all
budgets up to the next point's. Unlike the front of cuts alone (`planners.throughput.pareto_front`) there may be a plan
for every few bytes; the front asks for a given number of capacities, in equal ratios from all kept to all treated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from varuna_capslog.plans.plan import Plan

__all__ = ["BudgetPoint", "budget_front"]

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
