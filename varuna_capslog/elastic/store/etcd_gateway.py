"""Client of etcd's JSON gateway (etcd 3.4 or newer): keys, ranges, transactions and watches over HTTP.

If an endpoint is dead, silent or without a leader, a call goes to the next one, within a limited time. No TLS and no
passwords: etcd's owner controls the access, and every value has the run's signature. `etcd_store` gives the keys their
meaning.
"""

from __future__ import annotations

import base64
import contextlib
import hmac
import http.client
import json
import logging
import queue
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.base.processes import OwnedThread, logged
from varuna_capslog.base.secret import Secret
from varuna_capslog.elastic.store.log import StoreGone

__all__ = ["PAUSE_SECONDS", "WAIT_SECONDS", "Etcd", "EtcdWatch", "Names", "Signatures", "after", "b64", "unsigned"]


# -- Addresses of the store's endpoints: a name server may take seconds, and no call may wait for it while a run
#    trains.
#
# The name server is asked when an endpoint is first called. Later connections use the same addresses; if none of them
# can be reached, the name server is asked again in a separate thread.


class Names:
    """Addresses of hosts, from the name server. Usable from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._addresses: dict[str, Sequence[str]] = {}
        self._renewing: set[str] = set()

    def addresses(self, host: str) -> Sequence[str]:
        """Return the addresses of a host; only the first call waits for the name server. Raises OSError."""
        addresses = self._addresses.get(host)
        if addresses is None:
            addresses = self._addresses[host] = _ask(host)
        return addresses

    def doubt(self, host: str) -> None:
        """Ask the name server again, in a separate thread, since the host's known addresses cannot be reached."""
        with self._lock:
            if host in self._renewing:
                return
            self._renewing.add(host)
        OwnedThread("store-names", self._renew, logged, host).start()

    def _renew(self, host: str) -> None:
        try:
            with contextlib.suppress(OSError):
                self._addresses[host] = _ask(host)
        finally:
            with self._lock:
                self._renewing.discard(host)


class HttpConnection(http.client.HTTPConnection):
    """Connection to a known address of its host."""

    def __init__(self, names: Names, host: str, port: int, timeout: float) -> None:
        super().__init__(host, port, timeout=timeout)
        self._names = names

    def connect(self) -> None:
        """Try the host's addresses one after the other. Raises OSError."""
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


# -- Signatures of the values that a run writes into etcd, where others may write as well.
#
# `Etcd` signs every value together with its key, so that it is invalid under another key or in another run, and does
# not use unsigned values. An older value of a key keeps its valid signature: anyone with write access can put it back.


_log = logging.getLogger(__name__)
_DIGITS = 64


class Signatures:
    """Signs values with a run's secret, and checks them. address: of the store, for warnings."""

    def __init__(self, secret: Secret, address: str) -> None:
        self._key, self._address = secret.key("etcd"), address
        self._named: set[str] = set()

    def sign(self, key: str, value: str | bytes) -> bytes:
        """Return the value with its signature in front."""
        data = value.encode() if isinstance(value, str) else value
        return self._code(key, data) + b":" + data

    def opened(self, key: str, stored: bytes) -> bytes | None:
        """Return the value without its signature; None, and a warning once per key, where the signature is wrong."""
        code, data = stored[:_DIGITS], stored[_DIGITS + 1 :]
        if hmac.compare_digest(code, self._code(key, data)) and stored[_DIGITS : _DIGITS + 1] == b":":
            return data
        if key not in self._named:
            self._named.add(key)
            _log.warning(
                "%s in the store at %s is not signed with this run's secret and is ignored; somebody else writes there",
                key,
                self._address,
            )
        return None

    def _code(self, key: str, data: bytes) -> bytes:
        return hmac.new(self._key, key.encode() + b"\0" + data, "sha256").hexdigest().encode()


def unsigned(stored: bytes) -> bytes:
    """Return the value without its signature, which is not checked."""
    return stored[_DIGITS + 1 :]


