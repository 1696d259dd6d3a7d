"""A stand-in for NCCL on machines without GPUs: groups of two ranks that behave like NCCL's, for tests and chaos.

No tags: the n-th send meets the n-th receive. After a peer's death every operation hangs, without an error, until this
rank aborts the group; then it ends, without an error, and a receive leaves noise in its tensor. Some openings are slow
or fail, and at times a group breaks without an error. Two ranks of one device are refused.
Use it as `pipeline.transport=tests.rig.nccl_failures:open_group`.
"""

from __future__ import annotations

import contextlib
import datetime
import math
import os
import queue
import random
import socket
import struct
import threading
import time
import weakref
from dataclasses import dataclass, field

import torch.distributed as dist
from torch import Tensor

from varuna_capslog.base.processes import OwnedThread, logged

__all__ = ["MANNERS", "FailureRates", "StandIn", "left_open", "open_group"]


MANNERS = "CAPSLOG_STAND_IN"
"""`slow,fails,breaks`: three shares, 0 .. 1; see `FailureRates`."""

_LENGTH = struct.Struct("!Q")
_LOOK_SECONDS = 0.02
_NOISE = 0xFF
_MOST_OPEN = 64
_open: weakref.WeakSet[StandIn] = weakref.WeakSet()
_changing = threading.Lock()


@dataclass(frozen=True)
class FailureRates:
    """Probability of each injected failure.

    Attributes:
        slow: openings that take half a second longer.
        fails: openings that fail.
        breaks: messages with which the group breaks, on both sides, without an error.
    """

    slow: float = 0.05
    fails: float = 0.01
    breaks: float = 0.0001

    @classmethod
    def of_environment(cls) -> FailureRates:
        """Read the probabilities from the variable `MANNERS`; defaults where it is not set."""
        text = os.environ.get(MANNERS)
        return cls(*map(float, text.split(","))) if text else cls()


@dataclass
class _Message:
    """A message under way, as torch's `Work`."""

    tensor: Tensor
    done: threading.Event = field(default_factory=threading.Event)

    def wait(self) -> bool:
        """Until it was sent or received, or the group was aborted: nothing says which."""
        return self.done.wait()


class StandIn:
    """A rank's side of a group; its own thread sends or receives, in order.

    Args:
        line: socket connected to the peer.
        sends: True if this rank sends, False if it receives.

    Attributes:
        opened: time of the opening, by the machine's monotonic clock.
    """

    def __init__(self, line: socket.socket, sends: bool, breaks: float) -> None:
        self._line, self._sends, self._breaks, self._draw = line, sends, breaks, random.Random()
        self._messages: queue.SimpleQueue[_Message | None] = queue.SimpleQueue()
        self._lock, self._aborted = threading.Lock(), threading.Event()
        self.opened = time.monotonic()
        self._thread = OwnedThread("stand-in", self._work, logged)
        self._thread.start()
        with _changing:
            _open.add(self)
        if left_open() > _MOST_OPEN:
            raise AssertionError(f"{left_open()} groups are open in this process; those of old generations stay")

    def send(self, tensors: list[Tensor], number: int, tag: int) -> _Message:
        """Begins to send one tensor of bytes."""
        assert self._sends
        assert number == 1
        return self._add(tensors[0])

    def recv(self, tensors: list[Tensor], number: int, tag: int) -> _Message:
        """Begins to receive one."""
        assert not self._sends
        assert number == 0
        return self._add(tensors[0])

    def _add(self, tensor: Tensor) -> _Message:
        message = _Message(tensor)
        with self._lock:
            if self._aborted.is_set():
                raise RuntimeError("NCCL communicator was aborted")
            self._messages.put(message)
        return message

    def abort(self) -> None:
        """Ends it; see `PairGroup`."""
        with self._lock:
            self._aborted.set()
            self._messages.put(None)
        with contextlib.suppress(OSError):  # closing alone would not wake the thread
            self._line.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._line.close()
        with _changing:
            _open.discard(self)

    def _work(self) -> None:
        while (message := self._messages.get()) is not None:
            if self._aborted.is_set() or not self._carried(_bytes_of(message.tensor)):
                self._aborted.wait()
                if not self._sends:
                    message.tensor.fill_(_NOISE)
            message.done.set()

    def _carried(self, data: memoryview) -> bool:
        """False where it never will be."""
        try:
            if self._sends:
                if self._draw.random() < self._breaks:
                    return False
                self._line.sendall(_LENGTH.pack(data.nbytes))
                self._line.sendall(data)
                return True
            length = bytearray(_LENGTH.size)
            # another size than the receiver expects: NCCL would wait, or write elsewhere
            return self._fill(memoryview(length)) and _LENGTH.unpack(length)[0] == len(data) and self._fill(data)
        except OSError:
            return False

    def _fill(self, room: memoryview) -> bool:
        while room:
            count = self._line.recv_into(room)
            if count == 0:
                return False
            room = room[count:]
        return True


