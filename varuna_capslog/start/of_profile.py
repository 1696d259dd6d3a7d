"""A plan for a profile that is there already, without a config: `capslog plan --profile` and `capslog.plan(profile)`.

Nothing here imports torch, nor pydantic, which takes longer than the plan.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from varuna_capslog.base import fields
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.config import defaults
from varuna_capslog.memory.inference import is_for_inference
from varuna_capslog.planners import AUTOMATIC, EVERY_PLANNER, JOINT, with_microbatches
from varuna_capslog.planners.seconds import Link
from varuna_capslog.planning.automatic import automatic_plan
from varuna_capslog.planning.layerwise import judged_layerwise_plan
from varuna_capslog.planning.playing import with_step_seconds
from varuna_capslog.planning.search import plan as search
from varuna_capslog.planning.search import plan_of_equals
from varuna_capslog.plans.plan import Plan
from varuna_capslog.profiles.record import Profile
from varuna_capslog.schedules import SCHEDULES, RunShape
from varuna_capslog.start.default_planner import default_planner

__all__ = ["microbatches_of", "plan_of_profile", "run_of_profile"]


_WITHOUT_TIME = (
    "planned for the smallest peak by planner exact, since the profile has not the seconds and runs of its layers; "
    "profile again with capslog profile for the shortest step that fits"
)


def run_of_profile(profile: Profile, memory: str) -> RunShape:
    """How a step is run where nothing but a profile, and perhaps the name of a schedule's memory model, says it."""
    return RunShape.of_conditions(profile.conditions, memory if memory in SCHEDULES else defaults.SCHEDULE)


def microbatches_of(profile: Profile, minibatch: int) -> int:
    """Microbatches of a step of so many samples. Raises CapslogError where they do not divide it."""
    size = profile.conditions.get("microbatch_size", 1)
    if minibatch % size:
        raise CapslogError(f"a minibatch of {minibatch} samples is not a multiple of the microbatch size {size}")
    return int(minibatch // size)


def plan_of_profile(
    profile: Profile,
    devices: int,
    planner: str | None = None,
    memory: str | None = None,
    capacity: int | Sequence[int] | None = None,
    minibatch: int | None = None,
    link: Link | None = None,
    limit_seconds: float | None = None,
) -> Plan:
    """The plan for one pipeline.

    Args:
        planner, memory: default: those of a config without the keys.
        capacity: bytes of every device, or one number each; None: no limit.
        minibatch: samples of a step; None: not known, and not needed by every planner.
        limit_seconds: when planner `budget` is to end its search, and `auto` asks no further planner.

    Raises:
        CapslogError: as `planning.search.plan`; a minibatch that is no whole number of microbatches.
    """
    memory, planner = memory or defaults.MEMORY, planner or defaults.PLANNER
    fields.refuse_unknown([planner], [*EVERY_PLANNER, JOINT, AUTOMATIC, defaults.PLANNER], "planner")
    devices = fields.whole(devices, "devices", minimum=1)
    run = run_of_profile(profile, memory)
    if minibatch is not None:
        size, count = profile.conditions.get("microbatch_size"), microbatches_of(profile, minibatch)
        run = dataclasses.replace(run, num_microbatches=count, microbatch_size=size)
    notes: tuple[str, ...] = ()
    if planner == defaults.PLANNER:
        planner = default_planner(profile, memory)
        if planner == defaults.SMALLEST and not is_for_inference(profile) and memory == defaults.MEMORY:
            notes = (_WITHOUT_TIME,)
    if planner == AUTOMATIC:
        found = automatic_plan(profile, devices, memory, capacity, run, link, limit_seconds)
    elif planner == JOINT:
        found = plan_of_equals(profile, devices, memory, capacity, with_microbatches(run, devices), link)
    elif planner == defaults.FASTEST:
        found = judged_layerwise_plan(profile, devices, planner, memory, capacity, run, link, limit_seconds)
    else:
        found = search(profile, devices, planner, memory, capacity, run, link)
    found = dataclasses.replace(found, notes=(*found.notes, *notes))
    return with_step_seconds(profile, found, run.settled(), link)
