"""Consecutive layers of a stage that are treated alike between their forward and their backward.

A segment runs its layers and builds their graphs. Its kind says what it keeps of a microbatch meanwhile: the graphs
("keep"), its inputs ("recompute"), or either of them in the host tier ("offload", "recompute+offload").
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from varuna_capslog.base.seeds import mixed
from varuna_capslog.engine.host.offload import OffloadedCall, OffloadedTensor, entered
from varuna_capslog.engine.layers import EngineLayer, LayerGraph, keep_layout
from varuna_capslog.engine.routes import Ports, Reach
from varuna_capslog.model.chain import Chain, TensorSpec, Value
from varuna_capslog.plans.parts import MemoryInterval, pieces_of, ranges_of, with_loss

__all__ = ["MicrobatchContext", "SegmentState", "StageSegment", "segments_of"]


@dataclass(frozen=True)
class MicrobatchContext:
    """Data and settings of the microbatches of one call of a stage; most calls have one microbatch.

    Attributes:
        microbatches: their global indices in the minibatch, rising.
        specs: of every value of the chain, for all of them together. reach: the gradients that come back.
        targets: of each; normalisers: for the loss.
        key: (run seed, step) of the random numbers.
        loss_scale: the loss is multiplied by it before it is differentiated.
    """

    microbatches: tuple[int, ...]
    specs: Mapping[Value, TensorSpec]
    reach: Reach
    targets: Sequence[Any]
    normalisers: Mapping[str, float]
    key: tuple[int, int]
    loss_scale: float = 1.0

    @property
    def index(self) -> int:
        """The first of them, by which the call is known."""
        return self.microbatches[0]


@dataclass
class SegmentState:
    """State kept of one microbatch: the graphs, or the inputs from which they are built again."""

    inputs: Mapping[Value, Tensor | OffloadedTensor] | None = None
    graphs: list[LayerGraph] = field(default_factory=list)


class _Work(NamedTuple):
    """Reads and writes of one layer of a segment.

    writes: by name. handed_on: values that only the next layer reads; beside: the others that are alive behind it.
    dead: values that are not alive any more behind it.
    """

    layer: EngineLayer
    reads: tuple[Value, ...]
    writes: Mapping[str, Value]
    handed_on: tuple[Value, ...]
    beside: tuple[Value, ...]
    dead: tuple[Value, ...]


class StageSegment:
    """Layers [first, end) of a stage.

    piece: these layers and the kind of their memory interval, or KEEP.
    enters: the values that it needs to run, of those that are alive before it.
    alive: the values that are alive in the stage before the first layer, and behind each.
    ends_in_loss: whether the last of these layers is the chain's last.
    """

    def __init__(
        self,
        chain: Chain,
        layers: Sequence[EngineLayer],
        piece: MemoryInterval,
        enters: Sequence[Value],
        alive: Sequence[frozenset[Value]],
    ) -> None:
        self.first, self.end = piece.first, piece.end
        self.ends_in_loss = self.end == len(chain)
        self.recomputes, self.offloads = piece.recomputes, piece.offloads
        self.enters = tuple(enters)
        self.layers = list(layers)
        written = [chain.written(layer.index) for layer in layers]
        available = {*enters, *(value for values in written for value in values)}
        self._outputs = tuple(value for value in sorted(alive[-1]) if value in available)
        self._works: list[_Work] = []
        self._decided: tuple[Mapping[Value, TensorSpec], list[bool]] = {}, []
        for place, layer in enumerate(layers):
            before, after = alive[place], alive[place + 1]
            # a graph ends where the segment ends
            handed_on = frozenset() if layer is layers[-1] else _handed_on(chain, layer.index)
            self._works.append(
                _Work(
                    layer,
                    chain.reads[layer.index],
                    {value.name: value for value in written[place]},
                    tuple(handed_on),
                    tuple(after - handed_on),
                    tuple((before | {*written[place]}) - after),
                )
            )

    def wants_backward(self, context: MicrobatchContext) -> bool:
        """False where its outputs carry no gradient (frozen layers only): nothing need be kept of it."""
        return self.ends_in_loss or any(context.specs[value].requires_grad for value in self._outputs)

    def keep_inputs(self, state: SegmentState, values: Mapping[Value, Tensor], call: OffloadedCall | None) -> None:
        """Keeps the values from which `run` can begin once more."""
        kept = {value: values[value] for value in self.enters}
        if call is not None and self.offloads:
            state.inputs = {value: call.take(tensor) for value, tensor in kept.items()}
        else:
            state.inputs = kept

    def run(
        self,
        context: MicrobatchContext,
        values: dict[Value, Tensor],
        state: SegmentState,
        graph: bool,
        record: bool,
        call: OffloadedCall | None = None,
    ) -> dict[Value, Tensor]:
        """Runs the layers.

        Args:
            values: those alive before the segment; taken out, so that no tensor lives longer than it must.
            graph: build the graphs, into `state`.
            record: count running statistics.
            call: takes the tensors that the graphs save; None: they stay on the device.

        Returns:
            The values that are alive behind it.
        """
        live = dict(values)
        # The callers' frames last as long as this one; a frozen first layer's input would too.
        values.clear()
        open_graph: LayerGraph | None = None
        seeds, specs = mixed(*context.key, context.index), context.specs
        with torch.set_grad_enabled(graph):
            for (layer, read, writes, handed_on, _, dead), ends in zip(self._works, self._ends(specs), strict=True):
                if graph and open_graph is None:
                    open_graph = LayerGraph(layer.index)
                    reads = self._enter(open_graph, read, context, live, call)
                else:
                    reads = {value.name: live[value] for value in read}
                if layer.builds_graph and not graph:
                    wants = {value.name: specs[value].requires_grad for value in read}
                    reads = {name: tensor.detach().requires_grad_(wants[name]) for name, tensor in reads.items()}
                if call is None:
                    outputs = layer.forward(reads, context.index, seeds, graph, record)
                else:
                    with _taken(call, layer):
                        outputs = layer.forward(reads, context.index, seeds, graph, record)
                del reads
                written = {writes[name]: tensor for name, tensor in outputs.items()}
                del outputs
                if open_graph is not None:
                    if ends:
                        written = open_graph.close(written)
                        state.graphs.append(open_graph)
                        open_graph = None
                    else:
                        for value in handed_on:
                            if written[value].requires_grad:
                                keep_layout(written[value])
                live.update(written)
                del written
                for value in dead:
                    live.pop(value, None)
        return live

    def _ends(self, specs: Mapping[Value, TensorSpec]) -> list[bool]:
        """For each layer, whether a graph ends behind it: it does where another value that is alive there wants a
        gradient, too.
        """
        if self._decided[0] is not specs:
            self._decided = specs, [any(specs[value].requires_grad for value in work.beside) for work in self._works]
        return self._decided[1]

    def _enter(
        self,
        graph: LayerGraph,
        read: Sequence[Value],
        context: MicrobatchContext,
        live: dict[Value, Tensor],
        call: OffloadedCall | None,
    ) -> Mapping[str, Tensor]:
        """The tensors that the first layer of a graph reads; those that want a gradient begin the graph."""
        wanted = [value for value in dict.fromkeys(read) if context.specs[value].requires_grad]
        if call is None:
            for value in wanted:
                live[value] = graph.leaves[value] = live[value].detach().requires_grad_()
            return {value.name: live[value] for value in read}
        reads = {value.name: live[value] for value in read}
        for value in wanted:
            reads[value.name], box = entered(live[value])
            graph.leaves[value] = box
        return reads


def segments_of(
    chain: Chain, layers: Sequence[EngineLayer], intervals: Sequence[MemoryInterval], ports: Ports
) -> list[StageSegment]:
    """The segments of a stage of these layers, in the order of the chain."""
    places = {layer.index: place for place, layer in enumerate(layers)}
    segments, alive = [], _alive(chain, [layer.index for layer in layers], ports)
    for first, end in ranges_of(list(places)):
        for piece in pieces_of(
            first, end, [interval for interval in intervals if first <= interval.first and interval.end <= end]
        ):
            part = slice(places[piece.first], places[piece.end - 1] + 1)
            before = alive[part.start]
            inside = with_loss(range(piece.first, piece.end), len(chain))
            read = {value for index in inside for value in chain.reads[index]}
            enters = sorted(before if ports.passing else before & read)
            segments.append(StageSegment(chain, layers[part], piece, enters, alive[part.start : part.stop + 1]))
    return segments


def _alive(chain: Chain, layers: Sequence[int], ports: Ports) -> list[frozenset[Value]]:
    """The values that are alive in a stage before its first layer, and behind each."""
    after = set(ports.leaves)
    if layers[-1] == len(chain) - 1:
        after |= {*chain.reads[len(chain)]}
    alive = [frozenset(after)]
    for layer in reversed(layers):
        after = (after - set(chain.written(layer))) | set(chain.reads[layer])
        alive.append(frozenset(after))
    return alive[::-1]


def _taken(call: OffloadedCall, layer: EngineLayer) -> AbstractContextManager[Any]:
    module = layer.layer.module
    return call.taking_what_is_saved([*module.parameters(), *module.buffers()])


def _handed_on(chain: Chain, index: int) -> frozenset[Value]:
    """Values that layer `index` writes and only the next layer reads: there one graph may hold both layers."""
    return frozenset(value for value in chain.written(index) if chain.readers.get(value) == (index + 1,))
