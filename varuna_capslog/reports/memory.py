"""Pictures of memory: the peak of each stage, predicted beside measured, of one plan or by generation of a run whose
members changed; and the bytes of each layer, with the cuts. All numbers are bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import Patch
from matplotlib.patheffects import withStroke

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.base.units import format_bytes
from varuna_capslog.config.settings import Config
from varuna_capslog.plans.plan import Plan
from varuna_capslog.profiles.record import LayerProfile
from varuna_capslog.reports import markup
from varuna_capslog.reports.markup import UNKNOWN, Markup, percent
from varuna_capslog.reports.run import MeasuredPeaks, RunRecord, Shapes, shapes_of
from varuna_capslog.reports.style import (
    ALARM,
    AMBER,
    BLUE,
    GREEN,
    GREY,
    INK,
    PALE,
    WIDTH,
    byte_unit,
    head_picture,
    name_axis,
    picture,
    shorten,
)
from varuna_capslog.reports.titles import plan_title

__all__ = [
    "COLOURS",
    "MOST_GENERATIONS",
    "GenerationPeaks",
    "Rehearsal",
    "draw_generations",
    "draw_layers",
    "draw_stage_peaks",
    "peak_parts",
    "shows_capacity",
    "size_text",
]


MOST_GENERATIONS = 16
"""Largest number of generations that can be read beside each other."""
COLOURS = {"lost": ALARM, "left": AMBER, "joined": GREEN}
"""Colour of a change's line, by the kind of change, the gravest kind first."""

_MOST_WORDS = 8
"""Largest number of generations with space for words under them; more have only their numbers."""
_INSIDE = WIDTH - 0.9

_PREDICTED: dict[str, Any] = {"label": "predicted by the plan", "color": AMBER, "hatch": "////"}
_PREDICTED_ANEW: dict[str, Any] = {"label": "predicted for the measured size", "color": GREY, "hatch": "...."}
_MEASURED: dict[str, Any] = {"label": "measured", "color": BLUE}
_CAPACITY: dict[str, Any] = {"label": "capacity of the device", "colors": ALARM, "linestyles": "--"}

_MOST_ABOVE = 2.5
"""A capacity higher than this many times the highest bar is not drawn: the bars would shrink to nothing."""


def shows_capacity(capacity: Sequence[int] | None, peaks: Sequence[int]) -> bool:
    """True where the picture of these peaks shows the capacity line."""
    return capacity is not None and max(capacity) <= _MOST_ABOVE * max([0, *peaks])


def draw_stage_peaks(
    path: Path,
    title: str,
    predicted: Sequence[int] | None,
    measured: Sequence[int] | None,
    capacity: Sequence[int] | None,
    at_measured_size: Sequence[int] | None = None,
) -> None:
    """Draw bars of every stage, in bytes: peaks predicted by the plan, peaks predicted for the measured sizes (where
    these differ), and measured peaks. At least one kind of bar is needed. capacity: of each stage's device.
    """
    peaks = [*(predicted or ()), *(at_measured_size or ()), *(measured or ())]
    stages = len(predicted or measured or ())
    drawn = capacity if shows_capacity(capacity, peaks) else None
    divisor, unit = byte_unit(peaks)
    kinds = ((predicted, _PREDICTED), (at_measured_size, _PREDICTED_ANEW), (measured, _MEASURED))
    bars = [(values, look) for values, look in kinds if values is not None]
    width = 0.76 / len(bars)
    width = min(width, 0.055 * max(stages, 4))  # few stages: bars stay bars
    with picture(path, height=3.6) as figure:
        axes = figure.add_subplot()
        size = min(8.5, 0.85 * 72 * WIDTH * width / max(1, stages) / 2.2)
        for number, (values, look) in enumerate(bars):
            places = [stage + (number - (len(bars) - 1) / 2) * width for stage in range(stages)]
            _draw_bars(axes, places, [value / divisor for value in values], width, size, look)
        if drawn is not None:
            limits = [limit / divisor for limit in drawn]
            axes.hlines(limits, [n - 0.5 for n in range(stages)], [n + 0.5 for n in range(stages)], **_CAPACITY)
        axes.set_xticks(range(stages), [f"stage {stage}" if stages <= 12 else str(stage) for stage in range(stages)])
        beside = 0.5 + max(0, 4 - stages) / 2
        axes.set_xlim(-beside, stages - 1 + beside)
        axes.set_xlabel("" if stages <= 12 else "stage")
        axes.set_ylabel(f"peak memory [{unit}]")
        axes.tick_params(axis="x", length=0)
        axes.margins(y=0.1)
        axes.grid(axis="y")
        head_picture(figure, title, ncols=3)


