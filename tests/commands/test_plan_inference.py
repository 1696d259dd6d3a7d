"""`capslog plan --for inference`, from a Hugging Face folder to the serving systems, and refused arguments."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.commands.folders import LLAMA
from varuna_capslog import cli
from varuna_capslog.profiling import inference

NETS = """
from torch import nn

def plain():
    return nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 8), nn.Linear(8, 8))
"""
PLAIN = ("--model", "nets_of_inference:plain", "--input", "x=float32[1,8]")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama" / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "nets_of_inference.py").write_text(NETS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))


def plan(*arguments: str) -> int:
    return cli._run(["plan", *arguments])


def test_from_a_folder_to_the_systems_that_serve(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    flags = (
        "--sequence",
        "32",
        "--batch",
        "6",
        "train.microbatch_size=2",
        "--dtype",
        "bfloat16",
        "--device",
        "cuda:t4",
    )
    assert plan("--for", "inference", "--hf", "llama", "--devices", "2", *flags, "-o", "plan.json", "--json") == 0
    told = capsys.readouterr()
    value = json.loads(told.out)
    assert value == json.loads(Path("plan.json").read_text())
    assert (value["purpose"], value["model"], value["schedule"]) == ("inference", "llama", None)
    assert (value["num_microbatches"], value["microbatch_size"], value["memory_model"]) == (3, 2, "inference")
    # one key-value head of 8 numbers in 3 layers, keys and values, 2 bytes, 32 tokens
    assert told.err == (
        "capslog: inference estimated for cuda:t4, within its capacity: bfloat16, 6 sequence(s) of 32 tokens together, "
        "2 in a forward, 3 KiB of caches for each, in 3 layers\n"
    )
    names = ("--hf", "llama")
    assert cli._run(["export", "plan.json", "--to", "vllm", *names]) == 0
    counts = capsys.readouterr()
    assert sum(map(int, counts.out.partition("=")[2].split(","))) == 3
    assert counts.err == "note: vLLM also needs --pipeline-parallel-size 2\n"


def test_the_slowest_stage_is_made_as_quick_as_possible(capsys: pytest.CaptureFixture[str]) -> None:
    """By the seconds of the prompt or of the next token, which the table tells, too."""
    pytest.importorskip("transformers")
    slowest = {}
    for purpose in ("inference", "prefill", "decode"):
        words = ("--hf", "llama", "--devices", "2", "--sequence", "64", "--device", "cuda:t4")
        assert plan("--for", purpose, *words, "-o", "plan.json") == 0
        shown = " ".join(capsys.readouterr().out.split())
        assert "prefill of 1 x 64 tokens: " in shown
        assert "next token of 1 sequence: " in shown
        value = json.loads(Path("plan.json").read_text())
        assert (value["planner"], value["purpose"]) == (
            "exact" if purpose == "inference" else "throughput",
            "inference",
        )
        slowest[purpose] = max(value["stage_seconds"])
    assert slowest["prefill"] <= min(slowest.values())


def test_a_plan_for_decode_balances_the_seconds_of_the_next_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its stages tell those of the prompt, as others do."""
    pytest.importorskip("transformers")
    words = ("--hf", "llama", "--devices", "2", "--sequence", "8", "--device", "cuda:t4", "-o", "plan.json")
    monkeypatch.setattr(inference, "_decode_seconds", lambda model, caches, *others: [9.0] + [1.0] * (len(caches) - 1))
    stages = {}
    for purpose in ("prefill", "decode"):
        assert plan("--for", purpose, *words) == 0
        value = json.loads(Path("plan.json").read_text())
        stages[purpose] = value["cuts"]
    assert stages["decode"] == [0, 1]
    assert stages["prefill"] != [0, 1]
    assert max(value["stage_seconds"]) < 1.0


