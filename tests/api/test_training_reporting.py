"""Predictions that a run's page makes anew: its plan, rehearsed at the sizes that the run measured."""

from __future__ import annotations

from varuna_capslog.api.training import peaks_of_stages
from varuna_capslog.config.reading import section
from varuna_capslog.config.settings import Config
from varuna_capslog.plans.parts import PlanStage, Units
from varuna_capslog.plans.plan import Plan
from varuna_capslog.profiling.rehearsal import rehearse_plan


def test_an_elastic_run_whose_schedule_its_planner_chose_is_rehearsed_by_its_plan() -> None:
    """The quickstart's report gave no error because of "unknown schedule 'auto'": the config.yaml of an elastic run
    leaves the schedule to each plan. Also, only the plan's cuts were rehearsed, not what it keeps or recomputes.
    """
    values = {
        "workload": "tests.engine.workload:workload",
        "device": "cpu",
        "train": {"minibatch_size": 4, "microbatch_size": 2},
        "elastic": {"enabled": True},
    }
    config = section(Config, values, "")
    assert (config.pipeline.planner, config.pipeline.schedule) == ("budget", "auto")
    shapes = {"x": [2, 3, 4, 6], "sizes": [2, 2]}
    stages = tuple(PlanStage((span,), (rank,), memory=()) for span, rank in (((0, 6), 1), ((6, 11), 0)))
    plan = Plan(11, stages, Units(2, 2, 1), "1f1b", planner="budget")
    settled = config.model_copy(update={"pipeline": config.pipeline.model_copy(update={"schedule": "1f1b"})})
    by_rank = rehearse_plan(settled, plan, shapes)
    assert peaks_of_stages(config, plan, shapes) == [by_rank[1], by_rank[0]]
    assert by_rank[0] != by_rank[1]
