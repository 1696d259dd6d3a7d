"""What a planner has chosen of a run beside its stages: the schedule, the accumulation blocks, what runs again."""

from __future__ import annotations

from varuna_capslog.config.settings import Config
from varuna_capslog.planners import AUTOMATIC, LAYERWISE, WHOLE_RUN
from varuna_capslog.plans.plan import Plan
from varuna_capslog.schedules.shape import AUTO_SCHEDULE

__all__ = ["with_choices_of"]


def with_choices_of(config: Config, plan: Plan) -> Config:
    """The config with what its plan has chosen; the same config where it has cuts or a plan of its own, or a planner
    that chooses nothing of this.
    """
    pipeline = config.pipeline
    given = pipeline.cuts is not None or pipeline.plan is not None
    if given or plan.schedule is None or pipeline.planner not in (AUTOMATIC, *LAYERWISE, *WHOLE_RUN):
        return config
    if pipeline.planner in LAYERWISE and pipeline.schedule != AUTO_SCHEDULE:
        return config
    found = {"schedule": plan.schedule} | ({"recompute": False} if plan.planner in WHOLE_RUN else {})
    train = config.train.model_copy(update={"accumulation_blocks": plan.units.blocks or config.num_blocks})
    return config.model_copy(update={"train": train, "pipeline": pipeline.model_copy(update=found)})
