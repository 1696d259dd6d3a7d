"""Interactive pictures of a report, as the JSON that plotly.js draws in the reader's browser: values under the pointer,
zoom by a box, curves on and off by their names. The page's style sheet has the colours of text and grids.
"""

from __future__ import annotations

import html
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from varuna_capslog.base.tables import printable

__all__ = [
    "ALARM",
    "AMBER",
    "BLUE",
    "GREEN",
    "GREY",
    "LINES",
    "SKY",
    "Curve",
    "Mark",
    "Plot",
    "bars",
    "curves",
    "label",
    "matrix",
    "plot",
    "row_boxes",
    "shorten",
    "thinned",
]

Plot = Mapping[str, Any]
"""A figure of plotly: `data`, its traces, and `layout`."""

# Each colour is legible on white and on black.
BLUE, SKY, AMBER, ALARM, GREEN, GREY = "#3b7fc0", "#8fbfe6", "#d9962b", "#cf5340", "#3a9b84", "#8a949e"
LINES = (BLUE, AMBER, GREEN, "#b065a0", "#7c8fd6", "#9a7b4f")
"""Colours of up to six curves in one plot."""
_MOST_POINTS = 1000
"""Most points of a curve; in a longer run, each point is the mean of several steps."""
_CLEAR = "rgba(0,0,0,0)"


def shorten(name: str, longest: int) -> str:
    """Return `name`, without its middle where it is longer than `longest` characters."""
    if len(name) <= longest:
        return name
    head = (longest - 1) // 2
    return f"{name[:head]}…{name[len(name) - (longest - 1 - head) :]}"


def label(text: str, longest: int = 36) -> str:
    """Return a name from a run as plotly shows it literally, at most `longest` characters of it (`shorten`)."""
    return html.escape(shorten(printable(text), longest), quote=False)


class Curve(NamedTuple):
    """Line of a plot; a value of None is a gap. `name` is plain text."""

    name: str
    x: Sequence[float]
    y: Sequence[float | None]
    colour: str
    width: float = 1.8
    dash: str = "solid"


class Mark(NamedTuple):
    """Event on the axis of steps, shown as a line through the plot with a text under the pointer."""

    x: float
    colour: str
    text: str


def curves(
    lines: Sequence[Curve],
    x_title: str,
    y_title: str,
    marks: Sequence[Mark] = (),
    top: float | None = None,
    logarithmic: bool = True,
    height: int = 340,
) -> Plot:
    """Return a plot of lines over one axis. The y axis is logarithmic, where it may be, if all values are positive and
    span more than a factor of 30; else it includes 0 where no value is negative. top: end of the y axis.
    """
    values = [value for line in lines for value in line.y if value is not None]
    y_axis: dict[str, Any] = {"title": {"text": y_title}, "type": "linear"}
    if top is not None:
        y_axis["range"] = [0, top]
    elif logarithmic and values and min(values) > 0 and max(values) / min(values) > 30:
        y_axis |= {"type": "log", "dtick": 1 if max(values) / min(values) > 100 else "D2"}
    elif values and min(values) >= 0:
        y_axis["rangemode"] = "tozero"
    traces: list[dict[str, Any]] = [_trace(line) for line in lines]
    if marks:
        traces.append(_marks(marks))
        y_axis["domain"] = [0, 0.94]
    more: dict[str, Any] = {"shapes": [_vertical(mark.x, mark.colour) for mark in marks], "hovermode": "x unified"}
    if marks:
        more["yaxis2"] = {"overlaying": "y", "range": [0, 1], "visible": False, "fixedrange": True}
    return plot(traces, x_title, y_axis, height, **more)


def _trace(line: Curve) -> dict[str, Any]:
    return {
        "type": "scatter",
        "name": label(line.name),
        "x": list(line.x),
        "y": [None if value is None else float(f"{value:.5g}") for value in line.y],
        "mode": "lines+markers" if len(line.x) < 25 and line.dash == "solid" else "lines",
        "line": {"color": line.colour, "width": line.width, "dash": line.dash},
        "marker": {"size": 5},
        "hovertemplate": "%{y:.4~g}",
    }


