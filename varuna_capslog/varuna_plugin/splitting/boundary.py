"""What a CutPoint does: nothing, receive what a stage needs, or send what it made and end the stage's forward.

Replaces `CutPoint.forward` and its one-tensor autograd function. Varuna's executor calls it as it called the original:
`recv_fn`, `send_fn` and `set_ret_val_func`, with a `Bundle` in place of the tensor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.varuna_plugin.splitting.phantom import find_phantom
from varuna_capslog.varuna_plugin.splitting.tracing import CutSpec, flatten_cut

if TYPE_CHECKING:
    from varuna_capslog.varuna_plugin.splitting.stage_run import StageRun

__all__ = ["EntryCut", "ExitCut", "StageDone", "cut_forward"]


class StageDone(Exception):
    """Ends a stage's forward at its last cut; Varuna's forward swallows it, the return value being set."""


def cut_forward(self: Any, *inputs: Any) -> Any:
    """Replaces `CutPoint.forward`: hands its arguments on unless the plugin gave it something to do."""
    if self.barrier_event is not None:
        self.barrier_event.record()
    if self.boundary_func is not None:
        self.boundary_func()
    if self.cp_func is not None:
        return self.cp_func(*inputs)
    return inputs[0] if len(inputs) == 1 else inputs


class _Receive(torch.autograd.Function):
    """Gives received tensors a place in the graph; its backward sends their gradients."""

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
    """Ends a stage's graph in a number without meaning; its backward waits for the next stage's gradients."""

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
    """Makes a function part of the graph although none of its tensors may need a gradient."""
    return torch.empty(0, device=device, requires_grad=True)


_ONE_TENSOR = pytree.tree_flatten((torch.empty(0),))[1]


def _is_one_tensor(spec: CutSpec) -> bool:
    """Whether the cut is crossed by a single tensor, as in models that Varuna runs without the plugin."""
    return spec.present == (True,) and spec.structure == _ONE_TENSOR


class EntryCut:
    """The cut before a stage."""

    def __init__(self, point: Any, spec: CutSpec, run: StageRun) -> None:
        self.point, self.spec, self.run = point, spec, run
        self._one = _is_one_tensor(spec)
        self._differentiable = any(tensor.requires_grad for tensor in spec.tensors)

    def __call__(self, *_: Any) -> Any:
        """The received tensors in the structure that the CutPoint has when nothing is cut."""
        bundle = self.point.recv_fn()
        tensors = tuple(bundle.tensors)
        self.run.active = True
        if self._differentiable and torch.is_grad_enabled():
            tensors = _Receive.apply(anchor_on(self.point.device), self, tensors)
        if self._one:
            return tensors[0]
        arguments = self.spec.arguments(tensors)
        return arguments[0] if len(arguments) == 1 else arguments

    def send_gradients(self, gradients: tuple[Tensor | None, ...]) -> None:
        """Sends what the stage before must add up; one message per microbatch, also where nothing needs a gradient."""
        wanted = zip(gradients, self.spec.tensors, strict=True)
        self.point.send_fn(self.run.bundle_type(tuple(g for g, spec in wanted if spec.requires_grad)), grads=True)
        self.run.gradients_sent = True

    def send_nothing(self) -> None:
        """The same for a stage whose output does not depend on what it received."""
        self.send_gradients((None,) * len(self.spec.tensors))


class ExitCut:
    """The cut behind a stage."""

    def __init__(self, point: Any, spec: CutSpec, run: StageRun) -> None:
        self.point, self.spec, self.run = point, spec, run
        self._one = _is_one_tensor(spec)

    def __call__(self, *inputs: Any) -> Any:
        """Sends, and ends the forward: what follows belongs to other stages."""
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
        """The tensors among the arguments, which must be such as were traced."""
        phantom = find_phantom(inputs)
        if phantom is not None:
            raise CapslogError(
                f"CutPoint {self.spec.name!r} is given {phantom!r}, which another stage computes: a value that is "
                "needed behind a cut must go through every CutPoint between, or come from the model's inputs"
            )
        tensors, present, structure = flatten_cut(inputs, self.spec.name)
        if (present, structure) != (self.spec.present, self.spec.structure):
            raise CapslogError(
                f"CutPoint {self.spec.name!r} is given {structure} here, but {self.spec.structure} when the model was "
                "traced; give it the same number of tensors in the same structure every time"
            )
        return tensors

    def receive_gradients(self) -> tuple[Tensor | None, ...]:
        """One gradient or None per tensor of the cut."""
        found = iter(self.point.recv_fn(grads=True).tensors)
        self.run.observer.gradients_arrived()
        return tuple(next(found) if spec.requires_grad else None for spec in self.spec.tensors)
