"""The learning rate as a function of the step alone, so that nothing needs to be remembered of it."""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["LearningRate"]


@dataclass(frozen=True)
class LearningRate:
    """Step size by optimizer step: linear warm-up, then `decay`, times `drop_factor` every `drop_steps` steps.

    Attributes:
        base: learning rate after the warm-up.
        warmup_steps: steps of the linear rise, 0 = none.
        drop_steps: length of one plateau in steps, None = no drop (DETR: 200 epochs).
        drop_factor: factor of each drop.
        decay: what follows the warm-up: "constant", "linear" (a straight line) or "cosine" (half a wave; Loshchilov &
            Hutter 2017, eq. 5, without restarts), both from `base` down to `final_factor * base`.
        decay_steps: the step at which a linear or cosine decay ends; the rate stays there afterwards.
        final_factor: what is left at the end of the decay, as a factor of `base`.
    """

    base: float
    warmup_steps: int = 0
    drop_steps: int | None = None
    drop_factor: float = 0.1
    decay: str = "constant"
    decay_steps: int = 0
    final_factor: float = 0.0

    def at(self, step: int) -> float:
        """The learning rate of optimizer step `step`, counted from 1."""
        rate = self.base
        if self.drop_steps:
            rate *= self.drop_factor ** ((step - 1) // self.drop_steps)
        if step < self.warmup_steps:
            rate *= step / self.warmup_steps
        elif self.decay != "constant":
            rate *= self.final_factor + (1 - self.final_factor) * self._left(step)
        return rate

    def _left(self, step: int) -> float:
        """The share of the decay that is left at this step: 1 at its beginning, 0 at its end."""
        done = min(1.0, (step - self.warmup_steps) / max(1, self.decay_steps - self.warmup_steps))
        return 1 - done if self.decay == "linear" else (1 + math.cos(math.pi * done)) / 2
