"""The report's page: its sections in reading order, results first and internals folded at the end, and the comparison
of several runs. Only `report/` is written, and files of other names there stay.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path

from varuna_capslog.base import files
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.base.units import format_bytes
from varuna_capslog.base.version import __version__
from varuna_capslog.plans.plan import Plan
from varuna_capslog.profiles.record import Profile
from varuna_capslog.reports import markup
from varuna_capslog.reports.changes import account_of, change_parts, changes_in_short, event_words, goodput_parts
from varuna_capslog.reports.markup import UNKNOWN, Markup, duration, moment, plain, plural, significant
from varuna_capslog.reports.memory import Rehearsal, layer_parts, peak_parts
from varuna_capslog.reports.results import (
    compared_curves,
    evaluation_parts,
    missing,
    prediction_parts,
    training_parts,
)
from varuna_capslog.reports.run import RunRecord, read_run
from varuna_capslog.reports.step import busy_parts, step_parts

__all__ = ["write_comparison", "write_report"]


# -- The run in two tables, its results and what was run, and its stages with the layers each of them holds.
#
# A fact that is in no file is left out.


_PARAMETER_WIDTH = {"float64": 8, "float32": 4, "bfloat16": 4, "float16": 4, "bf16-weights": 2}
"""Bytes of one parameter by the profile's dtype; bfloat16 and float16 mean autocast, with parameters of float32."""
_MOST_NAMES = 40
"""Most names of layers per stage that the table lists in full; of more names it lists the first and the last."""
_MOST_CHARACTERS = 80
"""Limit for a condition of the profile; of a longer list, such as the histogram of input sizes, the length is shown."""
_MUCH_WAITING = 0.1
"""Share of the time in steps above which the page gives advice."""


def result_parts(run: RunRecord) -> list[Markup]:
    """Return the results in one table: best score, last loss, steps, speed, and the share of productive time."""
    return [markup.facts("result-table", _results(run))]


def summary_parts(run: RunRecord) -> list[Markup]:
    """Return what was run: the model and its placement, and the files that could not be read."""
    rows = {**_model(run), **_placement(run), **_versions(run)}
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
    """Return number and bytes of the parameters, each counted once; None where a layer's bytes are not known."""
    sizes = [layer.parameter_bytes for layer in profile.layers]
    if None in sizes:
        return None
    repeated = sum(shared.bytes * (len(shared.layers) - 1) for shared in profile.shared)
    total = sum(size for size in sizes if size is not None) - repeated
    width = _PARAMETER_WIDTH.get(str(profile.conditions.get("dtype")).removeprefix("torch."))
    if "weights" in profile.conditions:
        width = None  # frozen parameters have 16 bits, those with masters 32
    return format_bytes(total) if width is None else f"{total // width:,} ({format_bytes(total)})"


def _placement(run: RunRecord) -> dict[str, str]:
    rows: dict[str, str] = {}
    plan, config = run.plan, run.config
    if config is not None:
        pipeline, train = config.pipeline, config.train
        rows["Devices x replicas"] = f"{pipeline.devices} x {pipeline.replicas} ({config.device})"
        schedule = (plan and plan.schedule) or pipeline.schedule
        reruns = pipeline.recompute or schedule == "varuna"
        if plan is not None:  # the memory that its stages state counts
            kept = [stage.memory for stage in plan.stages]
            reruns = any(reruns if memory is None else any(part.recomputes for part in memory) for memory in kept)
        recompute = "activation checkpointing" if reruns else "no activation checkpointing"
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


def _results(run: RunRecord) -> dict[str, str]:
    rows: dict[str, str] = {}
    if (best := run.best) is not None and best.scores:
        (name, value), *other_scores = best.scores.items()
        also = "".join(f", {other_name} {score:.3f}" for other_name, score in other_scores if other_name == "AP50")
        rows[f"Best {name}"] = f"{value:.3f}{also} at step {best.step}"
    times = [event.time for event in run.events if event.time is not None]
    began = {"Began": f"{moment(min(times))} UTC"} if times else {}
    if not run.steps:
        return {**rows, "Steps": "none recorded", **began}
    rows["Final loss"] = UNKNOWN if run.steps[-1].loss is None else f"{run.steps[-1].loss:.4f}"
    rows["Steps"] = f"{run.steps[-1].step:,}"
    seconds = [line.step_seconds for line in run.steps if line.step_seconds is not None]
    if seconds:
        rows["Time in steps"] = f"{duration(sum(seconds))}, median step {duration(run.median_step_seconds())}"
    if (rate := run.samples_per_second) is not None:
        rows["Speed"] = f"{significant(rate)} samples/s (median of the last 100 steps)"
    if (account := account_of(run)) is not None:
        rows["Productive"] = account.sentence()
    if (share := run.waited_share()) is not None:
        rows["Waiting for data"] = _waiting(share)
    if (changes := changes_in_short(run)) is not None:
        rows["Changes"] = changes
    return {**rows, **began}


def _waiting(share: float) -> str:
    waiting = f"{100 * share:.1f} % of the time in steps, on the rank that waited longest"
    return waiting if share < _MUCH_WAITING else f"{waiting}; more data.workers or data.prefetch may help"


