"""How long a rank works in a step, its waiting for messages and data left out."""

from __future__ import annotations

import time

import torch

__all__ = ["Stopwatch"]


class Stopwatch:
    """Adds up the seconds of the work on one device; entered around each piece of it.

    On a CPU they are of wall time, so that what other programs take from the device counts. On an accelerator they are
    those between events on the current stream, and nothing waits for them before they are asked for.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._on_cpu = device, device.type == "cpu"
        self._seconds = self._began = 0.0
        self._events: list[torch.Event] = []

    def __enter__(self) -> None:
        if self._on_cpu:
            self._began = time.perf_counter()
        else:
            self._record()

    def __exit__(self, *error: object) -> None:
        if self._on_cpu:
            self._seconds += time.perf_counter() - self._began
        else:
            self._record()

    def _record(self) -> None:
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        self._events.append(event)

    def take(self) -> float:
        """Seconds of work since the last call; waits until the device has done it."""
        for begun, ended in zip(self._events[::2], self._events[1::2], strict=False):
            ended.synchronize()
            self._seconds += begun.elapsed_time(ended) / 1000
        seconds = self._seconds
        self.reset()
        return seconds

    def reset(self) -> None:
        """Forgets what was measured; waits for nothing, also where the device has failed."""
        self._seconds = 0.0
        self._events.clear()
