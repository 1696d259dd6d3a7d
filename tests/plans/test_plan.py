"""The plan file: both forms survive a round trip, and every mistake is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.values import changed
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.plans.plan import Plan, PlanStage, Shortfall, read_plan, write_plan

SHORT: dict[str, Any] = {
    "format": "varuna-capslog/plan/1",
    "planner": "exact",
    "memory_model": "additive",
    "model": "tiny",
    "profile_digest": "sha256:0",
    "num_layers": 5,
    "cuts": [0, 1, 3],
    "schedule": "varuna",
    "num_microbatches": 4,
    "microbatch_size": 1,
    "stage_bytes": [5, 9, 7],
    "peak_bytes": 9,
    "stage_seconds": [0.5, 1.0, 0.25],
    "capacity_bytes": [8, 8, 8],
    "fits": False,
    "shortfall": {"stage": 1, "bytes": 1, "devices_that_fit": None},
    "search_seconds": 0.001,
}


def place(pipeline: int, layers: list[list[int]], ranks: list[int], **more: Any) -> dict[str, Any]:
    kind = "none" if len(ranks) == 1 else "data"
    return {
        "pipeline": pipeline,
        "layers": layers,
        "ranks": ranks,
        "parallel": {"kind": kind, "degree": len(ranks)},
        "memory_actions": {},
        "microbatch_size": None,
        "bytes": None,
        "seconds": None,
        **more,
    }


FULL: dict[str, Any] = {
    **SHORT,
    "stages": [
        place(0, [[0, 1]], [2], memory_actions={"0": "offload"}, microbatch_size=1, bytes=5, seconds=0.5),
        place(0, [[1, 3]], [0]),
        place(0, [[3, 5]], [1, 3]),
        place(1, [[0, 2], [4, 5]], [4]),
        place(1, [[2, 4]], [5]),
    ],
    "microbatches_of_pipeline": [[0, 2, 3], [1]],
    "actions": [["1F0", "1B0"], [], ["0F0"]],
}


def test_two_numbers_and_a_cut_list_are_a_plan() -> None:
    plan = Plan.from_json({"format": "varuna-capslog/plan/1", "num_layers": 5, "cuts": [0, 2]})
    assert plan.stages() == [(0, 2), (2, 5)]
    assert plan.placement() == [0, 1]
    assert plan.num_pipelines == 1
    assert plan.fits is None


@pytest.mark.parametrize("value", [SHORT, FULL])
def test_round_trip_through_a_file(tmp_path: Path, value: dict[str, Any]) -> None:
    plan = Plan.from_json(value)
    assert plan.to_json() == value
    write_plan(tmp_path / "plan.json", plan)
    assert read_plan(tmp_path / "plan.json") == plan


def test_notes_are_not_part_of_the_file() -> None:
    plan = Plan(num_layers=1, cuts=(0,), notes=("for people",))
    assert "notes" not in plan.to_json()
    assert Plan.from_json(plan.to_json()) == plan


def test_stages_and_placement_of_the_full_form() -> None:
    plan = Plan.from_json(FULL)
    assert plan.num_pipelines == 2
    assert plan.stages() == [(0, 1), (1, 3), (3, 5)]
    with pytest.raises(CapslogError, match="stage 2 runs on 2 ranks; one is needed here"):
        plan.placement()
    assert plan.placement(1) == [4, 5]
    with pytest.raises(CapslogError, match="stage 0 holds 2 pieces of the chain"):
        plan.stages(1)
    with pytest.raises(CapslogError, match="pipeline 2 is not in the plan, which has 2"):
        plan.stages(2)


def test_the_capacity_of_a_rank_is_that_of_its_device() -> None:
    plan = Plan(num_layers=3, cuts=(0, 1), capacity_bytes=(5, 7))
    assert plan.capacities_of([1, 0, 1]) == [7, 5, 7]
    assert plan.capacities_of(iter([0, 2])) is None
    assert Plan(num_layers=3, cuts=(0, 1), capacity_bytes=5).capacities_of(iter([0, 2])) == [5, 5]
    assert Plan(num_layers=3, cuts=(0, 1)).capacities_of([0, 1]) is None


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("plan", "a JSON object is needed"),
        (changed(SHORT, "format", to="varuna-capslog/profile/1"), "format is 'varuna-capslog/profile/1'"),
        (changed(SHORT, "cut", to=[0]), "unknown field 'cut'; did you mean 'cuts'?"),
        (changed(SHORT, "placed", to=[]), "unknown field 'placed'"),
        (changed(SHORT, "notes", to=[]), "unknown field 'notes'"),
        (changed(SHORT, "cuts", to=...), "field 'cuts' is missing"),
        (changed(SHORT, "num_layers", to=...), "field 'num_layers' is missing"),
        (changed(SHORT, "num_layers", to=0), "num_layers is 0; it must be at least 1"),
        (changed(SHORT, "cuts", to=[]), "it must begin with 0"),
        (changed(SHORT, "cuts", to=[1, 2, 3]), "cuts is [1, 2, 3]; it must begin with 0"),
        (changed(SHORT, "cuts", to=[0, 3, 3]), "3 follows 3, but cuts must rise"),
        (changed(SHORT, "cuts", to=[0, 3, 2]), "2 follows 3"),
        (changed(SHORT, "cuts", to=[0, 3, 5]), "no stage can begin at 5, the last layer is 4"),
        (changed(SHORT, "cuts", to=[0, 1.5, 3]), "cuts[1] is 1.5"),
        (changed(SHORT, "cuts", to="0,1,3"), "cuts is a string; it must be a list"),
        (changed(SHORT, "stage_bytes", to=[9, 9]), "stage_bytes has 2 entries, but there are 3 stages"),
        (changed(SHORT, "stage_seconds", to=[1, 1, -1]), "stage_seconds[2] is -1"),
        (changed(SHORT, "peak_bytes", to=8), "peak_bytes is 8, but the largest of stage_bytes is 9"),
        (changed(SHORT, "capacity_bytes", to=[8, 8]), "capacity_bytes has 2 entries, but there are 3 devices"),
        (changed(SHORT, "capacity_bytes", to=0), "capacity_bytes is 0"),
        (changed(SHORT, "fits", to="no"), "fits is 'no'"),
        (changed(SHORT, "fits", to=True), "shortfall is given, but fits is not false"),
        (changed(SHORT, "shortfall", "stage", to=3), "shortfall.stage is 3, but the last stage is 2"),
        (changed(SHORT, "shortfall", "byte", to=3), "shortfall: unknown field 'byte'; did you mean 'bytes'?"),
        (changed(SHORT, "planner", to=3), "planner is 3; it must be a non-empty string"),
        (changed(SHORT, "num_microbatches", to=0), "num_microbatches is 0"),
        (changed(SHORT, "search_seconds", to=-1), "search_seconds is -1"),
        (changed(FULL, "stages", to=[]), "stages is empty"),
        (changed(FULL, "stages", 0, "rank", to=[2]), "stages[0]: unknown field 'rank'; did you mean 'ranks'?"),
        (changed(FULL, "stages", 0, "ranks", to=...), "stages[0]: field 'ranks' is missing"),
        (changed(FULL, "stages", 2, "ranks", to=[1, 1]), "stages[2]: ranks is [1, 1]; it must hold 2 different"),
        (changed(FULL, "stages", 0, "parallel", "kind", to="moe"), "stages[0]: parallel.kind is 'moe'"),
        (changed(FULL, "stages", 0, "memory_actions", to={"0": "swap"}), "stages[0]: memory_actions['0'] is 'swap'"),
        (changed(FULL, "stages", 3, "layers", to=[[4, 5], [0, 2]]), "stages[3]: layers must hold one or more pieces"),
        (changed(FULL, "stages", 4, "layers", to=[[3, 4]]), "the stages of pipeline 1 hold layer 2 nowhere"),
        (changed(FULL, "stages", 4, "layers", to=[[1, 4]]), "the stages of pipeline 1 hold layer 1 twice"),
        (changed(FULL, "stages", 2, "layers", to=[[3, 4]]), "the stages of pipeline 0 end at layer 4"),
        (changed(FULL, "cuts", to=[0, 2, 3]), "stages of pipeline 0 do not begin where cuts says"),
        (changed(FULL, "microbatches_of_pipeline", to=[[0, 1], [1, 2]]), "each microbatch to exactly one"),
        (changed(FULL, "microbatches_of_pipeline", to=[[0, 1, 2, 3]]), "each microbatch to exactly one"),
        (changed(FULL, "actions", to=[["0F0", 3]]), "actions[0] is 3; it must be a non-empty string"),
    ],
)
def test_mistakes_are_named_with_the_file(value: Any, message: str) -> None:
    with pytest.raises(CapslogError) as error:
        Plan.from_json(value, where="run/plan.json")
    assert str(error.value).startswith("run/plan.json: ")
    assert message in str(error.value)


def test_records_made_in_code_pass_the_same_checks() -> None:
    with pytest.raises(CapslogError, match="must begin with 0"):
        Plan(num_layers=3, cuts=(1,))
    with pytest.raises(CapslogError, match="shortfall is given"):
        Plan(num_layers=3, cuts=(0,), shortfall=Shortfall(0, 1))
    plan = Plan(num_layers=3, cuts=[0, 1], placed=[PlanStage(0, [[0, 1]], [1]), PlanStage(0, [[1, 3]], [0])])  # type: ignore[arg-type]
    assert plan.placement() == [1, 0]


def two_stages_on_each_rank(**more: Any) -> dict[str, Any]:
    """Stages 0 and 2 on rank 0, 1 and 3 on rank 1, each of 6 bytes."""
    stages = [place(0, [[number, number + 1]], [number % 2], bytes=6) for number in range(4)]
    return {"format": SHORT["format"], "num_layers": 4, "cuts": [0, 1, 2, 3], "stages": stages, **more}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        # One stage per rank: the short form's bytes over its own capacity.
        (
            changed(changed(changed(SHORT, "shortfall", to=None), "fits", to=True), "capacity_bytes", to=[8, 8, 8]),
            "rank 1 has 8 bytes of capacity and its stage(s) 1 hold 9 together",
        ),
        # Each of the stages fits its device, and the two of rank 0 together do not.
        (
            two_stages_on_each_rank(capacity_bytes=[11, 12], fits=True),
            "rank 0 has 11 bytes of capacity and its stage(s) 0, 2 hold 12 together",
        ),
    ],
)
def test_a_plan_that_says_fits_over_its_own_capacity_is_refused(value: dict[str, Any], message: str) -> None:
    """Such a plan was once accepted: stages were compared with nothing, least of all those that share a rank."""
    with pytest.raises(CapslogError) as error:
        Plan.from_json(value)
    assert "fits is true, but " + message in str(error.value)


@pytest.mark.parametrize(
    "more",
    [
        {"capacity_bytes": [12, 12], "fits": True},
        {"capacity_bytes": 11, "fits": False},
        {"capacity_bytes": 11, "fits": None},
        {"capacity_bytes": None, "fits": True},
        {"capacity_bytes": [12], "fits": True},  # no capacity is known for rank 1
    ],
)
def test_what_fits_or_claims_nothing_is_accepted(more: dict[str, Any]) -> None:
    assert Plan.from_json(two_stages_on_each_rank(**more)).fits == more["fits"]
