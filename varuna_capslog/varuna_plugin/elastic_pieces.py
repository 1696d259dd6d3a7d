"""Training of an elastic run on Varuna: the user's functions and settings, and the pieces of the user's model.

A piece is the part of the model between two CutPoints. Its state has the form of `training.layer_state`, with names of
the whole model. State that several pieces share is in the state of each, so that a stage can be built from its own
pieces alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.config.settings import Elastic
from varuna_capslog.memory import AUTO
from varuna_capslog.profiles.record import Profile
from varuna_capslog.training.layer_state import LayerState, StateFollower, cloned, copy_in, flatten, moments_of
from varuna_capslog.varuna_plugin.executor import Microbatches, scatter
from varuna_capslog.varuna_plugin.tracing import Trace, trace_model

__all__ = ["ElasticTraining", "ModelPieces", "OptimizerRecipe", "PieceFollower", "capture", "install", "names_of"]

_STATE_FACTOR = 3
"""Bytes of a trained parameter and its two moments, as a multiple of the parameter's bytes."""


@dataclass(frozen=True)
class ElasticTraining:
    """Settings of a user's training, the same on every worker.

    Attributes:
        build_model: returns the whole model with its CutPoints, on the CPU. Called with the generator seeded, once for
            every change of workers; must return the same model every time.
        build_optimizer: returns an optimizer of a model. Called once; its settings per parameter hold for all parts.
        get_batch: returns the whole minibatch of step 1, 2, ..., or `Microbatches`; the same on every worker.
        steps: number of steps of the whole run.
        batch_size, chunk_size: samples of a step, and of a microbatch.
        clip_grad_max_norm, loss: as in Varuna and `configure`.
        schedule: called with (optimizer, step) before each step; sets learning rates by the step alone.
        profile, planner, memory, capacity: for the search of cuts; without a profile, cuts balance the pieces' bytes.
        checkpoint_every: steps between checkpoints; None: only after the last step.
        on_step: called with (step, loss, gradient norm) on one worker.
        seed: seed of weights and random numbers; random numbers depend on (step, microbatch, piece).
        timeout_seconds: longest wait for a message.
        elastic: the config section `elastic`.
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
        """Number of microbatches of a step."""
        return math.ceil(self.batch_size / self.chunk_size)

    def microbatches(self, step: int) -> Microbatches:
        """Return all microbatches of a step."""
        batch = self.get_batch(step)
        return batch if isinstance(batch, Microbatches) else scatter(batch, self.batch_size, self.chunk_size)

    def set_rates(self, optimizer: torch.optim.Optimizer, step: int) -> None:
        """Call the user's schedule, if there is one; before each step."""
        if self.schedule is not None:
            self.schedule(optimizer, step)


