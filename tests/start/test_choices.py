"""`pipeline.plan=FILE`: the file's plan is trained as it is, or refused in one sentence before any worker starts."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from tests.elastic.machines import free_port
from tests.rig.commands import chaos
from varuna_capslog import cli
from varuna_capslog.base import files
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.config.reading import Config, load_config, section
from varuna_capslog.plans.parts import Units, grains_of
from varuna_capslog.plans.plan import read_plan
from varuna_capslog.profiles.record import LayerProfile, Profile, read_profile, write_profile
from varuna_capslog.start.choices import given_plan, with_given_plan
from varuna_capslog.start.prepare import _same, prepare_run
from varuna_capslog.training.manifest import check_continues, run_constants

pytestmark = pytest.mark.usefixtures("forked_servers")

RECOMPUTED = [[0, 3, "recompute"], [3, 8, "recompute"], [8, 11, "recompute"]]
REPLICATED_MIDDLE: dict[str, Any] = {
    "format": "varuna-capslog/plan/2",
    "num_layers": 11,
    "schedule": "1f1b",
    "units": {"per_step": 4, "samples": 2, "blocks": 4},
    "stages": [
        {"layers": [[0, 3]], "ranks": [0], "memory": [RECOMPUTED[0]]},
        {"layers": [[3, 8]], "ranks": [1], "blocks": [0, 1, 3], "memory": [RECOMPUTED[1]]},
        {"layers": [[3, 8]], "ranks": [2], "blocks": [2], "memory": [RECOMPUTED[1]]},
        {"layers": [[8, 11]], "ranks": [0], "memory": [RECOMPUTED[2]]},
    ],
}
"""The middle stage on two ranks, which take three blocks and one; both ends on rank 0."""
THREE_AND_ONE: dict[str, Any] = REPLICATED_MIDDLE | {
    "schedule": "varuna",
    "stages": [
        {"layers": [[0, 11]], "ranks": [1], "blocks": [1, 2], "memory": [[0, 11, "recompute"]]},
        *(
            {"layers": [interval[:2]], "ranks": [rank], "blocks": [0, 3], "memory": [interval]}
            for rank, interval in zip((0, 3, 2), RECOMPUTED, strict=True)
        ),
    ],
}
"""One pipeline of three stages and one of a single stage, their ranks in no order."""


def write(folder: Path, plan: dict[str, Any]) -> Path:
    path = folder / "given.json"
    path.write_text(json.dumps(plan))
    return path


def config_of(path: Path | None, train: dict[str, Any] | None = None, **sections: Any) -> Config:
    sizes = {"minibatch_size": 8, "microbatch_size": 2}
    values = {"workload": "tests.engine.workload:workload", "train": sizes | (train or {}), "device": "cpu"}
    pipeline = {"plan": None if path is None else str(path)} | sections.pop("pipeline", {})
    return section(Config, values | {"pipeline": pipeline} | sections, "")


def test_the_plan_replaces_what_it_decides_and_one_line_says_so(tmp_path: Path) -> None:
    messages: list[str] = []
    config = with_given_plan(config_of(write(tmp_path, REPLICATED_MIDDLE)), messages.append)
    pipeline = config.pipeline
    assert (pipeline.devices, pipeline.replicas, pipeline.schedule, pipeline.recompute) == (3, 1, "1f1b", True)
    assert config.train.accumulation_blocks == 4
    assert len(messages) == 1
    assert messages[0].endswith(
        "given.json decides: pipeline.devices=3, pipeline.schedule=1f1b, pipeline.stage_inputs=device"
    )
    assert with_given_plan(config, messages.append) == config
    plain = config_of(None)
    assert with_given_plan(plain) is plain
    assert given_plan(plain) is None


def test_the_configs_capacity_replaces_that_of_the_file(tmp_path: Path) -> None:
    ranks = [{"bytes": 5, "capacity_bytes": 9}] * 3
    path = write(tmp_path, REPLICATED_MIDDLE | {"ranks": ranks, "fits": True})
    plan = given_plan(with_given_plan(config_of(path)))
    assert plan is not None
    assert [rank.capacity_bytes for rank in plan.ranks] == [9, 9, 9]
    limited = given_plan(with_given_plan(config_of(path, pipeline={"capacity": "6B"})))
    assert limited is not None
    assert [(rank.bytes, rank.capacity_bytes) for rank in limited.ranks] == [(5, 6)] * 3
    with pytest.raises(CapslogError, match="fits is true, but rank 0 has 4 bytes of capacity"):
        given_plan(with_given_plan(config_of(path, pipeline={"capacity": "4B"})))


@pytest.mark.parametrize(
    ("train", "sections", "message"),
    [
        ({"minibatch_size": 16}, {}, "units.per_step is 4, but the config makes it 8"),
        ({"microbatch_size": 1}, {}, "units.per_step is 4, but the config makes it 8"),
        ({"accumulation_blocks": 2}, {}, "units.blocks is 4, but train.accumulation_blocks=2"),
    ],
)
def test_what_contradicts_the_plan_is_refused(
    tmp_path: Path, train: dict[str, Any], sections: dict[str, Any], message: str
) -> None:
    messages: list[str] = []
    with pytest.raises(CapslogError, match=message):
        with_given_plan(config_of(write(tmp_path, REPLICATED_MIDDLE), train, **sections), messages.append)
    assert messages == [], "the one sentence is the refusal"


def test_cuts_beside_a_plan_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CapslogError, match="are both given; leave one of them out"):
        config_of(write(tmp_path, REPLICATED_MIDDLE), pipeline={"cuts": [0, 5]})


def command(tmp_path: Path, run_dir: str, *overrides: str) -> list[str]:
    text = """
