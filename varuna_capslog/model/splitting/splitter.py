"""Splits one layer of a chain into parts, which are layers of the chain themselves.

A part holds some heads of an attention, some columns of a feed-forward, or some of the positions. A last part joins the
results in the order of the parts, so that the joined result does not depend on the ranks: the parts run on one rank,
one after the other, or in parallel on several. Code for chains handles split layers like any others.

A module can be split if it has a method `split(splitter)`, which adds the parts, or if `torch_layers` knows how.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from typing import TypeVar

from torch import Tensor, nn

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.model.layer import Layer, PartOf, TensorPiece

__all__ = ["KINDS", "Splitter", "share_of", "wanted_split"]

Module = TypeVar("Module", bound=nn.Module)
Own = TypeVar("Own", bound=Tensor)

KINDS = {"tensor": "heads and columns", "sequence": "positions"}
"""Kinds of splits, and what they divide among their parts."""


def wanted_split(text: str, where: str) -> tuple[str, int]:
    """Return kind and degree of a split such as tensor-4. Raises CapslogError, which names `where`, for other texts."""
    match = re.fullmatch(r"([a-z]+)-(\d+)", text)
    if match is None or match[1] not in KINDS or int(match[2]) < 2:
        raise CapslogError(
            f"{where} is {text!r}; write tensor-N or sequence-N with the number of parts, at least 2, such as tensor-2"
        )
    return match[1], int(match[2])


def share_of(count: int, part: int, degree: int, what: str) -> tuple[int, int]:
    """Return (first, end) of a part's share of `count` entries (`what`). Raises CapslogError for unequal shares."""
    if count % degree:
        raise CapslogError(
            f"its {count} {what} cannot be shared out equally among {degree} parts; take a "
            "number of parts that divides them"
        )
    size = count // degree
    return part * size, (part + 1) * size


class Splitter:
    """Collects the parts of one layer.

    shared: name inside the layer -> address, of the parameters that other layers use too.

    Attributes:
        kind, degree: kind of the split and number of its parts, as in `tensor-4`.
        reads, writes: names of the tensors that the whole layer reads and writes.
    """

    def __init__(self, layer: Layer, kind: str, degree: int, shared: Mapping[str, str]) -> None:
        self.kind, self.degree = kind, degree
        self.reads, self.writes = layer.reads, layer.writes
        self._layer, self._shared = layer, shared
        tensors: dict[str, Tensor] = dict(layer.module.named_parameters()) | dict(layer.module.named_buffers())
        self._pieces = {id(tensor): TensorPiece(name) for name, tensor in tensors.items()}
        self._kept: list[Tensor] = []
        self._layers: list[Layer] = []
        self._held: dict[str, list[TensorPiece]] = {name: [] for name in tensors}

    def value(self, name: str) -> str:
        """Return the name of a tensor that passes between parts of this layer only."""
        return f"{self._layer.name}.{name}"

    def cut(self, parameter: Tensor, dim: int, ranges: Sequence[tuple[int, int]]) -> nn.Parameter:
        """Return a part's parameter: ranges along one dimension of the layer's parameter; without ranges, all of it.

        Raises CapslogError for a parameter that other layers use whole.
        """
        piece = self._piece(parameter, dim, ranges)
        return self._known(nn.Parameter(piece.of(parameter.detach()), requires_grad=parameter.requires_grad), piece)

    def cut_buffer(self, buffer: Tensor, dim: int, ranges: Sequence[tuple[int, int]]) -> Tensor:
        """Return a part of a buffer, as `cut` does of a parameter."""
        piece = self._piece(buffer, dim, ranges)
        return self._known(piece.of(buffer.detach()), piece)

    def sharing(self, module: Module) -> Module:
        """Return a copy of the layer, or of a module in it, which shares the parameters but has its own buffers."""
        share = copy.deepcopy(module, {id(parameter): parameter for parameter in module.parameters()})
        for buffer, copied in zip(module.buffers(), share.buffers(), strict=True):
            self._known(copied, self._pieces[id(buffer)])
        return share

    def _piece(self, tensor: Tensor, dim: int, ranges: Sequence[tuple[int, int]]) -> TensorPiece:
        name = self._pieces[id(tensor)].name
        if name in self._shared:
            raise CapslogError(
                f"it would cut {name!r}, which other layers use as {self._shared[name]!r}; leave the layer whole, or "
                f"split it by sequence-{self.degree} if it can be"
            )
        return TensorPiece(name, tensor.shape[dim], dim, tuple(ranges)) if ranges else TensorPiece(name)

    def _known(self, tensor: Own, piece: TensorPiece) -> Own:
        self._pieces[id(tensor)] = piece
        self._kept.append(tensor)  # so that no other tensor gets its id
        return tensor

    def add(self, name: str, module: nn.Module, reads: Sequence[str], writes: Sequence[str]) -> None:
        """Add a part.

        name: unique among the parts.
        module: its parameters and buffers are those of the whole layer, or from `cut`, `cut_buffer` or `sharing`.
        reads, writes: as in `Layer`; see `value`.
        """
        pieces = {}
        tensors = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
        for inner, tensor in tensors:
            piece = self._pieces.get(id(tensor))
            if piece is None:
                raise CapslogError(
                    f"part {name!r} of layer {self._layer.name!r} has a tensor {inner!r} that the layer has not; take "
                    "it from the layer, whole or with Splitter.cut"
                )
            pieces[inner] = piece
            self._held[piece.name].append(piece)
        part = PartOf(self._layer.name, pieces)
        self._layers.append(Layer(f"{self._layer.name}.{name}", module, tuple(reads), tuple(writes), part))

    def layers(self) -> list[Layer]:
        """Return the parts, in order. Raises CapslogError where they lack elements of a tensor of the whole layer."""
        for name, pieces in self._held.items():
            ranges = sorted({bounds for piece in pieces for bounds in piece.ranges})
            reached = 0
            for first, end in ranges:
                reached = max(reached, end) if first <= reached else reached
            if not pieces or (all(piece.ranges for piece in pieces) and reached < pieces[0].size):
                raise CapslogError(
                    f"the parts of layer {self._layer.name!r} do not hold all of its {name!r}; every element must be "
                    "in one of them"
                )
        return self._layers
