"""Choices of a plan besides its stages: the schedule, the accumulation blocks, the recomputation."""

from __future__ import annotations

from varuna_capslog.config.settings import Config
from varuna_capslog.planners import WHOLE_RUN
from varuna_capslog.plans.plan import Plan

__all__ = ["with_choices_of"]


def with_choices_of(config: Config, plan: Plan) -> Config:
    """Return the config with its plan's choices; the same config where cuts or a plan are given."""
    pipeline = config.pipeline
    if pipeline.cuts is not None or pipeline.plan is not None or plan.schedule is None:
        return config
    chosen = {"schedule": plan.schedule} | ({"recompute": False} if plan.planner in WHOLE_RUN else {})
    train = config.train.with_blocks((None if plan.short else plan.units.blocks) or config.num_blocks)
    return config.model_copy(update={"train": train, "pipeline": pipeline.model_copy(update=chosen)})
