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

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.base.units import format_bytes
from varuna_capslog.config.settings import Config
from varuna_capslog.plans.plan import Plan
from varuna_capslog.profiles.record import LayerProfile
from varuna_capslog.reports import markup, plots
from varuna_capslog.reports.markup import UNKNOWN, Markup, percent
from varuna_capslog.reports.plots import Plot
from varuna_capslog.reports.run import MeasuredPeaks, RunRecord, Shapes, shapes_of
from varuna_capslog.reports.style import (
    AMBER,
    BLUE,
    GREY,
    INK,
    MOST_ABOVE,
    PALE,
    WIDTH,
    byte_unit,
    head_picture,
    name_axis,
    picture,
)

__all__ = [
    "COLOURS",
    "MOST_GENERATIONS",
    "GenerationPeaks",
    "Rehearsal",
    "draw_layers",
    "layer_parts",
    "peak_parts",
    "plot_generations",
    "plot_stage_peaks",
    "shows_capacity",
    "size_text",
]


MOST_GENERATIONS = 16
"""Largest number of generations that can be read beside each other."""
COLOURS = {"lost": plots.ALARM, "left": plots.AMBER, "joined": plots.GREEN}
"""Kind of change -> colour of its line, the most serious kind first."""


def shows_capacity(capacity: Sequence[int] | None, peaks: Sequence[int]) -> bool:
    """True where the picture of these peaks shows the capacity line."""
    return capacity is not None and max(capacity) <= MOST_ABOVE * max([0, *peaks])


_PLANNED, _PREDICTED, _MEASURED = "planned", "predicted for the measured size", "measured"


def plot_stage_peaks(
    planned: Sequence[int] | None,
    measured: Sequence[int] | None,
    capacity: Sequence[int] | None,
    predicted: Sequence[int] | None = None,
) -> Plot:
    """Return bars of every stage, in bytes: peaks of the plan, peaks predicted for the measured sizes (where these
    differ), and measured peaks. At least one kind of bar is needed. capacity: of each stage's device.
    """
    peaks = [*(planned or ()), *(predicted or ()), *(measured or ())]
    divisor, unit = byte_unit(peaks)
    groups = ((_PLANNED, planned, plots.GREY), (_PREDICTED, predicted, plots.AMBER), (_MEASURED, measured, plots.BLUE))
    known = [(name, [size / divisor for size in sizes], colour) for name, sizes, colour in groups if sizes is not None]
    limits = [limit / divisor for limit in capacity or ()] if shows_capacity(capacity, peaks) else None
    stages = len(known[0][1])
    names = [f"stage {stage}" if stages <= 12 else str(stage) for stage in range(stages)]
    return plots.bars(names, known, f"peak memory [{unit}]", limits, numbers=stages <= 8)


_ALONE = "M_i: memory of the layer alone"
_ADDED = "M_a: memory that it adds behind the layer before"
_LESS = "M_a below 0: with it the layer before needs less than alone"


def draw_layers(path: Path, title: str, layers: Sequence[LayerProfile], cuts: Sequence[int] | None) -> None:
    """Draw M_i and M_a of every layer in bytes as bars; with `cuts`, a line before each stage, and its number."""
    divisor, unit = byte_unit(layer.isolated_bytes for layer in layers)
    count = len(layers)
    with picture(path, height=4.8) as figure:
        axes = figure.add_subplot()
        isolated = [layer.isolated_bytes / divisor for layer in layers]
        added = [(layer.added_bytes or 0) / divisor for layer in layers]
        bars = [axes.bar([index - 0.2 for index in range(count)], isolated, 0.4, color=BLUE, label=_ALONE)]
        bars.append(axes.bar([index + 0.2 for index in range(count)], added, 0.4, color=AMBER, label=_ADDED))
        explained = [Patch(facecolor=AMBER, label=_LESS)] if min(added) < 0 else []
        if min(added) < 0:
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

    steps: the generation's first and last step; None where no step is known.
    why: the generation's cause, in few words. change: "lost", "left" or "joined"; other text for other causes.
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