workload: tests.engine.workload:workload
device: cpu
train: {minibatch_size: 8, microbatch_size: 2, accumulation_blocks: 4, max_steps: 3, evaluate_every: 2, seed: 3}
"""
    (tmp_path / "config.yaml").write_text(text)
    return ["train", str(tmp_path / "config.yaml"), f"run_dir={tmp_path / run_dir}", *overrides]


def losses(run_dir: Path) -> dict[int, tuple[float, float]]:
    return {line["step"]: (line["loss"], line["grad_norm"]) for line in files.read_jsonl(run_dir / "metrics.jsonl")}


def test_a_given_plan_trains_as_one_device_does_and_another_goes_on(tmp_path: Path) -> None:
    """Losses, norms and scores to the last bit; the checkpoint of one plan is resumed under another."""
    one_device = ["pipeline.devices=1", "pipeline.cuts=[0]", "train.max_steps=5"]
    assert cli._run(command(tmp_path, "alone", *one_device)) == 0
    first = write(tmp_path, REPLICATED_MIDDLE)
    assert cli._run(command(tmp_path, "planned", f"pipeline.plan={first}")) == 0
    second = tmp_path / "second.json"
    second.write_text(json.dumps(THREE_AND_ONE))
    assert cli._run(command(tmp_path, "planned", f"pipeline.plan={second}", "train.max_steps=5")) == 0
    assert losses(tmp_path / "planned") == losses(tmp_path / "alone")
    assert sorted(losses(tmp_path / "planned")) == [1, 2, 3, 4, 5]
    scores = [
        [line | {"time": 0, "generation": 0} for line in files.read_jsonl(tmp_path / name / "evaluations.jsonl")]
        for name in ("alone", "planned")
    ]
    of_step = [{line["step"]: line for line in lines} for lines in scores]
    assert {step: of_step[1][step] for step in of_step[0]} == of_step[0]
    assert files.read_json(tmp_path / "planned" / "plan-1.json")["stages"][0]["ranks"] == [1]


@pytest.mark.parametrize(
    ("change", "status", "message"),
    [
        ({"stages": REPLICATED_MIDDLE["stages"][:3]}, 2, "no stage holds layer 8 for block 0"),
        ({"stages": [*REPLICATED_MIDDLE["stages"], {"layers": [[0, 3]], "ranks": [3]}]}, 2, "both hold layer 0"),
        ({"num_layers": 12}, 2, "no stage holds layer 11"),
        ({"ranks": [{}, {}]}, 2, "runs on rank 2, but ranks has 2 entries"),
        ({"unit": {}}, 2, "unknown field 'unit'; did you mean 'units'?"),
        (
            {
                "routes": "direct",
                "stages": [{"layers": [[0, 3], [8, 11]], "ranks": [0]}, {"layers": [[3, 8]], "ranks": [1]}],
            },
            2,
            "stage 0 (rank 0, layers 0 to 2 and 8 to 10) reaches its layer 8 only through layers of other stages",
        ),
        ({"variants": {"1": "sdpq"}}, 2, "unknown variant 'sdpq'; did you mean 'sdpa'?"),
        ({"variants": {"1": "sdpa"}}, 2, "gives '#1' the variant 'sdpa', which none of these layers has a place for"),
    ],
)
def test_a_bad_plan_is_one_sentence_and_starts_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any], status: int, message: str
) -> None:
    path = write(tmp_path, REPLICATED_MIDDLE | change)
    assert cli._run(command(tmp_path, "run", f"pipeline.plan={path}")) == status
    lines = [line for line in capsys.readouterr().err.splitlines() if "decides:" not in line]
    assert len(lines) == 1
    assert message in lines[0]
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    assert not list((tmp_path / "run").glob("workers/*.json"))


def test_a_plan_of_another_model_is_refused_before_it_trains(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "short.json"
    path.write_text(json.dumps({"format": "varuna-capslog/plan/2", "num_layers": 9, "cuts": [0, 4]}))
    assert cli._run(command(tmp_path, "run", f"pipeline.plan={path}")) == 2
    assert "the plan is for 9 layers, the model has 11" in capsys.readouterr().err
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


# -- every command that loads a config


SHORT: dict[str, Any] = {"format": "varuna-capslog/plan/2", "num_layers": 11, "cuts": [0, 2, 7]}


@pytest.fixture
def short(tmp_path: Path) -> str:
    """`pipeline.plan` with one stage on each of three ranks, which no planner would choose."""
    return f"pipeline.plan={write(tmp_path, SHORT)}"


@pytest.fixture
def profile(tmp_path: Path) -> str:
    rows = [
        LayerProfile(f"l{number}", 100, 50 if number else None, forward_seconds=1.0, backward_seconds=2.0)
        for number in range(11)
    ]
    path = tmp_path / "known.json"
    write_profile(path, Profile(tuple(rows), conditions={"microbatch_size": 2}))
    return str(path)


def called(tmp_path: Path, name: str, *arguments: str) -> int:
    config = command(tmp_path, "run")[1:]
    return cli._run([name, *config, *arguments])


def test_a_host_trains_the_plan_that_the_config_names(tmp_path: Path, short: str) -> None:
    """The run once trained another plan silently, on as many workers as `pipeline.devices`."""
    address = f"127.0.0.1:{free_port()}"
    assert called(tmp_path, "host", "--serve", address, short, "train.max_steps=2") == 0
    run_dir = tmp_path / "run"
    assert read_plan(run_dir / "plan-0.json").cuts == (0, 2, 7)
    assert {row["world_size"] for row in files.read_jsonl(run_dir / "metrics.jsonl")} == {3}
    assert {read_plan(path).cuts for path in run_dir.glob("plan-*.json")} == {(0, 2, 7)}


def test_a_host_has_the_workers_of_the_plan(tmp_path: Path, short: str, capsys: pytest.CaptureFixture[str]) -> None:
    serve = ("--serve", "a:1", "--dry-run", short)
    assert called(tmp_path, "host", *serve) == 0
    assert "3 worker(s) here" in capsys.readouterr().out
    assert called(tmp_path, "host", *serve, "--nnodes", "2", "--nproc", "1") == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert "--nnodes 2 x --nproc 1 is given, but pipeline.plan=" in error
    assert "runs on 3 ranks" in error
    assert called(tmp_path, "host", "--store", "a:1", "--dry-run", short, "--nproc", "1") == 0
    assert called(tmp_path, "train", short, "--nproc", "2") == 2
    assert "--nproc 2 is given, but pipeline.plan=" in capsys.readouterr().err.splitlines()[-1]


def test_commands_that_search_set_the_plan_aside(
    tmp_path: Path, short: str, profile: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """`plan` gave back the plan that the config names, as if it had been searched for."""
    options = ("--profile", profile, "--devices", "3", "--json")
    for plan in (short, "pipeline.plan=nowhere.json"):
        assert called(tmp_path, "plan", *options, plan) == 0
        answer = json.loads(capsys.readouterr().out)
        assert answer["planner"] == "exact"
        assert answer["cuts"] != SHORT["cuts"]
        assert called(tmp_path, "compare", *options, plan) == 0
        assert json.loads(capsys.readouterr().out)


def test_the_plan_of_the_config_is_simulated(tmp_path: Path, profile: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It was refused for its schedule, which it decides."""
    options = ("--profile", profile, "--json")
    path = write(tmp_path, REPLICATED_MIDDLE)
    assert called(tmp_path, "simulate", *options, f"pipeline.plan={path}") == 0
    from_config = json.loads(capsys.readouterr().out)
    assert (from_config["schedule"], from_config["num_microbatches"]) == ("1f1b", 4)
    assert from_config["pipelines"][0]["stages_of_rank"] == [[0, 3], [1], [2]]
    assert called(tmp_path, "simulate", *options, "pipeline.plan=nowhere.json", "--plan", str(path)) == 0
    assert json.loads(capsys.readouterr().out) == from_config


