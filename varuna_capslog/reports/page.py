"""The report's page: its sections in reading order, each with its pictures, tables and missing facts. Only `report/` is
written, and files of other names there stay.
"""

from __future__ import annotations

import platform
import shutil
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from pathlib import Path

from varuna_capslog.base import files
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.base.units import format_bytes
from varuna_capslog.base.version import __version__
from varuna_capslog.plans.plan import Plan
from varuna_capslog.profiles.record import Profile
from varuna_capslog.reports import markup
from varuna_capslog.reports.changes import account_of, change_parts, changes_in_short, goodput_parts
from varuna_capslog.reports.curves import draw_scores, draw_training, main_parts
from varuna_capslog.reports.markup import UNKNOWN, Markup, duration, moment, plain, plural, significant
from varuna_capslog.reports.memory import Rehearsal, draw_layers, peak_parts
from varuna_capslog.reports.run import RunRecord, read_run
from varuna_capslog.reports.step import busy_parts, step_parts
from varuna_capslog.reports.titles import plan_title, title_of

__all__ = ["write_report"]


# -- The head of a report: the run in one table, and its stages with the layers each of them holds.
#
# A fact that is in no file is left out.


_PARAMETER_WIDTH = {"float64": 8, "float32": 4, "bfloat16": 4, "float16": 4, "bf16-weights": 2}
"""Bytes of one parameter by the profile's dtype; bfloat16 and float16 mean autocast, with parameters of float32."""
_MOST_NAMES = 40
"""Names of layers per stage that the table lists in full; of more it lists the first and the last."""
_MOST_CHARACTERS = 80
"""Limit for a condition of the profile; of a longer list, such as the histogram of input sizes, the length is shown."""
_MUCH_WAITING = 0.1
"""Share of the time in steps above which the page gives advice."""


def summary_parts(run: RunRecord) -> list[Markup]:
    """Return the summary: the model, its placement, duration and result, and the files that could not be read."""
    rows = {**_model(run), **_placement(run), **_course(run), **_results(run), **_versions(run)}
    if (account := account_of(run)) is not None:
        rows["Productive"] = account.sentence()
    notes = []
    if run.last_step is not None and run.last_step < run.steps[-1].step:
        notes.append(
            f"The last line written is of step {run.last_step}: the run went back to a checkpoint and has not come as "
            f"far again. Steps {run.last_step + 1} to {run.steps[-1].step} are shown as they were before that."
        )
    notes += [f"{problem}." for problem in run.problems.values() if "left out" in problem]
    if "config.yaml" in run.problems:
        notes.append(f"Settings are not shown: {run.reason('config.yaml')}.")
    return [markup.facts("summary-table", rows), *map(markup.note, notes)]


def stage_parts(run: RunRecord) -> list[Markup]:
    """Return the cut list, stage by stage, with the names of the layers."""
    plan, names = run.plan, run.layer_names
    if plan is None:
        return [markup.note(f"No stages are known: {run.reason('plan')}.")]
    rows = []
    for number, stage in enumerate(plan.stages):
        members = stage.numbers
        listed = UNKNOWN if names is None else _listed([names[index] for index in members])
        rows.append([str(number), ", ".join(map(str, stage.ranks)), stage.spans, str(len(members)), listed])
    cuts = markup.join("Cut list (first layer of each stage): ", markup.code(_cuts(plan)), ".")
    parts = [
        markup.paragraph(cuts),
        markup.table("stage-table", ("stage", "rank", "layers", "count", "names of the layers"), rows, left=(4,)),
    ]
    if names is None:
        why = "it describes another number of layers" if run.profile is not None else run.reason("profile.json")
        parts.append(markup.note(f"The layers have no names here: {why}."))
    elif plan.profile_digest and run.profile is not None and plan.profile_digest != run.profile.digest:
        parts.append(markup.note("The plan was made from another profile than the profile.json that lies there now."))
    return parts


def _cuts(plan: Plan) -> str:
    return "none, the stages are not one pipeline" if plan.cuts is None else str(list(plan.cuts))


def _model(run: RunRecord) -> dict[str, str]:
    rows = {"Model": run.model or UNKNOWN}
    if run.config is not None:
        rows["Workload"] = markup.code(run.config.workload)
    if run.plan is not None or run.profile is not None:
        layers = run.plan.num_layers if run.plan is not None else run.profile.num_layers if run.profile else 0
        rows["Layers"] = str(layers)
    if run.profile is not None and (parameters := _parameters(run.profile)) is not None:
        rows["Parameters"] = parameters
    return rows


def _parameters(profile: Profile) -> str | None:
    """Return number and bytes of the parameters, each counted once even if several layers use it; None where the bytes
    of a layer are not known.
    """
    sizes = [layer.parameter_bytes for layer in profile.layers]
    if None in sizes:
        return None
    again = sum(shared.bytes * (len(shared.layers) - 1) for shared in profile.shared)
    total = sum(size for size in sizes if size is not None) - again
    width = _PARAMETER_WIDTH.get(str(profile.conditions.get("dtype")).removeprefix("torch."))
    if "weights" in profile.conditions:
        width = None  # frozen ones have 16 bits, those with masters 32
    return format_bytes(total) if width is None else f"{total // width:,} ({format_bytes(total)})"


