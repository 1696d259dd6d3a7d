"""The runs that tell what variants cost: of each layer in each way, and of every two neighbours in each two ways.

The runs are those of any profile, of a chain in which one or two layers are rewritten; what these hand on is what the
plain layers do. `measure` carries them out beside those of the plain layers, and `with_variant_rows` estimates them.
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
    """Those that planners may choose whose class is this one or a stricter one.

    more: names of such that are searched only where a config asks for them (`profile.variants`).

    Raises CapslogError for one of these that is unknown or of a weaker class.
    """
    classes, known = list(NUMERICS), known_variants().values()
    for one in map(variant_named, more):
        if classes.index(one.numerics) > classes.index(numerics):
            raise CapslogError(
                f"profile.variants names {one.name!r}, which promises {NUMERICS[one.numerics]}, but "
                f"numerics={numerics} allows {NUMERICS[numerics]} at most; leave it out, or set numerics={one.numerics}"
            )
    allowed = [one for one in known if classes.index(one.numerics) <= classes.index(numerics)]
    return [one for one in allowed if one.searched or one.name in more]


@dataclass(frozen=True)
class VariantRun:
    """One or two layers, at least one of which is computed in another way.

    Attributes:
        first: the first layer.
        names: how each is computed.
        chain: the whole one, with these layers rewritten; it shares the other layers, and all parameters, with the
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
        """Equal for runs that do the same work, which is done once.

        specs: what crosses the cuts 0 .. L.
        """
        key = key_of_range(self.chain, self.first, self.end, specs[self.first : self.end + 1])
        return key, self.first > 0, self.end < len(self.chain)


def variant_runs(chain: Chain, variants: Sequence[Variant]) -> list[VariantRun]:
    """The runs of every one of some variants that changes a layer.

    chain: with the plain layers; not changed.
    """
    rewritten = _rewritten(chain, variants)
    alternatives: dict[int, list[str]] = {}
    for layer, name in rewritten:
        alternatives.setdefault(layer, []).append(name)
    found = []
    for first, names in variant_pairs(alternatives, len(chain)):
        modules = {first + place: rewritten[first + place, name] for place, name in enumerate(names) if name != PLAIN}
        found.append(VariantRun(first, names, _with_modules(chain, modules)))
    return found


def joined_variants(runs: Sequence[VariantRun]) -> dict[str, list[str]]:
    """What the conditions of a profile with rows of these runs say of variants that spare neighbours a conversion."""
    names = {name for run in runs for name in run.names if name != PLAIN and known_variants()[name].joined}
    return {JOINED: sorted(names)} if names else {}


def with_variant_rows(profile: Profile, estimator: StageEstimator, variants: Sequence[Variant]) -> Profile:
    """An estimated profile with rows of all `variant_runs`, but for variants whose costs no estimate knows.

    profile: of the estimator's workload.
    """
    rows, runs = [], variant_runs(estimator.chain, [one for one in variants if one.estimated])
    for run in runs:
        row = row_of(estimator.of_chain(run.chain), run.first, run.end)
        rows.append(dataclasses.replace(row, variant=text_of(run.names)))
    conditions = {**profile.conditions, **joined_variants(runs)}
    return dataclasses.replace(profile, observations=(*profile.observations, *rows), conditions=conditions)


def _rewritten(chain: Chain, variants: Sequence[Variant]) -> dict[tuple[int, str], nn.Module]:
    """(layer, variant) -> the layer's module as the variant has it, where it changes the layer."""
    found: dict[tuple[int, str], nn.Module] = {}
    hopeless: set[object] = set()
    for number, layer in enumerate(chain.layers):
        signature = layer_signature(layer)
        for variant in variants:
            if (signature, variant.name) in hopeless:
                continue
            # the parameters stay the chain's own, so that what is shared stays shared
            held: dict[int, Any] = {id(one): one for one in (*layer.module.parameters(), *layer.module.buffers())}
            module = copy.deepcopy(layer.module, held)
            if variant.rewrite(module):
                found[number, variant.name] = module
            else:
                hopeless.add((signature, variant.name))
    return found


def _with_modules(chain: Chain, modules: Mapping[int, nn.Module]) -> Chain:
    own = {number: _copy(module) for number, module in modules.items()}  # what it leaves is of this chain alone
    layers = [
        dataclasses.replace(layer, module=own.get(number, layer.module)) for number, layer in enumerate(chain.layers)
    ]
    tell_readers([layer.module for layer in layers], [layer.writes for layer in layers], chain.readers)
    return Chain(layers, chain.inputs, chain.outputs, chain.name)


def _copy(module: nn.Module) -> nn.Module:
    """A module of the same class that holds the same things; `copy.copy` makes a plain graph of a rewritten one."""
    found = object.__new__(type(module))
    found.__dict__.update(module.__dict__)
    return found
