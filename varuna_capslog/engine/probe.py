"""The peak meter: how many bytes were live at once on a device while a block of code ran.

The profiler wraps measured steps in it and the trainer one step of a run, so that predicted and measured bytes come
from one meter. Both sources are allocator statistics; resident set size never stands in for them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.profiler import profile

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from varuna_capslog.engine.layers import EngineLayer
    from varuna_capslog.engine.optimizer import StageOptimizer

__all__ = ["CPU_SOURCE", "CUDA_SOURCE", "PeakProbe", "resident_tensors", "storage_bytes"]

CPU_SOURCE = "cpu allocator events"
CUDA_SOURCE = "cuda allocator"


class PeakProbe:
    """Measures the peak of a `with` block; not reusable, not nested in itself or in another torch profiler.

    On CUDA: the allocator's own maximum of allocated (not reserved) bytes, which counts every thread and everything
    live.

    On the CPU, which keeps no such statistics: torch's allocator reports each allocation and release to the profiler,
    and the peak is the running maximum of live bytes, beginning with those of `held`. Seen is what the calling thread
    and the threads of autograd allocate; what another Python thread allocates (a prefetching loader) is not seen, nor
    is its release, so load in the calling thread during a probed step. Memory from before the block that is not in
    `held` counts nowhere.

    Args:
        device: whose memory.
        held: CPU only: tensors that are live when the block begins and are the measured code's own (see
            `resident_tensors`); a storage counts once.

    Attributes:
        peak_bytes: set when the block has ended, also by an exception.
        peak_source: `CUDA_SOURCE` or `CPU_SOURCE`.
    """

    def __init__(self, device: torch.device, held: Iterable[Tensor] = ()) -> None:
        self._device = device
        self._held = _storages(tensor for tensor in held if tensor.device == device) if device.type == "cpu" else {}
        self._profile: profile | None = None
        self.peak_bytes = 0
        self.peak_source = CUDA_SOURCE if device.type == "cuda" else CPU_SOURCE

    def __enter__(self) -> PeakProbe:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            # kineto reads this once, when the first profile starts; it reports each start on stderr otherwise
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")
            # not torch.profiler.profile: that one also spends seconds on gathering metadata of the trace
            self._profile = profile(use_kineto=True, use_cpu=True, profile_memory=True)
            self._profile.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._profile is None:
            torch.cuda.synchronize(self._device)
            self.peak_bytes = torch.cuda.max_memory_allocated(self._device)
            return
        self._profile.__exit__(kind, error, traceback)
        results = self._profile.kineto_results
        assert results is not None
        self.peak_bytes = _running_maximum(_allocations(results.experimental_event_tree()), self._held)
        self._profile, self._held = None, {}


def resident_tensors(layers: Sequence[EngineLayer], optimizer: StageOptimizer) -> list[Tensor]:
    """What a rank holds between two steps: parameters, their gradients, buffers and the optimizer's moments."""
    tensors: list[Tensor] = []
    for layer in layers:
        for parameter in layer.parameters.values():
            tensors.append(parameter.detach())
            if parameter.grad is not None:
                tensors.append(parameter.grad)
        tensors.extend(layer.layer.module.buffers())
    for moments in optimizer.state().values():
        tensors.extend(moments.values())
    return tensors


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the distinct storages behind `tensors`."""
    return sum(_storages(tensors).values())


def _storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Address -> bytes of each storage."""
    found = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        found[storage.data_ptr()] = storage.nbytes()
    return found


def _allocations(tree: Iterable[Any]) -> list[tuple[int, int, int]]:
    """(time, address, bytes; negative for a release) of every allocator event on the CPU, in time order."""

    def walk(events: Iterable[Any]) -> Iterator[tuple[int, int, int]]:
        for event in events:
            fields = event.typed[1]
            # the kind of event is an enumeration of torch's own; an allocation is what has an address and a size
            if hasattr(fields, "alloc_size") and fields.device.type == "cpu":
                yield event.start_time_ns, fields.ptr, fields.alloc_size
            yield from walk(event.children)

    # stable: events of one instant keep the order in which they were recorded
    return sorted(walk(tree), key=lambda found: found[0])


def _running_maximum(allocations: Iterable[tuple[int, int, int]], held: dict[int, int]) -> int:
    """The largest sum of live bytes, beginning with `held`; a release of what we never counted changes nothing."""
    live = dict(held)
    current = peak = sum(live.values())
    for _, address, size in allocations:
        # a second allocation at a counted address: its release went unreported
        current -= live.pop(address, 0)
        if size > 0:
            live[address] = size
            current += size
            peak = max(peak, current)
    return peak
