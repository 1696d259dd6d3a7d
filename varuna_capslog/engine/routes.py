"""Values and gradients that each stage takes and hands on, and those that travel over each edge between two stages.

With routes "relay" everything that a later layer reads goes through all stages between. With "direct" a value goes from
the stage that writes it to each stage that reads it, once, and one gradient per reading layer comes back, so that the
stage that wrote the value adds them from the last reader to the first, as everywhere (engine rule 8).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor

from varuna_capslog.engine.layout import Layout
from varuna_capslog.model.chain import Chain, TensorSpec, Value
from varuna_capslog.plans.parts import with_loss
from varuna_capslog.schedules import Edge

__all__ = ["GradientKey", "Gradients", "Ports", "Reach", "Routes", "ports_of", "value_of"]

GradientKey: TypeAlias = "tuple[Value, int | None]"
"""A value, and the layer whose gradient it is; None: the sum over all layers behind a cut."""


def value_of(key: Value | GradientKey) -> Value:
    """The value of a message's entry: the key itself, or the value of a gradient's key."""
    return key if isinstance(key, Value) else key[0]


@dataclass(frozen=True)
class Ports:
    """Values and gradients that enter and leave a stage.

    enters: the values that a forward takes. inputs: those of them that are inputs of the chain and come from the data.
    leaves: the values that it hands on.
    wanted: the gradients that a backward hands back, as far as their values carry one.
    passing: whether values enter and leave that no layer of the stage reads or writes.
    """

    enters: tuple[Value, ...]
    inputs: tuple[Value, ...]
    leaves: tuple[Value, ...]
    wanted: tuple[GradientKey, ...]
    passing: bool = True

    @property
    def apart(self) -> frozenset[Value]:
        """Values of which the gradient of every reading layer travels by itself."""
        return frozenset(value for value, reader in self.wanted if reader is not None)


def ports_of(chain: Chain, layers: Sequence[int], direct: bool = False) -> Ports:
    """The ports of a stage of these layers.

    layers: rising; consecutive ones unless `direct`.
    """
    inside = with_loss(layers, len(chain))
    if not direct:
        enters = chain.values_at(layers[0])
        inputs = enters if layers[0] == 0 else ()
        leaves = () if len(chain) in inside else chain.values_at(layers[-1] + 1)
        return Ports(enters, inputs, leaves, tuple((value, None) for value in enters))
    enters = tuple(
        value
        for value, readers in sorted(chain.readers.items())
        if value.writer not in inside and inside & set(readers)
    )
    leaves = tuple(
        value for value, readers in sorted(chain.readers.items()) if value.writer in inside and set(readers) - inside
    )
    wanted = tuple((value, reader) for value in enters for reader in chain.readers[value] if reader in inside)
    return Ports(enters, tuple(value for value in enters if value.writer < 0), leaves, wanted, passing=False)


class Reach:
    """Over which values gradients come back: those from which the loss can be reached through layers that carry one.

    Args:
        specs: of all values; they say which values carry a gradient.

    Attributes:
        pairs: (value, layer that has a gradient for it); the loss is layer L.
    """

    def __init__(self, chain: Chain, specs: Mapping[Value, TensorSpec]) -> None:
        self._last: dict[Value, int] = {}
        pairs: set[tuple[Value, int]] = set()
        for reader in reversed(range(len(chain) + 1)):
            if reader == len(chain) or any(value in self._last for value in chain.written(reader)):
                for value in chain.reads[reader]:
                    if specs[value].requires_grad:
                        pairs.add((value, reader))
                        self._last.setdefault(value, reader)
        self.pairs = frozenset(pairs)

    def has(self, key: GradientKey, cut: int) -> bool:
        """True where this gradient comes from the layers behind a cut."""
        return key in self.pairs if key[1] is not None else self._last.get(key[0], -1) >= cut


class Routes:
    """Values and gradients that travel between the stages of a layout.

    ports: of every stage.
    activations, gradients: of every edge, in the order in which they are sent.
    most: entries of a message.
    """

    def __init__(self, chain: Chain, layout: Layout, edges: Sequence[Edge]) -> None:
        self.ports = [ports_of(chain, stage.numbers, layout.direct) for stage in layout.stages]
        self.activations: dict[Edge, tuple[Value, ...]] = {}
        self.gradients: dict[Edge, tuple[GradientKey, ...]] = {}
        for source, target in edges:
            made, taken = set(self.ports[source].leaves), self.ports[target]
            self.activations[source, target] = tuple(value for value in taken.enters if value in made)
            self.gradients[source, target] = tuple(key for key in taken.wanted if key[0] in made)
        self._cuts = [stage.first for stage in layout.stages]
        self.most = max(map(len, (*self.activations.values(), *self.gradients.values())), default=0)

    def carried(self, edge: Edge, reach: Reach) -> list[GradientKey]:
        """The gradients that travel over an edge, in the order in which they are sent."""
        return [key for key in self.gradients[edge] if reach.has(key, self._cuts[edge[1]])]


class Gradients:
    """The gradients of values in one call of a stage, while its layers are differentiated from the last to the first.

    Args:
        arrived: from the stages behind; taken out, so that no tensor lives longer than it must.
        apart: as in `Ports`.

    Attributes:
        handed_back: those for the stages before, where they travel one by one.
    """

    def __init__(self, arrived: dict[GradientKey, Tensor], apart: frozenset[Value] = frozenset()) -> None:
        self._sums: dict[Value, Tensor] = {}
        self._waiting: dict[Value, list[tuple[int, Tensor]]] = {}
        self._apart = apart
        self.handed_back: dict[GradientKey, Tensor] = {}
        for value, reader in sorted(arrived, key=lambda key: -1 if key[1] is None else key[1]):
            gradient = arrived.pop((value, reader))
            if reader is None:
                self._sums[value] = gradient
            else:
                self._waiting.setdefault(value, []).append((reader, gradient))

    def add(self, value: Value, reader: int, gradient: Tensor) -> None:
        """The gradient that a layer of this stage, or the loss, has for what it reads."""
        if value in self._apart:
            self.handed_back[value, reader] = gradient
            return
        self._add_later_ones(value, reader)
        self._sum(value, gradient)

    def take(self, value: Value) -> Tensor | None:
        """The sum over all readers of a value, for the layer that wrote it."""
        self._add_later_ones(value, value.writer)
        return self._sums.pop(value, None)

    def _add_later_ones(self, value: Value, reader: int) -> None:
        waiting = self._waiting.get(value, [])
        while waiting and waiting[-1][0] > reader:
            self._sum(value, waiting.pop()[1])

    def _sum(self, value: Value, gradient: Tensor) -> None:
        total = self._sums.get(value)
        self._sums[value] = gradient if total is None else total + gradient

    def of(self, key: GradientKey) -> Tensor | None:
        """The gradient that goes to the stage before under this key; None where nothing depends on the value."""
        return self._sums.get(key[0]) if key[1] is None else self.handed_back.get(key)
