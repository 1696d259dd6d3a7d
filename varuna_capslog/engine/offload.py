"""Host tier: memory beside the device's own, for tensors between forward and backward, and for moments."""

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
    "leaves",
]


# -- The host tier.
#
# It is the memory of the host, pinned where it can be, or files in a folder that are mapped into memory: torch's
# allocator counts neither. Copies run beside the computation, in a thread on a CPU and on a stream of their own on an
# accelerator. They may be limited to a bandwidth, so that a test can make a copy late.


Wait = Callable[[], None]
"""Returns when a copy has ended; raises HostTierFailed where it failed."""


@dataclass(frozen=True)
class TierOptions:
    """Place and limits of the host tier.

    place: "memory", or a folder for files, best on a local disk. capacity: most bytes of one rank; None: no limit.
    bandwidth: bytes per second, of all copies together; None: no limit. timeout_seconds: longest wait for one copy.
    """

    place: str = "memory"
    capacity: int | None = None
    bandwidth: float | None = None
    timeout_seconds: float = 600.0


@dataclass(eq=False)
class HostRegion:
    """Region of the tier's memory: its size in bytes, and the bytes, [size] of uint8 (None in an estimate)."""

    size: int
    data: Tensor | None = None


class HostTier:
    """Host tier of one rank; released memory is kept for the next tensor of the same size. Counts bytes in use."""

    def __init__(self, device: torch.device, options: TierOptions | None = None) -> None:
        self.device, self.options = device, options or TierOptions()
        self.bytes = self.peak_bytes = 0
        self._mapped = 0
        self._free: dict[int, list[HostRegion]] = defaultdict(list)
        self._thread: ThreadPoolExecutor | None = None
        self._stream: torch.Stream | None = None

    def leave(self, tensor: Tensor, beside: bool) -> tuple[HostRegion, Wait]:
        """Begin to copy the storage of a tensor to the tier; its memory must stay until the copy has ended.

        Returns the region, for `come_back` and `give_back`, and the wait for the copy, which runs beside the caller's
        next work, or else (`beside=False`) is a part of it. Raises CapslogError where the tier is full.
        """
        region = self.hold(tensor.untyped_storage().nbytes())
        return region, self.copy_out(tensor, region, beside)

    def copy_out(self, tensor: Tensor, region: HostRegion, beside: bool) -> Wait:
        """Copy as `leave` does, into a region of the size of the tensor's storage."""
        assert region.data is not None
        source = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
        return self._copy(source, region.data, beside)

    def come_back(self, region: HostRegion, beside: bool) -> tuple[Tensor, Wait]:
        """Begin to copy a region into new device memory, [size] of uint8, which must not be read before the wait."""
        assert region.data is not None
        target = torch.empty(region.size, dtype=torch.uint8, device=self.device)
        return target, self._copy(region.data, target, beside)

    def finish(self) -> None:
        """Wait for all copies before the tier's memory is read: their waits hold up an accelerator, not the caller."""
        accelerator.synchronize(self.device)

    def give_back(self, region: HostRegion) -> None:
        """Release a region; no copy of it may be under way."""
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
            # It has no name any more when it is used, so that it goes with the process, however that ends.
            with tempfile.TemporaryFile(dir=self.options.place) as file:
                # On a full disk this fails here, and not with a signal when the memory is written to.
                os.posix_fallocate(file.fileno(), 0, size)
                mapped = mmap.mmap(file.fileno(), size)
        except OSError as error:
            raise CapslogError(
                f"the host tier in {self.options.place} cannot take {size} bytes more: {error.strerror}; free space "
                "there, or name another folder in pipeline.host_tier"
            ) from error
        return torch.frombuffer(mapped, dtype=torch.uint8)

    # -- copies ------------------------------------------------------------------------------------------------------

    def _copy(self, source: Tensor, target: Tensor, beside: bool) -> Wait:
        if self.device.type != "cpu":
            return self._copy_on_stream(source, target, beside)
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="host-tier")
        under_way = self._thread.submit(self._carry_out, [source, target])
        if not beside:
            self._settle(under_way)
        return lambda: self._settle(under_way)

    def carry(self, source: Tensor, target: Tensor) -> None:
        """Make one copy on a CPU, in the thread of the copies."""
        begin = time.monotonic()
        target.copy_(source)
        if self.options.bandwidth is not None:
            time.sleep(max(0.0, begin + source.numel() / self.options.bandwidth - time.monotonic()))

    def _carry_out(self, ends: list[Tensor]) -> None:
        # The thread holds nothing any more when the wait is over, so that memory is freed where the program frees it.
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

    def _copy_on_stream(self, source: Tensor, target: Tensor, beside: bool) -> Wait:
        current = accelerator.current_stream(self.device)
        if not beside:
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
# `torch.autograd.graph.saved_tensors_hooks` takes the tensors that autograd saves. They stay where they are until
# `leave` has copied their storages and `settle` has released them. `come_back` brings the storages back to the
# device; a tensor that is asked for before its copy has ended waits for it.