_ALONE = "M_i: memory of the layer alone"
_ADDED = "M_a: memory that it adds behind the layer before"
_LESS = "M_a below 0: with it the layer before needs less than alone"


def draw_layers(path: Path, title: str, layers: Sequence[LayerProfile], cuts: Sequence[int] | None) -> None:
    """Draw M_i and M_a of every layer in bytes as bars; with `cuts`, a line before each stage, and its number."""
    divisor, unit = byte_unit(layer.isolated_bytes for layer in layers)
    count = len(layers)
    with picture(path, height=4.8) as figure:
        axes = figure.add_subplot()
        alone = [layer.isolated_bytes / divisor for layer in layers]
        more = [(layer.added_bytes or 0) / divisor for layer in layers]
        bars = [axes.bar([index - 0.2 for index in range(count)], alone, 0.4, color=BLUE, label=_ALONE)]
        bars.append(axes.bar([index + 0.2 for index in range(count)], more, 0.4, color=AMBER, label=_ADDED))
        explained = [Patch(facecolor=AMBER, label=_LESS)] if min(more) < 0 else []
        if min(more) < 0:
            axes.axhline(0, color=GREY, linewidth=0.8)
        if cuts is not None:
            _draw_cuts(axes, cuts, count)
        name_axis(axes, [layer.name for layer in layers], WIDTH - 0.8)
        axes.set_xlim(-0.5, count - 0.5)
        axes.set_ylabel(f"memory [{unit}]")
        axes.tick_params(axis="x", length=2)
        axes.grid(axis="y")
        head_picture(figure, title, handles=[*bars, *explained], ncols=2 + len(explained), columnspacing=1.3)


def _draw_cuts(axes: Axes, cuts: Sequence[int], num_layers: int) -> None:
    """Draw a line before every stage but the first, shade every second stage, and number the stages on top."""
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


@dataclass(frozen=True)
class GenerationPeaks:
    """Generation and its peaks.

    steps: the first and the last step that it made; None where no step is known.
    why: its cause, in few words. change: "lost", "left", "joined", or anything else for another reason.
    predicted, measured: bytes of each stage; None if unknown.
    capacity: of each stage's device in bytes, or None.
    """

    number: int
    steps: tuple[int, int] | None
    why: str
    change: str
    predicted: Sequence[int] | None
    measured: Sequence[int] | None
    capacity: Sequence[int] | None

    @property
    def stages(self) -> int:
        """Number of stages; 0 where it is not known."""
        return len(self.predicted or self.measured or ())


def draw_generations(path: Path, title: str, generations: Sequence[GenerationPeaks]) -> None:
    """Draw for each generation two bars per stage, predicted and measured, in bytes, and a line for each change.

    At most `MOST_GENERATIONS`, with at least one bar among them.
    """
    peaks = [
        peak for generation in generations for peak in (*(generation.predicted or ()), *(generation.measured or ()))
    ]
    divisor, unit = byte_unit(peaks)
    widest = max(generation.stages for generation in generations)
    room = _INSIDE / len(generations)  # inches for each
    slot = min(1 / (widest + 1.0), 1.1 / room)  # of the room, for one stage
    width = 0.4 * slot
    size = min(8.5, 72 * room * width / 2.5)
    with picture(path, height=3.9) as figure:
        axes = figure.add_subplot()
        for place, generation in enumerate(generations):
            if place % 2:
                axes.axvspan(place - 0.5, place + 0.5, color=PALE, zorder=0, linewidth=0)
            if place:
                axes.axvline(place - 0.5, color=COLOURS.get(generation.change, GREY), linewidth=1.6)
            middles = [place + (stage - (generation.stages - 1) / 2) * slot for stage in range(generation.stages)]
            for values, side, look in ((generation.predicted, -1, _PREDICTED), (generation.measured, 1, _MEASURED)):
                if values is not None:
                    places = [middle + side * width / 2 for middle in middles]
                    _draw_bars(axes, places, [value / divisor for value in values], width, size, look)
            if generation.capacity is not None and shows_capacity(generation.capacity, peaks):
                limits = [limit / divisor for limit in generation.capacity]
                axes.hlines(limits, [x - slot / 2 for x in middles], [x + slot / 2 for x in middles], **_CAPACITY)
        for change, colour in COLOURS.items():
            if any(generation.change == change for generation in generations[1:]):
                axes.plot([], [], color=colour, linewidth=1.6, label=f"a device {change}")
        axes.set_xlim(-0.5, len(generations) - 0.5)
        texts = [_words(generation, len(generations), room) for generation in generations]
        axes.set_xticks(range(len(generations)), texts, color=INK)
        axes.tick_params(axis="x", length=0, labelsize=8)
        if len(generations) > _MOST_WORDS:
            axes.set_xlabel("generation")
        axes.set_ylabel(f"peak of each stage [{unit}]")
        axes.margins(y=0.12)
        axes.grid(axis="y")
        handles, labels = axes.get_legend_handles_labels()
        handle_of = dict(zip(labels, handles, strict=True))  # each label once
        order = sorted(handle_of, key=lambda label: label.startswith("a device"))  # bars before lines
        handles = [handle_of[label] for label in order]
        head_picture(figure, title, handles=handles, labels=order, ncols=6, columnspacing=1.3, handlelength=1.6)


