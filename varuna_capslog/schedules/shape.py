"""Shape of a run: the settings that, with its cuts, determine the time of a step and the memory of each stage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from varuna_capslog.base import fields
from varuna_capslog.base.errors import CapslogError

if TYPE_CHECKING:
    from typing import Self

    from varuna_capslog.config.settings import Config

__all__ = ["ALWAYS_RECOMPUTE", "AUTO_SCHEDULE", "DEFAULT_K", "DEFAULT_RUN", "STAGE_INPUTS", "RunShape"]

ALWAYS_RECOMPUTE = frozenset({"varuna"})
"""Schedules that always recompute, regardless of `recompute`."""

AUTO_SCHEDULE = "auto"
"""Schedule name that lets planner `budget` choose the schedule; for other planners see `RunShape.settled`."""

DEFAULT_K = 2
"""Default number of microbatches in a group of schedule `kfkb`."""

STAGE_INPUTS = ("host", "device")


@dataclass(frozen=True)
class RunShape:
    """Shape of a step of a run, or of one of its equal pipelines (`share`). Invalid values raise CapslogError.

    num_microbatches: of one step; None: not known; memory models then count as many as the pipeline can take.
    schedule: a name of `schedules.SCHEDULES`, or `AUTO_SCHEDULE`; "varuna" always recomputes.
    recompute: forwards keep only the stage's inputs; stage_inputs: where these wait, "host" or "device".
    microbatch_size: samples of one microbatch; None: as in the profile.
    num_blocks: accumulation blocks of the step; they divide the microbatches.
    k: microbatches of a group of schedule "kfkb".
    """

    num_microbatches: int | None = None
    schedule: str = "varuna"
    recompute: bool = True
    stage_inputs: str = "host"
    microbatch_size: int | None = None
    num_blocks: int = 1
    k: int = DEFAULT_K

    def __post_init__(self) -> None:
        fields.choice(self.stage_inputs, "stage_inputs", STAGE_INPUTS)
        if self.num_microbatches is not None:
            fields.whole(self.num_microbatches, "the number of microbatches of a step", 1, fields.MOST_CALLS)
        if self.num_blocks < 1 or (self.num_microbatches is not None and self.num_microbatches % self.num_blocks):
            raise CapslogError(
                f"{self.num_blocks} accumulation blocks do not divide the {self.num_microbatches} microbatches of a "
                "step; choose a number that does"
            )

    @classmethod
    def of_config(cls, config: Config) -> Self:
        """Return the whole step of a configured run, over all its replicas."""
        pipeline = config.pipeline
        return cls(
            config.num_microbatches,
            pipeline.schedule,
            pipeline.recompute,
            pipeline.stage_inputs,
            config.train.microbatch_size,
            config.num_blocks,
            pipeline.k,
        )

    @classmethod
    def of_conditions(cls, conditions: Mapping[str, Any], schedule: str = "varuna") -> RunShape:
        """Return the run that a profile was made for, as far as its conditions tell."""
        return cls(
            schedule=schedule,
            recompute=bool(conditions.get("recompute", True)),
            stage_inputs=str(conditions.get("stage_inputs", "host")),
        )

    def unsized(self) -> RunShape:
        """Return the same run with unknown number and size of microbatches."""
        return replace(self, num_microbatches=None, microbatch_size=None, num_blocks=1)

    def settled(self) -> Self:
        """Return the same run for planners that do not choose the schedule: `auto` becomes `varuna`."""
        return replace(self, schedule="varuna") if self.schedule == AUTO_SCHEDULE else self

    def share(self, pipelines: int) -> RunShape:
        """Return the step of one of `pipelines` equal pipelines, which share the blocks evenly."""
        return replace(
            self, num_microbatches=self.microbatches // pipelines, num_blocks=max(1, self.num_blocks // pipelines)
        )

    @property
    def microbatches(self) -> int:
        """`num_microbatches`, for callers that need the number. Raises CapslogError where it is not known."""
        if self.num_microbatches is None:
            raise CapslogError("the number of microbatches of a step is not known; give num_microbatches")
        return self.num_microbatches

    @property
    def limits_by_plan(self) -> bool:
        """True where the stages' limits in flight follow from seconds, and are stored in the plan."""
        return self.schedule == "1f1b-star"

    @property
    def splits_backwards(self) -> bool:
        """True where every backward is in two halves, and gradients are sent on after the input half."""
        return self.schedule == "zb-h1"

    @property
    def recomputes(self) -> bool:
        """True where stages recompute: by `recompute`, or because the schedule always does."""
        return self.recompute or self.schedule in ALWAYS_RECOMPUTE


DEFAULT_RUN = RunShape()
"""A run with the config's defaults; its number of microbatches is not known."""
