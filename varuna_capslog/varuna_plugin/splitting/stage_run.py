"""A rank's stage while it trains: the position of its forward, and the actions of its two CutPoints.

A CutPoint does nothing, receives the stage's inputs, or sends the stage's outputs and ends its forward. Varuna's
executor calls it as the original (`recv_fn`, `send_fn` and `set_ret_val_func`), with a `Bundle` in place of the tensor.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.engine.layers import seed_layer
from varuna_capslog.varuna_plugin.splitting.tracing import CutSpec, Partition, TieGroup, flatten_cut, refuse_phantom
from varuna_capslog.varuna_plugin.wire import Bundle, Room

__all__ = ["Draws", "EntryCut", "ExitCut", "StageDone", "StageRun", "anchor_on", "cut_forward"]


class StageDone(Exception):
    """Ends a stage's forward at its last cut; Varuna's forward swallows it, the return value being set."""


def cut_forward(self: Any, *inputs: Any) -> Any:
    """Replace `CutPoint.forward`: return the arguments unless the plugin has set a function for this CutPoint."""
    if self.barrier_event is not None:
        self.barrier_event.record()
    if self.boundary_func is not None:
        self.boundary_func()
    if self.cp_func is not None:
        return self.cp_func(*inputs)
    return inputs[0] if len(inputs) == 1 else inputs


class _Receive(torch.autograd.Function):
    """Function that gives received tensors a place in the graph; its backward sends their gradients."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, entry: EntryCut, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        # not arguments of the function: an argument given back is a view, and nothing may then work on it in place
        ctx.entry = entry
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(
            *[tensor for tensor, spec in zip(tensors, entry.spec.tensors, strict=True) if not spec.requires_grad]
        )
        return tensors

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, None, None]:
        ctx.entry.send_gradients(gradients)
        return None, None, None


