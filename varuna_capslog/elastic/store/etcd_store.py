"""The membership store in etcd: a run whose store outlives any of its machines.

The same log of write-once entries without gaps as in `store`, under the keys of one run in an etcd cluster, spoken to
through its JSON gateway (etcd 3.4 or newer). Addresses are `etcd://HOST:PORT[,HOST:PORT...]/PREFIX`. No TLS and no
passwords: like torch's store it belongs into a private network.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import queue
import socket
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.elastic.network import parse_address
from varuna_capslog.elastic.store.torch_store import LOOK_SECONDS, Entry, StoreGone, pack_entry, unpack_entry
from varuna_capslog.membership.generation import EMPTY, Generation

__all__ = ["EtcdMembershipStore", "EtcdRendezvous", "begin_run"]

ANSWER_SECONDS = 10.0
"""A cluster that takes longer to answer is gone. One that lost its leader elects another within 1 to 2 s (etcd's own
default), and again where votes are split."""

_TURN_SECONDS = 0.5
_PAUSE_SECONDS = 0.05
_WAIT_SECONDS = 0.005
_BATCH = 1000
_REFUSED = (400, 404)
_KEPT = 16


def begin_run(address: str, lease_seconds: float) -> str:
    """Makes room for a new run under the address's prefix; all that is there is removed. Returns the run's identity.

    Args:
        lease_seconds: of hosts; for half as long what looks like a run there is watched for signs of life.

    Raises:
        StoreGone: nobody answers there.
        CapslogError: a run is going on there.
    """
    endpoints, prefix = parse_address(address)
    etcd, identity = _Etcd(address, endpoints, ANSWER_SECONDS), uuid.uuid4().hex
    try:
        before = etcd.get(f"{prefix}/current")
        signs = _leases(etcd, f"{prefix}/{before}") if before else []
        until = time.monotonic() + lease_seconds / 2
        while signs and time.monotonic() < until:
            time.sleep(_PAUSE_SECONDS)
            if _leases(etcd, f"{prefix}/{before}") != signs:
                raise CapslogError(
                    f"a run is going on in the store at {address}: join it with --store, or choose another prefix"
                )
        etcd.call("kv/deleterange", {"key": _b64(f"{prefix}/"), "range_end": _b64(_after(f"{prefix}/"))})
        etcd.put(f"{prefix}/{identity}/identity", identity)
        etcd.put(f"{prefix}/current", identity)
    finally:
        etcd.close()
    return identity


class EtcdMembershipStore:
    """See `store.MembershipStore`.

    A call that finds one endpoint dead, silent or without a leader asks the next one, until `answer_seconds` are over.

    Args:
        address: see `parse_address`.
        identity: which run it must be; None: the one that was begun last under the prefix.
        answer_seconds: None: `ANSWER_SECONDS`.

    Raises:
        StoreGone: nobody answers there, or the run is not there (any more).
    """

    def __init__(self, address: str, identity: str | None = None, answer_seconds: float | None = None) -> None:
        self.address = address
        endpoints, prefix = parse_address(address)
        self._etcd = _Etcd(address, endpoints, answer_seconds or ANSWER_SECONDS)
        self._lock = threading.Lock()
        self._followers: list[_Follower] = []
        self._kept: deque[EtcdRendezvous] = deque(maxlen=_KEPT)
        self._position = 0  # entries of the log that were read, by any call
        self._newest = EMPTY
        found = identity or self._etcd.get(f"{prefix}/current")
        if found is None:
            raise StoreGone(f"the store at {address} holds no run; begin it on the machine that serves")
        self.identity = found
        self._root = f"{prefix}/{found}"
        self.look()

    def read(self, known: int = 0) -> Generation:
        newest = self._catch_up()[1]
        if newest.number < known:
            raise StoreGone(
                f"the store at {self.address} has forgotten generation {known}: its newest is {newest.number}"
            )
        return newest

    def compare_and_set(self, expected: int, record: Generation) -> Generation:
        if record.number != expected + 1:
            raise CapslogError(f"generation {record.number} cannot follow {expected}; number them one by one")
        text = pack_entry({"kind": "generation", "number": record.number, "record": record.to_json()})
        while True:
            position, newest = self._catch_up()
            if newest.number != expected:
                return newest
            # No entry between the last that was read and this one: none can be a generation that we have not seen.
            if self._write(position, text):
                return record

    def append(self, entry: Entry) -> None:
        if entry.get("kind") == "generation":
            raise CapslogError("a generation enters the log by compare_and_set only")
        text = pack_entry(entry)
        while not self._write(self._catch_up()[0], text):
            pass

    def follow(self, take: Callable[[Entry], None], lost: Callable[[str], None], start: int = 0) -> Callable[[], None]:
        follower = _Follower(self, take, lost, start)
        with self._lock:
            self._followers.append(follower)
        follower.start()
        return follower.stop

    def length(self) -> int:
        return self._catch_up()[0]

    def count(self, name: str) -> int:
        return self._etcd.add(f"{self._root}/count/{name}", 1)

    def put(self, key: str, value: str) -> None:
        self._etcd.put(f"{self._root}/key/{key}", value)

    def get(self, key: str, wait_seconds: float = 0.0) -> str | None:
        return self._etcd.wait(f"{self._root}/key/{key}", wait_seconds)

    def rendezvous(self) -> dist.Store:
        self.look()
        found = EtcdRendezvous(self._etcd.another(), f"{self._root}/group")
        self._kept.append(found)  # torch's groups do not keep a store alive that is written in Python
        return found

    def close(self) -> None:
        with self._lock:
            followers, self._followers = self._followers, []
        for follower in followers:
            follower.stop()
        self._etcd.close()

    def look(self) -> None:
        """Return if the store answers and still holds the run."""
        self._check(self._etcd.get(f"{self._root}/identity"))

    def signs(self) -> Sequence[str]:
        return _leases(self._etcd, self._root)

    def _check(self, identity: str | None) -> None:
        if identity != self.identity:
            raise StoreGone(f"the store at {self.address} was started anew: it knows nothing of this run")

    # -- the log ---------------------------------------------------------------------------------------------------

    def entries(self, start: int, limit: int = 0) -> list[str]:
        """The log's entries from `start` on, all or so many; the log has no gaps. Raises StoreGone where it is not."""
        texts: list[str] = []
        while True:
            size = min(_BATCH, limit - len(texts)) if limit else _BATCH
            first, end = self.entry_key(start + len(texts)), _after(f"{self._root}/log/")
            identity, found = self._etcd.beside(f"{self._root}/identity", first, end, size)
            self._check(identity)
            texts += found
            if len(found) < size or len(texts) == limit:
                return texts

    def entry_key(self, position: int) -> str:
        """Of entry number `position`; keys sort as numbers do."""
        return f"{self._root}/log/{position:012d}"

    @contextlib.contextmanager
    def watch(self, start: int) -> Iterator[_Watch]:
        """What is written to the log from entry `start` on. Raises StoreGone."""
        found = self._etcd.watch(self.entry_key(start), _after(f"{self._root}/log/"))
        try:
            yield found
        finally:
            found.close()

    def _catch_up(self) -> tuple[int, Generation]:
        """Reads on to the end of the log: its length, and the newest generation in it."""
        while True:
            with self._lock:
                start = self._position
            texts = self.entries(start)
            found = [entry for entry in map(unpack_entry, texts) if entry.get("kind") == "generation"]
            newest = Generation.from_json(found[-1]["record"], "the store") if found else None
            with self._lock:
                # Another thread may have read farther meanwhile; its end is as good as ours.
                if start + len(texts) >= self._position:
                    self._position = start + len(texts)
                    self._newest = newest or self._newest
                return self._position, self._newest

    def _write(self, position: int, text: str) -> bool:
        """Whether the entry is now ours. `text` is unlike any other, so a call that is repeated finds its own."""
        exists = {"key": _b64(f"{self._root}/identity"), "target": "VERSION", "result": "GREATER", "version": "0"}
        found = self._etcd.create(self.entry_key(position), text, exists)
        if found is None:
            self.look()
            raise StoreGone(f"the store at {self.address} refuses entries")
        return found == text


