"""Whether a rewritten layer computes what the plain one does: outputs, and gradients of inputs and parameters.

`profiling.variant_check` calls this for the layers of a chain, before a run uses a variant. It changes neither module
and runs on the CPU, in the types of the tensors it is given.
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

    what: the tensor that differs by most. part: by how much, as a part of the largest value; 0: the same bits.
    """

    what: str
    part: float


def difference(
    plain: nn.Module,
    other: nn.Module,
    arguments: Sequence[Tensor],
    gradients: bool = True,
    call: Callable[..., Any] | None = None,
    unread: Collection[int] = (),
) -> Difference:
    """Runs both layers forward and backward on the same values.

    Outputs are compared by max|a - b| / max|b|, gradients by max|a - b| / max(max|b|, 1e-3 of the largest gradient of
    the layer). Layers that draw random numbers in training run in eval mode, all others in the mode that they are in.

    Args:
        plain, other: with the same parameters' names and values, in the mode that they train in; they keep it.
        arguments: what the layer is called with; those that require a gradient are compared by it as well.
        gradients: compare them too.
        call: what runs in the place of `other`, such as its compiled code; None: the module itself.
        unread: numbers of outputs that nobody reads: they are not compared, and have no gradient.

    Raises:
        Exception: whatever one of the layers raises on these arguments.
    """
    modes = [(module, module.training) for layer in (plain, other) for module in layer.modules()]
    try:
        if _is_random(plain, arguments):
            plain.eval()
            other.eval()
        of_plain, of_other = (
            _results(layer, run or layer, arguments, gradients, unread) for layer, run in ((plain, None), (other, call))
        )
    finally:
        for module, mode in modes:
            module.training = mode
    greatest = max([_size(value) for name, value in of_plain if name.startswith("the gradient")], default=0.0)
    worst = Difference("every tensor", 0.0)
    for (name, expected), (_, found) in zip(of_plain, of_other, strict=True):
        if expected is None and found is None:
            continue
        if expected is None or found is None or expected.shape != found.shape:
            return Difference(name, float("inf"))
        if torch.equal(expected, found):
            continue
        least = _LEAST * greatest if name.startswith("the gradient") else 0.0
        both_finite = torch.isfinite(expected).all() and torch.isfinite(found).all()
        gap = _size(expected.double() - found.double()) if both_finite else float("inf")
        part = gap / max(_size(expected), least, torch.finfo(torch.float64).tiny)
        if part > worst.part:
            worst = Difference(name, part)
    return worst


def _is_random(layer: nn.Module, arguments: Sequence[Tensor]) -> bool:
    """Whether two calls give different outputs."""
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        found = []
        for seed in (0, 1):
            torch.manual_seed(seed)
            found.append(_outputs(layer, arguments))
    return not all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def _outputs(layer: Callable[..., Any], arguments: Sequence[Tensor]) -> tuple[Tensor, ...]:
    # a layer may work in place on what it is given
    result = layer(*(argument.clone() for argument in arguments))
    return (result,) if isinstance(result, Tensor) else tuple(result)


def _results(
    layer: nn.Module,
    call: Callable[..., Any],
    arguments: Sequence[Tensor],
    with_gradients: bool,
    unread: Collection[int],
) -> list[tuple[str, Tensor | None]]:
    """Names and values of all that is compared; None: no gradient."""
    given = [argument.detach().clone().requires_grad_(argument.requires_grad) for argument in arguments]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        outputs = {number: one for number, one in enumerate(_outputs(call, given)) if number not in unread}
        found: list[tuple[str, Tensor | None]] = [(f"output {number}", one.detach()) for number, one in outputs.items()]
        wanted = [(f"input {number}", one) for number, one in enumerate(given) if one.requires_grad]
        wanted += [(name, one) for name, one in layer.named_parameters() if one.requires_grad]
        ends = [one for one in outputs.values() if one.requires_grad]
        if with_gradients and ends and wanted:
            torch.manual_seed(1)
            # not randn_like, whose values follow the memory of the output
            upper = [torch.randn(output.shape, dtype=output.dtype) for output in ends]
            gradients = torch.autograd.grad(ends, [one for _, one in wanted], upper, allow_unused=True)
            found += [(f"the gradient of {name}", one) for (name, _), one in zip(wanted, gradients, strict=True)]
    return found


def _size(value: Tensor | None) -> float:
    return 0.0 if value is None or not value.numel() else float(value.detach().double().abs().max())
