"""The results of a run, which a report shows first: curves over its steps, scores, and the model's predictions.

`compared_curves` draws the curves of several runs over one another.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from varuna_capslog.reports import markup
from varuna_capslog.reports.changes import change_kind, event_words
from varuna_capslog.reports.markup import UNKNOWN, Box, Markup, plural
from varuna_capslog.reports.memory import COLOURS
from varuna_capslog.reports.plots import (
    ALARM,
    BLUE,
    GREY,
    LINES,
    Curve,
    Mark,
    Plot,
    curves,
    matrix,
    thinned,
)
from varuna_capslog.reports.run import (
    MOST_CONFUSED,
    SAME_OBJECT,
    DetectionCurves,
    Evaluation,
    Event,
    RunRecord,
    Sample,
    StepLine,
    for_page,
    one_box_per_object,
)

__all__ = ["compared_curves", "evaluation_parts", "main_parts", "prediction_parts", "training_parts"]


_STEP = "optimizer step"
_LOGARITHMIC = frozenset({"loss", "loss parts", "other parts", "gradient norm"})
_MOST_MARKS = 100
_QUIET = frozenset({"checkpoint", "notice", "join", "launch", "start", "stop"})
"""Kinds of events that get no line through the curves: they change nothing, or their change has its own line."""


# -- Curves of the training


def training_parts(run: RunRecord) -> list[Markup]:
    """Return the curve of the loss, and folded the curves of its parts, the gradient norm and the learning rate."""
    if not run.steps:
        return [missing(run, "curves", "metrics.jsonl", "step")]
    marks = [mark for event in run.events if (mark := _mark(event, run.steps[-1].step)) is not None][-_MOST_MARKS:]
    first, last = run.steps[0].step, run.steps[-1].step
    caption = f"{plural(len(run.steps), 'step')}, from step {first} to step {last}.{_mean_text(run.steps)}"
    if marks:
        caption += (
            " Lines are the run's events; a worker lost in red, one that left in amber, one that joined in green."
        )
    caption += " Drag a box to zoom, double-click to go back."
    shown = curves(_loss_curves(run.steps), _STEP, "loss", marks)
    more = [_curve_figure(name, lines, marks) for name, lines in _more_curves(run)]
    parts = [markup.figure(shown, "Curve of the loss over the steps", caption)]
    return parts + ([markup.folded("Parts of the loss, gradient norm and learning rate", more)] if more else [])


def main_parts(steps: Sequence[StepLine]) -> tuple[list[str], list[str]]:
    """Return the names of the loss parts that get a colour, at most as many as there are colours, and the other names.
    A name that ends in a number (`loss_bbox_3`, the auxiliary losses of DETR) gets none if the bare name exists, too.
    """
    names = list(dict.fromkeys(name for line in steps for name in line.parts))
    main = [name for name in names if (bare := re.sub(r"[._]\d+$", "", name)) == name or bare not in names]
    chosen = main[: len(LINES)]
    return chosen, [name for name in names if name not in chosen]


def _curve(
    steps: Sequence[StepLine], name: str, of: Callable[[StepLine], float | None], colour: str, width: float = 1.8
) -> Curve:
    x, y, _ = thinned([line.step for line in steps], [of(line) for line in steps])
    return Curve(name, x, y, colour, width)


def _mean_text(steps: Sequence[StepLine]) -> str:
    size = thinned([line.step for line in steps], [None] * len(steps))[2]
    return f" Each point is the mean of {size} steps." if size > 1 else ""


def _loss_curves(steps: Sequence[StepLine]) -> list[Curve]:
    """Return the loss of each step, and for a long run also its mean over a window of a fiftieth of the run."""
    each = _curve(steps, "loss", lambda line: line.loss, BLUE)
    half = len(each.x) // 100
    if half < 2 or None in each.y:
        return [each]
    values = [value for value in each.y if value is not None]
    smooth = []
    for place in range(len(values)):
        # windows shrink towards both ends so that they stay centred, and do not raise a falling loss there
        reach = min(place, len(values) - 1 - place, half)
        smooth.append(statistics.fmean(values[place - reach : place + reach + 1]))
    mean = Curve(
        f"mean of {2 * half + 1} {'steps' if len(each.x) == len(steps) else 'points'}", each.x, smooth, BLUE, 2.2
    )
    return [
        each._replace(colour=GREY, width=0.9, name="loss of each point" if len(each.x) < len(steps) else "loss"),
        mean,
    ]


def _more_curves(run: RunRecord) -> list[tuple[str, list[Curve]]]:
    """Return the plots besides the loss: (name of the y axis, curves)."""
    steps = run.steps
    main, others = main_parts(steps)
    losses = [name for name in main if name.startswith("loss")] or main
    plots = []
    for title, names in (("loss parts", losses), ("other parts", [name for name in main if name not in losses])):
        lines = [_curve(steps, name, _part(name), colour) for name, colour in zip(names, LINES, strict=False)]
        if title == "loss parts":
            lines = [_curve(steps, name, _part(name), "rgba(138,148,158,0.5)", 0.8) for name in others[:8]] + lines
        plots.append((title, lines))
    plots.append(("gradient norm", [_curve(steps, "gradient norm", lambda line: line.grad_norm, BLUE)]))
    clip = run.config.train.clip_norm if run.config is not None else None
    if clip:
        ends = [float(steps[0].step), float(steps[-1].step)]
        plots[-1][1].append(Curve(f"clipped to {clip:g}", ends, [clip, clip], ALARM, 1.2, "dash"))
    plots.append(("learning rate", [_curve(steps, "learning rate", lambda line: line.lr, BLUE)]))
    return [(name, lines) for name, lines in plots if any(value is not None for line in lines for value in line.y)]


def _part(name: str) -> Callable[[StepLine], float | None]:
    return lambda line: line.parts.get(name)


def _curve_figure(name: str, lines: Sequence[Curve], marks: Sequence[Mark] = ()) -> Markup:
    shown = curves(lines, _STEP, name, marks, logarithmic=name in _LOGARITHMIC, height=260)
    return markup.figure(shown, f"Curves of the {name} over the steps", "")


def _mark(event: Event, last_step: int) -> Mark | None:
    """Return an event's line through the curves; None where it has none."""
    if event.step is None or event.step > last_step or event.kind in _QUIET:
        return None
    colours = {"morph": COLOURS.get(change_kind(event), GREY), "error": ALARM, "lost": ALARM}
    # a change of devices stands before its first step, its cause after the step before
    place = event.step + {"morph": -0.5, "lost": 0.5}.get(event.kind, 0)
    return Mark(place, colours.get(event.kind, GREY), f"{event.kind}: {event_words(event)}")


