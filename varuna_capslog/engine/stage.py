"""One pipeline stage at work: forwards, recomputations and backwards of microbatches, not who asks for them.

A stage is a run of layers and, if it is the last one, the loss. It keeps per microbatch what its schedule needs: the
graph of its layers, or only its inputs (for a later recomputation), on the host if asked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from varuna_capslog.base.errors import CapslogError, StepRefused
from varuna_capslog.engine.layers import EngineLayer, LayerGraph, keep_layout
from varuna_capslog.model.chain import Chain, TensorSpec

__all__ = ["HostMemory", "Kept", "LossFunction", "MicrobatchContext", "Stage"]

LossFunction = Callable[[Mapping[str, Tensor], Any, Mapping[str, float]], dict[str, Tensor]]


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


class Kept(Protocol):
    """A tensor that waits in host memory; `torch.Tensor` is one."""

    def to(self, device: torch.device, *, non_blocking: bool = False) -> Tensor:
        """The tensor on a device."""


class HostMemory:
    """Pinned host memory, where stage inputs wait for a recomputation; an estimate takes memory that is not there."""

    def keep(self, tensor: Tensor) -> Kept:
        """A copy of a device's tensor; the copying goes on while the caller continues."""
        host = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor, non_blocking=True)


@dataclass
class _Held:
    """What is kept of one microbatch between its actions."""

    inputs: Mapping[str, Kept] | None = None
    graphs: list[LayerGraph] = field(default_factory=list)
    outputs: dict[str, Tensor] | None = None
    loss: Tensor | None = None


