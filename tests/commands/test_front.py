"""`capslog front`: memory against time as table, picture and JSON; budgets are in `test_plan_stages`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.commands.test_questions import profile, run  # noqa: F401


def test_the_front_as_table_picture_and_json(
    profile: str,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    picture, file = tmp_path / "front.png", tmp_path / "front.json"
    wanted = ("front", "--profile", profile, "--devices", "2", "--minibatch", "8")
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
    assert printed["num_microbatches"] == 8
    assert run(*wanted, "--capacity", "21B") == 3
    assert "1 B too much" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (("--planner", "joint"), "planner joint makes several; choose another planner"),
        (("--planner", "graphpipe"), "planner graphpipe makes several; choose another planner"),
        (("--devices", "7"), "7 devices but only 6 layers; capslog plan --planner joint plans for more devices"),
        (("--capacity", "1GiB*3"), "pipeline.capacity lists 3 size(s) for pipeline.devices=2"),
        (("pipeline.bandwidth=fast",), "pipeline.bandwidth is 'fast'"),
        (("pipeline.bandwidth=1GB/s",), "no boundary_bytes"),
    ],
)
def test_mistakes_end_in_one_sentence(
    profile: str,  # noqa: F811
    more: tuple[str, ...],
    sentence: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run("front", "--profile", profile, "--devices", "2", *more) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert sentence in line