def _words(generation: GenerationPeaks, count: int, room: float) -> str:
    """Return the text under a generation: its number, its steps, and its cause."""
    if count > _MOST_WORDS:
        return str(generation.number)
    longest = round(room / 0.068)
    made = generation.steps
    steps = "no step" if made is None else f"steps {made[0]:,}\N{EN DASH}{made[1]:,}"
    return "\n".join(shorten(line, longest) for line in (f"generation {generation.number}", steps, generation.why))


def _draw_bars(
    axes: Axes, places: Sequence[float], heights: Sequence[float], width: float, size: float, look: Mapping[str, Any]
) -> None:
    """Draw bars, each with its number over it, in three significant digits (6.19, 61.9, 619); no numbers where `size`,
    in points, would be too small.
    """
    bars = axes.bar(places, heights, 0.94 * width, edgecolor="white", linewidth=0, **look)
    if size < 5:
        return
    texts = [
        f"{height:.2f}" if abs(height) < 10 else f"{height:.1f}" if abs(height) < 100 else f"{height:.0f}"
        for height in heights
    ]
    for text in axes.bar_label(bars, texts, padding=2, fontsize=size):  # over the capacity line, and readable there
        text.set(zorder=5, path_effects=[withStroke(linewidth=3, foreground="white")])


# -- The section on the peak memory of each stage: the plan's prediction beside the run's measurement.
#
# Errors are shares of the measured peak; where a comparison would mislead, it gives the reason and
# no error. A plan predicts the peak for the largest input that a run can meet; a peak is measured on the inputs that
# came. Where these differ, the caller's function predicts the peaks again for the measured sizes.


_PICTURE = "stage-memory.png"

Rehearsal = Callable[[Config, Plan, Mapping[str, Sequence[int]]], list[int]]
"""(config, plan, input shapes) -> peak bytes by stage; raises CapslogError where it cannot predict them."""


def peak_parts(run: RunRecord, folder: Path, rehearse: Rehearsal | None) -> list[Markup]:
    """Return picture and table; draw `stage-memory.png` where there is a prediction or a measurement. rehearse: as for
    `write_report`.
    """
    if run.plan is None:
        return [markup.note(f"No stages are known: {run.reason('plan')}.")]
    plan, peaks_found = run.plan, run.measured_peaks()
    predicted = plan.stage_bytes
    measured = None if peaks_found is None else peaks_found.bytes
    notes = []
    if predicted is None:
        notes.append("The plan predicts no bytes: its cuts were given, or no memory model describes its schedule.")
    if measured is None:
        notes.append(
            "No peak was measured under this plan: metrics.jsonl has no peak_bytes for its stages. Runs of two "
            "steps or more measure them."
        )
    if predicted is None and measured is None:
        return list(map(markup.note, notes))
    ranks = plan.placement()
    capacity = plan.capacities_of(ranks)
    shared = len(set(ranks)) < len(plan.stages)
    anew, errors = None, None
    if shared and measured is not None:
        notes.append(
            "Several stages share a rank here and show that rank's whole peak, so that no error per stage can be given."
        )
    elif predicted is not None and peaks_found is not None:
        try:
            anew = _peaks_at_measured_sizes(run, predicted, peaks_found, rehearse)
            errors = [_error(*pair) for pair in zip(anew or predicted, peaks_found.bytes, strict=True)]
        except (CapslogError, OSError) as error:
            notes.append(f"No error is given, since predictions and measurements hold for other sizes: {error}.")
    peaks = [*(predicted or ()), *(anew or ()), *(measured or ())]
    title = plan_title("Peak memory of each stage", plan, run.profile, run.schedule_text)
    draw_stage_peaks(folder / _PICTURE, title, predicted, measured, capacity, anew)
    divisor, unit = byte_unit(peaks)
    columns: dict[str, list[str]] = {
        "stage": [str(stage) for stage in range(len(plan.stages))],
        f"predicted [{unit}]": _column(predicted, divisor, len(plan.stages)),
    }
    if anew is not None:
        columns[f"for the measured size [{unit}]"] = _column(anew, divisor, len(plan.stages))
    columns[f"measured [{unit}]"] = _column(measured, divisor, len(plan.stages))
    columns["error"] = errors or [UNKNOWN] * len(plan.stages)
    if capacity is not None:
        columns[f"capacity [{unit}]"] = _column(capacity, divisor, len(plan.stages))
    caption = _caption(run, plan, peaks_found)
    if anew is not None:
        caption.append("Predicted for the measured size by a rehearsal of every rank's program on fake tensors.")
    if capacity is not None and not shows_capacity(capacity, peaks):
        caption.append(f"The capacity, {_capacity_text(capacity)}, lies far above the picture.")
    parts = [
        markup.figure(_PICTURE, "Bars of the predicted and the measured peak of each stage", " ".join(caption)),
        markup.table("peak-table", list(columns), list(zip(*columns.values(), strict=True))),
    ]
    if errors is not None:
        of = "predicted for the measured size" if anew is not None else "predicted"
        parts.append(markup.paragraph(f"Error: {of} less measured, in percent of the measured peak."))
    if plan.fits is False:
        short = plan.shortfall
        lack = "" if short is None else f": stage {short.stage} lacks {format_bytes(short.bytes)}"
        notes.append(f"The plan does not fit the capacity{lack}.")
    return [*parts, *map(markup.note, notes)]


