"""`capslog lint`: judges another system's layout for a model, beside our own plan."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from varuna_capslog.base import files
from varuna_capslog.base.errors import CapslogError, DoesNotFit
from varuna_capslog.commands import shared
from varuna_capslog.commands.help import MODEL, OUTPUT, SEARCH
from varuna_capslog.commands.questions import (
    QuestionFlags,
    costs_of,
    former_option,
    keys_of,
    question_of,
    read_profiles,
    settled,
)
from varuna_capslog.commands.shared import option

if TYPE_CHECKING:
    from varuna_capslog.config.settings import Config
    from varuna_capslog.planning.layouts import Layout
    from varuna_capslog.planning.simulation import RankStep
    from varuna_capslog.plans.plan import Plan
    from varuna_capslog.profiles.record import Profile
    from varuna_capslog.profiling.estimate import Memo

__all__ = ["lint"]


@dataclass(frozen=True)
class LintFlags(QuestionFlags):
    """The command line of `lint`."""

    config: Annotated[
        Path | None,
        typer.Argument(metavar="LAYOUT", help="A layout such as 'Et*4|t*4L', M-M|M*- or 16,16,16,13, or a file."),
    ] = None
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[CONFIG] [KEY=VALUE]", help="A run's config file, and keys to change, such as train.epochs=10."
        ),
    ] = None
    profile: shared.ProfileFile = None
    system: Annotated[
        str | None,
        option(
            "System of the layout: megatron, primus, verl, slime, torchtitan, automodel, diffusion-pipe, vllm, "
            "vllm-ascend or sglang.",
            "recognised by the text",
            "--from",
            metavar="SYSTEM",
            panel=MODEL,
        ),
    ] = None
    block_names: Annotated[
        str | None,
        option("Name of the repeated blocks, such as 'transformer.h.*'.", "from the names of the layers", panel=MODEL),
    ] = None
    planner: Annotated[
        str | None, option("Planner of our plan, one that cuts.", "throughput", metavar="NAME", panel=SEARCH)
    ] = None
    plot: Annotated[Path | None, option("Picture of both: bytes and seconds of every rank.", False, panel=OUTPUT)] = (
        None
    )


@shared.options_of(LintFlags)
def lint(flags: LintFlags) -> None:
    """Judge a layout of another system for a model, beside our fastest cuts for the same run: one schedule, and all
    activations kept unless pipeline.recompute says otherwise. Exit status 3 if it is illegal or does not fit.
    """
    from varuna_capslog.planning.chunks import chunk_bound
    from varuna_capslog.planning.export import names_in
    from varuna_capslog.planning.export.layer_counts import block_letters
    from varuna_capslog.planning.layouts import count_blocks, faults_of_cuts, layout_cuts, read_layout
    from varuna_capslog.planning.problem import Problem
    from varuna_capslog.start.prepare import plan_run

    if flags.config is None:
        raise CapslogError("no layout is given: capslog lint LAYOUT, such as 'Et*4|t*4L', 16,16,16,13 or a file")
    text, words = _pasted([str(flags.config), *(flags.overrides or ())])
    text = files.read_text(text) if os.path.isfile(text) else text
    config_file, overrides = shared.words_of(None, words)
    flags = settled(replace(flags, config=config_file, overrides=overrides))
    (profile,) = read_profiles([flags.profile] if flags.profile else None, flags) or (None,)
    config, profile, memo = costs_of(
        flags, question_of(flags, flags.planner or "throughput", profile), profile, choose=False
    )
    names, ranks = names_in(profile), config.pipeline.devices
    num_blocks, num_predictions = count_blocks(names, flags.block_names), names.num_predictions
    letters = block_letters(names, flags.block_names)
    layout = read_layout(text, num_blocks, ranks, flags.system, num_predictions, letters)
    layout = replace(layout, faults=layout.faults or tuple(faults_of_cuts(layout, names, flags.block_names)))
    if layout.faults:
        if flags.as_json:
            shared.print_json(_record(layout, None, None))
        raise DoesNotFit(f"the {layout.system} layout is illegal: {'; '.join(layout.faults)}")
    chunks = len(layout.counts) // ranks
    run_config = _of_one_run(config, min(chunks, profile.num_layers // ranks), keys_of(flags.overrides))
    cuts = layout_cuts(layout, names, flags.block_names)
    theirs = _published(run_config, profile, memo, cuts)
    ours = plan_run(run_config, profile, memo=memo)
    plans = {f"{layout.system} layout": theirs, f"planner {ours.planner}": ours}
    steps = {name: _rank_steps(plan, run_config, profile) for name, plan in plans.items()}
    if flags.plot is not None:
        _draw(flags.plot, theirs, steps, run_config, profile)
    if flags.as_json:
        shared.print_json(_record(layout, theirs, ours))
    else:
        bound = chunk_bound(Problem.of_config(run_config, profile)) if all(layout.counts) else None
        notes = _notes(layout, theirs, ours, bound) + _prediction_notes(layout, num_predictions)
        _print(layout, theirs, ours, list(steps.values()), notes)
    if theirs.fits is False:
        raise DoesNotFit(f"the layout {_fit(theirs)}")


def _pasted(words: list[str]) -> tuple[str, list[str]]:
    """Return the layout at the beginning of a command line (text, or options of another system), and the other words.

    Raises CapslogError for other options that `lint` does not have.
    """
    from varuna_capslog.planning.layouts import system_of

    end, is_option = 1, re.compile(r"--[\w-]+")
    while words[0].startswith("--") and end < len(words):
        if not (words[end].startswith("--") or words[end].isdigit() or is_option.fullmatch(words[end - 1])):
            break
        end += 1
    if end > 1:
        system_of(" ".join(words[:end]))
    if unknown := next((word for word in words[end:] if word.startswith("-")), None):
        moved = former_option(unknown)
        raise CapslogError(moved or f"there is no option {unknown}; see capslog lint --help")
    return " ".join(words[:end]), words[end:]


def _of_one_run(config: Config, chunks: int, keys: dict[str, Any]) -> Config:
    """Return the config for both plans. Where `keys` leave them open, the schedule is 1f1b, or interleaved for several
    stages on a rank, and all activations are kept.
    """
    changes: dict[str, Any] = {"stages_per_rank": chunks}
    if "pipeline.schedule" not in keys:
        changes["schedule"] = "1f1b" if chunks == 1 else "interleaved"
    if "pipeline.recompute" not in keys:
        changes["recompute"] = False
    return config.model_copy(update={"pipeline": config.pipeline.model_copy(update=changes)})


def _published(config: Config, profile: Profile, memo: Memo | None, cuts: list[int]) -> Plan:
    """Return the judged plan of a layout's cuts; a stage without layers has the cut of the next stage."""
    from varuna_capslog.start.prepare import plan_run

    ranks = config.pipeline.devices
    filled = {stage % ranks for stage, (first, end) in enumerate(pairwise((*cuts, profile.num_layers))) if first < end}
    if without := sorted(set(range(ranks)) - filled):
        raise CapslogError(
            f"rank {without[0]} of the layout holds no layer; judge the layout without it, on fewer devices"
        )
    changed = {"cuts": cuts, "planner": "exact", "stages_per_rank": len(cuts) // ranks}
    pipeline = config.pipeline.model_copy(update=changed)
    return plan_run(config.model_copy(update={"pipeline": pipeline}), profile, memo=memo)


def _rank_steps(plan: Plan, config: Config, profile: Profile) -> list[RankStep]:
    """Return the simulated step of each rank, with the peak from the plan's verdict where it has one."""
    from varuna_capslog.planners.seconds import Link
    from varuna_capslog.planning.simulation import simulate_plan
    from varuna_capslog.schedules import RunShape

    run = RunShape.of_config(config).settled()
    step = simulate_plan(profile, plan, recompute=run.recompute, run=run, link=Link.of_config(config))
    known = {rank: size.bytes for rank, size in enumerate(plan.ranks) if size.bytes is not None}
    steps = (replace(row, peak_bytes=known.get(row.rank, row.peak_bytes)) for row in step.rank_steps)
    return sorted(steps, key=lambda row: row.rank)


def _print(layout: Layout, theirs: Plan, ours: Plan, steps: Sequence[Sequence[RankStep]], notes: Sequence[str]) -> None:
    """Print a row per rank. steps: for each of the two plans, a step per rank."""
    from varuna_capslog.base.units import unit_of
    from varuna_capslog.reports.markup import plural

    ranks, rows = len(steps[0]), []
    unit, name = unit_of(max(step.peak_bytes or 0 for of_plan in steps for step in of_plan))
    width = sum(step.pipeline == 0 for step in steps[0])
    for rank in range(ranks):
        row = [str(rank), "+".join(map(str, layout.counts[rank % width :: width]))]
        for plan, of_plan in zip((theirs, ours), steps, strict=True):
            row += _cells(plan, of_plan[rank], unit)
        rows.append(row)
    title = f"{layout.system} layout of {plural(ranks, 'rank')} beside planner {ours.planner}"
    peak = f"peak\n{name}"
    headings = ("rank", "blocks", "layers", peak, "busy", "our\nlayers", peak, "busy")
    shared.print_table(title, headings, rows, left=(2, 5), notes=notes)


def _cells(plan: Plan, step: RankStep, unit: int) -> list[str]:
    from varuna_capslog.plans.parts import ranges_of, spans_of
    from varuna_capslog.reports.markup import duration

    layers = ", ".join(spans_of(ranges_of(plan.stages[stage].numbers)) for stage in step.stages)
    peak = "unknown" if step.peak_bytes is None else f"{step.peak_bytes / unit:.2f}"
    return [layers, peak, duration(step.busy_seconds)]


def _fit(plan: Plan) -> str:
    """Return a clause: the plan fits or not, and how much the worst rank lacks."""
    from varuna_capslog.base.units import format_bytes

    shortfall = plan.shortfall
    if plan.fits or shortfall is None:
        return "fits" if plan.fits else f"has unknown bytes: {'; '.join(plan.notes)}"
    where = f"rank {shortfall.rank}" if shortfall.stage is None else f"rank {plan.stages[shortfall.stage].rank}"
    return f"does not fit: {where} lacks {format_bytes(shortfall.bytes)}, headroom included"


def _notes(layout: Layout, theirs: Plan, ours: Plan, bound: float | None) -> list[str]:
    from varuna_capslog.base.units import format_bytes
    from varuna_capslog.reports.markup import duration

    notes = [f"schedule {theirs.schedule}; the layout {_fit(theirs)}; ours {_fit(ours)}"]
    if theirs.step_seconds and ours.step_seconds:
        change = _change(ours.step_seconds, theirs.step_seconds)
        times = f"{duration(theirs.step_seconds)}, ours {duration(ours.step_seconds)} ({change})"
        notes.append(f"step: {times}" + ("" if bound is None else f"; no cuts take less than {duration(bound)}"))
    if theirs.peak_bytes and ours.peak_bytes:
        change = _change(ours.peak_bytes, theirs.peak_bytes)
        notes.append(
            f"largest peak: {format_bytes(theirs.peak_bytes)}, ours {format_bytes(ours.peak_bytes)} ({change})"
        )
    return notes


def _prediction_notes(layout: Layout, num_predictions: int) -> list[str]:
    """Return notes where layout and model have different layers for multi-token prediction."""
    from varuna_capslog.reports.markup import plural

    count = plural(max(len(layout.prediction_stages), num_predictions), "layer") + " for multi-token prediction"
    if layout.prediction_stages and not num_predictions:
        return [f"{count} (m) of the layout: the model here has none, and neither plan counts it"]
    if num_predictions and not layout.prediction_stages:
        return [
            f"{count} of the model: the layout does not say where, so the last stage has it; without it: --model-arg "
            "num_nextn_predict_layers=0"
        ]
    return []


def _change(ours: float, theirs: float) -> str:
    from varuna_capslog.reports.markup import percent

    return "equal" if abs(ours / theirs - 1) < 5e-4 else percent(ours / theirs - 1)


def _record(layout: Layout, theirs: Plan | None, ours: Plan | None) -> dict[str, Any]:
    """Return fields for programs."""
    return {
        "system": layout.system,
        "blocks": list(layout.counts),
        "prediction_layers": len(layout.prediction_stages),
        "faults": list(layout.faults),
        "layout": None if theirs is None else theirs.to_json(),
        "ours": None if ours is None else ours.to_json(),
    }


def _draw(path: Path, theirs: Plan, steps: Mapping[str, Sequence[RankStep]], config: Config, profile: Profile) -> None:
    from varuna_capslog.reports.curves import draw_ranks
    from varuna_capslog.reports.markup import plural
    from varuna_capslog.reports.style import device_kind, title_of

    capacities = [rank.capacity_bytes for rank in theirs.ranks if rank.capacity_bytes is not None]
    devices = f"{plural(config.pipeline.devices, 'device')}{device_kind(profile.conditions, config.pipeline.speeds)}"
    title = title_of(f"A {next(iter(steps))}", profile.model, devices, f"schedule {theirs.schedule}")
    draw_ranks(path, title, steps, capacities)
