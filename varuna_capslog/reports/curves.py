"""Pictures that are drawn before a run, by the commands `compare`, `front` and `simulate --trace`."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from varuna_capslog.base.units import format_bytes
from varuna_capslog.planning.comparison import Row
from varuna_capslog.planning.simulation import RankStep
from varuna_capslog.planning.trace_replay import Replay
from varuna_capslog.reports.markup import duration, significant
from varuna_capslog.reports.style import (
    ALARM,
    AMBER,
    BLUE,
    GREY,
    MOST_ABOVE,
    SKY,
    byte_unit,
    head_picture,
    name_rows,
    picture,
    second_unit,
    title_picture,
)

__all__ = ["FrontPoint", "draw_comparison", "draw_front", "draw_ranks", "draw_replay"]


_MARKS = {"leave": (AMBER, "leave, announced"), "crash": (ALARM, "crash"), "stop": (ALARM, "nothing fits")}


class FrontPoint(NamedTuple):
    """Point of a front: bytes, the step time within these bytes, and the lower bound of the step where it is known."""

    bytes: int
    step_seconds: float
    bound_seconds: float | None
    proven: bool


def draw_front(
    path: Path,
    title: str,
    front: Sequence[FrontPoint],
    bytes_name: str,
    capacity: int | None = None,
    capacity_name: str = "capacity",
) -> None:
    """Draw the points (bytes, step time) and the steps between them as PNG; `capacity` in bytes as a line.

    Filled points are proven to be the fastest within their bytes; the thin line from a hollow point down to its bound
    shows how much faster a plan could be.

    Raises CapslogError where the file cannot be written.
    """
    unit, name = byte_unit(point.bytes for point in front)
    second, second_name = second_unit(max(point.step_seconds for point in front))
    largest = max(point.bytes for point in front)
    with picture(path, 4.5) as figure:
        axes = figure.add_subplot()
        axes.step(
            [point.bytes / unit for point in front],
            [point.step_seconds / second for point in front],
            where="post",
            color=SKY,
            zorder=1,
            label="step time within so many bytes",
        )
        for proven, label in ((True, "proven to be the fastest"), (False, "not proven: the line ends at the bound")):
            _front_points(axes, [point for point in front if point.proven is proven], unit, second, label)
        text = f"{bytes_name} [{name}]"
        if capacity is not None and capacity <= MOST_ABOVE * largest:
            axes.axvline(capacity / unit, color=ALARM, linewidth=1, linestyle="--", label=capacity_name)
        elif capacity is not None:
            text += f"; the {capacity_name}, {format_bytes(capacity)}, lies far to the right"
        axes.set_xlabel(text)
        axes.set_ylabel(f"simulated step time [{second_name}]")
        axes.grid(True)
        head_picture(figure, title, ncols=4, columnspacing=1.3)


def _front_points(axes: Axes, points: Sequence[FrontPoint], unit: float, second: float, label: str) -> None:
    """Draw points, all proven or all not proven; points that are not proven have a line down to their bounds."""
    if not points:
        return
    look: dict[str, Any] = {"linestyle": "none", "marker": "o", "markersize": 6, "color": BLUE, "zorder": 3}
    face = BLUE if points[0].proven else "white"
    places, steps = [point.bytes / unit for point in points], [point.step_seconds / second for point in points]
    axes.plot(places, steps, markerfacecolor=face, label=label, **look)
    for place, step, point in zip(places, steps, points, strict=True):
        if not point.proven and point.bound_seconds is not None:
            axes.plot([place, place], [point.bound_seconds / second, step], color=GREY, linewidth=0.8, zorder=2)


def draw_comparison(path: Path, title: str, rows: Sequence[Row], usable: Sequence[int] | None = None) -> None:
    """Draw three bar charts beside each other; planners with the same plan share a row, a missing plan reads "none".

    usable: bytes of each device's capacity less the headroom; a line for each size.
    """
    groups = _same_plans(rows)
    names = [_lines_of_names([row.planner for row in group]) for group in groups]
    height = max(0.34, 0.08 + 0.15 * max(name.count("\n") + 1 for name in names))
    first_rows = [group[0] for group in groups]
    with picture(path, height=1.6 + height * len(groups)) as figure:
        title_picture(figure, title, apart=0.1)
        peaks_axes, steps_axes, search_axes = figure.subplots(1, 3, sharey=True)
        _peak_bars(peaks_axes, first_rows, usable)
        steps = [row.step_seconds for row in first_rows]
        scale, name = second_unit(max((step for step in steps if step is not None), default=1.0))
        _bars(steps_axes, steps, _texts(first_rows, steps, scale), scale, AMBER)
        steps_axes.set_xlabel(f"simulated step [{name}]")
        _search_bars(search_axes, groups)
        name_rows(peaks_axes, names)


_NAME_CHARACTERS = 26
"""Most characters in a line of planners' names."""


def _lines_of_names(names: Sequence[str]) -> str:
    return textwrap.fill(", ".join(names), _NAME_CHARACTERS, break_on_hyphens=False)


def _same_plans(rows: Sequence[Row]) -> list[list[Row]]:
    """Return the rows in groups of the same plan and the same numbers, in the order of each group's first row."""
    groups: list[tuple[object, list[Row]]] = []
    for row in rows:
        plan = row.plan
        of_plan = plan and (plan.stages, plan.units, plan.schedule, plan.actions, plan.routes, dict(plan.variants))
        key = (of_plan, row.peak_bytes, row.margin_bytes, row.step_seconds)
        group = next((group for other, group in groups if other == key), None)
        if group is None:
            groups.append((key, [row]))
        else:
            group.append(row)
    return [group for _, group in groups]


