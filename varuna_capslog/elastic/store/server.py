"""Server of a run's store: keys, counters and one log, in memory, for clients that know the run's secret.

The supervisor that begins the run serves its store. A thread per connection answers requests in order;
`base/connection` admits only clients that know the secret, and gives others no thread. The server decides nothing,
loses nothing while it lives, and keeps nothing on disk.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from varuna_capslog.base.connection import AuthenticatedListener, Connection, NotTrusted, dial
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.base.processes import OwnedThread, logged
from varuna_capslog.base.secret import Secret
from varuna_capslog.elastic.network import listen
from varuna_capslog.elastic.store.log import ENDED, StoreGone, StoreRefuses

__all__ = ["ANSWER_SECONDS", "MAX_MESSAGE", "PURPOSE", "StoreClient", "StoreServer", "bytes_of", "text_of"]


PURPOSE = "store"
"""Purpose from which, with the secret, the key of its connections is derived."""

MAX_MESSAGE = 64 << 20
"""Most bytes of a request or an answer."""

LONGEST_WAIT_SECONDS = 1.0
"""Longest wait for a key or an entry; a client that waits longer asks again, and so notices when the server is gone."""

_BATCH_ENTRIES = 256
_BATCH_BYTES = 4 << 20


class StoreServer:
    """Server in threads of this process.

    Args:
        host: address or name under which it listens; "0.0.0.0": all addresses of this machine.
        port: 0: any free port; the attribute is the actual port.

    Attributes:
        identity: random name of this server; a server that is started again has another, and is another store.

    Raises:
        CapslogError: it cannot listen there.
    """

    def __init__(self, secret: Secret, host: str = "127.0.0.1", port: int = 0) -> None:
        try:
            listener = listen(host, port)
        except CapslogError as error:
            raise CapslogError(f"no store can be served: {error}") from error
        self.port = int(listener.getsockname()[1])
        self.identity = uuid.uuid4().hex
        self._content = _Content()
        self._lock = threading.Lock()
        self._connections: set[Connection] = set()
        self._listener = AuthenticatedListener(listener, secret.key(PURPOSE), self._admitted, self._fail, "store-door")

    def close(self) -> None:
        """End the server; the calls of its clients raise StoreGone."""
        self._listener.close()
        self._end_connections()

    def _end_connections(self) -> None:
        with self._lock:
            connections = list(self._connections)
        for connection in connections:
            connection.shut_down()

    def _fail(self, error: CapslogError) -> None:
        """End all connections once the listener has failed: no client may use a store that others cannot reach."""
        logged(error)
        self._end_connections()

    def _admitted(self, connection: Connection) -> None:
        with self._lock:
            self._connections.add(connection)
        try:
            OwnedThread("store-serve", self._serve, logged, connection).start()
        except CapslogError:
            with self._lock:
                self._connections.discard(connection)
            raise

    def _serve(self, connection: Connection) -> None:
        sign: list[str] = []
        try:
            self._answer(connection, sign)
        finally:
            try:
                if sign:  # the host counts as ended, unless it gives a sign over another connection
                    self._content.answer(["exchange", *sign, f"{sign[1]}{ENDED}"])
            finally:
                with self._lock:
                    self._connections.discard(connection)
                connection.shut_down()
                connection.close()

    def _answer(self, connection: Connection, sign: list[str]) -> None:
        # an error of the connection, or a request that no client of ours sends, ends the connection
        with contextlib.suppress(OSError, EOFError, ValueError, TypeError, KeyError, RecursionError):
            connection.send_message(json.dumps({"identity": self.identity}).encode())
            while True:
                question = json.loads(connection.read_message(MAX_MESSAGE))
                answer = self._content.answer(question)
                if question[0] == "sign":
                    sign[:] = question[1:]
                connection.send_message(json.dumps(answer).encode())


class _Content:
    """Content of the store. Each character of a value is one byte (latin-1)."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[str, str] = {}
        self._log: list[str] = []
        self._awaited: dict[str | int, threading.Event] = {}  # by key, or by the number of the entry to come
        self._operations: dict[str, Callable[..., Any]] = {
            "look": lambda: None,
            "set": self._set,
            "sign": self._set,
            "get": self._get,
            "values": self._values_of,
            "add": self._add,
            "exchange": self._exchange,
            "delete": self._delete,
            "size": lambda: len(self._values),
            "write": self._write,
            "entries": self._entries,
        }

    def answer(self, question: Sequence[Any]) -> Any:
        """Execute [operation, *arguments]. Raises KeyError, TypeError or ValueError for any other request."""
        name, *arguments = question
        return self._operations[name](*arguments)

    def _set(self, key: str, value: str) -> None:
        with self._lock:
            self._put(key, value)

    def _put(self, key: str, value: str) -> None:
        self._values[key] = value
        self._tell(key)

    def _tell(self, key: str | int) -> None:
        event = self._awaited.pop(key, None)
        if event is not None:
            event.set()

    def _get(self, keys: Sequence[str], seconds: float) -> list[str] | None:
        """Values of all these keys; None where one of them is not set in time."""
        return self._when(
            lambda: next((key for key in keys if key not in self._values), None),
            lambda: [self._values[key] for key in keys],
            seconds,
        )

    def _values_of(self, keys: Sequence[str]) -> list[str | None]:
        with self._lock:
            return [self._values.get(key) for key in keys]

    def _add(self, key: str, amount: int) -> int:
        with self._lock:
            number = int(self._values.get(key, "0")) + amount
            self._put(key, str(number))
            return number

    def _exchange(self, key: str, expected: str, value: str) -> str | None:
        """Set the key if its value is `expected` ("": none is set); return its value then."""
        with self._lock:
            if self._values.get(key, "") == expected:
                self._put(key, value)
            return self._values.get(key)

    def _delete(self, key: str) -> bool:
        with self._lock:
            return self._values.pop(key, None) is not None

    def _write(self, position: int, text: str) -> str | None:
        """Append entry number `position` if it is the next; return the entry there; None: there would be a gap."""
        with self._lock:
            if position == len(self._log):
                self._log.append(text)
                self._tell(position)
            return self._log[position] if 0 <= position < len(self._log) else None

    def _entries(self, start: int, seconds: float) -> tuple[list[str], int]:
        """Entries from `start` on, as many as fit into one answer, and the length of the log."""

        def batch() -> tuple[list[str], int]:
            texts, size = [], 0
            for text in self._log[start : start + _BATCH_ENTRIES]:
                texts.append(text)
                size += len(text)
                if size > _BATCH_BYTES:
                    break
            return texts, len(self._log)

        empty: tuple[list[str], int] = ([], len(self._log))
        return self._when(lambda: len(self._log) if start >= len(self._log) else None, batch, seconds) or empty

    def _when(self, lacking: Callable[[], str | int | None], ready: Callable[[], Any], seconds: float) -> Any:
        """Result of `ready()` as soon as `lacking()`, the key or entry to wait for, is None; None after `seconds`."""
        until = time.monotonic() + min(seconds, LONGEST_WAIT_SECONDS)
        while True:
            with self._lock:
                key = lacking()
                if key is None:
                    return ready()
                remaining = until - time.monotonic()
                if remaining <= 0:
                    return None
                event = self._awaited.setdefault(key, threading.Event())
            event.wait(remaining)


