"""Runs the forwards, recomputations and backwards of one pipeline stage; `executor.Executor` calls them in order.

A stage is some layers of a chain and, if it has the last layer, the loss. Its memory intervals state what it keeps of a
microbatch from the forward to the backward: see `StageSegment`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from varuna_capslog.base.errors import CapslogError, StepRefused
from varuna_capslog.base.seeds import mixed
from varuna_capslog.engine.halves import WeightHalf
from varuna_capslog.engine.layers import EngineLayer, FunctionGraph, LayerGraph, keep_layout
from varuna_capslog.engine.layout import GradientKey, Gradients, Ports, Reach, ports_of
from varuna_capslog.engine.offload import HostTier, OffloadedCall, OffloadedTensor, entered
from varuna_capslog.engine.parts import PartedForward
from varuna_capslog.model.chain import Chain, TensorSpec, Value
from varuna_capslog.model.workload import known_targets
from varuna_capslog.plans.parts import MemoryInterval, pieces_of, ranges_of, with_loss

__all__ = ["CallContext", "LossFunction", "SegmentState", "Stage"]


# -- Segments: consecutive layers of a stage, for which the same is kept from the forward to the backward.
#
# The segment's kind states what is kept of a microbatch: the autograd graphs ("keep"), the segment's inputs
# ("recompute"), or either of them in the host tier ("offload", "recompute+offload"). Where an interval recomputes parts
# of layers, the graphs are kept without the tensors that these parts save (`parts`).


@dataclass(frozen=True)
class CallContext:
    """Data and settings of the microbatches of one call of a stage; most calls have one microbatch.

    Attributes:
        microbatches: their global indices in the minibatch, rising. specs: of every value of the chain in this call.
        reach: values whose gradients the backward computes. targets: of each microbatch. normalisers: of the loss.
        key: (run seed, step) of the random numbers. loss_scale: factor on the loss before it is differentiated.
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
        """First microbatch, which identifies the call."""
        return self.microbatches[0]


class LateSpecs(Mapping[Value, TensorSpec]):
    """Specs of all values. The chain is traced at the first read of a spec that is not an input's.

    A rank with all layers of a plain chain reads no such spec: its tensors themselves show which carry a gradient. Its
    process then never imports the modules that fake tensors need.

    Args:
        inputs: specs of the chain's inputs, by name.
        trace: called once; returns the specs of all values.
    """

    def __init__(self, inputs: Mapping[str, TensorSpec], trace: Callable[[], Mapping[Value, TensorSpec]]) -> None:
        self._inputs, self._trace = dict(inputs), trace
        self._traced: Mapping[Value, TensorSpec] | None = None

    def settle(self) -> Mapping[Value, TensorSpec]:
        """Trace the chain once; return all specs. Raises CapslogError as `ShapeTable.boundaries`."""
        if self._traced is None:
            self._traced = self._trace()
        return self._traced

    @property
    def untraced(self) -> bool:
        """True until the chain is traced."""
        return self._traced is None

    def __getitem__(self, value: Value) -> TensorSpec:
        return self._inputs[value.name] if value.writer < 0 else self.settle()[value]

    def __iter__(self) -> Iterator[Value]:
        return iter(self.settle())

    def __len__(self) -> int:
        return len(self.settle())


def _untraced(specs: Mapping[Value, TensorSpec]) -> bool:
    return isinstance(specs, LateSpecs) and specs.untraced


@dataclass
class SegmentState:
    """State of one segment and microbatch: its graphs, or the inputs from which they are recomputed."""

    inputs: Mapping[Value, Tensor | OffloadedTensor] | None = None
    graphs: list[LayerGraph] = field(default_factory=list)


class _Work(NamedTuple):
    """Values that one layer of a segment reads and writes.

    writes: by name. handed_on: values that only the next layer reads. alive: all other values that are alive after
    the layer. dead: values that no later layer needs.
    """

    layer: EngineLayer
    reads: tuple[Value, ...]
    writes: Mapping[str, Value]
    handed_on: tuple[Value, ...]
    alive: tuple[Value, ...]
    dead: tuple[Value, ...]


