"""Which elements of a whole layer's tensors the parts of a split layer hold, and how they are put together again.

Checkpoints and files of weights rest on this: what was written under one split is read under any other, or none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

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

    def of(self, whole: Tensor) -> Tensor:
        """These elements of the whole tensor, or of one of its shape such as an optimizer's moment."""
        if not self.ranges:
            return whole
        return torch.cat([whole.narrow(self.dim, first, end - first) for first, end in self.ranges], self.dim)

    def put(self, part: Tensor, whole: Tensor) -> None:
        """Writes these elements into the whole tensor."""
        at = 0
        for first, end in self.ranges:
            whole.narrow(self.dim, first, end - first).copy_(part.narrow(self.dim, at, end - first))
            at += end - first

    def shape_of_whole(self, shape: Sequence[int]) -> list[int]:
        """The whole tensor's shape, from that of these elements."""
        return [self.size if self.ranges and at == self.dim else size for at, size in enumerate(shape)]

    def to_json(self) -> list[Any]:
        """[name, size, dim, ranges]."""
        return [self.name, self.size, self.dim, [list(one) for one in self.ranges]]

    @classmethod
    def from_json(cls, value: Sequence[Any]) -> TensorPiece:
        """The piece that `to_json` gave."""
        name, size, dim, ranges = value
        return cls(name, size, dim, tuple((first, end) for first, end in ranges))


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


def put_together(parts: Iterable[tuple[Mapping[str, TensorPiece], Mapping[str, Tensor]]]) -> dict[str, Tensor]:
    """The whole layer's tensors by name.

    Args:
        parts: of each part its pieces and its tensors by name; a tensor that is missing is in another part.
    """
    found: dict[str, Tensor] = {}
    for pieces, tensors in parts:
        for name, piece in pieces.items():
            value = tensors.get(name)
            if value is None:
                continue
            if not piece.ranges:
                found.setdefault(piece.name, value)
                continue
            if piece.name not in found:
                found[piece.name] = value.new_empty(piece.shape_of_whole(value.shape))
            piece.put(value, found[piece.name])
    return found


def of_parts(weights: Mapping[str, Tensor], layers: Iterable[Layer]) -> dict[str, Tensor]:
    """The weights by their addresses `<layer>.<name>`, those of whole layers divided among their parts."""
    parts, divided = {}, set()
    for layer in layers:
        for name, piece in layer.part.pieces.items() if layer.part else ():
            whole = f"{layer.part.layer}.{piece.name}" if layer.part else ""
            if whole in weights:
                parts[f"{layer.name}.{name}"] = piece.of(weights[whole])
                divided.add(whole)
    return {address: value for address, value in weights.items() if address not in divided} | parts
