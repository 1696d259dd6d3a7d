"""Registry of variants by name: applies them to the layers of a chain, and compares them with the plain layers."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib.metadata import entry_points
from typing import Any

import torch
from torch import Tensor, nn

from varuna_capslog.base import fields
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.variants.attention import (
    ChunkedAttention,
    EagerAttention,
    SdpaAttention,
    SdpaEfficientAttention,
    SdpaFlashAttention,
    SdpaMathAttention,
    SplitKeysAttention,
    attention_everywhere,
)
from varuna_capslog.variants.chunked_loss import chunked_loss, drop_unread_logits
from varuna_capslog.variants.wrapped import compiled, drop_conversions, in_bfloat16, in_channels_last, without_onednn

__all__ = [
    "NUMERICS",
    "TOLERANCES",
    "Difference",
    "Variant",
    "apply_variants",
    "difference",
    "drop_unread_work",
    "known_variants",
    "layers_meant",
    "matched",
    "register",
    "variant_named",
]


# -- Variants by name
#
# A variant rewrites one layer in place and leaves its parameters and their names as they are. Its numerical class
# limits the difference between its results and those of the configured layer. Users add variants with `register`, or
# with an entry point of the group `varuna_capslog.variants` that names a `Variant`.


NUMERICS = {"same": "the same bits", "close": "results within 1e-5", "loose": "results within 1e-2"}
"""Numerical classes, strictest first, and the agreement with the configured layer that each promises."""

TOLERANCES = {"same": 0.0, "close": 1e-5, "loose": 1e-2}
"""Largest difference allowed by each numerical class, relative to the largest value; see `difference`."""


@dataclass(frozen=True)
class Variant:
    """A way to compute a layer.

    Attributes:
        name, numerics: the name in configs, and the numerical class, a key of `NUMERICS`.
        rewrite: changes a layer's module in place; returns the number of changed parts, or None for a layer to which
            the variant does not apply.
        searched: True if planners may choose it, which costs profile runs of every layer to which it applies; else only
            `profile.variants` or `variants` of a config can choose it.
        estimated: True if an estimated profile has its costs; else planners choose it by measured profiles alone.
        joined: True if neighbours with this variant need no conversion between them, so a pair of them costs less than
            its two layers alone.
    """

    name: str
    numerics: str
    rewrite: Callable[[nn.Module], int | None]
    searched: bool = True
    joined: bool = False
    estimated: bool = True

    def __post_init__(self) -> None:
        fields.text(self.name, "name of a variant")
        if self.name == "plain" or "," in self.name:
            raise CapslogError(f"a variant cannot be called {self.name!r}; use another name, without commas")
        fields.choice(self.numerics, f"numerics of variant {self.name!r}", allowed=tuple(NUMERICS))


_ATTENTION = {
    "eager": EagerAttention,
    "sdpa": SdpaAttention,
    "chunked": ChunkedAttention,
    "split-keys": SplitKeysAttention,
    "sdpa-math": SdpaMathAttention,
    "sdpa-efficient": SdpaEfficientAttention,
    "sdpa-flash": SdpaFlashAttention,
}
_SEARCHED = ("eager", "sdpa", "chunked")
"""Attention variants that planners may choose; the others rarely gain more than `chunked` or `sdpa`."""
_registered: dict[str, Variant] = {
    **{
        name: Variant(name, "close", functools.partial(attention_everywhere, kind=kind), name in _SEARCHED)
        for name, kind in _ATTENTION.items()
    },
    "channels-last": Variant("channels-last", "close", in_channels_last, joined=True),
    "bfloat16": Variant("bfloat16", "loose", in_bfloat16),
    "chunked-loss": Variant("chunked-loss", "close", chunked_loss),
    "compiled": Variant("compiled", "close", compiled, searched=False, estimated=False),
    "onednn-off": Variant("onednn-off", "close", without_onednn, searched=False, estimated=False),
}


def register(variant: Variant) -> None:
    """Register a variant in this process. Raises CapslogError where another variant has its name."""
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
    """Return all variants by name, those of entry points included."""
    _load_entry_points()
    return dict(_registered)


def variant_named(name: str) -> Variant:
    """Return the variant of this name. Raises CapslogError for an unknown name."""
    variants = known_variants()
    fields.refuse_unknown([name], list(variants), "variant")
    return variants[name]


def matched(names: Sequence[str], choices: Mapping[str, str]) -> dict[int, str]:
    """Return layer number -> name of the variant that a config's `variants` choose for the layer.

    Args:
        names: of every layer of a chain.
        choices: pattern of layers' names (`*`, `?`, `[...]`; `#3`: layer 3) -> name of a variant; the last match holds.

    Raises:
        CapslogError: an unknown variant, or a pattern that matches no layer; the message has the nearest name.
    """
    fields.refuse_unknown(list(choices.values()), list(known_variants()), "variant")
    wanted: dict[int, str] = {}
    for pattern, name in choices.items():
        wanted |= dict.fromkeys(layers_meant(names, pattern, "variants"), name)
    return dict(sorted(wanted.items()))


def layers_meant(names: Sequence[str], pattern: str, key: str) -> list[int]:
    """Return the numbers of the layers that a pattern matches; see `matched`. Raises CapslogError, with the config's
    `key` and the nearest name, where no layer matches.
    """
    matching = [number for number, layer in enumerate(names) if _is_meant(pattern, number, layer)]
    if not matching:
        families = {layer.rpartition(".")[0] + ".*" for layer in names if "." in layer}
        near = difflib.get_close_matches(pattern, [*names, *sorted(families)], n=1)
        some = ", ".join(names[:: max(1, len(names) // 4)])
        advice = f"did you mean {near[0]!r}?" if near else f"the layers are called {some}"
        raise CapslogError(f"{key} has the pattern {pattern!r}, which matches no layer; {advice}")
    return matching


def _is_meant(pattern: str, number: int, name: str) -> bool:
    return pattern == f"#{number}" or fnmatchcase(name, pattern)


def apply_variants(
    layers: Sequence[tuple[str, nn.Module]], choices: Mapping[str, str], numerics: str = "same"
) -> dict[int, str]:
    """Rewrite layers in place; return layer number -> variant, for every layer to which its variant applies.

    Args:
        layers: name and module of every layer of a chain.
        choices: as for `matched`.
        numerics: the weakest numerical class that is allowed.

    Raises:
        CapslogError: as `matched`; a variant of a weaker class; a pattern whose variant applies to none of its layers.
    """
    variants, classes = known_variants(), list(NUMERICS)
    applied: dict[int, str] = {}
    for index, name in matched([layer for layer, _ in layers], choices).items():
        variant = variants[name]
        changed = variant.rewrite(layers[index][1])
        if changed and classes.index(variant.numerics) > classes.index(numerics):
            raise CapslogError(
                f"variants gives layer {layers[index][0]!r} the variant {name!r}, which promises "
                f"{NUMERICS[variant.numerics]}, but numerics={numerics} allows {NUMERICS[numerics]} at most; set "
                f"numerics={variant.numerics}"
            )
        if changed is not None:
            applied[index] = name
    for pattern, name in choices.items():
        if not any(_is_meant(pattern, index, layers[index][0]) for index in applied):
            raise CapslogError(
                f"variants gives {pattern!r} the variant {name!r}, which none of these layers has a place for; leave "
                "it out, or name other layers"
            )
    return applied


def drop_unread_work(
    layers: Sequence[nn.Module], writes: Sequence[Sequence[str]], readers: Mapping[Any, Sequence[int]]
) -> None:
    """Remove work for outputs that their readers do not need: conversions between channels-last layers of a chain, and
    logits that nothing reads. Results do not change, and the removed work is the same for all cut lists.

    Args:
        layers, writes: all layers of the chain, some of them rewritten, and the names of each layer's outputs.
        readers: (tensor, its layer) -> layers that read it, ascending; the loss counts as a layer behind the last.
    """
    drop_conversions(layers, writes, readers)
    drop_unread_logits(layers, writes, readers)


# -- Comparison of a rewritten layer with the plain one: outputs, and gradients of inputs and parameters.
#
# `profiling.variant_check` calls this for the layers of a chain, before a run uses a variant. It changes neither
# module and runs on the CPU, in the dtypes of its arguments.


_LEAST = 1e-3
"""Lower bound of a gradient's divisor, as a fraction of the layer's largest gradient."""


@dataclass(frozen=True)
class Difference:
    """Largest difference of two layers. what: the tensor's name. part: relative difference; 0: the same bits."""

    what: str
    part: float


