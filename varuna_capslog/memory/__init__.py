"""From a profile to the peak of any stage: one memory model per file, each with its equation.

Planners ask a model for stage costs and for the schedules it describes. A model never answers for a schedule it does
not describe: there is no number without a model.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

from varuna_capslog.errors import CapslogError
from varuna_capslog.memory import additive, composition, inflight
from varuna_capslog.memory.costs import NEVER, RunShape, StageCosts
from varuna_capslog.profiles.record import Profile
from varuna_capslog.schedules import SCHEDULES

__all__ = ["AUTO", "MEMORY_MODELS", "NEVER", "MemoryModel", "RunShape", "StageCosts", "best_model"]


class MemoryModel(NamedTuple):
    """What a memory model offers.

    stage_costs: from a profile and a run to the bytes of every stage. Raises CapslogError naming what the profile
        lacks for it.
    gap: from (schedule, recompute, stage_inputs) to None, or to the sentence that says why it does not describe this.
    """

    stage_costs: Callable[[Profile, RunShape], StageCosts]
    gap: Callable[[str, bool, str], str | None]


MEMORY_MODELS = {
    "additive": MemoryModel(additive.stage_costs, additive.gap),
    "composition": MemoryModel(composition.stage_costs, composition.gap),
} | {
    name: MemoryModel(functools.partial(inflight.stage_costs, name), functools.partial(inflight.gap, name))
    for name in SCHEDULES
}

AUTO = "auto"
"""Stands for `best_model`."""


def best_model(profile: Profile, run: RunShape) -> str:
    """Return the name of the most exact model that a profile can feed for a run.

    That is the model of the run's schedule where the profile has the observations it needs, and else `additive`, which
    every profile can feed; whether additive describes the run its `gap` says.
    """
    try:
        MEMORY_MODELS[run.schedule].stage_costs(profile, run)
    except (CapslogError, KeyError):
        return "additive"
    return run.schedule