class EtcdRendezvous(dist.Store):
    """Keys that never change or only grow, for `torch.distributed`'s groups to meet at."""

    def __init__(self, etcd: _Etcd, root: str) -> None:
        super().__init__()
        self._etcd, self._root = etcd, root
        self._seconds = 300.0

    def set(self, key: str, value: str | bytes) -> None:
        self._etcd.put(f"{self._root}/{key}", value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        value = self._etcd.value(f"{self._root}/{key}")
        assert value is not None
        return value

    def add(self, key: str, value: int) -> int:
        return self._etcd.add(f"{self._root}/{key}", value)

    def check(self, keys: Sequence[str]) -> bool:
        return all(self._etcd.value(f"{self._root}/{key}") is not None for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        until = time.monotonic() + (self._seconds if timeout is None else timeout.total_seconds())
        while not self.check(keys):
            if time.monotonic() > until:
                raise dist.DistStoreError(f"nobody has set {', '.join(keys)} in time")
            time.sleep(_WAIT_SECONDS)

    def set_timeout(self, timeout: timedelta) -> None:
        self._seconds = timeout.total_seconds()


class _Follower:
    """Reads the log, then watches it, and looks now and then whether the store is still there."""

    def __init__(
        self, store: EtcdMembershipStore, take: Callable[[Entry], None], lost: Callable[[str], None], start: int
    ) -> None:
        self._store = store
        self._take = take
        self._lost = lost
        self._next = start
        self._stopped = False
        self._telling = threading.RLock()
        self._thread = threading.Thread(target=self._run, name="store-follow", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped = True
        with self._telling:  # what is being told is told to its end
            pass

    def _run(self) -> None:
        try:
            while not self._stopped:
                with self._store.watch(self._next) as watch:
                    # what was written before the watch began
                    self._tell(self._store.entries(self._next))
                    self._follow(watch)
        except StoreGone as error:
            with self._telling:
                if not self._stopped:
                    self._lost(str(error))
        finally:
            self._stopped = True

    def _follow(self, watch: _Watch) -> None:
        """Until the watch ends, or turns out to have missed something."""
        while not self._stopped:
            found = watch.next(LOOK_SECONDS)
            if found is None:
                return
            for key, text in found:
                if key == self._store.entry_key(self._next):  # others were read before
                    self._tell([text])
            if not found:
                self._store.look()
                missed = self._store.entries(self._next, 1)
                if missed:  # a server that hangs, or was cut off, says nothing
                    return

    def _tell(self, texts: Sequence[str]) -> None:
        for text in texts:
            with self._telling:
                if self._stopped:
                    return
                self._next += 1
                self._take(unpack_entry(text))


# -- etcd's JSON gateway -----------------------------------------------------------------------------------------------


class _Etcd:
    """Calls of the gateway, each on a connection that no other call uses meanwhile. Any thread."""

    def __init__(self, address: str, endpoints: Sequence[tuple[str, int]], answer_seconds: float) -> None:
        self.address = address
        self.answer_seconds = answer_seconds
        self._endpoints = tuple(endpoints)
        self._good = 0
        self._lock = threading.Lock()
        self._idle: list[tuple[int, http.client.HTTPConnection]] = []
        self._closed = False

    def another(self) -> _Etcd:
        """For the same cluster, with connections of its own."""
        return _Etcd(self.address, self._endpoints, self.answer_seconds)

    def get(self, key: str) -> str | None:
        value = self.value(key)
        return None if value is None else value.decode()

    def value(self, key: str) -> bytes | None:
        """The value of a key."""
        found = self.call("kv/range", {"key": _b64(key)}).get("kvs", ())
        return base64.b64decode(found[0].get("value", "")) if found else None

    def wait(self, key: str, seconds: float) -> str | None:
        """The value of a key, waited for at most so long."""
        until, pause = time.monotonic() + seconds, _WAIT_SECONDS
        while True:
            value = self.get(key)
            if value is not None or time.monotonic() >= until:
                return value
            time.sleep(min(pause, max(0.0, until - time.monotonic())))
            pause = min(1.5 * pause, _PAUSE_SECONDS)

    def range(self, first: str, end: str, limit: int) -> list[str]:
        """Values by key, from `first` on and before `end`."""
        found = self.call("kv/range", {"key": _b64(first), "range_end": _b64(end), "limit": limit}).get("kvs", ())
        return [base64.b64decode(one.get("value", "")).decode() for one in found]

    def beside(self, key: str, first: str, end: str, limit: int) -> tuple[str | None, list[str]]:
        """A key's value, and those of a range, as they are at one moment."""
        ranges = [{"key": _b64(key)}, {"key": _b64(first), "range_end": _b64(end), "limit": limit}]
        answer = self.call("kv/txn", {"success": [{"request_range": one} for one in ranges]})
        one, many = (
            [base64.b64decode(found.get("value", "")).decode() for found in each["response_range"].get("kvs", ())]
            for each in answer["responses"]
        )
        return (one[0] if one else None), many

    def put(self, key: str, value: str | bytes) -> None:
        self.call("kv/put", {"key": _b64(key), "value": _b64(value)})

    def create(self, key: str, value: str, condition: dict[str, str]) -> str | None:
        """Writes a key that is not there yet, if a further condition holds; what it then holds. None: nothing."""
        answer = self.call(
            "kv/txn",
            {
                "compare": [_absent(key), condition],
                "success": [{"request_put": {"key": _b64(key), "value": _b64(value)}}],
                "failure": [{"request_range": {"key": _b64(key)}}],
            },
        )
        if answer.get("succeeded"):
            return value
        found = answer["responses"][0]["response_range"].get("kvs", ())
        return base64.b64decode(found[0].get("value", "")).decode() if found else None

    def add(self, key: str, amount: int) -> int:
        """Adds to a counter, which begins at 0; its new value. After a broken connection numbers may be left out."""
        while True:
            found = self.call("kv/range", {"key": _b64(key)}).get("kvs", ())
            number = (int(base64.b64decode(found[0]["value"])) if found else 0) + amount
            unchanged = _absent(key)
            if found:
                revision = found[0]["mod_revision"]
                unchanged = {"key": _b64(key), "target": "MOD", "result": "EQUAL", "mod_revision": revision}
            put = {"request_put": {"key": _b64(key), "value": _b64(str(number))}}
            if self.call("kv/txn", {"compare": [unchanged], "success": [put]}).get("succeeded"):
                return number

    def call(self, name: str, question: dict[str, Any]) -> dict[str, Any]:
        """The answer of the first endpoint that gives one. Raises StoreGone."""
        body, until, turn = json.dumps(question).encode(), time.monotonic() + self.answer_seconds, 0
        why: object = "nobody was asked"
        while not self._closed:
            number, connection = self._take()
            try:
                answer = self._ask(connection, name, body, min(self._patience(turn), until - time.monotonic()))
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
                time.sleep(0.0 if stale else _PAUSE_SECONDS)
                turn += 1
            else:
                self._give_back(number, connection)
                return answer
        raise StoreGone(f"this client of the store at {self.address} was closed")

    def _patience(self, turn: int) -> float:
        """Seconds for one endpoint: those that hang leave time for the others, and one that is slow gets its own."""
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
        if response.status != 200:  # no leader, say
            raise http.client.HTTPException(text.decode()[:200])
        found: dict[str, Any] = json.loads(text)
        return found

    def watch(self, first: str, end: str) -> _Watch:
        """What is written from now on to keys from `first` on and before `end`."""
        until, turn = time.monotonic() + self.answer_seconds, 0
        while True:
            self.call("kv/range", {"key": _b64(first)})  # which also finds an endpoint that answers
            host, port = self._endpoints[self._good]
            try:
                return _Watch(host, port, first, end, self._patience(turn))
            except (OSError, http.client.HTTPException, ValueError) as error:
                if time.monotonic() >= until:
                    raise StoreGone(f"the store at {self.address} is gone: {error}") from error
                time.sleep(_PAUSE_SECONDS)
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
        return number, http.client.HTTPConnection(*self._endpoints[number], timeout=self.answer_seconds)

    def _give_back(self, number: int, connection: http.client.HTTPConnection) -> None:
        with self._lock:
            if not self._closed:
                self._idle.append((number, connection))
                return
        connection.close()


class _Watch:
    """One stream of changes, read by a thread of its own.

    Raises:
        OSError, http.client.HTTPException: it cannot be begun.
    """

    def __init__(self, host: str, port: int, first: str, end: str, seconds: float) -> None:
        self._found: queue.SimpleQueue[list[tuple[str, str]] | None] = queue.SimpleQueue()
        question = {"create_request": {"key": _b64(first), "range_end": _b64(end)}}
        self._connection = http.client.HTTPConnection(host, port, timeout=seconds)
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
        threading.Thread(target=self._read, name="store-watch", daemon=True).start()

    def next(self, seconds: float) -> list[tuple[str, str]] | None:
        """Keys and values that were written; nothing after so long without any; None when the stream has ended."""
        try:
            return self._found.get(timeout=seconds)
        except queue.Empty:
            return []

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _read(self) -> None:
        with contextlib.suppress(OSError, http.client.HTTPException, ValueError, KeyError, AttributeError):
            while line := self._response.readline():
                result = json.loads(line)["result"]
                if result.get("canceled"):
                    break
                written = [event["kv"] for event in result.get("events", ()) if event.get("type", "PUT") == "PUT"]
                if written:
                    self._found.put([(_text(one["key"]), _text(one.get("value", ""))) for one in written])
        self._found.put(None)
        self._connection.close()


def _leases(etcd: _Etcd, root: str) -> list[str]:
    """The signs of life that the machines of a run have given."""
    first = f"{root}/key/lease/"
    return etcd.range(first, _after(first), _BATCH)


def _absent(key: str) -> dict[str, str]:
    return {"key": _b64(key), "target": "CREATE", "result": "EQUAL", "create_revision": "0"}


def _after(prefix: str) -> str:
    """The first key behind all that begin with the prefix, which ends in an ASCII character."""
    return prefix[:-1] + chr(ord(prefix[-1]) + 1)


def _b64(text: str | bytes) -> str:
    return base64.b64encode(text.encode() if isinstance(text, str) else text).decode()


def _text(value: str) -> str:
    return base64.b64decode(value).decode()
