"""What the layers of a chain are called, and which modules of the model they hold.

`planning/export` writes these names in the forms of other systems. They are plain data, so that it needs no torch; only
`names_of` reads a chain.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from varuna_capslog.model.chain import Chain

__all__ = ["LayerModules", "ModelNames", "names_of"]


@dataclass(frozen=True)
class LayerModules:
    """What one layer holds of the captured model. All names are qualified names in that model.

    modules: the modules that it runs, innermost ones, by first use.
    parameters, buffers: its tensors.
    """

    modules: tuple[str, ...]
    parameters: tuple[str, ...] = ()
    buffers: tuple[str, ...] = ()


@dataclass(frozen=True)
class ModelNames:
    """The names of a chain's layers.

    layers: their own names, in order.
    shared: (name of a parameter, the numbers of the layers that use it) for each that several layers use.
    held: per layer its part of the model; None where only the names are known, as in a profile.
    lists: the ModuleLists and ModuleDicts of the model; other modules with numbers as names are Sequentials.
    copied: modules without parameters whose results several layers read, such as rotary position embeddings. Systems
        that split a model by its modules give each stage one of its own.
    """

    layers: tuple[str, ...]
    shared: tuple[tuple[str, tuple[int, ...]], ...] = ()
    held: tuple[LayerModules, ...] | None = None
    lists: frozenset[str] = frozenset()
    copied: frozenset[str] = frozenset()


def names_of(chain: Chain) -> ModelNames:
    """The names of a chain's layers, and of the modules they hold where `Chain.from_module` made the chain."""
    from varuna_capslog.model.capture import source_lists, source_modules  # imports torch, which exporters do without

    layers = tuple(layer.name for layer in chain.layers)
    held = []
    for layer in chain.layers:
        modules = source_modules(layer)
        if modules is None:
            return ModelNames(layers, tuple((one.name, one.layers) for one in chain.shared))
        parameters = tuple(name for name, _ in layer.module.named_parameters(remove_duplicate=False))
        buffers = tuple(
            name
            for name, _ in layer.module.named_buffers(remove_duplicate=False)
            if not name.startswith("constant_")  # of the model's code, made by the capture
        )
        held.append(LayerModules(modules, parameters, buffers))
    shared = tuple((one.uses[0][1], one.layers) for one in chain.shared)
    lists = frozenset(path for layer in chain.layers for path in source_lists(layer))
    return ModelNames(layers, shared, tuple(held), lists, _copied(chain, held))


def _copied(chain: Chain, held: Sequence[LayerModules]) -> frozenset[str]:
    readers = Counter(name for layer in chain.layers for name in layer.reads)
    parameters = [name for one in held for name in one.parameters]
    return frozenset(
        path
        for layer, one in zip(chain.layers, held, strict=True)
        for path in one.modules
        if path
        and not any(name.startswith(f"{path}.") for name in parameters)
        and any(readers[name] > 1 and (name == path or name.startswith(f"{path}.")) for name in layer.writes)
    )
