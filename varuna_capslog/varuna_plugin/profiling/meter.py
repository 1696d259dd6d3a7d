"""Reads what the stage of one rank costs on Varuna: peak, static and saved bytes, seconds.

For the rank of a stage of interest, in a job of any size: `observe` trains three steps by Varuna's own executor. The
meanings are those of `profiles.trim.observe`, so that rows from both engines stand in one profile format.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from varuna_capslog.engine.probe import PeakProbe, storage_bytes
from varuna_capslog.model.chain import TensorSpec
from varuna_capslog.profiles.record import Observation
from varuna_capslog.profiling.conditions import RunConditions
from varuna_capslog.varuna_plugin.patches import Patches
from varuna_capslog.varuna_plugin.schedule import BACKWARD
from varuna_capslog.varuna_plugin.wire import Bundle

__all__ = ["STEPS", "observe"]

STEPS = 3
"""One that creates the optimizer's state, one under the probe, one against the clock."""


def observe(trainer: Any, inputs: Mapping[str, Any], layers: tuple[int, int], conditions: RunConditions) -> Observation:
    """Trains `STEPS` steps and reads this rank's stage; the other ranks train as many.

    Bytes are those of the device: what Varuna keeps or sends in host memory counts nowhere, also where the device is
    the CPU. Of the first stage one microbatch of inputs counts.

    Args:
        trainer: a `varuna.Varuna` with its optimizer.
        inputs: of a step.
        layers: (first, end) pieces of the stage.
    """
    stage = trainer.partitioned_model.capslog
    meter = _RankMeter(trainer)
    stage.bundle_type = _OffDevice
    try:
        with meter.saving():
            meter.step(inputs)
        held = [*meter.resident(), *(meter.given if stage.stage == 0 else ())]
        with PeakProbe(trainer.device, held) as probe:
            meter.step(inputs)
        with meter.timing():
            meter.step(inputs)
    finally:
        stage.bundle_type = Bundle
    before, behind = (None if cut is None else cut.spec.tensors for cut in (stage.entry, stage.exit))
    return Observation(
        layers=layers,
        device=trainer.device.type,
        microbatch_size=conditions.microbatch_size,
        input=dict(conditions.input),
        memory_action="recompute",
        peak_bytes=probe.peak_bytes,
        static_bytes=meter.static_bytes,
        saved_bytes=meter.saved_bytes,
        transient_bytes=max(0, probe.peak_bytes - meter.static_bytes),
        boundary_in_bytes=storage_bytes(meter.given) if before is None else _bytes_of(before),
        boundary_out_bytes=0 if behind is None else _bytes_of(behind),
        forward_seconds=statistics.median(meter.seconds["forward"]),
        backward_seconds=statistics.median(meter.seconds["backward"]),
    )


def _bytes_of(specs: Sequence[TensorSpec]) -> int:
    return sum(spec.num_bytes for spec in specs)


class _OffDevice(Bundle):
    """What leaves the stage, copied to memory that no allocator of torch counts: on a CPU "the host" is the device."""

    def cpu(self) -> Bundle:
        if self.host is not None:
            return self.host
        return Bundle(tuple(None if tensor is None else _uncounted(tensor.detach()) for tensor in self.tensors))


def _uncounted(tensor: Tensor) -> Tensor:
    if tensor.device.type != "cpu":
        return tensor.cpu()
    spec = TensorSpec.of(tensor)
    memory = torch.from_numpy(np.empty(spec.num_bytes, np.uint8)).view(spec.dtype)
    return memory.as_strided(spec.shape, spec.stride).copy_(tensor)


class _RankMeter:
    """One rank's Varuna, read from outside.

    Attributes:
        given: the tensors of one microbatch's inputs, as the model was called.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer, self._partitioned = trainer, trainer.partitioned_model
        self._module, self._stage = self._partitioned.module, self._partitioned.capslog
        self.static_bytes = self.saved_bytes = 0
        self.given: list[Tensor] = []
        self.seconds: dict[str, list[float]] = {"forward": [], "backward": []}

    def step(self, inputs: Mapping[str, Any]) -> None:
        """A training step as a Varuna script has it."""
        self._trainer.step(inputs)
        self.static_bytes = storage_bytes(self.resident())
        self._trainer.optimizer.step()
        self._trainer.zero_grad()

    def resident(self) -> list[Tensor]:
        """Parameters, gradients, buffers and what the optimizer keeps."""
        parameters = list(self._module.parameters())
        state = pytree.tree_leaves([dict(entry) for entry in self._trainer.optimizer.state.values()])
        tensors = [p.detach() for p in parameters] + [p.grad for p in parameters if p.grad is not None]
        tensors += [*self._module.buffers(), *(leaf for leaf in state if isinstance(leaf, Tensor))]
        # AdamW's step counters lie on the host
        return [tensor for tensor in tensors if tensor.device == self._trainer.device]

    @contextmanager
    def saving(self) -> Iterator[None]:
        """While it is open, `saved_bytes` grows to the most that a forward leaves behind for its backward."""
        own = self.resident()

        def watch(call: Callable[..., Any], *arguments: Any, **inputs: Any) -> Any:
            self.given = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor)]
            saved: list[Tensor] = []

            def pack(tensor: Tensor) -> Tensor:
                saved.append(tensor)
                return tensor

            try:
                with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                    return call(*arguments, **inputs)
            finally:  # a stage's forward ends by an exception
                if torch.is_grad_enabled():
                    kept = storage_bytes([*own, *saved, *self._received()]) - storage_bytes(own)
                    self.saved_bytes = max(self.saved_bytes, kept)

        with self._around_forward(watch):
            yield

    def _received(self) -> list[Tensor]:
        """What the stage works on and keeps for its backward."""
        if self._stage.entry is None:
            return self.given
        return [tensor for tensor in self._stage.entry.point.recv_fn().tensors if tensor is not None]

    @contextmanager
    def timing(self) -> Iterator[None]:
        """While it is open, `seconds` collects the duration of every forward and backward, without their waiting."""
        began = 0.0

        def forward(call: Callable[..., Any], *arguments: Any, **inputs: Any) -> Any:
            start = self._now()
            try:
                return call(*arguments, **inputs)
            finally:
                self.seconds["forward"].append(self._now() - start)

        from varuna.pipeline import Pipeline

        original = Pipeline.worker

        def worker(pipeline: Any, task: int, *rest: Any) -> Any:
            nonlocal began
            began = self._now()
            result = original(pipeline, task, *rest)
            if task == BACKWARD:
                self.seconds["backward"].append(self._now() - began)
            return result

        patches, leaving = Patches(), self._stage.exit
        patches.replace(Pipeline, "worker", worker)
        if leaving is not None:
            receive = leaving.receive_gradients

            def receive_gradients() -> Any:
                nonlocal began
                gradients = receive()
                began = self._now()
                return gradients

            leaving.receive_gradients = receive_gradients
        try:
            with self._around_forward(forward):
                yield
        finally:
            patches.undo()
            if leaving is not None:
                del leaving.receive_gradients

    @contextmanager
    def _around_forward(self, wrapper: Callable[..., Any]) -> Iterator[None]:
        """Puts `wrapper` around the user's forward on this stage."""
        own = self._module.__dict__.get("forward")
        original = self._module.forward
        self._module.forward = lambda *arguments, **inputs: wrapper(original, *arguments, **inputs)
        try:
            yield
        finally:
            if own is None:
                del self._module.forward
            else:
                self._module.forward = own

    def _now(self) -> float:
        if self._trainer.device.type == "cuda":
            torch.cuda.synchronize(self._trainer.device)
        return time.perf_counter()
