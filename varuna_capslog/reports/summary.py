"""The head of a report: the run in one table, and its stages with the layers each of them holds.

`page` calls it. It only puts the content of the files into words; a fact that is in no file is left out.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping
from importlib import metadata

from varuna_capslog.base.units import format_bytes
from varuna_capslog.base.version import __version__
from varuna_capslog.plans.plan import Plan
from varuna_capslog.profiles.record import Profile
from varuna_capslog.reports import markup
from varuna_capslog.reports.changes import changes_in_short
from varuna_capslog.reports.goodput import account_of
from varuna_capslog.reports.markup import Markup
from varuna_capslog.reports.run import RunRecord
from varuna_capslog.reports.wording import UNKNOWN, duration, moment, plain, plural, significant

__all__ = ["stage_parts", "summary_parts"]

_PARAMETER_WIDTH = {"float64": 8, "float32": 4, "bfloat16": 4, "float16": 4}
"""Bytes of one parameter by the profile's dtype; 16 bits mean autocast, which leaves parameters in float32."""
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
    model = (run.plan.model if run.plan else None) or (run.profile.model if run.profile else None)
    rows = {"Model": model or UNKNOWN}
    if run.config is not None:
        rows["Workload"] = markup.code(run.config.workload)
    if run.plan is not None or run.profile is not None:
        layers = run.plan.num_layers if run.plan is not None else run.profile.num_layers if run.profile else 0
        rows["Layers"] = str(layers)
    if run.profile is not None and (parameters := _parameters(run.profile)) is not None:
        rows["Parameters"] = parameters
    return rows


def _parameters(profile: Profile) -> str | None:
    """Return number and bytes of the parameters, each counted once however many layers use it; None where the bytes of
    a layer are not known.
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
    """Yield a short text for each condition of a profile; digests and long lists serve programs only."""
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