class _Send(torch.autograd.Function):
    """Function that ends a stage's graph in a meaningless number; its backward waits for the next stage's gradients."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, leaving: ExitCut, *tensors: Tensor) -> Tensor:
        ctx.leaving = leaving
        for needs, spec in zip(ctx.needs_input_grad[2:], leaving.spec.tensors, strict=True):
            if needs and not spec.requires_grad:
                raise CapslogError(
                    f"a tensor at CutPoint {leaving.spec.name!r} needs a gradient now, but did not when Varuna was "
                    "built; unfreeze parameters before, or build Varuna again"
                )
        return anchor.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.leaving.receive_gradients()


def anchor_on(device: torch.device) -> Tensor:
    """Tensor that makes a function part of the graph although none of its tensors may need a gradient."""
    return torch.empty(0, device=device, requires_grad=True)


_ONE_TENSOR = pytree.tree_flatten((torch.empty(0),))[1]


class EntryCut:
    """The cut before a stage."""

    def __init__(self, point: Any, spec: CutSpec, run: StageRun) -> None:
        self.point, self.spec, self.run = point, spec, run
        self._differentiable = any(tensor.requires_grad for tensor in spec.tensors)

    def __call__(self, *_: Any) -> Any:
        """Return the received tensors in the structure that the CutPoint has when nothing is cut."""
        tensors = self.point.recv_fn().tensors
        self.run.active = True
        if self._differentiable and torch.is_grad_enabled():
            tensors = _Receive.apply(anchor_on(self.point.device), self, tensors)
        arguments = self.spec.arguments(tensors)
        return arguments[0] if len(arguments) == 1 else arguments

    def send_gradients(self, gradients: tuple[Tensor | None, ...]) -> None:
        """Send gradients to the stage before; one message per microbatch, even where no tensor needs a gradient."""
        wanted = zip(gradients, self.spec.tensors, strict=True)
        self.point.send_fn(self.run.bundle_type(tuple(g for g, spec in wanted if spec.requires_grad)), grads=True)
        self.run.gradients_sent = True


class ExitCut:
    """The cut behind a stage."""

    def __init__(self, point: Any, spec: CutSpec, run: StageRun) -> None:
        self.point, self.spec, self.run = point, spec, run
        # as in models that Varuna runs without the plugin
        self._one = spec.present == (True,) and spec.structure == _ONE_TENSOR

    def __call__(self, *inputs: Any) -> Any:
        """Send the tensors and end the forward: later code belongs to other stages."""
        plain = self._one and len(inputs) == 1 and isinstance(inputs[0], Tensor)
        tensors = list(inputs) if plain else self._checked(inputs)
        device = self.point.device
        token = (
            _Send.apply(anchor_on(device), self, *tensors)
            if torch.is_grad_enabled()
            else torch.zeros((), device=device)
        )
        self.point.send_fn(self.run.bundle_type(tuple(tensors)))
        self.run.left = True
        self.point.set_ret_val_func(token)
        raise StageDone

    def _checked(self, inputs: tuple[Any, ...]) -> list[Tensor]:
        """Return the tensors among the arguments, which must have the traced structure."""
        refuse_phantom(inputs, f"CutPoint {self.spec.name!r} is given")
        tensors, present, structure = flatten_cut(inputs, self.spec.name)
        if (present, structure) != (self.spec.present, self.spec.structure):
            raise CapslogError(
                f"CutPoint {self.spec.name!r} is given {structure} here, but {self.spec.structure} when the model was "
                "traced; give it the same number of tensors in the same structure every time"
            )
        return tensors

    def receive_gradients(self) -> tuple[Tensor | None, ...]:
        """Return a gradient or None for each tensor of the cut."""
        gradients = iter(self.point.recv_fn(grads=True).tensors)
        self.run.watch_backward("gradients arrived")
        return tuple(next(gradients) if spec.requires_grad else None for spec in self.spec.tensors)


class Draws:
    """Random numbers that depend on the step, the microbatch and the piece, never on cuts, ranks or order.

    Varuna's own random stream belongs to a rank, so other cuts draw other numbers. Here the device's generator is
    seeded whenever a forward enters a piece, as our engine seeds a layer. Used where cuts change during a run.

    points: the model's CutPoints in the order of the forward; takes their `boundary_func`, which Varuna leaves unused
    here. seed: of the run.
    """

    def __init__(self, points: Iterable[Any], device: torch.device, seed: int) -> None:
        self._device, self._seed = device, seed
        self._step = self._microbatch = 0
        self._numbers: dict[int, int] = {}
        for index, point in enumerate(points):
            point.boundary_func = lambda piece=index + 1: self._enter(piece)

    def begin_step(self, step: int, batches: Mapping[int, dict[str, Any]]) -> None:
        """Begin a step. batches: its microbatches by number, as the same objects that the model is called with."""
        self._step = step
        self._numbers = {id(batch): index for index, batch in batches.items()}

    def begin_forward(self, inputs: dict[str, Any]) -> None:
        """Begin a forward or recomputation of this microbatch."""
        self._microbatch = self._numbers.get(id(inputs), 0)
        self._enter(0)

    def _enter(self, piece: int) -> None:
        seed_layer(self._device, self._seed, self._step, self._microbatch, piece)


class StageRun:
    """A rank's stage, and the position of its forward.

    Attributes:
        ties: all ties of the model; each rank acts on those of its stage.
        norms: the modules of the stage that keep running statistics.
        entry, exit: the stage's CutPoints, None at the pipeline's ends.
        bundle_type: class of the bundles that leave the stage.
        rooms: of the messages in each direction, by (task, "in" or "out").
        active, left: True once the forward has reached the stage's own code, and the cut behind.
        gradients_sent: True once the backward under way has sent gradients to the stage before.
        draws: set where random numbers must not depend on the cuts.
        watch_backward: called with "begun", "gradients arrived" (from the stage behind) and "ended" in each backward.
    """

    def __init__(self, partition: Partition, stage: int, ties: Sequence[TieGroup]) -> None:
        self.partition, self.stage, self.ties = partition, stage, tuple(ties)
        self.bundle_type = Bundle
        self.rooms = defaultdict[tuple[int, str], Room](Room)
        self.entry: EntryCut | None = None
        self.exit: ExitCut | None = None
        self.active = self.left = self.gradients_sent = False
        self.draws: Draws | None = None
        self.watch_backward: Callable[[str], None] = lambda moment: None
        self.norms: list[nn.Module] = []

    def begin(self) -> None:
        """Begin a forward."""
        self.active, self.left = self.stage == 0, False
