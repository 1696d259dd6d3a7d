"""`pipeline.plan=FILE`: the file's plan is trained as it is, or one sentence says why not, before any worker starts."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from varuna_capslog import cli
from varuna_capslog.base import files
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.config.reading import Config, load_config, section
from varuna_capslog.plans.parts import Units
from varuna_capslog.plans.plan import read_plan
from varuna_capslog.start.given_plan import given_plan, with_given_plan
from varuna_capslog.start.prepare import _same, prepare_run

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
    said: list[str] = []
    config = with_given_plan(config_of(write(tmp_path, REPLICATED_MIDDLE)), said.append)
    pipeline = config.pipeline
    assert (pipeline.devices, pipeline.replicas, pipeline.schedule, pipeline.recompute) == (3, 1, "1f1b", True)
    assert config.train.accumulation_blocks == 4
    assert len(said) == 1
    assert said[0].endswith(
        "given.json decides: pipeline.devices=3, pipeline.schedule=1f1b, pipeline.stage_inputs=device"
    )
    assert with_given_plan(config, said.append) == config
    plain = config_of(None)
    assert with_given_plan(plain) is plain
    assert given_plan(plain) is None


def test_the_configs_capacity_replaces_that_of_the_file(tmp_path: Path) -> None:
    ranks = [{"bytes": 5, "capacity_bytes": 9}] * 3
    path = write(tmp_path, REPLICATED_MIDDLE | {"ranks": ranks, "fits": True})
    plan = given_plan(with_given_plan(config_of(path)))
    assert plan is not None
    assert [rank.capacity_bytes for rank in plan.ranks] == [9, 9, 9]
    other = given_plan(with_given_plan(config_of(path, pipeline={"capacity": "6B"})))
    assert other is not None
    assert [(rank.bytes, rank.capacity_bytes) for rank in other.ranks] == [(5, 6)] * 3
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
    with pytest.raises(CapslogError, match=message):
        with_given_plan(config_of(write(tmp_path, REPLICATED_MIDDLE), train, **sections))


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
    one = ["pipeline.devices=1", "pipeline.cuts=[0]", "train.max_steps=5"]
    assert cli._run(command(tmp_path, "alone", *one)) == 0
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
        ({"variants": {"1": "sdpa"}}, 2, "variants is {'1': 'sdpa'} in the plan, which this engine does not run yet"),
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
