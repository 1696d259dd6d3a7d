"""The help of all commands: options in panels, examples that can be typed, lines that fit a terminal of 80 columns."""

from __future__ import annotations

import shlex
import subprocess
import sys
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from varuna_capslog.cli import app
from varuna_capslog.commands.help import EXAMPLES, FIRST_STEPS, SUMMARIES

COMMANDS: dict[str, Any] = {
    name: command
    for name, command in typer.main.get_command(app).commands.items()  # type: ignore[attr-defined]
    if not command.hidden
}


def help_of(*words: str) -> str:
    answer = CliRunner().invoke(app, [*words, "--help"], terminal_width=80)
    assert answer.exit_code == 0
    return answer.output


def test_each_command_has_a_whole_line_in_the_list_and_the_first_steps_stand_below() -> None:
    """13 of 16 lines ended in dots, and nothing said what to type first."""
    text = help_of()
    assert set(SUMMARIES) == set(EXAMPLES) == set(COMMANDS)
    for name, summary in SUMMARIES.items():
        assert f"  {name:8}  {summary}\n" in text
    assert "..." not in text.replace("[ARGS]...", "")
    assert [line.strip() for line in FIRST_STEPS.splitlines()[1:]] == [line.strip() for line in text.splitlines()[-4:]]


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_help_fits_80_columns_and_its_examples_are_accepted(name: str) -> None:
    text = help_of(name)
    assert max(map(len, text.splitlines())) <= 80
    for example in EXAMPLES[name]:
        assert f"  {example}\n" in text
        program, command, *words = shlex.split(example)
        assert (program, command) == ("capslog", name)
        COMMANDS[name].make_context(name, words)  # raises for an unknown option, and for a missing argument


def test_the_first_steps_are_accepted() -> None:
    for line in FIRST_STEPS.splitlines()[2:]:
        _, name, *words = shlex.split(line.partition("   ")[0].strip() if "   " in line.strip() else line)
        COMMANDS[name].make_context(name, words)


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_no_option_is_described_by_a_fragment(name: str) -> None:
    """`--seed: Of level 2.` left out the noun."""
    for parameter in COMMANDS[name].params:
        text = getattr(parameter, "help", None)
        if not getattr(parameter, "hidden", False) and text:
            assert not text.startswith(("Of ", "At ", "For ", "Says ", "Only ", "--")), (parameter.name, text)


def test_options_of_plan_stand_in_panels() -> None:
    text = help_of("plan")
    heads = [line.rstrip(":") for line in text.splitlines() if line and not line.startswith((" ", "Usage"))]
    assert heads == [
        *("Arguments", "Model", "Devices", "Batch", "Search", "Inference, with --for inference", "Output", "Options"),
        "Examples",
    ]
    devices = text.partition("Devices:")[2].partition("Batch:")[0]
    assert "--capacity" in devices
    assert "--planner" not in devices


def test_the_command_alone_prints_its_help() -> None:
    """It printed the help in one line, as an error."""
    answers = [
        subprocess.run([sys.executable, "-m", "varuna_capslog", *words], capture_output=True, text=True, check=False)
        for words in ([], ["--help"])
    ]
    assert answers[0].stdout == answers[1].stdout
    assert answers[0].stdout.startswith("Usage: capslog [OPTIONS] COMMAND")
    assert [answer.returncode for answer in answers] == [0, 0]
