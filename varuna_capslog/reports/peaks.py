"""The section on the peak memory of each stage: the plan's prediction beside the run's measurement.

`page` calls it. Errors are shares of the measured peak; where a comparison would mislead, it gives the reason and no
error. A plan predicts the peak for the largest input that a run can meet; a peak is measured on the inputs that came.
Where these differ, the caller's function predicts the peaks again for the measured sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.base.units import format_bytes
from varuna_capslog.config.settings import Config
from varuna_capslog.plans.plan import Plan
from varuna_capslog.reports import markup
from varuna_capslog.reports.markup import Markup
from varuna_capslog.reports.memory import draw_stage_peaks, shows_capacity
from varuna_capslog.reports.run import MeasuredPeaks, RunRecord, Shapes, shapes_of
from varuna_capslog.reports.style import byte_unit
from varuna_capslog.reports.wording import UNKNOWN, percent

__all__ = ["Rehearsal", "peak_parts", "size_text"]

_PICTURE = "stage-memory.png"

Rehearsal = Callable[[Config, Plan, Mapping[str, Sequence[int]]], list[int]]
"""(config, plan, input shapes) -> peak bytes by stage; raises CapslogError where it cannot predict them."""


def peak_parts(run: RunRecord, folder: Path, rehearse: Rehearsal | None) -> list[Markup]:
    """Return picture and table; draw `stage-memory.png` where there is a prediction or a measurement.

    rehearse: as for `write_report`.
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
    draw_stage_peaks(folder / _PICTURE, predicted, measured, capacity, anew)
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
    """Describe the numbers, and the input size that each of them holds for."""
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
    """Return the shapes that the plan's predictions hold for, those of its profile; None where it has none."""
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
