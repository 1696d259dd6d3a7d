"""Host tier (CPU offload): memory outside the device, for tensors between forward and backward, and for moments."""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import tempfile
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as TimedOut
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from varuna_capslog import accelerator
from varuna_capslog.base.errors import CapslogError, HostTierFailed
from varuna_capslog.profiles.record import LEAST_MOMENT_BYTES

__all__ = [
    "GradientBox",
    "HostMoments",
    "HostRegion",
    "HostTier",
    "OffloadedCall",
    "OffloadedTensor",
    "TierOptions",
    "Wait",
    "entered",
    "laid_out",
    "offloadable",
]


# -- The host tier.
#
# It is host memory, pinned where possible, or files in a folder, mapped into memory: torch's allocator counts neither.
# Copies overlap the computation: on a CPU in a thread, on an accelerator on a separate stream. Their bandwidth can be
# limited, so that a test can delay a copy.


Wait = Callable[[], None]
"""Waits for the end of a copy; raises HostTierFailed where the copy failed."""


@dataclass(frozen=True)
class TierOptions:
    """Place and limits of the host tier.

    place: "memory", or a folder for files, best on a local disk. capacity: most bytes of one rank; None: no limit.
    bandwidth: bytes per second of all copies together; None: no limit. timeout_seconds: longest wait for one copy.
    """

    place: str = "memory"
    capacity: int | None = None
    bandwidth: float | None = None
    timeout_seconds: float = 600.0


@dataclass(eq=False)
class HostRegion:
    """Region of the tier's memory. size: in bytes. data: [size] of uint8; None in an estimate."""

    size: int
    data: Tensor | None = None