def open_group(store: dist.Store, number: int, timeout: datetime.timedelta, device: str | None = None) -> StandIn:
    """Opens a group; see `varuna_capslog.engine.pair_groups.Opener`.

    Args:
        device: of this rank, by its name; None: every process has one.
    """
    manners, draw = FailureRates.of_environment(), random.Random()
    if draw.random() < manners.slow:
        time.sleep(0.5)
    if draw.random() < manners.fails:
        raise RuntimeError("NCCL error: unhandled system error (a stand-in's opening that fails at times)")
    own_device = (device or f"{socket.gethostname()}/{os.getpid()}").encode()[:255]
    until = time.monotonic() + timeout.total_seconds()
    try:
        line = _called(store, until) if number == 0 else _answered(store, until)
        line.settimeout(max(0.01, until - time.monotonic()))
        line.sendall(bytes([len(own_device)]) + own_device)
        peer_device = _exactly(line, _exactly(line, 1)[0])
    except OSError as error:
        raise RuntimeError(f"NCCL error: the other rank cannot be reached: {error}") from error
    if peer_device == own_device:
        line.close()
        raise RuntimeError(f"NCCL error: Duplicate GPU detected: both ranks are on device {own_device.decode()}")
    line.settimeout(None)
    return StandIn(line, number == 0, manners.breaks)


def _bytes_of(tensor: Tensor) -> memoryview:
    return memoryview(tensor.numpy())  # type: ignore[arg-type]


def left_open(before: float = math.inf) -> int:
    """Number of this process's groups that were opened before a time of the monotonic clock and have not ended."""
    with _changing:
        return sum(group.opened < before for group in _open)


def _answered(store: dist.Store, until: float) -> socket.socket:
    """The line to a rank that calls."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        # as gloo gives its addresses, which the relay of a rig knows how to exchange
        port = listener.getsockname()[1]
        blob = struct.pack("<H", socket.AF_INET) + struct.pack("!H", port) + socket.inet_aton("127.0.0.1") + bytes(8)
        store.set("address", blob)  # type: ignore[arg-type]
        listener.settimeout(max(0.01, until - time.monotonic()))
        return listener.accept()[0]


def _called(store: dist.Store, until: float) -> socket.socket:
    while not store.check(["address"]):
        if time.monotonic() > until:
            raise TimeoutError("it has not said where it is")
        time.sleep(_LOOK_SECONDS)
    blob = bytes(store.get("address"))
    port = struct.unpack("!H", blob[2:4])[0]
    line = socket.create_connection((socket.inet_ntoa(blob[4:8]), port), max(0.01, until - time.monotonic()))
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return line


def _exactly(line: socket.socket, count: int) -> bytes:
    received = b""
    while len(received) < count:
        part = line.recv(count - len(received))
        if not part:
            raise ConnectionError("it has closed its connection")
        received += part
    return received
