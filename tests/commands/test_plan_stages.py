"""Memory in the output of `capslog plan`: tensors that each stage keeps, its picture, and the front of budgets."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest

from tests.commands.test_questions import run
from tests.planners.test_budget import timed
from varuna_capslog.plans.plan import read_plan
from varuna_capslog.profiles.record import write_profile

WANTED = ("--devices", "2", "--planner", "budget", "--minibatch", "4", "pipeline.host_bandwidth=10MB/s")


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("profile") / "profile.json"
    write_profile(path, timed(random.Random(7), 4))
    return str(path)


@pytest.fixture(scope="module")
def front(profile: str) -> list[dict[str, Any]]:
    """The printed front; its picture lies beside the profile."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        picture = str(Path(profile).with_name("front.png"))
        assert run("front", "--profile", profile, *WANTED, "--json", "-o", picture) == 0
    points: list[dict[str, Any]] = json.loads(printed.getvalue())["front"]
    return points


def test_a_front_is_printed_as_it_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profile, file = tmp_path / "profile.json", tmp_path / "front.json"
    write_profile(profile, timed(random.Random(7), 3))
    assert run("front", "--profile", str(profile), *WANTED, "--json", "-o", str(file)) == 0
    assert json.loads(capsys.readouterr().out)["front"] == json.loads(file.read_text())["front"]


def test_budgets_from_all_treated_to_all_kept(
    profile: str, front: list[dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each point's plan is the one that `plan` finds within its budget, and one byte less takes a longer step."""
    file = tmp_path / "plan.json"
    assert Path(profile).with_name("front.png").read_bytes().startswith(b"\x89PNG")
    assert len(front) >= 3
    for before, after in itertools.pairwise(front):
        assert before["budget_bytes"] < after["budget_bytes"]
        assert before["step_seconds"] > after["step_seconds"]
    assert any(front[0]["memory"])
    assert not any(front[-1]["memory"])
    point = front[1]
    arguments = ("plan", "--profile", profile, *WANTED, "--capacity", f"{point['budget_bytes']}B")
    assert run(*arguments, "-o", str(file)) == 0
    assert read_plan(file).step_seconds == pytest.approx(point["step_seconds"])
    assert run("front", "--profile", profile, *WANTED, "--capacity", f"{front[0]['budget_bytes'] - 1}B") == 3
    capsys.readouterr()
    assert run("front", "--profile", profile, *WANTED, "--capacity", "1GiB,2GiB") == 2
    assert "one budget for every device" in capsys.readouterr().err


def test_the_table_and_the_picture_of_a_plan(
    profile: str, front: list[dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture, least = tmp_path / "plan.png", front[0]
    arguments = ("plan", "--profile", profile, *WANTED, "--capacity", f"{least['budget_bytes']}B", "-o", str(picture))
    assert run(*arguments) == 0
    shown = capsys.readouterr().out
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert not picture.with_suffix(".svg").exists()
    for word in ("kept", "recomputed", "offloaded", "against keeping all", "peak", "margin", "step of 4 microbatches"):
        assert word in shown
    assert "against keeping everything" in shown
    offloads = any(part[2].endswith("offload") for stage in least["memory"] for part in stage)
    assert ("travel to the host tier in each step" in shown) == offloads
