"""`capslog plan` where time counts: the front, joint plans, and what it says of mistakes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from varuna_capslog.cli import main
from varuna_capslog.plans.plan import read_plan
from varuna_capslog.profiles.record import LayerProfile, Profile, write_profile


@pytest.fixture
def profile(tmp_path: Path) -> str:
    layers = [
        LayerProfile(f"l{i}", size, size if i else None, forward_seconds=time, backward_seconds=2 * time)
        for i, (time, size) in enumerate([(4.0, 1), (4.0, 1), (1.0, 10), (1.0, 10), (1.0, 10), (1.0, 10)])
    ]
    path = tmp_path / "profile.json"
    write_profile(path, Profile(tuple(layers), model="toy", conditions={"microbatch_size": 1}))
    return str(path)


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    return int(end.value.code or 0)


def test_the_front_as_table_picture_and_json(profile: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture, file = tmp_path / "front.png", tmp_path / "front.json"
    wanted = ("plan", "--profile", profile, "--devices", "2", "--pareto", "--minibatch", "8")
    assert run(*wanted, "-o", str(picture)) == 0
    assert "proven" in capsys.readouterr().out
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert run(*wanted, "-o", str(file), "--json") == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads(file.read_text())
    assert [(point["peak_bytes"], point["cuts"]) for point in printed["front"]] == [
        (22, [0, 4]),
        (30, [0, 3]),
        (40, [0, 2]),
        (41, [0, 1]),
    ]
    assert run(*wanted, "--capacity", "21B") == 3
    assert "1 B too much" in capsys.readouterr().err


def test_a_joint_plan_is_written_in_full_form(profile: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.json"
    wanted = ("plan", "--profile", profile, "--devices", "5", "--joint", "--minibatch", "12")
    assert run(*wanted, "--capacity", "25B*3,22B*2", "--speeds", "1*3,0.5*2", "-o", str(file), "--json") == 0
    printed = json.loads(capsys.readouterr().out)
    plan = read_plan(file)
    assert plan.to_json() == printed["plan"]
    assert plan.capacity_bytes == (25, 25, 25, 22, 22)
    assert len(plan.paths()) == 2
    assert plan.step_seconds == printed["step_seconds"]
    assert printed["idle_devices"] == []
    assert printed["bound_seconds"] <= printed["step_seconds"]
    assert run(*wanted) == 0
    shown = capsys.readouterr()
    assert "5 pipelines" in shown.out
    assert "train.accumulation_blocks=12" in shown.err
    assert run(*wanted, "--capacity", "9B") == 3


def test_planner_joint_of_a_profile_is_joint(profile: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Help and pages name the planners joint and auto; for a profile joint was "unknown planner"."""
    wanted = ("plan", "--profile", profile, "--devices", "5", "--minibatch", "12", "--json")
    answers = []
    for more in (("--joint",), ("--planner", "joint"), ("--planner", "auto")):
        assert run(*wanted, *more) == 0
        answers.append(json.loads(capsys.readouterr().out))
    joint, named, auto = answers
    told = joint["plan"] | {"search_seconds": None}
    assert named | {"search_seconds": None} == told
    assert told["search_space"] == f"pipelines of at most {joint['max_stages']} stages on 5 devices"
    assert auto["step_seconds"] <= named["step_seconds"]
    assert run(*wanted, "--planner", "joint", "--capacity", "9B") == 3


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (("--pareto", "--joint"), "ask for one of them"),
        (("--speeds", "1*2"), "belong to --joint"),
        (("--joint",), "give --minibatch"),
        (("--joint", "--minibatch", "8", "--speeds", "1*3"), "--speeds lists 3 for 2 devices"),
        (("--joint", "--minibatch", "8", "--capacity", "1GiB*x"), "behind * must stand how many"),
        (("--pareto", "--capacity", "1GiB*3"), "3 capacities for 2 devices"),
        (("--pareto", "--bandwidth", "fast"), "--bandwidth is 'fast'"),
        (("--planner", "throughput", "--bandwidth", "1GB/s"), "no boundary_bytes"),
    ],
)
def test_mistakes_end_in_one_sentence(
    profile: str, more: tuple[str, ...], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("plan", "--profile", profile, "--devices", "2", *more) not in (0, 3)
    assert sentence in capsys.readouterr().err
