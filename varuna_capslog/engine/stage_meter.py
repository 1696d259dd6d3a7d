"""The stage meter: what one rank's stage costs, for the profilers of both engines and for the peaks of a run.

Bytes are read as `probe` says, seconds from the clock when the device has finished. Its callers decide
which part of a step it looks at.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from varuna_capslog.engine.interface import Load
from varuna_capslog.engine.probe import PeakProbe, storage_bytes

__all__ = ["StageMeter", "held_inputs"]


class StageMeter:
    """Reads one stage from outside.

    Args:
        device: of the stage.
        resident: gives the tensors that the stage holds between two steps: parameters, gradients, buffers, moments.

    Attributes:
        peak_bytes, peak_source: the largest of the peaks, and how they were measured; None before the first.
        static_bytes: of what was resident when it was last counted.
        saved_bytes: the most that a forward left behind for its backward.
        seconds: every duration, by name.
    """

    def __init__(self, device: torch.device, resident: Callable[[], list[Tensor]]) -> None:
        self._device, self._resident = device, resident
        self.peak_bytes: int | None = None
        self.peak_source: str | None = None
        self.static_bytes = self.saved_bytes = 0
        self.seconds: dict[str, list[float]] = {"forward": [], "backward": []}

    @contextlib.contextmanager
    def peak(self, more: Iterable[Tensor] = ()) -> Iterator[None]:
        """The most bytes that are live at once inside the block.

        Args:
            more: tensors besides the resident ones that are there when the block begins.
        """
        with PeakProbe(self._device, [*self._resident(), *more]) as probe:
            yield
        self.peak_bytes = max(self.peak_bytes or 0, probe.peak_bytes)
        self.peak_source = probe.peak_source

    def count_static(self) -> None:
        """Counts what is resident now."""
        self.static_bytes = storage_bytes(self._resident())

    @contextlib.contextmanager
    def saving(self, own: Sequence[Tensor], kept: Callable[[], Iterable[Tensor] | None]) -> Iterator[None]:
        """Around one forward, or one recomputation.

        Args:
            own: what was resident before; it is not saved by the forward.
            kept: asked at the end for what waits for the backward besides the tensors that autograd saved; None where
                this forward leaves nothing behind.
        """
        saved: list[Tensor] = []

        def pack(tensor: Tensor) -> Tensor:
            saved.append(tensor)
            return tensor

        try:
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                yield
        finally:  # a forward on Varuna ends by an exception
            waiting = kept()
            if waiting is not None:
                found = storage_bytes([*own, *saved, *waiting]) - storage_bytes(own)
                self.saved_bytes = max(self.saved_bytes, found)

    @contextlib.contextmanager
    def timing(self, name: str) -> Iterator[None]:
        """Around one forward or backward, whose duration is added to `seconds`."""
        began = self.now()
        try:
            yield
        finally:  # as above
            self.seconds[name].append(self.now() - began)

    def now(self) -> float:
        """Seconds of a clock that does not go back, when the device has done all that it was asked for."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


def held_inputs(load: Load, local: Sequence[int]) -> Load:
    """The same inputs, loaded now: a measured step counts what a device would hold, not what loading needs."""
    held = {index: load(index) for index in local}
    return lambda microbatch: {name: tensor.clone() for name, tensor in held[microbatch].items()}
