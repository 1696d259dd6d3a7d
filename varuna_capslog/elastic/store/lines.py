"""Connections of one client to the run's own store server.

Every question under way has a connection to itself, and those that are idle are kept open. Broken connections are
opened again, but only to the same server: one that was started anew is another store. Every call ends within a bounded
time.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any

from varuna_capslog.base.trust.connection import Connection, NotTrusted, dial
from varuna_capslog.elastic.store.log import StoreGone, StoreRefuses
from varuna_capslog.elastic.store.server import LONGEST_WAIT_SECONDS, MAX_MESSAGE

__all__ = ["ANSWER_SECONDS", "StoreLines", "bytes_of", "text_of"]

ANSWER_SECONDS = 3.0
"""A store that takes longer to answer is gone."""

OPEN_SECONDS = 6.0
"""For a new connection: a network that loses its first packet sends it again after 1 s, and then after 2 s more."""

_TRIES = 6
"""Connections for one question, where each of them breaks; the pause before each doubles."""

_PAUSE_SECONDS = 0.01


class StoreLines:
    """All connections of one client. Any thread.

    Args:
        key: of the store's connections.
        identity: which server it must be; "": the first one that answers.
    """

    def __init__(self, host: str, port: int, key: bytes, identity: str, answer_seconds: float) -> None:
        self.host, self.port, self.address = host, port, f"{host}:{port}"
        self.answer_seconds, self.open_seconds = answer_seconds, max(OPEN_SECONDS, answer_seconds)
        self.identity = identity
        self._key = key
        self._resolved: str | None = None
        self._lock = threading.Lock()
        self._idle: list[Connection] = []
        self._closed = False

    def another(self) -> StoreLines:
        """A client of the same server, with connections of its own."""
        lines = StoreLines(self.host, self.port, self._key, self.identity, self.answer_seconds)
        lines._resolved = self._resolved
        return lines

    def ask(self, *question: Any, wait: float = 0.0) -> Any:
        """The server's answer; on a fresh connection where the kept one turns out broken.

        Args:
            wait: seconds that the server itself waits before it answers.

        Raises:
            StoreGone: the store is gone, hangs, or was started anew.
        """
        text = json.dumps(question).encode()
        line = self._take_idle()
        for turn in range(_TRIES):
            try:
                line = line or self._open()
                line.until = time.monotonic() + self.answer_seconds + wait
                line.send_message(text)
                answer = json.loads(line.read_message(MAX_MESSAGE))
            except (OSError, EOFError, ValueError) as error:
                if line is not None:
                    line.close()
                self._drop_idle()
                if isinstance(error, StoreGone):
                    raise
                if turn == _TRIES - 1 or isinstance(error, TimeoutError):
                    raise self._gone(error) from error
                line = None
                time.sleep(_PAUSE_SECONDS * 2**turn if turn else 0.0)  # one that was idle may have ended long ago
            else:
                self._give_back(line)
                return answer
        raise AssertionError("the last attempt returns or raises")

    def values(self, keys: Sequence[str], seconds: float) -> list[bytes] | None:
        """The values of all these keys; None where one of them does not come within so many seconds."""
        until = time.monotonic() + seconds
        while True:
            wait = min(LONGEST_WAIT_SECONDS, max(0.0, until - time.monotonic()))
            texts = self.ask("get", keys, wait, wait=wait)
            if texts is not None:
                return [bytes_of(text) for text in texts]
            if time.monotonic() >= until:
                return None

    def close(self) -> None:
        """Ends all idle connections; those in use end with the call that uses them."""
        with self._lock:
            self._closed = True
        self._drop_idle()

    def _open(self) -> Connection:
        """A connection to the known store. Raises OSError or EOFError where it breaks while it is opened."""
        if self._closed:
            raise StoreGone(f"this client of the store at {self.address} was closed")
        try:
            # the name server is asked once: it may be slow, or gone, when a connection must be opened again
            self._resolved = self._resolved or socket.gethostbyname(self.host)
            line = dial(self._resolved, self.port, self._key, self.open_seconds)
        except NotTrusted as error:
            raise StoreRefuses(
                f"the store at {self.address} does not share this run's secret ({error}); give both machines the same "
                "file, RUN_DIR/secret or the one that CAPSLOG_SECRET_FILE names"
            ) from error
        except OSError as error:
            raise self._gone(error) from error
        try:
            line.until = time.monotonic() + self.open_seconds
            identity = str(json.loads(line.read_message(MAX_MESSAGE))["identity"])
        except BaseException:
            line.close()
            raise
        with self._lock:
            self.identity = self.identity or identity
        if identity != self.identity:
            line.close()
            raise StoreGone(f"the store at {self.address} was started anew: it knows nothing of this run")
        return line

    def _take_idle(self) -> Connection | None:
        with self._lock:
            return self._idle.pop() if self._idle else None

    def _give_back(self, line: Connection) -> None:
        with self._lock:
            if not self._closed:
                self._idle.append(line)
                return
        line.close()

    def _drop_idle(self) -> None:
        with self._lock:
            lines, self._idle = self._idle, []
        for line in lines:
            line.close()

    def _gone(self, error: BaseException) -> StoreGone:
        if isinstance(error, TimeoutError):
            return StoreGone(f"the store at {self.address} is gone: no answer within {self.answer_seconds:g} s")
        why = error.strerror if isinstance(error, OSError) and error.strerror else error
        return StoreGone(f"the store at {self.address} is gone: {why}")


def text_of(value: str | bytes) -> str:
    """A value as the server keeps it: one character for each byte."""
    return (value.encode() if isinstance(value, str) else bytes(value)).decode("latin-1")


def bytes_of(text: str) -> bytes:
    """The value that the server keeps as this text."""
    return text.encode("latin-1")
