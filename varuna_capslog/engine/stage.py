"""Runs the forwards, recomputations and backwards of one pipeline stage; `executor` decides on their order.

A stage is some layers of a chain and, if it holds the last one, the loss. Its memory intervals say what it keeps of a
microbatch between a forward and its backward: see `segments`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from varuna_capslog.base.errors import CapslogError, StepRefused
from varuna_capslog.engine.halves import WeightHalf
from varuna_capslog.engine.host.offload import OffloadedCall, OffloadedTensor
from varuna_capslog.engine.host.tier import HostTier
from varuna_capslog.engine.layers import EngineLayer
from varuna_capslog.engine.routes import GradientKey, Gradients, Ports, ports_of
from varuna_capslog.engine.segments import MicrobatchContext, SegmentState, segments_of
from varuna_capslog.model.chain import Chain, TensorSpec, Value
from varuna_capslog.model.workload import known_targets
from varuna_capslog.plans.parts import MemoryInterval

__all__ = ["LossFunction", "MicrobatchContext", "Stage"]

LossFunction = Callable[[Mapping[str, Tensor], Any, Mapping[str, float]], dict[str, Tensor]]


@dataclass
class _Held:
    """State kept of one microbatch between its actions.

    states: of each segment.
    call: the storages that go to the host tier; None: nothing does.
    outputs, loss: of the chain, once they were computed with a graph.
    rests: the weight halves of a backward whose input half is done.
    """

    states: list[SegmentState]
    call: OffloadedCall | None = None
    outputs: dict[str, Tensor] | None = None
    loss: Tensor | None = None
    rests: list[WeightHalf] = field(default_factory=list)


class Stage:
    """A pipeline stage: some layers of a chain.

    Args:
        layers: from `take_layers`, rising.
        loss: the workload's loss, which the stage of the last layer computes.
        ports: values that enter and leave it; None: all that cross its cuts, for consecutive layers.
        memory: memory intervals, which recompute or offload; see `plans.parts.MemoryInterval`.
        tier: where they offload to; None: tensors that they would offload stay.

    Attributes:
        in_loss: whether the loss is being computed.
        samples: value -> the dimension of the samples, where a call has several microbatches; see `grains`.
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
        # where a module's own sharding would gather its parameters and reduce its gradients, once per step
        self.before_step: list[Callable[[], None]] = []
        self.after_step: list[Callable[[], None]] = []

    def wants_backward(self, context: MicrobatchContext) -> bool:
        """False for a stage whose outputs get no gradient (frozen layers only, or no way to the loss): its R and B have
        nothing to do.
        """
        return self.ends_in_loss or not self._behind.isdisjoint(context.reach.pairs)

    def forward(
        self, context: MicrobatchContext, values: dict[Value, Tensor], whole: bool, later: bool = False
    ) -> dict[Value, Tensor]:
        """F: runs the stage once.

        Args:
            values: those that enter it, on its device; taken out, so that they live no longer than the stage needs
                them.
            whole: the backward follows at once: nothing leaves, and the last segment keeps its graph. The others do as
                their intervals say, and run again in the backward.
            later: whether `offload` is called later; else offloading is a part of this action.
        """
        held = self._held[context.index] = _Held([SegmentState() for _ in self.segments])
        if self._tier is not None and not whole:
            held.call = OffloadedCall(self._tier)
        for segment, state in zip(self.segments, held.states, strict=True):
            wanted = segment.wants_backward(context)
            again = segment.recomputes and not (whole and segment is self.segments[-1])
            if wanted and again:
                segment.keep_inputs(state, values, held.call)
                _leave_at_once(held, later)
                if segment.ends_in_loss and not any(layer.statistics for layer in segment.layers):
                    sent = {value: values[value] for value in self.ports.leaves if value in values}
                    if len(sent) == len(self.ports.leaves):
                        values.clear()
                        return sent  # this segment's outputs are not read before the recomputation makes them again
            call = held.call if segment.offloads and not again else None
            values = segment.run(context, values, state, wanted and not again, record=True, call=call)
            _leave_at_once(held, later)
        if self.segments[-1].ends_in_loss and held.states[-1].inputs is None:
            self._evaluate_loss(context, values, held)
        return {value: values[value] for value in self.ports.leaves}

    def offload(self, context: MicrobatchContext) -> Callable[[], None]:
        """O: begins to offload the microbatch's tensors to the host tier; returns the wait for it."""
        call = self._held[context.index].call
        if call is None:
            return _nothing
        call.leave(beside=True)
        return call.settle

    def load(self, context: MicrobatchContext) -> None:
        """L: begins to bring these tensors back. A read of one waits for it."""
        call = self._held[context.index].call
        if call is not None:
            call.come_back(beside=True)

    def recompute(self, context: MicrobatchContext) -> None:
        """R: runs the last interval that recomputes once more, with the same random numbers, and keeps the graph."""
        held = self._held[context.index]
        _bring_back(held)
        for place in reversed(range(len(self.segments))):
            if held.states[place].inputs is not None:
                self._run_again(context, held, place)
                return

    def _run_again(self, context: MicrobatchContext, held: _Held, place: int) -> None:
        segment, state = self.segments[place], held.states[place]
        assert state.inputs is not None
        values = {
            name: kept.get() if isinstance(kept, OffloadedTensor) else kept for name, kept in state.inputs.items()
        }
        state.inputs = None
        values = segment.run(context, values, state, graph=True, record=False)
        if segment.ends_in_loss:
            self._evaluate_loss(context, values, held)

    def _evaluate_loss(self, context: MicrobatchContext, live: Mapping[Value, Tensor], held: _Held) -> None:
        leaves = {}
        for value in self._outputs:
            leaf = live[value].detach()
            leaves[value.name] = leaf.requires_grad_() if context.specs[value].requires_grad else leaf
        total: Tensor | None = None
        for place, microbatch in enumerate(context.microbatches):
            part = self._loss_of(microbatch, self._samples(leaves, place, context), context.targets[place], context)
            total = part if total is None else total + part
        held.outputs, held.loss = leaves, total

    def _samples(self, outputs: dict[str, Tensor], place: int, context: MicrobatchContext) -> dict[str, Tensor]:
        """The part of the outputs that belongs to one of the call's microbatches."""
        if len(context.microbatches) == 1:
            return outputs
        with torch.enable_grad():
            return {
                value.name: outputs[value.name].tensor_split(len(context.microbatches), self.samples[value] or 0)[place]
                for value in self._outputs
            }

    def _loss_of(self, microbatch: int, outputs: dict[str, Tensor], targets: Any, context: MicrobatchContext) -> Tensor:
        assert self._loss is not None
        try:
            self.in_loss = True
            with torch.enable_grad():
                parts = self._loss(outputs, known_targets(targets, self.device), context.normalisers)
        except StepRefused as refusal:
            # the step goes on without this microbatch's gradient, so that every rank reaches the vote and refuses it
            # there
            self.refusals[microbatch] = str(refusal)
            parts = {"loss": torch.full((), torch.nan)}
        finally:
            self.in_loss = False
        if "loss" not in parts:
            raise CapslogError(f"the workload's loss returned {sorted(parts)}; one of them must be named 'loss'")
        self.parts[microbatch] = {name: part.detach() for name, part in parts.items()}
        return parts["loss"]

    def backward(
        self, context: MicrobatchContext, gradients: dict[GradientKey, Tensor], inputs_only: bool = False
    ) -> dict[GradientKey, Tensor]:
        """B: differentiates the stage.

        Args:
            gradients: from the stages behind it; taken out (empty on the last stage).
            inputs_only: I: the gradients of parameters come with `backward_weights`.

        Returns:
            The gradients that its ports name and whose values want one (zeros where nothing depends on a value).
        """
        held = self._held[context.index]
        if not inputs_only:
            del self._held[context.index]
        if not self.wants_backward(context):
            return {}  # its inputs have no gradient from here either
        _bring_back(held)
        sums = Gradients(gradients, self.ports.apart)
        for place in reversed(range(len(self.segments))):
            if held.states[place].inputs is not None:
                self._run_again(context, held, place)
            if held.loss is not None:
                self._differentiate_loss(held, sums, context.loss_scale)
            graphs = held.states[place].graphs
            while graphs and inputs_only:
                held.rests.append(graphs.pop().backward_inputs(sums))
            while graphs:
                graphs.pop().backward(sums)
        if held.call is not None and not inputs_only:
            held.call.end()
        wanted = [key for key in self.ports.wanted if context.reach.has(key, self.first)]
        return {key: _as_spec(sums.of(key), context.specs[key[0]], self.device) for key in wanted}

    def _differentiate_loss(self, held: _Held, gradients: Gradients, scale: float) -> None:
        """Begins the backward with the gradients of the loss's inputs."""
        assert held.loss is not None
        assert held.outputs is not None
        if held.loss.requires_grad:
            torch.autograd.backward(held.loss, None if scale == 1.0 else torch.full_like(held.loss, scale))
        for value in self._outputs:
            if (gradient := held.outputs[value.name].grad) is not None:
                gradients.add(value, self.end, gradient)
        held.loss = held.outputs = None

    def backward_weights(self, context: MicrobatchContext) -> None:
        """W: the gradients of the parameters, after the input half."""
        held = self._held.pop(context.index)
        while held.rests:
            held.rests.pop(0).run()
        if held.call is not None:
            held.call.end()

    def kept(self, microbatch: int) -> list[Tensor]:
        """Tensors held of a microbatch between its actions, besides those that autograd saved (for profiling)."""
        held = self._held[microbatch]
        inputs = [kept for state in held.states for kept in (state.inputs or {}).values()]
        more = (*inputs, *(held.outputs or {}).values())
        return [*self.entries(microbatch), *(tensor for tensor in more if isinstance(tensor, Tensor))]

    def rests(self, microbatch: int) -> list[WeightHalf]:
        """The weight halves of its backward whose input half is done, the last graph first (for profiling)."""
        return self._held[microbatch].rests

    def entries(self, microbatch: int) -> list[Tensor]:
        """The part of `kept` with which graphs begin, and which is not held where they are offloaded."""
        graphs = [graph for state in self._held[microbatch].states for graph in state.graphs]
        return [leaf for graph in graphs for leaf in graph.leaves.values() if isinstance(leaf, Tensor)]

    def statistics(self, microbatch: int) -> list[Tensor]:
        """The running statistics that its forward has left until the end of the step (for profiling)."""
        return [tensor for layer in self.layers for tensor in layer.statistics.of(microbatch)]

    def evaluate(
        self, context: MicrobatchContext, values: dict[Value, Tensor]
    ) -> tuple[dict[Value, Tensor], dict[str, Tensor] | None]:
        """Runs the stage without keeping anything (the caller has set evaluation mode).

        Returns the values that leave it, and on the last stage the inputs of the loss, by name.
        """
        for segment in self.segments:
            values = segment.run(context, values, SegmentState(), graph=False, record=False)
        outputs = {value.name: values[value] for value in self._outputs} if self.ends_in_loss else None
        return {value: values[value] for value in self.ports.leaves}, outputs

    def forget(self) -> None:
        """Drops all traces of a broken-off step, gradients included."""
        for held in self._held.values():
            if held.call is not None:
                held.call.end()
        self._held.clear()
        self.parts.clear()
        self.refusals.clear()
        for layer in self.layers:
            layer.reset()


def _leave_at_once(held: _Held, later: bool) -> None:
    if held.call is not None and not later:
        held.call.leave(beside=False)
        held.call.settle()


def _bring_back(held: _Held) -> None:
    """Brings back offloaded tensors that were not loaded, as a part of the action that reads them."""
    if held.call is not None:
        held.call.come_back(beside=False)


def _nothing() -> None:
    """Does nothing: nothing was offloaded."""


def _as_spec(gradient: Tensor | None, spec: TensorSpec, device: torch.device) -> Tensor:
    """A gradient in the layout the receiver expects."""
    if gradient is None:
        return spec.zeros(device)
    if gradient.stride() == spec.stride and gradient.dtype == spec.dtype:
        return gradient
    return spec.empty(device).copy_(gradient)
