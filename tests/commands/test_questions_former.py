"""Options of earlier versions are refused with one sentence that names the replacement, and appear in no help."""

from __future__ import annotations

import re

import pytest

from varuna_capslog import cli

FORMER = {
    ("plan", "--pareto"): "--pareto is a command of its own: capslog front",
    ("plan", "--maximize", "microbatch"): "--maximize is a command of its own: capslog largest",
    ("plan", "--maximize=microbatch"): "--maximize is a command of its own: capslog largest",
    ("plan", "--joint"): "--joint is a planner: --planner joint",
    ("plan", "--speeds", "1*2"): "or by the key pipeline.speeds=[1,0.5]",
    ("plan", "--blocks", "4"): "--blocks is the key train.accumulation_blocks=4",
    ("plan", "--search-seconds", "3"): "--search-seconds is the key pipeline.search_seconds=60",
    ("plan", "--for", "inference", "--microbatch", "2"): "--microbatch is the key train.microbatch_size=4",
    **{
        (command, f"--{name}", "1"): f"--{name} is the key pipeline.{name.replace('-', '_')}="
        for command in ("plan", "compare", "simulate", "front", "largest")
        for name in ("bandwidth", "latency", "host-bandwidth", "node-devices")
    },
    ("compare", "--schedule", "1f1b"): "--schedule is the key pipeline.schedule=1f1b",
    ("compare", "--microbatches", "4"): "--microbatches is the key train.minibatch_size",
    ("simulate", "--schedule", "1f1b"): "--schedule is the key pipeline.schedule=1f1b",
    ("simulate", "--microbatches", "4"): "--microbatches is the key train.minibatch_size",
    ("simulate", "--recompute"): "--recompute is the key pipeline.recompute=true",
    ("simulate", "--no-recompute"): "--no-recompute is the key pipeline.recompute=false",
    ("simulate", "--stage-inputs", "host"): "--stage-inputs is the key pipeline.stage_inputs=device",
}


@pytest.mark.parametrize("words", list(FORMER), ids=" ".join)
def test_a_former_option_names_its_new_form(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli._run([*words, "--profile", "nowhere.json"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert FORMER[words] in line
    assert line.endswith("it is no option any more")


@pytest.mark.parametrize("command", ["plan", "front", "largest", "compare", "simulate"])
def test_no_help_shows_one_and_options_are_few(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """`plan` had 33 options in six modes."""
    assert cli._run([command, "--help"]) == 0
    options = set(re.findall(r"^  (?:-\w, )?(--[\w-]+)", capsys.readouterr().out, re.MULTILINE))
    former = {word.partition("=")[0] for words in FORMER for word in words if word.startswith("--") and word != "--for"}
    assert not options & former
    model = {"--model", "--hf", "--model-arg", "--input", "--cut-points", "--sequence", "--device", "--estimate"}
    if command != "simulate":
        assert model <= options
        assert len(options - model - {"--help"}) <= 15


def test_an_option_that_never_was_is_an_ordinary_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli._run(["plan", "--paretto"]) == 2
    assert "see capslog plan --help" in capsys.readouterr().err