# -- Scores


def evaluation_parts(run: RunRecord) -> list[Markup]:
    """Return curves and tables of the scores; of a detector also precision by recall and confusion of its classes."""
    best = run.best
    if best is None or not best.scores:
        return [missing(run, "scores", "evaluations.jsonl", "scores")]
    last, names = run.evaluations[-1], _curve_names(best)
    if len(run.evaluations) > 1:
        lines = [_score_curve(run, name, name, colour) for name, colour in zip(names, LINES, strict=False)]
        caption = f"{plural(len(run.evaluations), 'evaluation')} on the validation data."
        shown = curves(lines, _STEP, "score", logarithmic=False, height=280)
        parts = [markup.figure(shown, f"Curves of {' and '.join(names)} over the steps", caption)]
    else:
        parts = [markup.paragraph(f"One evaluation, at step {last.step}: there is no curve to draw.")]
    scores = {**best.scores, **last.scores}
    rows = [[name, score_text(best.scores.get(name)), score_text(last.scores.get(name))] for name in scores]
    headings = ["score", f"best {names[0]} (step {best.step})", f"last (step {last.step})"]
    parts.append(markup.table("score-table", headings, rows))
    if best.per_class or last.per_class:
        parts += _class_parts(best, last, names[0])
        parts += _detection_parts(run)
    return parts


