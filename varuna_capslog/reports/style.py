"""The look of every picture of a report: type, colours, size, and units on the axes.

matplotlib is used without pyplot, so that no display, backend or global state of the caller is touched.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.plans.plan import Plan
from varuna_capslog.profiles.record import Profile
from varuna_capslog.reports.markup import plural
from varuna_capslog.reports.plots import shorten

__all__ = [
    "ALARM",
    "AMBER",
    "BLUE",
    "GREEN",
    "GREY",
    "INK",
    "LINES",
    "MOST_ABOVE",
    "PALE",
    "SKY",
    "byte_unit",
    "device_kind",
    "head_picture",
    "name_axis",
    "name_rows",
    "picture",
    "plan_title",
    "schedules_text",
    "second_unit",
    "title_of",
    "title_picture",
]


INK, GREY, PALE = "#22303c", "#8a949e", "#eceff2"
# Blue, light blue and amber differ in lightness too: they survive grey print and every kind of colour blindness.
BLUE, SKY, AMBER, ALARM, GREEN = "#2a5f8f", "#a5cbe8", "#e8b44f", "#b5432a", "#3a9b84"
LINES = ("#2a5f8f", "#d98c1f", "#3a9b84", "#a8588f", "#7fb2dd", "#6b5b3e")
"""Colours of up to six curves in one plot; neighbours differ in lightness."""

MOST_ABOVE = 2.5
"""Factor on the largest number of a picture: a higher capacity is not drawn, since all else would become tiny."""
WIDTH = 10.0
"""Width of every picture in inches, so that type has the same size in all pictures."""

_SETTINGS: dict[Any, Any] = {
    "figure.dpi": 160,
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 8,
    "axes.labelsize": 9,
    "axes.labelcolor": INK,
    "axes.edgecolor": GREY,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.formatter.useoffset": False,
    "text.color": INK,
    "text.parse_math": False,  # names of layers are text, whatever signs they hold
    "xtick.color": GREY,
    "ytick.color": GREY,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
    "grid.color": "#dfe4e8",
    "grid.linewidth": 0.7,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "lines.linewidth": 1.5,
    "hatch.linewidth": 0.6,
}


@contextmanager
def picture(path: Path, height: float, vector: bool = False) -> Iterator[Figure]:
    """Yield a figure of the common width and `height` inches to draw on, then save it as PNG.

    vector: save it also as SVG beside the PNG. Raises CapslogError where a file cannot be written.
    """
    with matplotlib.rc_context(_SETTINGS):
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        yield figure
        files = {path: "Software"} | ({path.with_suffix(".svg"): "Date"} if vector else {})
        for file, metadata in files.items():
            try:
                figure.savefig(file, facecolor="white", metadata={metadata: None})
            except OSError as error:
                raise CapslogError(f"{file} cannot be written: {error.strerror or error}; free space") from error


_TITLE: dict[str, Any] = {"size": 10, "weight": "bold"}
_TITLE_CHARACTERS = 110
"""Most characters in a line of a title, so that no line is wider than the picture."""


def title_picture(figure: Figure, title: str, apart: float | None = None) -> None:
    """Write the title over a picture whose plots have their own legends or none; apart: inches on each side of each
    plot, so that the numbers at the ends of neighbouring axes do not touch.
    """
    engine = figure.get_layout_engine()
    if apart is not None and isinstance(engine, ConstrainedLayoutEngine):
        engine.set(w_pad=apart)
    figure.suptitle(_lines(title), x=0.006, ha="left", fontproperties=_TITLE)


def head_picture(figure: Figure, title: str, **legend: Any) -> None:
    """Write the title over a picture, and the legend of all its plots below it; legend: as `Figure.legend` takes it."""
    over: dict[str, Any] = {"title": _lines(title), "title_fontproperties": _TITLE, "alignment": "left"}
    figure.legend(loc="outside upper left", **over, **legend)


def _lines(title: str) -> str:
    return textwrap.fill(title, _TITLE_CHARACTERS, break_on_hyphens=False, max_lines=3, placeholder=" …")


def byte_unit(values: Iterable[float]) -> tuple[int, str]:
    """Return (bytes per unit, its name) in which the largest of `values` is at least 1: GiB, MiB, KiB or B."""
    largest = max((abs(value) for value in values), default=0)
    units = ((1024**3, "GiB"), (1024**2, "MiB"), (1024, "KiB"))
    return next((unit for unit in units if largest >= unit[0]), (1, "B"))


def second_unit(largest: float) -> tuple[float, str]:
    """Return (seconds per unit, its name) for times up to `largest` seconds: s, ms or µs."""
    return (1.0, "s") if largest >= 1 else (1e-3, "ms") if largest >= 1e-3 else (1e-6, "µs")


def name_rows(axes: Axes, names: Sequence[str]) -> None:
    """Write names beside the rows 0, 1, ... of a picture, the first one on top."""
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)


def name_axis(axes: Axes, names: Sequence[str], width: float) -> None:
    """Write names under positions 0, 1, ... without overlaps: level or upright, smaller, not all. width: inches."""
    room = 72 * width / max(1, len(names))  # points for one name
    size = max(5.0, min(8.5, 0.72 * room))
    spacing = max(1, -(-round(1.15 * size * len(names)) // round(72 * width)))
    chosen = range(0, len(names), spacing)
    axes.set_xticks(list(chosen))
    texts = [shorten(names[index], 30) for index in chosen]
    level = spacing == 1 and 0.68 * size * max(map(len, texts), default=0) < room
    axes.set_xticklabels(texts, rotation=0 if level else 90, fontsize=size)


# -- Titles of pictures: model, devices and schedule in one line of text; what is not known is left out.


def title_of(what: str, model: str | None, devices: str, *more: str | None) -> str:
    """Return a title such as "One step of vit on 4 devices (cuda:t4), schedule 1f1b".

    devices: such as "4 devices", or "" where nothing is known of them. more: what else is known; None is left out.
    """
    place = f" on {devices}" if devices else ""
    return ", ".join([f"{what} of {model or 'a model'}{place}", *filter(None, more)])


def device_kind(conditions: Mapping[str, Any], speeds: Sequence[float | None] | None = None) -> str:
    """Return the kind of device that a profile is for in parentheses, such as " (cuda:t4)"; "" where it is not known.

    speeds: of the devices; where they differ, so do the kinds, and the profile has only the fastest kind.
    """
    device, gpu = conditions.get("device"), conditions.get("gpu")
    if not device or len(set(speeds or ())) > 1:
        return ""
    return f" ({device}:{gpu})" if gpu else f" ({device})"


def plan_title(what: str, plan: Plan, profile: Profile | None, *more: str | None) -> str:
    """Return the title of a picture of a plan: its model, its devices, its planner and `more`."""
    model = plan.model or (None if profile is None else profile.model)
    kind = "" if profile is None else device_kind(profile.conditions, [rank.speed for rank in plan.ranks])
    count = plural(plan.num_ranks, "device")
    # the short form does not say how many such pipelines a run has
    devices = f"a pipeline of {count}" if plan.short and plan.num_ranks > 1 else count
    planner = None if plan.planner is None else f"planner {plan.planner}"
    return title_of(what, model, f"{devices}{kind}", planner, *more)


def schedules_text(names: Sequence[str | None]) -> str | None:
    """Return the schedules of several plans, each once: "schedule 1f1b", "schedules 1f1b, varuna"; None for none."""
    known = [name for name in dict.fromkeys(names) if name is not None]
    return f"schedule{'s' if len(known) > 1 else ''} {', '.join(known)}" if known else None
