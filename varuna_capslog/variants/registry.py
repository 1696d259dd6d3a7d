"""The variants that are known by name, and putting the chosen ones into the layers of a chain.

A variant rewrites one layer in place and leaves its parameters and their names as they are. Its numerical class says
how near its results are to those of the layer as the model's config has it. Users add variants with `register`, or with
an entry point of the group `varuna_capslog.variants` that names a `Variant`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib.metadata import entry_points

from torch import nn

from varuna_capslog.base import fields
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.variants.attention import ChunkedAttention, EagerAttention, SdpaAttention, put_in

__all__ = ["NUMERICS", "Variant", "apply_variants", "known_variants", "register"]

NUMERICS = {"same": "the same bits", "close": "results within 1e-5", "loose": "results within 1e-2"}
"""Numerical classes, the strictest first, and what each promises against the layer as configured."""


@dataclass(frozen=True)
class Variant:
    """One way to compute a layer.

    Attributes:
        name: what configs call it.
        numerics: its class, a key of `NUMERICS`.
        rewrite: changes a layer's module in place; returns how many parts it changed, and None where the layer has
            nothing that the variant is for.
    """

    name: str
    numerics: str
    rewrite: Callable[[nn.Module], int | None]

    def __post_init__(self) -> None:
        fields.text(self.name, "name of a variant")
        fields.choice(self.numerics, f"numerics of variant {self.name!r}", allowed=tuple(NUMERICS))


_registered: dict[str, Variant] = {
    one.name: one
    for one in (
        Variant("eager", "close", functools.partial(put_in, kind=EagerAttention)),
        Variant("sdpa", "close", functools.partial(put_in, kind=SdpaAttention)),
        Variant("chunked", "close", functools.partial(put_in, kind=ChunkedAttention)),
    )
}


def register(variant: Variant) -> None:
    """Makes a variant known in this process.

    Raises:
        CapslogError: the name is taken by another one.
    """
    if _registered.setdefault(variant.name, variant) != variant:
        raise CapslogError(f"there is a variant {variant.name!r} already; give yours another name")


@functools.cache
def _load_entry_points() -> None:
    for point in entry_points(group="varuna_capslog.variants"):
        variant = point.load()
        if not isinstance(variant, Variant):
            raise CapslogError(
                f"the entry point {point.name!r} of varuna_capslog.variants gives {type(variant).__name__}; it must "
                "name a varuna_capslog.variants.registry.Variant"
            )
        register(variant)


def known_variants() -> Mapping[str, Variant]:
    """All variants by name, those of entry points included."""
    _load_entry_points()
    return dict(_registered)


def apply_variants(
    layers: Sequence[tuple[str, nn.Module]], choices: Mapping[str, str], numerics: str = "same"
) -> dict[int, str]:
    """Rewrites layers in place.

    Args:
        layers: name and module of every layer of a chain.
        choices: pattern of layers' names (`*`, `?`, `[...]`) -> name of a variant; where several patterns match a
            layer, the last one counts.
        numerics: the weakest numerical class that is allowed.

    Returns:
        Layer -> variant, for every layer that a variant is for.

    Raises:
        CapslogError: a variant that is not known, or of a weaker class than is allowed; a pattern that matches no
            layer, or none that its variant is for.
    """
    known, classes = known_variants(), list(NUMERICS)
    fields.refuse_unknown(list(choices.values()), list(known), "variant")
    wanted: dict[int, str] = {}
    for pattern, name in choices.items():
        matching = [index for index, (layer, _) in enumerate(layers) if fnmatchcase(layer, pattern)]
        if not matching:
            raise CapslogError(
                f"variants has the pattern {pattern!r}, which matches no layer; the layers are called "
                f"{', '.join(layer for layer, _ in layers[:: max(1, len(layers) // 4)])}"
            )
        wanted |= dict.fromkeys(matching, name)
    found: dict[int, str] = {}
    for index, name in sorted(wanted.items()):
        variant = known[name]
        changed = variant.rewrite(layers[index][1])
        if changed and classes.index(variant.numerics) > classes.index(numerics):
            raise CapslogError(
                f"variants gives layer {layers[index][0]!r} the variant {name!r}, which promises "
                f"{NUMERICS[variant.numerics]}, but numerics={numerics} allows {NUMERICS[numerics]} at most; set "
                f"numerics={variant.numerics}"
            )
        if changed is not None:
            found[index] = name
    for pattern, name in choices.items():
        if not any(fnmatchcase(layers[index][0], pattern) for index in found):
            raise CapslogError(
                f"variants gives {pattern!r} the variant {name!r}, which none of these layers has a place for; leave "
                "it out, or name other layers"
            )
    return found
