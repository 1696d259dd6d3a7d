"""The front of budget against step time, beside plans that are known beforehand."""

from __future__ import annotations

from dataclasses import replace

from varuna_capslog.planning.comparison import budget_front
from varuna_capslog.plans.parts import PlanRank, PlanStage, Units
from varuna_capslog.plans.plan import Plan

KNOWN = [(100, 5.0), (140, 4.0), (150, 4.0), (300, 3.0), (310, 2.0), (400, 1.0)]
"""Bytes and seconds of the plans that there are."""


def find(capacity: int | None) -> Plan:
    within = [(seconds, size) for size, seconds in KNOWN if capacity is None or size <= capacity]
    seconds, size = min(within, default=(5.0, 100))
    rank = PlanRank(bytes=size, capacity_bytes=capacity)
    stage = PlanStage(((0, 2),), (0,))
    return Plan(2, (stage,), Units(1, 1, 1), "gpipe", ranks=(rank,), fits=bool(within), step_seconds=seconds)


def needed(plan: Plan) -> int:
    return plan.ranks[0].bytes or 0


def points(capacity: int | None, count: int) -> list[tuple[int, float]]:
    return [(point.budget_bytes, point.step_seconds) for point in budget_front(find, needed, capacity, count)]


def test_with_enough_points_it_is_the_whole_front_and_with_few_a_part_of_it() -> None:
    front = [(100, 5.0), (140, 4.0), (300, 3.0), (310, 2.0), (400, 1.0)]
    assert points(None, 100) == front
    few = points(None, 3)
    assert set(few) <= set(front)
    assert (few[0], few[-1]) == (front[0], front[-1])
    assert points(305, 100) == front[:3]
    assert points(99, 5) == []
    assert points(100, 5) == front[:1]


def test_a_search_that_stumbles_leaves_no_point_that_a_smaller_budget_beats() -> None:
    def stumbling(capacity: int | None) -> Plan:
        return find(150 if capacity is not None and 300 <= capacity < 310 else capacity)

    def slower(capacity: int | None) -> Plan:
        plan = find(capacity)
        return replace(plan, step_seconds=4.5) if needed(plan) == 300 else plan

    for search in (stumbling, slower):
        front = budget_front(search, needed, None, 100)
        assert [point.budget_bytes for point in front] == [100, 140, 310, 400]
