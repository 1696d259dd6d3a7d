"""Messages between the members of a run beside the training data: round values, layer state, gradients for copies.

Plain TCP sockets with threads of their own, one connection per direction and pair. They outlive generations, so that a
change of membership rebuilds none of them, and the end of a process is seen at once as the end of its connection.
Every message names its generation; its reader drops the older ones.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import queue
import socket
import struct
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.membership.generation import Member

__all__ = ["PeerMessage", "Peers"]

_LENGTH = struct.Struct("!Q")
_MAX_HEADER = 64 << 20
_CONNECT_SECONDS = 5.0
_SMALL_BYTES = 256 << 10
_MAX_PARTS = 512


@dataclass(frozen=True, slots=True)
class PeerMessage:
    """What arrived: from whom, of which kind, a JSON header and tensors on the CPU."""

    sender: Member
    kind: str
    header: Mapping[str, Any]
    tensors: Mapping[str, Tensor]


class Peers:
    """One member's end of all its connections.

    Args:
        token: the run's; a connection that brings another is closed.
        find: member -> "host:port", asked once per member, before the first message; None: it is not known.
        take: called with every message, in the thread of its connection; returns at once. The messages of one sender
            come in the order in which they were sent.
        lost: called with a member whose connection ended, or could not be made. It may be called twice for one member.
    """

    def __init__(
        self,
        me: Member,
        token: str,
        find: Callable[[Member], str | None],
        take: Callable[[PeerMessage], None],
        lost: Callable[[Member], None],
        address: str = "127.0.0.1",
    ) -> None:
        self.me = me
        self._token, self._find, self._take, self._lost = token, find, take, lost
        self._closed = False
        self._lock = threading.Lock()
        self._outgoing: dict[Member, _Outgoing] = {}
        self._incoming: set[socket.socket] = set()
        self._listener = socket.create_server((address, 0), backlog=128)
        host, port = self._listener.getsockname()[:2]
        self.address = f"{host}:{port}"
        threading.Thread(target=self._accept, name="peers-accept", daemon=True).start()

    def send(self, target: Member, kind: str, tensors: Mapping[str, Tensor] | None = None, **header: Any) -> None:
        """Queues a message; never blocks. Tensors must not change until the receiver is known to have them.

        A target that cannot be reached is reported to `lost`, and what is queued for it is dropped.
        """
        if self._closed:
            return
        with self._lock:
            outgoing = self._outgoing.get(target)
            if outgoing is None or outgoing.stopped:
                outgoing = self._outgoing[target] = _Outgoing(self, target)
        outgoing.queue.put((kind, dict(tensors or {}), header))

    def keep(self, members: Collection[Member]) -> None:
        """Closes the connections to all others, each after what is queued for it was sent."""
        with self._lock:
            others = [member for member in self._outgoing if member not in members]
            ended = [self._outgoing.pop(member) for member in others]
        for outgoing in ended:
            outgoing.queue.put(None)

    def close(self, flush_seconds: float) -> None:
        """Ends all connections, each after what is queued was handed to the system; waits at most so long for each."""
        self._closed = True
        with self._lock:
            everything = [*self._outgoing.values()]
            incoming = [*self._incoming]
        for outgoing in everything:
            outgoing.queue.put(None)
        for outgoing in everything:
            outgoing.stop(flush_seconds)
        for connection in (*incoming, self._listener):
            _shut_down(connection)
            connection.close()

    # -- threads -----------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with self._lock:
                self._incoming.add(connection)
            threading.Thread(target=self._receive, args=(connection,), name="peers-receive", daemon=True).start()

    def _receive(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sender: Member | None = None
        try:
            hello = _read_header(connection)
            if hello.get("token") != self._token or not isinstance(hello.get("sender"), str):
                return
            sender = hello["sender"]
            while True:
                header = _read_header(connection)
                tensors = _read_tensors(connection, header.pop("tensors"))
                self._take(PeerMessage(sender, header.pop("kind"), header, tensors))
        except (OSError, EOFError, ValueError, KeyError, CapslogError):
            pass
        finally:
            with self._lock:
                self._incoming.discard(connection)
            connection.close()
            if sender is not None and not self._closed:
                self._lost(sender)

    def _dial(self, target: Member) -> socket.socket:
        found = self._find(target)
        if found is None:
            raise OSError(f"the address of {target} is not known")
        host, _, port = found.rpartition(":")
        connection = socket.create_connection((host, int(port)), _CONNECT_SECONDS)
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _write(connection, {"token": self._token, "sender": self.me}, {})
        return connection


class _Outgoing:
    """The connection to one member and the thread that fills it, until None is queued."""

    def __init__(self, peers: Peers, target: Member) -> None:
        self.queue: queue.SimpleQueue[tuple[str, dict[str, Tensor], dict[str, Any]] | None] = queue.SimpleQueue()
        self._peers, self._target = peers, target
        self._connection: socket.socket | None = None
        self.stopped = False
        self._thread = threading.Thread(target=self._run, name=f"peers-send-{target}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        peers, target = self._peers, self._target
        try:
            self._connection = peers._dial(target)
            while not self.stopped:
                item = self.queue.get()
                if item is None:
                    return
                kind, tensors, header = item
                _write(self._connection, {"kind": kind, **header}, tensors)
        except (OSError, CapslogError):  # CapslogError: the store that knows the addresses is gone
            if not peers._closed:
                peers._lost(target)
        finally:
            self.stopped = True
            if self._connection is not None:
                self._connection.close()

    def stop(self, seconds: float) -> None:
        """Ends the thread; what it has not sent after so many seconds is dropped."""
        self._thread.join(seconds)
        self.stopped = True
        if self._connection is not None:
            _shut_down(self._connection)


def _shut_down(connection: socket.socket) -> None:
    """Ends what other threads wait for on a connection, which may be closed already."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