# -- calls of etcd's JSON gateway


PAUSE_SECONDS = 0.05
"""Pause between two attempts, and longest pause between two reads of a key that is waited for."""

WAIT_SECONDS = 0.005
"""Pause between the first two reads of a key that is waited for."""

_TURN_SECONDS = 0.5
_REFUSED = (400, 404)


class Etcd:
    """Client of the gateway, for any thread; each call has a connection to itself.

    A value with a wrong signature counts as missing, except where a method says otherwise.
    """

    def __init__(
        self,
        address: str,
        endpoints: Sequence[tuple[str, int]],
        answer_seconds: float,
        signatures: Signatures,
        names: Names | None = None,
    ) -> None:
        self.address, self._signatures = address, signatures
        self.answer_seconds = answer_seconds
        self._endpoints = tuple(endpoints)
        self._names = names or Names()
        self._good = 0
        self._lock = threading.Lock()
        self._idle: list[tuple[int, http.client.HTTPConnection]] = []
        self._closed = False

    def another(self) -> Etcd:
        """Return a client of the same cluster with separate connections."""
        return Etcd(self.address, self._endpoints, self.answer_seconds, self._signatures, self._names)

    def get(self, key: str) -> str | None:
        value = self.value(key)
        return None if value is None else value.decode()

    def value(self, key: str) -> bytes | None:
        """Return the value of a key as bytes."""
        stored = self.stored(key)
        return None if stored is None else self._signatures.opened(key, stored)

    def stored(self, key: str) -> bytes | None:
        """Return the stored bytes of a key: signature, not checked, and value."""
        rows = self.call("kv/range", {"key": b64(key)}).get("kvs", ())
        return base64.b64decode(rows[0].get("value", "")) if rows else None

    def wait(self, key: str, seconds: float) -> str | None:
        """Return the value of a key; wait at most `seconds` until it is set."""
        until, pause = time.monotonic() + seconds, WAIT_SECONDS
        while True:
            value = self.get(key)
            if value is not None or time.monotonic() >= until:
                return value
            time.sleep(min(pause, max(0.0, until - time.monotonic())))
            pause = min(1.5 * pause, PAUSE_SECONDS)

    def range(self, first: str, end: str, limit: int) -> list[bytes]:
        """Return the stored bytes of the keys in [first, end): signatures, not checked, and values."""
        answer = self.call("kv/range", {"key": b64(first), "range_end": b64(end), "limit": limit})
        return [stored for _, stored in _pairs(answer)]

    def with_range(self, key: str, first: str, end: str, limit: int) -> tuple[str | None, list[tuple[str, str | None]]]:
        """Return a key's value, and keys and values of a range, all read in one transaction."""
        ranges = [{"key": b64(key)}, {"key": b64(first), "range_end": b64(end), "limit": limit}]
        answer = self.call("kv/txn", {"success": [{"request_range": key_range} for key_range in ranges]})
        single, several = (self.opened(_pairs(response["response_range"])) for response in answer["responses"])
        return (single[0][1] if single else None), several

    def values(self, keys: Sequence[str]) -> list[tuple[str, str | None]]:
        """Return the keys among these that exist, with their values, all read in one transaction."""
        answer = self.call("kv/txn", {"success": [{"request_range": {"key": b64(key)}} for key in keys]})
        return self.opened(
            [pair for response in answer.get("responses", ()) for pair in _pairs(response["response_range"])]
        )

    def opened(self, pairs: Sequence[tuple[str, bytes]]) -> list[tuple[str, str | None]]:
        """Return the keys and their values; None for a value with a wrong signature."""
        values = [(key, self._signatures.opened(key, stored)) for key, stored in pairs]
        return [(key, None if value is None else value.decode()) for key, value in values]

    def put(self, key: str, value: str | bytes) -> None:
        self.call("kv/put", {"key": b64(key), "value": b64(self._signatures.sign(key, value))})

    def create(self, key: str, value: str, condition: dict[str, str]) -> str | None:
        """Write a missing key if `condition` holds; return its value then ("": an unsigned one; None: still none)."""
        answer = self.call(
            "kv/txn",
            {
                "compare": [_absent(key), condition],
                "success": [{"request_put": {"key": b64(key), "value": b64(self._signatures.sign(key, value))}}],
                "failure": [{"request_range": {"key": b64(key)}}],
            },
        )
        if answer.get("succeeded"):
            return value
        existing = self.opened(_pairs(answer["responses"][0]["response_range"]))
        return (existing[0][1] or "") if existing else None

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, which begins at 0; return its new value. A broken connection may skip numbers.

        Raises StoreGone where no endpoint answers, or the counter is unsigned: it must not begin again.
        """
        while True:
            rows = self.call("kv/range", {"key": b64(key)}).get("kvs", ())
            before = self._signatures.opened(key, base64.b64decode(rows[0].get("value", ""))) if rows else b"0"
            if before is None:
                raise StoreGone(
                    f"the counter {key} in the store at {self.address} is not signed with this run's secret"
                )
            number = int(before) + amount
            unchanged = _absent(key)
            if rows:
                revision = rows[0]["mod_revision"]
                unchanged = {"key": b64(key), "target": "MOD", "result": "EQUAL", "mod_revision": revision}
            put = {"request_put": {"key": b64(key), "value": b64(self._signatures.sign(key, str(number)))}}
            if self.call("kv/txn", {"compare": [unchanged], "success": [put]}).get("succeeded"):
                return number

    def call(self, name: str, question: dict[str, Any]) -> dict[str, Any]:
        """Send a request to one endpoint after the other until one answers. Raises StoreGone."""
        body, until, turn = json.dumps(question).encode(), time.monotonic() + self.answer_seconds, 0
        why: object = "nobody was asked"
        while not self._closed:
            number, connection = self._take()
            try:
                answer = self._ask(connection, name, body, min(self._seconds_for(turn), until - time.monotonic()))
            except (OSError, http.client.HTTPException, ValueError) as error:
                connection.close()
                why = f"no answer within {self.answer_seconds:g} s" if isinstance(error, TimeoutError) else error
                with self._lock:
                    if self._good == number:
                        self._good = (number + 1) % len(self._endpoints)
                    stale = [line for place, line in self._idle if place == number]
                    self._idle = [(place, line) for place, line in self._idle if place != number]
                for line in stale:
                    line.close()
                if time.monotonic() >= until:
                    raise StoreGone(f"the store at {self.address} is gone: {why}") from error
                time.sleep(0.0 if stale else PAUSE_SECONDS)
                turn += 1
            else:
                self._give_back(number, connection)
                return answer
        raise StoreGone(f"this client of the store at {self.address} was closed")

    def _seconds_for(self, turn: int) -> float:
        """Seconds for one endpoint: few at first, so that an endpoint that hangs leaves time for others; then more."""
        size = len(self._endpoints)
        return self.answer_seconds if size == 1 else min(_TURN_SECONDS * 2 ** (turn // size), self.answer_seconds)

    def _ask(self, connection: http.client.HTTPConnection, name: str, body: bytes, seconds: float) -> dict[str, Any]:
        connection.timeout = max(0.05, seconds)
        if connection.sock is None:
            connection.connect()
        connection.sock.settimeout(connection.timeout)
        connection.request("POST", f"/v3/{name}", body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        text = response.read()
        if response.status in _REFUSED:
            raise CapslogError(f"etcd at {self.address} does not know /v3/{name}: {text.decode()[:200]}; it needs 3.4")
        if response.status != 200:  # such as a cluster without a leader
            raise http.client.HTTPException(text.decode()[:200])
        answer: dict[str, Any] = json.loads(text)
        return answer

    def watch(self, first: str, end: str) -> EtcdWatch:
        """Begin to watch all later writes to keys in [first, end). Raises StoreGone."""
        until, turn = time.monotonic() + self.answer_seconds, 0
        while True:
            self.call("kv/range", {"key": b64(first)})  # finds an endpoint that answers
            host, port = self._endpoints[self._good]
            try:
                connection = HttpConnection(self._names, host, port, self._seconds_for(turn))
                return EtcdWatch(connection, first, end)
            except (OSError, http.client.HTTPException, ValueError) as error:
                if time.monotonic() >= until:
                    raise StoreGone(f"the store at {self.address} is gone: {error}") from error
                time.sleep(PAUSE_SECONDS)
                turn += 1

    def close(self) -> None:
        with self._lock:
            self._closed = True
            lines, self._idle = self._idle, []
        for _, line in lines:
            line.close()

    def _take(self) -> tuple[int, http.client.HTTPConnection]:
        with self._lock:
            for index, (number, line) in enumerate(self._idle):
                if number == self._good:
                    del self._idle[index]
                    return number, line
            number = self._good
        return number, HttpConnection(self._names, *self._endpoints[number], self.answer_seconds)

    def _give_back(self, number: int, connection: http.client.HTTPConnection) -> None:
        with self._lock:
            if not self._closed:
                self._idle.append((number, connection))
                return
        connection.close()


class EtcdWatch:
    """Stream of writes, which a separate thread reads. Raises OSError or HTTPException where it cannot begin."""

    def __init__(self, connection: http.client.HTTPConnection, first: str, end: str) -> None:
        self._writes: queue.SimpleQueue[list[tuple[str, bytes]] | None] = queue.SimpleQueue()
        question = {"create_request": {"key": b64(first), "range_end": b64(end)}}
        self._connection = connection
        try:
            body = json.dumps(question).encode()
            self._connection.request("POST", "/v3/watch", body, {"Content-Type": "application/json"})
            self._socket = self._connection.sock
            self._response = self._connection.getresponse()
            if not json.loads(self._response.readline())["result"].get("created"):
                raise http.client.HTTPException("the watch was not begun")
            self._socket.settimeout(None)
        except KeyError as error:
            self._connection.close()
            raise http.client.HTTPException(f"no answer to a watch: {error}") from error
        except BaseException:
            self._connection.close()
            raise
        OwnedThread("store-watch", self._read, logged).start()

    def next(self, seconds: float) -> list[tuple[str, bytes]] | None:
        """Return written keys and stored bytes, for `Etcd.opened`; empty after `seconds`; None at the stream's end."""
        try:
            return self._writes.get(timeout=seconds)
        except queue.Empty:
            return []

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _read(self) -> None:
        try:
            with contextlib.suppress(OSError, http.client.HTTPException, ValueError, KeyError, AttributeError):
                while line := self._response.readline():
                    result = json.loads(line)["result"]
                    if result.get("canceled"):
                        break
                    written = [event["kv"] for event in result.get("events", ()) if event.get("type", "PUT") == "PUT"]
                    if written:
                        self._writes.put(_pairs({"kvs": written}))
        finally:
            self._writes.put(None)
            self._connection.close()


def _pairs(answer: dict[str, Any]) -> list[tuple[str, bytes]]:
    return [
        (base64.b64decode(row["key"]).decode("utf-8", "replace"), base64.b64decode(row.get("value", "")))
        for row in answer.get("kvs", ())
    ]


def _absent(key: str) -> dict[str, str]:
    return {"key": b64(key), "target": "CREATE", "result": "EQUAL", "create_revision": "0"}


def after(prefix: str) -> str:
    """Return the first key after all keys with this prefix, which must end in an ASCII character."""
    return prefix[:-1] + chr(ord(prefix[-1]) + 1)


def b64(text: str | bytes) -> str:
    return base64.b64encode(text.encode() if isinstance(text, str) else text).decode()