class StageSegment:
    """Layers [first, end) of a stage.

    piece: these layers and the kind of their memory interval, or KEEP. alive: values that are alive in the stage before
    the first layer and after each layer. enters: values alive before the segment that `run` needs. ends_in_loss: its
    last layer is the chain's last.
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
        self._parted_forwards = {layer.index: PartedForward(layer, piece.parts) for layer in layers if piece.parts}
        written = [chain.written(layer.index) for layer in layers]
        available = {*enters, *(value for values in written for value in values)}
        self._outputs = tuple(value for value in sorted(alive[-1]) if value in available)
        self._works: list[_Work] = []
        self._decided: tuple[Mapping[Value, TensorSpec], dict[int, bool]] = {}, {}
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

    def wants_backward(self, context: CallContext) -> bool:
        """False where its outputs carry no gradient (frozen layers only), so that nothing is kept."""
        return self.ends_in_loss or any(context.specs[value].requires_grad for value in self._outputs)

    def keep_inputs(self, state: SegmentState, values: Mapping[Value, Tensor], call: OffloadedCall | None) -> None:
        """Keep the values from which `run` can recompute the segment."""
        kept = {value: values[value] for value in self.enters}
        if call is not None and self.offloads:
            state.inputs = {value: call.take(tensor) for value, tensor in kept.items()}
        else:
            state.inputs = kept

    def run(
        self,
        context: CallContext,
        values: dict[Value, Tensor],
        state: SegmentState,
        graph: bool,
        record: bool,
        call: OffloadedCall | None = None,
    ) -> dict[Value, Tensor]:
        """Run the layers; return the values that are alive after them.

        Args:
            values: those alive before the segment; emptied, so that each tensor is freed after its last use.
            graph: keep the autograd graphs in `state`. record: record running statistics.
            call: offloads the tensors that the graphs save; None: they stay on the device.
        """
        live = dict(values)
        # the caller's dict would keep a frozen first layer's input alive until this method returns
        values.clear()
        open_graph: LayerGraph | None = None
        seeds, specs = mixed(*context.key, context.index), context.specs
        with torch.set_grad_enabled(graph):
            for place, (layer, read, writes, handed_on, _, dead) in enumerate(self._works):
                if graph and open_graph is None:
                    open_graph = LayerGraph(layer.index)
                    reads = self._enter(open_graph, read, context, live, call)
                else:
                    reads = {value.name: live[value] for value in read}
                if layer.builds_graph and not graph:
                    wants = {value.name: specs[value].requires_grad for value in read}
                    reads = {name: tensor.detach().requires_grad_(wants[name]) for name, tensor in reads.items()}
                parted = self._parted_forwards.get(layer.index) if graph else None
                functions = None
                if open_graph is not None and call is None and parted is None and layer.functions is not None:
                    functions = layer.functions.instead(layer, reads, _reached(writes, context))
                if functions is not None:
                    assert open_graph is not None
                    if open_graph.first != layer.index:  # layers before this one run by autograd
                        before = self._works[place - 1].writes.values()
                        live.update(open_graph.close({value: live[value] for value in before if value in live}))
                        state.graphs.append(open_graph)
                        reads = {value.name: live[value] for value in read}
                    if functions.traced.draws or (self.ends_in_loss and layer is self.layers[-1]):
                        layer.seed(seeds)  # the loss may draw random numbers, too
                    function_graph = FunctionGraph(layer.index, functions, read, [*writes.values()])
                    written = function_graph.forward([*reads.values()])
                    del reads
                    state.graphs.append(function_graph)
                    open_graph = None
                else:
                    with _taken(call, layer):
                        outputs = layer.forward(reads, context.index, seeds, graph, record, parted)
                    del reads
                    written = {writes[name]: tensor for name, tensor in outputs.items()}
                    del outputs
                if open_graph is not None:
                    if self._ends(place, written, specs):
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

    def _ends(self, place: int, written: Mapping[Value, Tensor], specs: Mapping[Value, TensorSpec]) -> bool:
        """True where a graph must end after this layer, since another value that is alive there has a gradient."""
        if self._decided[0] is not specs:
            self._decided = specs, {}
        decided = self._decided[1]
        if place not in decided:
            alive = self._works[place].alive
            carries = _untraced(specs) and any(value in written and written[value].requires_grad for value in alive)
            decided[place] = carries or any(specs[value].requires_grad for value in alive)
        return decided[place]

    def _enter(
        self,
        graph: LayerGraph,
        read: Sequence[Value],
        context: CallContext,
        live: dict[Value, Tensor],
        call: OffloadedCall | None,
    ) -> Mapping[str, Tensor]:
        """Tensors that the first layer of a graph reads; those with a gradient become the graph's leaves."""
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


def _reached(writes: Mapping[str, Value], context: CallContext) -> Callable[[str], bool]:
    """Function from the name of a layer's output to whether the loss depends on it."""
    return lambda name: context.reach.carries(writes[name])


