"""The constants of a run: everything besides model, data and layout that a step depends on.

Plain values, the same on every rank; `PipelineEngine` reads them, and a copy of a layer follows by them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from varuna_capslog.engine.host.tier import TierOptions
from varuna_capslog.engine.loss_scale import LossScale
from varuna_capslog.engine.recipe import Recipe
from varuna_capslog.schedules import RunShape

__all__ = ["EngineOptions"]


@dataclass(frozen=True)
class EngineOptions(RunShape):
    """The whole step's shape (the replicas divide its blocks) and all else that a step depends on besides model, layout
    and data; the same on every rank, constant for a run.

    Attributes:
        transport: see the config's `pipeline` section.
        clip_norm: largest global gradient norm, 0 = no clipping.
        recipe: how parameters are stepped.
        tier: where memory intervals offload to.
        compile: backend of torch.compile for every layer, None = layers run as they are.
        refuses: whether a step that is not finite is voted down; a profiler that feeds dummy values switches this off.
        weights: type in which parameters are kept for forward and backward.
        loss_scale: that of step 1; None: the loss is not scaled, and a step whose gradients are not finite is refused.
    """

    num_microbatches: int
    transport: str = "gloo"
    precision: str = "float32"
    weights: str = "float32"
    seed: int = 0
    clip_norm: float = 0.0
    recipe: Recipe = field(default_factory=Recipe)
    actions: tuple[tuple[str, ...], ...] | None = None
    tier: TierOptions = field(default_factory=TierOptions)
    compile: str | None = None
    refuses: bool = True
    loss_scale: LossScale | None = None
