"""The plan file: both forms survive a round trip, and every mistake is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.plans.test_plan_text_plan_1 import FULL as OLD
from tests.values import OF_ANY_TYPE, changed, each_place
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.plans.parts import MemoryInterval, PlanRank, PlanStage, Shortfall, Units
from varuna_capslog.plans.plan import Plan, read_plan, write_plan
from varuna_capslog.reports.tables import plan_table
from varuna_capslog.schedules import DEFAULT_RUN

SHORT: dict[str, Any] = {
    "format": "varuna-capslog/plan/2",
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
    "capacity_bytes": [8, 8, 9],
    "fits": False,
    "shortfall": {"stage": 1, "bytes": 1, "devices_that_fit": None},
    "search_seconds": 0.001,
    "step_seconds": None,
    "bound_seconds": None,
    "proven": None,
    "search_space": None,
}


def stage(layers: list[list[int]], ranks: list[int], **more: Any) -> dict[str, Any]:
    return {
        "layers": layers,
        "ranks": ranks,
        "blocks": None,
        "grain": 1,
        "in_flight": None,
        "memory": [],
        "parallel": {"kind": "none", "degree": 1},
        "bytes": None,
        "seconds": None,
        **more,
    }


def rank(**more: Any) -> dict[str, Any]:
    return {"bytes": None, "host_bytes": None, "seconds": None, "capacity_bytes": None, **more}


FULL: dict[str, Any] = {
    "format": "varuna-capslog/plan/2",
    "planner": "joint",
    "memory_model": None,
    "model": "tiny",
    "profile_digest": None,
    "num_layers": 6,
    "schedule": "1f1b",
    "peak_bytes": 12,
    "step_seconds": 3.5,
    "fits": True,
    "shortfall": None,
    "search_seconds": None,
    "bound_seconds": 3.0,
    "proven": False,
    "search_space": "cuts",
    "units": {"per_step": 8, "samples": 2, "blocks": 4},
    # Two pipelines of unequal length; the second one shares rank 1 with the first.
    "stages": [
        stage([[0, 2]], [0], blocks=[0, 1, 3], memory=[[0, 1, "recompute"], [1, 2, "offload"]], bytes=4, seconds=0.5),
        stage([[2, 4]], [1], blocks=[0, 1, 3], in_flight=2, bytes=5),
        stage([[4, 6]], [2], blocks=[0, 1, 3]),
        stage([[0, 2]], [1], blocks=[2], bytes=7),
        stage([[2, 6]], [3], blocks=[2], memory=[[2, 5, "recompute+offload"]]) | {"moments": [[3, 4, "host"]]},
    ],
    "variants": {"3": "sdpa"},
    "routes": "relay",
    "actions": None,
    "ranks": [
        rank(capacity_bytes=20, bytes=4, host_bytes=3, seconds=0.5),
        rank(capacity_bytes=12, speed=0.5),
        rank(),
        rank(capacity_bytes=1),
    ],
}


def one_pipeline(**more: Any) -> dict[str, Any]:
    """Stages 0 and 2 on rank 0, stage 1 on rank 1, everything kept."""
    stages = [stage([[0, 2]], [0]), stage([[2, 4]], [1]), stage([[4, 6]], [0])]
    units = {"per_step": 2, "samples": 1, "blocks": 1}
    return {"format": FULL["format"], "num_layers": 6, "units": units, "schedule": "gpipe", "stages": stages, **more}


def test_a_number_and_a_cut_list_are_a_plan() -> None:
    plan = Plan.from_json({"format": "varuna-capslog/plan/2", "num_layers": 5, "cuts": [0, 2]})
    assert [stage.layers for stage in plan.stages] == [((0, 2),), ((2, 5),)]
    assert plan.placement() == [0, 1]
    assert (plan.cuts, plan.fits, plan.stage_bytes, plan.num_microbatches) == ((0, 2), None, None, None)
    assert plan.stages[0].memory is None


@pytest.mark.parametrize("value", [SHORT, changed(SHORT, "capacity_bytes", to=8), FULL], ids=["short", "one", "full"])
def test_round_trip_through_a_file(tmp_path: Path, value: dict[str, Any]) -> None:
    plan = Plan.from_json(value)
    assert plan.to_json() == value
    write_plan(tmp_path / "plan.json", plan)
    assert read_plan(tmp_path / "plan.json") == plan


def test_what_is_absent_from_the_full_form_is_kept_whole_and_on_all_blocks() -> None:
    """No memory means keep; only null leaves the choice to the config."""
    bare = [{"layers": [[0, 3]], "ranks": [0]}, {"layers": [[3, 6]], "ranks": [1], "memory": None}]
    plan = Plan.from_json(one_pipeline(stages=bare))
    assert plan.stages[0] == PlanStage(((0, 3),), (0,), memory=())
    assert plan.stages[1].memory is None
    assert plan.ranks == ()
    assert Plan.from_json(plan.to_json()) == plan


def test_parts_of_layers_survive_a_round_trip() -> None:
    """Parts have one order. A stage that recomputes parts alone has no R, and is not recomputed as a whole."""
    bare = [
        {"layers": [[0, 3]], "ranks": [0], "memory": [[0, 3, "recompute", ["norms", "attention"]]]},
        {"layers": [[3, 6]], "ranks": [1], "memory": [[3, 4, "recompute"], [4, 6, "recompute", ["mlp"]]]},
    ]
    plan = Plan.from_json(changed(FULL, "stages", to=bare) | {"actions": None, "schedule": "1f1b"})
    assert plan.stages[0].memory == (MemoryInterval(0, 3, "recompute", ("attention", "norms")),)
    written = [row["memory"] for row in plan.to_json()["stages"]]
    assert written == [
        [[0, 3, "recompute", ["attention", "norms"]]],
        [[3, 4, "recompute"], [4, 6, "recompute", ["mlp"]]],
    ]
    assert Plan.from_json(plan.to_json()) == plan
    assert [stage.recomputes(DEFAULT_RUN) for stage in plan.stages] == [False, True]
    assert not plan.stages[0].whole
    assert plan.recomputes is None
    assert "recompute 0-2 (attention, norms)" in plan_table(plan).text()


def test_the_full_form_writes_cuts_where_each_rank_has_one_stage_of_one_pipeline() -> None:
    one_each = [stage([[0, 3]], [1]), stage([[3, 6]], [0])]
    written = Plan.from_json(one_pipeline(stages=one_each)).to_json()
    assert written["cuts"] == [0, 3]
    assert Plan.from_json(written).to_json() == written
    assert "cuts" not in Plan.from_json(one_pipeline()).to_json()
    assert "cuts" not in Plan.from_json(FULL).to_json()
    assert Plan.from_json(one_pipeline()).cuts == (0, 2, 4)
    assert Plan.from_json(FULL).cuts is None


def test_paths_are_the_stages_that_serve_a_block() -> None:
    plan = Plan.from_json(FULL)
    assert plan.paths() == {(0, 1, 2): [0, 1, 3], (3, 4): [2]}
    graph = plan.stage_graph()
    assert graph.ranks == (0, 1, 2, 1, 3)
    assert graph.routes == ((0, 1, 2),) * 4 + ((3, 4),) * 2 + ((0, 1, 2),) * 2
    assert plan.num_ranks == 4


def test_notes_are_not_part_of_the_file() -> None:
    plan = Plan.of_cuts(1, [0], notes=("for people",))
    assert "notes" not in plan.to_json()
    assert Plan.from_json(plan.to_json()) == plan


def test_the_capacity_of_a_rank_is_that_of_its_device() -> None:
    plan = Plan.of_cuts(3, [0, 1], capacity_bytes=(5, 7))
    assert plan.capacities_of([1, 0, 1]) == [7, 5, 7]
    assert plan.capacities_of(iter([0, 2])) is None
    assert Plan.of_cuts(3, [0, 1], capacity_bytes=5).capacities_of(iter([0, 1])) == [5, 5]
    assert Plan.of_cuts(3, [0, 1]).capacities_of([0, 1]) is None


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("plan", "a JSON object is needed"),
        (changed(SHORT, "format", to="varuna-capslog/profile/1"), "format is 'varuna-capslog/profile/1'"),
        (changed(SHORT, "cut", to=[0]), "unknown field 'cut'; did you mean 'cuts'?"),
        (changed(SHORT, "notes", to=[]), "unknown field 'notes'"),
        (changed(SHORT, "cuts", to=...), "field 'cuts' is missing"),
        (changed(SHORT, "num_layers", to=...), "field 'num_layers' is missing"),
        (changed(SHORT, "num_layers", to=0), "num_layers is 0; it must be at least 1"),
        (changed(SHORT, "profile_digest", to="sha256:"), "profile_digest is 'sha256:'; it must be sha256: and"),
        (changed(SHORT, "profile_digest", to="sha256:" + 65 * "0"), "it must be sha256: and hexadecimal digits"),
        (changed(SHORT, "profile_digest", to="md5:0"), "profile_digest is 'md5:0'"),
        (changed(FULL, "profile_digest", to="sha256:xyz"), "profile_digest is 'sha256:xyz'"),
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
        (changed(SHORT, "fits", to=0), "fits is 0; it must be true, false or null"),
        (changed(SHORT, "fits", to=True), "shortfall is given, but fits is not false"),
        (changed(SHORT, "shortfall", "stage", to=3), "shortfall.stage is 3, but the last stage is 2"),
        (changed(SHORT, "shortfall", "rank", to=1), "names a stage (short form) or a rank (full form)"),
        (changed(SHORT, "shortfall", "byte", to=3), "shortfall: unknown field 'byte'; did you mean 'bytes'?"),
        (changed(SHORT, "planner", to=3), "planner is 3; it must be a non-empty string"),
        (changed(SHORT, "num_microbatches", to=0), "num_microbatches is 0"),
        (changed(SHORT, "search_seconds", to=-1), "search_seconds is -1"),
        (changed(SHORT, "proven", to="yes"), "proven is 'yes'"),
        (changed(SHORT, "proven", to=1), "proven is 1; it must be true, false or null"),
        (changed(SHORT, "units", to=FULL["units"]), "units belongs to the full form"),
        (changed(SHORT, "actions", to=[["0F0"]]), "actions belongs to the full form"),
        (changed(FULL, "stages", to=[]), "stages is empty"),
        (changed(FULL, "units", to=...), "field 'units' is missing"),
        (changed(FULL, "schedule", to=None), "neither schedule nor actions is there"),
        (changed(FULL, "num_microbatches", to=8), "num_microbatches belongs to the short form"),
        (changed(FULL, "capacity_bytes", to=8), "capacity_bytes belongs to the short form"),
        (changed(FULL, "units", "blocks", to=3), "units.blocks is 3, which does not divide units.per_step, 8"),
        (changed(FULL, "units", "sample", to=3), "units: unknown field 'sample'; did you mean 'samples'?"),
        (changed(FULL, "stages", 0, "rank", to=[2]), "stages[0]: unknown field 'rank'; did you mean 'ranks'?"),
        (changed(FULL, "stages", 0, "ranks", to=...), "stages[0]: field 'ranks' is missing"),
        (changed(FULL, "stages", 2, "ranks", to=[1, 4]), "stages[2]: ranks is [1, 4]; it must hold 1 different"),
        (changed(FULL, "stages", 0, "parallel", "kind", to="moe"), "stages[0]: parallel.kind is 'moe'"),
        (changed(FULL, "stages", 0, "parallel", "kind", to="data"), "give the blocks to several stages"),
        (changed(FULL, "stages", 0, "grain", to=0), "stages[0]: grain is 0"),
        (changed(FULL, "stages", 0, "blocks", to=[1, 0]), "stages[0]: blocks is [1, 0]; it must hold one or more"),
        (changed(FULL, "stages", 0, "blocks", to=[0, 1, 4]), "stage 0 (rank 0, layers 0 to 1) serves block 4, but the"),
        (changed(FULL, "stages", 0, "layers", to=[[1, 2], [0, 1]]), "stages[0]: layers must hold one or more pieces"),
        # Rule 1: holes and overlaps.
        (
            changed(FULL, "stages", 4, "layers", to=[[3, 6]]),
            "stages[4]: the memory interval [2, 5] lies outside the stage (rank 3, layers 3 to 5)",
        ),
        (
            changed(changed(FULL, "stages", 4, "layers", to=[[3, 6]]), "stages", 4, "memory", to=[]),
            "no stage holds layer 2 for block 2; each layer must be in exactly one stage",
        ),
        (
            changed(FULL, "stages", 1, "layers", to=[[1, 4]]),
            "stages 0 (rank 0, layers 0 to 1) and 1 (rank 1, layers 1 to 3) both hold layer 1 for block 0",
        ),
        (changed(FULL, "stages", 2, "layers", to=[[4, 5]]), "no stage holds layer 5 for block 0"),
        (changed(FULL, "stages", 2, "layers", to=[[4, 7]]), "stage 2 (rank 2, layers 4 to 6) holds layer 6, but the"),
        (changed(FULL, "stages", 2, "blocks", to=[0, 1]), "no stage holds layer 4 for block 3"),
        (
            changed(FULL, "stages", 3, "ranks", to=[0]),
            "stages 0 (rank 0, layers 0 to 1) and 3 (rank 0, layers 0 to 1) hold layer 0 twice on one rank",
        ),
        # Memory intervals.
        (changed(FULL, "stages", 0, "memory", to=[[0, 1, "swap"]]), "stages[0]: memory[0][2] is 'swap'"),
        (changed(FULL, "stages", 0, "memory", to=[[0, 1]]), "memory[0] has 2 entries"),
        (
            changed(FULL, "stages", 0, "memory", to=[[0, 1, "recompute", "mlp"]]),
            "memory[0][3] is a string; it must be a list",
        ),
        (changed(FULL, "stages", 0, "memory", to=[[0, 1, "recompute", []]]), "memory[0][3] is []; it must hold one or"),
        (
            changed(FULL, "stages", 0, "memory", to=[[0, 1, "recompute", ["heads"]]]),
            "memory[0][3][0] is 'heads'; it must be one of attention, mlp, norms, experts",
        ),
        (
            changed(FULL, "stages", 0, "memory", to=[[0, 1, "offload", ["mlp"]]]),
            "memory[0][3] names parts of layers beside 'offload'; only 'recompute' has parts",
        ),
        (changed(FULL, "stages", 0, "moments", to=[[0, 1, "offload"]]), "stages[0]: moments[0][2] is 'offload'"),
        (changed(FULL, "stages", 0, "moments", to=[[0, 3, "host"]]), "the moments interval [0, 3] lies outside the"),
        (changed(FULL, "stages", 0, "moments", to=[[0, 2, "host"], [1, 2, "host"]]), "moments intervals [0, 2] and"),
        (changed(FULL, "stages", 0, "memory", to=[[0, 3, "offload"]]), "[0, 3] lies outside the stage (rank 0, layers"),
        (
            changed(FULL, "stages", 0, "memory", to=[[0, 2, "offload"], [1, 2, "recompute"]]),
            "stages[0]: memory intervals [0, 2] and [1, 2] overlap or do not rise",
        ),
        # Rule 3: grains.
        (
            changed(FULL, "stages", 0, "grain", to=3),
            "(rank 0, layers 0 to 1) has grain 3, which does not divide",
        ),
        (
            one_pipeline(
                units={"per_step": 12, "samples": 1, "blocks": 2},
                stages=[stage([[0, 2]], [0], grain=2), stage([[2, 6]], [1], grain=3)],
            ),
            "stages 0 (rank 0, layers 0 to 1) and 1 (rank 1, layers 2 to 5) have the grains 2 and 3",
        ),
        # Several pieces need direct routes.
        (
            one_pipeline(stages=[stage([[0, 2], [4, 6]], [0]), stage([[2, 4]], [1])]),
            "stage 0 (rank 0, layers 0 to 1 and 4 to 5) holds several pieces of the chain, which needs routes 'direct'",
        ),
        (changed(FULL, "routes", to="air"), "routes is 'air'"),
        (changed(FULL, "variants", to={"6": "sdpa"}), "variants names layer '6'; the last layer is 5"),
        (changed(FULL, "variants", to={"0": 1}), "variants['0'] is 1"),
        # Ranks.
        (changed(FULL, "ranks", to=[rank()] * 3), "stage 4 (rank 3, layers 2 to 5) runs on rank 3, but ranks has 3"),
        (changed(FULL, "ranks", 1, "speed", to=1.5), "speed is 1.5; give a number above 0 and at most 1"),
        (changed(FULL, "ranks", 1, "speed", to=0), "speed is 0; give a number above 0 and at most 1"),
        (changed(FULL, "ranks", 0, "capacity_bytes", to=3), "fits is true, but rank 0 has 3 bytes of capacity"),
        (changed(FULL, "ranks", 1, "capacity_bytes", to=11), "its stage(s) 1, 3 hold 12 together"),
        # Cuts beside stages.
        (one_pipeline(cuts=[0, 2, 5]), "cuts is [0, 2, 5], but the stages begin at [0, 2, 4]"),
        (changed(FULL, "cuts", to=[0, 2, 4]), "cuts is [0, 2, 4], but the stages begin at None"),
        # Rule 4: actions.
        (one_pipeline(actions=[["0F0", 3], []]), "actions[0] is 3; it must be a non-empty string"),
        (
            one_pipeline(actions=[["0F0", "2F0"], ["1F0"]]),
            "rank 0, stage 0, at the end of its list: missing 0B0",
        ),
        (
            one_pipeline(
                units={"per_step": 1, "samples": 1, "blocks": 1},
                stages=[stage([[0, 3]], [0]), stage([[3, 6]], [1])],
                actions=[["0F0"], ["1F0", "1B0", "0B0"]],
            ),
            "actions: rank 1, position 2, stage 0, microbatch 0: 0B0 is refused: stage 0 runs on rank 0",
        ),
        (
            one_pipeline(
                stages=[stage([[0, 3]], [0]), stage([[3, 6]], [1])],
                actions=[["0F0", "0B0", "0F1", "0B1"], ["1F0", "1F1", "1B0", "1B1"]],
            ),
            "actions wait for ever: rank 0 at 0RECV_B0",
        ),
        (
            one_pipeline(stages=[stage([[0, 6]], [0], in_flight=1)], actions=[["0F0", "0F1", "0B0", "0B1"]]),
            "1 microbatches are in flight on the stage and the limit is 1",
        ),
    ],
)
def test_mistakes_are_named_with_the_file(value: Any, message: str) -> None:
    with pytest.raises(CapslogError) as error:
        Plan.from_json(value, where="run/plan.json")
    assert str(error.value).startswith("run/plan.json: ")
    assert message in str(error.value)


OLD_UNITS = {name: value for name, value in OLD.items() if name != "microbatches_of_pipeline"}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (changed(SHORT, "num_layers", to=10**9), "num_layers is 1000000000; it must be at most 100000"),
        (changed(FULL, "num_layers", to=2**63 - 1), "num_layers is 9223372036854775807; it must be at most 100000"),
        (changed(SHORT, "num_microbatches", to=10**9), "num_microbatches is 1000000000; it must be at most"),
        (changed(FULL, "units", to={"per_step": 10**9}), "per_step is 1000000000; it must be at most 262144"),
        (changed(FULL, "units", to={"blocks": 2**62}), "blocks is 4611686018427387904; it must be at most 262144"),
        (
            one_pipeline(units={"per_step": 2**18, "blocks": 2**18}),
            "the 3 stages serve 786432 blocks together; at most 262144 can be scheduled: take fewer blocks",
        ),
        (
            changed(changed(FULL, "units", to={"per_step": None}), "stages", 0, "blocks", to=[10**9]),
            "stages[0]: blocks is 1000000000; it must be at most 262143",
        ),
        (changed(FULL, "stages", 0, "ranks", to=[10**9]), "stages[0]: ranks is 1000000000; it must be at most 99999"),
        (
            FULL
            | {"num_layers": 10**5, "stages": [stage([[0, 10**5]], [number], blocks=[number]) for number in range(101)]}
            | {"units": {"per_step": 101, "blocks": 101}, "ranks": []},
            "the 101 stages hold 10100000 layers together; at most 10000000 can be planned",
        ),
        (changed(OLD, "stages", 0, "pipeline", to=10**9), "pipeline is 1000000000; it must be at most 262143"),
        (changed(OLD_UNITS, "num_microbatches", to=10**9), "num_microbatches is 1000000000; it must be at most 262144"),
    ],
)
def test_a_plan_of_a_billion_of_anything_is_refused_before_it_is_expanded(value: Any, message: str) -> None:
    """0.7 kB with num_layers=1e9 took all memory, and num_microbatches=1e9 had no end in `simulate` and `export`."""
    with pytest.raises(CapslogError) as error:
        Plan.from_json(value, where="run/plan.json")
    assert message in str(error.value)


def test_a_long_list_of_pieces_and_intervals_is_checked_in_one_pass() -> None:
    """Every interval was looked for in every piece: 20,000 of both took a minute."""
    pieces = [[2 * number, 2 * number + 1] for number in range(20_000)]
    made = PlanStage(pieces, (0,), memory=[[*piece, "recompute"] for piece in pieces])  # type: ignore[arg-type]
    assert len(made.memory or ()) == 20_000
    with pytest.raises(CapslogError, match=r"memory interval \[39998, 40000\] lies outside the stage"):
        PlanStage(pieces, (0,), memory=[[39998, 40000, "recompute"]])  # type: ignore[arg-type, list-item]


@pytest.mark.parametrize("form", [SHORT, FULL, OLD], ids=["short", "full", "plan/1"])
def test_a_value_of_a_wrong_type_anywhere_is_refused_in_words(form: dict[str, Any]) -> None:
    """Any exception but CapslogError fails the test; a plan that is read nevertheless can be written again."""
    refused = 0
    for path in each_place(form):
        for wrong in OF_ANY_TYPE:
            try:
                plan = Plan.from_json(changed(form, *path, to=wrong))
            except CapslogError:
                refused += 1
            else:
                assert Plan.from_json(plan.to_json()) == plan
    assert refused > 100


def test_actions_of_the_stages_own_calls_are_read() -> None:
    """Block 1 alone takes the second pipeline: its unit 1 is that pipeline's call 0."""
    stages = [stage([[0, 6]], [0], blocks=[0]), stage([[0, 3]], [1], blocks=[1]), stage([[3, 6]], [2], blocks=[1])]
    units = {"per_step": 2, "samples": 1, "blocks": 2}
    actions = [["0F0", "0B0"], ["1F0", "1B0"], ["2F0", "2B0"]]
    plan = Plan.from_json(one_pipeline(stages=stages, units=units, actions=actions, schedule=None))
    assert plan.to_json()["actions"] == actions