def _versions(run: RunRecord) -> dict[str, str]:
    rows: dict[str, str] = {}
    if run.profile is not None and run.profile.conditions:
        source = f"{run.profile.source}: " if run.profile.source else ""
        conditions = {key: entry for key, entry in run.profile.conditions.items() if not key.endswith("digest")}
        rows["Profile"] = source + ", ".join(markup.in_words(conditions, _MOST_CHARACTERS))
    try:
        torch = f", torch {metadata.version('torch')}"
    except metadata.PackageNotFoundError:
        torch = ""
    rows["Report made with"] = f"varuna-capslog {__version__}, Python {platform.python_version()}{torch}"
    return rows


def _listed(names: list[str]) -> Markup:
    if len(names) > _MOST_NAMES:
        half = _MOST_NAMES // 2
        names = [*names[:half], f"… {len(names) - 2 * half} more …", *names[-half:]]
    return markup.code(", ".join(names))


# -- The report's page


_MOST_EVENTS = 60
_OLD_PICTURES = ("stage-memory", "generations", "schedule", "layer-memory", "training", "scores", "prediction-??")
"""Files that reports of earlier versions wrote beside their page."""


def write_report(run: RunRecord | Path, rehearse: Rehearsal | None = None) -> Path:
    """Write `report/index.html`, one file with everything inside, into the folder of a run, and return its path.

    If a file of the run is missing or unreadable, the section that needs it says so. An earlier report
    in the folder is replaced; other files there stay.

    Args:
        run: a record that was read, or its folder.
        rehearse: predicts the peaks of a plan for given input shapes (`api.training.peaks_of_stages`), for a run whose
            peaks were measured at other sizes than the plan predicts; None: peaks of such a run are not compared.

    Raises:
        CapslogError: no such folder, no file of a run in it, or the report cannot be written.
    """
    run = run if isinstance(run, RunRecord) else read_run(run)
    results: tuple[_Section, ...] = (
        ("results", "Results", result_parts),
        ("training", "Training", training_parts),
        ("evaluation", "Evaluation", evaluation_parts),
        ("predictions", "Sample predictions", prediction_parts),
        ("summary", "What was run", summary_parts),
        ("goodput", "Where the time went", goodput_parts),
        ("changes", "Changes of the devices", change_parts),
        ("memory", "Peak memory of each stage", lambda run: peak_parts(run, rehearse)),
    )
    internals: tuple[_Section, ...] = (
        ("stages", "Stages and their layers", stage_parts),
        ("schedule", "Schedule of one step", step_parts),
        ("busy", "Work of each rank", busy_parts),
        ("layers", "Memory of each layer", layer_parts),
        ("events", "Events", _events),
    )
    parts = [
        markup.section(anchor, heading, content, folded)
        for folded, sections in ((False, results), (True, internals))
        for anchor, heading, content_of in sections
        if (content := content_of(run))
    ]
    title = f"{run.model or 'model'} · {run.run_dir.resolve().name}"
    return _write(run, "index.html", markup.page(title, "Report of a pipeline training run", parts))


_Section = tuple[str, str, Callable[[RunRecord], list[Markup]]]
"""Anchor, heading and content of a section."""


def write_comparison(runs: Sequence[RunRecord]) -> Path:
    """Write `report/comparison.html` into the folder of the first of at least two runs, and return its path: their
    results beside each other, and their curves over one another. Raises as `write_report`.
    """
    paths = [run.run_dir.resolve() for run in runs]
    short = [path.name for path in paths]
    names = short if len(set(short)) == len(short) else [f"{path.parent.name}/{path.name}" for path in paths]
    if len(set(names)) < len(names):
        names = [f"{number}: {name}" for number, name in enumerate(names, 1)]
    named = dict(zip(names, runs, strict=True))
    columns = [{**_results(run), **_model(run), **_placement(run)} for run in runs]
    rows = [
        [key, *(column.get(key, UNKNOWN) for column in columns)] for key in dict.fromkeys(k for c in columns for k in c)
    ]
    table = markup.table("comparison-table", ["", *names], rows, left=range(len(names) + 1), most_beside=1)
    sections = [
        markup.section("results", "Results beside each other", [table]),
        markup.section("curves", "Curves over one another", compared_curves(named)),
    ]
    return _write(runs[0], "comparison.html", markup.page(" · ".join(names), "Comparison of training runs", sections))


def _write(run: RunRecord, name: str, document: str) -> Path:
    folder = run.run_dir / "report"
    files.refuse_link(folder)
    try:
        folder.mkdir(exist_ok=True)
        for pattern in _OLD_PICTURES:
            for old in folder.glob(f"{pattern}.png"):
                old.unlink()
    except OSError as error:
        raise CapslogError(f"{folder} cannot be written: {error.strerror or error}; check its permissions") from error
    files.write_text(folder / name, document)
    return folder / name


def _events(run: RunRecord) -> list[Markup]:
    if not run.events:
        return [missing(run, "events", "events.jsonl", "event")]
    shown = list(run.events)
    parts = []
    if len(shown) > _MOST_EVENTS:
        shown = [event for event in shown if event.kind != "checkpoint"][-_MOST_EVENTS:]
        parts.append(markup.paragraph(f"{len(shown)} of {len(run.events)} events; checkpoints are left out here."))
    rows = [
        [moment(event.time), event.kind, plain(event.step), plain(event.generation), event_words(event)]
        for event in shown
    ]
    headings = ("time (UTC)", "kind", "step", "generation", "what happened")
    return [markup.table("event-table", headings, rows, left=(1, 4)), *parts]
