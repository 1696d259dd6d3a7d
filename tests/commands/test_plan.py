"""`capslog plan` by planner joint: pipelines of any length, for one profile or the best of several."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.commands.test_questions import profile, run, write  # noqa: F401
from varuna_capslog.plans.plan import read_plan


def test_a_joint_plan_is_written_in_full_form(
    profile: str,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "plan.json"
    wanted = ("plan", "--profile", profile, "--devices", "5", "--planner", "joint", "--minibatch", "12")
    wanted = (*wanted, "train.accumulation_blocks=12")
    assert run(*wanted, "--capacity", "25B*3,22B*2", "-o", str(file), "--json") == 0
    plan = read_plan(file)
    assert plan.to_json() == json.loads(capsys.readouterr().out)
    assert (plan.planner, plan.capacity_bytes) == ("joint", (25, 25, 25, 22, 22))
    assert len(plan.paths()) == 2
    assert plan.bound_seconds is not None
    assert plan.step_seconds is not None
    assert plan.bound_seconds <= plan.step_seconds
    assert run(*wanted) == 0
    assert "stage" in capsys.readouterr().out
    assert run(*wanted, "--capacity", "9B") == 3


def test_auto_is_no_slower_than_joint(profile: str, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    """Help and documentation name the planners joint and auto, but with a profile joint was "unknown planner"."""
    wanted = ("plan", "--profile", profile, "--devices", "5", "--minibatch", "12", "--json")
    answers = []
    for planner in ("joint", "auto"):
        assert run(*wanted, "--planner", planner) == 0
        answers.append(json.loads(capsys.readouterr().out))
    joint, auto = answers
    assert joint["search_space"].startswith("pipelines of at most")
    assert auto["step_seconds"] <= joint["step_seconds"]


def test_of_several_profiles_the_fastest_that_fits_is_planned(
    profile: str,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Twice the samples in a microbatch take 1.5 times the seconds, and more bytes."""
    larger = write(tmp_path / "larger.json", size=2, seconds=1.5, held=2)
    wanted = ("plan", "--devices", "2", "--planner", "joint", "--json")
    steps, both = {}, ("--profile", profile, "--profile", larger)
    for path in (profile, larger):
        assert run(*wanted, "--minibatch", "12", "--profile", path) == 0
        steps[path] = json.loads(capsys.readouterr().out)["step_seconds"]
    assert steps[larger] < steps[profile]
    assert run(*wanted, "--minibatch", "12", *both) == 0
    fastest = json.loads(capsys.readouterr().out)
    assert (fastest["units"]["samples"], fastest["step_seconds"]) == (2, steps[larger])
    assert run(*wanted, *both, "train.minibatch_size=12", "--capacity", "30B") == 0
    assert json.loads(capsys.readouterr().out)["units"]["samples"] == 1, "the larger one does not fit"
    assert run(*wanted, *both) == 2
    assert "for the same samples of a step: give --minibatch SIZE" in capsys.readouterr().err
    assert run("plan", "--devices", "2", "--planner", "exact", "--minibatch", "12", *both) == 2
    assert "which only planner joint makes; give one" in capsys.readouterr().err
