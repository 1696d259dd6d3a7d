"""The same arguments for `plan`, `front`, `largest` and `compare`: devices, and keys beside every source of costs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.commands.folders import LLAMA
from varuna_capslog.base.gpus import GPUS
from varuna_capslog.cli import main
from varuna_capslog.commands.questions import QuestionFlags, question_of
from varuna_capslog.profiles.record import LayerProfile, Profile, read_profile, write_profile


def write(path: Path, size: int = 1, seconds: float = 1.0, held: int = 1, **conditions: Any) -> str:
    """Write a profile of six layers, with bytes and seconds multiplied, and return its path."""
    rows = [(4.0, 1), (4.0, 1), (1.0, 10), (1.0, 10), (1.0, 10), (1.0, 10)]
    layers = [
        LayerProfile(
            f"l{i}",
            held * many,
            held * many if i else None,
            forward_seconds=seconds * time,
            backward_seconds=2 * seconds * time,
        )
        for i, (time, many) in enumerate(rows)
    ]
    write_profile(path, Profile(tuple(layers), model="toy", conditions={"microbatch_size": size, **conditions}))
    return str(path)


@pytest.fixture
def profile(tmp_path: Path) -> str:
    return write(tmp_path / "profile.json")


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    return int(end.value.code or 0)


NETS = """
from torch import nn

def stack():
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
"""
CONFIG = """
workload: varuna_capslog.model.model_workload:workload
model: {factory: nets_of_questions:stack, inputs: ["x=float32[2,8]"]}
train: {minibatch_size: 16, microbatch_size: 2}
profile: {source: estimated, device: cpu}
"""
DOORS = {
    "a CONFIG": ("run.yaml",),
    "a model": ("--model", "nets_of_questions:stack", "--input", "x=float32[2,8]", "--device", "cpu"),
    "a folder": ("--hf", "llama", "--sequence", "8", "--device", "cpu"),
    "a profile": ("--profile", "profile.json"),
}


@pytest.fixture
def doors(tmp_path: Path, profile: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nets_of_questions.py").write_text(NETS)
    (tmp_path / "run.yaml").write_text(CONFIG)
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama" / "config.json").write_text(json.dumps(LLAMA))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize("name", DOORS)
@pytest.mark.usefixtures("doors")
def test_keys_are_taken_beside_every_source(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Beside --model, --hf and --profile the first KEY=VALUE was taken for a CONFIG that does not exist."""
    if name == "a folder":
        pytest.importorskip("transformers")
    wanted = (*DOORS[name], "--planner", "exact", "--json")
    assert run("plan", *wanted, "pipeline.devices=3", "pipeline.schedule=gpipe", "train.minibatch_size=12") == 0
    plan = json.loads(capsys.readouterr().out)
    assert (len(plan["cuts"]), plan["schedule"]) == (3, "gpipe")
    assert plan["num_microbatches"] * plan["microbatch_size"] == 12
    assert run("plan", *wanted, "--devices", "2", "pipeline.devices=3", "pipeline.schedule=1f2b") == 2
    assert "pipeline.schedule" in capsys.readouterr().err.splitlines()[-1]
    assert run("plan", *wanted, "--devices", "2", "pipeline.devices=3") == 0, "an option comes before a key"
    assert len(json.loads(capsys.readouterr().out)["cuts"]) == 2


