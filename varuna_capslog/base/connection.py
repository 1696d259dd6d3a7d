"""TCP connection of two processes that have proved to each other that they know a key.

`dial` is the caller's side of the handshake, `AuthenticatedListener` the other side. Afterwards all bytes travel in
records of bounded size. Each record has an authentication code (AES-GCM without encryption, known as GMAC: NIST SP
800-38D) over its number and its bytes, under a key of this connection and direction. Nothing is encrypted, and received
bytes are never unpickled. A changed, repeated, missing or reordered record ends the connection, and so does a record
from a sender without the key, before its bytes are used.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from varuna_capslog.base.processes import Ends, OwnedThread

__all__ = [
    "CHALLENGE_BYTES",
    "HANDSHAKE_SECONDS",
    "MAX_RECORD",
    "MOST_UNPROVED",
    "AuthenticatedListener",
    "Connection",
    "Forged",
    "NotTrusted",
    "check_reply",
    "dial",
    "proof",
    "server_hello",
]


MAX_RECORD = 1 << 20
"""Most bytes of a record. A longer record is refused before its bytes are read or memory is allocated."""

_MAGIC = b"capslog2"
_NONCE = 32
_CODE = 32
_RECORD_CODE = 16
CHALLENGE_BYTES = len(_MAGIC) + _NONCE
PROOF_BYTES = _NONCE + _CODE
_SIZE = struct.Struct("!I")
_NUMBER = struct.Struct("!QI")
_MESSAGE = struct.Struct("!Q")
_TRIES = 5
_FIRST_PAUSE_SECONDS = 0.02

Buffer = bytes | bytearray | memoryview


class NotTrusted(ConnectionError):
    """The other side does not know the key, or refuses our proof."""


class Forged(ConnectionError):
    """Received bytes differ from those that the other side sent."""


class Connection:
    """Endpoint of a connection, after the handshake. One thread may send while another reads.

    Args:
        sends, takes: the keys for sent and for received records.

    Attributes:
        until: `time.monotonic` at which sending and reading raise TimeoutError; None: never.
    """

    def __init__(self, line: socket.socket, sends: bytes, takes: bytes) -> None:
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # so that a vanished machine's connection ends
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60)
        line.settimeout(None)
        self.until: float | None = None
        self._line = line
        self._sends, self._takes = AESGCM(sends), AESGCM(takes)
        self._sent = self._taken = 0
        self._rest = memoryview(b"")  # unread bytes of the last checked record

    # -- a stream of bytes ---------------------------------------------------------------------------------------------

    def send(self, parts: Iterable[Buffer]) -> None:
        """Send these bytes in order; they must not change meanwhile. Raises OSError."""
        row: list[memoryview] = []
        size = 0
        for part in parts:
            view = memoryview(part)
            while view:
                piece = view[: MAX_RECORD - size]
                row.append(piece)
                size += len(piece)
                view = view[len(piece) :]
                if size == MAX_RECORD:
                    self._send_record(row)
                    row, size = [], 0
        if row:
            self._send_record(row)

    def read_into(self, view: memoryview) -> None:
        """Fill the view. Raises EOFError, Forged, or another OSError; the view's content is then undefined."""
        while view:
            if not self._rest:
                (size,) = _SIZE.unpack(self._exactly(memoryview(bytearray(_SIZE.size))))
                if not 0 < size <= MAX_RECORD:
                    raise Forged(f"a record of {size} bytes")
                if size <= len(view):
                    self._take_record(view[:size])
                    view = view[size:]
                    continue
                self._rest = self._take_record(memoryview(bytearray(size)))
            count = min(len(view), len(self._rest))
            view[:count] = self._rest[:count]
            view, self._rest = view[count:], self._rest[count:]

    def read(self, size: int) -> bytearray:
        """Return the next `size` bytes. Raises like `read_into`."""
        buffer = bytearray(size)
        self.read_into(memoryview(buffer))
        return buffer

    # -- messages ------------------------------------------------------------------------------------------------------

    def send_message(self, data: bytes, more: Iterable[Buffer] = ()) -> None:
        """Send a message with its length, and more bytes behind it."""
        self.send([_MESSAGE.pack(len(data)) + data, *more])

    def read_message(self, most: int) -> bytearray:
        """Return the next message. Raises like `read_into`, and Forged for a message longer than `most` bytes."""
        (size,) = _MESSAGE.unpack(self.read(_MESSAGE.size))
        if size > most:
            raise Forged(f"a message of {size} bytes")
        return self.read(size)

    # -- the end -------------------------------------------------------------------------------------------------------

    def shut_down(self) -> None:
        """Wake other threads that wait on this connection; no error if it is closed already."""
        with contextlib.suppress(OSError):
            self._line.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the descriptor."""
        self._line.close()

    # -- records -------------------------------------------------------------------------------------------------------

    def _send_record(self, row: list[memoryview]) -> None:
        content = row[0] if len(row) == 1 else memoryview(b"".join(row))
        code = _record_code(self._sends, self._sent, content)
        self._sent += 1
        parts = [memoryview(_SIZE.pack(len(content))), content, memoryview(code)]
        while parts:
            self._bound()
            sent = self._line.sendmsg(parts)
            while parts and sent >= len(parts[0]):
                sent -= len(parts.pop(0))
            if sent:
                parts[0] = parts[0][sent:]

    def _take_record(self, target: memoryview) -> memoryview:
        self._exactly(target)
        code = self._exactly(memoryview(bytearray(_RECORD_CODE)))
        if not hmac.compare_digest(_record_code(self._takes, self._taken, target), code):
            raise Forged("a record with a wrong code")
        self._taken += 1
        return target

    def _exactly(self, target: memoryview) -> memoryview:
        view = target
        while view:
            self._bound()
            count = self._line.recv_into(view, 0, socket.MSG_WAITALL)
            if count == 0:
                raise EOFError("the connection has ended")
            view = view[count:]
        return target

    def _bound(self) -> None:
        if self.until is not None:
            remaining_seconds = self.until - time.monotonic()
            if remaining_seconds <= 0:
                raise TimeoutError("no answer in time")
            self._line.settimeout(remaining_seconds)


def _record_code(key: AESGCM, number: int, content: Buffer) -> bytes:
    """Return the code of a record. `number` counts the records under this key, so that no nonce is used twice."""
    return key.encrypt(_NUMBER.pack(number, len(content)), b"", content)


# -- the handshake -----------------------------------------------------------------------------------------------------


def server_hello() -> bytes:
    """Return the server's first message to every caller: the magic bytes and a fresh random nonce."""
    return _MAGIC + os.urandom(_NONCE)


