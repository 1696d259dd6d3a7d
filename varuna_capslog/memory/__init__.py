"""Memory models: the peak of any stage, from a profile. Each file has one model with its equation."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

from varuna_capslog.base import fields
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.memory import additive, composition, inference, inflight
from varuna_capslog.memory.costs import NEVER, StageCosts
from varuna_capslog.profiles.record import Profile
from varuna_capslog.schedules import RunShape

__all__ = ["AUTO", "MEMORY_MODELS", "NEVER", "StageCosts", "resolve"]


class MemoryModel(NamedTuple):
    """Functions of a memory model. stage_costs: bytes of every stage; raises CapslogError that names what the profile
    lacks. gap: None, or a sentence that says why the model does not describe the run, so that it gives no number.
    """

    stage_costs: Callable[[Profile, RunShape], StageCosts]
    gap: Callable[[RunShape], str | None]


MEMORY_MODELS = {
    "additive": MemoryModel(additive.stage_costs, functools.partial(additive.gap, "additive")),
    "composition": MemoryModel(composition.stage_costs, functools.partial(additive.gap, "composition")),
    # cut lists are searched with the fold's closed form; a list of actions contains all that the fold needs
    inference.INFERENCE: MemoryModel(inference.stage_costs, lambda run: None),
    inflight.RANKS: MemoryModel(functools.partial(inflight.stage_costs, inflight.RANKS), lambda run: None),
} | {
    name: MemoryModel(functools.partial(inflight.stage_costs, name), functools.partial(inflight.gap, name))
    for name in inflight.DESCRIBED
}

AUTO = "auto"
"""Stands for the most exact model that a profile can feed: that of the run's schedule (`ranks` for one that has no
model of its own) where the profile has the observations it needs; else `additive`, which every profile can feed
(whether it describes the run its `gap` says). A profile of inference has its own."""


def resolve(memory: str, profile: Profile, run: RunShape) -> tuple[str, StageCosts]:
    """Return the name and the costs of a memory model; `memory` is a name of MEMORY_MODELS, or AUTO. Raises
    CapslogError for another name, and where the profile lacks something that the named model needs.
    """
    fields.refuse_unknown([memory], [AUTO, *MEMORY_MODELS], "memory model")
    if inference.is_for_inference(profile):
        if memory not in (AUTO, inference.INFERENCE):
            raise CapslogError(
                f"memory model '{memory}' describes training, but the profile is of inference; leave --memory out"
            )
        memory = inference.INFERENCE
    if memory == AUTO:
        memory = inflight.model_of(run.schedule)
        try:
            return memory, MEMORY_MODELS[memory].stage_costs(profile, run)
        except CapslogError:
            memory = "additive"
    return memory, MEMORY_MODELS[memory].stage_costs(profile, run)
