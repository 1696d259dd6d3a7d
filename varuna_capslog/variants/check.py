"""Compares a rewritten layer with the plain one: outputs, and gradients of inputs and parameters.

`profiling.variant_check` calls this for the layers of a chain, before a run uses a variant. It changes neither module
and runs on the CPU, in the dtypes of its arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Difference", "difference"]

_LEAST = 1e-3
"""A gradient far below the layer's largest one is compared by this part of the latter (rule 1 of the engine)."""


@dataclass(frozen=True)
class Difference:
    """The largest difference of two layers.

    what: the tensor that differs most. part: its difference as a part of the largest value; 0: the same bits.
    """

    what: str
    part: float


def difference(
    plain: nn.Module,
    rewritten: nn.Module,
    arguments: Sequence[Tensor],
    gradients: bool = True,
    call: Callable[..., Any] | None = None,
    unread: Collection[int] = (),
) -> Difference:
    """Run both layers forward and backward on the same values, and return their largest difference.

    Outputs are compared by max|a - b| / max|b|, gradients by max|a - b| / max(max|b|, 1e-3 of the largest gradient of
    the layer). Layers that draw random numbers in training run in eval mode, all others in the mode that they are in.

    Args:
        plain, rewritten: with the same parameters' names and values, in the mode that they train in; they keep it.
        arguments: of the layer; gradients are also compared of those that require one.
        gradients: compare them too.
        call: runs in the place of `rewritten`, such as its compiled code; None: the module itself.
        unread: numbers of outputs that nothing reads: they are not compared, and have no gradient.

    Raises:
        Exception: whatever one of the layers raises on these arguments.
    """
    modes = [(module, module.training) for layer in (plain, rewritten) for module in layer.modules()]
    try:
        if _is_random(plain, arguments):
            plain.eval()
            rewritten.eval()
        of_plain, of_other = (
            _results(layer, run or layer, arguments, gradients, unread)
            for layer, run in ((plain, None), (rewritten, call))
        )
    finally:
        for module, mode in modes:
            module.training = mode
    greatest = max([_size(value) for name, value in of_plain if name.startswith("the gradient")], default=0.0)
    worst = Difference("every tensor", 0.0)
    for (name, expected), (_, actual) in zip(of_plain, of_other, strict=True):
        if expected is None and actual is None:
            continue
        if expected is None or actual is None or expected.shape != actual.shape:
            return Difference(name, float("inf"))
        if torch.equal(expected, actual):
            continue
        least = _LEAST * greatest if name.startswith("the gradient") else 0.0
        both_finite = torch.isfinite(expected).all() and torch.isfinite(actual).all()
        gap = _size(expected.double() - actual.double()) if both_finite else float("inf")
        part = gap / max(_size(expected), least, torch.finfo(torch.float64).tiny)
        if part > worst.part:
            worst = Difference(name, part)
    return worst


def _is_random(layer: nn.Module, arguments: Sequence[Tensor]) -> bool:
    """Return True where two calls give different outputs."""
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        outputs = []
        for seed in (0, 1):
            torch.manual_seed(seed)
            outputs.append(_outputs(layer, arguments))
    return not all(torch.equal(first, second) for first, second in zip(*outputs, strict=True))


def _outputs(layer: Callable[..., Any], arguments: Sequence[Tensor]) -> tuple[Tensor, ...]:
    # a layer may change its arguments in place
    result = layer(*(argument.clone() for argument in arguments))
    return (result,) if isinstance(result, Tensor) else tuple(result)


def _results(
    layer: nn.Module,
    call: Callable[..., Any],
    arguments: Sequence[Tensor],
    with_gradients: bool,
    unread: Collection[int],
) -> list[tuple[str, Tensor | None]]:
    """Return names and values of all tensors to compare; None: no gradient."""
    inputs = [argument.detach().clone().requires_grad_(argument.requires_grad) for argument in arguments]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        outputs = {number: output for number, output in enumerate(_outputs(call, inputs)) if number not in unread}
        compared: list[tuple[str, Tensor | None]] = [
            (f"output {number}", output.detach()) for number, output in outputs.items()
        ]
        wanted = [(f"input {number}", tensor) for number, tensor in enumerate(inputs) if tensor.requires_grad]
        wanted += [(name, parameter) for name, parameter in layer.named_parameters() if parameter.requires_grad]
        ends = [output for output in outputs.values() if output.requires_grad]
        if with_gradients and ends and wanted:
            torch.manual_seed(1)
            # not randn_like, whose values follow the memory of the output
            upper = [torch.randn(output.shape, dtype=output.dtype) for output in ends]
            gradients = torch.autograd.grad(ends, [tensor for _, tensor in wanted], upper, allow_unused=True)
            compared += [
                (f"the gradient of {name}", gradient) for (name, _), gradient in zip(wanted, gradients, strict=True)
            ]
    return compared


def _size(value: Tensor | None) -> float:
    return 0.0 if value is None or not value.numel() else float(value.detach().double().abs().max())