def proof(key: bytes, challenge_bytes: bytes, nonce: bytes) -> bytes:
    """Return the code with which a caller answers the challenge and proves that it knows the key."""
    return _code(key, b"caller", challenge_bytes + nonce)


def check_reply(key: bytes, challenge_bytes: bytes, reply: bytes) -> tuple[bytes, bytes, bytes] | None:
    """Check `reply` (`PROOF_BYTES`: the caller's fresh nonce and code) on the accepting side. Returns our own proof,
    and the keys for sent and for received records; None where the caller does not know the key.
    """
    both = challenge_bytes + reply[:_NONCE]
    if not hmac.compare_digest(proof(key, challenge_bytes, reply[:_NONCE]), reply[_NONCE:]):
        return None
    return _code(key, b"answerer", both), _code(key, b"to caller", both), _code(key, b"to answerer", both)


def dial(host: str, port: int, key: bytes, seconds: float) -> Connection:
    """Connect to an `AuthenticatedListener`; both sides prove that they know the key, all within `seconds`.

    A connection that ends during the handshake is tried again a few times, since a listener with too many callers
    closes the connection that has waited longest.

    Raises:
        NotTrusted: the other side does not know the key, or closes every connection at our proof.
        OSError: nobody listens there or answers in time, or the other side speaks another protocol.
    """
    until, pause = time.monotonic() + seconds, _FIRST_PAUSE_SECONDS
    for turn in range(_TRIES):
        line = socket.create_connection((host, port), max(0.01, until - time.monotonic()))
        try:
            return _introduce(line, key, until)
        except (ConnectionError, EOFError) as error:
            line.close()
            if turn == _TRIES - 1 or time.monotonic() + pause > until or isinstance(error, _Stranger):
                raise error if isinstance(error, OSError) else ConnectionError(str(error)) from error
        except BaseException:
            line.close()
            raise
        time.sleep(pause)
        pause *= 2
    raise AssertionError("the last turn returns or raises")


class _Stranger(NotTrusted):
    """The other side sent bytes that no holder of the key would send."""


def _introduce(line: socket.socket, key: bytes, until: float) -> Connection:
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    challenge_bytes = _received(line, CHALLENGE_BYTES, until)
    if not challenge_bytes.startswith(_MAGIC):
        raise _Stranger("another program answers there")
    nonce = os.urandom(_NONCE)
    both = challenge_bytes + nonce
    line.sendall(nonce + proof(key, challenge_bytes, nonce))
    try:
        answer = _received(line, _CODE, until)
    except (ConnectionError, EOFError) as error:
        raise NotTrusted("it refuses this run's secret") from error
    if not hmac.compare_digest(_code(key, b"answerer", both), answer):
        raise _Stranger("it does not know this run's secret")
    return Connection(line, _code(key, b"to answerer", both), _code(key, b"to caller", both))