# -- Connections of one client to the run's own store server.
#
# Every request has a connection to itself, and idle connections are kept open. Broken connections are opened again, but
# only to the same server: a server that was started again is another store. Every call ends within a limited time.


ANSWER_SECONDS = 3.0
"""Longest time for an answer; a store that takes longer counts as gone."""

OPEN_SECONDS = 6.0
"""Longest time for a new connection: TCP sends a lost first packet again after 1 s, and again 2 s later."""

_TRIES = 6
"""Most connections for one request, if each of them breaks; the pause before each is twice the one before."""

_PAUSE_SECONDS = 0.01


class StoreClient:
    """Client of a `StoreServer`, for any thread. identity: of the server; "": the one that answers first."""

    def __init__(self, host: str, port: int, key: bytes, identity: str, answer_seconds: float) -> None:
        self.host, self.port, self.address = host, port, f"{host}:{port}"
        self.answer_seconds, self.open_seconds = answer_seconds, max(OPEN_SECONDS, answer_seconds)
        self.identity = identity
        self._key = key
        self._resolved: str | None = None
        self._lock = threading.Lock()
        self._idle: list[Connection] = []
        self._closed = False

    def another(self) -> StoreClient:
        """Return a client of the same server with separate connections."""
        client = StoreClient(self.host, self.port, self._key, self.identity, self.answer_seconds)
        client._resolved = self._resolved
        return client

    def ask(self, *question: Any, wait: float = 0.0) -> Any:
        """Send a request and return the answer, over a new connection where an idle one turns out broken.

        wait: seconds that the server itself may wait before it answers. Raises StoreGone where the store is gone,
        hangs, or was started again.
        """
        text = json.dumps(question).encode()
        connection = self._take_idle()
        for turn in range(_TRIES):
            try:
                connection = connection or self._open()
                connection.until = time.monotonic() + self.answer_seconds + wait
                connection.send_message(text)
                answer = json.loads(connection.read_message(MAX_MESSAGE))
            except (OSError, EOFError, ValueError) as error:
                if connection is not None:
                    connection.close()
                self._drop_idle()
                if isinstance(error, StoreGone):
                    raise
                if turn == _TRIES - 1 or isinstance(error, TimeoutError):
                    raise self._gone(error) from error
                connection = None
                time.sleep(_PAUSE_SECONDS * 2**turn if turn else 0.0)  # an idle one may have ended long ago: no pause
            else:
                self._give_back(connection)
                return answer
        raise AssertionError("the last attempt returns or raises")

    def values(self, keys: Sequence[str], seconds: float) -> list[bytes] | None:
        """Return the values of all these keys; None where one of them is not set within `seconds`."""
        until = time.monotonic() + seconds
        while True:
            wait = min(LONGEST_WAIT_SECONDS, max(0.0, until - time.monotonic()))
            texts = self.ask("get", keys, wait, wait=wait)
            if texts is not None:
                return [bytes_of(text) for text in texts]
            if time.monotonic() >= until:
                return None

    def close(self) -> None:
        """Close all idle connections; those in use are closed after the call that uses them."""
        with self._lock:
            self._closed = True
        self._drop_idle()

    def _open(self) -> Connection:
        """Open a connection to the known server. Raises OSError or EOFError where that breaks, else StoreGone."""
        if self._closed:
            raise StoreGone(f"this client of the store at {self.address} was closed")
        try:
            # resolved once: the name server may be slow, or gone, when a connection must be opened again
            self._resolved = self._resolved or socket.gethostbyname(self.host)
            connection = dial(self._resolved, self.port, self._key, self.open_seconds)
        except NotTrusted as error:
            raise StoreRefuses(
                f"the store at {self.address} does not share this run's secret ({error}); give both machines the same "
                "file, RUN_DIR/secret or the one that CAPSLOG_SECRET_FILE names"
            ) from error
        except OSError as error:
            raise self._gone(error) from error
        try:
            connection.until = time.monotonic() + self.open_seconds
            identity = str(json.loads(connection.read_message(MAX_MESSAGE))["identity"])
        except BaseException:
            connection.close()
            raise
        with self._lock:
            self.identity = self.identity or identity
        if identity != self.identity:
            connection.close()
            raise StoreGone(f"the store at {self.address} was started anew: it knows nothing of this run")
        return connection

    def _take_idle(self) -> Connection | None:
        with self._lock:
            return self._idle.pop() if self._idle else None

    def _give_back(self, connection: Connection) -> None:
        with self._lock:
            if not self._closed:
                self._idle.append(connection)
                return
        connection.close()

    def _drop_idle(self) -> None:
        with self._lock:
            connections, self._idle = self._idle, []
        for connection in connections:
            connection.close()

    def _gone(self, error: BaseException) -> StoreGone:
        if isinstance(error, TimeoutError):
            return StoreGone(f"the store at {self.address} is gone: no answer within {self.answer_seconds:g} s")
        why = error.strerror if isinstance(error, OSError) and error.strerror else error
        return StoreGone(f"the store at {self.address} is gone: {why}")


def text_of(value: str | bytes) -> str:
    """Return a value in the server's form: one character for each byte."""
    return (value.encode() if isinstance(value, str) else bytes(value)).decode("latin-1")


def bytes_of(text: str) -> bytes:
    """Return the bytes of a value in the server's form."""
    return text.encode("latin-1")
