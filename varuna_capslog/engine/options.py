"""The constants of a run: everything besides model, data and layout that a step depends on.

Plain values, the same on every rank; `PipelineEngine` reads them, and a copy of a layer follows by them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from varuna_capslog.engine.offload import TierOptions
from varuna_capslog.engine.recipe import Recipe
from varuna_capslog.schedules import RunShape

__all__ = ["EngineOptions", "LossScale"]


# -- The loss scale of a float16 run at one boundary, and its change by each step.
#
# Small gradients of float16 activations would underflow to zero, so the loss of each microbatch, and with it every
# gradient, is multiplied by a scale (Micikevicius et al., "Mixed Precision Training", Sec. 3.2). The scale is a power
# of two, so that dividing by it changes no bit. A step whose gradients overflow is skipped. The rules and numbers are
# those of `torch.amp.GradScaler`; ours is plain data, since every rank and every copy of a layer computes it for
# itself.


_GROWTH_STEPS = 2000
"""Steps without an overflow after which the scale doubles."""
_LARGEST = 2.0**127
"""The largest power of two that the gradient of a float32 loss can hold."""
_MOST_SKIPPED = 24
_SMALLEST = 2.0**-8
"""The scale after `_MOST_SKIPPED` skipped steps in a row from the first scale, 2^16. Below 1 a scale makes nothing
overflow: a gradient that still does is the model's own fault."""


@dataclass(frozen=True)
class LossScale:
    """The scale of the next step's loss.

    Attributes:
        scale: a power of two.
        streak: steps in a row without an overflow since the scale changed last; below 0: steps skipped in a row.
        dynamic: whether steps change the scale; False: it stays as it is.
    """

    scale: float = 65536.0
    streak: int = 0
    dynamic: bool = True

    def after(self, applied: bool) -> LossScale:
        """The scale of the step after one that was applied, or else skipped."""
        if not applied:
            return replace(self, scale=self.scale / 2 if self.dynamic else self.scale, streak=min(self.streak, 0) - 1)
        streak = max(self.streak, 0) + 1
        if self.dynamic and streak == _GROWTH_STEPS:
            return replace(self, scale=min(2 * self.scale, _LARGEST), streak=0)
        return replace(self, streak=streak)

    @property
    def exhausted(self) -> bool:
        """True where skipping one more step would not help: the next overflow ends the run."""
        return self.scale <= _SMALLEST or -self.streak >= _MOST_SKIPPED


# -- the constants of a run


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
