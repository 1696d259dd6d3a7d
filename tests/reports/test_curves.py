"""Curves for short and long runs: no label overlaps another, and what they show is drawn."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from tests.reports.legible import TITLE, assert_legible, assert_titled, visible_texts
from varuna_capslog.reports import style
from varuna_capslog.reports.curves import draw_scores, draw_training, main_parts
from varuna_capslog.reports.run import Evaluation, Event, StepLine


def make_steps(count: int) -> list[StepLine]:
    """Return steps 1 .. count whose loss parts have the names of a small DETR."""
    names = ("loss_a", "loss_b", "loss_c", "loss_d", "loss_a_0", "b.1")
    return [
        StepLine(
            step=step,
            loss=5 / step,
            parts=dict.fromkeys(names, 1 / step),
            lr=1e-4,
            grad_norm=math.exp(step % 7),
            step_seconds=1.0,
            samples_per_second=1.0,
            generation=0,
            peak_bytes=None,
            peak_source=None,
        )
        for step in range(1, count + 1)
    ]


@pytest.mark.parametrize("count", [1, 2, 30, 1000])
def test_training(count: int, tmp_path: Path, figures: list[Figure]) -> None:
    kinds = ("start", "checkpoint", "error", "resume", "notice", "morph", "stop")
    events = [Event(kind, None, min(count, place), 0, {}) for place, kind in enumerate(kinds)]
    draw_training(tmp_path / "x.png", TITLE, make_steps(count), [*events, Event("join", None, None, 0, {})], 0.1)
    assert_legible(figures[0])
    assert_titled(figures[0], TITLE)
    assert "join" not in [text for text, _ in visible_texts(figures[0])], "nobody knows where it belongs"


def test_changes_of_the_devices_are_lines_through_the_plots(tmp_path: Path, figures: list[Figure]) -> None:
    told = [
        ("notice", 3, {}),
        ("morph", 6, {"why": ["a-2 left"]}),
        ("lost", 9, {}),
        ("morph", 10, {"why": ["b-1 lost"]}),
    ]
    events = [Event(kind, None, step, 0, details) for kind, step, details in told]
    draw_training(tmp_path / "x.png", TITLE, make_steps(20), events, None)
    assert_legible(figures[0])
    assert_titled(figures[0], TITLE)
    loss = figures[0].axes[1]
    lines = {float(line.get_xdata()[0]): line.get_color() for line in loss.lines if len(set(line.get_xdata())) == 1}  # type: ignore[arg-type,index]
    assert lines == {5.5: style.AMBER, 9.5: style.ALARM}, (
        "before the first step of the new devices, in the change's colour"
    )


def test_training_with_holes(tmp_path: Path, figures: list[Figure]) -> None:
    steps = [StepLine(step) for step in (5, 9)]
    draw_training(tmp_path / "x.png", TITLE, steps, [], None)
    assert_legible(figures[0])
    assert_titled(figures[0], TITLE)


def test_the_smoothed_loss_of_a_straight_line_is_that_line(tmp_path: Path, figures: list[Figure]) -> None:
    """Averaging windows cut off at one side raised the beginning of a falling curve."""
    steps = [dataclasses.replace(line, loss=1000.0 - line.step) for line in make_steps(500)]
    draw_training(tmp_path / "x.png", TITLE, steps, [], None)
    smooth = figures[0].axes[0].lines[-1]
    assert "mean" in str(smooth.get_label())
    assert np.asarray(smooth.get_ydata()).tolist() == pytest.approx([line.loss for line in steps])


def test_auxiliary_parts_stand_back() -> None:
    main, others = main_parts(make_steps(1))
    assert main == ["loss_a", "loss_b", "loss_c", "loss_d", "b.1"], "b.1 has no b that it could be auxiliary to"
    assert others == ["loss_a_0"]


def test_scores(tmp_path: Path, figures: list[Figure]) -> None:
    evaluations = [Evaluation(step, {"AP": step / 10, "AP50": 0.5 + step / 20}, {}) for step in range(1, 9)]
    draw_scores(tmp_path / "x.png", TITLE, evaluations, ["AP", "AP50"])
    labels = [text for text, _ in visible_texts(figures[0])]
    assert "0.800" in labels
    assert "0.900" in labels


@pytest.mark.parametrize("length", [5, 11, 12, 60])
def test_long_names_of_parts_stay_in_the_legend(length: int, tmp_path: Path, figures: list[Figure]) -> None:
    parts = {letter * length: 1.0 for letter in "MWXYZQ"} | {f"{'M' * length}_0": 1.0}
    steps = [dataclasses.replace(line, parts=parts) for line in make_steps(3)]
    draw_training(tmp_path / "x.png", TITLE, steps, [], None)
    assert_legible(figures[0])
    assert_titled(figures[0], TITLE)