# -- frames ------------------------------------------------------------------------------------------------------------


def _write(connection: socket.socket, header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    payload = [tensor.detach().cpu() for tensor in tensors.values()]
    listed = [
        [name, str(tensor.dtype).removeprefix("torch."), tensor.shape]
        for name, tensor in zip(tensors, payload, strict=True)
    ]
    text = json.dumps({**header, "tensors": listed}).encode()
    _send_all(connection, [memoryview(_LENGTH.pack(len(text)) + text), *_pack(payload)])


def _pack(payload: Sequence[Tensor]) -> Iterator[memoryview]:
    """The tensors' bytes, one after the other: of large ones as they lie there, of small ones in a row together."""
    for (_, small), row in itertools.groupby(payload, lambda tensor: (tensor.dtype, tensor.nbytes < _SMALL_BYTES)):
        tensors = [tensor.contiguous().reshape(-1) for tensor in row]
        for tensor in [torch.cat(tensors)] if small and len(tensors) > 1 else tensors:
            if tensor.numel():
                yield memoryview(tensor.view(torch.uint8).numpy().data)


def _send_all(connection: socket.socket, parts: list[memoryview]) -> None:
    while parts:
        sent = connection.sendmsg(parts[:_MAX_PARTS])
        while parts and sent >= len(parts[0]):
            sent -= len(parts.pop(0))
        if sent:
            parts[0] = parts[0][sent:]


def _read_header(connection: socket.socket) -> dict[str, Any]:
    (size,) = _LENGTH.unpack(_read(connection, _LENGTH.size))
    if size > _MAX_HEADER:
        raise ValueError(f"a header of {size} bytes")
    header = json.loads(bytes(_read(connection, size)))
    if not isinstance(header, dict):
        raise ValueError("a header that is no object")
    return header


def _read_tensors(connection: socket.socket, listed: list[Any]) -> dict[str, Tensor]:
    """Tensors of one type that follow each other lie in one piece of memory."""
    found = {}
    for dtype, row in itertools.groupby(listed, lambda entry: entry[1]):
        kind = getattr(torch, dtype)
        if not isinstance(kind, torch.dtype):
            raise ValueError(f"dtype {dtype!r}")
        rows = list(row)
        sizes = [math.prod(shape) for _, _, shape in rows]
        memory = torch.empty(sum(sizes), dtype=kind)
        if memory.numel():
            _read_into(connection, memoryview(memory.view(torch.uint8).numpy().data))
        for (name, _, shape), tensor in zip(rows, memory.split(sizes), strict=True):
            found[name] = tensor if len(shape) == 1 else tensor.view(shape)
    return found


def _read(connection: socket.socket, size: int) -> bytearray:
    buffer = bytearray(size)
    _read_into(connection, memoryview(buffer))
    return buffer


def _read_into(connection: socket.socket, view: memoryview) -> None:
    while view:
        count = connection.recv_into(view, 0, socket.MSG_WAITALL)
        if count == 0:
            raise EOFError
        view = view[count:]
