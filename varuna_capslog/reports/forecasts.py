"""Pictures from before a run: planners compared, the Pareto front of a planner, a trace of preemptions replayed.

The commands `compare`, `front` and `simulate --trace` call them. They draw and judge nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, NullFormatter

from varuna_capslog.planning.comparison import Row
from varuna_capslog.planning.traces.trace_replay import Replay
from varuna_capslog.reports.style import ALARM, AMBER, BLUE, GREY, SKY, byte_unit, name_rows, picture, second_unit
from varuna_capslog.reports.wording import significant

__all__ = ["FrontPoint", "draw_comparison", "draw_front", "draw_replay"]

_MARKS = {"leave": (AMBER, "leave, announced"), "crash": (ALARM, "crash"), "stop": (ALARM, "nothing fits")}


class FrontPoint(NamedTuple):
    """A point of a front: bytes, the step time within them, and its lower bound, where that is known."""

    bytes: int
    step_seconds: float
    bound_seconds: float | None
    proven: bool


def draw_front(
    path: Path, front: Sequence[FrontPoint], title: str, bytes_name: str, capacity: int | None = None
) -> None:
    """Draw the points (bytes, step time) and the steps between them as PNG; `capacity` in bytes as a line.

    Filled points are proven to be the fastest within their bytes; the thin line from a hollow point down to its bound
    shows how much faster a plan could be.

    Raises CapslogError where the file cannot be written.
    """
    unit, name = byte_unit(point.bytes for point in front)
    second, second_name = second_unit(max(point.step_seconds for point in front))
    peaks = [point.bytes / unit for point in front]
    steps = [point.step_seconds / second for point in front]
    with picture(path, 4.2) as figure:
        axes = figure.add_subplot()
        axes.step(peaks, steps, where="post", color=SKY, zorder=1)
        for point, peak, step in zip(front, peaks, steps, strict=True):
            axes.plot(
                [peak],
                [step],
                marker="o",
                markersize=6,
                color=BLUE,
                markerfacecolor=BLUE if point.proven else "white",
                zorder=3,
            )
            if not point.proven and point.bound_seconds is not None:
                axes.plot([peak, peak], [point.bound_seconds / second, step], color=GREY, linewidth=0.8, zorder=2)
        if capacity is not None:
            axes.axvline(capacity / unit, color=ALARM, linewidth=1)
            axes.annotate(
                "capacity", (capacity / unit, 1), xycoords=("data", "axes fraction"), xytext=(-4, -12),
                textcoords="offset points", ha="right", color=ALARM, fontsize=8.5,
            )  # fmt: skip
        axes.set_xlabel(f"{bytes_name} ({name})")
        axes.set_ylabel(f"simulated step time ({second_name})")
        axes.set_title(title)
        axes.grid(True)


def draw_comparison(path: Path, rows: Sequence[Row]) -> None:
    """Draw three bar charts beside each other; the bars of a planner without an answer read "none"."""
    with picture(path, height=1.2 + 0.34 * len(rows)) as figure:
        peaks_axes, steps_axes, search_axes = figure.subplots(1, 3, sharey=True)
        peaks = [row.peak_bytes for row in rows]
        divisor, unit = byte_unit([peak for peak in peaks if peak is not None])
        _bars(peaks_axes, peaks, divisor, BLUE, f"peak of the largest stage [{unit}]")
        for number, row in enumerate(rows):
            if row.margin_bytes is not None and row.peak_bytes is not None:
                limit = (row.peak_bytes + row.margin_bytes) / divisor
                if limit <= 2.5 * max(peak or 0 for peak in peaks) / divisor:
                    peaks_axes.plot(
                        [limit, limit], [number - 0.4, number + 0.4], color=ALARM, linestyle="--", linewidth=1.0
                    )
                    peaks_axes.set_xlim(0, max(peaks_axes.get_xlim()[1], 1.05 * limit))
                    peaks_axes.set_xlabel(f"peak of the largest stage [{unit}], dashed: capacity")
        steps = [row.step_seconds for row in rows]
        scale, name = second_unit(max((step for step in steps if step is not None), default=1.0))
        _bars(steps_axes, steps, scale, AMBER, f"simulated step [{name}]")
        _bars(
            search_axes, [row.search_seconds for row in rows], 1e-3, GREY, "search [ms], logarithmic", logarithmic=True
        )
        name_rows(peaks_axes, [row.planner for row in rows])


def _bars(
    axes: Axes, values: Sequence[float | None], divisor: float, colour: str, label: str, logarithmic: bool = False
) -> None:
    """Draw a bar and its number per row, both inside the axes."""
    bar_lengths = [value / divisor for value in values if value is not None and value > 0]
    low, high = min(bar_lengths, default=1.0), max(bar_lengths, default=1.0)
    nothing = low / 4 if logarithmic else 0.0
    heights = [nothing if value is None else max(nothing, value / divisor) for value in values]
    if logarithmic:
        axes.set_xscale("log")
        axes.set_xlim(low / 4, high * (4 * high / low) ** 0.3)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter(NullFormatter())
    else:
        axes.set_xlim(0, 1.22 * high)
    bars = axes.barh(range(len(values)), [height - nothing for height in heights], 0.72, left=nothing, color=colour)
    texts = ["none" if value is None else significant(value / divisor) for value in values]
    axes.bar_label(bars, texts, padding=3, fontsize=8)
    axes.set_xlabel(label)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x")


def draw_replay(path: Path, replayed: Replay) -> None:
    """Draw devices rented and used over the hours; below, samples per second as planned and the average reached."""
    hours = [change.seconds / 3600 for change in replayed.changes]
    end = replayed.duration_seconds / 3600
    times = [0.0, *hours, end]
    rented, used, rates = (
        [0, *values, *values[-1:]] if values else [0, 0]
        for values in (
            [change.devices for change in replayed.changes],
            [change.devices_used for change in replayed.changes],
            [change.samples_per_second for change in replayed.changes],
        )
    )
    with picture(path, height=4.6) as figure:
        above, below = figure.subplots(2, 1, sharex=True)
        above.fill_between(times, rented, step="post", color=SKY, linewidth=0, label="devices rented")
        above.step(times, used, where="post", color=BLUE, linewidth=1.0, label="used")
        for kind, (colour, label) in _MARKS.items():
            places = [hour for hour, change in zip(hours, replayed.changes, strict=True) if change.kind == kind]
            if places:
                above.plot(places, [0] * len(places), "|", color=colour, markersize=7, label=label, clip_on=False)
        above.set_ylabel("devices")
        above.yaxis.set_major_locator(MaxNLocator(integer=True))
        above.set_ylim(0, 1.08 * max(rented, default=1))
        below.step(times, rates, where="post", color=BLUE, linewidth=1.0, label="planned")
        label = f"reached on average: {100 * replayed.share_of_ideal:.2f} % of the ideal"
        below.axhline(replayed.goodput, color=GREY, linestyle="--", linewidth=1.0, label=label)
        below.set_ylabel("samples per second")
        below.set_ylim(0, 1.08 * max(rates, default=1) or 1)
        below.set_xlim(0, end)
        below.set_xlabel("hours since the first machine joined")
        for axes in (above, below):
            axes.grid(axis="y")
            axes.legend(loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0.2, ncols=5)
