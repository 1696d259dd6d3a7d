"""No label of a picture lies on another one, for small and large runs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from varuna_capslog.reports import style
from varuna_capslog.reports.curves import draw_scores, draw_training, main_parts
from varuna_capslog.reports.gantt import draw_schedule
from varuna_capslog.reports.memory import (
    MOST_GENERATIONS,
    Era,
    draw_generations,
    draw_layers,
    draw_stage_peaks,
    shows_capacity,
)
from varuna_capslog.reports.run import Evaluation, Event, StepLine
from varuna_capslog.schedules import StageSeconds, make_schedule, simulate

GIB = 2**30


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Figure]]:
    """The figures that were drawn, in order."""
    drawn: list[Figure] = []

    class Kept(Figure):
        def __init__(self, **named: Any) -> None:
            super().__init__(**named)
            FigureCanvasAgg(self)
            drawn.append(self)

    monkeypatch.setattr(style, "Figure", Kept)
    yield drawn
    assert drawn, "the test drew nothing"


def visible_texts(figure: Figure) -> list[tuple[str, Bbox]]:
    """Every text that a drawing of the figure puts on it, with its box in pixels; none may be smaller than 4 points."""
    canvas = figure.canvas
    assert isinstance(canvas, FigureCanvasAgg)
    found: list[tuple[str, Bbox]] = []
    draw = Text.draw

    def note(text: Text, renderer: Any) -> None:
        if text.get_visible() and text.get_text().strip():
            assert float(text.get_fontsize()) >= 4, f"{text.get_text()!r} is too small to be read"
            found.append((text.get_text(), text.get_window_extent(renderer)))
        draw(text, renderer)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Text, "draw", note)
        canvas.draw()
    return found


def assert_legible(figure: Figure) -> None:
    """No two texts overlap by more than a pixel, and none leaves the picture."""
    width, height = figure.canvas.get_width_height()
    texts = visible_texts(figure)
    for text, box in texts:
        inside = box.x0 > -1.5 and box.y0 > -1.5 and box.x1 < width + 1.5 and box.y1 < height + 1.5
        assert inside, f"{text!r} leaves the picture: {box} of {width} x {height}"
    for (one, a), (other, b) in combinations(texts, 2):
        across = min(a.x1, b.x1) - max(a.x0, b.x0)
        down = min(a.y1, b.y1) - max(a.y0, b.y0)
        assert min(across, down) <= 1.0, f"{one!r} and {other!r} overlap by {across:.1f} x {down:.1f} pixels"


@pytest.mark.parametrize(
    ("layers", "cuts"),
    [
        (1, [0]),
        (4, [0]),
        (4, [0, 1, 2, 3]),
        (24, [0, 1, 2, 3, 4, 5, 6, 20]),
        (48, [0, 2, 4, 7, 11, 17, 24, 34]),
        (100, [0, 50]),
        (130, [0, 60]),
    ],
)
def test_layers(layers: int, cuts: list[int], tmp_path: Path, figures: list[Figure]) -> None:
    names = [rf"$\frac$.encoder.layers.{index}.self_attn" for index in range(layers)]
    sizes = [(1 + index) * 2**24 for index in range(layers)]
    draw_layers(tmp_path / "x.png", names, sizes, [None, *(-size // 3 for size in sizes[1:])], cuts)
    assert_legible(figures[0])
    shown = [label.get_text() for label in figures[0].axes[0].get_xticklabels()]
    assert len(shown) == layers if layers <= 100 else len(shown) > layers / 3


@pytest.mark.parametrize("stages", [1, 2, 4, 8, 40])
@pytest.mark.parametrize("size", [3_000, 5 * 2**20, 700 * GIB])
def test_stage_peaks(stages: int, size: int, tmp_path: Path, figures: list[Figure]) -> None:
    predicted = [size + size * stage // 20 for stage in range(stages)]
    measured = [peak + peak // 50 for peak in predicted]
    draw_stage_peaks(tmp_path / "x.png", predicted, measured, [measured[0] + size // 40] * stages)
    assert_legible(figures[0])
    unit = {3_000: "KiB", 5 * 2**20: "MiB", 700 * GIB: "GiB"}[size]
    assert figures[0].axes[0].get_ylabel() == f"peak memory [{unit}]"
    heights = [bar.get_height() for bar in figures[0].axes[0].patches if isinstance(bar, Rectangle)]
    divisor = {"KiB": 2**10, "MiB": 2**20, "GiB": GIB}[unit]
    assert heights == pytest.approx([peak / divisor for peak in [*predicted, *measured]])


@pytest.mark.parametrize(("count", "stages"), [(1, 1), (2, 8), (4, 3), (8, 2), (MOST_GENERATIONS, 8)])
def test_generations(count: int, stages: int, tmp_path: Path, figures: list[Figure]) -> None:
    eras = []
    for number in range(count):
        here = 1 + (number + stages - 1) % stages
        predicted = None if number == 1 else [GIB + 977 * stage for stage in range(here)]
        measured = None if number == 3 else [GIB - 10_000_000 * stage for stage in range(here)]
        steps = (1000 * number, 1000 * number + 999)
        words, change = (
            ("3 members begin", ""),
            ("machine-17-2, machine-18-1 lost", "lost"),
            ("a-1 joined", "joined"),
        )[number % 3]
        eras.append(Era(number + 7, steps, words, change, predicted, measured, [int(1.2 * GIB)] * here))
    draw_generations(tmp_path / "x.png", eras)
    assert_legible(figures[0])
    texts = [text for text, _ in visible_texts(figures[0])]
    assert len([text for text in texts if text.startswith(("generation ", *"0123456789")) and "\n" in text]) == (
        count if count <= 8 else 0
    )
    assert ("a device lost" in texts) == (count > 1)
    bars = [patch for patch in figures[0].axes[0].patches if isinstance(patch, Rectangle) and patch.get_height() > 0.5]
    heights = sorted(bar.get_height() for bar in bars if bar.get_height() != 1)  # not the shading of every second one
    wanted = [peak / GIB for era in eras for peak in (*(era.predicted or ()), *(era.measured or ())) if peak != GIB]
    assert heights == pytest.approx(sorted(wanted))


def test_a_capacity_far_above_is_not_drawn() -> None:
    assert shows_capacity([16 * GIB], [7 * GIB])
    assert not shows_capacity([80 * GIB], [7 * GIB])
    assert not shows_capacity(None, [7 * GIB])


@pytest.mark.parametrize(("stages", "ranks", "microbatches"), [(1, 1, 1), (4, 4, 8), (8, 8, 16), (4, 2, 4), (8, 8, 64)])
@pytest.mark.parametrize("name", ["gpipe", "varuna"])
def test_schedule(name: str, stages: int, ranks: int, microbatches: int, tmp_path: Path, figures: list[Figure]) -> None:
    schedule = make_schedule(name, stages, microbatches, [stage % ranks for stage in range(stages)])
    timeline = simulate(schedule, StageSeconds([0.01 * (1 + stage % 3) for stage in range(stages)], [0.03] * stages))
    complete = draw_schedule(tmp_path / "x.png", timeline, in_seconds=True)
    axes = figures[0].axes[0]
    boxes = [one for row in timeline.actions for one in row]
    assert complete == (len(axes.texts) == len(boxes))
    assert complete == (microbatches < 16)
    extents = {id(text): text.get_window_extent() for text in axes.texts}
    unit = 1.0 if axes.get_xlabel().endswith("[s]") else 1e-3
    ends = sorted({one.start_seconds / unit for one in boxes} | {one.end_seconds / unit for one in boxes})
    for text in axes.texts:
        middle, rank = text.get_position()
        mine = min(
            (one for one in timeline.actions[round(rank)]),
            key=lambda one: abs((one.start_seconds + one.end_seconds) / 2 / unit - middle),
        )
        label = str(mine.action.microbatch) if stages == ranks else f"{mine.action.stage}.{mine.action.microbatch}"
        assert text.get_text() == label
        left, right = (axes.transData.transform((x / unit, 0))[0] for x in (mine.start_seconds, mine.end_seconds))
        extent = extents[id(text)]
        assert left - 0.5 <= extent.x0 < extent.x1 <= right + 0.5, f"{mine.action} runs over its box"
    assert axes.get_xlim() == pytest.approx((0, ends[-1]))


def make_steps(count: int) -> list[StepLine]:
    """Steps 1 .. count whose loss parts have the names of a small DETR."""
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
    draw_training(tmp_path / "x.png", make_steps(count), [*events, Event("join", None, None, 0, {})], 0.1)
    assert_legible(figures[0])
    assert "join" not in [text for text, _ in visible_texts(figures[0])], "nobody knows where it belongs"


def test_changes_of_the_devices_are_lines_through_the_plots(tmp_path: Path, figures: list[Figure]) -> None:
    told = [
        ("notice", 3, {}),
        ("morph", 6, {"why": ["a-2 left"]}),
        ("lost", 9, {}),
        ("morph", 10, {"why": ["b-1 lost"]}),
    ]
    events = [Event(kind, None, step, 0, details) for kind, step, details in told]
    draw_training(tmp_path / "x.png", make_steps(20), events, None)
    assert_legible(figures[0])
    loss = figures[0].axes[1]
    lines = {float(line.get_xdata()[0]): line.get_color() for line in loss.lines if len(set(line.get_xdata())) == 1}  # type: ignore[arg-type,index]
    assert lines == {5.5: style.AMBER, 9.5: style.ALARM}, (
        "before the first step of the new devices, in the change's colour"
    )


def test_training_with_holes(tmp_path: Path, figures: list[Figure]) -> None:
    steps = [StepLine(step) for step in (5, 9)]
    draw_training(tmp_path / "x.png", steps, [], None)
    assert_legible(figures[0])


def test_the_smoothed_loss_of_a_straight_line_is_that_line(tmp_path: Path, figures: list[Figure]) -> None:
    """Windows that were cut off at one side lifted the begin of a falling curve."""
    steps = [dataclasses.replace(line, loss=1000.0 - line.step) for line in make_steps(500)]
    draw_training(tmp_path / "x.png", steps, [], None)
    smooth = figures[0].axes[0].lines[-1]
    assert "mean" in str(smooth.get_label())
    assert np.asarray(smooth.get_ydata()).tolist() == pytest.approx([line.loss for line in steps])


def test_auxiliary_parts_stand_back() -> None:
    main, others = main_parts(make_steps(1))
    assert main == ["loss_a", "loss_b", "loss_c", "loss_d", "b.1"], "b.1 has no b that it could be auxiliary to"
    assert others == ["loss_a_0"]


def test_scores(tmp_path: Path, figures: list[Figure]) -> None:
    evaluations = [Evaluation(step, {"AP": step / 10, "AP50": 0.5 + step / 20}, {}) for step in range(1, 9)]
    draw_scores(tmp_path / "x.png", evaluations, ["AP", "AP50"])
    labels = [text for text, _ in visible_texts(figures[0])]
    assert "0.800" in labels
    assert "0.900" in labels


@pytest.mark.parametrize("length", [5, 11, 12, 60])
def test_long_names_of_parts_stay_in_the_legend(length: int, tmp_path: Path, figures: list[Figure]) -> None:
    parts = {letter * length: 1.0 for letter in "MWXYZQ"} | {f"{'M' * length}_0": 1.0}
    steps = [dataclasses.replace(line, parts=parts) for line in make_steps(3)]
    draw_training(tmp_path / "x.png", steps, [], None)
    assert_legible(figures[0])