def plot_generations(generations: Sequence[GenerationPeaks]) -> Plot:
    """Return bars for each generation (at most `MOST_GENERATIONS`), two per stage: planned and measured bytes."""
    kinds = [(_PLANNED, [era.predicted for era in generations]), (_MEASURED, [era.measured for era in generations])]
    divisor, unit = byte_unit(peak for _, rows in kinds for sizes in rows for peak in sizes or ())
    outer = [_heading(era) for era in generations for _ in range(era.stages)]
    inner = [f"stage {stage}" for era in generations for stage in range(era.stages)]
    groups = []
    for (name, rows), colour in zip(kinds, (plots.GREY, plots.BLUE), strict=True):
        heights: list[float | None] = []
        for era, sizes in zip(generations, rows, strict=True):
            heights += [None] * era.stages if sizes is None else [size / divisor for size in sizes]
        groups.append((name, heights, colour))
    capacity = [limit for era in generations for limit in era.capacity or [0] * era.stages]
    peaks = [size for _, rows in kinds for sizes in rows for size in sizes or ()]
    limits = (
        [limit / divisor or None for limit in capacity] if any(capacity) and shows_capacity(capacity, peaks) else None
    )
    return plots.bars([outer, inner], groups, f"peak memory [{unit}]", limits, numbers=False)


def _heading(generation: GenerationPeaks) -> str:
    """Return the text under a generation: its number, its steps, and the kind of its change."""
    made = generation.steps
    steps = "no step" if made is None else f"steps {made[0]:,}\N{EN DASH}{made[1]:,}"
    return "<br>".join([f"{generation.number}: {generation.change}".removesuffix(": "), steps])


# -- The section on the peak memory of each stage: the plan's prediction beside the run's measurement.
#
# Errors are shares of the measured peak; where a comparison would mislead, the section gives the reason instead of an
# error. A plan predicts the peak for the largest input that a run can meet; a peak is measured on the inputs that the
# run met. Where these differ, the caller's function predicts the peaks again for the measured sizes.


Rehearsal = Callable[[Config, Plan, Mapping[str, Sequence[int]]], list[int]]
"""(config, plan, input shapes) -> peak bytes by stage; raises CapslogError where it cannot predict them."""


def peak_parts(run: RunRecord, rehearse: Rehearsal | None) -> list[Markup]:
    """Return picture and table of the peaks, predicted and measured. rehearse: as for `write_report`."""
    if run.plan is None:
        return [markup.note(f"No stages are known: {run.reason('plan')}.")]
    plan, peaks_found = run.plan, run.measured_peaks()
    ranks = plan.placement()
    predicted: Sequence[int] | None = plan.stage_bytes
    if predicted is None and plan.ranks:
        of_ranks = [plan.ranks[rank].bytes for rank in ranks]  # each stage shows its rank's peak, as measured
        predicted = None if None in of_ranks else [size for size in of_ranks if size is not None]
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
        except (CapslogError, OSError):  # the caller's function has told the reason
            notes.append(
                "No error is given: the peaks were measured at another input size than the plan's, and no peaks could "
                "be predicted for it."
            )
    peaks = [*(predicted or ()), *(anew or ()), *(measured or ())]
    divisor, unit = byte_unit(peaks)
    columns: dict[str, list[str]] = {
        "stage": [str(stage) for stage in range(len(plan.stages))],
        f"measured [{unit}]": _column(measured, divisor, len(plan.stages)),
    }
    if anew is not None:
        columns[f"{_PREDICTED} [{unit}]"] = _column(anew, divisor, len(plan.stages))
    else:
        columns[f"predicted [{unit}]"] = _column(predicted, divisor, len(plan.stages))
    columns["error"] = errors or [UNKNOWN] * len(plan.stages)
    if anew is not None:
        columns[f"{_PLANNED} for the largest size [{unit}]"] = _column(predicted, divisor, len(plan.stages))
    if capacity is not None:
        columns[f"capacity [{unit}]"] = _column(capacity, divisor, len(plan.stages))
    caption = _caption(run, plan, peaks_found, predicted)
    if anew is not None:
        caption.append("Predicted for the measured size by a rehearsal of every rank's program on fake tensors.")
    if capacity is not None and not shows_capacity(capacity, peaks):
        caption.append(f"The capacity, {_capacity_text(capacity)}, lies far above the picture.")
    parts = [
        markup.figure(
            plot_stage_peaks(predicted, measured, capacity, anew),
            "Bars of the predicted and the measured peak of each stage",
            " ".join(caption),
        ),
        markup.table("peak-table", list(columns), list(zip(*columns.values(), strict=True))),
    ]
    if errors is not None:
        of = "predicted for the measured size" if anew is not None else "predicted"
        parts.append(markup.paragraph(f"The error: {of} less measured, in percent of the measured peak."))
    if plan.fits is False:
        short = plan.shortfall
        shortfall_text = "" if short is None else f": stage {short.stage} lacks {format_bytes(short.bytes)}"
        notes.append(f"The plan does not fit the capacity{shortfall_text}.")
    return [*parts, *map(markup.note, notes)]