class _Storage:
    """Offloaded storage. tensors: by number, while on the device. forms: (dtype, size, stride, offset) of all."""

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
    """Tensor that an `OffloadedCall` has taken; it keeps its storage's memory, and nothing else does."""

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
        # Storages on the device, by address, which is valid as long as their tensors hold them; and those in the tier,
        # by the order in which they left, so that memory is requested in one order.
        self._here: weakref.WeakValueDictionary[int, _Storage] = weakref.WeakValueDictionary()
        self._away: weakref.WeakValueDictionary[int, _Storage] = weakref.WeakValueDictionary()
        self._order = itertools.count()
        self._regions: list[HostRegion] = []
        self._copies: list[Wait] = []

    def take(self, tensor: Tensor) -> OffloadedTensor:
        """Take a tensor, whose storage leaves with the call."""
        key = tensor.untyped_storage()._cdata
        storage = self._here.get(key)
        if storage is None:
            storage = self._here[key] = _Storage()
        return OffloadedTensor(storage, storage.add(tensor))

    def taking_what_is_saved(self, apart_from: Iterable[Tensor]) -> AbstractContextManager[Any]:
        """Context in which tensors that autograd saves are taken, except those on the storages of `apart_from`."""
        stays = {tensor.untyped_storage()._cdata for tensor in apart_from}

        def pack(tensor: Tensor) -> Tensor | OffloadedTensor:
            return tensor if tensor.untyped_storage()._cdata in stays else self.take(tensor)

        def unpack(packed: Tensor | OffloadedTensor) -> Tensor:
            return packed if isinstance(packed, Tensor) else packed.get()

        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)

    def leave(self, beside: bool) -> None:
        """Begin to copy all storages that are still needed to the tier; see `HostTier.leave`."""
        for storage in list(self._here.values()):
            tensor = next(iter(storage.tensors.values()))
            if storage.region is None and tensor.untyped_storage().nbytes():
                storage.region, storage.wait = self._tier.leave(tensor, beside)
                self._regions.append(storage.region)
                self._copies.append(storage.wait)

    def settle(self) -> None:
        """Wait until all have left, and release the device's memory."""
        for key, storage in list(self._here.items()):
            if storage.region is not None:
                storage.arrive()
                storage.tensors.clear()
                self._away[next(self._order)] = storage
                del self._here[key]

    def come_back(self, beside: bool) -> None:
        """Begin to bring back all storages that have left and are still needed."""
        self.settle()
        for storage in list(self._away.values()):
            if storage.returned is None:
                assert storage.region is not None
                storage.returned, storage.wait = self._tier.come_back(storage.region, beside)
                self._copies.append(storage.wait)

    def end(self) -> None:
        """Release the host's memory: all tensors that were taken have been read, or are not wanted any more."""
        for wait in self._copies:
            with contextlib.suppress(Exception):  # the reader of that copy has had the error
                wait()
        self._copies.clear()
        while self._regions:
            self._tier.give_back(self._regions.pop())


def laid_out(tensor: Tensor, stride: Sequence[int]) -> Tensor:
    """Tensor in this memory layout; contiguous where several elements would share a place, as after `expand`."""
    if tensor.stride() == tuple(stride):
        return tensor
    if any(step == 0 and size > 1 for step, size in zip(stride, tensor.shape, strict=True)):
        return tensor.contiguous()
    return torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


class GradientBox:
    """Receiver of the gradient of a tensor that a graph reads and nothing holds; in `grad`, as a leaf's."""

    def __init__(self, stride: tuple[int, ...]) -> None:
        self.grad: Tensor | None = None
        self._stride = stride

    def stride(self) -> tuple[int, ...]:
        """Stride of the tensor, which its gradient gets as well."""
        return self._stride


class _Entry(torch.autograd.Function):
    """Beginning of a graph, in place of a leaf, since autograd holds every leaf."""

    @staticmethod
    def forward(context: Any, anchor: Tensor, tensor: Tensor, box: GradientBox) -> Tensor:
        context.box = box
        return tensor.detach()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[None, None, None]:
        context.box.grad = laid_out(gradient, context.box.stride())
        return None, None, None