def difference(
    plain: nn.Module,
    rewritten: nn.Module,
    arguments: Sequence[Tensor],
    gradients: bool = True,
    call: Callable[..., Any] | None = None,
    unread: Collection[int] = (),
) -> Difference:
    """Run both layers forward and backward on the same values, and return their largest difference.

    Outputs are compared by max|a - b| / max|b|, gradients by max|a - b| / max(max|b|, 1e-3 of the largest gradient of
    the layer). Layers that draw random numbers in training run in eval mode, all others in their present mode.

    Args:
        plain, rewritten: layers with equal parameter names and values, in the modes in which they train.
        arguments: inputs of the layer; gradients of inputs that require one are compared, too.
        gradients: True: compare gradients, too.
        call: runs in place of `rewritten`, such as its compiled code; None: `rewritten` itself.
        unread: indices of outputs that nothing reads: they are not compared, and have no gradient.

    Raises whatever one of the layers raises on these arguments.
    """
    modes = [(module, module.training) for layer in (plain, rewritten) for module in layer.modules()]
    try:
        if _is_random(plain, arguments):
            plain.eval()
            rewritten.eval()
        of_plain, of_other = (
            _results(layer, run or layer, arguments, gradients, unread)
            for layer, run in ((plain, None), (rewritten, call))
        )
    finally:
        for module, mode in modes:
            module.training = mode
    greatest = max([_size(value) for name, value in of_plain if name.startswith("the gradient")], default=0.0)
    worst = Difference("every tensor", 0.0)
    for (name, expected), (_, actual) in zip(of_plain, of_other, strict=True):
        if expected is None and actual is None:
            continue
        if expected is None or actual is None or expected.shape != actual.shape:
            return Difference(name, float("inf"))
        if torch.equal(expected, actual):
            continue
        least = _LEAST * greatest if name.startswith("the gradient") else 0.0
        both_finite = torch.isfinite(expected).all() and torch.isfinite(actual).all()
        gap = _size(expected.double() - actual.double()) if both_finite else float("inf")
        part = gap / max(_size(expected), least, torch.finfo(torch.float64).tiny)
        if part > worst.part:
            worst = Difference(name, part)
    return worst


