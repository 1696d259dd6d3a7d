"""Compiles one rank's layers, each by itself, before the first step that needs them.

With layers as units, every process compiles the same graphs for the same shapes, whatever the cuts, and results keep
their bits. Nothing is compiled inside a step, where the other ranks would wait.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.engine.communicator import Communicator
from varuna_capslog.engine.layers import CompiledForward, EngineLayer, check_backend
from varuna_capslog.model.chain import Chain, TensorSpec, Value
from varuna_capslog.model.workload import Minibatch
from varuna_capslog.variants.wrapped import backend_of

__all__ = ["LayerCompiler"]


Calls = Iterable[Mapping[Value, TensorSpec]]
"""Specs of all values of the chain, for each call of a stage."""


class LayerCompiler:
    """Compiler of a rank's layers, except layers with running statistics, which hooks on their modules collect.

    Args:
        backend: of `train.compile`; None: compile only layers of variant "compiled", each with its variant's backend.
        layers: of this rank; layers that were compiled for an earlier engine are used again.
        says: print on rank 0 how long compiling took.

    seconds: duration of all compiling so far. Raises CapslogError for an unknown backend.
    """

    def __init__(
        self,
        backend: str | None,
        chain: Chain,
        layers: Sequence[EngineLayer],
        communicator: Communicator,
        says: bool = True,
    ) -> None:
        if backend is not None:
            check_backend(backend)
        self._backend, self._reads, self._communicator = backend, chain.reads, communicator
        self._met: set[Any] = set()
        self._says = says
        self.seconds = 0.0
        for layer in layers:
            layer_backend = backend or backend_of(layer.layer.module)
            if layer_backend is not None and not layer.statistics and layer.compiled is None:
                layer.compiled = CompiledForward(layer.layer.module, layer_backend)

    def prepare(
        self, minibatch: Minibatch, stages: Callable[[], Iterable[tuple[Sequence[EngineLayer], Calls]]]
    ) -> None:
        """Compile the layers for this minibatch's sizes, before a step; all ranks of the communicator call it.

        stages: called for new sizes only; returns the layers of each stage of this rank, with the calls of a step.
        Raises CapslogError where a layer cannot be compiled, PeerLost where another rank cannot compile a layer.
        """
        sizes = {tuple(sorted(inputs.items())) for inputs in minibatch.inputs}
        if sizes <= self._met:  # alike on all ranks, so that all of them take part below
            return
        self._met |= sizes
        self._communicator.together(lambda: self._compile(stages()))

    def _compile(self, stages: Iterable[tuple[Sequence[EngineLayer], Calls]]) -> None:
        begun, done, count, names = time.perf_counter(), set(), 0, dict[str, None]()
        for layers, calls in stages:
            for specs in calls:
                for layer in layers:
                    reads = {value.name: specs[value] for value in self._reads[layer.index]}
                    key = layer.index, tuple(sorted(reads.items()))
                    if layer.compiled is not None and key not in done:
                        done.add(key)
                        self._try(layer, reads)
                        names[layer.compiled.backend] = None
                        count += 1
        spent = time.perf_counter() - begun
        self.seconds += spent
        if count and self._says and self._communicator.rank == 0:
            sys.stdout.write(
                f"rank 0 has compiled {count} layers and sizes with {', '.join(names)} in {spent:.1f} s, as every rank "
                "has its own\n"
            )

    def _try(self, layer: EngineLayer, reads: Mapping[str, TensorSpec]) -> None:
        """Run a forward and a backward on zeros, since torch compiles at the first run; no gradient is kept."""
        values = {name: spec.zeros(layer.device).requires_grad_(spec.requires_grad) for name, spec in reads.items()}
        try:
            written = layer.forward(values, 0, 0, graph=True, record=False)
            outputs = [tensor for tensor in written.values() if tensor.requires_grad]
            wanted = [tensor for tensor in (*values.values(), *layer.parameters.values()) if tensor.requires_grad]
            if outputs and wanted:
                torch.autograd.grad(
                    outputs, wanted, [torch.zeros_like(tensor) for tensor in outputs], allow_unused=True
                )
        except Exception as error:  # the backend's own, of any library
            cause = getattr(error, "inner_exception", error)  # torch's own errors wrap the backend's
            reason = next((line.strip() for line in str(cause).splitlines() if line.strip()), "")
            setting, advice = "variant 'compiled'", "leave it out of the layers that have this variant"
            if self._backend is not None:
                setting = f"train.compile={self._backend!r}"
                advice = "choose another backend, or null, which runs the layers as they are"
            raise CapslogError(
                f"layer {layer.name!r} cannot be compiled with {setting} ({type(cause).__name__}: {reason[:300]}); "
                f"{advice}"
            ) from error