def _caption(run: RunRecord, plan: Plan, measured: MeasuredPeaks | None) -> list[str]:
    """Describe the numbers, and the input size for which each holds."""
    caption = []
    if measured is not None:
        source = "" if measured.source is None else f" ({measured.source})"
        sizes = sorted({size_text(shapes) for shapes in measured.inputs})
        at = "" if all(shapes is None for shapes in measured.inputs) else f", at {' and at '.join(sizes)}"
        caption.append(f"Measured: the largest peak of any measured step{source}{at}.")
    if plan.stage_bytes is not None and plan.memory_model:
        largest = _predicted_input(run)
        at = "" if largest is None else f", for the largest input, {size_text(largest)}"
        caption.append(f"Predicted by the {plan.memory_model} memory model{at}.")
    return caption


def _error(predicted: int, measured: int) -> str:
    return percent(predicted / measured - 1) if measured > 0 else UNKNOWN


def _column(values: Sequence[int] | None, divisor: int, stages: int) -> list[str]:
    return [UNKNOWN] * stages if values is None else [f"{value / divisor:,.2f}" for value in values]


def _capacity_text(capacity: list[int]) -> str:
    low, high = format_bytes(min(capacity)), format_bytes(max(capacity))
    return low if low == high else f"{low} to {high}"


def _predicted_input(run: RunRecord) -> Shapes | None:
    """Return the shapes for which the plan's predictions hold, those of its profile; None where it has none."""
    return None if run.profile is None else shapes_of(dict(run.profile.conditions).get("input"))


def _peaks_at_measured_sizes(
    run: RunRecord, predicted: Sequence[int], measured: MeasuredPeaks, rehearse: Rehearsal | None
) -> list[int] | None:
    """Return the peaks of a rehearsal at the measured sizes, by stage.

    None where the plan's own predictions hold for these sizes, and where the sizes of either are not known (older
    runs). Raises CapslogError or OSError where nothing can be predicted for the measured sizes.
    """
    largest = _predicted_input(run)
    others = [shapes for shapes in measured.inputs if shapes is not None and shapes != largest]
    if largest is None or not others:
        return None
    if run.config is None or run.plan is None:
        raise CapslogError(f"the run's settings are not known: {run.reason('config.yaml')}")
    if rehearse is None or run.config.engine != "capslog":
        raise CapslogError("no rehearsal at these sizes can be made")
    rehearsed: dict[str, list[int]] = {}
    for shapes in others:
        text = size_text(shapes)
        rehearsed[text] = rehearsed.get(text) or rehearse(run.config, run.plan, shapes)
    return [
        predicted[stage] if shapes in (None, largest) else rehearsed[size_text(shapes)][stage]
        for stage, shapes in enumerate(measured.inputs)
    ]


def size_text(shapes: Shapes | None) -> str:
    """Return shapes as text, such as images 8x3x72x72."""
    if shapes is None:
        return "a size that is not recorded"
    return ", ".join(f"{name} {'x'.join(map(str, sizes)) or 'scalar'}" for name, sizes in shapes.items())
