"""What an elastic run on Varuna trains: the user's factories and numbers, and the pieces of the user's model."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.config.settings import Elastic
from varuna_capslog.elastic.member.work import LayerState
from varuna_capslog.memory import AUTO
from varuna_capslog.profiles.record import Profile
from varuna_capslog.training.layer_state import cloned
from varuna_capslog.varuna_plugin import piece_state
from varuna_capslog.varuna_plugin.inputs import Microbatches, scatter
from varuna_capslog.varuna_plugin.splitting.tracing import trace_model

__all__ = ["ElasticTraining", "ModelPieces"]


@dataclass(frozen=True)
class ElasticTraining:
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
        return given if isinstance(given, Microbatches) else scatter(given, self.batch_size, self.chunk_size)

    def set_rates(self, optimizer: torch.optim.Optimizer, step: int) -> None:
        """Calls the user's schedule, if there is one; before each step."""
        if self.schedule is not None:
            self.schedule(optimizer, step)


class ModelPieces:
    """The model's pieces, which are the same on every worker.

    Args:
        cut_point: Varuna's class of that name.

    Attributes:
        trace: the pieces, and what crosses between them.
        recipe: the user's optimizer for any of the parameters.
        frozen: names of the parameters that are not trained.
        names: of parameters and of buffers, by piece.
        state_bytes: of each piece.

    Raises:
        CapslogError: the inputs, or the profile, do not go with the model.
    """

    def __init__(self, job: ElasticTraining, cut_point: Any) -> None:
        self._job = job
        self._spare: nn.Module | None = self._build()
        first = job.microbatches(1)
        if len(first) != job.num_microbatches:
            raise CapslogError(
                f"get_batch gives {len(first)} microbatches; batch_size={job.batch_size} with "
                f"chunk_size={job.chunk_size} make {job.num_microbatches}"
            )
        self.trace = trace_model(self._spare, first[0], cut_point)
        self.recipe = piece_state.OptimizerRecipe(job.build_optimizer(self._spare), self._spare)
        self.frozen = [name for name, p in self._spare.named_parameters() if not p.requires_grad]
        self.state_bytes = piece_state.state_bytes(self._spare, self.trace)
        if job.profile is not None and job.profile.num_layers != self.trace.num_pieces:
            raise CapslogError(
                f"the profile is of {job.profile.num_layers} layers, the model has {self.trace.num_pieces} pieces; "
                "profile this model"
            )
        self.names = [piece_state.names_of(self.trace, piece) for piece in range(self.trace.num_pieces)]

    def _build(self) -> nn.Module:
        """A model of the user's factory, with the random numbers of the run's seed."""
        with torch.random.fork_rng(), torch.enable_grad():
            torch.manual_seed(self._job.seed)
            return self._job.build_model()

    def take(self) -> nn.Module:
        """A fresh model, for the caller to change."""
        model, self._spare = self.prepare(), None
        return model

    def prepare(self) -> nn.Module:
        """Builds a model now, for a later `take`, which then need not wait for it."""
        if self._spare is None:
            self._spare = self._build()
        return self._spare

    def initial(self, piece: int) -> LayerState:
        """A piece before step 1."""
        model = self.prepare()
        parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
        names = self.names[piece]
        part = {name: parameters[name] for name in names[0]}, {name: buffers[name] for name in names[1]}
        return cloned(piece_state.capture(*part, None))
