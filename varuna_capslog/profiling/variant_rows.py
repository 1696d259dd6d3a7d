"""Rows of an estimated profile for every variant of every layer: the runs of each layer and each pair, computed so.

`start/chosen_variants` calls this where a planner is to choose variants. The runs are those of `estimate`, of a chain
in which one or two layers are rewritten; what they hand on is what the plain layers do.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from varuna_capslog.model.chain import Chain
from varuna_capslog.model.signature import layer_signature
from varuna_capslog.profiles.record import Profile
from varuna_capslog.profiles.variants import PLAIN, text_of, variant_pairs
from varuna_capslog.profiling.estimate import StageEstimator, row_of
from varuna_capslog.variants.registry import NUMERICS, Variant, known_variants

__all__ = ["allowed_variants", "with_variant_rows"]


def allowed_variants(numerics: str) -> list[Variant]:
    """Those that planners may choose whose class is this one or a stricter one."""
    classes, known = list(NUMERICS), known_variants().values()
    return [one for one in known if one.searched and classes.index(one.numerics) <= classes.index(numerics)]


def with_variant_rows(
    profile: Profile, estimator: StageEstimator, numerics: str, refused: Mapping[int, Sequence[str]]
) -> Profile:
    """The profile with rows of every variant of an allowed class that changes a layer.

    Args:
        profile: of the estimator's workload.
        numerics: the weakest class.
        refused: layer -> variants that are left out, since they fail their check.
    """
    chain = estimator.chain
    rewritten = _rewritten(chain, allowed_variants(numerics), refused)
    alternatives: dict[int, list[str]] = {}
    for layer, name in rewritten:
        alternatives.setdefault(layer, []).append(name)
    rows = []
    for first, names in variant_pairs(alternatives, len(chain)):
        modules = {first + place: rewritten[first + place, name] for place, name in enumerate(names) if name != PLAIN}
        row = row_of(estimator.of_chain(_with_modules(chain, modules)), first, first + len(names))
        rows.append(dataclasses.replace(row, variant=text_of(names)))
    return dataclasses.replace(profile, observations=(*profile.observations, *rows))


def _rewritten(
    chain: Chain, variants: Sequence[Variant], refused: Mapping[int, Sequence[str]]
) -> dict[tuple[int, str], nn.Module]:
    """(layer, variant) -> the layer's module as the variant has it, where it changes the layer."""
    found: dict[tuple[int, str], nn.Module] = {}
    hopeless: set[object] = set()
    for number, layer in enumerate(chain.layers):
        signature = layer_signature(layer)
        for variant in variants:
            if variant.name in refused.get(number, ()) or (signature, variant.name) in hopeless:
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
    layers = [
        dataclasses.replace(layer, module=modules.get(number, layer.module))
        for number, layer in enumerate(chain.layers)
    ]
    return Chain(layers, chain.inputs, chain.outputs, chain.name)
