"""The records of a run hold what its files say, and None for what is no valid value."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

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
        *({"step": step} for step in (True, 2.5, "3", None)),
    )
    run = read_run(tmp_path)
    first = StepLine(1, 2.0, generation=3, peak_bytes=(5, 6), peak_source="s", peak_input={"x": (2,)})
    assert run.steps == (first, StepLine(2, parts={"a": 1.0}))
    assert run.problems["metrics.jsonl"] == "metrics.jsonl: 4 lines without step or kind left out"


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


@pytest.mark.parametrize(
    "value", [None, {}, [1], {"x": 3}, {"x": ["a"]}, {"x": [1.5]}, {"x": [True]}], ids=["none", *"abcdef"]
)
def test_what_is_no_shape_is_not_taken_for_one(value: Any) -> None:
    assert shapes_of(value) is None