def entered(tensor: Tensor) -> tuple[Tensor, GradientBox]:
    """Tensor that a graph can read without holding it, and the box in which its gradient arrives."""
    box = GradientBox(tensor.stride())
    with torch.enable_grad():
        return _Entry.apply(torch.empty(0, requires_grad=True), tensor, box), box


# -- Keeps optimizer state of some parameters in the host tier between the updates.
#
# The optimizer brings the moments of one layer after the other back for its update; copies run beside the updates of
# the neighbours, so that the device holds those of two layers at most.


def leaves(value: object) -> bool:
    """True for optimizer state that is large enough to be offloaded to the host tier."""
    return isinstance(value, Tensor) and value.nbytes >= LEAST_MOMENT_BYTES


@dataclass(frozen=True)
class _Form:
    """Layout of a tensor on its region."""

    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]

    def on(self, data: Tensor) -> Tensor:
        return data.view(self.dtype).as_strided(self.size, self.stride)


class HostMoments:
    """Moments of the trained parameters of some layers.

    tier: gives all memory now, so that no later update can fail for want of it. sizes: parameter -> bytes of its
    optimizer state by key (`Recipe.kept`). Raises CapslogError where the tier is full.
    """

    def __init__(self, tier: HostTier, sizes: Mapping[nn.Parameter, Mapping[str, int]]) -> None:
        self._tier = tier
        self._regions: dict[nn.Parameter, dict[str, HostRegion]] = {
            parameter: {key: tier.hold(size) for key, size in rows.items() if size >= LEAST_MOMENT_BYTES}
            for parameter, rows in sizes.items()
        }
        self._forms: dict[nn.Parameter, dict[str, _Form]] = {parameter: {} for parameter in sizes}
        self._others: dict[nn.Parameter, dict[str, Any]] = {parameter: {} for parameter in sizes}
        self._leaving: list[tuple[Wait, Tensor]] = []
        self._on_their_way: dict[nn.Parameter, tuple[dict[str, Tensor], list[Wait]]] = {}

    def __contains__(self, parameter: object) -> bool:
        """True where the moments of the parameter wait here."""
        return parameter in self._regions

    def staying(self, parameter: nn.Parameter) -> dict[str, Any]:
        """State of a parameter that is not offloaded, by key."""
        return self._others[parameter]

    def live(self, parameter: nn.Parameter) -> dict[str, Any]:
        """State of a parameter that waits here, by key, without a copy: tensors on the host's memory."""
        self.settle()
        self._tier.finish()
        moments = dict(self._others[parameter])
        for key, form in self._forms[parameter].items():
            data = self._regions[parameter][key].data
            assert data is not None, "an estimate has no moments to read"
            moments[key] = form.on(data)
        return moments

    def leave(self, parameter: nn.Parameter, moments: Mapping[str, Any]) -> None:
        """Begin to copy the state of a parameter to the tier ({}: it has none), until `settle`."""
        regions, forms = self._regions[parameter], self._forms[parameter]
        forms.clear()
        self._others[parameter] = {key: value for key, value in moments.items() if not leaves(value)}
        for key, value in moments.items():
            if not leaves(value):
                continue
            if value.untyped_storage().nbytes() != value.nbytes:
                value = value.clone()
            region = regions.get(key)
            if region is None or region.size != value.nbytes:
                if region is not None:
                    self._tier.give_back(region)
                region = regions[key] = self._tier.hold(value.nbytes)
            forms[key] = _Form(value.dtype, value.size(), value.stride())
            self._leaving.append((self._tier.copy_out(value, region, beside=True), value))

    def settle(self) -> None:
        """Wait until all copies to the tier have ended, and free their sources."""
        while self._leaving:
            wait, _ = self._leaving.pop(0)
            wait()

    def call(self, parameters: Iterable[nn.Parameter]) -> None:
        """Begin to copy the moments of these parameters back, for `take`."""
        for parameter in parameters:
            regions = self._regions[parameter]
            copies = {key: self._tier.come_back(regions[key], beside=True) for key in self._forms[parameter]}
            tensors = {key: self._forms[parameter][key].on(data) for key, (data, _) in copies.items()}
            self._on_their_way[parameter] = tensors, [wait for _, wait in copies.values()]

    def take(self, parameter: nn.Parameter) -> dict[str, Any]:
        """State of a parameter that was called, on the device."""
        tensors, waits = self._on_their_way.pop(parameter)
        for wait in waits:
            wait()
        return {**self._others[parameter], **tensors}
