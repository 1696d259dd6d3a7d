"""Groups of two ranks that carry tensors in one direction: NCCL's, or groups that behave like NCCL's.

Such a group has no tags: the n-th send meets the n-th receive. Its operations wait for a lost peer until another thread
aborts the group; the received tensor is then worthless, and no error says so.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from typing import Any, Protocol, TypeAlias, cast

import torch
import torch.distributed as dist
from torch import Tensor

from varuna_capslog import accelerator
from varuna_capslog.base.errors import CapslogError, PeerLost
from varuna_capslog.base.functions import import_function
from varuna_capslog.base.processes import OwnedThread, logged

__all__ = ["NotOpened", "Opener", "PairGroup", "PairGroups", "Progress", "Waiting", "opener_of"]

_ABORT_SECONDS = 5.0
_LOOK_SECONDS = 0.005


class NotOpened(PeerLost):
    """Failure to open a group of two ranks."""


class Waiting(Protocol):
    """Send or receive in progress, such as torch's `Work`."""

    def wait(self) -> Any:
        """Wait until later work on this device may use the tensor. Raises RuntimeError."""


class PairGroup(Protocol):
    """Group of two ranks (number 0 sends, number 1 receives): the part of torch's group interface that we use."""

    def send(self, tensors: list[Tensor], number: int, tag: int) -> Waiting:
        """Begin to send one tensor of bytes to the rank of this number."""

    def recv(self, tensors: list[Tensor], number: int, tag: int) -> Waiting:
        """Begin to receive one tensor of bytes from the rank of this number."""

    def abort(self) -> None:
        """End all operations on this rank, after which no tensor is written. Any thread may call it, repeatedly."""


Opener: TypeAlias = "Callable[[dist.Store, int, datetime.timedelta], PairGroup]"
"""Opens a group; both ranks call it with a store for this pair only, the rank's number in the group, and the longest
wait for the peer. It may return before the peers are connected. Raises RuntimeError."""


def opener_of(transport: str) -> Opener | None:
    """Opener for `pipeline.transport`, None for gloo. Raises CapslogError where a user's function cannot load."""
    if transport == "gloo":
        return None
    if transport == "nccl":
        return _open_nccl
    opener: Opener = import_function(transport, f"pipeline.transport={transport!r}")
    return opener


def _open_nccl(store: dist.Store, number: int, timeout: datetime.timedelta) -> PairGroup:
    # by default torch ends the whole process for a late message, or an abort that does not return; here a late message
    # ends only a generation (torch's ProcessGroupNCCL.hpp describes both variables)
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    os.environ.setdefault("TORCH_NCCL_ENABLE_MONITORING", "0")
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    # a backend has the methods of a group, whatever torch's stubs say
    return cast("PairGroup", dist.ProcessGroupNCCL(store, number, 2, options))


