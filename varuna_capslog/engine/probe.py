"""Measures one rank's stage: bytes that are live at once on its device, and seconds of its work.

The profilers of both engines and the trainer use it, so that predicted and measured bytes come from one meter. The
bytes are allocator statistics; resident set size never stands in for them.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.profiler import profile
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes

from varuna_capslog import accelerator
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.engine.interface import Load
from varuna_capslog.engine.layers import EngineLayer
from varuna_capslog.engine.optimizer import StageOptimizer

__all__ = [
    "CPU_SOURCE",
    "PeakProbe",
    "StageMeter",
    "held_inputs",
    "peak_source",
    "resident_tensors",
    "storage_bytes",
    "storages_of",
]

CPU_SOURCE = "cpu allocator events"


def peak_source(device_type: str) -> str:
    """Source of peaks on devices of a type, such as "cuda allocator"."""
    return CPU_SOURCE if device_type == "cpu" else f"{device_type} allocator"


class PeakProbe:
    """Peak of a `with` block, in bytes; not reusable, not nested in itself or in another torch profiler.

    On an accelerator: the allocator's own maximum of allocated (not reserved) bytes, of every thread.

    On the CPU, which keeps no such statistics: torch's allocator reports each allocation and release to the profiler,
    and the peak is the running maximum of live bytes. It begins with `held`: tensors of the measured code that are live
    when the block begins (see `resident_tensors`), each storage once; other memory from before does not count. The
    profiler sees the calling thread and the threads of autograd, but neither allocations nor releases of another Python
    thread (a prefetching loader), so load in the calling thread during a probed step.

    `peak_bytes` is set when the block has ended, also by an exception. Raises CapslogError where torch counts no bytes
    on this accelerator.
    """

    def __init__(self, device: torch.device, held: Iterable[Tensor] = ()) -> None:
        if not accelerator.counts_memory(device):
            raise CapslogError(
                f"torch counts no bytes on {device.type}, so that peaks cannot be measured there; plan with numbers of "
                "another device (profile.source=estimated, profile.device=cpu or cuda:KIND)"
            )
        self._device = device
        self._held = _storages(tensor for tensor in held if tensor.device == device) if device.type == "cpu" else {}
        self._profile: profile | None = None
        self.peak_bytes = 0
        self.peak_source = peak_source(device.type)

    def __enter__(self) -> PeakProbe:
        if self._device.type != "cpu":
            accelerator.synchronize(self._device)
            accelerator.reset_peak(self._device)
        else:
            # kineto reads this once, when the first profile starts; it reports each start on stderr otherwise
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")
            # not torch.profiler.profile: that one also spends seconds on gathering metadata of the trace
            self._profile = profile(use_kineto=True, use_cpu=True, profile_memory=True)
            self._profile.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        if self._profile is None:
            accelerator.synchronize(self._device)
            self.peak_bytes = accelerator.peak_bytes(self._device)
            return
        self._profile.__exit__(*raised)
        results = self._profile.kineto_results
        assert results is not None
        self.peak_bytes = _running_maximum(_allocations(results.experimental_event_tree()), self._held)
        self._profile, self._held = None, {}


class StageMeter:
    """Meter of one stage's bytes and seconds. `resident` returns the tensors that the stage holds between two steps.

    Attributes:
        peak_bytes, peak_source: the largest of the peaks, and how they were measured; None before the first.
        static_bytes: of the tensors that were resident when they were last counted.
        saved_bytes: the most that a forward left behind for its backward.
        moved_bytes: the part of it that offloading would take: tensors that autograd saved, but not for the loss.
        entered_bytes: the same with the tensors that graphs begin with.
        seconds: every duration, by name ("forward", "backward", and "input" and "weight" of its halves).
    """

    def __init__(self, device: torch.device, resident: Callable[[], list[Tensor]]) -> None:
        self._device, self._resident = device, resident
        self.peak_bytes: int | None = None
        self.peak_source: str | None = None
        self.static_bytes = self.saved_bytes = self.moved_bytes = self.entered_bytes = 0
        self.seconds: defaultdict[str, list[float]] = defaultdict(list)

    @contextlib.contextmanager
    def peak(self, more: Iterable[Tensor] = ()) -> Iterator[None]:
        """Context that measures the most bytes live at once. `more`: tensors there before, beside the resident ones."""
        with PeakProbe(self._device, [*self._resident(), *more]) as probe:
            yield
        self.peak_bytes = max(self.peak_bytes or 0, probe.peak_bytes)
        self.peak_source = probe.peak_source

    def count_static(self) -> None:
        """Count the bytes that are resident now."""
        self.static_bytes = storage_bytes(self._resident())

    @contextlib.contextmanager
    def saving(
        self,
        own: Collection[int],
        kept: Callable[[], Iterable[Tensor] | None],
        entries: Callable[[], Iterable[Tensor]] = tuple,
        in_loss: Callable[[], bool] = bool,
    ) -> Iterator[None]:
        """Context around one forward, or one recomputation, that measures the bytes that it saves.

        Args:
            own: storages (`storages_of`) that were resident before; they are not saved by the forward.
            kept: called at the end; returns the tensors that wait for the backward besides those that autograd saved,
                or None where this forward leaves nothing behind.
            entries: asked then for those with which graphs begin. in_loss: True while autograd saves for the loss.
        """
        for_loss: dict[int, tuple[StorageWeakRef, int]] = {}
        for_layers: dict[int, tuple[StorageWeakRef, int]] = {}

        def pack(tensor: Tensor) -> Tensor:
            # with a reference to it, no other storage gets its identity when it is freed
            storage = tensor.untyped_storage()
            (for_loss if in_loss() else for_layers)[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
            # an output that its own node kept would live as long as the node, although nothing else needs either
            with _disable_current_modes():
                return tensor if tensor.is_leaf else tensor.detach()

        def live(storages: dict[int, tuple[StorageWeakRef, int]]) -> dict[int, int]:
            return {key: size for key, (storage, size) in storages.items() if not storage.expired()}

        def size(storages: dict[int, int]) -> int:
            return sum(size for key, size in storages.items() if key not in own)

        try:
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                yield
        finally:  # a forward on Varuna ends by an exception
            waiting = kept()
            if waiting is not None:
                moved = live(for_layers)
                self.saved_bytes = max(self.saved_bytes, size(live(for_loss) | moved | storages_of(waiting)))
                self.moved_bytes = max(self.moved_bytes, size(moved))
                self.entered_bytes = max(self.entered_bytes, size(moved | storages_of(entries())))

    @contextlib.contextmanager
    def timing(self, name: str) -> Iterator[None]:
        """Context around one forward, backward or half of one, whose duration is added to `seconds`."""
        began = self.now()
        try:
            yield
        finally:  # as above
            self.seconds[name].append(self.now() - began)

    def now(self) -> float:
        """Seconds of a monotonic clock, read when the device has done all its work."""
        accelerator.synchronize(self._device)
        return time.perf_counter()


def held_inputs(load: Load, local: Sequence[int]) -> Load:
    """Inputs, loaded now: a measured step counts the bytes that a device would hold, not those of loading."""
    held = {index: load(index) for index in local}
    return lambda microbatch: {name: tensor.clone() for name, tensor in held[microbatch].items()}


def resident_tensors(layers: Sequence[EngineLayer], optimizer: StageOptimizer) -> list[Tensor]:
    """Tensors on the device between steps: parameters, masters, gradients, buffers, moments not in the host tier."""
    tensors: list[Tensor] = []
    for layer in layers:
        tensors += [master.detach() for master in layer.masters.values()]
        for parameter in layer.parameters.values():
            tensors.append(parameter.detach())
            if parameter.grad is not None:
                tensors.append(parameter.grad)
        tensors.extend(layer.layer.module.buffers())
    return [*tensors, *optimizer.resident()]


def storage_bytes(tensors: Iterable[Tensor], block_bytes: int = 1) -> int:
    """Bytes of the distinct storages behind `tensors`, each in whole blocks of an allocator."""
    return sum(-(-size // block_bytes) * block_bytes for size in storages_of(tensors).values())


def storages_of(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Identity -> bytes of each storage, of fake tensors too, which have no address."""
    return {(storage := tensor.untyped_storage())._cdata: storage.nbytes() for tensor in tensors}


def _storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Address -> bytes of each storage."""
    sizes = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
    return sizes


def _allocations(tree: Iterable[Any]) -> list[tuple[int, int, int]]:
    """(time, address, bytes; negative for a release) of every allocator event on the CPU, in time order."""

    def walk(events: Iterable[Any]) -> Iterator[tuple[int, int, int]]:
        for event in events:
            fields = event.typed[1]
            # the kind of event is an enumeration of torch's own; an event with an address and a size is an allocation
            if hasattr(fields, "alloc_size") and fields.device.type == "cpu":
                yield event.start_time_ns, fields.ptr, fields.alloc_size
            yield from walk(event.children)

    # stable: events of one instant keep the order in which they were recorded
    return sorted(walk(tree), key=lambda allocation: allocation[0])


def _running_maximum(allocations: Iterable[tuple[int, int, int]], held: dict[int, int]) -> int:
    """Largest sum of live bytes, beginning with `held`; a release of memory that was never counted changes nothing."""
    live = dict(held)
    current = peak = sum(live.values())
    for _, address, size in allocations:
        # a second allocation at a counted address: its release was not reported
        current -= live.pop(address, 0)
        if size > 0:
            live[address] = size
            current += size
            peak = max(peak, current)
    return peak
