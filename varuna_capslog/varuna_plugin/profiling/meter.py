"""Reads what the stage of one rank costs on Varuna: peak, static and saved bytes, seconds.

For the rank of a stage of interest, in a job of any size: `observe` trains three steps by Varuna's own executor. The
meanings are those of `profiling.trim.observe`, so that rows from both engines stand in one profile format.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from varuna_capslog.engine.probe import storage_bytes
from varuna_capslog.engine.stage_meter import StageMeter
from varuna_capslog.model.chain import TensorSpec
from varuna_capslog.profiles.record import Observation
from varuna_capslog.profiling.conditions import RunConditions
from varuna_capslog.varuna_plugin.inputs import Microbatches
from varuna_capslog.varuna_plugin.wire import Bundle

__all__ = ["STEPS", "observe"]

STEPS = 3
"""One that creates the optimizer's state, one under the probe, one against the clock."""


def observe(trainer: Any, inputs: Microbatches, layers: tuple[int, int], conditions: RunConditions) -> Observation:
    """Trains `STEPS` steps and reads this rank's stage; the other ranks train as many.

    Bytes are those of the device: what Varuna keeps or sends in host memory counts nowhere, also where the device is
    the CPU. Of the first stage one microbatch of inputs counts.

    Args:
        trainer: a `varuna.Varuna` with its optimizer.
        inputs: of a step.
        layers: (first, end) pieces of the stage.
    """
    stage = trainer.partitioned_model.capslog
    measured = _MeasuredStage(trainer)
    meter = measured.meter
    stage.bundle_type = _OffDevice
    try:
        with measured.saving():
            measured.step(inputs)
        with meter.peak(measured.given if stage.stage == 0 else ()):
            measured.step(inputs)
        with measured.timing():
            measured.step(inputs)
    finally:
        stage.bundle_type = Bundle
    assert meter.peak_bytes is not None
    before, behind = (() if cut is None else cut.spec.tensors for cut in (stage.entry, stage.exit))
    boundaries = {str(n): spec for n, spec in enumerate(before)}, {str(n): spec for n, spec in enumerate(behind)}
    seconds = statistics.median(meter.seconds["forward"]), statistics.median(meter.seconds["backward"])
    row = conditions.row(layers, boundaries, (meter.peak_bytes, meter.static_bytes, meter.saved_bytes), seconds)
    return row if stage.entry is not None else replace(row, boundary_in_bytes=storage_bytes(measured.given))


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


class _MeasuredStage:
    """One rank's Varuna and the meter that reads it.

    Attributes:
        given: the tensors of one microbatch's inputs, as the model was called.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer, self._module = trainer, trainer.partitioned_model.module
        self._stage = trainer.partitioned_model.capslog
        self.meter = StageMeter(trainer.device, self._resident)
        self.given: list[Tensor] = []
        self._began = 0.0

    def step(self, inputs: Microbatches) -> None:
        """A training step as a Varuna script has it."""
        self._trainer.step(inputs)
        self.meter.count_static()
        self._trainer.optimizer.step()
        self._trainer.zero_grad()

    def _resident(self) -> list[Tensor]:
        """Parameters, gradients, buffers and what the optimizer keeps."""
        parameters = list(self._module.parameters())
        state = pytree.tree_leaves([dict(entry) for entry in self._trainer.optimizer.state.values()])
        tensors = [p.detach() for p in parameters] + [p.grad for p in parameters if p.grad is not None]
        tensors += [*self._module.buffers(), *(leaf for leaf in state if isinstance(leaf, Tensor))]
        # AdamW's step counters lie on the host
        return [tensor for tensor in tensors if tensor.device == self._trainer.device]

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """While it is open, the meter sees what every forward leaves behind for its backward."""
        own = self._resident()
        with self._around_forward(lambda: self.meter.saving(own, self._received)):
            yield

    def _received(self) -> list[Tensor] | None:
        """What the stage works on and keeps for its backward; None in a forward that has none."""
        if not torch.is_grad_enabled():
            return None
        if self._stage.entry is None:
            return self.given
        return [tensor for tensor in self._stage.entry.point.recv_fn().tensors if tensor is not None]

    @contextlib.contextmanager
    def timing(self) -> Iterator[None]:
        """While it is open, the meter times every forward and backward, without the waiting of a backward."""
        before, self._stage.watch_backward = self._stage.watch_backward, self._time_backward
        try:
            with self._around_forward(lambda: self.meter.timing("forward")):
                yield
        finally:
            self._stage.watch_backward = before

    def _time_backward(self, moment: str) -> None:
        now = self.meter.now()
        if moment == "ended":
            self.meter.seconds["backward"].append(now - self._began)
        self._began = now

    @contextlib.contextmanager
    def _around_forward(self, opened: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
        """Opens a context around the user's forward on this stage."""
        own, original = self._module.__dict__.get("forward"), self._module.forward

        def forward(*arguments: Any, **inputs: Any) -> Any:
            self.given = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor)]
            with opened():
                return original(*arguments, **inputs)

        self._module.forward = forward
        try:
            yield
        finally:
            if own is None:
                del self._module.forward
            else:
                self._module.forward = own
