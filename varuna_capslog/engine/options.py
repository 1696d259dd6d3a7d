"""What a step depends on besides model and data: the layout of stages on ranks, and the constants of a run.

Plain values, the same on every rank; `PipelineEngine` reads them, and a copy of a layer follows by them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.engine.optimizer import LearningRate
from varuna_capslog.plans.plan import Plan
from varuna_capslog.schedules import RunShape

if TYPE_CHECKING:
    from varuna_capslog.config.settings import Config

__all__ = ["EngineOptions", "Layout", "layout_of"]


@dataclass(frozen=True)
class Layout:
    """Which layers make a stage, which device of the pipeline runs it, and how often the pipeline exists.

    Attributes:
        cuts: first layer of each stage, beginning with 0.
        placement: stage -> device of the pipeline.
        replicas: copies of the pipeline; replica r's device d is rank `r * devices + d`.
    """

    cuts: tuple[int, ...]
    placement: tuple[int, ...]
    replicas: int = 1

    @property
    def devices(self) -> int:
        """Devices of one pipeline."""
        return max(self.placement) + 1

    @property
    def world_size(self) -> int:
        """All ranks that have stages; more may be connected, which are idle."""
        return self.devices * self.replicas

    def stages_of(self, rank: int) -> list[int]:
        """The stages that a rank runs; none for an idle one."""
        if rank >= self.world_size:
            return []
        return [stage for stage, device in enumerate(self.placement) if device == rank % self.devices]

    def describe(self, rank: int) -> str:
        """A rank's name in errors: rank, stages and, if there are several, replica."""
        stages = self.stages_of(rank)
        if not stages:
            return f"rank {rank} (idle)"
        what = f"stage {stages[0]}" if len(stages) == 1 else f"stages {', '.join(map(str, stages))}"
        return f"rank {rank} ({what}{f', replica {rank // self.devices}' if self.replicas > 1 else ''})"


def layout_of(plan: Plan, config: Config) -> Layout:
    """The engine's layout of a plan, in the replicas of `config`.

    Raises:
        CapslogError: the plan says something that the engine cannot run, or would run otherwise; it names the field.
    """
    if plan.num_pipelines != 1:
        raise CapslogError(f"the plan has {plan.num_pipelines} pipelines; this engine runs one plan in equal replicas")
    for number, stage in enumerate(plan.placed or ()):
        if stage.parallel["kind"] != "none":
            raise CapslogError(
                f"the plan wants {stage.parallel['kind']!r} parallelism inside a stage; this engine has none"
            )
        if stage.memory_actions:
            raise CapslogError(
                f"the plan wants memory actions for single layers ({dict(stage.memory_actions)}); not run here"
            )
        if len(stage.layers) != 1:
            pieces = [list(piece) for piece in stage.layers]
            raise CapslogError(
                f"stages[{number}].layers is {pieces}; this engine runs stages of one range of layers, so give each "
                "range a stage of its own"
            )
        if stage.microbatch_size not in (None, config.train.microbatch_size):
            raise CapslogError(
                f"stages[{number}].microbatch_size is {stage.microbatch_size}, but train.microbatch_size is "
                f"{config.train.microbatch_size}; this engine runs one size on all stages, so make the two agree"
            )
    if plan.actions is None and plan.schedule not in (None, config.pipeline.schedule):
        raise CapslogError(
            f"schedule is {plan.schedule!r} in the plan, but pipeline.schedule is {config.pipeline.schedule!r}; "
            "make the two agree, or plan again with this config"
        )
    return Layout(tuple(plan.cuts), tuple(plan.placement()), config.pipeline.replicas)


@dataclass(frozen=True)
class EngineOptions(RunShape):
    """The whole step's shape (the replicas divide its blocks) and all else that a step depends on besides model, layout
    and data; the same on every rank, constant for a run.

    Attributes:
        transport: see the config's `pipeline` section.
        clip_norm: largest global gradient norm, 0 = no clipping.
        refuses: whether a step that is not finite is voted down; a profiler that feeds dummy values switches this off.
    """

    num_microbatches: int
    transport: str = "gloo"
    precision: str = "float32"
    seed: int = 0
    clip_norm: float = 0.0
    weight_decay: float = 1e-4
    rate: LearningRate = field(default_factory=lambda: LearningRate(1e-4))
    multipliers: Mapping[str, float] = field(default_factory=dict)
    actions: tuple[tuple[str, ...], ...] | None = None
    refuses: bool = True
