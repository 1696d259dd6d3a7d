"""Plans drawn at random: the constructor of a plan proves them valid; here, that none of the kinds is missing."""

from __future__ import annotations

import random

from varuna_capslog.plans.parts import Units
from varuna_capslog.rig.drawn_plans import draw_plan


def test_plans_that_are_drawn_are_of_every_kind() -> None:
    """Several stages on a rank, replicas of single stages, unequal pipelines, and ranks without work between others."""
    dice = random.Random(2)
    drawn = [draw_plan(dice, 8, Units(8, 2, 4), 5, "varuna") for _ in range(200)]
    ranks = [plan.placement() for plan in drawn]
    ways = [list(plan.paths()) for plan in drawn]
    assert sum(len(set(some)) < len(some) for some in ranks) > 50
    assert sum(len(set(some)) < max(some) + 1 for some in ranks) > 50
    assert sum(len({len(way) for way in some}) > 1 for some in ways) > 30
    assert sum(len(set().union(*some)) < sum(map(len, some)) for some in ways) > 20
    assert all(plan.num_ranks <= 5 for plan in drawn)


def test_one_rank_runs_everything() -> None:
    dice = random.Random(3)
    assert all(set(draw_plan(dice, 5, Units(4, 1, 4), 1).placement()) == {0} for _ in range(50))
