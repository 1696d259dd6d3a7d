"""Input sizes in a report: which ones a predicted and a measured peak hold for, and what may be compared.

`peaks` calls it. A plan predicts the largest input that a run can meet; a peak is measured on the inputs that came.
Where these differ, the peaks are predicted anew for the measured sizes, by a function that the caller of the report
gives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.config.settings import Config
from varuna_capslog.reports.run import MeasuredPeaks, RunRecord, Shapes, shapes_of

__all__ = ["Comparable", "Rehearsal", "comparable_peaks", "predicted_input", "size_text"]

Rehearsal = Callable[[Config, Sequence[int], Mapping[str, Sequence[int]]], list[int]]
"""(config, cuts, input shapes) -> peak bytes by stage; raises CapslogError where it cannot tell."""


@dataclass(frozen=True)
class Comparable:
    """What to compare the measured peaks with.

    bytes: predicted for the sizes that were measured, by stage; None where that is not known.
    anew: True where these are no numbers of the plan but were predicted for the report.
    reason: why there is nothing to compare with, as a sentence without its stop.
    """

    bytes: list[int] | None
    anew: bool = False
    reason: str | None = None


def predicted_input(run: RunRecord) -> Shapes | None:
    """The shapes that the plan's predictions hold for: those of its profile. None where the profile has none."""
    return None if run.profile is None else shapes_of(dict(run.profile.conditions).get("input"))


def comparable_peaks(
    run: RunRecord, predicted: Sequence[int], measured: MeasuredPeaks, rehearse: Rehearsal | None
) -> Comparable:
    """The predictions that hold for the measured sizes: the plan's own, or those of a rehearsal at these sizes.

    Where the sizes of either are not known (older runs) the plan's are compared.
    """
    largest = predicted_input(run)
    others = [shapes for shapes in measured.inputs if shapes is not None and shapes != largest]
    if largest is None or not others:
        return Comparable(list(predicted))
    if run.config is None or run.plan is None:
        return Comparable(None, reason=f"the run's settings are not known: {run.reason('config.yaml')}")
    if rehearse is None or run.config.engine != "capslog":
        return Comparable(None, reason="no rehearsal at these sizes can be made")
    found: dict[str, list[int]] = {}
    try:
        for shapes in others:
            text = size_text(shapes)
            found[text] = found.get(text) or rehearse(run.config, run.plan.cuts, shapes)
    except (CapslogError, OSError) as error:
        return Comparable(None, reason=str(error))
    anew = [
        predicted[stage] if shapes in (None, largest) else found[size_text(shapes)][stage]
        for stage, shapes in enumerate(measured.inputs)
    ]
    return Comparable(anew, anew=True)


def size_text(shapes: Shapes | None) -> str:
    """Shapes for people, such as images 8x3x72x72."""
    if shapes is None:
        return "a size that is not recorded"
    return ", ".join(f"{name} {'x'.join(map(str, sizes)) or 'scalar'}" for name, sizes in shapes.items())
