"""Curves for short and long runs, as plotly gets them."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from varuna_capslog.reports import plots
from varuna_capslog.reports.results import _loss_curves, _mark, main_parts
from varuna_capslog.reports.run import Detection, Event, StepLine, one_box_per_object


def make_steps(count: int) -> list[StepLine]:
    """Return steps 1 .. count whose loss parts have the names of a small DETR."""
    names = ("loss_a", "loss_b", "loss_c", "loss_d", "loss_a_0", "b.1")
    parts = [dict.fromkeys(names, 1 / step) for step in range(1, count + 1)]
    return [StepLine(step, 5 / step, parts[step - 1], 1e-4, math.exp(step % 7)) for step in range(1, count + 1)]


@pytest.mark.parametrize("count", [1, 2, 199, 200, 1000, 1001, 100_000])
def test_a_long_run_has_no_more_points_than_the_page_holds(count: int) -> None:
    x, y, size = plots.thinned(range(count), [None if step == 3 else 2.0 * step for step in range(count)])
    assert len(x) == len(y) == -(-count // size) <= 1000
    known = [(step, value) for step, value in zip(x, y, strict=True) if value is not None]
    assert len(known) >= len(x) - 1
    assert all(abs(value - 2 * step) <= size for step, value in known), "a mean of the values of the steps of the point"


def test_changes_of_the_devices_are_lines_through_the_plots() -> None:
    told: list[tuple[str, int | None, dict[str, Any]]] = [
        ("notice", 3, {}),
        ("morph", 6, {"why": ["a-2 left"]}),
        ("lost", 9, {}),
        ("morph", 10, {"why": ["b-1 lost"]}),
        ("error", 99, {}),
        ("error", None, {}),
    ]
    marks = [_mark(Event(kind, None, step, 0, details), 20) for kind, step, details in told]
    assert [mark and (mark.x, mark.colour) for mark in marks] == [
        None, (5.5, plots.AMBER), (9.5, plots.ALARM), (9.5, plots.ALARM), None, None,
    ]  # fmt: skip
    assert marks[1] is not None
    assert marks[1].text == "morph: a-2 left"
    drawn = plots.curves([plots.Curve("loss", [1, 20], [2.0, 1.0], plots.BLUE)], "x", "y", [marks[1]])
    assert [shape["x0"] for shape in drawn["layout"]["shapes"]] == [5.5]


def test_the_smoothed_loss_of_a_straight_line_is_that_line() -> None:
    """Averaging windows cut off at one side raised the beginning of a falling curve."""
    steps = [dataclasses.replace(line, loss=1000.0 - line.step) for line in make_steps(500)]
    _, smooth = _loss_curves(steps)
    assert smooth.name == "mean of 11 steps"
    assert smooth.y == pytest.approx([line.loss for line in steps])


def test_auxiliary_parts_stand_back() -> None:
    main, others = main_parts(make_steps(1))
    assert main == ["loss_a", "loss_b", "loss_c", "loss_d", "b.1"], "b.1 has no b that it could be auxiliary to"
    assert others == ["loss_a_0"]


@pytest.mark.parametrize(("values", "kind"), [([5.0, 0.1], "log"), ([5.0, 1.0], "linear"), ([5.0, -0.1], "linear")])
def test_only_a_wide_span_of_positive_values_is_logarithmic(values: list[float], kind: str) -> None:
    axis = plots.curves([plots.Curve("a", [1, 2], values, plots.BLUE)], "x", "y")["layout"]["yaxis"]
    assert axis["type"] == kind
    assert ("rangemode" in axis) == (values == [5.0, 1.0])


def test_a_box_that_overlaps_a_surer_one_is_left_out() -> None:
    def box(left: float, score: float) -> Detection:
        return Detection((left, 0.0, left + 10, 10.0), score, "x")

    # IoU of boxes 10 wide whose left edges are d apart: (10 - d) / (10 + d), 0.43 for 4 and 0.33 for 5
    assert one_box_per_object([box(4, 0.5), box(0, 0.9), box(5, 0.2)]) == [box(0, 0.9), box(5, 0.2)]
    assert one_box_per_object([box(0, 0.9), Detection((3.0, 3.0, 3.0, 3.0), 0.1, "x")])[1].score == 0.1
