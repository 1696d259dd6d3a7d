"""The user's model as an elastic run on Varuna needs it: its pieces, and a fresh model for every generation."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.elastic.member.work import LayerState
from varuna_capslog.varuna_plugin import piece_state
from varuna_capslog.varuna_plugin.elastic.job import Job
from varuna_capslog.varuna_plugin.splitting.tracing import trace_model

__all__ = ["ModelPieces"]


class ModelPieces:
    """What one process knows of the model, whichever of its pieces train here.

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

    def __init__(self, job: Job, cut_point: Any) -> None:
        self._job = job
        self._spare: nn.Module | None = self._build()
        first = job.microbatches(1)
        if len(first.batches) != job.num_microbatches:
            raise CapslogError(
                f"get_batch gives {len(first.batches)} microbatches; batch_size={job.batch_size} with "
                f"chunk_size={job.chunk_size} make {job.num_microbatches}"
            )
        self.trace = trace_model(self._spare, first.batches[0], cut_point)
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
        """A model as the user's factory makes it, whatever random numbers were drawn before."""
        with torch.random.fork_rng(), torch.enable_grad():
            torch.manual_seed(self._job.seed)
            return self._job.build_model()

    def take(self) -> nn.Module:
        """A model of the caller's own."""
        model, self._spare = self._spare, None
        return self._build() if model is None else model

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
        return {key: tensor.clone() for key, tensor in piece_state.capture(*part, None).items()}
