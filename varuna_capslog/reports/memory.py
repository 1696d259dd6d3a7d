"""Pictures of memory: the peak of each stage, predicted beside measured, and the bytes of each layer, with the cuts.

`page` calls them with numbers in bytes. They draw the given numbers and judge nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patheffects import withStroke

from varuna_capslog.reports.style import ALARM, AMBER, BLUE, GREY, INK, PALE, WIDTH, byte_unit, name_axis, picture

__all__ = ["draw_layers", "draw_stage_peaks", "shows_capacity"]

_MOST_ABOVE = 2.5
"""A capacity higher than this many times the highest bar is not drawn: the bars would shrink to nothing."""


def shows_capacity(capacity: Sequence[int] | None, peaks: Sequence[int]) -> bool:
    """Whether the picture of these peaks holds the capacity line."""
    return capacity is not None and max(capacity) <= _MOST_ABOVE * max([0, *peaks])


def draw_stage_peaks(
    path: Path,
    predicted: Sequence[int] | None,
    measured: Sequence[int] | None,
    capacity: Sequence[int] | None,
    at_measured_size: Sequence[int] | None = None,
) -> None:
    """Bars of every stage, in bytes: what the plan predicted, what was predicted for the sizes that were measured
    (where these are other sizes), what was measured. `capacity` is that of each stage's device. At least one kind of
    bar is given.
    """
    peaks = [*(predicted or ()), *(at_measured_size or ()), *(measured or ())]
    stages = len(predicted or measured or ())
    drawn = capacity if shows_capacity(capacity, peaks) else None
    divisor, unit = byte_unit(peaks)
    bars = [
        (values, label, colour, hatch)
        for values, label, colour, hatch in (
            (predicted, "predicted by the plan", AMBER, "////"),
            (at_measured_size, "predicted for the measured size", GREY, "...."),
            (measured, "measured", BLUE, None),
        )
        if values is not None
    ]
    width = 0.76 / len(bars)
    width = min(width, 0.055 * max(stages, 4))  # few stages: bars stay bars
    with picture(path, height=3.6) as figure:
        axes = figure.add_subplot()
        size = min(8.5, 0.85 * 72 * WIDTH * width / max(1, stages) / 2.2)
        for number, (values, label, colour, hatch) in enumerate(bars):
            places = [stage + (number - (len(bars) - 1) / 2) * width for stage in range(stages)]
            heights = [value / divisor for value in values]
            drawn_bars = axes.bar(
                places, heights, 0.94 * width, label=label, color=colour, hatch=hatch, edgecolor="white", linewidth=0
            )
            if size >= 5:
                texts = axes.bar_label(drawn_bars, [_short(height) for height in heights], padding=2, fontsize=size)
                for text in texts:  # over the capacity line, and readable there
                    text.set(zorder=5, path_effects=[withStroke(linewidth=3, foreground="white")])
        if drawn is not None:
            for stage, limit in enumerate(drawn):
                label = "capacity of the device" if stage == 0 else ""
                axes.hlines(limit / divisor, stage - 0.5, stage + 0.5, colors=ALARM, linestyles="--", label=label)
        axes.set_xticks(range(stages), [f"stage {stage}" if stages <= 12 else str(stage) for stage in range(stages)])
        beside = 0.5 + max(0, 4 - stages) / 2
        axes.set_xlim(-beside, stages - 1 + beside)
        axes.set_xlabel("" if stages <= 12 else "stage")
        axes.set_ylabel(f"peak memory [{unit}]")
        axes.tick_params(axis="x", length=0)
        axes.margins(y=0.1)
        axes.grid(axis="y")
        figure.legend(loc="outside upper left", ncols=3)


def draw_layers(
    path: Path, names: Sequence[str], isolated: Sequence[int], added: Sequence[int | None], cuts: Sequence[int] | None
) -> None:
    """M_i and M_a of every layer in bytes as bars; where `cuts` is given, a line before each stage and its number."""
    divisor, unit = byte_unit(isolated)
    count = len(names)
    with picture(path, height=4.6) as figure:
        axes = figure.add_subplot()
        alone = [value / divisor for value in isolated]
        more = [0.0 if value is None else value / divisor for value in added]
        axes.bar([index - 0.2 for index in range(count)], alone, 0.4, color=BLUE, label="alone (M_i)")
        axes.bar([index + 0.2 for index in range(count)], more, 0.4, color=AMBER, label="added to a stage (M_a)")
        if min(more) < 0:
            axes.axhline(0, color=GREY, linewidth=0.8)
        if cuts is not None:
            _draw_cuts(axes, cuts, count)
        name_axis(axes, names, WIDTH - 0.8)
        axes.set_xlim(-0.5, count - 0.5)
        axes.set_ylabel(f"memory [{unit}]")
        axes.tick_params(axis="x", length=2)
        axes.grid(axis="y")
        figure.legend(loc="outside upper left", ncols=2)


def _draw_cuts(axes: Axes, cuts: Sequence[int], num_layers: int) -> None:
    """A line before every stage but the first, every second stage shaded, and the stages' numbers on top."""
    stages = list(pairwise([*cuts, num_layers]))
    narrowest = WIDTH * min(end - first for first, end in stages) / num_layers
    above: dict[str, Any] = {"textcoords": "offset points", "va": "bottom", "fontsize": 8.5}
    for stage, (first, end) in enumerate(stages):
        if stage % 2:
            axes.axvspan(first - 0.5, end - 0.5, color=PALE, zorder=0, linewidth=0)
        if stage:
            axes.axvline(first - 0.5, color=INK, linestyle=(0, (4, 3)), linewidth=1.0)
        if WIDTH * (end - first) / num_layers > 0.15:
            text = f"stage {stage}" if narrowest > 0.75 else str(stage)
            place = ((first + end - 1) / 2, 1)
            axes.annotate(text, place, (0, 3), xycoords=("data", "axes fraction"), ha="center", **above)
    if narrowest <= 0.75:
        axes.annotate("stage", (0, 1), (-6, 3), xycoords="axes fraction", ha="right", **above)


def _short(value: float) -> str:
    """Three digits that matter: 6.19, 61.9, 619."""
    return f"{value:.2f}" if abs(value) < 10 else f"{value:.1f}" if abs(value) < 100 else f"{value:.0f}"
