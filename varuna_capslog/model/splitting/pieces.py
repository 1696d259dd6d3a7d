"""Which elements of a whole layer's tensors the parts of a split layer hold, and how they are put together again.

Checkpoints and files of weights rest on this: what was written under one split is read under any other, or none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from varuna_capslog.base.errors import CapslogError

if TYPE_CHECKING:
    from varuna_capslog.model.layer import Layer

__all__ = ["PartOf", "TensorPiece", "of_parts", "parts_from_json", "put_together", "split_table"]

SplitTable = dict[str, dict[str, dict[str, list[Any]]]]
"""Whole layer -> its parts -> name of a tensor in the part -> a `TensorPiece` as JSON."""


@dataclass(frozen=True)
class TensorPiece:
    """Some of the elements of one tensor of a whole layer, in order.

    name: of the tensor inside the whole layer.
    size: of its dimension `dim`.
    dim: the dimension that is cut; ranges: (first, end) of its indices, one after the other; () for all of them.
    """

    name: str
    size: int = 0
    dim: int = 0
    ranges: tuple[tuple[int, int], ...] = ()

    def of(self, whole: Any) -> Any:
        """These elements of the whole tensor, or of one of its shape such as an optimizer's moment; numbers as they
        are.
        """
        if not self._cuts(whole):
            return whole
        self._check(whole, self.size)
        return torch.cat([whole.narrow(self.dim, first, end - first) for first, end in self.ranges], self.dim)

    def put(self, part: Any, whole: Any) -> Any:
        """The whole tensor with these elements of a part; whole: None where no part has been put into it yet."""
        if not self._cuts(part):
            return part if whole is None else whole
        self._check(part, sum(end - first for first, end in self.ranges))
        shape = [self.size if at == self.dim else size for at, size in enumerate(part.shape)]
        if whole is None:
            whole = part.new_empty(shape)
        elif not isinstance(whole, Tensor) or list(whole.shape) != shape:
            raise CapslogError(f"the parts of {self.name!r} do not make one tensor of shape {shape}")
        at = 0
        for first, end in self.ranges:
            whole.narrow(self.dim, first, end - first).copy_(part.narrow(self.dim, at, end - first))
            at += end - first
        return whole

    def _check(self, tensor: Tensor, size: int) -> None:
        if self.dim >= tensor.dim() or tensor.shape[self.dim] != size:
            raise CapslogError(
                f"{self.name!r} has shape {list(tensor.shape)}, but {size} in dimension {self.dim} is due"
            )

    def _cuts(self, value: Any) -> bool:
        """Whether a part has but some of the elements of such a value."""
        return bool(self.ranges) and isinstance(value, Tensor) and value.dim() > 0

    def to_json(self) -> list[Any]:
        """[name, size, dim, ranges]."""
        return [self.name, self.size, self.dim, [list(one) for one in self.ranges]]

    @classmethod
    def from_json(cls, value: Sequence[Any]) -> TensorPiece:
        """The piece that `to_json` gave."""
        name, size, dim, ranges = value
        return cls(name, int(size), int(dim), tuple((int(first), int(end)) for first, end in ranges))


@dataclass(frozen=True)
class PartOf:
    """What a layer of a chain is a part of.

    layer: name of the whole layer, which is not in the chain.
    pieces: name of each tensor inside the part -> the elements that it has.
    """

    layer: str
    pieces: Mapping[str, TensorPiece]


def split_table(layers: Iterable[Layer]) -> SplitTable:
    """What a manifest says of the layers of a chain that are parts; {} where none is."""
    table: SplitTable = {}
    for layer in layers:
        if layer.part is not None:
            rows = {name: piece.to_json() for name, piece in layer.part.pieces.items()}
            table.setdefault(layer.part.layer, {})[layer.name] = rows
    return table


def parts_from_json(rows: Mapping[str, Mapping[str, Sequence[Any]]]) -> dict[str, dict[str, TensorPiece]]:
    """The parts of one whole layer of a `split_table`."""
    return {
        part: {name: TensorPiece.from_json(value) for name, value in pieces.items()} for part, pieces in rows.items()
    }


def put_together(parts: Iterable[tuple[Mapping[str, TensorPiece], Mapping[str, Any]]]) -> dict[str, Any]:
    """The whole layer's tensors by name; numbers, such as that of an optimizer's step, are those of the first part.

    Args:
        parts: of each part its pieces and its tensors by name; a tensor that is missing is in another part.
    """
    found: dict[str, Any] = {}
    for pieces, tensors in parts:
        for name, piece in pieces.items():
            if name in tensors:
                found[piece.name] = piece.put(tensors[name], found.get(piece.name))
    return found


def of_parts(weights: Mapping[str, Tensor], layers: Iterable[Layer]) -> dict[str, Tensor]:
    """The weights by their addresses `<layer>.<name>`, those of whole layers divided among their parts."""
    parts, divided = {}, set()
    for layer in layers:
        if layer.part is None:
            continue
        for name, piece in layer.part.pieces.items():
            whole = f"{layer.part.layer}.{piece.name}"
            if whole in weights:
                parts[f"{layer.name}.{name}"] = piece.of(weights[whole])
                divided.add(whole)
    return {address: value for address, value in weights.items() if address not in divided} | parts
