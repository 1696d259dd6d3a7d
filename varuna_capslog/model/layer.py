"""One layer of a chain: a module with the names of the tensors that it reads and writes; its parameters' gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from varuna_capslog.base.errors import CapslogError

__all__ = [
    "Layer",
    "PartOf",
    "TensorPiece",
    "dense_gradient",
    "gradient_hooks",
    "of_parts",
    "parts_from_json",
    "put_together",
    "split_table",
]


# -- Describes which elements of a whole layer's tensors the parts of a split layer hold, and joins them again.
#
# Checkpoints and files of weights rest on this: tensors written under one split are read under any other, or none.


SplitTable = dict[str, dict[str, dict[str, list[Any]]]]
"""Whole layer -> its parts -> name of a tensor in the part -> a `TensorPiece` as JSON."""


@dataclass(frozen=True)
class TensorPiece:
    """Elements of one tensor of a whole layer, in order.

    name: of the tensor inside the whole layer.
    size: of its dimension `dim`.
    dim: the dimension that is cut; ranges: (first, end) of its indices, in order; () for all of them.
    """

    name: str
    size: int = 0
    dim: int = 0
    ranges: tuple[tuple[int, int], ...] = ()

    def of(self, full: Any) -> Any:
        """Return these elements of the full tensor, or of one of its shape such as an optimizer's moment; numbers as
        they are.
        """
        if not self._cuts(full):
            return full
        self._check(full, self.size)
        return torch.cat([full.narrow(self.dim, first, end - first) for first, end in self.ranges], self.dim)

    def put(self, part: Any, full: Any) -> Any:
        """Copy a part into the full tensor, and return it; full: None where no part has been copied into it yet."""
        if not self._cuts(part):
            return part if full is None else full
        self._check(part, sum(end - first for first, end in self.ranges))
        shape = [self.size if at == self.dim else size for at, size in enumerate(part.shape)]
        if full is None:
            full = part.new_empty(shape)
        elif not isinstance(full, Tensor) or list(full.shape) != shape:
            raise CapslogError(f"the parts of {self.name!r} do not make one tensor of shape {shape}")
        at = 0
        for first, end in self.ranges:
            full.narrow(self.dim, first, end - first).copy_(part.narrow(self.dim, at, end - first))
            at += end - first
        return full

    def _check(self, tensor: Tensor, size: int) -> None:
        if self.dim >= tensor.dim() or tensor.shape[self.dim] != size:
            raise CapslogError(
                f"{self.name!r} has shape {list(tensor.shape)}, but {size} in dimension {self.dim} is due"
            )

    def _cuts(self, value: Any) -> bool:
        """True where a part has only some elements of such a value."""
        return bool(self.ranges) and isinstance(value, Tensor) and value.dim() > 0

    def to_json(self) -> list[Any]:
        """Return [name, size, dim, ranges]."""
        return [self.name, self.size, self.dim, [list(bounds) for bounds in self.ranges]]

    @classmethod
    def from_json(cls, value: Sequence[Any]) -> TensorPiece:
        """Return the piece that `to_json` described."""
        name, size, dim, ranges = value
        return cls(name, int(size), int(dim), tuple((int(first), int(end)) for first, end in ranges))


@dataclass(frozen=True)
class PartOf:
    """Whole layer that a layer of a chain is a part of.

    layer: name of the whole layer, which is not in the chain.
    pieces: name of each tensor inside the part -> the elements that it has.
    """

    layer: str
    pieces: Mapping[str, TensorPiece]


def split_table(layers: Iterable[Layer]) -> SplitTable:
    """Return a manifest's table of those layers of a chain that are parts; {} where none is."""
    table: SplitTable = {}
    for layer in layers:
        if layer.part is not None:
            rows = {name: piece.to_json() for name, piece in layer.part.pieces.items()}
            table.setdefault(layer.part.layer, {})[layer.name] = rows
    return table


def parts_from_json(rows: Mapping[str, Mapping[str, Sequence[Any]]]) -> dict[str, dict[str, TensorPiece]]:
    """Return the parts of one whole layer of a `split_table`."""
    return {
        part: {name: TensorPiece.from_json(value) for name, value in pieces.items()} for part, pieces in rows.items()
    }


def put_together(parts: Iterable[tuple[Mapping[str, TensorPiece], Mapping[str, Any]]]) -> dict[str, Any]:
    """Return the whole layer's tensors by name; numbers, such as an optimizer's step, are those of the first part.

    Args:
        parts: (pieces, tensors by name) of each part; a tensor that is missing is in another part.
    """
    layer_tensors: dict[str, Any] = {}
    for pieces, tensors in parts:
        for name, piece in pieces.items():
            if name in tensors:
                layer_tensors[piece.name] = piece.put(tensors[name], layer_tensors.get(piece.name))
    return layer_tensors


def of_parts(weights: Mapping[str, Tensor], layers: Iterable[Layer]) -> dict[str, Tensor]:
    """Return the weights by their addresses `<layer>.<name>`, those of whole layers divided among their parts."""
    parts, divided = {}, set()
    for layer in layers:
        if layer.part is None:
            continue
        for name, piece in layer.part.pieces.items():
            full_address = f"{layer.part.layer}.{piece.name}"
            if full_address in weights:
                parts[f"{layer.name}.{name}"] = piece.of(weights[full_address])
                divided.add(full_address)
    return {address: value for address, value in weights.items() if address not in divided} | parts


# -- one layer of a chain


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
