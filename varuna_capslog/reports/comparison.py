"""The picture of a comparison of planners: a row each, its peak on the left, its step and search time on the right.

`capslog compare -o` calls it with the rows of `varuna_capslog.planning.comparison`. It draws and judges nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.ticker import NullFormatter

from varuna_capslog.planning.comparison import Row
from varuna_capslog.reports.style import ALARM, AMBER, BLUE, GREY, byte_unit, picture, second_unit
from varuna_capslog.reports.wording import significant

__all__ = ["draw_comparison"]


def draw_comparison(path: Path, rows: Sequence[Row]) -> None:
    """Three bar charts beside each other; a planner without an answer has empty rows that say so."""
    names = [row.planner for row in rows]
    with picture(path, height=1.2 + 0.34 * len(rows)) as figure:
        left, middle, right = figure.subplots(1, 3, sharey=True)
        peaks = [row.peak_bytes for row in rows]
        divisor, unit = byte_unit([peak for peak in peaks if peak is not None])
        _bars(left, peaks, divisor, BLUE, f"peak of the largest stage [{unit}]")
        for number, row in enumerate(rows):
            if row.margin_bytes is not None and row.peak_bytes is not None:
                limit = (row.peak_bytes + row.margin_bytes) / divisor
                if limit <= 2.5 * max(peak or 0 for peak in peaks) / divisor:
                    left.plot([limit, limit], [number - 0.4, number + 0.4], color=ALARM, linestyle="--", linewidth=1.0)
                    left.set_xlim(0, max(left.get_xlim()[1], 1.05 * limit))
                    left.set_xlabel(f"peak of the largest stage [{unit}], dashed: capacity")
        steps = [row.step_seconds for row in rows]
        scale, name = second_unit(max((step for step in steps if step is not None), default=1.0))
        _bars(middle, steps, scale, AMBER, f"simulated step [{name}]")
        _bars(right, [row.search_seconds for row in rows], 1e-3, GREY, "search [ms], logarithmic", logarithmic=True)
        left.set_yticks(range(len(rows)), names)
        left.set_ylim(len(rows) - 0.5, -0.5)


def _bars(
    axes: Axes, values: Sequence[float | None], divisor: float, colour: str, label: str, logarithmic: bool = False
) -> None:
    """A bar and its number per row, both inside the axes."""
    known = [value / divisor for value in values if value is not None and value > 0]
    low, high = min(known, default=1.0), max(known, default=1.0)
    nothing = low / 4 if logarithmic else 0.0
    heights = [nothing if value is None else max(nothing, value / divisor) for value in values]
    if logarithmic:
        axes.set_xscale("log")
        axes.set_xlim(low / 4, high * (4 * high / low) ** 0.3)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter(NullFormatter())
    else:
        axes.set_xlim(0, 1.22 * high)
    bars = axes.barh(range(len(values)), [one - nothing for one in heights], 0.72, left=nothing, color=colour)
    texts = ["none" if value is None else significant(value / divisor) for value in values]
    axes.bar_label(bars, texts, padding=3, fontsize=8)
    axes.set_xlabel(label)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x")