def segments_of(
    chain: Chain, layers: Sequence[EngineLayer], intervals: Sequence[MemoryInterval], ports: Ports
) -> list[StageSegment]:
    """Segments of a stage of these layers, in the order of the chain."""
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
    """Values that are alive in a stage before its first layer, and after each layer."""
    after = set(ports.leaves)
    if layers[-1] == len(chain) - 1:
        after |= {*chain.reads[len(chain)]}
    alive = [frozenset(after)]
    for layer in reversed(layers):
        after = (after - set(chain.written(layer))) | set(chain.reads[layer])
        alive.append(frozenset(after))
    return alive[::-1]


def _taken(call: OffloadedCall | None, layer: EngineLayer) -> AbstractContextManager[Any]:
    """Context in which `call` takes what the layer's graph saves; None: it stays on the device."""
    if call is None:
        return contextlib.nullcontext()
    module = layer.layer.module
    return call.taking_what_is_saved([*module.parameters(), *module.buffers()])


def _handed_on(chain: Chain, index: int) -> frozenset[Value]:
    """Values that layer `index` writes and only the next layer reads, over which both layers may share a graph."""
    return frozenset(value for value in chain.written(index) if chain.readers.get(value) == (index + 1,))


# -- one stage: its forwards, recomputations and backwards


LossFunction = Callable[[Mapping[str, Tensor], Any, Mapping[str, float]], dict[str, Tensor]]


@dataclass
class _Held:
    """State kept of one microbatch between its actions.

    states: of each segment. call: storages that are offloaded to the host tier; None: no tensor is.
    outputs, loss: of the chain, once computed with a graph. weight_halves: those that are not run yet.
    """

    states: list[SegmentState]
    call: OffloadedCall | None = None
    outputs: dict[str, Tensor] | None = None
    loss: Tensor | None = None
    weight_halves: list[WeightHalf] = field(default_factory=list)


