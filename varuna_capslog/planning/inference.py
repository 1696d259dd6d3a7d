"""Plans for inference: the same planner and the same verdict on costs of forwards alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.memory.inference import INFERENCE
from varuna_capslog.planning.search import plan
from varuna_capslog.plans.plan import Plan
from varuna_capslog.profiles.record import Profile
from varuna_capslog.schedules import RunShape

__all__ = ["plan_inference"]


def plan_inference(
    profile: Profile,
    devices: int,
    batch: int,
    capacity: int | Sequence[int] | None = None,
    cuts: Sequence[int] | None = None,
) -> Plan:
    """The cuts with the smallest largest peak, or the given ones, as `planning.search.plan` finds and judges them.

    Args:
        profile: of inference.
        batch: sequences that are served together, a multiple of the profile's microbatch size.
        capacity, cuts: as there.

    Raises:
        CapslogError: as there; a batch that is no multiple; a profile of training.
    """
    size = int(profile.conditions.get("microbatch_size", 1))
    if batch % size:
        raise CapslogError(
            f"a batch of {batch} is not a multiple of the microbatch size {size}; choose a microbatch that divides it"
        )
    run = RunShape(batch // size, recompute=False, microbatch_size=size)
    found = plan(profile, devices, "exact", INFERENCE, capacity, run, cuts=cuts)
    return dataclasses.replace(found, purpose=INFERENCE, schedule=None)