class ModelPieces:
    """Pieces of the model, the same on every worker. cut_point: Varuna's class `CutPoint`.

    Attributes:
        trace: the pieces, and the tensors that cross between them.
        recipe: makes the user's optimizer for any of the parameters.
        frozen: names of the parameters that are not trained.
        names: names of parameters and of buffers, by piece.
        state_bytes: bytes of each piece's state; optimizer states count as two moments.

    Raises:
        CapslogError: the inputs, or the profile, do not match the model.
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
        self.recipe = OptimizerRecipe(job.build_optimizer(self._spare), self._spare)
        self.frozen = [name for name, p in self._spare.named_parameters() if not p.requires_grad]
        self.names = [names_of(self.trace, piece) for piece in range(self.trace.num_pieces)]
        sizes = {name: _STATE_FACTOR * p.nbytes for name, p in self._spare.named_parameters()}
        sizes |= {name: buffer.nbytes for name, buffer in self._spare.named_buffers()}
        self.state_bytes = tuple(max(1, sum(sizes[name] for part in names for name in part)) for names in self.names)
        if job.profile is not None and job.profile.num_layers != self.trace.num_pieces:
            raise CapslogError(
                f"the profile is of {job.profile.num_layers} layers, the model has {self.trace.num_pieces} pieces; "
                "profile this model"
            )

    def _build(self) -> nn.Module:
        with torch.random.fork_rng(), torch.enable_grad():
            torch.manual_seed(self._job.seed)
            return self._job.build_model()

    def take(self) -> nn.Module:
        """Return a fresh model, which the caller may change."""
        model, self._spare = self.prepare(), None
        return model

    def prepare(self) -> nn.Module:
        """Return a model, built now if there is none, so that a later `take` need not wait for it."""
        if self._spare is None:
            self._spare = self._build()
        return self._spare

    def initial(self, piece: int) -> LayerState:
        """State of a piece before step 1."""
        model = self.prepare()
        parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
        names = self.names[piece]
        part = {name: parameters[name] for name in names[0]}, {name: buffers[name] for name in names[1]}
        return cloned(capture(*part, None))


# -- the state of a piece, and its followers


class OptimizerRecipe:
    """The user's optimizer settings for each parameter, from which an optimizer for any part of the model can be made.

    An optimizer that updates each parameter alone, as torch's do, makes the same step on a part as on the whole.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._type: Any = type(optimizer)
        self._options = [
            {key: value for key, value in group.items() if key not in ("params", "param_names")}
            for group in optimizer.param_groups
        ]
        self.group_of: dict[str, int] = {}
        for number, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                if id(parameter) not in names:
                    raise CapslogError(
                        "build_optimizer's optimizer has a tensor that is no parameter of the model it was given; "
                        "give it that model's parameters only"
                    )
                self.group_of[names[id(parameter)]] = number

    def build(self, parameters: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
        """Build an optimizer for these parameters, without those that the user's optimizer leaves out."""
        groups = []
        for number, options in enumerate(self._options):
            chosen = [parameter for name, parameter in parameters.items() if self.group_of.get(name) == number]
            if chosen:
                groups.append({"params": chosen, **options})
        if not groups:  # optimizers refuse empty lists
            groups = [{"params": [nn.Parameter(torch.zeros(0))], **self._options[0]}]
        made: torch.optim.Optimizer = self._type(groups)
        return made


def names_of(trace: Trace, piece: int) -> tuple[list[str], list[str]]:
    """Names of the parameters and of the buffers that a piece uses."""
    return (
        [name for name, pieces in trace.parameters.items() if piece in pieces],
        [name for name, pieces in trace.buffers.items() if piece in pieces],
    )


def capture(
    parameters: Mapping[str, nn.Parameter], buffers: Mapping[str, Tensor], optimizer: torch.optim.Optimizer | None
) -> LayerState:
    """Return the present state of a piece: live tensors, which the next step changes. optimizer: None before step 1.

    Raises CapslogError where the optimizer keeps something that is neither a tensor nor a number.
    """
    kept = {} if optimizer is None else optimizer.state
    moments: dict[str, dict[str, Any]] = {name: kept.get(parameter, {}) for name, parameter in parameters.items()}
    for name, content in moments.items():
        for key, value in content.items():
            if not isinstance(value, (Tensor, bool, int, float, type(None))):
                raise CapslogError(
                    f"{type(optimizer).__name__} keeps a {type(value).__name__} ({key!r}) for {name!r}; only tensors "
                    "and numbers can move with a layer: use another optimizer"
                )
    return flatten(parameters, buffers, moments)


def install(
    state: Mapping[str, Tensor],
    parameters: Mapping[str, nn.Parameter],
    buffers: Mapping[str, Tensor],
    optimizer: torch.optim.Optimizer,
) -> None:
    """Copy a piece's state into a model and its optimizer. Raises CapslogError where a tensor does not match."""

    def mismatch(kind: str, name: str, value: Tensor | None, target: Tensor) -> CapslogError:
        shape = "nothing" if value is None else list(value.shape)
        return CapslogError(
            f"the state of {name!r} is {shape}, the model wants {list(target.shape)}: build_model must give "
            "the same model every time"
        )

    copy_in(state, parameters, buffers, mismatch)
    for name, parameter in parameters.items():
        optimizer.state.pop(parameter, None)
        kept = moments_of(state, name)
        if kept:
            optimizer.state[parameter] = {key: _moved(value, parameter.device) for key, value in kept.items()}


def _moved(value: Any, device: torch.device) -> Any:
    if not isinstance(value, Tensor):
        return value
    # a step count has no dimensions and stays on the host, where the optimizer made it
    return value.detach().to(value.device if value.dim() == 0 else device, copy=True)


class PieceFollower(StateFollower):
    """Copy of a piece that makes the same steps as its owner, from the owner's final gradients and buffers.

    frozen: parameters that need no gradient. prepare: the user's schedule; called with (optimizer, step) before each
    step.
    """

    def __init__(
        self,
        state: Mapping[str, Tensor],
        recipe: OptimizerRecipe,
        frozen: Iterable[str],
        prepare: Callable[[torch.optim.Optimizer, int], None],
    ) -> None:
        still = set(frozen)
        parameters = {
            name: nn.Parameter(tensor.detach().clone(), requires_grad=name not in still)
            for name, tensor in _named(state, "parameters").items()
        }
        super().__init__(f"of {', '.join(list(parameters)[:2])}", parameters)
        self._buffers = {name: tensor.clone() for name, tensor in _named(state, "buffers").items()}
        self._optimizer = recipe.build(parameters)
        self._prepare = prepare
        install(state, parameters, self._buffers, self._optimizer)

    def _live(self) -> LayerState:
        return capture(self._parameters, self._buffers, self._optimizer)

    def _take(self, kind: str, name: str, tensor: Tensor) -> bool:
        if kind != "buffers" or name not in self._buffers:
            return False
        self._buffers[name] = tensor
        return True

    def _step(self, step: int, scale: float) -> None:
        self._prepare(self._optimizer, step)
        self._optimizer.step()
        for parameter in self._parameters.values():
            parameter.grad = None


def _named(state: Mapping[str, Tensor], kind: str) -> dict[str, Tensor]:
    return {key.removeprefix(f"{kind}/"): value for key, value in state.items() if key.startswith(f"{kind}/")}
