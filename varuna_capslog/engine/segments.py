"""Consecutive layers of a stage that are treated alike between their forward and their backward.

A segment runs its layers and builds their graphs. What it keeps of a microbatch meanwhile is what its kind says: the
graphs ("keep"), its inputs ("recompute"), or the one or the other in the host tier ("offload", "recompute+offload").
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from varuna_capslog.engine.layers import EngineLayer, LayerGraph, keep_layout
from varuna_capslog.engine.offload import OffloadedCall, OffloadedTensor, entered
from varuna_capslog.model.chain import Chain, TensorSpec
from varuna_capslog.plans.parts import MemoryInterval, pieces_of

__all__ = ["MicrobatchContext", "SegmentState", "StageSegment", "segments_of"]


@dataclass(frozen=True)
class MicrobatchContext:
    """What a stage must know of the microbatch it works on.

    Attributes:
        index: global index in the minibatch.
        specs: specs at cut 0..L for this microbatch.
        targets, normalisers: for the loss.
        key: (run seed, step) of the random numbers.
    """

    index: int
    specs: Sequence[Mapping[str, TensorSpec]]
    targets: Any
    normalisers: Mapping[str, float]
    key: tuple[int, int]


@dataclass
class SegmentState:
    """What is kept of one microbatch: the graphs, or the inputs from which they are built again."""

    inputs: Mapping[str, Tensor | OffloadedTensor] | None = None
    graphs: list[LayerGraph] = field(default_factory=list)


class StageSegment:
    """Layers [first, end) of a stage.

    piece: these layers and the kind of their memory interval, or KEEP.
    ends_in_loss: whether the last one is the chain's last.
    """

    def __init__(self, chain: Chain, layers: Sequence[EngineLayer], piece: MemoryInterval) -> None:
        self.layers = list(layers)
        self.first, self.end = piece.first, piece.end
        self.ends_in_loss = self.end == len(chain)
        self.recomputes, self.offloads = piece.recomputes, piece.offloads
        self._outputs = chain.crossing(self.end)
        self._live = [set(chain.crossing(layer.index + 1)) for layer in layers]
        # a graph ends where the segment ends
        self._handed_on = [*(_handed_on(chain, layer.index) for layer in layers[:-1]), frozenset()]

    def wants_backward(self, context: MicrobatchContext) -> bool:
        """False where what leaves it carries no gradient (frozen layers only): nothing need be kept of it."""
        return self.ends_in_loss or any(context.specs[self.end][name].requires_grad for name in self._outputs)

    def keep_inputs(self, state: SegmentState, values: Mapping[str, Tensor], call: OffloadedCall | None) -> None:
        """Keeps what crosses the cut before the segment, for `run` to begin with once more."""
        if call is not None and self.offloads:
            state.inputs = {name: call.take(tensor) for name, tensor in values.items()}
        else:
            state.inputs = dict(values)

    def run(
        self,
        context: MicrobatchContext,
        values: dict[str, Tensor],
        state: SegmentState,
        graph: bool,
        record: bool,
        call: OffloadedCall | None = None,
    ) -> dict[str, Tensor]:
        """Runs the layers.

        Args:
            values: what crosses the cut before the segment; taken out, so that no tensor lives longer than it must.
            graph: build the graphs, into `state`.
            record: count running statistics.
            call: takes what the graphs save; None: it stays on the device.

        Returns:
            What crosses the cut behind it.
        """
        live = dict(values)
        # The callers' frames last as long as this one; a frozen first layer's input would too.
        values.clear()
        open_graph: LayerGraph | None = None
        for layer, alive, handed_on in zip(self.layers, self._live, self._handed_on, strict=True):
            reads: Mapping[str, Tensor] = live
            if graph and open_graph is None:
                open_graph = LayerGraph({})
                reads = self._enter(open_graph, layer, context, live, call)
            key = (*context.key, context.index)
            if call is None:
                written = layer.forward(reads, key, graph, record)
            else:
                with _taken(call, layer):
                    written = layer.forward(reads, key, graph, record)
            del reads
            if open_graph is not None:
                crossing = context.specs[layer.index + 1]
                if any(spec.requires_grad and name not in handed_on for name, spec in crossing.items()):
                    written = open_graph.close(written)
                    state.graphs.append(open_graph)
                    open_graph = None
                else:
                    for name in handed_on:
                        if written[name].requires_grad:
                            keep_layout(written[name])
            live.update(written)
            live = {name: tensor for name, tensor in live.items() if name in alive}
        return live

    def _enter(
        self,
        graph: LayerGraph,
        layer: EngineLayer,
        context: MicrobatchContext,
        live: dict[str, Tensor],
        call: OffloadedCall | None,
    ) -> Mapping[str, Tensor]:
        """What the first layer of a graph reads; those that want a gradient begin it."""
        wanted = [name for name in layer.layer.reads if context.specs[layer.index][name].requires_grad]
        if call is None:
            for name in wanted:
                live[name] = graph.leaves[name] = live[name].detach().requires_grad_()
            return live
        reads = dict(live)
        for name in wanted:
            reads[name], box = entered(live[name])
            graph.leaves[name] = box
        return reads


def segments_of(chain: Chain, layers: Sequence[EngineLayer], intervals: Sequence[MemoryInterval]) -> list[StageSegment]:
    """The segments of a stage of these layers."""
    first, end = layers[0].index, layers[-1].index + 1
    return [
        StageSegment(chain, layers[piece.first - first : piece.end - first], piece)
        for piece in pieces_of(first, end, intervals)
    ]


def _taken(call: OffloadedCall, layer: EngineLayer) -> AbstractContextManager[Any]:
    module = layer.layer.module
    return call.taking_what_is_saved([*module.parameters(), *module.buffers()])


def _handed_on(chain: Chain, index: int) -> frozenset[str]:
    """Names that layer `index` writes and only the next layer reads: there one graph may hold both layers."""
    after = chain.layers[index + 1]
    passing = set(chain.crossing(index + 2)) - set(after.writes)
    return frozenset(name for name in chain.layers[index].writes if name in after.reads and name not in passing)