@pytest.mark.usefixtures("doors")
def test_a_key_of_the_link_counts_in_the_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wanted = ("plan", *DOORS["a model"], "--devices", "2", "--planner", "throughput", "--json")
    steps = []
    for keys in ((), ("pipeline.latency=1s",)):
        assert run(*wanted, *keys) == 0
        steps.append(json.loads(capsys.readouterr().out)["step_seconds"])
    assert steps[1] > steps[0] + 1


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--devices", "2", "profile.device=cpu"), "profile.device is of a model and its costs, which --profile has"),
        (("--devices", "2", "model.name=x"), "model.name is of a model and its costs, which --profile has already"),
        (("--devices", "2", "pipeline.shedule=1f1b"), "did you mean pipeline.schedule?"),
        (("--devices", "2", "--minibatch", "3"), "a minibatch of 3 samples is not a multiple"),
        (("pipeline.devices=two",), "pipeline.devices is 'two'; it must be a whole number"),
        (("--devices", "2", "--device", "cpu"), "a profile is of one device"),
        (("--devices", "2x t4", "--capacity", "1GiB"), "but --capacity is given too; leave --capacity out, or give"),
        (
            ("--devices", "2x t4", "--device", "cuda:t4"),
            "but --device is given too; leave --device out, or give the nu",
        ),
        (("--devices", "2x t4", "pipeline.capacity=1GiB"), "but pipeline.capacity is given too"),
        (("--devices", "2x t4", "profile.device=cuda:t4"), "but profile.device is given too"),
        (("--devices", "2x t44"), "--devices: the kind of GPU 't44' is not in the table; the nearest are t4"),
        (("--devices", "0"), "--devices is '0'; write a number from 1 to 100000, or kinds such as 2x a100-80gb"),
        (("--devices", "2", "pipeline.speeds=[1]"), "pipeline.speeds lists 1 number(s) for pipeline.devices=2"),
    ],
)
@pytest.mark.parametrize("command", ["plan", "front", "compare"])
def test_mistakes_end_in_one_sentence(
    command: str, words: tuple[str, ...], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "pairs.json", size=2)
    assert run(command, "--profile", path, *words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert sentence in line


@pytest.mark.usefixtures("doors")
def test_kinds_say_device_memory_and_speed() -> None:
    flags = QuestionFlags(model="nets_of_questions:stack", inputs=["x=float32[2,8]"], devices="2x rtx4090, rtx3090")
    config = question_of(flags, None)
    assert (config.profile.device, config.pipeline.devices) == ("cuda:rtx4090", 3)
    assert config.pipeline.capacity == GPUS["rtx4090"].memory_bytes
    assert config.pipeline.speeds is not None
    assert config.pipeline.speeds[:2] == [1, 1]
    assert 0.5 < config.pipeline.speeds[2] < 0.8
    measured = QuestionFlags(**vars(flags) | {"overrides": ["pipeline.speeds=[1, 1, 0.9]"]})
    assert question_of(measured, None).pipeline.speeds == [1, 1, 0.9], "who has measured them knows better"
    from_file = QuestionFlags(config=Path("run.yaml"), devices="t4, v100-16gb")
    config = question_of(from_file, None)
    assert (config.profile.device, config.pipeline.devices) == ("cuda:v100-16gb", 2)
    assert config.pipeline.capacity == [GPUS["t4"].memory_bytes, GPUS["v100-16gb"].memory_bytes]


def test_a_profile_is_that_of_the_fastest_kind(tmp_path: Path) -> None:
    path = tmp_path / "t4.json"
    write(path, device="cuda", gpu="t4")
    profile = read_profile(path)
    config = question_of(QuestionFlags(devices="2x t4"), None, profile)
    assert config.pipeline.capacity == GPUS["t4"].memory_bytes
    with pytest.raises(ValueError, match="the profile is of cuda:t4, but the fastest of the devices is rtx4090; prof"):
        question_of(QuestionFlags(devices="t4, rtx4090"), None, profile)
    write(path, device="cpu")
    with pytest.raises(ValueError, match="the profile is of cpu, but the fastest of the devices is t4"):
        question_of(QuestionFlags(devices="2x t4"), None, read_profile(path))


@pytest.mark.usefixtures("doors")
def test_compare_takes_a_model_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("compare", *DOORS["a model"], "--devices", "2", "--planners", "varuna,exact", "--json") == 0
    assert [row["cuts"] for row in json.loads(capsys.readouterr().out)] == [[0, 2], [0, 2]]