def _is_random(layer: nn.Module, arguments: Sequence[Tensor]) -> bool:
    """Return True if two random seeds give different outputs."""
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        outputs = []
        for seed in (0, 1):
            torch.manual_seed(seed)
            outputs.append(_outputs(layer, arguments))
    return not all(torch.equal(first, second) for first, second in zip(*outputs, strict=True))


def _outputs(layer: Callable[..., Any], arguments: Sequence[Tensor]) -> tuple[Tensor, ...]:
    # a layer may change its arguments in place
    result = layer(*(argument.clone() for argument in arguments))
    return (result,) if isinstance(result, Tensor) else tuple(result)


def _results(
    layer: nn.Module,
    call: Callable[..., Any],
    arguments: Sequence[Tensor],
    with_gradients: bool,
    unread: Collection[int],
) -> list[tuple[str, Tensor | None]]:
    """Return names and values of all tensors to compare; None: no gradient."""
    inputs = [argument.detach().clone().requires_grad_(argument.requires_grad) for argument in arguments]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        outputs = {number: output for number, output in enumerate(_outputs(call, inputs)) if number not in unread}
        compared: list[tuple[str, Tensor | None]] = [
            (f"output {number}", output.detach()) for number, output in outputs.items()
        ]
        wanted = [(f"input {number}", tensor) for number, tensor in enumerate(inputs) if tensor.requires_grad]
        wanted += [(name, parameter) for name, parameter in layer.named_parameters() if parameter.requires_grad]
        ends = [output for output in outputs.values() if output.requires_grad]
        if with_gradients and ends and wanted:
            torch.manual_seed(1)
            # not randn_like, whose values depend on the output's memory format
            upper = [torch.randn(output.shape, dtype=output.dtype) for output in ends]
            gradients = torch.autograd.grad(ends, [tensor for _, tensor in wanted], upper, allow_unused=True)
            compared += [
                (f"the gradient of {name}", gradient) for (name, _), gradient in zip(wanted, gradients, strict=True)
            ]
    return compared


def _size(value: Tensor | None) -> float:
    return 0.0 if value is None or not value.numel() else float(value.detach().double().abs().max())
