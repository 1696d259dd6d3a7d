"""What an elastic run on Varuna is to train: the user's factories and numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from varuna_capslog.config.settings import Elastic
from varuna_capslog.memory import AUTO
from varuna_capslog.profiles.record import Profile
from varuna_capslog.varuna_plugin.inputs import Microbatches, scatter

__all__ = ["Job"]


@dataclass(frozen=True)
class Job:
    """What a user wants trained; the same on every worker.

    Attributes:
        build_model: the whole model with its CutPoints, on the CPU; called with the generator seeded, once for every
            change. It must give the same model every time.
        build_optimizer: over a model's parameters; called once, its settings per parameter hold for all parts.
        get_batch: the inputs of step 1, 2, ..., the whole minibatch, the same on every worker; or `Microbatches`.
        steps: to be made over the whole run.
        batch_size, chunk_size: samples of a step, and of a microbatch.
        clip_grad_max_norm, loss: as Varuna and `configure` have them.
        schedule: called with (optimizer, step) before each step; sets learning rates by the step alone.
        profile, planner, memory, capacity: what cuts are searched from; without a profile pieces are cut by bytes.
        checkpoint_every: steps; None: only the last.
        on_step: called with (step, loss, gradient norm) on one worker.
        seed: of weights and random numbers, which belong to (step, microbatch, piece).
        timeout_seconds: longest wait for a message.
        elastic: the section of that name.
    """

    build_model: Callable[[], nn.Module]
    build_optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    get_batch: Callable[[int], dict[str, Any]]
    steps: int
    batch_size: int
    chunk_size: int
    run_dir: Path
    clip_grad_max_norm: float | None = None
    loss: Literal["mean", "sum"] = "mean"
    schedule: Callable[[torch.optim.Optimizer, int], None] | None = None
    profile: Profile | None = None
    planner: str = "exact"
    memory: str = AUTO
    capacity: int = 0
    checkpoint_every: int | None = None
    on_step: Callable[[int, float, float], None] | None = None
    seed: int = 0
    timeout_seconds: float = 30.0
    elastic: Elastic = field(default_factory=Elastic)

    @property
    def num_microbatches(self) -> int:
        """Of one step."""
        return math.ceil(self.batch_size / self.chunk_size)

    def microbatches(self, step: int) -> Microbatches:
        """All microbatches of a step."""
        given = self.get_batch(step)
        if isinstance(given, Microbatches):
            return given
        cut = scatter(given, self.batch_size, self.chunk_size)
        return Microbatches(cut, cut.sizes)