def test_the_profile_is_that_of_a_run_of_the_plan(tmp_path: Path) -> None:
    kept = [{name: item for name, item in stage.items() if name != "memory"} for stage in REPLICATED_MIDDLE["stages"]]
    path, output = write(tmp_path, REPLICATED_MIDDLE | {"stages": kept}), tmp_path / "profile.json"
    assert called(tmp_path, "profile", "--estimate", "-o", str(output), f"pipeline.plan={path}") == 0
    assert read_profile(output).conditions["recompute"] is False


def test_chaos_needs_as_many_workers_as_the_plan_has_ranks(
    tmp_path: Path, short: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run would have begun with another plan."""
    words = [*command(tmp_path, "run")[1:], short, "--hosts", "2", "--workers", "2"]
    assert cli._run(words, chaos.app) == 2
    assert "the hosts have 4 workers in all, but pipeline.plan=" in capsys.readouterr().err.splitlines()[-1]


def test_a_config_that_the_plan_has_not_decided_is_not_prepared(tmp_path: Path, short: str) -> None:
    with pytest.raises(CapslogError, match="the plan is for 3 ranks, the config has 2"):
        prepare_run(config_of(write(tmp_path, SHORT), run_dir=str(tmp_path / "run")), show=False)


def test_where_the_plan_leaves_the_blocks_open_there_is_one(tmp_path: Path) -> None:
    assert with_given_plan(config_of(write(tmp_path, SHORT))).train.accumulation_blocks == 1
    assert with_given_plan(config_of(write(tmp_path, SHORT), {"accumulation_blocks": 2})).num_blocks == 2


def test_ranks_that_do_not_fit_are_named_before_any_worker_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Several stages and unequal blocks on a rank; and cuts of more stages than devices, which were once refused."""
    path = write(tmp_path, REPLICATED_MIDDLE | {"ranks": [{"capacity_bytes": n << 10} for n in (1024, 20, 1024)]})
    assert cli._run(command(tmp_path, "given", f"pipeline.plan={path}", "profile.source=estimated")) == 3
    cuts = ["pipeline.cuts=[0, 3, 6, 8]", "pipeline.devices=2", "profile.source=estimated"]
    assert cli._run([*command(tmp_path, "cuts", *cuts), "pipeline.capacity=20KiB"]) == 3
    errors = capsys.readouterr().err
    assert "does not fit: rank 1 needs" in errors
    assert "does not fit: rank 0 needs" in errors
    for name, capacities in (("given", [1 << 20, 20 << 10, 1 << 20]), ("cuts", [20 << 10] * 2)):
        plan = files.read_json(tmp_path / name / "plan-0.json")
        assert [rank["capacity_bytes"] for rank in plan["ranks"]] == capacities
        assert all(rank["bytes"] > 20 << 10 for rank in plan["ranks"])
        assert (plan["fits"], plan["memory_model"]) == (False, "ranks")
        assert plan["peak_bytes"] == max(rank["bytes"] for rank in plan["ranks"])
        assert plan["shortfall"]["rank"] == (1 if name == "given" else 0)
        assert not list((tmp_path / name).glob("workers/*.json"))


def test_a_given_plan_that_fits_has_the_bytes_of_its_ranks(tmp_path: Path) -> None:
    config = config_of(
        write(tmp_path, REPLICATED_MIDDLE), {"accumulation_blocks": 4}, pipeline={"capacity": "1MiB"},
        profile={"source": "estimated"}, run_dir=str(tmp_path / "run"),
    )  # fmt: skip
    plan = prepare_run(with_given_plan(config), show=False)
    assert plan.fits is True
    assert [rank.capacity_bytes for rank in plan.ranks] == [1 << 20] * 3
    assert all(rank.bytes and rank.bytes < 1 << 20 for rank in plan.ranks)
    assert plan.memory_model == "ranks"
    # without a capacity nothing is predicted, and nothing is profiled
    plain = config_of(write(tmp_path, REPLICATED_MIDDLE), run_dir=str(tmp_path / "plain"))
    assert prepare_run(with_given_plan(plain), show=False).ranks == ()
    assert not (tmp_path / "plain" / "profile.json").exists()


def test_a_run_goes_on_with_cuts_after_a_plan_of_the_full_form(tmp_path: Path) -> None:
    """Two plans of different forms were compared field by field, and ended the command with a KeyError, depending on
    the order in which it came to the fields.
    """
    path = write(tmp_path, REPLICATED_MIDDLE)
    for number, words in enumerate(([f"pipeline.plan={path}"], ["pipeline.cuts=[0,5]", "pipeline.schedule=1f1b"]) * 2):
        call = command(tmp_path, "run", *words)
        plan = prepare_run(with_given_plan(load_config(Path(call[1]), call[2:])), show=False)
        assert read_plan(tmp_path / "run" / f"plan-{number}.json") == plan
    short = dataclasses.replace(plan, planner=None)
    full = dataclasses.replace(short, units=Units(4, 2, 4))
    assert not _same(short, full)
    assert not _same(full, short)
    assert _same(full, dataclasses.replace(full, search_seconds=1.0))


def test_machines_that_begin_together_have_as_many_workers_as_the_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, REPLICATED_MIDDLE)
    words = ["host", *command(tmp_path, "run", f"pipeline.plan={path}")[1:], "--serve", "127.0.0.1:4567", "--dry-run"]
    for machines, workers in ((1, 3), (3, 1)):
        assert cli._run([*words, "--nnodes", str(machines)]) == 0
        assert f"{workers} worker(s) here" in capsys.readouterr().out
    assert cli._run([*words, "--nnodes", "3", "--nproc", "1"]) == 0
    assert cli._run([*words, "--nnodes", "2", "--nproc", "2"]) == 2
    assert "--nnodes 2 x --nproc 2 is given, but pipeline.plan=" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_grains_are_constants_of_a_run(tmp_path: Path) -> None:
    """Other grains give other bits, and after a membership change the planner would choose none."""
    stages = [{"layers": [[0, 4]], "ranks": [0]}, {"layers": [[4, 11]], "ranks": [1], "grain": 2}]
    config = config_of(write(tmp_path, REPLICATED_MIDDLE | {"units": {"per_step": 4, "blocks": 1}, "stages": stages}))
    config = with_given_plan(config, lambda _: None)
    grains = grains_of(read_plan(tmp_path / "given.json").stages)
    assert grains == [1] * 4 + [2] * 7
    manifest = {"constants": run_constants(config, grains)}
    check_continues(config, None, manifest, tmp_path, grains)
    for before, now in ((manifest, []), ({"constants": run_constants(config)}, grains)):
        with pytest.raises(CapslogError, match=r"grains.* of its layers, the plan has .*run a plan of the same grains"):
            check_continues(config, None, before, tmp_path, now)
    elastic = config.elastic.model_copy(update={"enabled": True})
    with pytest.raises(CapslogError, match="a stage has grain 2, but after a membership change the planner chooses"):
        prepare_run(config.model_copy(update={"elastic": elastic, "run_dir": tmp_path / "run"}), False)