def _received(line: socket.socket, size: int, until: float) -> bytes:
    received = b""
    while len(received) < size:
        line.settimeout(max(0.01, until - time.monotonic()))
        part = line.recv(size - len(received))
        if not part:
            raise EOFError("it closed the connection")
        received += part
    return received


def _code(key: bytes, role: bytes, both: bytes) -> bytes:
    return hmac.digest(key, role + b"\0" + both, "sha256")


# -- An authenticated listener: accepts callers that know the key, in one thread, however many strangers connect.
#
# A caller that has not yet proved that it knows the key has a few seconds and a place in a queue of bounded length.
# When the queue is full, the oldest connection is closed for a new one. A caller without the key therefore costs a
# descriptor for a moment, never a thread and never memory beyond 64 bytes, and receives only a random number.


MOST_UNPROVED = 256
"""Most connections at once that have not yet proved that they know the key."""

_log = logging.getLogger(__name__)

HANDSHAKE_SECONDS = 5.0
"""Time for a caller to prove that it knows the key."""

_AT_ONCE = 64
_FULL_SECONDS = 0.05


@dataclass
class _UnprovedCaller:
    hello: bytes
    until: float
    proof: bytearray = field(default_factory=bytearray)


class AuthenticatedListener:
    """Accepts and authenticates connections on a listening socket until it is closed.

    Args:
        listener: the bound, listening socket; closed with this object.
        key: the key that callers must know.
        admitted: called in this object's thread with every authenticated connection; must return at once. If it raises,
            only that connection is closed.
        ends: called with the error if the thread fails; the listener is closed then.
    """

    def __init__(
        self,
        listener: socket.socket,
        key: bytes,
        admitted: Callable[[Connection], None],
        ends: Ends,
        name: str = "door",
    ) -> None:
        listener.setblocking(False)
        self._listener, self._key, self._admitted = listener, key, admitted
        self._unproved: dict[socket.socket, _UnprovedCaller] = {}  # oldest first
        self._selector = selectors.DefaultSelector()
        self._wakes, self._wake = socket.socketpair()
        for endpoint in (listener, self._wakes):
            self._selector.register(endpoint, selectors.EVENT_READ)
        self._closed = False
        self._thread = OwnedThread(name, self._run, ends)
        self._thread.start()

    def close(self) -> None:
        """Stop listening, close the connections that are not yet admitted, and wait for the thread."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._wake.send(b"x")
        if threading.current_thread() is not self._thread:
            self._thread.join()

    # -- the thread ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._closed:
                first = next(iter(self._unproved.values()), None)
                wait = None if first is None else max(0.0, first.until - time.monotonic())
                for key, _ in self._selector.select(wait):
                    if key.fileobj is self._listener:
                        self._accept()
                    elif isinstance(key.fileobj, socket.socket) and key.fileobj in self._unproved:
                        self._hear(key.fileobj)
                now = time.monotonic()
                for line in [line for line, caller in self._unproved.items() if caller.until <= now]:
                    self._dismiss(line)
        finally:
            for line in list(self._unproved):
                self._dismiss(line)
            self._selector.close()
            for endpoint in (self._listener, self._wakes, self._wake):
                endpoint.close()

    def _accept(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                line, _ = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError:  # no descriptor or memory is left: close the oldest connection first
                if self._unproved:
                    self._dismiss(next(iter(self._unproved)))
                time.sleep(_FULL_SECONDS)
                return
            if len(self._unproved) >= MOST_UNPROVED:
                self._dismiss(next(iter(self._unproved)))
            caller = _UnprovedCaller(server_hello(), time.monotonic() + HANDSHAKE_SECONDS)
            try:
                line.setblocking(False)
                line.send(caller.hello)
                self._selector.register(line, selectors.EVENT_READ)
            except OSError:
                line.close()
            else:
                self._unproved[line] = caller

    def _hear(self, line: socket.socket) -> None:
        caller = self._unproved[line]
        try:
            part = line.recv(PROOF_BYTES - len(caller.proof))
        except BlockingIOError:
            return
        except OSError:
            part = b""
        caller.proof += part
        if part and len(caller.proof) < PROOF_BYTES:
            return
        answer = check_reply(self._key, caller.hello, bytes(caller.proof)) if part else None
        if answer is None:
            self._dismiss(line)
            return
        del self._unproved[line]
        self._selector.unregister(line)
        ours, sends, takes = answer
        try:
            line.send(ours)  # not blocking: 32 bytes fit into the empty buffer
            self._admitted(Connection(line, sends, takes))
        except OSError:
            line.close()
        except Exception as error:  # such as no thread for this caller; there may be one for the next
            _log.warning("a connection to %s is closed: %s: %s", self._thread.name, type(error).__name__, error)
            line.close()

    def _dismiss(self, line: socket.socket) -> None:
        del self._unproved[line]
        self._selector.unregister(line)
        line.close()