class Stage:
    """Pipeline stage: some layers of a chain.

    Args:
        layers: from `take_layers`, rising. loss: the workload's loss, only for the stage of the last layer.
        ports: values that enter and leave the stage; None: all that cross its cuts, for consecutive layers.
        memory: intervals that recompute or offload (`plans.parts`). tier: host tier that these use; None: no offload.

    in_loss: True while the loss is computed. samples: maps values to sample dimensions, for calls of several
        microbatches.
    """

    def __init__(
        self,
        index: int,
        chain: Chain,
        layers: Sequence[EngineLayer],
        loss: LossFunction | None,
        memory: Sequence[MemoryInterval] = (),
        tier: HostTier | None = None,
        ports: Ports | None = None,
    ) -> None:
        self.index = index
        self.layers = list(layers)
        self.first = layers[0].index
        self.end = layers[-1].index + 1
        self.device = layers[0].device
        self.ports = ports or ports_of(chain, [layer.index for layer in layers])
        self.ends_in_loss = self.end == len(chain)
        self.segments = segments_of(chain, layers, memory, self.ports)
        self._outputs = chain.reads[len(chain)]
        numbers = {layer.index for layer in layers}
        leaving = [(value, reader) for value in self.ports.leaves for reader in chain.readers[value]]
        self._behind = frozenset((value, reader) for value, reader in leaving if reader not in numbers)
        self._tier = tier if any(segment.offloads for segment in self.segments) else None
        self._loss = loss
        self._held: dict[int, _Held] = {}
        self.in_loss = False
        self.samples: Mapping[Value, int | None] = {}
        self.parts: dict[int, dict[str, Tensor]] = {}
        self.refusals: dict[int, str] = {}

    def wants_backward(self, context: CallContext) -> bool:
        """False where the outputs get no gradient (frozen layers only, or no path to the loss): R and B do nothing."""
        return self.ends_in_loss or not self._behind.isdisjoint(context.reach.pairs)

    def forward(
        self, context: CallContext, values: dict[Value, Tensor], whole: bool, later: bool = False
    ) -> dict[Value, Tensor]:
        """F: run the stage's forward.

        Args:
            values: those that enter the stage, on its device; emptied, so that each tensor is freed after its last use.
            whole: the backward follows at once, so nothing is offloaded and the last segment keeps its graph. Other
                segments that recompute do so in the backward.
            later: `offload` will be called; else this action offloads, and waits for the copies.
        """
        held = self._held[context.index] = _Held([SegmentState() for _ in self.segments])
        if self._tier is not None and not whole:
            held.call = OffloadedCall(self._tier)
        for segment, state in zip(self.segments, held.states, strict=True):
            has_backward = segment.wants_backward(context)
            recomputes = segment.recomputes and not (whole and segment is self.segments[-1])
            if has_backward and recomputes:
                segment.keep_inputs(state, values, held.call)
                _offload_at_once(held, later)
                if segment.ends_in_loss and not any(layer.statistics for layer in segment.layers):
                    sent = {value: values[value] for value in self.ports.leaves if value in values}
                    if len(sent) == len(self.ports.leaves):
                        values.clear()
                        return sent  # nobody reads the outputs of this segment before they are recomputed
            call = held.call if segment.offloads and not recomputes else None
            values = segment.run(context, values, state, has_backward and not recomputes, record=True, call=call)
            _offload_at_once(held, later)
        if self.segments[-1].ends_in_loss and held.states[-1].inputs is None:
            self._evaluate_loss(context, values, held)
        return {value: values[value] for value in self.ports.leaves}

    def offload(self, context: CallContext) -> Callable[[], None]:
        """O: begin to offload the microbatch's tensors to the host tier; return a function that waits for the end."""
        call = self._held[context.index].call
        if call is None:
            return _nothing
        call.offload(overlap=True)
        return call.settle

    def load(self, context: CallContext) -> None:
        """L: begin to copy the offloaded tensors back. Reading a tensor waits for its copy."""
        call = self._held[context.index].call
        if call is not None:
            call.load_back(overlap=True)

    def recompute(self, context: CallContext) -> None:
        """R: recompute the last segment of which inputs were kept, with the same random numbers; keep its graph."""
        held = self._held[context.index]
        _load_back(held)
        for place in reversed(range(len(self.segments))):
            if held.states[place].inputs is not None:
                self._run_again(context, held, place)
                return

    def _run_again(self, context: CallContext, held: _Held, place: int) -> None:
        segment, state = self.segments[place], held.states[place]
        assert state.inputs is not None
        values = {
            name: kept.get() if isinstance(kept, OffloadedTensor) else kept for name, kept in state.inputs.items()
        }
        state.inputs = None
        values = segment.run(context, values, state, graph=True, record=False)
        if segment.ends_in_loss:
            self._evaluate_loss(context, values, held)

    def _evaluate_loss(self, context: CallContext, live: Mapping[Value, Tensor], held: _Held) -> None:
        leaves, specs = {}, context.specs
        carried = {value for graph in held.states[-1].graphs for value in graph.edges} if _untraced(specs) else ()
        for value in self._outputs:
            leaf, wants = live[value].detach(), value in carried or specs[value].requires_grad
            leaves[value.name] = leaf.requires_grad_() if wants else leaf
        total: Tensor | None = None
        for place, microbatch in enumerate(context.microbatches):
            part = self._loss_of(microbatch, self._samples(leaves, place, context), context.targets[place], context)
            total = part if total is None else total + part
        held.outputs, held.loss = leaves, total

    def _samples(self, outputs: dict[str, Tensor], place: int, context: CallContext) -> dict[str, Tensor]:
        """Part of the outputs that belongs to the call's microbatch number `place`."""
        if len(context.microbatches) == 1:
            return outputs
        with torch.enable_grad():
            return {
                value.name: outputs[value.name].tensor_split(len(context.microbatches), self.samples[value] or 0)[place]
                for value in self._outputs
            }

    def _loss_of(self, microbatch: int, outputs: dict[str, Tensor], targets: Any, context: CallContext) -> Tensor:
        assert self._loss is not None
        try:
            self.in_loss = True
            with torch.enable_grad():
                parts = self._loss(outputs, known_targets(targets, self.device), context.normalisers)
        except StepRefused as refusal:
            # the step continues without this microbatch's gradient; at the vote, every rank refuses the step
            self.refusals[microbatch] = str(refusal)
            parts = {"loss": torch.full((), torch.nan)}
        finally:
            self.in_loss = False
        if "loss" not in parts:
            raise CapslogError(f"the workload's loss returned {sorted(parts)}; one of them must be named 'loss'")
        self.parts[microbatch] = {name: part.detach() for name, part in parts.items()}
        return parts["loss"]

    def backward(
        self, context: CallContext, gradients: dict[GradientKey, Tensor], inputs_only: bool = False
    ) -> dict[GradientKey, Tensor]:
        """B: differentiate the stage.

        Args:
            gradients: of the values that leave the stage; emptied (empty on the last stage).
            inputs_only: I: leave the gradients of parameters to `backward_weights`.

        Returns the gradients that the ports name, if their values have one; zeros where the loss depends on none.
        """
        held = self._held[context.index]
        if not inputs_only:
            del self._held[context.index]
        if not self.wants_backward(context):
            return {}  # the stage's inputs get no gradient from here either
        _load_back(held)
        sums = Gradients(gradients, self.ports.apart)
        for place in reversed(range(len(self.segments))):
            if held.states[place].inputs is not None:
                self._run_again(context, held, place)
            if held.loss is not None:
                self._differentiate_loss(held, sums, context.loss_scale)
            graphs = held.states[place].graphs
            while graphs and inputs_only:
                held.weight_halves.append(graphs.pop().backward_inputs(sums))
            while graphs:
                graphs.pop().backward(sums)
        if held.call is not None and not inputs_only:
            held.call.end()
        wanted = [key for key in self.ports.wanted if context.reach.has(key, self.first)]
        return {key: _as_spec(sums.of(key), context.specs[key[0]], self.device) for key in wanted}

    def _differentiate_loss(self, held: _Held, gradients: Gradients, scale: float) -> None:
        """Differentiate the loss with respect to the chain's outputs."""
        assert held.loss is not None
        assert held.outputs is not None
        if held.loss.requires_grad:
            torch.autograd.backward(held.loss, None if scale == 1.0 else torch.full_like(held.loss, scale))
        for value in self._outputs:
            if (gradient := held.outputs[value.name].grad) is not None:
                gradients.add(value, self.end, gradient)
        held.loss = held.outputs = None

    def backward_weights(self, context: CallContext) -> None:
        """W: compute the gradients of the parameters, after an I."""
        held = self._held.pop(context.index)
        while held.weight_halves:
            held.weight_halves.pop(0).run()
        if held.call is not None:
            held.call.end()

    def kept(self, microbatch: int) -> list[Tensor]:
        """Tensors kept of a microbatch between its actions, except those that autograd saved (for profiling)."""
        held = self._held[microbatch]
        inputs = [kept for state in held.states for kept in (state.inputs or {}).values()]
        more = (*inputs, *(held.outputs or {}).values())
        return [*self.entries(microbatch), *(tensor for tensor in more if isinstance(tensor, Tensor))]

    def weight_halves(self, microbatch: int) -> list[WeightHalf]:
        """Weight halves of the microbatch's backward after an I, the last graph's first (for profiling)."""
        return self._held[microbatch].weight_halves

    def entries(self, microbatch: int) -> list[Tensor]:
        """Leaves of the kept graphs, a part of `kept`; offloaded graphs have none."""
        graphs = [graph for state in self._held[microbatch].states for graph in state.graphs]
        return [leaf for graph in graphs for leaf in graph.leaves.values() if isinstance(leaf, Tensor)]

    def statistics(self, microbatch: int) -> list[Tensor]:
        """Batch statistics of the microbatch's forward, kept until the end of the step (for profiling)."""
        return [tensor for layer in self.layers for tensor in layer.statistics.of(microbatch)]

    def evaluate(
        self, context: CallContext, values: dict[Value, Tensor]
    ) -> tuple[dict[Value, Tensor], dict[str, Tensor] | None]:
        """Run the stage and keep nothing; the caller has set evaluation mode. Returns the values that leave the stage
        and, on the last stage, the chain's outputs by name.
        """
        for segment in self.segments:
            values = segment.run(context, values, SegmentState(), graph=False, record=False)
        outputs = {value.name: values[value] for value in self._outputs} if self.ends_in_loss else None
        return {value: values[value] for value in self.ports.leaves}, outputs

    def forget(self) -> None:
        """Drop all traces of an interrupted step, also its gradients."""
        for held in self._held.values():
            if held.call is not None:
                held.call.end()
        self._held.clear()
        self.parts.clear()
        self.refusals.clear()
        for layer in self.layers:
            layer.reset()


def _offload_at_once(held: _Held, later: bool) -> None:
    if held.call is not None and not later:
        held.call.offload(overlap=False)
        held.call.settle()


def _load_back(held: _Held) -> None:
    """Copy back offloaded tensors for which there was no L, as a part of the action that reads them."""
    if held.call is not None:
        held.call.load_back(overlap=False)


def _nothing() -> None:
    """Do nothing: nothing was offloaded."""


def _as_spec(gradient: Tensor | None, spec: TensorSpec, device: torch.device) -> Tensor:
    """Return a gradient in the layout that the receiver expects."""
    if gradient is None:
        return spec.zeros(device)
    if gradient.stride() == spec.stride and gradient.dtype == spec.dtype:
        return gradient
    return spec.empty(device).copy_(gradient)
