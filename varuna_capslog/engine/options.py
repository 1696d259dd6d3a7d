"""What a step depends on besides model and data: the layout of stages on ranks, and the constants of a run.

Plain values, the same on every rank; `PipelineEngine` reads them, and a copy of a layer follows by them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from varuna_capslog.engine.optimizer import LearningRate

__all__ = ["EngineOptions", "Layout", "StepResult"]


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


@dataclass(frozen=True)
class EngineOptions:
    """Everything a step depends on besides model, layout and data; the same on every rank, constant for a run.

    Attributes:
        num_microbatches: per step, over all replicas.
        num_blocks: accumulation blocks, a multiple of the replicas.
        schedule, recompute, stage_inputs, transport: see the config's `pipeline` section.
        clip_norm: largest global gradient norm, 0 = no clipping.
        refuses: whether a step that is not finite is voted down; a profiler that feeds dummy values switches this off.
    """

    num_microbatches: int
    num_blocks: int = 1
    schedule: str = "varuna"
    recompute: bool = True
    stage_inputs: str = "host"
    transport: str = "gloo"
    precision: str = "float32"
    seed: int = 0
    clip_norm: float = 0.0
    weight_decay: float = 1e-4
    rate: LearningRate = field(default_factory=lambda: LearningRate(1e-4))
    multipliers: Mapping[str, float] = field(default_factory=dict)
    actions: tuple[tuple[str, ...], ...] | None = None
    refuses: bool = True


@dataclass(frozen=True)
class StepResult:
    """What every rank knows of a committed step. `parts` holds the loss and its parts, of the whole minibatch."""

    step: int
    parts: dict[str, float]
    grad_norm: float
    learning_rate: float
    stop: bool