class PairGroups:
    """Pair groups of one rank in one generation. timeout: longest wait for a peer. late: called once, from another
    thread, with operation and reason, when a peer does not answer in time.
    """

    def __init__(
        self,
        rank: int,
        store: dist.Store,
        timeout: datetime.timedelta,
        device: torch.device,
        late: Callable[[str], None],
    ) -> None:
        self._rank, self._store, self._timeout, self._device = rank, store, timeout, device
        self._groups: dict[tuple[int, int], PairGroup] = {}
        self._begun: dict[tuple[int, int], Future[None]] = {}
        self._lock, self._aborted = threading.Lock(), threading.Event()
        self._ending: list[OwnedThread] = []
        self.progress = Progress(timeout.total_seconds(), device, late)

    def begin(self, pairs: Iterable[tuple[int, int]], opener: Opener) -> None:
        """Begin to open groups for the ordered pairs that include this rank, unless they were begun before."""
        begun = {pair: Future[None]() for pair in sorted(pairs) if self._rank in pair and pair not in self._begun}
        self._begun |= begun

        def connect() -> None:  # one after the other, in one order on all ranks
            for pair, future in begun.items():
                try:
                    self._connect(pair, opener)
                    future.set_result(None)
                except Exception as error:
                    future.set_exception(error)

        def end(error: CapslogError) -> None:
            for future in begun.values():
                if not future.done():
                    future.set_exception(error)

        if begun:  # in a thread, as opening cannot be interrupted
            OwnedThread("open-pairs", connect, end).start()

    @property
    def settled(self) -> bool:
        """True unless a group is being opened."""
        return all(future.done() for future in [*self._begun.values()])

    def wait(self, pair: tuple[int, int]) -> None:
        """Wait until a pair's begun group is open, or all are aborted. Raises RuntimeError if it cannot be opened."""
        while not self._aborted.is_set():
            if wait([self._begun[pair]], _LOOK_SECONDS).done:
                self._begun[pair].result()
                return

    def _connect(self, pair: tuple[int, int], opener: Opener) -> None:
        if self._aborted.is_set():
            return
        sends = pair[0] == self._rank
        group = opener(dist.PrefixStore(f"{pair[0]}-{pair[1]}", self._store), 0 if sends else 1, self._timeout)
        with self._lock:
            aborted = self._aborted.is_set()
            if not aborted:
                self._groups[pair] = group
        try:
            if not aborted:
                self._meet(group, sum(pair) - self._rank, sends)
        finally:
            if self._aborted.is_set():  # abort again: NCCL connects with the first message, even after an abort
                self._end(group)

    def _meet(self, group: PairGroup, peer: int, sends: bool) -> None:
        """Send or receive a first message, with which NCCL connects."""
        with contextlib.ExitStack() as stack:
            if self._device.type != "cpu":
                # a separate stream: training may go on meanwhile, and its stream must not wait for an absent peer
                stream = stack.enter_context(torch.Stream(self._device))
                stack.callback(stream.synchronize)
            first = torch.zeros(1, dtype=torch.uint8, device=self._device)
            with self.progress.waiting(f"opening a group with rank {peer}"):
                work = group.send([first], 1, 0) if sends else group.recv([first], 0, 0)
                work.wait()

    def route(self, source: int, destination: int) -> tuple[PairGroup, int]:
        """Group from `source` to `destination`, and the peer's number in it. Raises RuntimeError after an abort."""
        group = self._groups.get((source, destination))
        if group is None and self._aborted.is_set():
            raise RuntimeError("the groups of this generation were aborted")
        assert group is not None, f"no group was opened from rank {source} to rank {destination}"
        return group, 1 if source == self._rank else 0

    def abort(self) -> None:
        """End all groups, also those being opened, and wait for that. Any thread may call it, repeatedly.

        All groups end concurrently: in some versions of NCCL an abort waits until the peer has aborted, too, and in
        some it never returns; after some seconds this method stops waiting. No reference to an ended group is kept.
        """
        self.progress.close()
        with self._lock:
            self._aborted.set()
            groups, self._groups = [*self._groups.values()], {}
            begun = [OwnedThread("end-pair", self._end, logged, group) for group in groups]
            for thread in begun:
                thread.start()
            self._ending += begun
            ending = [*self._ending]
        until = time.monotonic() + _ABORT_SECONDS
        for thread in ending:
            thread.join(max(0.0, until - time.monotonic()))

    def _end(self, group: PairGroup) -> None:
        with contextlib.suppress(RuntimeError):  # the group is not used again, and others will see a failed device
            group.abort()
        accelerator.synchronize(self._device)  # memory that an aborted kernel writes to may be used again only after it


class Progress:
    """Watchdog over the waits for messages of pair groups, which have no time limit.

    On an accelerator a wait blocks the device's stream, not the caller: there the stream makes progress when it passes
    a wait.

    limit: seconds without progress while a wait is pending. end: called once, from this object's thread, with the
    operation and the reason.
    """

    def __init__(self, limit: float, device: torch.device, end: Callable[[str], None]) -> None:
        self._limit, self._device, self._end = limit, device, end
        self._lock = threading.Lock()
        self._waits: deque[list[Any]] = deque()  # (doing, event), the event once the stream waits, not the caller
        self._since = 0.0
        self._closed = threading.Event()
        OwnedThread("pair-progress", self._look, lambda error: end(f"waiting for messages: {error}")).start()

    @contextlib.contextmanager
    def waiting(self, doing: str) -> Iterator[None]:
        """Context around the wait for a message. doing: the operation, for the error message."""
        message: list[Any] = [doing, None]
        with self._lock:
            if not self._waits:
                self._since = time.monotonic()
            self._waits.append(message)
        try:
            yield
        finally:
            with self._lock:
                self._since = time.monotonic()
                if self._device.type == "cpu":
                    self._waits.remove(message)
                else:
                    message[1] = accelerator.current_stream(self._device).record_event()

    def close(self) -> None:
        """End the thread."""
        self._closed.set()

    def _look(self) -> None:
        while not self._closed.wait(min(1.0, self._limit / 5)):
            with self._lock:
                while self._waits and _is_past(self._waits[0][1]):
                    self._waits.popleft()
                    self._since = time.monotonic()
                late = bool(self._waits) and time.monotonic() - self._since > self._limit
                doing = self._waits[0][0] if late else ""
            if late:
                self._end(f"{doing}: no answer within {self._limit:g} s")
                return


def _is_past(event: torch.Event | None) -> bool:
    """True where the stream has passed a wait, or the device has failed, which the caller's own thread will see."""
    try:
        return event is not None and event.query()
    except RuntimeError:
        return True
