"""Names of a chain's layers, and of the model's modules that they hold.

`planning/export` writes these names in the formats of other systems. They are plain data, so that it needs no torch;
only `names_of` reads a chain.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from varuna_capslog.model.chain import Chain

__all__ = ["PREDICTION", "LayerModules", "ModelNames", "names_of"]

PREDICTION = "prediction_"
"""Beginning of the names of layers for multi-token prediction (`model/prediction`)."""


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
    """Names of a chain's layers. Those that begin with PREDICTION stand between the blocks and the head.

    layers: in order.
    shared: (name of a parameter, indices of the layers that use it) for each that several layers use.
    held: modules and tensors of the model per layer; None where only the layers' names are known, as in a profile.
    joined: layers that hold several parts -> the others of these, where `held` is None.
    lists: the ModuleLists and ModuleDicts of the model; other modules with numbers as names are Sequentials.
    copied: modules without parameters whose results several layers read, such as rotary position embeddings. Systems
        that split a model by its modules give each stage a copy.
    tokens: False where no input of the model holds whole numbers, as token ids are; None where it is not known.
    """

    layers: tuple[str, ...]
    shared: tuple[tuple[str, tuple[int, ...]], ...] = ()
    held: tuple[LayerModules, ...] | None = None
    lists: frozenset[str] = frozenset()
    copied: frozenset[str] = frozenset()
    tokens: bool | None = None
    joined: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @property
    def predictions(self) -> tuple[int, ...]:
        """Numbers of the layers for multi-token prediction, in order."""
        return tuple(number for number, name in enumerate(self.layers) if name.startswith(PREDICTION))


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
            if not name.startswith("constant_")  # of the model's code, made by the capture
        )
        held.append(LayerModules(modules, parameters, buffers))
    shared = tuple((tie.uses[0][1], tie.layers) for tie in chain.shared)
    lists = frozenset(path for layer in chain.layers for path in source_lists(layer))
    return ModelNames(layers, shared, tuple(held), lists, _copied(chain, held))


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
