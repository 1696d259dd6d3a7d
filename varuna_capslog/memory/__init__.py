"""From a profile to the peak of any stage: one memory model per file, each with its equation.

Planners ask a model for stage costs and for the schedules it describes. A model never answers for a schedule it does
not describe: there is no number without a model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from varuna_capslog.memory import additive
from varuna_capslog.memory.costs import NEVER, RunShape, StageCosts
from varuna_capslog.profiles.record import Profile

__all__ = ["MEMORY_MODELS", "NEVER", "MemoryModel", "RunShape", "StageCosts"]


class MemoryModel(NamedTuple):
    """What a memory model offers.

    stage_costs: from a profile and a run to the bytes of every stage.
    gap: from (schedule, recompute, stage_inputs) to None, or to the sentence that says why it does not describe this.
    """

    stage_costs: Callable[[Profile, RunShape], StageCosts]
    gap: Callable[[str, bool, str], str | None]


MEMORY_MODELS = {"additive": MemoryModel(additive.stage_costs, additive.gap)}