class HostTier:
    """Host tier of one rank; released memory is kept for a later tensor of the same size. bytes: now in use."""

    def __init__(self, device: torch.device, options: TierOptions | None = None) -> None:
        self.device, self.options = device, options or TierOptions()
        self.bytes = self.peak_bytes = 0
        self._mapped = 0
        self._free: dict[int, list[HostRegion]] = defaultdict(list)
        self._thread: ThreadPoolExecutor | None = None
        self._stream: torch.Stream | None = None

    def offload(self, tensor: Tensor, overlap: bool) -> tuple[HostRegion, Wait]:
        """Copy the storage of a tensor to the tier; the storage must live until the copy has ended.

        Returns the region, for `load_back` and `give_back`, and the wait for the copy. overlap: True: the copy overlaps
        the caller's next work; False: it precedes that work. Raises CapslogError where the tier is full.
        """
        region = self.hold(tensor.untyped_storage().nbytes())
        return region, self.copy_out(tensor, region, overlap)

    def copy_out(self, tensor: Tensor, region: HostRegion, overlap: bool) -> Wait:
        """Copy as `offload`, into an existing region of the size of the tensor's storage."""
        assert region.data is not None
        source = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
        return self._copy(source, region.data, overlap)

    def load_back(self, region: HostRegion, overlap: bool) -> tuple[Tensor, Wait]:
        """Copy a region into new device memory, [size] of uint8, which must not be read before the returned wait."""
        assert region.data is not None
        target = torch.empty(region.size, dtype=torch.uint8, device=self.device)
        return target, self._copy(region.data, target, overlap)

    def finish(self) -> None:
        """Wait for all copies before the host reads the tier: a `Wait` of an accelerator blocks only its stream."""
        accelerator.synchronize(self.device)

    def give_back(self, region: HostRegion) -> None:
        """Release a region, of which all copies have ended."""
        self.bytes -= region.size
        self._free[region.size].append(region)

    # -- memory ------------------------------------------------------------------------------------------------------

    def hold(self, size: int) -> HostRegion:
        """Reserve a region until `give_back`. Raises CapslogError where the tier is full."""
        limit = self.options.capacity
        if limit is not None and self.bytes + size > limit:
            raise CapslogError(
                f"the host tier is full: it may hold {limit} bytes (pipeline.host_capacity), {self.bytes} are in use "
                f"and {size} more are needed; give it more, or offload fewer layers"
            )
        if free := self._free[size]:
            region = free.pop()
        else:
            if limit is not None and self._mapped + size > limit:
                self._mapped -= sum(region.size for regions in self._free.values() for region in regions)
                self._free.clear()
            region = HostRegion(size, self._map(size))
            self._mapped += size
        self.bytes += size
        self.peak_bytes = max(self.peak_bytes, self.bytes)
        return region

    def _map(self, size: int) -> Tensor | None:
        """New memory that torch's device allocator does not count."""
        if self.options.place == "memory":
            if accelerator.pins_memory(self.device.type):
                return torch.empty(size, dtype=torch.uint8, pin_memory=True)
            return torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)
        try:
            # the file has no name, so that it is removed with the process, however the process ends
            with tempfile.TemporaryFile(dir=self.options.place) as file:
                # a full disk raises an error here, instead of a signal at a later write to the memory
                os.posix_fallocate(file.fileno(), 0, size)
                mapped = mmap.mmap(file.fileno(), size)
        except OSError as error:
            raise CapslogError(
                f"the host tier in {self.options.place} cannot take {size} bytes more: {error.strerror}; free space "
                "there, or name another folder in pipeline.host_tier"
            ) from error
        return torch.frombuffer(mapped, dtype=torch.uint8)

    # -- copies ------------------------------------------------------------------------------------------------------

    def _copy(self, source: Tensor, target: Tensor, overlap: bool) -> Wait:
        if self.device.type != "cpu":
            return self._copy_on_stream(source, target, overlap)
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="host-tier")
        under_way = self._thread.submit(self._carry_out, [source, target])
        if not overlap:
            self._settle(under_way)
        return lambda: self._settle(under_way)

    def carry(self, source: Tensor, target: Tensor) -> None:
        """Copy one tensor on a CPU; runs in the thread for copies."""
        begin = time.monotonic()
        target.copy_(source)
        if self.options.bandwidth is not None:
            time.sleep(max(0.0, begin + source.numel() / self.options.bandwidth - time.monotonic()))

    def _carry_out(self, ends: list[Tensor]) -> None:
        # the thread must hold no tensor after the copy, so that the program decides when memory is freed
        source, target = ends
        ends.clear()
        self.carry(source, target)

    def _settle(self, under_way: Future[None]) -> None:
        limit = self.options.timeout_seconds
        try:
            under_way.result(limit)
        except TimedOut as error:
            raise HostTierFailed(
                f"a copy to or from the host tier ({self.options.place}) has not ended within {limit:g} s; look at "
                "that disk, or raise pipeline.timeout_seconds"
            ) from error
        except Exception as error:
            raise HostTierFailed(
                f"a copy to or from the host tier ({self.options.place}) failed: {type(error).__name__}: {error}"
            ) from error

    def _copy_on_stream(self, source: Tensor, target: Tensor, overlap: bool) -> Wait:
        current = accelerator.current_stream(self.device)
        if not overlap:
            target.copy_(source, non_blocking=True)
            return _nothing
        if self._stream is None:
            self._stream = torch.Stream(self.device)
        self._stream.wait_stream(current)
        with self._stream:
            target.copy_(source, non_blocking=True)
        done = self._stream.record_event()
        return lambda: accelerator.current_stream(self.device).wait_event(done)


def _nothing() -> None:
    """Do nothing: the copy is a part of the caller's work."""


# -- Offloads the tensors of one call of a stage to the host tier, every storage once.
#
# `torch.autograd.graph.saved_tensors_hooks` takes the tensors that autograd saves. They stay on the device until
# `offload` has copied their storages and `settle` has freed them. `load_back` copies the storages back to the device;
# reading a tensor waits for the copy.


