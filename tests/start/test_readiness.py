"""Findings of `capslog check`: everything that stops a run, part by part; nothing is written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.start.test_prepare import of_pictures
from varuna_capslog import cli
from varuna_capslog.base import files
from varuna_capslog.base.errors import RunFinding
from varuna_capslog.base.fork_server import NoAnswer
from varuna_capslog.config.settings import Config
from varuna_capslog.model.workload import load_workload
from varuna_capslog.start import readiness
from varuna_capslog.training.manifest import FORMAT

OWN = {
    "workload": "varuna_capslog.own_data:workload",
    "model": {"factory": "tests.own_data.samples:model"},
    "data": {
        "dataset": "tests.own_data.samples:Points",
        "loss": "tests.own_data.samples:noted_loss",
        "inputs": ["input"],
    },
    "train": {"minibatch_size": 8, "microbatch_size": 2},
    "pipeline": {"devices": 2},
    "device": "cpu",
}


class Here:
    """Reads samples in this process, which takes no second to start."""

    def __init__(self, *entry: object, **options: object) -> None:
        pass

    def __enter__(self) -> Here:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def call(self, entry: str, config: Config, seconds: float) -> Any:
        return [RunFinding(f"{count} {name} samples") for name, count in load_workload(config).read_samples().items()]


class Hanging(Here):
    def call(self, entry: str, config: Config, seconds: float) -> Any:
        raise NoAnswer(entry, f"no answer within {seconds:g} s")


def found(config: Config, monkeypatch: pytest.MonkeyPatch, server: type = Here) -> list[RunFinding]:
    monkeypatch.setattr(readiness, "ForkServer", server)
    return list(readiness.check_run(config, lambda part: None, show=False))


def of(findings: list[RunFinding], kind: str) -> list[tuple[str, str]]:
    return [(finding.part, finding.text) for finding in findings if finding.kind == kind]


def test_a_sound_run_is_found_sound_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], forked_servers: None
) -> None:
    """The first sample is read in a real process of its own, as the command does it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.yaml").write_text(json.dumps(OWN))  # JSON is YAML
    samples = "tests.own_data.samples"
    captured = [f"model.factory={samples}:Named", f"data.loss={samples}:named_loss"]  # which train keeps in the folder
    assert cli._run(["check", "own.yaml", "run_dir=runs/own", *captured, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    texts = {row["part"]: row["text"] for row in rows if row["kind"] == "fact"}
    assert {row["kind"] for row in rows} == {"fact", "note"}
    assert "accumulation blocks are chosen" in next(row["text"] for row in rows if row["kind"] == "note")
    assert texts["data"] == "24 training samples, the first can be read"
    assert texts["model"] == "tests.own_data.samples:Named: 2 layers, 35 parameters"
    assert "2 stages on 2 ranks by planner budget" in texts["plan"]
    assert texts["disk"].startswith("4 checkpoint(s) of about ")
    assert [path.name for path in tmp_path.iterdir()] == ["own.yaml"]


def test_every_fault_is_told_and_the_exit_status_says_which_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(readiness, "ForkServer", Here)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.yaml").write_text(json.dumps(OWN))
    (tmp_path / "file").write_text("")
    assert cli._run(["check", "own.yaml", "pipeline.capacity=1KiB"]) == 3
    assert "plan: does not fit: rank" in capsys.readouterr().out.replace("does not fit: does not", "does not")
    assert cli._run(["check", "own.yaml", "data.arguments={count: 4}", "init_from=no.pt", r'run_dir="file/\e[2J"']) == 2
    printed = capsys.readouterr()
    stops = [line for line in printed.out.splitlines() if "stops the run: " in line]
    assert [line.partition(":")[0] for line in stops] == ["data", "checkpoint", "disk"]
    assert "the training data has 4 samples, fewer than train.minibatch_size=8; lower it" in stops[0]
    assert r"run_dir=file/\x1b[2J: " in stops[2], "a name from a file cleared the reader's terminal"
    assert printed.err.splitlines()[-1].startswith("capslog: 3 of these would stop the run")
    assert cli._run(["check", "own.yaml", "train.optimizer=adamwx", "pipeline.planner=exakt"]) == 2
    assert "'adamw'?\nconfig: stops the run: " in capsys.readouterr().out.replace("'exact'?", "'adamw'?")
    monkeypatch.setattr(readiness, "granted_bytes", lambda: 1000)
    assert cli._run(["check", "own.yaml"]) == 3
    assert "but this machine grants 1000 B of memory; set pipeline.devices" in capsys.readouterr().out
    assert cli._run(["check", "own.yaml", "trian.lr=1", "--json"]) == 2
    assert [row["part"] for row in json.loads(capsys.readouterr().out)] == ["config"]


def test_data_that_hang_or_end_their_process_are_told_and_not_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A data set that waits for ever, or calls os._exit, would have taken the command with it."""
    config = Config(**OWN, run_dir=tmp_path / "run")
    monkeypatch.setattr(readiness, "data_findings", lambda *_: pytest.fail("the data were asked for again"))
    findings = found(config, monkeypatch, Hanging)
    ((part, text),) = of(findings, "stops")
    assert part == "data"
    assert "(no answer within 20 s), so that the rest and the model were not checked" in text
    assert [part for part, _ in of(findings, "note")] == ["model", "plan"]


def test_pictures_and_a_checkpoint_of_other_data_are_told_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = of_pictures(tmp_path, lr_multipliers={"encodre": 0.1})
    config.model = {"backbone": "resnet18", "last_layer": "layer3", "norm": "group", "hidden_dim": 32}
    config.model |= {"encoder_layers": 1, "decoder_layers": 1, "attention_heads": 4, "feedforward": 64, "queries": 10}
    config.pipeline.cuts = [0]  # needs no estimate
    config.data["augment"] = {"scales": [32], "max_size": 48, "crop_resize": [32], "crop_size": [24, 32]}
    (first, second) = of(found(config, monkeypatch), "stops")
    assert (first[0], second[0]) == ("data", "model")
    assert "1 of the 3 pictures" in first[1]
    assert "'encodre', which is part of no parameter's address" in second[1]
    config.train.lr_multipliers = {}
    facts = load_workload(config).data_facts()
    manifest = config.run_dir / "checkpoints" / "step-00000002" / "manifest.json"
    about = {"model": "detr-rn18-layer3-e1-d1", "constants": {"seed": 7}, "data": {**facts, "category 1": "bee"}}
    files.write_json(manifest, {"format": FORMAT, "step": 2, "layers": {}, "shared": {}, **about})
    config.resume = "gone"
    stops = [*of(found(config, monkeypatch), "stops")]
    assert "gone/manifest.json" in stops[1][1]
    config.resume = "auto"
    stops = of(found(config, monkeypatch), "stops")
    assert [part for part, _ in stops] == ["data", "checkpoint", "checkpoint"]
    assert "written with train.seed=7, the config says 0" in stops[1][1]
    assert "category 1 was 'bee', and now it is 'ant'" in stops[2][1]
    assert sorted(path.name for path in config.run_dir.iterdir()) == ["checkpoints"]
