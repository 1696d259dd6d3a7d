"""The report's page: its sections in reading order, each with its pictures, tables and missing facts.

`capslog report` calls it. It writes only into `report/` and leaves files of other names there alone.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from varuna_capslog.base import files
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.reports import markup
from varuna_capslog.reports.busy import busy_parts
from varuna_capslog.reports.changes import change_parts
from varuna_capslog.reports.curves import draw_scores, draw_training, main_parts
from varuna_capslog.reports.goodput import goodput_parts
from varuna_capslog.reports.markup import Markup
from varuna_capslog.reports.memory import draw_layers
from varuna_capslog.reports.peaks import Rehearsal, peak_parts
from varuna_capslog.reports.run import RunRecord, read_run
from varuna_capslog.reports.step import step_parts
from varuna_capslog.reports.summary import stage_parts, summary_parts
from varuna_capslog.reports.wording import UNKNOWN, moment, plain, plural

__all__ = ["write_report"]

_PICTURES = frozenset(
    {"stage-memory.png", "generations.png", "schedule.png", "layer-memory.png", "training.png", "scores.png"}
)
_MOST_PREDICTIONS = 24
_MOST_EVENTS = 60
_PREDICTION = "prediction-"


def write_report(run: RunRecord | Path, rehearse: Rehearsal | None = None) -> Path:
    """Write `report/` into the folder of a run, index.html with its pictures beside it, and return the page's path.

    If a file of the run is missing or unreadable, the section that needs it says so. An earlier report
    in the folder is replaced; other files there stay.

    Args:
        run: a record that was read, or its folder.
        rehearse: predicts the peaks of a plan for given input shapes (`reporting.peaks_of_stages`), for a run whose
            peaks were measured at other sizes than the plan's predictions hold for; None: these are not compared then.

    Raises:
        CapslogError: no such folder, nothing in it that a run writes, or the report cannot be written.
    """
    run = run if isinstance(run, RunRecord) else read_run(run)
    folder = run.run_dir / "report"
    files.refuse_link(folder)
    try:
        folder.mkdir(exist_ok=True)
        # a picture that this report does not draw must not stay from an earlier one
        for old in folder.glob("*.png"):
            if old.name in _PICTURES or old.name.startswith(_PREDICTION):
                old.unlink()
    except OSError as error:
        raise CapslogError(f"{folder} cannot be written: {error.strerror or error}; check its permissions") from error
    sections: tuple[tuple[str, str, Callable[[RunRecord, Path], list[Markup]]], ...] = (
        ("summary", "Summary", lambda run, folder: summary_parts(run)),
        ("goodput", "Where the time went", lambda run, folder: goodput_parts(run)),
        ("stages", "Stages", lambda run, folder: stage_parts(run)),
        ("changes", "Changes of the devices", change_parts),
        ("memory", "Peak memory of each stage", lambda run, folder: peak_parts(run, folder, rehearse)),
        ("schedule", "Schedule of one step", step_parts),
        ("busy", "Work of each rank", lambda run, folder: busy_parts(run)),
        ("layers", "Memory of each layer", _layers),
        ("training", "Training", _training),
        ("evaluation", "Evaluation", _evaluation),
        ("predictions", "Sample predictions", _predictions),
        ("events", "Events", lambda run, folder: _events(run)),
    )
    model = (run.plan and run.plan.model) or (run.profile and run.profile.model) or "model"
    name = run.run_dir.resolve().name
    parts = [
        markup.section(anchor, heading, content) for anchor, heading, make in sections if (content := make(run, folder))
    ]
    document = markup.page(f"{model} · {name}", "Report of a pipeline training run", parts)
    path = folder / "index.html"
    files.write_text(path, document)
    return path


def _layers(run: RunRecord, folder: Path) -> list[Markup]:
    if run.profile is None:
        return [markup.note(f"No memory of layers is known: {run.reason('profile.json')}.")]
    layers = run.profile.layers
    plan = run.plan if run.plan is not None and run.plan.num_layers == len(layers) else None
    cuts = None if plan is None else plan.cuts
    draw_layers(
        folder / "layer-memory.png",
        [layer.name for layer in layers],
        [layer.isolated_bytes for layer in layers],
        [layer.added_bytes for layer in layers],
        cuts,
    )
    caption = (
        f"M_i is the peak of a stage that holds the layer alone, M_a what the layer adds to a stage that holds the one "
        f"before it; {run.profile.source or 'from a profile of unknown source'}."
    )
    if cuts is None:
        why = "it is for another number of layers" if run.plan is not None else run.reason("plan")
        why = why if plan is None else "its stages are not one pipeline in the order of the layers"
        caption += f" The plan's cuts are not drawn: {why}."
    else:
        caption += " Dashed lines are the plan's cuts."
    return [markup.figure("layer-memory.png", "Bars of the memory of each layer with the cuts", caption)]


def _training(run: RunRecord, folder: Path) -> list[Markup]:
    if not run.steps:
        return [_missing(run, "curves", "metrics.jsonl", "step")]
    clip_norm = run.config.train.clip_norm if run.config is not None else None
    draw_training(folder / "training.png", run.steps, run.events, clip_norm)
    shown, others = main_parts(run.steps)
    caption = f"{plural(len(run.steps), 'step')}, from step {run.steps[0].step} to step {run.steps[-1].step}."
    if shown:
        caption += " Loss parts as the workload names them."
    if others:
        caption += f" {plural(len(others), 'further part')} in grey (such as the same loss of earlier decoder layers)."
    if any(event.step is not None for event in run.events):
        caption += " The strip on top marks the run's events."
    if any(event.kind == "morph" and event.step is not None for event in run.events):
        caption += (
            " Lines through the plots are changes of the devices: a loss in red, a leave in amber, a join in green."
        )
    return [markup.figure("training.png", "Curves of loss, loss parts, gradient norm and learning rate", caption)]


def _evaluation(run: RunRecord, folder: Path) -> list[Markup]:
    best = run.best
    if best is None or not best.scores:
        return [_missing(run, "scores", "evaluations.jsonl", "scores")]
    parts = []
    last = run.evaluations[-1]
    first_name = next(iter(best.scores))
    curves = [name for name in dict.fromkeys((first_name, "AP", "AP50", "val_loss")) if name in best.scores][:2]
    if len(run.evaluations) > 1:
        draw_scores(folder / "scores.png", run.evaluations, curves)
        caption = f"{plural(len(run.evaluations), 'evaluation')} on the validation data; rings mark each score's best."
        parts.append(markup.figure("scores.png", f"Curves of {' and '.join(curves)} over steps", caption))
    else:
        parts.append(markup.paragraph(f"One evaluation, at step {last.step}: there is no curve to draw."))
    names = {**best.scores, **last.scores}
    rows = [[name, _score(best.scores.get(name)), _score(last.scores.get(name))] for name in names]
    headings = ["score", f"best {first_name} (step {best.step})", f"last (step {last.step})"]
    parts.append(markup.table("score-table", headings, rows))
    if best.per_class or last.per_class:
        highest = max((value for value in best.per_class.values() if value is not None), default=0.0) or 1.0
        classes = {**best.per_class, **last.per_class}
        rows = []
        for name in classes:
            value = best.per_class.get(name)
            bar = "" if value is None else markup.cell_bar(value / highest)
            rows.append([name, _score(value), bar, _score(last.per_class.get(name))])
        headings = ["class", f"{first_name} (step {best.step})", "", f"last (step {last.step})"]
        parts.append(markup.table("class-table", headings, rows, left=(0, 2)))
        if any(value is None for value in classes.values()):
            parts.append(markup.paragraph(f"{UNKNOWN} stands for a class without an object in the validation data."))
    return parts


def _predictions(run: RunRecord, folder: Path) -> list[Markup]:
    texts = [markup.preformatted(text) for text in run.texts]
    if not run.predictions:
        return texts or [markup.note("No sample predictions: predictions/ is missing or holds no PNG and no text.")]
    copies: dict[str, str] = {}
    for number, picture in enumerate(run.predictions[:_MOST_PREDICTIONS]):
        name = f"{_PREDICTION}{number:02d}.png"
        try:
            # copied, so that report/ alone is the whole report
            shutil.copyfile(picture, folder / name)
        except OSError as error:
            raise CapslogError(f"{picture} cannot be copied into {folder}: {error.strerror or error}") from error
        copies[name] = picture.stem
    parts = [*texts, markup.gallery(copies)]
    if len(run.predictions) > len(copies):
        parts.append(markup.paragraph(f"The first {len(copies)} of {len(run.predictions)} pictures in predictions/."))
    return parts


def _events(run: RunRecord) -> list[Markup]:
    if not run.events:
        return [_missing(run, "events", "events.jsonl", "event")]
    shown = list(run.events)
    parts = []
    if len(shown) > _MOST_EVENTS:
        shown = [event for event in shown if event.kind != "checkpoint"][-_MOST_EVENTS:]
        parts.append(markup.paragraph(f"{len(shown)} of {len(run.events)} events; checkpoints are left out here."))
    rows = [
        [moment(event.time), event.kind, plain(event.step), plain(event.generation), plain(dict(event.details))]
        for event in shown
    ]
    headings = ("time (UTC)", "kind", "step", "generation", "details")
    return [markup.table("event-table", headings, rows, left=(0, 1, 4)), *parts]


def _missing(run: RunRecord, content: str, file: str, entry: str) -> Markup:
    return markup.note(f"No {content}: {run.problems.get(file, f'{file} holds no {entry} yet')}.")


def _score(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.3f}"