def _caption(run: RunRecord, plan: Plan, measured: MeasuredPeaks | None, predicted: Sequence[int] | None) -> list[str]:
    """Describe the numbers, and the input size for which each holds."""
    caption = []
    if measured is not None:
        source = "" if measured.source is None else f" ({measured.source})"
        sizes = sorted({size_text(shapes) for shapes in measured.inputs})
        at = "" if all(shapes is None for shapes in measured.inputs) else f", at {' and at '.join(sizes)}"
        caption.append(f"Measured: the largest peak of any measured step{source}{at}.")
    if predicted is not None:
        largest = _predicted_input(run)
        at = "" if largest is None else f", for the largest input, {size_text(largest)}"
        by = f" by the {plan.memory_model} memory model" if plan.memory_model else ""
        caption.append(f"Predicted{by}{at}.")
    return caption


def _error(predicted: int, measured: int) -> str:
    return percent(predicted / measured - 1) if measured > 0 else UNKNOWN


def _column(values: Sequence[int] | None, divisor: int, stages: int) -> list[str]:
    return [UNKNOWN] * stages if values is None else [f"{value / divisor:,.2f}" for value in values]


def _capacity_text(capacity: list[int]) -> str:
    low, high = format_bytes(min(capacity)), format_bytes(max(capacity))
    return low if low == high else f"{low} to {high}"


def _predicted_input(run: RunRecord) -> Shapes | None:
    """Return the shapes for which the plan's predictions hold, from the profile; None where it has none."""
    return None if run.profile is None else shapes_of(dict(run.profile.conditions).get("input"))


def _peaks_at_measured_sizes(
    run: RunRecord, predicted: Sequence[int], measured: MeasuredPeaks, rehearse: Rehearsal | None
) -> list[int] | None:
    """Return the peaks of a rehearsal at the measured sizes, by stage.

    None where the plan's own predictions hold for these sizes, and where either the planned or the measured sizes are
    not known (older runs). Raises CapslogError or OSError where nothing can be predicted for the measured sizes.
    """
    largest = _predicted_input(run)
    other_sizes = [shapes for shapes in measured.inputs if shapes is not None and shapes != largest]
    if largest is None or not other_sizes:
        return None
    if run.config is None or run.plan is None:
        raise CapslogError(f"the run's settings are not known: {run.reason('config.yaml')}")
    if rehearse is None or run.config.engine != "capslog":
        raise CapslogError("no rehearsal at these sizes can be made")
    rehearsed: dict[str, list[int]] = {}
    for shapes in other_sizes:
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


# -- The section on the memory of each layer.


def layer_parts(run: RunRecord) -> list[Markup]:
    """Return bars of the memory of each layer, alone and added, with the plan's cuts."""
    if run.profile is None:
        return [markup.note(f"No memory of layers is known: {run.reason('profile.json')}.")]
    layers = run.profile.layers
    plan = run.plan if run.plan is not None and run.plan.num_layers == len(layers) else None
    cuts = None if plan is None else plan.cuts
    divisor, unit = byte_unit(layer.isolated_bytes for layer in layers)
    groups = [
        ("alone", [layer.isolated_bytes / divisor for layer in layers], plots.BLUE),
        ("added", [(layer.added_bytes or 0) / divisor for layer in layers], plots.AMBER),
    ]
    names = [f"{number} {plots.label(layer.name, 24)}" for number, layer in enumerate(layers)]
    caption = (
        "Alone: peak memory of a stage that holds only this layer. Added: what the layer adds to a stage that holds "
        "the one before it; below 0, the stage needs less with it. The bytes are "
        f"{run.profile.source or 'of an unknown source'}."
    )
    if cuts is None:
        why = "it is for another number of layers" if run.plan is not None else run.reason("plan")
        why = why if plan is None else "its stages are not one pipeline in the order of the layers"
        caption += f" The plan's cuts are not drawn: {why}."
    else:
        caption += " Lines are the plan's cuts."
    drawn = plots.bars(names, groups, f"memory [{unit}]", cuts=[cut for cut in cuts or () if cut], numbers=False)
    return [markup.figure(drawn, "Bars of the memory of each layer with the cuts", caption)]
