"""`capslog.train`: which config a file, a dict, a workload's name or function stand for; the workers are stand-ins."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest

import varuna_capslog as capslog
from varuna_capslog.base import supervisor

TOY = """
from torch import nn
from varuna_capslog import Chain, Layer, Workload

class Toy(Workload):
    name = "toy"
    def build_chain(self):
        return Chain([Layer(f"l{i}", nn.Linear(2, 2)) for i in range(4)], name="toy")
    def loss(self, outputs, targets, normalisers): ...
    def profile_inputs(self, microbatch_size): ...

def workload(config):
    return Toy()
"""
WORKER = """
import json, os, sys
if os.environ["RANK"] == "0":
    with open(sys.argv[1] + "/metrics.jsonl", "w") as file:
        for step in (1, 2):
            file.write(json.dumps({"step": step, "loss": 1 / step, "samples_per_second": 4.0}) + "\\n")
"""
CUTS = {"pipeline.devices": 2, "pipeline.cuts": [0, 2]}


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    (tmp_path / "toy_of_api.py").write_text(TOY)
    (tmp_path / "toy.yaml").write_text("workload: toy_of_api:workload\nrun_dir: here\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    plain = supervisor.Supervisor

    def started(run_dir, command, num_workers, **options):
        return plain(run_dir, [sys.executable, "-S", "-c", WORKER, *command[3:]], num_workers, **options)

    monkeypatch.setattr(supervisor, "Supervisor", started)
    import toy_of_api

    return toy_of_api


@pytest.mark.parametrize(
    ("run", "folder"),
    [
        ("toy.yaml", "here"),
        ({"workload": "toy_of_api:workload", "train": {"max_steps": 1}}, "runs/toy_of_api"),
        ("toy_of_api:workload", "runs/toy_of_api"),
        ("function", "runs/toy_of_api"),
        ("config", "here"),
    ],
    ids=["file", "dict", "name", "function", "config"],
)
def test_every_form_of_a_run_is_trained(toy, run, folder, capsys) -> None:
    forms = {"function": toy.workload, "config": capslog.load_config("toy.yaml")}
    given = forms.get(run, run) if isinstance(run, str) else run
    done = capslog.train(given, CUTS | {"train.max_steps": 2})
    assert done.run_dir == Path(folder)
    assert done.losses == [1.0, 0.5]
    assert done.plan is not None
    assert done.plan.cuts == (0, 2)
    assert done.record.config is not None
    assert done.record.config.train.max_steps == 2
    assert "last loss" in str(done)
    assert "0.5" in done._repr_html_()
    assert "2 stages of 4 layers" in capsys.readouterr().out


def test_nothing_is_printed_where_nothing_is_to_be_shown(toy, capsys) -> None:
    capslog.train(toy.workload, CUTS, show=False)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("run", "sentence"),
    [
        (3, "nothing to train in a int"),
        (lambda config: None, "cannot import '<lambda>'"),
        ("absent.yaml", "absent.yaml' cannot be read"),
        ({"train": {}}, "workload is missing"),
        ({"workload": "toy_of_api:workload", "trian": {}}, "did you mean train"),
    ],
)
def test_what_cannot_be_trained_is_refused_in_a_sentence(toy, run, sentence) -> None:
    with pytest.raises(capslog.CapslogError, match=sentence):
        capslog.train(run, CUTS)
