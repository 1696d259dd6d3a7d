"""Splits layers of a chain by the patterns of a config's `splits`."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

import torch

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.model.chain import Chain
from varuna_capslog.model.layer import Layer
from varuna_capslog.model.splitting.splitter import KINDS, Splitter, wanted_split
from varuna_capslog.model.splitting.torch_layers import splitting_of
from varuna_capslog.variants.registry import NUMERICS, layers_meant

__all__ = ["part_number", "possible_splits", "split_chain"]


def split_chain(chain: Chain, splits: Mapping[str, str], numerics: str = "same") -> Chain:
    """Return the chain with some layers split into parts; layers that no pattern of `splits` matches stay as they are.

    Args:
        splits: pattern of layers' names -> kind and number of parts, such as tensor-2 or sequence-4. If several
            patterns match a layer, the last pattern counts.
        numerics: the weakest numerical class that is allowed; parts add up in another order, so that results are
            `close` to those of the whole layer.

    Raises:
        CapslogError: no such split, a pattern that matches no layer or no layer that can be split, a layer that cannot
            be split in this way, layers of factories, or `numerics` "same", which allows no rounding differences.
    """
    if chain.factories is not None:
        raise CapslogError(
            f"splits is {dict(splits)}, but the layers of {chain.name!r} are built by factories, which cannot be "
            "split; give the model as modules"
        )
    if numerics == "same":
        raise CapslogError(
            f"splits is {dict(splits)}, whose parts add up in another order ({NUMERICS['close']}), but numerics=same "
            f"allows {NUMERICS['same']} only; set numerics=close"
        )
    names = [layer.name for layer in chain.layers]
    wanted: dict[int, tuple[str, str, int]] = {}
    for pattern, text in splits.items():
        meant = (pattern, *wanted_split(text, f"splits[{pattern!r}]"))
        wanted |= dict.fromkeys(layers_meant(names, pattern, "splits"), meant)
    layers: list[Layer] = []
    unsplit = set(splits)
    for index, layer in enumerate(chain.layers):
        pattern, kind, degree = wanted.get(index, ("", "", 0))
        parts = _split_layer(layer, kind, degree, chain.shared_names(index)) if pattern else None
        layers += parts or [layer]
        if parts:
            unsplit.discard(pattern)
    for pattern in splits:
        if pattern in unsplit:
            raise CapslogError(
                f"splits gives {pattern!r} the split {splits[pattern]!r}, but none of these layers can be split into "
                f"{' or '.join(KINDS.values())}; their modules have no method split and are none of torch's that can "
                "be, nor captured layers with linear maps one after the other (docs/splits.md)"
            )
    return Chain(layers, chain.inputs, chain.outputs, chain.name)


def possible_splits(chain: Chain, degree: int) -> dict[str, str]:
    """Return `splits` of all layers that can be split by tensor-`degree`; their patterns are layer numbers (#3)."""
    splits = {}
    for index, layer in enumerate(() if chain.factories is not None else chain.layers):
        with contextlib.suppress(CapslogError):
            if _split_layer(layer, "tensor", degree, chain.shared_names(index)):
                splits[f"#{index}"] = f"tensor-{degree}"
    return splits


def part_number(layer: Layer) -> int:
    """Return the number of a part's share, the last piece of its name; 0 for parts without one and for other layers."""
    last = layer.name.removeprefix(layer.part.layer).rpartition(".")[2] if layer.part else ""
    return int(last) if last.isdecimal() else 0


def _split_layer(layer: Layer, kind: str, degree: int, shared: Mapping[str, str]) -> list[Layer] | None:
    """Return the parts of a layer; None where its module cannot be split.

    shared: name inside the layer -> address, of parameters that other layers use too, which cannot be cut.
    """
    split = splitting_of(layer.module)
    if split is None:
        return None
    splitter = Splitter(layer, kind, degree, shared)
    try:
        with torch.no_grad():
            split(splitter)
    except CapslogError as error:
        raise CapslogError(f"layer {layer.name!r} cannot be split by {kind}-{degree}: {error}") from error
    return splitter.layers()
