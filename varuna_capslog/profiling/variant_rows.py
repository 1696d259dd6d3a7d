"""The runs that give the costs of variants: each layer with each variant, and every two neighbours with each pair.

The runs are those of any profile, of a chain in which one or two layers are rewritten; these pass on the same tensors
as the plain layers. `measure` runs them beside those of the plain layers, and `with_variant_rows` estimates them.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.model.chain import Chain, TensorSpec
from varuna_capslog.model.signature import layer_signature
from varuna_capslog.profiles.conditions import JOINED
from varuna_capslog.profiles.record import Profile
from varuna_capslog.profiles.variants import PLAIN, text_of, variant_pairs
from varuna_capslog.profiling.estimate import StageEstimator, key_of_range, row_of
from varuna_capslog.variants.registry import NUMERICS, Variant, known_variants, tell_readers, variant_named

__all__ = ["VariantRun", "allowed_variants", "joined_variants", "variant_runs", "with_variant_rows"]


def allowed_variants(numerics: str, more: Sequence[str] = ()) -> list[Variant]:
    """Return the variants that planners may choose and that are at least as strict as `numerics`.

    more: names of variants that are searched only where a config asks for them (`profile.variants`).

    Raises CapslogError for a name in `more` that is unknown or of a weaker class.
    """
    classes, all_variants = list(NUMERICS), known_variants().values()
    for variant in map(variant_named, more):
        if classes.index(variant.numerics) > classes.index(numerics):
            raise CapslogError(
                f"profile.variants names {variant.name!r}, which promises {NUMERICS[variant.numerics]}, but "
                f"numerics={numerics} allows {NUMERICS[numerics]} at most; leave it out, or set "
                f"numerics={variant.numerics}"
            )
    allowed = [variant for variant in all_variants if classes.index(variant.numerics) <= classes.index(numerics)]
    return [variant for variant in allowed if variant.searched or variant.name in more]


@dataclass(frozen=True)
class VariantRun:
    """A run of one or two layers, at least one of which has a variant.

    Attributes:
        first: the first layer.
        names: the variant of each layer.
        chain: the whole chain, with these layers rewritten; it shares the other layers, and all parameters, with the
            plain chain.
    """

    first: int
    names: tuple[str, ...]
    chain: Chain

    @property
    def end(self) -> int:
        """The layer behind it."""
        return self.first + len(self.names)

    def work(self, specs: Sequence[Mapping[str, TensorSpec]]) -> object:
        """Return a key that is equal for runs that do the same work, which is done once.

        specs: of the tensors across the cuts 0 .. L.
        """
        key = key_of_range(self.chain, self.first, self.end, specs[self.first : self.end + 1])
        return key, self.first > 0, self.end < len(self.chain)


def variant_runs(chain: Chain, variants: Sequence[Variant]) -> list[VariantRun]:
    """Return the runs of all variants that change a layer.

    chain: with the plain layers; not changed.
    """
    rewritten = _rewritten(chain, variants)
    alternatives: dict[int, list[str]] = {}
    for layer, name in rewritten:
        alternatives.setdefault(layer, []).append(name)
    runs = []
    for first, names in variant_pairs(alternatives, len(chain)):
        modules = {first + place: rewritten[first + place, name] for place, name in enumerate(names) if name != PLAIN}
        runs.append(VariantRun(first, names, _with_modules(chain, modules)))
    return runs


def joined_variants(runs: Sequence[VariantRun]) -> dict[str, list[str]]:
    """Return the conditions of a profile with these runs about variants that save a conversion between neighbours."""
    names = {name for run in runs for name in run.names if name != PLAIN and known_variants()[name].joined}
    return {JOINED: sorted(names)} if names else {}


def with_variant_rows(profile: Profile, estimator: StageEstimator, variants: Sequence[Variant]) -> Profile:
    """Return an estimated profile with rows of all `variant_runs`, without variants that cannot be estimated.

    profile: of the estimator's workload.
    """
    rows, runs = [], variant_runs(estimator.chain, [variant for variant in variants if variant.estimated])
    for run in runs:
        row = row_of(estimator.of_chain(run.chain), run.first, run.end)
        rows.append(dataclasses.replace(row, variant=text_of(run.names)))
    conditions = {**profile.conditions, **joined_variants(runs)}
    return dataclasses.replace(profile, observations=(*profile.observations, *rows), conditions=conditions)


def _rewritten(chain: Chain, variants: Sequence[Variant]) -> dict[tuple[int, str], nn.Module]:
    """Return (layer, variant) -> the layer's module with the variant, where the variant changes the layer."""
    modules: dict[tuple[int, str], nn.Module] = {}
    hopeless: set[object] = set()
    for number, layer in enumerate(chain.layers):
        signature = layer_signature(layer)
        for variant in variants:
            if (signature, variant.name) in hopeless:
                continue
            # the parameters stay the chain's own, so that what is shared stays shared
            held: dict[int, Any] = {
                id(tensor): tensor for tensor in (*layer.module.parameters(), *layer.module.buffers())
            }
            module = copy.deepcopy(layer.module, held)
            if variant.rewrite(module):
                modules[number, variant.name] = module
            else:
                hopeless.add((signature, variant.name))
    return modules


def _with_modules(chain: Chain, modules: Mapping[int, nn.Module]) -> Chain:
    copies = {number: _copy(module) for number, module in modules.items()}  # its attributes belong to this chain alone
    layers = [
        dataclasses.replace(layer, module=copies.get(number, layer.module)) for number, layer in enumerate(chain.layers)
    ]
    tell_readers([layer.module for layer in layers], [layer.writes for layer in layers], chain.readers)
    return Chain(layers, chain.inputs, chain.outputs, chain.name)


def _copy(module: nn.Module) -> nn.Module:
    """Return a shallow copy of the same class; `copy.copy` would make a plain graph of a rewritten module."""
    copied = object.__new__(type(module))
    copied.__dict__.update(module.__dict__)
    return copied
