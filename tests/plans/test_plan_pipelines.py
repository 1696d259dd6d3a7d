"""Equal pipelines written as a plan and read back; a plan that says more is not read as equal pipelines."""

from __future__ import annotations

import dataclasses
import random
from itertools import zip_longest
from typing import Any

import pytest

from tests.rig.drawn_plans import draw_plan
from varuna_capslog.engine.layout import Layout
from varuna_capslog.plans.parts import MemoryInterval, PlanStage, Units
from varuna_capslog.plans.plan import Plan, pipelines_of, plan_of_pipelines

UNITS = Units(8, 2, 4)


def test_pipelines_come_back_as_they_were_also_from_a_file() -> None:
    dice = random.Random(1)
    for _ in range(100):
        layers, replicas = dice.randint(1, 9), dice.choice((1, 2, 4))
        cuts = (0, *sorted(dice.sample(range(1, layers), dice.randint(0, layers - 1))))
        plan = plan_of_pipelines(layers, cuts, replicas, UNITS, "1f1b")
        assert pipelines_of(plan) == (cuts, replicas)
        assert pipelines_of(Plan.from_json(plan.to_json())) == (cuts, replicas)
        layout = Layout.pipelines(cuts, layers, None, replicas, 4)
        placed = [(stage.layers, stage.ranks, stage.blocks) for stage in plan.stages]
        assert placed == [(((stage.first, stage.end),), (stage.rank,), stage.blocks) for stage in layout.stages]


def test_the_short_form_is_one_pipeline() -> None:
    assert pipelines_of(Plan.of_cuts(6, (0, 2), stage_bytes=[3, 4], schedule="varuna")) == ((0, 2), 1)


TWO = plan_of_pipelines(6, (0, 2), 2, UNITS, "varuna")


def changed(*changes: dict[str, Any], plan: Plan = TWO) -> Plan:
    """The plan with changes of its first stages."""
    stages = [dataclasses.replace(stage, **more) for stage, more in zip_longest(plan.stages, changes, fillvalue={})]
    return dataclasses.replace(plan, stages=tuple(stages))


MORE = {  # "tails first" ended the members of a run: its first half rises, but does not begin with layer 0
    "order": dataclasses.replace(TWO, stages=TWO.stages[::-1]),
    "ends first": dataclasses.replace(TWO, stages=(TWO.stages[1], TWO.stages[3], TWO.stages[0], TWO.stages[2])),
    "tails first": Plan(
        6,
        (
            PlanStage(((1, 4),), (1,), (0, 1), memory=None),
            PlanStage(((4, 6),), (2,), (0, 1), memory=None),
            PlanStage(((0, 1),), (0,), (0, 1), memory=None),
            PlanStage(((0, 6),), (3,), (2, 3), memory=None),
        ),
        UNITS,
        "varuna",
    ),
    "limit": changed({"in_flight": 1}),
    "interval": changed({"memory": (MemoryInterval(0, 2, "recompute"),)}),
    "all kept": changed(*[{"memory": ()}] * 4),
    "unequal": Plan(6, (*TWO.stages[:2], PlanStage(((0, 6),), (2,), (2, 3), memory=None)), UNITS, "varuna"),
    "ranks": changed(*[{"ranks": (rank,)} for rank in (3, 2, 1, 0)]),
    "blocks": changed(*[{"blocks": blocks} for blocks in ((0, 2), (0, 2), (1, 3), (1, 3))]),
    "one rank": changed({}, {"ranks": (0,)}, plan=plan_of_pipelines(6, (0, 3), 1, UNITS, "varuna")),
    "actions": Plan(2, (PlanStage(((0, 2),), (0,), memory=None),), Units(1, 1, 1), actions=(("0F0", "0B0"),)),
}


@pytest.mark.parametrize("plan", list(MORE.values()), ids=list(MORE))
def test_what_says_more_is_not_read_as_equal_pipelines(plan: Plan) -> None:
    assert pipelines_of(plan) is None


def test_any_plan_can_be_asked() -> None:
    dice = random.Random(5)
    for _ in range(2000):
        plan = draw_plan(dice, dice.randint(1, 8), UNITS, dice.randint(1, 5), "varuna")
        if (alike := pipelines_of(plan)) is not None:
            layout = Layout.pipelines(alike[0], plan.num_layers, None, alike[1], 4)
            placed = [(stage.layers, stage.ranks, stage.blocks) for stage in plan.stages]
            assert placed == [(((stage.first, stage.end),), (stage.rank,), stage.blocks) for stage in layout.stages]
