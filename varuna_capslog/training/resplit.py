"""A checkpoint read by a chain whose layers are split in another way than those that it was written from, or whole."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from varuna_capslog.model.chain import Chain, Layer
from varuna_capslog.model.splitting.pieces import TensorPiece, parts_from_json, put_together, split_table
from varuna_capslog.training.checkpoint import Checkpoint

__all__ = ["read_for"]


def read_for(checkpoint: Checkpoint, chain: Chain) -> Checkpoint:
    """The checkpoint as if it had been written from the layers of this chain."""
    if checkpoint.manifest.get("splits", {}) == split_table(chain.layers):
        return checkpoint
    return _Resplit(checkpoint, chain)


class _Resplit(Checkpoint):
    """Puts the whole layers together and takes from them what the chain's layers hold."""

    def __init__(self, found: Checkpoint, chain: Chain) -> None:
        shared = {use.name: [[index, name] for index, name in use.uses] for use in chain.shared}
        layers: dict[str, Any] = {layer.name: {} for layer in chain.layers}
        super().__init__(found.path, {**found.manifest, "shared": shared, "layers": layers})
        self._found, self._chain = found, chain
        self._whole = functools.lru_cache(maxsize=1)(self._put_together)

    def layer(self, name: str, mapped: bool = False) -> dict[str, Any]:
        """As `Checkpoint.layer`, of a layer of the chain."""
        index = next(at for at, layer in enumerate(self._chain.layers) if layer.name == name)
        layer, shared = self._chain.layers[index], self._chain.shared_names(index)
        kept = self._whole(layer.part.layer if layer.part else name, mapped)
        pieces = _pieces(layer)
        own = {one: piece for one, piece in pieces.items() if shared.get(one, f"{name}.{one}") == f"{name}.{one}"}
        return {
            kind: {one: _taken(piece, kept[kind][piece.name]) for one, piece in own.items() if piece.name in kept[kind]}
            for kind in ("parameters", "buffers", "optimizer")
        }

    def _put_together(self, whole: str, mapped: bool) -> dict[str, Any]:
        """What the checkpoint has of a whole layer, as its file would hold it."""
        rows = self._found.manifest.get("splits", {}).get(whole)
        if rows is None:
            return self._found.layer(whole, mapped)
        parts = [(pieces, self._found.layer(part, mapped)) for part, pieces in parts_from_json(rows).items()]
        found: dict[str, Any] = {
            kind: put_together((pieces, state[kind]) for pieces, state in parts) for kind in ("parameters", "buffers")
        }
        found["optimizer"] = _moments(parts)
        return found


def _pieces(layer: Layer) -> Mapping[str, TensorPiece]:
    if layer.part is not None:
        return layer.part.pieces
    module = layer.module
    names = (*dict(module.named_parameters()), *dict(module.named_buffers()))
    return {name: TensorPiece(name) for name in names}


def _taken(piece: TensorPiece, value: Any) -> Any:
    """The part's share: of a tensor, or of what an optimizer keeps of one, by key."""
    if isinstance(value, Tensor):
        return piece.of(value)
    return {key: piece.of(one) if isinstance(one, Tensor) and one.dim() else one for key, one in value.items()}


def _moments(parts: Sequence[tuple[Mapping[str, TensorPiece], dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """What the optimizer keeps of the whole layer's parameters; numbers, such as that of the step, are the parts'."""
    found: dict[str, dict[str, Any]] = {}
    keys = {key for _, state in parts for kept in state["optimizer"].values() for key in kept}
    for key in sorted(keys):
        values = [
            (pieces, {name: kept[key] for name, kept in state["optimizer"].items() if key in kept})
            for pieces, state in parts
        ]
        for pieces, held in values:
            for name, value in held.items():
                if not (isinstance(value, Tensor) and value.dim()):
                    found.setdefault(pieces[name].name, {})[key] = value
        shaped = [
            (pieces, {name: one for name, one in held.items() if isinstance(one, Tensor) and one.dim()})
            for pieces, held in values
        ]
        for name, value in put_together(shaped).items():
            found.setdefault(name, {})[key] = value
    return found
