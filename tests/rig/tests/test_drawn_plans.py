"""Plans drawn at random: the constructor of a plan proves them valid; here, that none of the kinds is missing."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.rig.drawing import draw_for, has_branches
from tests.rig.drawn_plans import draw_plan
from tests.rig.toy import toy_config, workload
from varuna_capslog.engine.layout import layout_of
from varuna_capslog.plans.parts import Units, scheduled
from varuna_capslog.plans.rules import check_actions
from varuna_capslog.schedules import RunShape


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


@pytest.mark.parametrize("schedule", ["1f1b-star", "kfkb", "zb-h1", "interleaved"])
@pytest.mark.parametrize("towers", [True, False])
def test_what_is_drawn_for_a_run_can_be_run_and_is_of_every_kind(tmp_path: Path, schedule: str, towers: bool) -> None:
    """The engine's own checks hold for each; where the layers form branches direct routes and pieces are among them."""
    config = toy_config(
        tmp_path, [f"model.towers={towers}", f"pipeline.schedule={schedule}", "train.accumulation_blocks=4"]
    )
    chain, run = workload(config).build_chain(), RunShape.of_config(config)
    drawn = [draw_for(run, chain, 1 + number % 5, "seed", number) for number in range(80)]
    for plan in drawn:
        plan.check_graph(chain.edges)
        layout = layout_of(plan, config)
        graph = layout.graph(config.num_microbatches, chain.edges)
        if plan.actions is None:
            scheduled(schedule, layout.stages, graph, run)
        else:
            check_actions(plan.actions, graph, layout.stages)
    direct = [plan for plan in drawn if plan.routes == "direct"]
    assert has_branches(chain) == towers
    assert (len(direct) > 20) == towers
    assert (sum(any(len(stage.layers) > 1 for stage in plan.stages) for plan in direct) > 10) == towers
    kinds = {action[-2] for plan in drawn for row in plan.actions or () for action in row if len(action) == 3}
    assert kinds >= set("FBRIW")
    assert 20 < sum(plan.actions is not None for plan in drawn) < 60
