"""Inbox of one member: messages of peers, entries of the store's log and ends of connections, from all threads.

Detects lost peers, before any host does: when the connection to a member ends, `Inbox` aborts the collective under way
and gives `Runtime` the event "lost". A `DeadEntry` in the log aborts it, too. Otherwise the threads only collect
events, and answer a `BrokenEntry` while the member computes.
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


# -- Messages between members that are not the pipeline's tensors: round values, layer states, gradients for copies.
#
# Each pair of members has one connection (`base/connection`) and thread per direction. Connections outlive generations:
# a change of membership reopens none, and the end of a process shows at once as the end of its connections. Every
# message names its generation, and readers drop messages of older ones. A message is JSON, then the bytes of tensors.


_log = logging.getLogger(__name__)

_MAX_HEADER = 64 << 20
_CONNECT_SECONDS = 5.0
_SMALL_BYTES = 256 << 10
_LARGE_BYTES = 8 << 20
"""Smallest message whose time measures the speed of the link: more than the system buffers at once."""
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
        key: secret of this run's members; a peer without it is refused.
        find: returns the "host:port" of a member, before each connection to it; None: the address is not known.
        take: called with every message, in the thread of its connection, in the sender's order; must return at once.
        lost: called with a member whose connection ended or could not be made, perhaps twice for one member.
        failed: called where this member itself cannot send or receive any more, for example after a device failure.
        address: of this machine, on which it listens.

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
        self._listener = AuthenticatedListener(listener, key, self._admitted, self._fail, "peers-door")

    def send(self, target: Member, kind: str, tensors: Mapping[str, Tensor] | None = None, **header: Any) -> None:
        """Queue a message without blocking. Its tensors must not change until the receiver is known to have them. A
        target that cannot be reached is reported to `lost`, and messages queued for it are dropped.
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
        """Highest speed of the last large messages, in bytes per second; None: no large message was sent."""
        return max(self._rates, default=None)

    def sent(self, size: int, seconds: float) -> None:
        """Record the bytes of a message, and the seconds until the system had taken all of them."""
        if size >= _LARGE_BYTES and seconds > 0:
            self._rates.append(size / seconds)

    def keep(self, members: Collection[Member]) -> None:
        """Close the connections to members that are not in `members`, each after its queued messages were sent."""
        with self._lock:
            others = [member for member in self._outgoing if member not in members]
            ended = [self._outgoing.pop(member) for member in others]
        for outgoing in ended:
            outgoing.queue.put(None)

    def close(self, flush_seconds: float) -> None:
        """Close all connections, each once its queued messages are sent or `flush_seconds` have passed."""
        self._closed = True
        self._listener.close()
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
        except Exception as error:  # an unreadable message, such as another version's: the sender counts as lost
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
    """Connection to one member, and the thread that sends its queued messages until None is queued."""

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
        except (OSError, CapslogError):  # CapslogError: the store with the addresses does not answer
            if not peers._closed:
                peers._lost(target)
        finally:
            self.stopped = True
            if self._connection is not None:
                self._connection.close()

    def stop(self, seconds: float) -> None:
        """End the thread; messages not sent within `seconds` are dropped."""
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
    """Yield the bytes of the tensors in order: large tensors without a copy, consecutive small ones joined."""
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
    """Read tensors; consecutive tensors of one dtype share a block of memory."""
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
    """Connections of this member, and the store's log from its beginning. Raises StoreGone: the store does not answer.

    events: ("mail", PeerMessage), ("log", JSON of an entry), ("lost", member), ("store lost", why) or ("failed",
    CapslogError of this member itself), in the order of arrival. peers: for sending.
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
        # with the store's identity: other runs may have the same secret
        key = start.secret.key(f"peers {store.identity}")
        self.peers = Peers(start.me, key, self._find, self._got, self._on_peer_lost, self._failed, start.address)
        store.put(f"address/{start.me}", self.peers.address)
        self._unfollow = store.follow(self._hear, lambda why: self.events.put(("store lost", why)))

    # -- for the member's own thread -----------------------------------------------------------------------------------

    def engage(self, generation: int, members: frozenset[Member]) -> None:
        """Set the generation, and the members whose loss aborts its communicator."""
        with self._lock:
            self._generation, self._engaged = generation, members - {self._me}

    def guard(self, communicator: Communicator | None) -> None:
        """Set the communicator that is aborted when a member is lost; None: there is none."""
        with self._lock:
            self._communicator = communicator

    def is_engaged(self, member: Member) -> bool:
        """True where the generation waits for this other member."""
        return member in self._engaged

    def disturbed(self) -> bool:
        """True where a member that the generation waits for is lost, or a newer generation exists."""
        with self._lock:
            return bool(self._engaged & (self._unreachable | self._dead)) or self._newest > self._generation

    @contextlib.contextmanager
    def busy(self, seconds: float) -> Iterator[None]:
        """Context for work during which the member reads no events: for `seconds`, threads answer `BrokenEntry`."""
        self._busy_until = time.monotonic() + seconds
        try:
            yield
        finally:
            self._busy_until = 0.0

    def close(self, flush_seconds: float) -> None:
        """Stop following the log, and close all connections; see `Peers.close`."""
        self._closed = True
        self._unfollow()
        self.peers.close(flush_seconds)

    # -- threads -------------------------------------------------------------------------------------------------------

    def _find(self, member: Member) -> str | None:
        # The member may still be loading. If it never comes, its host, which watches its process, declares it dead.
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
        with contextlib.suppress(CapslogError):  # the member's own thread reads it again and raises the error
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
            # answered once: the answer is a `BrokenEntry`, too, and comes back through the log
            if time.monotonic() < self._busy_until and self._answered < self._generation:
                self._answered = self._generation
                with contextlib.suppress(StoreGone):
                    self._store.append(replace(entry, member=self._me).to_json())

    def _break_off(self, member: Member) -> None:
        """Abort the communicator if the generation waits for this lost member."""
        with self._lock:
            communicator = self._communicator if member in self._engaged else None
        if communicator is not None:
            communicator.abort()