def _texts(rows: Sequence[Row], values: Sequence[float | None], divisor: float) -> list[str]:
    """Return the text after each bar: its number, "none" for a planner without a plan, or "unknown"."""
    return [
        significant(value / divisor) if value is not None else "none" if row.plan is None else "unknown"
        for row, value in zip(rows, values, strict=True)
    ]


def _peak_bars(axes: Axes, rows: Sequence[Row], usable: Sequence[int] | None) -> None:
    peaks = [row.peak_bytes for row in rows]
    largest = max((peak for peak in peaks if peak is not None), default=0)
    divisor, unit = byte_unit([largest])
    _bars(axes, peaks, _texts(rows, peaks, divisor), divisor, [ALARM if row.fits is False else BLUE for row in rows])
    label = f"peak of the largest stage [{unit}]{', red: does not fit' * any(row.fits is False for row in rows)}"
    if usable is not None and min(usable) <= MOST_ABOVE * largest:
        for limit in sorted(set(usable)):
            axes.axvline(limit / divisor, color=ALARM, linestyle="--", linewidth=1.0)
        axes.set_xlim(0, max(axes.get_xlim()[1], 1.05 * max(usable) / divisor))
        label += "\ndashed: capacity less headroom"
    elif usable is not None:
        label += f"\ncapacity less headroom: {format_bytes(min(usable))}"
    axes.set_xlabel(label)


def _search_bars(axes: Axes, groups: Sequence[Sequence[Row]]) -> None:
    """Draw search times on a logarithmic axis: a bar for a group's longest search, with its range as text."""
    times = [[row.search_seconds for row in group if row.search_seconds is not None] for group in groups]
    longest = [max(searched, default=None) for searched in times]
    texts = []
    for group, searched in zip(groups, times, strict=True):
        ends = [duration(seconds) for seconds in dict.fromkeys((min(searched), max(searched)))] if searched else []
        texts.append(" to ".join(ends) or ("none" if group[0].plan is None else "unknown"))
    lengths = [seconds for seconds in longest if seconds]
    high = max(lengths, default=1.0)
    first = math.floor(math.log10(min(lengths, default=1.0) / 1.5))
    powers = range(first, max(first, math.floor(math.log10(high))) + 1)
    low = 10.0**first
    axes.set_xscale("log")
    _bars(axes, longest, texts, 1.0, GREY, low)
    share = min(0.6, 0.03 + 0.028 * max(map(len, texts)))  # of the axis, for the text after the longest bar
    axes.set_xlim(low, low * (high / low) ** (1 / (1 - share)))
    axes.xaxis.set_major_locator(FixedLocator([10.0**power for power in powers[:: -(-len(powers) // 4)]]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda seconds, _: _power(seconds)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("search time, logarithmic")


def _power(seconds: float) -> str:
    """Return a power of ten of seconds: 1 ns, 10 µs, 1 ms, 100 s."""
    factor, unit = next(
        ((factor, unit) for factor, unit in ((1, "s"), (1e3, "ms"), (1e6, "µs")) if seconds * factor > 0.99),
        (1e9, "ns"),
    )
    return f"{seconds * factor:g} {unit}"


def _bars(
    axes: Axes,
    values: Sequence[float | None],
    texts: Sequence[str],
    divisor: float,
    colour: str | Sequence[str],
    nothing: float = 0.0,
) -> None:
    """Draw a bar and its text per row, both inside the axes; nothing: where bars begin."""
    heights = [nothing if value is None else max(nothing, value / divisor) for value in values]
    bars = axes.barh(range(len(values)), [height - nothing for height in heights], 0.72, left=nothing, color=colour)
    axes.bar_label(bars, texts, padding=3, fontsize=8)
    axes.set_xlim(nothing, 1.25 * max(heights, default=0.0) or 1.0)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x")


def draw_ranks(
    path: Path, title: str, plans: Mapping[str, Sequence[RankStep]], capacities: Sequence[int] | None = None
) -> None:
    """Draw the peak bytes and the busy seconds of every rank, a bar for each of the named plans.

    capacities: of the devices in bytes; a line for each size.
    """
    colours, width = (AMBER, BLUE, GREY), 0.8 / max(1, len(plans))
    peaks = [step.peak_bytes or 0 for steps in plans.values() for step in steps]
    divisor, unit = byte_unit(peaks)
    scale, second = second_unit(max((step.busy_seconds for steps in plans.values() for step in steps), default=1.0))
    with picture(path, height=4.6) as figure:
        title_picture(figure, title)
        above, below = figure.subplots(2, 1, sharex=True)
        for number, (name, steps) in enumerate(plans.items()):
            places = [step.rank + (number - (len(plans) - 1) / 2) * width for step in steps]
            above.bar(places, [(step.peak_bytes or 0) / divisor for step in steps], width, color=colours[number])
            below.bar(places, [step.busy_seconds / scale for step in steps], width, color=colours[number], label=name)
        for size in sorted(set(capacities or ())):
            if size <= MOST_ABOVE * max(peaks, default=0):
                above.axhline(size / divisor, color=ALARM, linestyle="--", linewidth=1.0, label="capacity")
        above.set_ylabel(f"peak memory [{unit}]")
        below.set_ylabel(f"busy in a step [{second}]")
        below.set_xlabel("rank")
        below.xaxis.set_major_locator(MaxNLocator(integer=True))
        for axes in (above, below):
            axes.grid(axis="y")
            if axes.get_legend_handles_labels()[0]:
                axes.legend(loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0.2, ncols=3)


def draw_replay(path: Path, title: str, replayed: Replay) -> None:
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
    with picture(path, height=4.9) as figure:
        title_picture(figure, title)
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