class Stage:
    """Layers `[first, end)` of a chain.

    Args:
        layers: from `take_layers`, consecutive.
        loss: the workload's loss if this is the last stage.
        host: where inputs kept for a recomputation wait, as with Varuna; None: on the device.
    """

    def __init__(
        self,
        index: int,
        chain: Chain,
        layers: Sequence[EngineLayer],
        loss: LossFunction | None,
        host: HostMemory | None = None,
    ) -> None:
        self.index = index
        self.layers = list(layers)
        self.first = layers[0].index
        self.end = layers[-1].index + 1
        self.device = layers[0].device
        self.inputs = chain.crossing(self.first)
        self.outputs = chain.crossing(self.end)
        self._live = [set(chain.crossing(layer.index + 1)) for layer in layers]
        # nothing is handed on past the end of the stage
        self._handed_on = [*(_handed_on(chain, layer.index) for layer in layers[:-1]), frozenset()]
        self._loss = loss
        self._host = host
        self._held: dict[int, _Held] = {}
        self.parts: dict[int, dict[str, Tensor]] = {}
        self.refusals: dict[int, str] = {}
        # where a module's own sharding would gather its parameters and reduce its gradients, once per step
        self.before_step: list[Callable[[], None]] = []
        self.after_step: list[Callable[[], None]] = []

    def wants_backward(self, context: MicrobatchContext) -> bool:
        """False for a stage whose outputs carry no gradient (frozen layers only): its R and B have nothing to do."""
        return self._loss is not None or any(context.specs[self.end][name].requires_grad for name in self.outputs)

    def forward(self, context: MicrobatchContext, values: dict[str, Tensor], graph: bool) -> dict[str, Tensor]:
        """F: runs the stage once.

        Args:
            values: the tensors that cross its first cut, on its device; taken out, so that they live no longer than
                the stage needs them.
            graph: keep the autograd graph for a backward without recomputation; else keep the inputs for `recompute`.
        """
        wanted = self.wants_backward(context)
        held = self._held[context.index] = _Held()
        if wanted and not graph:
            keep = self._host.keep if self._host is not None else _as_it_is
            held.inputs = {name: keep(tensor) for name, tensor in values.items()}
        if self._loss is not None and not graph and not any(layer.statistics for layer in self.layers):
            return {}  # these outputs are not read before the recomputation makes them again
        return self._run(context, values, held, graph and wanted, record=True)

    def recompute(self, context: MicrobatchContext) -> None:
        """R: runs the forward again from the kept inputs, with the same random numbers, and keeps the graph."""
        if not self.wants_backward(context):
            return
        held = self._held[context.index]
        assert held.inputs is not None
        values = {name: tensor.to(self.device, non_blocking=True) for name, tensor in held.inputs.items()}
        held.inputs = None
        self._run(context, values, held, graph=True, record=False)

    def _run(
        self, context: MicrobatchContext, values: dict[str, Tensor], held: _Held, graph: bool, record: bool
    ) -> dict[str, Tensor]:
        live = dict(values)
        # The callers' frames last as long as this one; a frozen first layer's input would too.
        values.clear()
        open_graph: LayerGraph | None = None
        for layer, alive, handed_on in zip(self.layers, self._live, self._handed_on, strict=True):
            if graph and open_graph is None:
                open_graph = LayerGraph({})
                for name in layer.layer.reads:
                    if context.specs[layer.index][name].requires_grad:
                        live[name] = open_graph.leaves[name] = live[name].detach().requires_grad_()
            written = layer.forward(live, (*context.key, context.index), graph, record)
            if open_graph is not None:
                crossing = context.specs[layer.index + 1]
                if any(spec.requires_grad and name not in handed_on for name, spec in crossing.items()):
                    written = open_graph.close(written)
                    held.graphs.append(open_graph)
                    open_graph = None
                else:
                    for name in handed_on:
                        if written[name].requires_grad:
                            keep_layout(written[name])
            live.update(written)
            live = {name: tensor for name, tensor in live.items() if name in alive}
        if self._loss is not None:
            if graph:
                self._evaluate_loss(context, live, held)
            return live
        return {name: live[name] for name in self.outputs}

    def _evaluate_loss(self, context: MicrobatchContext, live: Mapping[str, Tensor], held: _Held) -> None:
        assert self._loss is not None
        leaves = {}
        for name in self.outputs:
            leaf = live[name].detach()
            leaves[name] = leaf.requires_grad_() if context.specs[self.end][name].requires_grad else leaf
        try:
            with torch.enable_grad():
                parts = self._loss(leaves, context.targets, context.normalisers)
        except StepRefused as refusal:
            # the step goes on without this microbatch's gradient, so that every rank reaches the vote and refuses it
            # there
            self.refusals[context.index] = str(refusal)
            parts = {"loss": torch.full((), torch.nan)}
        if "loss" not in parts:
            raise CapslogError(f"the workload's loss returned {sorted(parts)}; one of them must be named 'loss'")
        held.outputs, held.loss = leaves, parts["loss"]
        self.parts[context.index] = {name: part.detach() for name, part in parts.items()}

    def backward(self, context: MicrobatchContext, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        """B: differentiates the stage.

        Args:
            gradients: of the tensors that cross its last cut and want one (empty on the last stage).

        Returns:
            The gradient of every input that wants one (zeros where nothing depends on it).
        """
        held = self._held.pop(context.index)
        if not self.wants_backward(context):
            return {}
        if held.loss is not None:
            assert held.outputs is not None
            if held.loss.requires_grad:
                torch.autograd.backward(held.loss)
            gradients = {name: leaf.grad for name, leaf in held.outputs.items() if leaf.grad is not None}
            held.loss = held.outputs = None
        while held.graphs:
            held.graphs.pop().backward(gradients)
        wanted = {name: spec for name, spec in context.specs[self.first].items() if spec.requires_grad}
        return {name: _as_spec(gradients.get(name), spec, self.device) for name, spec in wanted.items()}

    def kept(self, microbatch: int) -> list[Tensor]:
        """What is held of a microbatch between its actions, besides the tensors that autograd saved (for profiling)."""
        held = self._held[microbatch]
        tensors = [leaf for graph in held.graphs for leaf in graph.leaves.values()]
        inputs = [kept for kept in (held.inputs or {}).values() if isinstance(kept, Tensor)]
        return [*tensors, *inputs, *(held.outputs or {}).values()]

    def evaluate(self, context: MicrobatchContext, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """Runs the stage without keeping anything (the caller has set evaluation mode)."""
        return self._run(context, values, _Held(), graph=False, record=False)

    def forget(self) -> None:
        """Drops what a broken-off step left, gradients included."""
        self._held.clear()
        self.parts.clear()
        self.refusals.clear()
        for layer in self.layers:
            layer.reset()


def _as_it_is(tensor: Tensor) -> Kept:
    return tensor


def _handed_on(chain: Chain, index: int) -> frozenset[str]:
    """Names that layer `index` writes and only the next layer reads: there one graph may hold both layers."""
    after = chain.layers[index + 1]
    passing = set(chain.crossing(index + 2)) - set(after.writes)
    return frozenset(name for name in chain.layers[index].writes if name in after.reads and name not in passing)


def _as_spec(gradient: Tensor | None, spec: TensorSpec, device: torch.device) -> Tensor:
    """A gradient in the layout the receiver expects."""
    if gradient is None:
        return spec.zeros(device)
    if gradient.stride() == spec.stride and gradient.dtype == spec.dtype:
        return gradient
    return spec.empty(device).copy_(gradient)
