"""`capslog plan`: where to cut, for a config, an ordinary module, or a profile that was taken before."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from varuna_capslog.base import fields
from varuna_capslog.base.errors import CapslogError, DoesNotFit
from varuna_capslog.commands import shared
from varuna_capslog.commands.ordinary_model import keys_of, settled
from varuna_capslog.commands.plan_inference import check_purpose, plan_for_inference
from varuna_capslog.commands.plan_stages import draw_plan, print_treatments
from varuna_capslog.commands.questions import PlannerFlags, Profiles, costs_of, question_of, read_profiles
from varuna_capslog.commands.shared import option

if TYPE_CHECKING:
    from varuna_capslog.config.settings import Config
    from varuna_capslog.plans.plan import Plan
    from varuna_capslog.profiles.record import Profile

__all__ = ["PlanFlags", "plan"]


@dataclass(frozen=True)
class PlanFlags(PlannerFlags):
    """The command line of `plan`."""

    profile: Profiles = None
    numerics: Annotated[
        str | None,
        option(
            "How far the results of layers may be from those as configured, for variants that budget chooses: same "
            "(bits), close (1e-5) or loose (1e-2). By estimates.",
            "numerics of CONFIG, or same",
            metavar="[same|close|loose]",
        ),
    ] = None
    purpose: Annotated[
        str,
        option(
            "What the plan is for: training, or inference, of --model or --hf.", "training", "--for", metavar="PURPOSE"
        ),
    ] = "training"
    batch: Annotated[int | None, option("Inference: sequences that are served together.", "1", min=1)] = None
    dtype: Annotated[
        str | None,
        option("Inference: of weights and caches: float32, bfloat16 or float16.", "the model's own"),
    ] = None
    cache: Annotated[
        str | None,
        option(
            "Inference: what every layer that attends caches for one token, such as 4KiB; a Hugging Face model says it "
            "itself.",
            "nothing",
        ),
    ] = None
    output: Annotated[
        Path | None, shared.output_option("File for the plan; a .png draws each rank's memory over time.")
    ] = None


@shared.options_of(PlanFlags)
def plan(flags: PlanFlags) -> None:
    """Choose the cuts. Exit status 3 when nothing fits (the plan is written all the same)."""
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
    """Return the plan for the only profile, or the fastest that fits of several, with its config and profile."""
    if flags.numerics is not None:
        fields.choice(flags.numerics, "--numerics", ("same", "close", "loose"))
        if flags.profile:
            raise CapslogError("--numerics lets planner budget choose variants by runs of its own; leave --profile out")
    profiles: Sequence[Profile | None] = read_profiles(flags.profile, flags) or [None]
    answers = [_planned(flags, profile, len(profiles) > 1) for profile in profiles]
    return min(answers, key=lambda answer: (answer[0].fits is False, answer[0].step_seconds or math.inf))


def _planned(flags: PlanFlags, profile: Profile | None, several: bool) -> tuple[Plan, Config, Profile]:
    """Return the plan for the profile, or for that of the config or model, with its config and profile.

    several: the profile is one of several, each for another size of microbatches, and the same samples of a step.
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