def _marks(marks: Sequence[Mark]) -> dict[str, Any]:
    return {
        "type": "scatter",
        "name": "events",
        "showlegend": False,
        "mode": "markers",
        "x": [mark.x for mark in marks],
        "y": [1] * len(marks),
        "yaxis": "y2",
        "marker": {"symbol": "triangle-down", "size": 9, "color": [mark.colour for mark in marks]},
        "text": [label(mark.text, 120) for mark in marks],
        "hovertemplate": "%{text}",
    }


def _vertical(x: float, colour: str) -> dict[str, Any]:
    ends: dict[str, Any] = {"x0": x, "x1": x, "y0": 0, "y1": 1, "yref": "paper"}
    return {"type": "line", **ends, "line": {"color": colour, "width": 1}, "opacity": 0.7, "layer": "below"}


def thinned(x: Sequence[int], y: Sequence[float | None]) -> tuple[list[float], list[float | None], int]:
    """Return x, y and the steps per point: means, `_MOST_POINTS` at most; y is None for a point without a value."""
    size = -(-len(x) // _MOST_POINTS)
    if size <= 1:
        return list(x), list(y), 1
    starts = range(0, len(x), size)
    means: list[float | None] = []
    for start in starts:
        known = [value for value in y[start : start + size] if value is not None]
        means.append(statistics.fmean(known) if known else None)
    return [statistics.fmean(x[start : start + size]) for start in starts], means, size


def bars(
    names: Sequence[Any],
    groups: Sequence[tuple[str, Sequence[float | None], str]],
    y_title: str,
    limits: Sequence[float | None] | None = None,
    cuts: Sequence[int] = (),
    numbers: bool = True,
) -> Plot:
    """Return a plot of bars, one of each group per name.

    names: of the places on the axis; or two equally long lists, outer names and inner names.
    groups: (name, values, colour). limits: a level line at each place. cuts: places before which a line stands.
    """
    text = "%{y:.3~g}" if numbers else ""
    traces: list[dict[str, Any]] = [
        {
            "type": "bar",
            "name": name,
            "x": names,
            "y": list(values),
            "marker": {"color": colour},
            "texttemplate": text,
            "textposition": "outside",
            "cliponaxis": False,
            "hovertemplate": "%{y:.5~g}",
        }
        for name, values, colour in groups
    ]
    if limits is not None:
        mark = {"symbol": "line-ew", "size": 44, "line": {"color": ALARM, "width": 2}}
        line: dict[str, Any] = {"type": "scatter", "mode": "markers", "name": "capacity", "marker": mark}
        traces.append(line | {"x": names, "y": list(limits), "hovertemplate": "%{y:.5~g}"})
    shapes = [_vertical(cut - 0.5, GREY) for cut in cuts]
    layout = {"barmode": "group", "bargap": 0.3, "hovermode": "x unified", "shapes": shapes}
    axis = {"title": {"text": y_title}, "rangemode": "tozero"}
    made = plot(traces, "", axis, 320, **layout)
    if isinstance(names[0], list):
        made["layout"]["xaxis"]["type"] = "multicategory"
    else:  # a few bars stay narrow
        margin = 0.5 + max(0, 4 - len(names)) / 2
        made["layout"]["xaxis"] |= {"type": "category", "range": [-margin, len(names) - 1 + margin]}
    return made


def row_boxes(
    rows: Sequence[str],
    kinds: Sequence[tuple[str, str, Sequence[tuple[int, float, float, str, str]]]],
    x_title: str,
    end: float,
) -> Plot:
    """Return a plot of boxes over time in rows, the first row on top.

    kinds: (name, colour, boxes); a box is (row, start, length, text inside, text under the pointer). A box of no length
    is a small triangle. end: of the time axis.
    """
    idle = {"type": "bar", "orientation": "h", "name": "idle", "y": list(rows), "x": [end] * len(rows)}
    traces: list[dict[str, Any]] = [idle | {"marker": {"color": GREY, "opacity": 0.18}, "hoverinfo": "skip"}]
    for name, colour, boxes in kinds:
        common = {"name": name, "y": [rows[box[0]] for box in boxes], "hovertemplate": "%{customdata}<extra></extra>"}
        common["customdata"] = [box[4] for box in boxes]
        if all(box[2] == 0 for box in boxes):
            mark = {"symbol": "triangle-up", "size": 7, "color": colour}
            traces.append(
                {"type": "scatter", "mode": "markers", "x": [box[1] for box in boxes], "marker": mark} | common
            )
            continue
        traces.append(
            {
                "type": "bar",
                "orientation": "h",
                "base": [box[1] for box in boxes],
                "x": [box[2] for box in boxes],
                "text": [box[3] for box in boxes],
                "textposition": "inside",
                "insidetextanchor": "middle",
                "textangle": 0,
                "insidetextfont": {"color": "#10161c"},
                "marker": {"color": colour, "line": {"color": "#ffffff", "width": 0.6}},
            }
            | common
        )
    text = {"uniformtext": {"minsize": 7, "mode": "hide"}}
    more = {"barmode": "overlay", "bargap": 0.15, "hovermode": "closest", **text}
    made = plot(traces, x_title, {"autorange": "reversed", "type": "category"}, 110 + 42 * len(rows), **more)
    made["layout"]["xaxis"]["range"] = [0, end]
    return made


def matrix(names: Sequence[str], last: tuple[str, str], counts: Sequence[Sequence[int]]) -> Plot:
    """Return a plot of counts, rows down and columns across, coloured by the share of each row.

    last: names of the last row and of the last column, which are not among `names`.
    """
    shares = [[count / max(1, sum(row)) for count in row] for row in counts]
    shown = [label(name, 16) for name in names]
    texts = [[f"{count:,}" if count else "" for count in row] for row in counts]
    heat: dict[str, Any] = {
        "type": "heatmap",
        "text": texts,
        "z": [[round(share, 4) for share in row] for row in shares],
        "customdata": [list(row) for row in counts],
        "x": [*shown, last[1]],
        "y": [*shown, last[0]],
        "colorscale": [[0, "rgba(59,127,192,0.02)"], [1, "rgba(59,127,192,0.75)"]],
        "zmin": 0,
        "zmax": 1,
        "showscale": False,
        "texttemplate": "%{text}" if len(names) <= 15 else "",
        "hovertemplate": "true %{y}, detected %{x}: %{customdata}, %{z:.1%} of the row<extra></extra>",
    }
    axis = {"title": {"text": "true class"}, "autorange": "reversed", "type": "category", "showgrid": False}
    made = plot([heat], "detected class", axis, min(720, 160 + 30 * len(counts)), hovermode="closest")
    made["layout"]["xaxis"] |= {"type": "category", "showgrid": False}
    return made


def plot(
    traces: Sequence[Mapping[str, Any]], x_title: str, y_axis: Mapping[str, Any], height: int, **more: Any
) -> Plot:
    """Return a figure of traces with the look that all pictures share. height: in pixels."""
    axis: dict[str, Any] = {"automargin": True, "zeroline": False, "gridcolor": "#dfe4e8", "tickfont": {"size": 12}}
    name, number = {"font": {"size": 13}}, {"exponentformat": "e", "separatethousands": True}
    return {
        "data": list(traces),
        "layout": {
            "height": height,
            "margin": {"l": 10, "r": 10, "t": 10, "b": 10},
            "paper_bgcolor": _CLEAR,
            "plot_bgcolor": _CLEAR,
            "font": {"family": "system-ui, sans-serif", "size": 13},
            "legend": {"orientation": "h", "x": 0, "xanchor": "left", "y": 1.02, "yanchor": "bottom"},
            "hoverlabel": {"namelength": -1},
            "xaxis": {**axis, **number, "title": name | {"text": x_title}},
            "yaxis": {**axis, **number, **y_axis, "title": name | dict(y_axis.get("title", {}))},
            **more,
        },
    }
