"""Names of a chain's layers, and of the model's modules that they hold.

`planning/export` writes these names in the formats of other systems. They are plain data, so that `planning/export`
needs no torch; only `names_of` reads a chain.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from varuna_capslog.model.chain import Chain

__all__ = ["PREDICTION", "LayerModules", "ModelNames", "hybrid_letters", "names_of"]

PREDICTION = "prediction_"
"""Prefix of the names of layers for multi-token prediction (`model/prediction`)."""


@dataclass(frozen=True)
class LayerModules:
    """Modules and tensors of the captured model that one layer holds, by their qualified names in that model.

    modules: the innermost modules that it runs, by first use.
    """

    modules: tuple[str, ...]
    parameters: tuple[str, ...] = ()
    buffers: tuple[str, ...] = ()


@dataclass(frozen=True)
class ModelNames:
    """Names of a chain's layers. Layers with the prefix PREDICTION stand between the blocks and the head.

    layers: in order.
    shared: (name of a parameter, indices of the layers that use it) for each that several layers use.
    held: modules and tensors of the model per layer; None where only the layers' names are known, as in a profile.
    joined: name of a layer that joins several parts of the model -> its other parts, where `held` is None.
    lists: the ModuleLists and ModuleDicts of the model; other modules with numbers as names are Sequentials.
    copied: modules without parameters whose results several layers read, such as rotary position embeddings. Systems
        that split a model by its modules give each stage a copy.
    tokens: False where no input of the model holds whole numbers, such as token ids; None where this is not known.
    letters: what each layer of a hybrid model holds (`hybrid_letters`); () for other models.
    """

    layers: tuple[str, ...]
    shared: tuple[tuple[str, tuple[int, ...]], ...] = ()
    held: tuple[LayerModules, ...] | None = None
    lists: frozenset[str] = frozenset()
    copied: frozenset[str] = frozenset()
    tokens: bool | None = None
    joined: Mapping[str, Sequence[str]] = field(default_factory=dict)
    letters: tuple[str, ...] = ()

    @property
    def predictions(self) -> tuple[int, ...]:
        """Numbers of the layers for multi-token prediction, in order."""
        return tuple(number for number, name in enumerate(self.layers) if name.startswith(PREDICTION))

    @property
    def num_predictions(self) -> int:
        """Number of the model's layers for multi-token prediction, of which a layer of the chain may hold several."""
        names = (
            (self.layers[number], *self.joined.get(self.layers[number], ()))
            if self.held is None
            else self.held[number].modules
            for number in self.predictions
        )
        return len({name.split(".")[0] for row in names for name in row if name.startswith(PREDICTION)})


# -- Hybrid models: what each layer holds, in the letters of Megatron's hybrid patterns
# (`megatron/core/models/hybrid/hybrid_layer_allocation.py` of 2026), by the names that parameters have in transformers.


_PART = re.compile(r"(?P<block>.*?\.\d+)\.(?P<part>[^.]+)\.(?P<name>.+)")
_IN_ORDER = "MG*D+-E?"
_FEED_FORWARD = ({"up_proj", "down_proj"}, {"gate_up_proj", "down_proj"}, {"input_linear", "output_linear"})


def hybrid_letters(layers: Iterable[LayerModules]) -> tuple[str, ...]:
    """Return the letters of each layer: M (Mamba-2), G (gated delta net), * (attention), D and + (latent attention with
    an index and without), - (feed-forward), E (experts). In each block, the mixer's letter comes first. ? stands for a
    block that no letters describe. () for a model without state spaces and delta nets, which is no hybrid model.
    """
    letters, recurrent = [], False
    for layer in layers:
        parts = defaultdict[str, defaultdict[str, set[str]]](lambda: defaultdict(set))
        for hit in filter(None, map(_PART.fullmatch, layer.parameters)):
            parts[hit["block"]][hit["part"]].add(hit["name"])
            recurrent |= hit["name"] == "A_log"
        blocks = ("".join(sorted(map(_letter, block.values()), key=_IN_ORDER.find)) for block in parts.values())
        letters.append("".join(block if re.fullmatch(r"[MG*D+]?[-E]?", block) else "?" for block in blocks))
    return tuple(letters) if recurrent else ()


def _letter(parameters: set[str]) -> str:
    """Return the letter of a part of a block; "" for a norm."""
    modules = {name.split(".")[0] for name in parameters}
    if "A_log" in modules:
        first_kind = modules & {"x_proj", "x_proj_weight"}  # Mamba-1
        return "?" if first_kind or "dt_bias" not in modules else "M" if "D" in modules else "G"
    if "experts" in modules:
        return "E"
    if "kv_b_proj" in modules:
        return "D" if "indexer" in modules else "+"
    if {"q_proj", "k_proj", "v_proj"} <= modules and not modules & {"conv1d", "indexer"}:
        return "*"
    if any(pair <= modules for pair in _FEED_FORWARD):
        return "-"
    return "" if parameters <= {"weight", "bias"} else "?"


def names_of(chain: Chain) -> ModelNames:
    """Return the names of a chain's layers, and of the modules they hold where `Chain.from_module` made the chain."""
    from varuna_capslog.model.capture import source_lists, source_modules  # imports torch, which exporters do without

    layers = tuple(layer.name for layer in chain.layers)
    held = []
    for layer in chain.layers:
        modules = source_modules(layer)
        if modules is None:
            return ModelNames(layers, tuple((tie.name, tie.layers) for tie in chain.shared))
        parameters = tuple(name for name, _ in layer.module.named_parameters(remove_duplicate=False))
        buffers = tuple(
            name
            for name, _ in layer.module.named_buffers(remove_duplicate=False)
            if not name.startswith("constant_")  # the capture made it of a constant in the model's code
        )
        held.append(LayerModules(modules, parameters, buffers))
    shared = tuple((tie.uses[0][1], tie.layers) for tie in chain.shared)
    lists = frozenset(path for layer in chain.layers for path in source_lists(layer))
    return ModelNames(layers, shared, tuple(held), lists, _copied(chain, held), letters=hybrid_letters(held))


def _copied(chain: Chain, held: Sequence[LayerModules]) -> frozenset[str]:
    readers = Counter(name for layer in chain.layers for name in layer.reads)
    parameters = [name for part in held for name in part.parameters]
    return frozenset(
        path
        for layer, part in zip(chain.layers, held, strict=True)
        for path in part.modules
        if path
        and not any(name.startswith(f"{path}.") for name in parameters)
        and any(readers[name] > 1 and (name == path or name.startswith(f"{path}.")) for name in layer.writes)
    )
