"""`capslog plan`: where to cut, for a config, an ordinary module, or an existing profile."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from varuna_capslog.base import fields
from varuna_capslog.base.errors import CapslogError, DoesNotFit
from varuna_capslog.commands import shared
from varuna_capslog.commands.help import INFERENCE, MODEL, SEARCH
from varuna_capslog.commands.questions import (
    PlannerFlags,
    Profiles,
    costs_of,
    keys_of,
    question_of,
    read_profiles,
    settled,
)
from varuna_capslog.commands.shared import option, print_table

if TYPE_CHECKING:
    from varuna_capslog.config.settings import Config
    from varuna_capslog.planners.seconds import Link
    from varuna_capslog.planning.simulation import AgainstKeeping
    from varuna_capslog.plans.plan import Plan
    from varuna_capslog.profiles.record import Profile
    from varuna_capslog.schedules import RunShape

__all__ = ["plan", "print_treatments"]


# -- Memory of a plan as `capslog plan` and `train` show it: the layers that each stage keeps, recomputes and
#    offloads, the time that this costs, and the picture of every rank's memory over one step.


def print_treatments(plan: Plan, run: RunShape, profile: Profile | None = None, link: Link | None = None) -> None:
    """Print a row per stage, unless all stages keep everything. If the profile has seconds, also print how much longer
    the step and each stage take than if they kept everything; if it has the bytes of actions, the bytes that travel to
    the host tier and back.

    run: of the whole plan; used for stages whose memory the plan leaves open. link: between ranks and to the host
    tier.
    """
    from varuna_capslog.planning.simulation import against_keeping, treatments
    from varuna_capslog.plans.parts import spans_of

    device = "cpu" if profile is None else str(profile.conditions.get("device", "cpu"))
    comparison = None if profile is None else against_keeping(profile, plan, run, link)
    rows = []
    for number, treatment in enumerate(treatments(plan, run, device)):
        away = [spans_of(treatment.offloaded)] if treatment.offloaded else []
        away += [f"inputs of {spans_of(treatment.inputs_offloaded)}"] if treatment.inputs_offloaded else []
        away += [f"moments of {spans_of(treatment.moments_away)}"] if treatment.moments_away else []
        away += [f"moments of {spans_of(treatment.moments_elsewhere)} (replica)"] if treatment.moments_elsewhere else []
        again = [spans_of(treatment.recomputed)] if treatment.recomputed else []
        again += [f"{', '.join(part.parts)} of {spans_of([(part.first, part.end)])}" for part in treatment.in_parts]
        rows.append([str(number), spans_of(treatment.kept), ", ".join(again), ", ".join(away)])
        timed = comparison is not None and any(comparison.stage_seconds)
        rows[-1].append(_more(comparison.stage_seconds[number]) if comparison is not None and timed else "")
    if not any(again or away for _, _, again, away, _ in rows):
        return
    headings = ("stage", "kept", "recomputed", "offloaded", "against keeping all")
    title = "what becomes of the layers between forward and backward"
    print_table(title, headings, rows, left=(1, 2, 3), notes=[] if comparison is None else _notes(comparison))


def _notes(comparison: AgainstKeeping) -> list[str]:
    from varuna_capslog.base.units import format_bytes
    from varuna_capslog.reports.markup import duration, percent, plural

    step, keeping = comparison.step.step_seconds, comparison.keeping.step_seconds
    more = (
        "as long as"
        if comparison.seconds <= 0
        else f"{_more(comparison.seconds)} ({percent(comparison.seconds / keeping)}) against"
    )
    count = plural(comparison.step.num_microbatches, "microbatch", "es")
    notes = [f"step of {count}: {duration(step)}, {more} keeping everything"]
    if comparison.moved_bytes is not None and any(comparison.moved_bytes):
        each = ", ".join(
            f"rank {rank} {format_bytes(size)}" for rank, size in enumerate(comparison.moved_bytes) if size
        )
        total = format_bytes(sum(comparison.moved_bytes))
        notes.append(f"{total} travel to the host tier in each step, and as much back: {each}")
    return notes


def _more(seconds: float) -> str:
    from varuna_capslog.reports.markup import duration

    return "0 s" if seconds == 0 else f"{'+' if seconds > 0 else '-'}{duration(abs(seconds))}"


def draw_plan(path: Path, plan: Plan, profile: Profile, run: RunShape, link: Link | None = None) -> Sequence[str]:
    """Draw one step of a plan: each rank's list of actions over time, and the bytes of the rank against its capacity.

    Returns sentences on what could not be counted or drawn. Raises CapslogError where the profile has no seconds.
    """
    from varuna_capslog.planning.simulation import simulate_plan
    from varuna_capslog.reports.step import Limits, draw_simulation, simulation_title

    try:
        step = simulate_plan(profile, plan, recompute=run.recompute, run=run, link=link)
    except CapslogError as error:
        raise CapslogError(f"{path} cannot be drawn: {error}; or write the plan as .json") from error
    title = simulation_title(step, plan, profile)
    draw_simulation(path, title, step, Limits.of(step, plan, profile), vector=False)
    return step.notes


# -- `capslog plan --for inference`: where to cut a model that is served. Refuses options of training.


_KEYS = ("pipeline.devices", "pipeline.capacity", "profile.device", "train.microbatch_size")
"""Keys that a plan for inference may set."""
_SERVING = {"inference": "exact", "prefill": "throughput", "decode": "throughput"}
"""Purpose of serving -> planner: for the smallest peak, or for the fastest slowest stage (prefill, next token)."""


def check_purpose(flags: PlanFlags) -> bool:
    """Return True for a plan for inference. Raises CapslogError: an unknown purpose, or flags of another purpose."""
    from varuna_capslog.base import fields

    fields.refuse_unknown([flags.purpose], ("training", *_SERVING), "purpose of --for")
    if flags.purpose == "training":
        for name in ("batch", "dtype", "cache"):
            if getattr(flags, name) is not None:
                raise CapslogError(f"--{name} goes with --for inference")
        return False
    training_options = {f"--{name}": getattr(flags, name) for name in ("profile", "memory", "minibatch", "numerics")}
    for name in [
        *(name for name, value in training_options.items() if value),
        *sorted(set(keys_of(flags.overrides)) - set(_KEYS)),
    ]:
        raise CapslogError(f"{name} belongs to plans of training; leave it out with --for {flags.purpose}")
    if flags.planner not in (None, _SERVING[flags.purpose]):
        raise CapslogError(
            f"--planner {flags.planner} does not go with --for {flags.purpose}, which is planned by "
            f"{_SERVING[flags.purpose]}; leave it out"
        )
    if flags.estimate is False:
        raise CapslogError(f"--for {flags.purpose} estimates, and never measures; leave --measure out")
    if flags.model is None:
        reason = "a CONFIG describes a training" if flags.config is not None else "no model is given"
        raise CapslogError(f"--for {flags.purpose} plans for a model of --model or --hf, but {reason}")
    return True


def plan_for_inference(flags: PlanFlags) -> tuple[Plan, Config, Profile]:
    """Return the plan with its config and profile, and print its assumptions on standard error."""
    from varuna_capslog.base import units
    from varuna_capslog.config.reading import section
    from varuna_capslog.model.inference_model import InferenceModel
    from varuna_capslog.model.model_workload import ModelSection
    from varuna_capslog.planning.playing import stage_seconds
    from varuna_capslog.planning.problem import Problem
    from varuna_capslog.planning.solve import solve
    from varuna_capslog.profiles.conditions import DECODE_SECONDS
    from varuna_capslog.profiling.inference import Served, decoding, estimate_inference

    decodes, batch = flags.purpose == "decode", flags.batch or 1
    config = question_of(replace(flags, sequence=None), None, None)
    devices = config.pipeline.devices
    size = config.train.microbatch_size if "train.microbatch_size" in keys_of(flags.overrides) else batch
    if batch % size:
        raise CapslogError(f"train.microbatch_size={size} does not divide --batch {batch}; choose a size that does")
    settings = section(ModelSection, config.model, "model")
    if flags.folder is not None:
        serving_arguments = {"trains": False, "sequence": flags.sequence, "dtype": flags.dtype}
        settings = settings.model_copy(update={"arguments": settings.arguments | serving_arguments})
    device, _, kind = (config.profile.device or "cpu").partition(":")
    cache = None if flags.cache is None else units.parse_bytes(flags.cache, "--cache")
    model = InferenceModel(settings, size, flags.dtype, flags.sequence)
    profile = estimate_inference(model, Served(size, device, kind, cache))
    if decodes and DECODE_SECONDS not in profile.conditions:
        why = profile.conditions.get("decode", "its layers cache nothing that is known, so that there is no next token")
        raise CapslogError(f"--for decode of {model.name}: {why}; choose --for inference or prefill")
    priced = decoding(profile) if decodes else profile
    plan = solve(Problem.of_serving(priced, devices, batch, config.pipeline.capacity), _SERVING[flags.purpose])
    if priced is not profile:  # the seconds of a plan's stages are those of a prefill
        pairs = zip(plan.stages, stage_seconds(profile, plan.stages).forward, strict=True)
        stages = tuple(replace(stage, seconds=seconds) for stage, seconds in pairs)
        plan = replace(plan, stages=stages, profile_digest=profile.digest)
    shared.say(_assumptions(profile, batch, config.pipeline.capacity), err=True)
    return plan, config, profile


def _assumptions(profile: Profile, batch: int, capacity: int | list[int] | None) -> str:
    from varuna_capslog.base.units import format_bytes
    from varuna_capslog.profiles.conditions import CACHE_BYTES

    conditions = profile.conditions
    kind = f":{conditions['gpu']}" if "gpu" in conditions else ""
    caches = conditions[CACHE_BYTES]
    holding = sum(1 for size in caches if size)
    cached = f"{format_bytes(sum(caches))} of caches for each, in {holding} layers" if holding else "no caches"
    length = "" if conditions["sequence"] is None else f" of {conditions['sequence']} tokens"
    limit = "without a limit of memory" if capacity is None else "within its capacity"
    return (
        f"capslog: inference estimated for {conditions['device']}{kind}, {limit}: {conditions['dtype']}, {batch} "
        f"sequence(s){length} together, {conditions['microbatch_size']} in a forward, {cached}"
    )


# -- `capslog plan`


@dataclass(frozen=True)
class PlanFlags(PlannerFlags):
    """The command line of `plan`."""

    profile: Profiles = None
    numerics: Annotated[
        str | None,
        option(
            "Tolerance of the kernels that budget may choose for a layer: same (equal bits), close (1e-5) or loose "
            "(1e-2). By estimates.",
            "numerics of CONFIG, or same",
            metavar="[same|close|loose]",
            panel=SEARCH,
        ),
    ] = None
    purpose: Annotated[
        str,
        option(
            "Purpose of the plan: training, or inference of --model or --hf; prefill and decode: inference whose "
            "slowest stage is as quick as possible.",
            "training",
            "--for",
            metavar="PURPOSE",
            panel=MODEL,
        ),
    ] = "training"
    batch: Annotated[int | None, option("Sequences that are served together.", "1", min=1, panel=INFERENCE)] = None
    dtype: Annotated[
        str | None,
        option("Type of weights and caches: float32, bfloat16 or float16.", "the model's own", panel=INFERENCE),
    ] = None
    cache: Annotated[
        str | None,
        option(
            "Bytes that every attention layer caches for one token, such as 4KiB; known for a Hugging Face model.",
            "nothing",
            panel=INFERENCE,
        ),
    ] = None
    output: Annotated[
        Path | None, shared.output_option("File for the plan; a .png draws each rank's memory over time.")
    ] = None


@shared.options_of(PlanFlags)
def plan(flags: PlanFlags) -> None:
    """Find where to cut a model into stages that fit. Exit status 3 when nothing fits; the plan is still written."""
    flags = settled(flags)
    if check_purpose(flags):
        chosen_plan, config, profile = plan_for_inference(flags)
    else:
        chosen_plan, config, profile = _fastest(flags)
    _show(chosen_plan, config, profile, flags)
    if chosen_plan.fits is False:
        raise DoesNotFit("; ".join(chosen_plan.notes))
    for note in chosen_plan.notes:
        shared.say(f"note: {note}", err=True)
    if (blocks := chosen_plan.units.blocks) not in (None, config.num_blocks):
        shared.say(
            f"note: a run of this plan needs train.accumulation_blocks={blocks}, a constant of the run", err=True
        )


def _fastest(flags: PlanFlags) -> tuple[Plan, Config, Profile]:
    """Return the plan for the profile, or for several profiles the fastest that fits, with its config and profile."""
    if flags.numerics is not None:
        fields.choice(flags.numerics, "--numerics", ("same", "close", "loose"))
        if flags.profile:
            raise CapslogError("--numerics lets planner budget choose variants by runs of its own; leave --profile out")
    profiles: Sequence[Profile | None] = read_profiles(flags.profile, flags) or [None]
    answers = [_planned(flags, profile, len(profiles) > 1) for profile in profiles]
    return min(answers, key=lambda answer: (answer[0].fits is False, answer[0].step_seconds or math.inf))


def _planned(flags: PlanFlags, profile: Profile | None, several: bool) -> tuple[Plan, Config, Profile]:
    """Return the plan for the profile (None: made for the config or model), with its config and profile.

    several: True for one of several profiles, each for another microbatch size and the same samples of a step.
    """
    from varuna_capslog.config import defaults
    from varuna_capslog.planners import JOINT
    from varuna_capslog.start.prepare import plan_run

    size = profile.conditions.get("microbatch_size", 1) if several and profile is not None else None
    more = {"numerics": flags.numerics, "train.microbatch_size": size}
    config = question_of(flags, flags.planner, profile, **more)
    if several and config.pipeline.planner != JOINT:
        raise CapslogError("several profiles are a choice of microbatch size, which only planner joint makes; give one")
    sized = (
        flags.config is not None or flags.minibatch is not None or "train.minibatch_size" in keys_of(flags.overrides)
    )
    if several and not sized:
        raise CapslogError("several profiles are for the same samples of a step: give --minibatch SIZE")
    if flags.numerics is not None and config.pipeline.planner != defaults.FASTEST:
        raise CapslogError(f"--numerics lets planner {defaults.FASTEST} choose variants; name no other planner")
    config, profile, memo = costs_of(flags, config, profile)
    return plan_run(config, profile, memo=memo), config, profile


def _show(plan: Plan, config: Config, profile: Profile, flags: PlanFlags) -> None:
    """Write or draw the plan where -o is given, and print it."""
    from varuna_capslog.planners.seconds import Link
    from varuna_capslog.plans.plan import write_plan
    from varuna_capslog.schedules import RunShape

    run, link = RunShape.of_config(config), Link.of_config(config)
    if flags.output is not None and flags.output.suffix.lower() == ".png":
        for note in draw_plan(flags.output, plan, profile, run, link):
            shared.say(f"note: {note}", err=True)
    elif flags.output is not None:
        write_plan(flags.output, plan)
    if flags.as_json:
        shared.print_json(plan.to_json())
    else:
        shared.print_plan(plan, profile, memory=False)
        if plan.purpose == "training":
            print_treatments(plan, run, profile, link)