def score_text(value: float | None) -> str:
    """Return a score with three digits after the point."""
    return UNKNOWN if value is None else f"{value:.3f}"


def _curve_names(best: Evaluation) -> list[str]:
    first = next(iter(best.scores))
    return [name for name in dict.fromkeys((first, "AP", "AP50", "val_loss")) if name in best.scores][:2]


def _score_curve(run: RunRecord, score: str, name: str, colour: str) -> Curve:
    steps = [float(evaluation.step) for evaluation in run.evaluations]
    return Curve(name, steps, [evaluation.scores.get(score) for evaluation in run.evaluations], colour)


def _class_parts(best: Evaluation, last: Evaluation, score: str) -> list[Markup]:
    highest = max((value for value in best.per_class.values() if value is not None), default=0.0) or 1.0
    classes, rows = {**best.per_class, **last.per_class}, []
    for name in classes:
        value = best.per_class.get(name)
        bar = "" if value is None else markup.cell_bar(value / highest)
        rows.append([name, score_text(value), bar, score_text(last.per_class.get(name))])
    headings = ["class", f"{score} (step {best.step})", "", f"last (step {last.step})"]
    parts = [markup.table("class-table", headings, rows, left=(0, 2))]
    if any(value is None for value in classes.values()):
        parts.append(markup.paragraph(f"{UNKNOWN} stands for a class without an object in the validation data."))
    return parts


_MOST_CLASS_CURVES = 10


def _detection_parts(run: RunRecord) -> list[Markup]:
    """Return precision by recall and the confusion matrix of a detector's last evaluation."""
    record = run.curves
    if record is None:
        return [
            markup.note(f"No precision by recall and no confusion of classes: {run.reason('detection-curves.json')}.")
        ]
    steps = [evaluation.step for evaluation in run.evaluations if evaluation.scores.get("AP") == record.AP]
    of = f"at step {steps[-1]}" if steps else "of unknown step"
    known = {name: column for name, column in record.precision.items() if column is not None}
    parts = []
    if known:
        lowest = sorted(known, key=lambda name: statistics.fmean(known[name]))[:_MOST_CLASS_CURVES]
        caption = f"Precision by recall at IoU 0.5, evaluation {of}; a class's mean precision is its AP50."
        if len(lowest) < len(known):
            caption += f" Of {len(known)} classes, the {len(lowest)} with the lowest AP50, and the mean of all."
        parts.append(markup.figure(_precision_plot(record, known, lowest), "Curves of precision by recall", caption))
    if (confusion := record.confusion) is None:
        return [*parts, markup.note(f"No confusion of classes: the data has more than {MOST_CONFUSED}.")]
    caption = (
        f"Confusion of the classes, evaluation {of}: how many objects of each true class were detected as which, "
        f"among detections with a score of at least {confusion.score:g} that overlap by an IoU of at least "
        f"{confusion.overlap:g}. Colour: share of the row."
    )
    drawn = matrix(confusion.classes, ("nothing", "missed"), confusion.counts)
    return [*parts, markup.figure(drawn, "Matrix of true and detected classes", caption)]


def _precision_plot(record: DetectionCurves, known: Mapping[str, Sequence[float]], lowest: Sequence[str]) -> Plot:
    colours = [LINES[number % len(LINES)] for number in range(len(lowest))]
    dashes = ["solid" if number < len(LINES) else "dot" for number in range(len(lowest))]
    lines = [
        Curve(name, record.recall, known[name], colour, 1.1, dash)
        for name, colour, dash in zip(lowest, colours, dashes, strict=True)
    ]
    mean = [statistics.fmean(column) for column in zip(*known.values(), strict=True)]
    return curves(
        [Curve("mean of all classes", record.recall, mean, GREY, 3.0), *lines], "recall", "precision", top=1.02
    )


