"""Measures one rank's stage: bytes that are live at once on its device, and seconds of its computation.

The profilers of both engines and the training loop use it, so that predicted and measured bytes come from one meter.
Bytes are allocator statistics, never the resident set size.
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
    """Context manager that measures the peak of a block, in bytes; not reusable, nor nested in itself or a profiler.

    On an accelerator: the allocator's own maximum of allocated (not reserved) bytes, over all threads.

    On the CPU, where torch has no such statistics: torch's allocator reports allocations and releases to the profiler,
    and the peak is the running maximum of live bytes. It begins with `held`: tensors of the measured code that are live
    when the block begins (see `resident_tensors`), each storage once; other earlier memory does not count. The profiler
    sees the calling thread and autograd's threads, but no other Python thread (a prefetching loader), so load data in
    the calling thread during a measured step.

    peak_bytes: set at the end of the block, also after an exception. Raises CapslogError where torch counts no bytes on
    this accelerator.
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
            # without this, kineto reports each start on stderr; it reads the variable once, at the first profile
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")
            # torch.profiler.profile would also spend seconds on gathering metadata of the trace
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
    """Meter of one stage's bytes and seconds. resident: returns the tensors that the stage holds between two steps.

    Attributes:
        peak_bytes, peak_source: largest measured peak, and how peaks are measured; None before the first.
        static_bytes: resident bytes at the last `count_static`.
        saved_bytes: the most that a forward kept for its backward.
        moved_bytes: the most of this that could be offloaded: tensors that autograd saved for layers, not for the loss.
        entered_bytes: `moved_bytes` together with the leaves of the graphs.
        seconds: all durations, by name ("forward", "backward", and "input" and "weight" of the backward's halves).
    """

    def __init__(self, device: torch.device, resident: Callable[[], list[Tensor]]) -> None:
        self._device, self._resident = device, resident
        self.peak_bytes: int | None = None
        self.peak_source: str | None = None
        self.static_bytes = self.saved_bytes = self.moved_bytes = self.entered_bytes = 0
        self.seconds: defaultdict[str, list[float]] = defaultdict(list)

    @contextlib.contextmanager
    def peak(self, more: Iterable[Tensor] = ()) -> Iterator[None]:
        """Context that measures a peak. more: tensors that are live at its beginning, besides the resident ones."""
        with PeakProbe(self._device, [*self._resident(), *more]) as probe:
            yield
        self.peak_bytes = max(self.peak_bytes or 0, probe.peak_bytes)
        self.peak_source = probe.peak_source

    def count_static(self) -> None:
        """Set `static_bytes` to the bytes that are resident now."""
        self.static_bytes = storage_bytes(self._resident())

    @contextlib.contextmanager
    def saving(
        self,
        resident: Collection[int],
        kept: Callable[[], Iterable[Tensor] | None],
        entries: Callable[[], Iterable[Tensor]] = tuple,
        in_loss: Callable[[], bool] = bool,
    ) -> Iterator[None]:
        """Context around one forward, or one recomputation, that measures the bytes that it saves.

        Args:
            resident: storages (`storages_of`) that existed before and do not count as saved.
            kept: called at the end; returns the tensors kept for the backward besides those that autograd saved, or
                None where this forward keeps nothing.
            entries: called then; returns the graphs' leaves. in_loss: returns True while autograd saves for the loss.
        """
        for_loss: dict[int, tuple[StorageWeakRef, int]] = {}
        for_layers: dict[int, tuple[StorageWeakRef, int]] = {}

        def pack(tensor: Tensor) -> Tensor:
            # the weak reference keeps another storage from getting the same identity
            storage = tensor.untyped_storage()
            (for_loss if in_loss() else for_layers)[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
            # a node that saves its own output would otherwise keep itself alive
            with _disable_current_modes():
                return tensor if tensor.is_leaf else tensor.detach()

        def live(storages: dict[int, tuple[StorageWeakRef, int]]) -> dict[int, int]:
            return {key: size for key, (storage, size) in storages.items() if not storage.expired()}

        def size(storages: dict[int, int]) -> int:
            return sum(size for key, size in storages.items() if key not in resident)

        try:
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                yield
        finally:  # a forward on Varuna ends with an exception
            waiting = kept()
            if waiting is not None:
                moved = live(for_layers)
                self.saved_bytes = max(self.saved_bytes, size(live(for_loss) | moved | storages_of(waiting)))
                self.moved_bytes = max(self.moved_bytes, size(moved))
                self.entered_bytes = max(self.entered_bytes, size(moved | storages_of(entries())))

    @contextlib.contextmanager
    def timing(self, name: str) -> Iterator[None]:
        """Context around one forward, backward or half of a backward; appends its duration to `seconds`."""
        began = self.now()
        try:
            yield
        finally:  # as above
            self.seconds[name].append(self.now() - began)

    def now(self) -> float:
        """Seconds of a monotonic clock, after a synchronization of the device."""
        accelerator.synchronize(self._device)
        return time.perf_counter()


def held_inputs(load: Load, local: Sequence[int]) -> Load:
    """Load the inputs now; return a function that copies them, so that a measured step counts no bytes of loading."""
    held = {index: load(index) for index in local}
    return lambda microbatch: {name: tensor.clone() for name, tensor in held[microbatch].items()}


def resident_tensors(layers: Sequence[EngineLayer], optimizer: StageOptimizer) -> list[Tensor]:
    """Tensors on the device between steps: parameters, masters, gradients, buffers, moments that are not offloaded."""
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
    """Bytes of the distinct storages of `tensors`, each rounded up to the allocator's blocks."""
    return sum(-(-size // block_bytes) * block_bytes for size in storages_of(tensors).values())


def storages_of(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Maps the identity of each storage to its bytes; works for fake tensors, which have no address."""
    return {(storage := tensor.untyped_storage())._cdata: storage.nbytes() for tensor in tensors}


def _storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Maps the address of each storage to its bytes."""
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
            # the enumeration of event kinds is private to torch; an event with address and size is an allocation
            if hasattr(fields, "alloc_size") and fields.device.type == "cpu":
                yield event.start_time_ns, fields.ptr, fields.alloc_size
            yield from walk(event.children)

    # a stable sort: events of one instant keep their recorded order
    return sorted(walk(tree), key=lambda allocation: allocation[0])


def _running_maximum(allocations: Iterable[tuple[int, int, int]], held: dict[int, int]) -> int:
    """Largest sum of live bytes, beginning with `held`; a release of uncounted memory changes nothing."""
    live = dict(held)
    current = peak = sum(live.values())
    for _, address, size in allocations:
        # a second allocation at a counted address means that the release of the first was not reported
        current -= live.pop(address, 0)
        if size > 0:
            live[address] = size
            current += size
            peak = max(peak, current)
    return peak