def test_records_made_in_code_pass_the_same_checks() -> None:
    with pytest.raises(CapslogError, match="must begin with 0"):
        Plan.of_cuts(3, [1])
    with pytest.raises(CapslogError, match="shortfall is given"):
        Plan.of_cuts(3, [0], shortfall=Shortfall(0, 1))
    plan = Plan(3, [PlanStage([[0, 1]], [1]), PlanStage([[1, 3]], [0])], Units(4, 1, 2))  # type: ignore[arg-type]
    assert plan.placement() == [1, 0]
    with pytest.raises(CapslogError, match=r"stage 0 holds layer 3|no stage holds layer 3"):
        Plan(4, plan.stages, plan.units)
    with pytest.raises(CapslogError, match="fits is true, but rank 0"):
        Plan(3, plan.stages, plan.units, fits=True, ranks=(PlanRank(9, capacity_bytes=8), PlanRank()))
    assert MemoryInterval.of([0, 1, "offload"], "memory") == MemoryInterval(0, 1, "offload")


@pytest.mark.parametrize(
    ("more", "refused"),
    [
        # Each of the stages fits its device, and the two of rank 0 together do not.
        ({"ranks": [rank(capacity_bytes=11), rank(capacity_bytes=12)], "fits": True}, True),
        ({"ranks": [rank(capacity_bytes=12), rank(capacity_bytes=12)], "fits": True}, False),
        ({"ranks": [rank(capacity_bytes=11), rank()], "fits": False}, False),
        ({"ranks": [rank(capacity_bytes=11), rank()], "fits": None}, False),
        ({"ranks": [rank(), rank()], "fits": True}, False),
        # The bytes of the rank count, not the sum over its stages: their peaks need not coincide.
        ({"ranks": [rank(capacity_bytes=11, bytes=10), rank(capacity_bytes=6)], "fits": True}, False),
        ({"ranks": [rank(capacity_bytes=20, bytes=21), rank()], "fits": True}, True),
    ],
)
def test_a_plan_that_says_fits_over_its_own_capacity_is_refused(more: dict[str, Any], refused: bool) -> None:
    """Such a plan was once accepted: no stage was compared with a capacity, nor were stages of one rank added up."""
    stages = [stage([[number, number + 1]], [number % 2], bytes=6) for number in range(3)]
    value = one_pipeline(num_layers=3, stages=stages, **more)
    if not refused:
        assert Plan.from_json(value).fits == more["fits"]
        return
    with pytest.raises(CapslogError, match=r"fits is true, but rank 0 has .* bytes of capacity and its stage"):
        Plan.from_json(value)


def test_the_short_form_is_held_to_its_capacity_too() -> None:
    with pytest.raises(CapslogError, match=r"fits is true, but rank 1 has 8 bytes .* stage\(s\) 1 hold 9 together"):
        Plan.from_json(changed(changed(SHORT, "shortfall", to=None), "fits", to=True))
