"""Memory models: the peak of any stage, from a profile. A model's file begins with its equation."""

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
    """Functions of a memory model. stage_costs: bytes of every stage; raises CapslogError naming what the profile
    lacks. gap: a sentence that says why the model does not describe a run and so has no number for it; None if it does.
    """

    stage_costs: Callable[[Profile, RunShape], StageCosts]
    gap: Callable[[RunShape], str | None]


MEMORY_MODELS = {
    "additive": MemoryModel(additive.stage_costs, functools.partial(additive.gap, "additive")),
    "composition": MemoryModel(composition.stage_costs, functools.partial(additive.gap, "composition")),
    inference.INFERENCE: MemoryModel(inference.stage_costs, lambda run: None),
    # no gap: `fold` describes every list of actions; planners of cut lists read its closed form, `inflight`
    inflight.RANKS: MemoryModel(functools.partial(inflight.stage_costs, inflight.RANKS), lambda run: None),
} | {
    name: MemoryModel(functools.partial(inflight.stage_costs, name), functools.partial(inflight.gap, name))
    for name in inflight.DESCRIBED
}

AUTO = "auto"
"""Stands for the model of the run's schedule (`ranks` for schedules without a model) if the profile has the
observations for it; else for `additive`, which needs none, but may have a `gap` for the run. For a profile of
inference it stands for `inference`."""


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
