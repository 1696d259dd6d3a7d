"""`capslog plan` and `capslog profile` for an ordinary module: assumptions and refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.accelerators import torch_has
from varuna_capslog import cli
from varuna_capslog.base.gpus import GPUS
from varuna_capslog.commands.questions import announced
from varuna_capslog.config.reading import Config, section
from varuna_capslog.profiles.record import read_profile

NETS = """
import torch
from torch import nn

class Stack(nn.Module):
    def __init__(self, depth, branches=False):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(depth))
        self.branches = branches

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
            if self.branches and x.sum() > 0:
                x = x * 2
        return x

class Masked(Stack):
    def forward(self, x):
        x = super().forward(x)
        return x[x > 0]

def stack(depth=4, branches=False):
    return Stack(depth, branches)

def masked():
    return Masked(2)

def wide():
    return nn.Sequential(*[nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)) for _ in range(2)])

def plain():
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))

def broken():
    raise KeyError("nothing")
"""
X = ("--input", "x=float32[2,8]")


@pytest.fixture(autouse=True)
def nets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nets_of_ordinary_model.py").write_text(NETS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def run(command: str, function: str, *arguments: str) -> int:
    return cli._run([command, "--model", f"nets_of_ordinary_model:{function}", *arguments])


def test_a_plan_is_estimated_for_a_kind_of_gpu_within_its_memory(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--devices", "2", "--device", "cuda:t4", "--model-arg", "depth=6", "--json")
    assert run("plan", "stack", *X, *arguments) == 0
    captured = capsys.readouterr()
    plan = json.loads(captured.out)
    assert (plan["num_layers"], plan["fits"], plan["planner"]) == (6, True, "budget")
    assert {rank["capacity_bytes"] for rank in plan["ranks"]} == {GPUS["t4"].memory_bytes}
    line, note = captured.err.splitlines()
    assert note == "note: a run of this plan needs train.accumulation_blocks=2, a constant of the run"
    assert line.startswith("capslog: estimated for cuda:t4 with 14.5 GiB, within its capacity: float32, AdamW,")
    assert run("plan", "stack", *X, *arguments, "--capacity", "1MiB") == 3  # a given capacity takes precedence


def test_a_profile_is_written_where_asked_and_tells_the_kind(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("profile", "stack", *X, "--device", "cuda:h200", "-o", "profile.json") == 0
    assert "written to profile.json" in capsys.readouterr().out
    profile = read_profile("profile.json")
    assert (profile.source, profile.conditions["device"], profile.conditions["gpu"]) == ("estimated", "cuda", "h200")
    assert profile.conditions["seconds"] == "classes(h200), data sheet"
    assert len(profile.layers) == 4
    assert run("profile", "stack", *X, "--device", "cuda:h200") == 0
    assert "not written; -o FILE keeps it" in capsys.readouterr().out
    assert sorted(path.name for path in Path().iterdir() if path.is_file()) == (
        ["nets_of_ordinary_model.py", "profile.json"]
    )


def test_stages_on_several_devices_join_a_profile(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--device", "cuda:h200", "-o", "profile.json", "--degrees")
    assert run("profile", "wide", "--input", "x=float32[8,8]", *arguments, "1,2,4") == 0
    table = capsys.readouterr().out.partition("one stage of all layers on several devices")[2]
    assert "tensor" in table
    assert table.count("(fit)") == 4  # degrees 8 and 16
    rows = read_profile("profile.json").by_degree
    sizes = {(*row.parallel.values(), row.microbatch_size) for row in rows if row.layers == (0, 1)}
    ways = [("data", 1), ("data", 2), ("data", 4), ("tensor", 2), ("tensor", 4)]
    assert sizes == {(*way, samples) for way in ways for samples in (4, 8)}
    assert run("profile", "wide", "--input", "x=float32[8,8]", *arguments, "1;2") == 2
    assert "write numbers of devices with commas, such as 1,2,4" in capsys.readouterr().err
    assert run("profile", "wide", "--input", "x=float32[8,8]", *arguments, "1", "--json") == 0
    assert len(json.loads(capsys.readouterr().out)["by_degree"]) == 2 * 3


@pytest.mark.parametrize(
    ("function", "arguments", "reason"),
    [
        ("broken", X, "failed with KeyError: 'nothing'; name another function, or mend this one"),
        ("stack", (*X, "--model-arg", "deep=3"), "unexpected keyword argument 'deep'"),
        ("stack", (*X, "--model-arg", "depth"), "--model-arg 'depth': write name=value"),
        ("stack", (*X, "--model-arg", "name=a", "--model-arg", "what=b"), "unexpected keyword argument 'name'"),
        ("masked", X, "layer 'model' cannot run on tensors without values (aten.nonzero.default), which plans and"),
        ("stack", ("--input", "image=float32[2,8]"), "the model has no input 'image'; its forward takes x"),
        ("stack", (), "gave no example inputs, so say their shapes with --input"),
        ("stack", ("--input", "x=float32[2,9]"), "module 'blocks.0' (Linear) cannot be captured"),
        ("plain", ("--input", "x=float32[2,9]"), "layer '0' cannot run on x[2, 9]"),
        ("plain", ("--input", "x=int64[2,8]"), "layer '0' cannot run on x[2, 8]: matrices of int64 and float32"),
        ("plain", (*X, "--device", "cuda:a100"), "sold with several memories; choose a100-40gb or a100-80gb"),
        ("plain", (*X, "--device", "cuda:t4", "--measure"), "--device cuda:t4 goes with --estimate"),
    ],
)
def test_mistakes_are_one_sentence_and_status_2(
    function: str, arguments: tuple[str, ...], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("plan", function, "--devices", "2", "--json", *arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert reason in line


def test_a_model_that_branches_on_values_is_one_layer(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("plan", "stack", *X, "--model-arg", "branches=true", "--devices", "2", "--json") == 0
    refusal = capsys.readouterr().err
    assert "2 devices but only 1 layers" in refusal, "of planner budget alone; others give the layer replicas"
    assert "its Python code branches on, or sizes something by, the values of a tensor (nets_of_ordinary" in refusal


def test_an_accelerator_that_estimates_do_not_know(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The device is measured; no estimate is announced, since only an estimate says how long measuring takes."""
    assert run("plan", "plain", *X, "--devices", "2", "--device", "xpu") == 2
    refusal = capsys.readouterr().err
    assert "estimates know cpu, cuda and cuda:KIND, but the device is xpu; measure there instead" in refusal
    assert run("plan", "plain", *X, "--devices", "2", "--device", "xpu", "--measure") == 2
    assert "the profile is for device xpu, but torch can use no such device here" in capsys.readouterr().err
    torch_has(monkeypatch, "xpu", 1)
    profile = {"device": "xpu", "source": "measured"}
    with announced(section(Config, {"workload": "no:such", "profile": profile}, "")):
        assert capsys.readouterr().err == ""


def test_a_plan_for_this_processor_is_within_its_memory(capsys: pytest.CaptureFixture[str]) -> None:
    """The line said "without a limit of memory" above a table whose margins are of this machine's memory."""
    assert run("plan", "stack", *X, "--devices", "2", "--device", "cpu") == 0
    captured = capsys.readouterr()
    assert "the capacity of each device" in captured.out
    assert "within its memory: float32" in captured.err
