"""Records of a run hold the values of its files, and None for an invalid value."""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.reports.runs import write_run
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.reports.changes import changes_in_short
from varuna_capslog.reports.page import write_report
from varuna_capslog.reports.run import Evaluation, Event, StepLine, read_run, shapes_of


def write_lines(path: Path, *lines: dict[str, Any]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_invalid_values_of_a_step_are_none_and_a_line_without_step_is_left_out(tmp_path: Path) -> None:
    odd = {"loss": "a", "lr": True, "grad_norm": [1], "generation": 1.5, "peak_bytes": [1, None], "peak_source": 3}
    parts = {"a": 1, "b": None, "c": False, "d": "2"}
    write_lines(
        tmp_path / "metrics.jsonl",
        {"step": 1.0, "loss": 2, "generation": 3, "peak_bytes": [5, 6.0], "peak_source": "s", "peak_input": {"x": [2]}},
        {"step": 2, "parts": parts, "peak_input": {"x": [1.5]}, "unknown": 1, **odd},
        *({"step": step} for step in (True, 2.5, "3", None, 10**30)),
    )
    run = read_run(tmp_path)
    first = StepLine(1, 2.0, generation=3, peak_bytes=(5, 6), peak_source="s", peak_input={"x": (2,)})
    assert run.steps == (first, StepLine(2, parts={"a": 1.0}))
    assert run.problems["metrics.jsonl"] == "metrics.jsonl: 5 lines without step or kind left out"


def test_numbers_that_no_picture_can_show_are_none(tmp_path: Path) -> None:
    """Losses of 1e308 and -1e308 ended the report: the axis between them is longer than a float can represent."""
    lines = (
        '{"step": 1, "loss": 1e308, "busy_seconds": [1e308]}\n{"step": 2, "loss": -1e308}\n{"step": 3, "loss": 1e99}\n'
    )
    (tmp_path / "metrics.jsonl").write_text(lines)
    read = read_run(tmp_path).steps
    assert [line.loss for line in read] == [None, None, 1e99]
    assert read[0].busy_seconds is None


def test_scores_and_events_hold_what_is_valid(tmp_path: Path) -> None:
    scores = {"AP": 0.5, "note": "x", "per_class": {"a": 0.25, "b": None, "c": "?"}}
    write_lines(tmp_path / "evaluations.jsonl", {"step": 1, "scores": 5}, {"step": 2, "scores": scores}, {"scores": {}})
    write_lines(tmp_path / "events.jsonl", {"kind": "stop", "time": "x", "step": 4, "why": ["w"]}, {"kind": 3})
    run = read_run(tmp_path)
    assert run.evaluations == (
        Evaluation(1, {}, {}),
        Evaluation(2, {"AP": 0.5}, {"a": 0.25, "b": None, "c": None}),
    )
    assert run.events == (Event("stop", None, 4, None, {"why": ["w"]}),)


def damaged(dice: random.Random, data: bytes) -> bytes:
    """Return the lines with some cut, duplicated, or changed to other bytes or other kinds of values."""
    odd = [
        None,
        "",
        "x",
        [],
        {},
        [[]],
        True,
        -1,
        0.5,
        1e308,
        10**30,
        "\ud800",
        ["b lost", 3],
        {"a": None},
        -253402300800,
    ]
    lines = data.splitlines()
    for _ in range(dice.randint(1, 5)):
        at = dice.randrange(len(lines))
        if dice.random() < 0.6 and lines[at].endswith(b"}") and isinstance(value := json.loads(lines[at]), dict):
            value[dice.choice([*value, "why"])] = dice.choice(odd)
            lines[at] = json.dumps(value).encode()
        elif dice.random() < 0.3:
            lines[at] = json.dumps(dice.choice(odd)).encode()
        elif dice.random() < 0.5:
            lines[at] = lines[at][: dice.randrange(len(lines[at]) + 1)]
        else:
            lines.insert(at, dice.randbytes(40).replace(b"\n", b""))
    return b"\n".join(lines) + dice.choice((b"", b"\n"))


@pytest.mark.parametrize("seed", range(2))
def test_damaged_lines_end_no_report(tmp_path: Path, seed: int) -> None:
    """Values of other kinds, a year outside the calendar, and text that cannot be encoded ended `capslog report` in a
    traceback. Readable values are shown, and a sentence tells which were left out.
    """
    dice = random.Random(seed)
    write_run(tmp_path / "run", num_layers=6, stages=2, steps=12, evaluations=2)
    events = [
        {"kind": "start", "time": 1.7e9, "generation": 0, "members": ["a", "b"], "why": ["2 begin"], "cuts": [0, 3]},
        {"kind": "notice", "time": 1.7e9, "generation": 0, "member": "b", "source": "person", "deadline": 20.0},
        {"kind": "morph", "time": 1.7e9, "generation": 1, "members": ["a"], "why": ["b left"], "step": 6, "cuts": [0],
         "ways": [[0], [0, 3]], "pause_seconds": 0.2, "search_seconds": 0.1, "moved_bytes": 50},
        {"kind": "waiting", "time": 1.7e9, "generation": 1, "why": "too few"},
    ]  # fmt: skip
    write_lines(tmp_path / "run" / "events.jsonl", *events)
    undamaged = read_run(tmp_path / "run")
    for _ in range(12):
        for name in ("metrics", "events", "evaluations"):
            path = tmp_path / "run" / f"{name}.jsonl"
            if not (kept := path.with_suffix(".kept")).exists():
                shutil.copy(path, kept)
            path.write_bytes(damaged(dice, kept.read_bytes()))
        run = read_run(tmp_path / "run")
        assert all("\n" not in problem for problem in run.problems.values())
        assert len(run.steps) >= len(undamaged.steps) - 5 or "not a JSON object" in run.problems["metrics.jsonl"]
        changes_in_short(run)
    write_report(tmp_path / "run")


@pytest.mark.parametrize(
    "value", [None, {}, [1], {"x": 3}, {"x": ["a"]}, {"x": [1.5]}, {"x": [True]}], ids=["none", *"abcdef"]
)
def test_what_is_no_shape_is_not_taken_for_one(value: Any) -> None:
    assert shapes_of(value) is None


@pytest.mark.parametrize(
    ("line", "parsed"),
    [('{"a": ' * 700 + "1" + "}" * 700, False), ("17", False), ("null", False), ("[]", False), ('{"step": NaN}', False),
     ('{"step": 1e999, "kind": "x"}', False), ('{"step": ' + "9" * 4000 + "}", False), ('{"loss": 3}', True),
     ('{"step": "x", "scores": 3}', True), ('{"kind": ["x"], "step": {}}', True)],
)  # fmt: skip
def test_an_odd_line_is_counted_and_left_out(tmp_path: Path, line: str, parsed: bool) -> None:
    """An event nested 700 deep lost the whole report, and one line `17` all events, although lines torn by a crash
    were skipped.
    """
    write_lines(tmp_path / "metrics.jsonl", {"step": 1, "loss": 2.0})
    write_lines(tmp_path / "events.jsonl", {"kind": "stop"})
    write_lines(tmp_path / "evaluations.jsonl", {"step": 1, "scores": {"AP": 0.5}})
    for path in tmp_path.iterdir():
        path.write_text(f"{line}\n{path.read_text()}{line}\n")
    run = read_run(tmp_path)
    assert (len(run.steps), len(run.events), len(run.evaluations)) == (1, 1, 1)
    why = (
        "lines without step or kind left out" if parsed else "lines left out that a crash tore, or that are no objects"
    )
    for name in ("metrics.jsonl", "events.jsonl", "evaluations.jsonl"):
        assert run.problems[name] == f"{name}: 2 {why}"


def test_a_report_shows_no_file_that_a_link_leads_to(tmp_path: Path) -> None:
    """predictions/zz.txt -> /etc/passwd stood in the page, and a picture was copied into report/, visible to everybody
    who receives the report.
    """
    write_run(tmp_path / "run", num_layers=6, stages=2, steps=3, evaluations=1)
    outside = tmp_path / "outside"
    outside.write_text("the maker's own\n")
    folder = tmp_path / "run" / "predictions"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    (folder / "a.txt").write_text("of the run")
    for name in ("zz.txt", "zz.png", "zz.boxes.json"):
        (folder / name).symlink_to(outside)
    (folder / "b.txt").symlink_to("a.txt")
    os.mkfifo(folder / "c.txt")
    os.mkfifo(folder / "c.png")
    (folder / "\u00b2.txt").mkdir()
    for name in ("config.yaml", "events.jsonl", "plan-7.json"):
        (tmp_path / "run" / name).unlink(missing_ok=True)
        (tmp_path / "run" / name).symlink_to(outside)
    page = write_report(tmp_path / "run")
    text = page.read_text()
    assert "the maker" not in text
    assert "predictions: 3 files left out that are links out of the run" in text
    assert "predictions: 2 files left out" in text
    run = read_run(tmp_path / "run")
    assert run.texts == ("of the run", "of the run")
    assert run.predictions == ()
    for name in ("config.yaml", "events.jsonl", "plan-7.json"):
        assert run.problems[name] == f"{name} is a link out of the run's folder, and left out"
    shutil.rmtree(page.parent)
    page.parent.symlink_to(tmp_path)
    with pytest.raises(CapslogError, match="report is a link"):
        write_report(tmp_path / "run")