class _Storage:
    """Offloaded storage. tensors: by number, only while on the device. forms: (dtype, size, stride, offset) of each."""

    def __init__(self) -> None:
        self.tensors: dict[int, Tensor] = {}
        self.forms: list[tuple[torch.dtype, torch.Size, tuple[int, ...], int]] = []
        self.region: HostRegion | None = None
        self.returned: Tensor | None = None
        self.wait: Wait | None = None

    def add(self, tensor: Tensor) -> int:
        number = len(self.forms)
        self.tensors[number] = tensor
        self.forms.append((tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset())))
        return number

    def arrive(self) -> None:
        if self.wait is not None:
            wait, self.wait = self.wait, None
            wait()

    def get(self, number: int) -> Tensor:
        if number in self.tensors:
            return self.tensors[number]
        assert self.returned is not None, "a tensor was asked for while it was away"
        self.arrive()
        dtype, size, stride, offset = self.forms[number]
        usable = self.returned[: self.returned.numel() // dtype.itemsize * dtype.itemsize]
        return usable.view(dtype).as_strided(size, stride, offset)


class OffloadedTensor:
    """Tensor of an `OffloadedCall`; its storage's memory lives as long as such tensors refer to it."""

    __slots__ = ("number", "storage")

    def __init__(self, storage: _Storage, number: int) -> None:
        self.storage, self.number = storage, number

    def get(self) -> Tensor:
        """Return the tensor, on the device."""
        return self.storage.get(self.number)


class OffloadedCall:
    """Storages of one call of a stage."""

    def __init__(self, tier: HostTier) -> None:
        self._tier = tier
        # storages on the device, by address, which stays theirs while their tensors are alive; and storages in the
        # tier, by the order in which they left, so that device memory is requested in a fixed order
        self._on_device: weakref.WeakValueDictionary[int, _Storage] = weakref.WeakValueDictionary()
        self._in_tier: weakref.WeakValueDictionary[int, _Storage] = weakref.WeakValueDictionary()
        self._order = itertools.count()
        self._regions: list[HostRegion] = []
        self._copies: list[Wait] = []

    def take(self, tensor: Tensor) -> OffloadedTensor:
        """Add a tensor to the call; its storage will be offloaded."""
        key = tensor.untyped_storage()._cdata
        storage = self._on_device.get(key)
        if storage is None:
            storage = self._on_device[key] = _Storage()
        return OffloadedTensor(storage, storage.add(tensor))

    def taking_what_is_saved(self, apart_from: Iterable[Tensor]) -> AbstractContextManager[Any]:
        """Context that adds all tensors that autograd saves, except those on the storages of `apart_from`."""
        stays = {tensor.untyped_storage()._cdata for tensor in apart_from}

        def pack(tensor: Tensor) -> Tensor | OffloadedTensor:
            return tensor if tensor.untyped_storage()._cdata in stays else self.take(tensor)

        def unpack(packed: Tensor | OffloadedTensor) -> Tensor:
            return packed if isinstance(packed, Tensor) else packed.get()

        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)

    def offload(self, overlap: bool) -> None:
        """Begin to copy all live storages to the tier; see `HostTier.offload`."""
        for storage in list(self._on_device.values()):
            tensor = next(iter(storage.tensors.values()))
            if storage.region is None and tensor.untyped_storage().nbytes():
                storage.region, storage.wait = self._tier.offload(tensor, overlap)
                self._regions.append(storage.region)
                self._copies.append(storage.wait)

    def settle(self) -> None:
        """Wait for the copies of `offload`, and free the device memory."""
        for key, storage in list(self._on_device.items()):
            if storage.region is not None:
                storage.arrive()
                storage.tensors.clear()
                self._in_tier[next(self._order)] = storage
                del self._on_device[key]

    def load_back(self, overlap: bool) -> None:
        """Begin to copy back all live storages that are in the tier."""
        self.settle()
        for storage in list(self._in_tier.values()):
            if storage.returned is None:
                assert storage.region is not None
                storage.returned, storage.wait = self._tier.load_back(storage.region, overlap)
                self._copies.append(storage.wait)

    def end(self) -> None:
        """Release the tier's memory; no tensor of the call may be read afterwards."""
        for wait in self._copies:
            with contextlib.suppress(Exception):  # the reader of the copied tensor got the error
                wait()
        self._copies.clear()
        while self._regions:
            self._tier.give_back(self._regions.pop())


def laid_out(tensor: Tensor, stride: Sequence[int]) -> Tensor:
    """Tensor in this memory layout; contiguous where the strides would overlap elements, as those of `expand`."""
    if tensor.stride() == tuple(stride):
        return tensor
    if any(step == 0 and size > 1 for step, size in zip(stride, tensor.shape, strict=True)):
        return tensor.contiguous()
    return torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


class GradientBox:
    """Receiver of the gradient of a graph's input that is not kept on the device; like a leaf, it has `grad`."""

    def __init__(self, stride: tuple[int, ...]) -> None:
        self.grad: Tensor | None = None
        self._stride = stride

    def stride(self) -> tuple[int, ...]:
        """Stride of the input and of its gradient."""
        return self._stride


class _Entry(torch.autograd.Function):
    """Input node of a graph, used instead of a leaf, since autograd keeps every leaf alive."""

    @staticmethod
    def forward(context: Any, anchor: Tensor, tensor: Tensor, box: GradientBox) -> Tensor:
        context.box = box
        return tensor.detach()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[None, None, None]:
        context.box.grad = laid_out(gradient, context.box.stride())
        return None, None, None


