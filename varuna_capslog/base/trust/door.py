"""An authenticated listener: accepts callers that know the key, in one thread, however many strangers connect.

A caller that has not yet proved that it knows the key has a few seconds and a place in a queue of bounded length; the
oldest one makes room for the next. A stranger therefore costs a descriptor for a moment, never a thread and never
memory beyond 64 bytes, and receives nothing but a random number.
"""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from varuna_capslog.base.threads import Ends, OwnedThread
from varuna_capslog.base.trust.connection import PROOF_BYTES, Connection, accepted, challenge

__all__ = ["GUESTS", "HANDSHAKE_SECONDS", "Door"]

GUESTS = 256
"""Connections that have not yet proved that they know the key."""

_log = logging.getLogger(__name__)

HANDSHAKE_SECONDS = 5.0
"""Time for a caller to prove it."""

_AT_ONCE = 64
_FULL_SECONDS = 0.05


@dataclass
class _Guest:
    asked: bytes
    until: float
    proof: bytearray = field(default_factory=bytearray)


class Door:
    """Accepts on one listener, until it is closed.

    Args:
        listener: bound and listening; the door closes it.
        key: that callers must know.
        admitted: called in the door's thread with every connection that has proved it; returns at once. Where it
            raises, that connection is closed, and the door stays open.
        ends: called where the door itself failed, and is closed.
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
        self._guests: dict[socket.socket, _Guest] = {}  # in the order of their coming
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
                first = next(iter(self._guests.values()), None)
                wait = None if first is None else max(0.0, first.until - time.monotonic())
                for key, _ in self._selector.select(wait):
                    if key.fileobj is self._listener:
                        self._accept()
                    elif isinstance(key.fileobj, socket.socket) and key.fileobj in self._guests:
                        self._hear(key.fileobj)
                now = time.monotonic()
                for line in [line for line, guest in self._guests.items() if guest.until <= now]:
                    self._dismiss(line)
        finally:
            for line in list(self._guests):
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
            except OSError:  # no descriptor or no memory is left: some must go first
                if self._guests:
                    self._dismiss(next(iter(self._guests)))
                time.sleep(_FULL_SECONDS)
                return
            if len(self._guests) >= GUESTS:
                self._dismiss(next(iter(self._guests)))
            guest = _Guest(challenge(), time.monotonic() + HANDSHAKE_SECONDS)
            try:
                line.setblocking(False)
                line.send(guest.asked)
                self._selector.register(line, selectors.EVENT_READ)
            except OSError:
                line.close()
            else:
                self._guests[line] = guest

    def _hear(self, line: socket.socket) -> None:
        guest = self._guests[line]
        try:
            part = line.recv(PROOF_BYTES - len(guest.proof))
        except BlockingIOError:
            return
        except OSError:
            part = b""
        guest.proof += part
        if part and len(guest.proof) < PROOF_BYTES:
            return
        answer = accepted(self._key, guest.asked, bytes(guest.proof)) if part else None
        if answer is None:
            self._dismiss(line)
            return
        del self._guests[line]
        self._selector.unregister(line)
        ours, sends, takes = answer
        try:
            line.send(ours)  # into an empty buffer: it takes 32 bytes at once
            self._admitted(Connection(line, sends, takes))
        except OSError:
            line.close()
        except Exception as error:  # such as no thread for this caller; there may be one for the next
            _log.warning("a connection to %s is closed: %s: %s", self._thread.name, type(error).__name__, error)
            line.close()

    def _dismiss(self, line: socket.socket) -> None:
        del self._guests[line]
        self._selector.unregister(line)
        line.close()