def test_nothing_else_takes_a_plan_for_inference(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert plan("--for", "inference", *PLAIN, "--devices", "2", "-o", "plan.json") == 0
    assert "1 sequence(s) together, 1 in a forward, no caches" in capsys.readouterr().err
    config = tmp_path / "run.yaml"
    config.write_text(
        "workload: varuna_capslog.model.model_workload:workload\nmodel: {factory: nets_of_inference:plain}\n"
    )
    assert cli._run(["train", str(config), "pipeline.plan=plan.json"]) == 2
    assert capsys.readouterr().err == (
        "capslog: plan.json is a plan for inference, with which nothing can be trained; make one with `capslog plan` "
        "without --for\n"
    )


def test_a_plan_that_does_not_fit_says_what_would_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("--for", "inference", *PLAIN, "--devices", "1", "--capacity", "4KiB") == 3
    assert "does not fit: stage 0 needs" in capsys.readouterr().err


REFUSED = {
    "another purpose": (("--for", "serving", *PLAIN, "--devices", "2"), "unknown purpose of --for 'serving'"),
    "a batch to train": ((*PLAIN, "--devices", "2", "--batch", "2"), "--batch goes with --for inference"),
    "no model": (("--for", "inference", "--devices", "2"), "but no model is given"),
    "a config": (("some.yaml", "--for", "inference", "--devices", "2"), "but a CONFIG describes a training"),
    "no devices": (("--for", "inference", *PLAIN), "--model needs --devices N"),
    "too many devices": (("--for", "inference", *PLAIN, "--devices", "4"), "4 devices but only 3 layers"),
    "samples of a step": (
        ("--for", "inference", *PLAIN, "--devices", "2", "--minibatch", "4"),
        "--minibatch belongs to plans of training",
    ),
    "a key of training": (
        ("--for", "inference", *PLAIN, "--devices", "2", "pipeline.schedule=1f1b"),
        "pipeline.schedule belongs to plans of training",
    ),
    "another planner": (
        ("--for", "inference", *PLAIN, "--devices", "2", "--planner", "varuna"),
        "--planner varuna does not go with --for inference, which is planned by exact; leave it out",
    ),
    "seconds of a token that is not there": (
        ("--for", "decode", *PLAIN, "--devices", "2"),
        "its layers cache nothing that is known, so that there is no next token; choose --for inference or prefill",
    ),
    "the planner of another purpose": (
        ("--for", "prefill", *PLAIN, "--devices", "2", "--planner", "exact"),
        "--planner exact does not go with --for prefill, which is planned by throughput; leave it out",
    ),
    "real runs": (("--for", "inference", *PLAIN, "--devices", "2", "--measure"), "estimates, and never measures"),
    "half a batch": (
        ("--for", "inference", *PLAIN, "--devices", "2", "--batch", "3", "train.microbatch_size=2"),
        "train.microbatch_size=2 does not divide --batch 3",
    ),
    "an unknown type": (
        ("--for", "inference", *PLAIN, "--devices", "2", "--dtype", "int8"),
        "--dtype is 'int8'; it must be one of",
    ),
    "no size of a cache": (
        ("--for", "inference", *PLAIN, "--devices", "2", "--cache", "much"),
        "--cache",
    ),
    "a cache without attention": (
        ("--for", "inference", *PLAIN, "--devices", "2", "--cache", "4KiB"),
        "--cache counts tokens, but the model's inputs have none",
    ),
    "two models": (("--hf", "llama", *PLAIN, "--devices", "2"), "both --model and --hf are given"),
    "a folder and a config": (("some.yaml", "--hf", "llama"), "both a CONFIG and --hf are given"),
    "no folder": (("--hf", "nowhere", "--devices", "2"), "--hf nowhere is no folder"),
    "tokens of another model": (
        (*PLAIN, "--devices", "2", "--sequence", "9"),
        "--sequence is for the inputs that --hf",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_go_together_is_one_sentence(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, sentence = REFUSED[name]
    assert plan(*arguments) == 2
    message = capsys.readouterr().err
    assert sentence in message
    assert message.startswith("capslog: ")
    assert message.count("\n") == 1