def entered(tensor: Tensor) -> tuple[Tensor, GradientBox]:
    """Tensor that a graph can read without keeping it alive, and the box that receives its gradient."""
    box = GradientBox(tensor.stride())
    with torch.enable_grad():
        return _Entry.apply(torch.empty(0, requires_grad=True), tensor, box), box


# -- Keeps optimizer state of some parameters in the host tier between the updates.
#
# For the update, the optimizer brings back the moments of one layer after another. Copies overlap the updates of the
# neighboring layers, so that the device holds the moments of at most two layers.


def offloadable(value: object) -> bool:
    """True for optimizer state that is large enough to be offloaded to the host tier."""
    return isinstance(value, Tensor) and value.nbytes >= LEAST_MOMENT_BYTES


@dataclass(frozen=True)
class _Form:
    """Layout of a tensor on its `HostRegion`."""

    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]

    def on(self, data: Tensor) -> Tensor:
        return data.view(self.dtype).as_strided(self.size, self.stride)


class HostMoments:
    """Offloaded moments of the trained parameters of some layers.

    tier: all memory is reserved now, so that no later update can run out of it. sizes: bytes of the optimizer state, by
    parameter and key (`Recipe.kept`). Raises CapslogError where the tier is full.
    """

    def __init__(self, tier: HostTier, sizes: Mapping[nn.Parameter, Mapping[str, int]]) -> None:
        self._tier = tier
        self._regions: dict[nn.Parameter, dict[str, HostRegion]] = {
            parameter: {key: tier.hold(size) for key, size in rows.items() if size >= LEAST_MOMENT_BYTES}
            for parameter, rows in sizes.items()
        }
        self._forms: dict[nn.Parameter, dict[str, _Form]] = {parameter: {} for parameter in sizes}
        self._others: dict[nn.Parameter, dict[str, Any]] = {parameter: {} for parameter in sizes}
        self._offloading: list[tuple[Wait, Tensor]] = []
        self._loading: dict[nn.Parameter, tuple[dict[str, Tensor], list[Wait]]] = {}

    def __contains__(self, parameter: object) -> bool:
        """True where the parameter's moments are offloaded."""
        return parameter in self._regions

    def staying(self, parameter: nn.Parameter) -> dict[str, Any]:
        """State of a parameter that is too small to be offloaded, by key."""
        return self._others[parameter]

    def live(self, parameter: nn.Parameter) -> dict[str, Any]:
        """State of a parameter, by key, without a copy: offloaded tensors are views of the host's memory."""
        self.settle()
        self._tier.finish()
        moments = dict(self._others[parameter])
        for key, form in self._forms[parameter].items():
            data = self._regions[parameter][key].data
            assert data is not None, "an estimate has no moments to read"
            moments[key] = form.on(data)
        return moments

    def offload(self, parameter: nn.Parameter, moments: Mapping[str, Any]) -> None:
        """Begin to copy the state of a parameter to the tier ({}: no state); `settle` ends this."""
        regions, forms = self._regions[parameter], self._forms[parameter]
        forms.clear()
        self._others[parameter] = {key: value for key, value in moments.items() if not offloadable(value)}
        for key, value in moments.items():
            if not offloadable(value):
                continue
            if value.untyped_storage().nbytes() != value.nbytes:
                value = value.clone()
            region = regions.get(key)
            if region is None or region.size != value.nbytes:
                if region is not None:
                    self._tier.give_back(region)
                region = regions[key] = self._tier.hold(value.nbytes)
            forms[key] = _Form(value.dtype, value.size(), value.stride())
            self._offloading.append((self._tier.copy_out(value, region, overlap=True), value))

    def settle(self) -> None:
        """Wait until all copies to the tier have ended, and free their sources."""
        while self._offloading:
            wait, _ = self._offloading.pop(0)
            wait()

    def load_back(self, parameters: Iterable[nn.Parameter]) -> None:
        """Begin to copy the moments of these parameters back, for `take`."""
        for parameter in parameters:
            regions = self._regions[parameter]
            copies = {key: self._tier.load_back(regions[key], overlap=True) for key in self._forms[parameter]}
            tensors = {key: self._forms[parameter][key].on(data) for key, (data, _) in copies.items()}
            self._loading[parameter] = tensors, [wait for _, wait in copies.values()]

    def take(self, parameter: nn.Parameter) -> dict[str, Any]:
        """State of a parameter on the device, after `load_back`."""
        tensors, waits = self._loading.pop(parameter)
        for wait in waits:
            wait()
        return {**self._others[parameter], **tensors}
