"""Inbox of one member: messages, entries of the store's log and ends of connections, from all threads.

The threads only listen, but for two things that cannot wait for the member's own thread: they break off a collective
that can no longer end, and answer for a member that is busy with its own work.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from varuna_capslog.base.connection import AuthenticatedListener, Connection, dial
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.base.processes import Ends, OwnedThread
from varuna_capslog.elastic.host.hooks import notice_of
from varuna_capslog.elastic.member.start_up import MemberStart
from varuna_capslog.elastic.network import listen
from varuna_capslog.elastic.notices.gather import tell
from varuna_capslog.elastic.store.opening import MembershipStore, StoreGone
from varuna_capslog.engine.communicator import Communicator
from varuna_capslog.membership.entries import BrokenEntry, DeadEntry, GenerationEntry, HintEntry, NoticeEntry, read
from varuna_capslog.membership.generation import Member

__all__ = ["Inbox", "PeerMessage", "Peers"]


# -- Messages between the members of a run beside the training data: round values, layer state, gradients for copies.
#
# Connections of `base/connection` with threads of their own, one per direction and pair. They outlive generations, so
# that a change of membership rebuilds none of them, and the end of a process is seen at once as the end of its
# connection. Every message names its generation; its reader drops the older ones. What arrives is JSON and tensors'
# bytes.


_log = logging.getLogger(__name__)

_MAX_HEADER = 64 << 20
_CONNECT_SECONDS = 5.0
_SMALL_BYTES = 256 << 10
_LARGE_BYTES = 8 << 20
"""Size of messages whose time measures the speed of the link: more than the system buffers at once."""
_RATES = 16


@dataclass(frozen=True, slots=True)
class PeerMessage:
    """A message that arrived: its sender, its kind, a JSON header and tensors on the CPU."""

    sender: Member
    kind: str
    header: Mapping[str, Any]
    tensors: Mapping[str, Tensor]


class Peers:
    """All connections of one member to the others.

    Args:
        key: of this run's members; a peer that does not know it is not heard.
        find: member -> "host:port", asked once per member, before the first message; None: it is not known.
        take: called with every message, in the thread of its connection, in the sender's order; returns at once.
        lost: called with a member whose connection ended, or could not be made, perhaps twice for one member.
        failed: called where this member itself cannot speak or listen any more, for example after a device failure.
        address: of this machine, where it listens.

    Raises:
        CapslogError: the address is not this machine's.
    """

    def __init__(
        self,
        me: Member,
        key: bytes,
        find: Callable[[Member], str | None],
        take: Callable[[PeerMessage], None],
        lost: Callable[[Member], None],
        failed: Ends,
        address: str = "127.0.0.1",
    ) -> None:
        self.me = me
        self._key, self._find, self._take, self._lost, self._failed = key, find, take, lost, failed
        self._closed = False
        self._rates: deque[float] = deque(maxlen=_RATES)
        self._lock = threading.Lock()
        self._outgoing: dict[Member, _Outgoing] = {}
        self._incoming: set[Connection] = set()
        listener = listen(address)
        host, port = listener.getsockname()[:2]
        self.address = f"{host}:{port}"
        self._door = AuthenticatedListener(listener, key, self._admitted, self._fail, "peers-door")

    def send(self, target: Member, kind: str, tensors: Mapping[str, Tensor] | None = None, **header: Any) -> None:
        """Queue a message; never blocks. Tensors must not change until the receiver is known to have them. A target
        that cannot be reached is reported to `lost`, and messages queued for it are dropped.
        """
        if self._closed:
            return
        with self._lock:
            outgoing = self._outgoing.get(target)
            if outgoing is None or outgoing.stopped:
                outgoing = self._outgoing[target] = _Outgoing(self, target)
        outgoing.queue.put((kind, dict(tensors or {}), header))

    @property
    def rate(self) -> float | None:
        """Bytes per second of the fastest of the last large messages sent; None: there was none."""
        return max(self._rates, default=None)

    def sent(self, size: int, seconds: float) -> None:
        """Record the bytes of a message and the seconds that handing it to the system took."""
        if size >= _LARGE_BYTES and seconds > 0:
            self._rates.append(size / seconds)

    def keep(self, members: Collection[Member]) -> None:
        """Close the connections to all other members, each after its queued messages were sent."""
        with self._lock:
            others = [member for member in self._outgoing if member not in members]
            ended = [self._outgoing.pop(member) for member in others]
        for outgoing in ended:
            outgoing.queue.put(None)

    def close(self, flush_seconds: float) -> None:
        """End all connections, each after its queue was handed to the system, or `flush_seconds` at most."""
        self._closed = True
        self._door.close()
        with self._lock:
            everything = [*self._outgoing.values()]
            incoming = [*self._incoming]
        for outgoing in everything:
            outgoing.queue.put(None)
        for outgoing in everything:
            outgoing.stop(flush_seconds)
        for connection in incoming:
            connection.shut_down()
            connection.close()

    # -- threads -----------------------------------------------------------------------------------------------------

    def _admitted(self, connection: Connection) -> None:
        with self._lock:
            self._incoming.add(connection)
        try:
            OwnedThread("peers-receive", self._receive, self._fail, connection).start()
        except CapslogError:
            with self._lock:
                self._incoming.discard(connection)
            raise

    def _fail(self, error: CapslogError) -> None:
        if not self._closed:
            self._failed(error)

    def _receive(self, connection: Connection) -> None:
        sender: Member | None = None
        try:
            sender = str(_read_header(connection)["sender"])
            while True:
                header = _read_header(connection)
                tensors = _read_tensors(connection, header.pop("tensors"))
                self._take(PeerMessage(sender, header.pop("kind"), header, tensors))
        except (OSError, EOFError):
            pass
        except Exception as error:  # an unreadable message, as from another version: the sender counts as lost
            _log.warning("a message of %s cannot be read: %s: %s", sender, type(error).__name__, error)
        finally:
            with self._lock:
                self._incoming.discard(connection)
            connection.close()
            if sender is not None and not self._closed:
                self._lost(sender)

    def _dial(self, target: Member) -> Connection:
        address = self._find(target)
        if address is None:
            raise OSError(f"the address of {target} is not known")
        host, _, port = address.rpartition(":")
        connection = dial(host, int(port), self._key, _CONNECT_SECONDS)
        _write(connection, {"sender": self.me}, {})
        return connection


class _Outgoing:
    """Connection to one member and the thread that fills it, until None is queued."""

    def __init__(self, peers: Peers, target: Member) -> None:
        self.queue: queue.SimpleQueue[tuple[str, dict[str, Tensor], dict[str, Any]] | None] = queue.SimpleQueue()
        self._peers, self._target = peers, target
        self._connection: Connection | None = None
        self.stopped = False
        self._thread = OwnedThread(f"peers-send-{target}", self._run, peers._fail)
        self._thread.start()

    def _run(self) -> None:
        peers, target = self._peers, self._target
        try:
            self._connection = peers._dial(target)
            while not self.stopped:
                message = self.queue.get()
                if message is None:
                    return
                kind, tensors, header = message
                began = time.monotonic()
                _write(self._connection, {"kind": kind, **header}, tensors)
                peers.sent(sum(tensor.nbytes for tensor in tensors.values()), time.monotonic() - began)
        except (OSError, CapslogError):  # CapslogError: the store that knows the addresses is gone
            if not peers._closed:
                peers._lost(target)
        finally:
            self.stopped = True
            if self._connection is not None:
                self._connection.close()

    def stop(self, seconds: float) -> None:
        """End the thread; messages that it has not sent after `seconds` are dropped."""
        self._thread.join(seconds)
        self.stopped = True
        if self._connection is not None:
            self._connection.shut_down()


# -- frames ------------------------------------------------------------------------------------------------------------


def _write(connection: Connection, header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    payload = [tensor.detach().cpu() for tensor in tensors.values()]
    listed = [
        [name, str(tensor.dtype).removeprefix("torch."), tensor.shape]
        for name, tensor in zip(tensors, payload, strict=True)
    ]
    text = json.dumps({**header, "tensors": listed}).encode()
    connection.send_message(text, _pack(payload))


def _pack(payload: Sequence[Tensor]) -> Iterator[memoryview]:
    """Bytes of the tensors, one after the other: large ones as they lie there, small ones joined in a row."""
    for (_, small), row in itertools.groupby(payload, lambda tensor: (tensor.dtype, tensor.nbytes < _SMALL_BYTES)):
        tensors = [tensor.contiguous().reshape(-1) for tensor in row]
        for tensor in [torch.cat(tensors)] if small and len(tensors) > 1 else tensors:
            if tensor.numel():
                yield memoryview(tensor.view(torch.uint8).numpy().data)


def _read_header(connection: Connection) -> dict[str, Any]:
    header = json.loads(connection.read_message(_MAX_HEADER))
    if not isinstance(header, dict):
        raise ValueError("a header that is no object")
    return header


def _read_tensors(connection: Connection, listed: list[Any]) -> dict[str, Tensor]:
    """Read tensors; consecutive ones of one type share one block of memory."""
    tensors = {}
    for dtype, row in itertools.groupby(listed, lambda entry: entry[1]):
        kind = getattr(torch, dtype)
        if not isinstance(kind, torch.dtype):
            raise ValueError(f"dtype {dtype!r}")
        rows = list(row)
        sizes = [math.prod(shape) for _, _, shape in rows]
        memory = torch.empty(sum(sizes), dtype=kind)
        if memory.numel():
            connection.read_into(memoryview(memory.view(torch.uint8).numpy().data))
        for (name, _, shape), tensor in zip(rows, memory.split(sizes), strict=True):
            tensors[name] = tensor if len(shape) == 1 else tensor.view(shape)
    return tensors


# -- the inbox of one member


_FIND_SECONDS = 5.0


class Inbox:
    """This member's connections, and the store's log from its beginning. Raises StoreGone: the store does not answer.

    events: ("mail", PeerMessage), ("log", entry), ("lost", member), ("store lost", why) or ("failed", CapslogError) of
    this member itself, in the order of hearing. peers: for sending.
    """

    def __init__(self, start: MemberStart, store: MembershipStore) -> None:
        self._me, self._host, self._store = start.me, start.host, store
        self.events: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._generation = self._newest = self._answered = 0
        self._engaged: frozenset[Member] = frozenset()
        self._unreachable: frozenset[Member] = frozenset()
        self._dead: frozenset[Member] = frozenset()
        self._communicator: Communicator | None = None
        self._busy_until = 0.0
        self._closed = False
        key = start.secret.key(f"peers {store.identity}")
        self.peers = Peers(start.me, key, self._find, self._got, self._on_peer_lost, self._failed, start.address)
        store.put(f"address/{start.me}", self.peers.address)
        self._unfollow = store.follow(self._hear, lambda why: self.events.put(("store lost", why)))

    # -- for the member's own thread -----------------------------------------------------------------------------------

    def engage(self, generation: int, members: frozenset[Member]) -> None:
        """Let the loss of one of these members break off the collective under way in this generation."""
        with self._lock:
            self._generation, self._engaged = generation, members - {self._me}

    def guard(self, communicator: Communicator | None) -> None:
        """Set the communicator that a loss breaks off; None: there is none."""
        with self._lock:
            self._communicator = communicator

    def is_engaged(self, member: Member) -> bool:
        """True where the generation waits for this member."""
        return member in self._engaged

    def disturbed(self) -> bool:
        """True where a member is lost for which the generation waits, or where there is a newer generation."""
        with self._lock:
            return bool(self._engaged & (self._unreachable | self._dead)) or self._newest > self._generation

    @contextlib.contextmanager
    def busy(self, seconds: float) -> Iterator[None]:
        """Context of this member's work during which it hears nothing; threads answer for it, `seconds` at most."""
        self._busy_until = time.monotonic() + seconds
        try:
            yield
        finally:
            self._busy_until = 0.0

    def close(self, flush_seconds: float) -> None:
        """End all connections after queued messages were sent, and hear no more."""
        self._closed = True
        self._unfollow()
        self.peers.close(flush_seconds)

    # -- threads -------------------------------------------------------------------------------------------------------

    def _find(self, member: Member) -> str | None:
        # It may still be loading: its supervisor, which watches its process, says whether it will ever come.
        while not self._closed and member not in self._dead:
            address = self._store.get(f"address/{member}", wait_seconds=_FIND_SECONDS)
            if address is not None:
                return address
        return None

    def _got(self, message: PeerMessage) -> None:
        with self._lock:
            self._unreachable -= {message.sender}
        self.events.put(("mail", message))

    def _on_peer_lost(self, member: Member) -> None:
        with self._lock:
            self._unreachable |= {member}
        self.events.put(("lost", member))
        self._break_off(member)

    def _failed(self, error: CapslogError) -> None:
        self.events.put(("failed", error))
        with self._lock:
            communicator = self._communicator
        if communicator is not None:
            communicator.abort()

    def _hear(self, value: dict[str, Any]) -> None:
        entry = None
        with contextlib.suppress(CapslogError):  # the member's own thread reads it again and says what is wrong
            entry = read(value)
        match entry:
            case DeadEntry(member):
                with self._lock:
                    self._dead |= {member}
            case GenerationEntry(record):
                self._newest = max(self._newest, record.number)
            case NoticeEntry(self._me) | HintEntry(self._me):
                tell(notice_of(entry, self._host))
        self.events.put(("log", value))
        if isinstance(entry, DeadEntry):
            self._break_off(entry.member)
        elif isinstance(entry, BrokenEntry) and entry.generation == self._generation:
            self._break_off(entry.member)
            # once: this entry, and each answer to it, comes back by the log
            if time.monotonic() < self._busy_until and self._answered < self._generation:
                self._answered = self._generation
                with contextlib.suppress(StoreGone):
                    self._store.append(replace(entry, member=self._me).to_json())

    def _break_off(self, member: Member) -> None:
        """End all waits for a lost peer."""
        with self._lock:
            communicator = self._communicator if member in self._engaged else None
        if communicator is not None:
            communicator.abort()
