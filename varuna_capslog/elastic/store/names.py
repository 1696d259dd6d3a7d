"""Addresses of the store's endpoints: a name server may take seconds, and no call may wait for it while a run trains.

The name server is asked when an endpoint is first called. Later connections take the same addresses; where they lead
nowhere, it is asked again in a thread of its own.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
from collections.abc import Sequence

from varuna_capslog.base.threads import OwnedThread, logged

__all__ = ["HttpConnection", "Names"]


class Names:
    """Addresses that the name server has given. Usable from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[str, Sequence[str]] = {}
        self._asked: set[str] = set()

    def addresses(self, host: str) -> Sequence[str]:
        """The addresses of a host; waits for the name server only where it was never asked. Raises OSError."""
        addresses = self._known.get(host)
        if addresses is None:
            addresses = self._known[host] = _ask(host)
        return addresses

    def doubt(self, host: str) -> None:
        """Asks the name server again, in a thread of its own, since no known address leads to the host."""
        with self._lock:
            if host in self._asked:
                return
            self._asked.add(host)
        OwnedThread("store-names", self._renew, logged, host).start()

    def _renew(self, host: str) -> None:
        try:
            with contextlib.suppress(OSError):
                self._known[host] = _ask(host)
        finally:
            with self._lock:
                self._asked.discard(host)


class HttpConnection(http.client.HTTPConnection):
    """Connection that goes to a known address of its host."""

    def __init__(self, names: Names, host: str, port: int, timeout: float) -> None:
        super().__init__(host, port, timeout=timeout)
        self._names = names

    def connect(self) -> None:
        """Tries the host's addresses one after the other. Raises OSError."""
        why: OSError | None = None
        for address in self._names.addresses(self.host):
            try:
                self.sock = socket.create_connection((address, self.port), self.timeout)
            except OSError as error:
                why = error
            else:
                self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                return
        self._names.doubt(self.host)
        raise why or OSError(f"{self.host} has no address")


def _ask(host: str) -> Sequence[str]:
    places = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return tuple(dict.fromkeys(str(place[4][0]) for place in places))