# -- Predictions of the trained model


_MOST_PICTURES = 24
_MOST_PICTURE_BYTES = 500_000
"""Bytes of all pictures in base64: the whole page is to stay below 6 MB."""
_THRESHOLD = 0.5
_CLASS_COLOURS = ("#c2334d", "#0a72b5", "#b35f10", "#8a2ba8", "#0b7d6b", "#a6237a", "#7a6a00", "#3d55c9")


def prediction_parts(run: RunRecord) -> list[Markup]:
    """Return the samples' pictures, one box per object, with a slider for the lowest score that is shown."""
    parts = [markup.preformatted(text) for text in run.texts]
    made, used, left_out = list[Markup](), 0, 0
    names = sorted({detection.name for sample in run.samples for detection in sample.boxes})
    pictures: list[Sample | Path] = [*run.samples, *run.predictions]
    for number, picture in enumerate(pictures):
        sample = picture if isinstance(picture, Sample) else _embedded(picture)
        if sample is None or number >= _MOST_PICTURES or used + len(sample.jpeg) > _MOST_PICTURE_BYTES:
            left_out += 1
            continue
        used += len(sample.jpeg)
        boxes = [
            Box(seen.box, seen.name, seen.score, _CLASS_COLOURS[names.index(seen.name) % len(_CLASS_COLOURS)])
            for seen in reversed(one_box_per_object(sample.boxes))
        ]
        made.append(markup.picture(sample.jpeg, sample.width, sample.height, sample.name, boxes))
    if not made and not parts:
        return [markup.note("No sample predictions: predictions/ is missing or holds no PNG and no text.")]
    if made:
        parts.append(markup.gallery(made, _THRESHOLD if run.samples else None))
    if run.samples:
        parts.append(
            markup.paragraph(
                f"Of boxes that overlap by an IoU above {SAME_OBJECT:g} only the one with the highest score is shown."
            )
        )
    if left_out:
        parts.append(markup.paragraph(f"{len(made)} of {len(pictures)} pictures in predictions/ are shown."))
    return parts


def _embedded(path: Path) -> Sample | None:
    """Return a picture file, made small enough for the page; None where the file holds no picture."""
    from PIL import Image

    try:
        with Image.open(path) as picture:
            shown, jpeg = for_page(picture)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return None
    return Sample(shown.width, shown.height, (), jpeg, path.stem)


def missing(run: RunRecord, content: str, file: str, entry: str) -> Markup:
    """Return a note that a file of the run has no such content, with the reason."""
    return markup.note(f"No {content}: {run.problems.get(file, f'{file} holds no {entry} yet')}.")


# -- Curves of several runs over one another


def compared_curves(runs: Mapping[str, RunRecord]) -> list[Markup]:
    """Return the curves that a report shows of one run, with one line per run in each plot."""
    coloured = [(name, run, LINES[number % len(LINES)]) for number, (name, run) in enumerate(runs.items())]
    of_steps: dict[str, Callable[[StepLine], float | None]] = {
        "loss": lambda line: line.loss,
        "gradient norm": lambda line: line.grad_norm,
        "learning rate": lambda line: line.lr,
        "samples/s": lambda line: line.samples_per_second,
    }
    plots = {
        title: [_curve(run.steps, name, of, colour) for name, run, colour in coloured if run.steps]
        for title, of in of_steps.items()
    }
    scores = dict.fromkeys(
        score for run in runs.values() if run.best and run.best.scores for score in _curve_names(run.best)
    )
    scored = {score: [_score_curve(run, score, name, colour) for name, run, colour in coloured] for score in scores}
    plots = {"loss": plots.pop("loss"), **scored, **plots}
    return [
        _curve_figure(title, lines)
        for title, lines in plots.items()
        if any(value is not None for line in lines for value in line.y)
    ]
