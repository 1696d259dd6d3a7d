"""One layer of a chain: a module with the names of the tensors that it reads and writes; its parameters' gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.model.splitting.pieces import PartOf

__all__ = ["Layer", "dense_gradient", "gradient_hooks"]


@dataclass(frozen=True)
class Layer:
    """Indivisible piece of a chain.

    Attributes:
        name: unique in the chain; checkpoints and profiles address the layer by it.
        module: called as `module(*[tensor for name in reads])`; returns one tensor, or a tuple in the order of
            `writes`.
        reads: names of the tensors that it takes.
        writes: names of the tensors that it returns; a name that existed before is replaced.
        part: the layer that it is a part of, where one was split (`splitting.splitter`).
    """

    name: str
    module: nn.Module
    reads: tuple[str, ...] = ("x",)
    writes: tuple[str, ...] = ("x",)
    part: PartOf | None = None

    def __call__(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Run the layer on its part of `values`; return the tensors that it writes."""
        return self.run(values)

    def run(self, values: Mapping[str, Tensor], instead: Callable[..., Any] | None = None) -> dict[str, Tensor]:
        """Do the same as a call of the layer; `instead`: called in the place of its module."""
        result = (instead or self.module)(*[values[name] for name in self.reads])
        if isinstance(result, Tensor):
            result = (result,)
        if len(result) != len(self.writes):
            raise CapslogError(
                f"layer {self.name!r} returned {len(result)} tensors but declares writes={list(self.writes)}; make "
                "both the same"
            )
        return dict(zip(self.writes, result, strict=True))


def dense_gradient(gradient: Tensor) -> Tensor:
    """Return a dense gradient: an embedding's may be sparse, and gradients are added, normed and sent dense."""
    return gradient.to_dense() if gradient.is_sparse else gradient


def gradient_hooks(parameter: nn.Parameter) -> list[Any]:
    """Return the user's own hooks on a parameter's gradient."""
    hooks = [*(parameter._backward_hooks or {}).values()]
    hooks += (getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values()
    return [hook for hook in hooks if hook is not dense_gradient]
