"""The measured peak of every stage, once per generation, told in a vote: no message of its own, and no later one.

A whole step is measured in two halves, one step's update and the next step's forward and backward, so that the peak is
known when that next step is voted on. `PipelineWork` calls it; the numbers go into metrics.jsonl.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from varuna_capslog.engine.pipeline import PipelineEngine
from varuna_capslog.engine.probe import PeakProbe, resident_tensors

__all__ = ["PeakMeter", "held_inputs"]

_FIRST, _LATER = 2, 5
"""Which step of a generation is measured: in the first one as soon as the moments exist, later on not before it has
proved to last: a probe costs some ten milliseconds."""


class PeakMeter:
    """Peaks of the generation at work on this member. On CUDA a peak holds what protection keeps on the device, too.

    Attributes:
        source: how peaks are measured; None before the first measurement.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._at = self._steps = 0
        self._bytes: int | None = None
        self.source: str | None = None

    def begin(self, generation: int) -> None:
        """A new generation, numbered from 1 within the run; every member calls it with the same number."""
        self._at, self._steps, self._bytes = _FIRST if generation == 1 else _LATER, 0, None

    @contextlib.contextmanager
    def computing(self, engine: PipelineEngine) -> Iterator[bool]:
        """Around forward and backward of a step; gives whether it is measured."""
        self._steps += 1
        measured = self._steps == self._at
        with self._probed(engine) if measured else contextlib.nullcontext():
            yield measured

    @contextlib.contextmanager
    def applying(self, engine: PipelineEngine) -> Iterator[None]:
        """Around the update of a step."""
        with self._probed(engine) if self._steps == self._at - 1 else contextlib.nullcontext():
            yield

    def sealed(self, ballot: bytes) -> bytes:
        """The ballot, with this member's peak in front of it in the step that was measured."""
        if self._steps != self._at or self._bytes is None:
            return ballot
        return b"%d|%b" % (self._bytes, ballot)

    @staticmethod
    def opened(ballots: Sequence[bytes]) -> tuple[tuple[bytes, ...], list[int] | None]:
        """The ballots as they were before `sealed`, and the peaks by rank; None where they were not measured."""
        peaks, plain = [], []
        for ballot in ballots:
            peak, bar, rest = ballot.partition(b"|")
            if bar and peak.isdigit():
                peaks.append(int(peak))
                ballot = rest
            plain.append(ballot)
        return tuple(plain), peaks if peaks and len(peaks) == len(plain) else None

    @contextlib.contextmanager
    def _probed(self, engine: PipelineEngine) -> Iterator[None]:
        with PeakProbe(self._device, resident_tensors(engine.layers, engine.optimizer)) as probe:
            yield
        self._bytes = max(self._bytes or 0, probe.peak_bytes)
        self.source = probe.peak_source


def held_inputs(load: Callable[[int], dict[str, Tensor]], local: Sequence[int]) -> Callable[[int], dict[str, Tensor]]:
    """The same inputs, loaded now: a measured step counts what a device would hold, not what loading needs."""
    held = {index: load(index) for index in local}
    return lambda microbatch: {name: tensor.clone() for name, tensor in held[microbatch].items()}