def _placement(run: RunRecord) -> dict[str, str]:
    rows: dict[str, str] = {}
    plan, config = run.plan, run.config
    if config is not None:
        pipeline, train = config.pipeline, config.train
        rows["Devices x replicas"] = f"{pipeline.devices} x {pipeline.replicas} ({config.device})"
        schedule = (plan and plan.schedule) or pipeline.schedule
        recompute = "recomputation" if pipeline.recompute or schedule == "varuna" else "no recomputation"
        rows["Schedule"] = f"{schedule}, {recompute}, stage inputs on the {pipeline.stage_inputs}"
        rows["Minibatch"] = (
            f"{plural(train.minibatch_size, 'sample')} in {plural(config.num_microbatches, 'microbatch', 'es')} of "
            f"{train.microbatch_size}, {train.types}"
        )
    if plan is not None:
        planner = plan.planner or "none, the cuts were given"
        search_text = "" if plan.search_seconds is None else f", found in {duration(plan.search_seconds)}"
        rows["Planner"] = f"{planner}{search_text}" + (
            f", memory model {plan.memory_model}" if plan.memory_model else ""
        )
        rows["Cuts"] = markup.code(_cuts(plan))
        generation = run.generation or 0
        if generation:
            rows["Plan"] = f"generation {generation}, the newest"
    return rows


def _course(run: RunRecord) -> dict[str, str]:
    times = [event.time for event in run.events if event.time is not None]
    rows = {"Began": f"{moment(min(times))} UTC"} if times else {}
    if not run.steps:
        return rows | {"Steps": "none recorded"}
    seconds = [line.step_seconds for line in run.steps if line.step_seconds is not None]
    rates = [line.samples_per_second for line in run.steps[-100:] if line.samples_per_second is not None]
    rows["Steps"] = f"{run.steps[-1].step:,}"
    if seconds:
        rows["Time in steps"] = f"{duration(sum(seconds))}, median step {duration(run.median_step_seconds())}"
    if (share := run.waited_share()) is not None:
        rows["Waiting for data"] = _waiting(share)
    if rates:
        rows["Speed at the end"] = f"{significant(sorted(rates)[len(rates) // 2])} samples/s"
    if (changes := changes_in_short(run)) is not None:
        rows["Changes"] = changes
    rows["Final loss"] = UNKNOWN if run.steps[-1].loss is None else f"{run.steps[-1].loss:.4f}"
    return rows


def _waiting(share: float) -> str:
    told = f"{100 * share:.1f} % of the time in steps, on the rank that waited longest"
    return told if share < _MUCH_WAITING else f"{told}; more data.workers or data.prefetch may help"


def _results(run: RunRecord) -> dict[str, str]:
    best = run.best
    if best is None or not best.scores:
        return {}
    (name, value), *others = best.scores.items()
    also = "".join(f", {other_name} {score:.3f}" for other_name, score in others if other_name == "AP50")
    return {f"Best {name}": f"{value:.3f}{also} at step {best.step}"}


def _versions(run: RunRecord) -> dict[str, str]:
    rows: dict[str, str] = {}
    if run.profile is not None and run.profile.conditions:
        source = f"{run.profile.source}: " if run.profile.source else ""
        rows["Profile"] = source + ", ".join(_conditions(run.profile.conditions))
    try:
        torch = f", torch {metadata.version('torch')}"
    except metadata.PackageNotFoundError:
        torch = ""
    rows["Report made with"] = f"varuna-capslog {__version__}, Python {platform.python_version()}{torch}"
    return rows


def _conditions(conditions: Mapping[str, object]) -> Iterator[str]:
    """Yield a short text for each condition of a profile; digests and long lists are for programs only."""
    for key, entry in conditions.items():
        if key.endswith("digest"):
            continue
        text = ", ".join(_conditions(entry)) if isinstance(entry, dict) else plain(entry)
        if not isinstance(entry, dict) and len(text) > _MOST_CHARACTERS:
            text = f"of {len(entry):,}" if isinstance(entry, (list, tuple)) else f"{text[:_MOST_CHARACTERS]}…"
        yield f"{key} {text}"


def _listed(names: list[str]) -> Markup:
    if len(names) > _MOST_NAMES:
        half = _MOST_NAMES // 2
        names = [*names[:half], f"… {len(names) - 2 * half} more …", *names[-half:]]
    return markup.code(", ".join(names))


# -- The report's page


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
    model = run.model or "model"
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
    title = title_of("Memory of each layer", run.model, "")
    if plan is not None:
        title = plan_title("Memory of each layer", plan, run.profile, run.schedule_text)
    draw_layers(folder / "layer-memory.png", title, layers, cuts)
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
    draw_training(folder / "training.png", title_of("Training", run.model, ""), run.steps, run.events, clip_norm)
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
        draw_scores(folder / "scores.png", title_of("Scores", run.model, ""), run.evaluations, curves)
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
