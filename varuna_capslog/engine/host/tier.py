"""The host tier: memory beside the device's own, where tensors wait between a forward and its backward.

It is the memory of the host, pinned where it can be, or files in a folder that are mapped into memory: torch's
allocator counts neither. Copies run beside the computation, in a thread on a CPU and on a stream of their own on an
accelerator. They may be limited to a bandwidth, so that a test can make a copy late.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as TimedOut
from dataclasses import dataclass

import torch
from torch import Tensor

from varuna_capslog import accelerator
from varuna_capslog.base.errors import CapslogError, HostTierFailed

__all__ = ["HostRegion", "HostTier", "TierOptions", "Wait"]

Wait = Callable[[], None]
"""Returns when a copy has ended; raises HostTierFailed where it failed."""


@dataclass(frozen=True)
class TierOptions:
    """Place and limits of the host tier.

    place: "memory", or a folder for the files, best on a disk of this machine.
    capacity: most bytes of one rank; None: no limit.
    bandwidth: bytes in a second, of all copies together; None: as many as the machine can do.
    timeout_seconds: longest wait for one copy.
    """

    place: str = "memory"
    capacity: int | None = None
    bandwidth: float | None = None
    timeout_seconds: float = 600.0


@dataclass(eq=False)
class HostRegion:
    """A region of the tier's memory: its size in bytes, and the bytes, [size] of uint8 (None in an estimate)."""

    size: int
    data: Tensor | None = None


class HostTier:
    """The host tier of one rank. Memory that was given back is kept for the next tensor of the same size.

    Attributes:
        bytes, peak_bytes: in use now, and the most so far.
    """

    def __init__(self, device: torch.device, options: TierOptions | None = None) -> None:
        self.device, self.options = device, options or TierOptions()
        self.bytes = self.peak_bytes = 0
        self._mapped = 0
        self._free: dict[int, list[HostRegion]] = defaultdict(list)
        self._thread: ThreadPoolExecutor | None = None
        self._stream: torch.Stream | None = None

    def leave(self, tensor: Tensor, beside: bool) -> tuple[HostRegion, Wait]:
        """Begins to copy the storage of a tensor to the tier; its memory must stay until the copy has ended.

        Args:
            beside: let the copy run beside the caller's next work; else it is a part of that work.

        Returns:
            The region that it takes, for `come_back` and `give_back`, and the wait for the copy.

        Raises:
            CapslogError: the tier is full.
        """
        region = self.hold(tensor.untyped_storage().nbytes())
        return region, self.copy_out(tensor, region, beside)

    def copy_out(self, tensor: Tensor, region: HostRegion, beside: bool) -> Wait:
        """Copies as `leave` does, into a region of the size of the tensor's storage."""
        assert region.data is not None
        source = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
        return self._copy(source, region.data, beside)

    def come_back(self, region: HostRegion, beside: bool) -> tuple[Tensor, Wait]:
        """Begins to copy a region into new memory of the device, [size] of uint8, which must not be read earlier."""
        assert region.data is not None
        target = torch.empty(region.size, dtype=torch.uint8, device=self.device)
        return target, self._copy(region.data, target, beside)

    def finish(self) -> None:
        """Returns when all copies have ended. Needed before reading the tier's memory directly: the waits of copies
        hold up an accelerator and not the caller.
        """
        accelerator.synchronize(self.device)

    def give_back(self, region: HostRegion) -> None:
        """Gives back a region that is needed no more; no copy of it may be under way."""
        self.bytes -= region.size
        self._free[region.size].append(region)

    # -- memory ------------------------------------------------------------------------------------------------------

    def hold(self, size: int) -> HostRegion:
        """A region of the tier, until it is given back. Raises CapslogError where the tier is full."""
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
        """New memory that torch's allocator for the device does not count."""
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
        """Makes one copy on a CPU, in the thread of the copies."""
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
    """Does nothing: the copy is a part of the caller's work."""
