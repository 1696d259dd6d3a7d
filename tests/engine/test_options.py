"""What the engine makes of a plan: the layout it says, or one sentence that names the field it cannot run."""

from __future__ import annotations

from typing import Any

import pytest

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.config.reading import Config, section
from varuna_capslog.engine.options import Layout, layout_of
from varuna_capslog.plans.plan import Plan, PlanStage


def config_of(**pipeline: Any) -> Config:
    train = {"minibatch_size": 8, "microbatch_size": 2}
    return section(Config, {"workload": "a.b:c", "train": train, "pipeline": pipeline}, "")


def stages(**first: Any) -> tuple[PlanStage, ...]:
    return (PlanStage(0, ((0, 1),), (1,), **first), PlanStage(0, ((1, 3),), (0,)))


def test_a_plan_becomes_its_cuts_and_ranks_in_the_replicas_of_the_config() -> None:
    assert layout_of(Plan(3, (0, 1)), config_of(replicas=2)) == Layout((0, 1), (0, 1), 2)
    plan = Plan(3, (0, 1), schedule="gpipe", placed=stages(microbatch_size=2))
    assert layout_of(plan, config_of(schedule="gpipe")) == Layout((0, 1), (1, 0), 1)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        # These three were once dropped without a word, and another plan was trained.
        (
            Plan(3, (0, 1), placed=(PlanStage(0, ((0, 1), (2, 3)), (0,)), PlanStage(0, ((1, 2),), (1,)))),
            r"stages\[0\]\.layers is \[\[0, 1\], \[2, 3\]\]",
        ),
        (Plan(3, (0, 1), placed=stages(microbatch_size=1)), r"stages\[0\]\.microbatch_size is 1"),
        (Plan(3, (0, 1), schedule="gpipe"), "schedule is 'gpipe' in the plan, but pipeline.schedule is 'varuna'"),
        (Plan(3, (0, 1), placed=stages(memory_actions={"0": "offload"})), "memory actions for single layers"),
        (
            Plan(3, (0,), placed=(PlanStage(0, ((0, 3),), (0, 1), parallel={"kind": "data", "degree": 2}),)),
            "'data' parallelism inside a stage",
        ),
        (
            Plan(3, (0,), placed=(PlanStage(0, ((0, 3),), (0,)), PlanStage(1, ((0, 3),), (1,)))),
            "the plan has 2 pipelines",
        ),
    ],
)
def test_what_the_engine_cannot_run_is_refused_by_the_name_of_its_field(plan: Plan, message: str) -> None:
    with pytest.raises(CapslogError, match=message):
        layout_of(plan, config_of())


def test_a_plan_with_its_own_actions_names_its_schedule_as_it_likes() -> None:
    plan = Plan(3, (0, 1), schedule="by hand", actions=(("0F0", "0B0"), ("1F0", "1B0")))
    assert layout_of(plan, config_of()).cuts == (0, 1)
