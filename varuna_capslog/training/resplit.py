"""A checkpoint read by a chain whose layers are split in another way than those that it was written from, or whole."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from varuna_capslog.model.chain import Chain, Layer
from varuna_capslog.model.splitting.pieces import TensorPiece, parts_from_json, put_together, split_table
from varuna_capslog.training.checkpoint import Checkpoint

__all__ = ["manifest_of_layers", "read_for"]


def read_for(checkpoint: Checkpoint, chain: Chain) -> Checkpoint:
    """The checkpoint as if it had been written from the layers of this chain."""
    if checkpoint.manifest.get("splits", {}) == split_table(chain.layers):
        return checkpoint
    return _Resplit(checkpoint, chain)


def manifest_of_layers(chain: Chain) -> dict[str, Any]:
    """A manifest's entries on a chain beside the files of its layers: shared parameters, and layers that are parts."""
    shared = {use.name: [[index, name] for index, name in use.uses] for use in chain.shared}
    splits = split_table(chain.layers)
    return {"shared": shared, **({"splits": splits} if splits else {})}


class _Resplit(Checkpoint):
    """Puts whole layers together and takes the parts from them that the chain's layers hold."""

    def __init__(self, checkpoint: Checkpoint, chain: Chain) -> None:
        layers: dict[str, Any] = {layer.name: {} for layer in chain.layers}
        super().__init__(checkpoint.path, {**checkpoint.manifest, **manifest_of_layers(chain), "layers": layers})
        self._found, self._chain = checkpoint, chain
        self._whole = functools.lru_cache(maxsize=1)(self._put_together)  # the parts of a layer follow each other

    def layer(self, name: str, mapped: bool = False) -> dict[str, Any]:
        """The state of a layer of the chain; see `Checkpoint.layer`."""
        index = next(at for at, layer in enumerate(self._chain.layers) if layer.name == name)
        layer, shared = self._chain.layers[index], self._chain.shared_names(index)
        kept = self._whole(layer.part.layer if layer.part else name, mapped)
        pieces = {
            inner: piece
            for inner, piece in _pieces(layer).items()
            if shared.get(inner, f"{name}.{inner}") == f"{name}.{inner}"
        }
        state: dict[str, Any] = {
            kind: {
                inner: piece.of(kept[kind][piece.name]) for inner, piece in pieces.items() if piece.name in kept[kind]
            }
            for kind in ("parameters", "buffers")
        }
        moments = {
            inner: kept["optimizer"][piece.name] for inner, piece in pieces.items() if piece.name in kept["optimizer"]
        }
        state["optimizer"] = {
            inner: {key: pieces[inner].of(value) for key, value in held.items()} for inner, held in moments.items()
        }
        return state | _scaler_of(kept)

    def _put_together(self, layer_name: str, mapped: bool) -> dict[str, Any]:
        """The checkpoint's state of a whole layer, as its file would hold it."""
        rows = self._found.manifest.get("splits", {}).get(layer_name)
        if rows is None:
            return self._found.layer(layer_name, mapped)
        parts = [(pieces, self._found.layer(part, mapped)) for part, pieces in parts_from_json(rows).items()]
        joined: dict[str, Any] = {
            kind: put_together((pieces, state[kind]) for pieces, state in parts) for kind in ("parameters", "buffers")
        }
        joined["optimizer"] = moments = defaultdict[str, dict[str, Any]](dict)
        for key in sorted({key for _, state in parts for kept in state["optimizer"].values() for key in kept}):
            of_key = [
                (pieces, {name: kept[key] for name, kept in state["optimizer"].items() if key in kept})
                for pieces, state in parts
            ]
            for name, value in put_together(of_key).items():
                moments[name][key] = value
        return joined | _scaler_of(parts[0][1])


def _scaler_of(kept: Mapping[str, Any]) -> dict[str, Any]:
    """The run's loss scale, which the file of every layer has, where it is scaled."""
    return {"scaler": kept["scaler"]} if "scaler" in kept else {}


def _pieces(layer: Layer) -> Mapping[str, TensorPiece]:
    if layer.part is not None:
        return layer.part.pieces
    names = (*dict(layer.module.named_parameters()), *dict(layer.module.named_buffers()))
    return {name: TensorPiece(name) for name in names}
