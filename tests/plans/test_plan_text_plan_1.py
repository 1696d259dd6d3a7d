"""Plans of the older format: renamed fields are read, and plans that leave something undetermined are refused."""

from __future__ import annotations

from typing import Any

import pytest

from tests.values import changed
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.plans.parts import PlanRank, Units
from varuna_capslog.plans.plan import Plan

SHORT: dict[str, Any] = {
    "format": "varuna-capslog/plan/1",
    "planner": "exact",
    "num_layers": 5,
    "cuts": [0, 1, 3],
    "num_microbatches": 4,
    "stage_bytes": [5, 9, 7],
    "capacity_bytes": [8, 8, 9],
    "fits": False,
    "shortfall": {"stage": 1, "bytes": 1, "devices_that_fit": None},
}


def stage(pipeline: int, layers: list[list[int]], ranks: list[int], **more: Any) -> dict[str, Any]:
    parallel = {"kind": "none", "degree": len(ranks)}
    fields = {"pipeline": pipeline, "layers": layers, "ranks": ranks, "parallel": parallel}
    return fields | {"memory_actions": {}, "microbatch_size": None, "bytes": None, "seconds": None} | more


FULL: dict[str, Any] = {
    "format": "varuna-capslog/plan/1",
    "num_layers": 5,
    "cuts": [0, 1],
    "schedule": "1f1b",
    "num_microbatches": 4,
    "microbatch_size": 2,
    "capacity_bytes": [8, 9],
    "stages": [
        stage(0, [[0, 1]], [2], bytes=5, seconds=0.5),
        stage(0, [[1, 5]], [0]),
        stage(1, [[0, 2]], [1]),
        stage(1, [[2, 5]], [3], microbatch_size=2),
    ],
    "microbatches_of_pipeline": [[0, 2, 3], [1]],
}


def test_the_short_form_is_that_of_today() -> None:
    plan = Plan.from_json(SHORT)
    assert plan == Plan.from_json(SHORT | {"format": "varuna-capslog/plan/2"})
    assert plan.to_json()["format"] == "varuna-capslog/plan/2"


def test_pipelines_become_blocks() -> None:
    plan = Plan.from_json(FULL)
    assert plan.units == Units(4, 2, 4)
    assert [plan_stage.blocks for plan_stage in plan.stages] == [(0, 2, 3), (0, 2, 3), (1,), (1,)]
    assert [plan_stage.memory for plan_stage in plan.stages] == [None] * 4
    assert plan.placement() == [2, 0, 1, 3]
    assert plan.ranks == (PlanRank(capacity_bytes=8), PlanRank(capacity_bytes=9), PlanRank(), PlanRank())
    assert Plan.from_json(plan.to_json()) == plan


def test_what_the_plan_says_of_pipeline_0_is_said_of_its_stages() -> None:
    """Only stages without values of their own take them. The stages of pipeline 0 are not first in this list."""
    later = changed(FULL, "stages", to=[*FULL["stages"][2:], *FULL["stages"][:2]])
    plan = Plan.from_json(
        later
        | {"stage_bytes": [4, 9], "stage_seconds": [1, 2], "peak_bytes": 9, "fits": False}
        | {"shortfall": {"stage": 1, "bytes": 1, "devices_that_fit": None}}
    )
    assert [plan_stage.bytes for plan_stage in plan.stages] == [None, None, 5, 9]
    assert [plan_stage.seconds for plan_stage in plan.stages] == [None, None, 0.5, 2.0]
    assert plan.shortfall is not None
    assert plan.shortfall.stage == 3


def test_one_pipeline_of_several_stages_per_rank_takes_every_block() -> None:
    stages = [stage(0, [[number, number + 1]], [number % 2]) for number in range(5)]
    value = {"format": FULL["format"], "num_layers": 5, "cuts": [0, 1, 2, 3, 4], "stages": stages}
    plan = Plan.from_json(value)
    assert plan.cuts == (0, 1, 2, 3, 4)
    assert plan.paths() == {(0, 1, 2, 3, 4): [0]}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (changed(SHORT, "microbatches_of_pipeline", to=[[0]]), "microbatches_of_pipeline is given, but no stages"),
        (changed(SHORT, "actions", to=[["0F0"]]), "actions are given, but no stages"),
        (changed(FULL, "microbatches_of_pipeline", to=[[0, 1], [1, 2]]), "each microbatch to exactly one"),
        (changed(FULL, "microbatches_of_pipeline", to=[[0, 1, 2, 3]]), "each microbatch to exactly one"),
        (changed(FULL, "stages", 0, "memory_actions", to={"0": "offload"}), "stages[0]: memory_actions is {'0': 'off"),
        (changed(FULL, "stages", 1, "microbatch_size", to=1), "stages[1]: microbatch_size is 1 and the plan's is 2"),
        (changed(FULL, "cuts", to=...), "field 'cuts' is missing"),
        (changed(FULL, "cuts", to=[0, 2]), "stages of pipeline 0 do not begin where cuts says"),
        (changed(FULL, "stage_bytes", to=[5]), "stage_bytes has 1 entries, but there are 2 stages"),
        (changed(FULL, "stage_seconds", to=[1, -1]), "stage_seconds[1] is -1"),
        (FULL | {"stage_bytes": [5, 9], "peak_bytes": 8}, "peak_bytes is 8, but the largest of stage_bytes is 9"),
        (changed(FULL, "capacity_bytes", to=[8, 0]), "capacity_bytes[1] is 0"),
        (FULL | {"fits": True, "stage_bytes": [5, 9]}, "rank 0 has 8 bytes of capacity and its stage(s) 1 hold 9"),
        (
            FULL | {"fits": False, "shortfall": {"stage": 2, "bytes": 1}},
            "shortfall.stage is 2, but the last stage is 1",
        ),
        (changed(FULL, "num_microbatches", to="4"), "num_microbatches is '4'; it must be a whole number"),
        (changed(FULL, "microbatches_of_pipeline", to=[0, 1]), "microbatches_of_pipeline is a number; it must be a"),
        (changed(FULL, "stages", 0, "memory_actions", to=[]), "stages[0]: memory_actions must be an object"),
        (changed(FULL, "stages", 1, "rank", to=[1]), "stages[1]: unknown field 'rank'; did you mean 'ranks'?"),
        (changed(FULL, "stages", 1, "pipeline", to=...), "stages[1]: field 'pipeline' is missing"),
        (
            changed(changed(FULL, "cuts", to=[0, 2]), "stages", 1, "layers", to=[[2, 5]]),
            "no stage holds layer 1 for block 0",
        ),
        (changed(FULL, "stages", 1, "parallel", to={"kind": "data", "degree": 1}), "give the blocks to several stages"),
    ],
)
def test_what_cannot_be_read_is_named(value: Any, message: str) -> None:
    with pytest.raises(CapslogError) as error:
        Plan.from_json(value, where="old.json")
    assert str(error.value).startswith("old.json: ")
    assert message in str(error.value)
