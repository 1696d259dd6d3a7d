"""What all processes of a run agree on: the record of the generation, and one log of what everybody must hear of.

The log is a row of write-once entries without gaps, so all read the same in the same order; a generation *is* its
entry, which makes its founding and its announcement one act. Every call is bounded: a store that is gone, hangs or was
started anew raises `StoreGone`. The default is torch's TCPStore, served by a supervisor. It decides nothing.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import datetime
import json
import queue
import socket
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch.distributed as dist

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.membership.generation import EMPTY, Generation

__all__ = [
    "MembershipStore",
    "StoreGone",
    "StoreServer",
    "TcpMembershipStore",
    "open_store",
    "pack_entry",
    "serve_store",
    "unpack_entry",
]

Value = TypeVar("Value")
Entry = dict[str, Any]

ANSWER_SECONDS = 3.0
"""A store that takes longer to answer is gone."""

OPEN_SECONDS = 12.0
"""For a new connection: torch asks the name server for the name of every peer, and one lost answer costs 5 s."""

BESIDE_SECONDS = 0.3
"""After so long another connection is tried beside one that is being opened: the next question is seldom lost, too."""

LOOK_SECONDS = 1.0
"""How often a follower asks whether the store is still there: a connection that was cut off says nothing."""

CLOSE_SECONDS = 0.5
_FOR_EVER = datetime.timedelta(days=7)  # it waits in poll(), which counts milliseconds in an int
_LARGEST_BATCH = 256
_MOST_BESIDE = 2


class StoreGone(CapslogError):
    """The store does not answer, or another one answers in its place, which knows nothing of the run."""


class MembershipStore(Protocol):
    """What the runtime and the supervisors need of a store. Every method raises `StoreGone`; any thread may call."""

    identity: str
    """Made by the server when it started."""

    @property
    def address(self) -> str:
        """As `open_store` reads it."""

    def read(self, known: int = 0) -> Generation:
        """The newest record; EMPTY before the first.

        Args:
            known: number of a record that the caller has seen; a store that has forgotten it is gone.
        """

    def compare_and_set(self, expected: int, record: Generation) -> Generation:
        """Write `record`, the successor of generation `expected`, if that is the newest.

        Returns:
            What the store then holds: `record` itself, or a newer one than `expected`. After `StoreGone` it is unknown
            whether the record was written.
        """

    def append(self, entry: Entry) -> None:
        """Add an entry to the log, exactly once. Kinds: `docs/membership-protocol.md`; "generation" is refused."""

    def follow(self, take: Callable[[Entry], None], lost: Callable[[str], None], start: int = 0) -> Callable[[], None]:
        """Have every entry from number `start` on told in order, by a thread of its own, as soon as it is there.

        Args:
            take: gets each entry; a generation's is {"kind": "generation", "number": n, "record": its JSON}.
            lost: called once with the reason if the store is gone; then the thread ends.

        Returns:
            A function that ends it; after its return (in other threads than the follower's) nothing is told.
        """

    def length(self) -> int:
        """Number of entries in the log now."""

    def count(self, name: str) -> int:
        """1, 2, 3, ...: a number that nobody was given before under this name."""

    def put(self, key: str, value: str) -> None:
        """Set a key; the last value counts."""

    def get(self, key: str, wait_seconds: float = 0.0) -> str | None:
        """The value of a key, waiting for its first one at most so long; None if there is none."""

    def rendezvous(self) -> dist.Store:
        """A client of its own for `torch.distributed`'s groups, under a prefix that the caller chooses.

        Its calls are bounded by its own timeout where the store answers, not where it hangs.
        """

    def look(self) -> None:
        """Return if the store answers."""

    def signs(self) -> Sequence[str] | None:
        """What changes as long as machines of the run live; None: the store ends with them, so its answer is a sign."""

    def close(self) -> None:
        """End all connections and followers of this client."""


class StoreServer:
    """The process's own TCPStore server. It has no access control: its port belongs into a private network.

    Args:
        port: 0: any free one.

    Raises:
        CapslogError: the port cannot be used.
    """

    def __init__(self, port: int = 0) -> None:
        # IPv4, so that a peer on this machine has a name in /etc/hosts: the server asks for the names of its peers in
        # the one thread that also answers, and a name server that loses a question would stop it for seconds.
        try:
            listener = socket.create_server(("0.0.0.0", port), backlog=1024)
            port = listener.getsockname()[1]
            store = dist.TCPStore(
                "127.0.0.1",
                port,
                is_master=True,
                wait_for_workers=False,
                timeout=_seconds(OPEN_SECONDS),
                master_listen_fd=listener.detach(),
            )
        except (RuntimeError, OSError, OverflowError) as error:
            raise CapslogError(
                f"no store can be served on port {port}: {_first_line(error)}; choose another"
            ) from error
        self.port = port
        self.identity = uuid.uuid4().hex
        store.set("identity", self.identity)
        self._store: dist.TCPStore | None = store

    def close(self) -> None:
        """End the server; its clients are told that the store is gone."""
        self._store = None


def serve_store(port: int = 0) -> tuple[StoreServer, int]:
    """Serve an empty store in this process, on all its addresses, until the server is closed.

    Returns:
        The server, and its port.
    """
    server = StoreServer(port)
    return server, server.port


def open_store(address: str, identity: str | None = None, answer_seconds: float | None = None) -> MembershipStore:
    """The store at "host:port", or at "etcd://host:port,.../prefix".

    Args:
        identity: of the store that is meant, where the caller knows it; see `TcpMembershipStore`.
        answer_seconds: after so long without an answer the store counts as gone; None: as each kind has it.
    """
    if "://" in address:
        from varuna_capslog.elastic.store.etcd_store import EtcdMembershipStore

        return EtcdMembershipStore(address, identity, answer_seconds)
    host, _, port = address.rpartition(":")
    if not host or not port.isascii() or not port.isdigit():
        raise CapslogError(f"store address {address!r} is not host:port")
    return TcpMembershipStore(host, int(port), identity, answer_seconds)


class TcpMembershipStore:
    """A client of `serve_store`. Entry n of the log is the key `log/<n>`, written once by compare-and-set on nothing.

    Every call that is under way has a connection to itself, and one more is kept open. They are opened again after they
    broke, but only to the same server: one that was started anew is another store.

    Args:
        identity: which server it must be; None: the first one that answers.
        answer_seconds: after so long without an answer the store counts as gone; None: `ANSWER_SECONDS`.
        open_seconds: the same for an answer on a new connection.

    Raises:
        StoreGone: nobody answers there.
    """

    def __init__(
        self,
        host: str,
        port: int,
        identity: str | None = None,
        answer_seconds: float | None = None,
        open_seconds: float = OPEN_SECONDS,
    ) -> None:
        self.host = host
        self.port = port
        self.answer_seconds = answer_seconds or ANSWER_SECONDS
        self.open_seconds = open_seconds
        self.identity = identity or ""
        self._lock = threading.Lock()
        self._idle: list[_Line] = []
        self._threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
        self._opening: dict[concurrent.futures.Future[str], threading.Thread] = {}
        self._followers: list[_Follower] = []
        self._closed = False
        self._position = 0  # entries of the log that were read, by any call
        self._newest = EMPTY
        self._spares = threading.Semaphore(1)
        self._give_back(self._open())
        self._want_spare()

    @property
    def address(self) -> str:
        """host:port, as `open_store` reads it."""
        return f"{self.host}:{self.port}"

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
        return self._call(lambda client: int(client.add(f"count/{name}", 1)))

    def put(self, key: str, value: str) -> None:
        self._call(lambda client: client.set(f"key/{key}", value))

    def get(self, key: str, wait_seconds: float = 0.0) -> str | None:
        name = f"key/{key}"

        def job(client: dist.TCPStore) -> str | None:
            if wait_seconds > 0 and not client.check([name]):
                with contextlib.suppress(dist.DistStoreError):  # waited in vain; a broken connection shows below
                    client.wait([name], _seconds(wait_seconds))
            return client.get(name).decode() if client.check([name]) else None

        return self._call(job, self.answer_seconds + wait_seconds)

    def rendezvous(self) -> dist.Store:
        self.look()  # a broken connection must not be handed out
        line = self.line()
        try:
            return line.call(lambda client: client, self.answer_seconds)  # it outlives the line's thread
        finally:
            line.close()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            followers, self._followers = self._followers, []
            lines, self._idle = self._idle, []
            threads = [one for one in self._threads if one is not threading.current_thread()]
        for follower in followers:
            follower.stop()
        for line in lines:
            line.close()
        opening = list(self._opening.values())
        # A thread that is in C++ while Python ends aborts the process. One that waits in the store cannot be woken, but
        # one that asks the name server comes back.
        for some, seconds in ((opening, OPEN_SECONDS / 2), (threads, CLOSE_SECONDS)):
            until = time.monotonic() + seconds
            for thread in some:
                thread.join(max(0.0, until - time.monotonic()))

    def look(self) -> None:
        """Return if the store answers."""
        self._call(lambda client: client.check(["identity"]))

    def signs(self) -> None:
        """See `MembershipStore`: the server is a process of the run."""

    # -- the log ---------------------------------------------------------------------------------------------------

    def _catch_up(self) -> tuple[int, Generation]:
        """Reads on to the end of the log: its length, and the newest generation in it."""
        while True:
            with self._lock:
                start = self._position
            texts = self._call(lambda client, start=start: _entries(client, start))  # type: ignore[misc]
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
        return self._call(lambda client: client.compare_set(_key(position), "", text)) == text.encode()

    # -- connections -----------------------------------------------------------------------------------------------

    def _call(self, job: Callable[[dist.TCPStore], Value], seconds: float | None = None) -> Value:
        """What `job` gives, on a connection of its own meanwhile; on a fresh one where that turns out broken."""
        bound = self.answer_seconds if seconds is None else seconds
        line = self._take_idle()
        for last in (False, True):
            line = line or self._open()
            try:
                value = line.call(job, bound)
            except (RuntimeError, concurrent.futures.TimeoutError) as error:
                line.close()
                self._drop_idle()
                if last or isinstance(error, concurrent.futures.TimeoutError):
                    raise self._gone(error) from error
                line = None
            else:
                self._give_back(line)
                return value
        raise AssertionError("the last attempt returns or raises")

    def _open(self) -> _Line:
        """A connection to the store that is known. A network that breaks it while it is made has two more chances."""
        for last in (False, False, True):
            try:
                return self._dial()
            except (RuntimeError, concurrent.futures.TimeoutError) as error:
                if last or isinstance(error, concurrent.futures.TimeoutError):
                    raise self._gone(error) from error
        raise AssertionError("the last attempt returns or raises")

    def _dial(self) -> _Line:
        """Raises RuntimeError (torch's) where the connection breaks while it is made."""
        if self._closed:
            raise StoreGone(f"this client of the store at {self.address} was closed")
        try:
            # TCPStore would try again and again where nobody listens.
            socket.create_connection((self.host, self.port), self.answer_seconds).close()
        except OSError as error:
            raise StoreGone(f"the store at {self.address} is gone: {error.strerror or error}") from error
        line, identity = self._first_to_answer(max(self.open_seconds, self.answer_seconds))
        with self._lock:
            self.identity = self.identity or identity
        if identity != self.identity:
            line.close()
            raise StoreGone(f"the store at {self.address} was started anew: it knows nothing of this run")
        return line

    def _first_to_answer(self, seconds: float) -> tuple[_Line, str]:
        """A new connection and what the server calls itself. One that takes long gets another beside it."""
        until = time.monotonic() + seconds
        lines: dict[concurrent.futures.Future[str], _Line] = {}
        try:
            while True:
                line = _Line(self.host, self.port, seconds)
                lines[question := line.send(_identity)] = line
                with self._lock:
                    self._threads.add(line.thread)
                    self._opening[question] = line.thread
                question.add_done_callback(lambda answered: self._opening.pop(answered, None))
                wait = until - time.monotonic()
                if len(lines) < _MOST_BESIDE:
                    wait = min(wait, BESIDE_SECONDS)
                done = concurrent.futures.wait(lines, max(0.0, wait), concurrent.futures.FIRST_COMPLETED).done
                if done:
                    identity = (answer := done.pop()).result()
                    return lines.pop(answer), identity
                if time.monotonic() >= until:
                    raise concurrent.futures.TimeoutError
        finally:
            for other in lines.values():
                other.close()

    def line(self) -> _Line:
        """A connection of the caller's own, to be closed by it."""
        return self._take_idle() or self._open()

    def _take_idle(self) -> _Line | None:
        with self._lock:
            line = self._idle.pop() if self._idle else None
            short = not self._idle
        if short:
            self._want_spare()
        return line

    def _want_spare(self) -> None:
        """Opens one more connection in the background, so that a call in a hurry finds one."""

        def open_it() -> None:
            try:
                with contextlib.suppress(StoreGone):  # the call that needs it will say so
                    self._give_back(self._open())
            finally:
                self._spares.release()

        if self._spares.acquire(blocking=False):
            threading.Thread(target=open_it, name="store-spare", daemon=True).start()

    def _give_back(self, line: _Line) -> None:
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
        silent = isinstance(error, concurrent.futures.TimeoutError)
        why = f"no answer within {self.answer_seconds:g} s" if silent else _first_line(error)
        return StoreGone(f"the store at {self.address} is gone: {why}")


class _Line:
    """One connection and the thread that alone uses it, so that a caller can give up a call that hangs in C++."""

    def __init__(self, host: str, port: int, seconds: float) -> None:
        self._jobs: queue.SimpleQueue[tuple[Callable[[Any], Any], concurrent.futures.Future[Any]] | None] = (
            queue.SimpleQueue()
        )
        arguments = (host, port, seconds)
        self.thread = threading.Thread(target=_serve, args=(self._jobs, *arguments), name="store-line", daemon=True)
        self.thread.start()

    def call(self, job: Callable[[dist.TCPStore], Value], seconds: float) -> Value:
        """Raises RuntimeError (torch's) or TimeoutError; after either the line is of no use any more."""
        return self.send(job).result(seconds)

    def send(self, job: Callable[[dist.TCPStore], Value]) -> concurrent.futures.Future[Value]:
        answer: concurrent.futures.Future[Value] = concurrent.futures.Future()
        self._jobs.put((job, answer))
        return answer

    def close(self) -> None:
        """The connection ends with the call that is under way."""
        self._jobs.put(None)


def _serve(jobs: queue.SimpleQueue[Any], host: str, port: int, seconds: float) -> None:
    client: dist.TCPStore | None = None
    while (task := jobs.get()) is not None:
        job, answer = task
        try:
            if client is None:
                client = dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=_seconds(seconds))
            answer.set_result(job(client))
        except Exception as error:
            answer.set_exception(error)


class _Follower:
    """Reads the log with a line that waits in the store, and looks now and then whether the store is still there."""

    def __init__(
        self, store: TcpMembershipStore, take: Callable[[Entry], None], lost: Callable[[str], None], start: int
    ) -> None:
        self._store = store
        self._take = take
        self._lost = lost
        self._next = start
        self._stopped = False
        self._telling = threading.RLock()
        # of texts; an exception: the line is broken; None: stop
        self._heard: queue.SimpleQueue[tuple[_Line, str | BaseException] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="store-follow", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped = True
        self._heard.put(None)
        with self._telling:  # what is being told is told to its end
            pass

    def _run(self) -> None:
        line: _Line | None = None
        try:
            while not self._stopped:
                if line is None:
                    line = self._store.line()
                    line.send(self._pump(line, self._next))
                try:
                    heard = self._heard.get(timeout=LOOK_SECONDS)
                except queue.Empty:
                    self._store.look()
                    continue
                if heard is None or heard[0] is not line:
                    continue
                if isinstance(heard[1], BaseException):
                    line = None
                    continue
                with self._telling:
                    if not self._stopped:
                        self._next += 1
                        self._take(unpack_entry(heard[1]))
        except StoreGone as error:
            with self._telling:
                if not self._stopped:
                    self._lost(str(error))
        finally:
            self._stopped = True
            if line is not None:
                line.close()

    def _pump(self, line: _Line, position: int) -> Callable[[dist.TCPStore], None]:
        def job(client: dist.TCPStore) -> None:
            try:
                client.set_timeout(_FOR_EVER)
                known = _entries(client, position)  # who comes late has much to read, and one by one takes seconds
                for text in known:
                    self._heard.put((line, text))
                at = position + len(known)
                while not self._stopped:
                    self._heard.put((line, client.get(_key(at)).decode()))
                    at += 1
            except RuntimeError as error:
                self._heard.put((line, error))

        return job


def _identity(client: dist.TCPStore) -> str:
    return client.get("identity").decode()


def _entries(client: dist.TCPStore, start: int) -> Sequence[str]:
    """All entries from `start` on, in growing batches: the log has no gaps."""
    texts: list[str] = []
    size = 1
    while True:
        keys = [_key(start + len(texts) + offset) for offset in range(size)]
        if client.check(keys):
            texts += [value.decode() for value in client.multi_get(keys)]
            size = min(2 * size, _LARGEST_BATCH)
        elif size == 1:
            return texts
        else:
            size = max(1, size // 4)


def _key(position: int) -> str:
    return f"log/{position}"


def pack_entry(entry: Entry) -> str:
    """The text of an entry, unlike that of any other. Raises CapslogError where it is not JSON."""
    try:
        return json.dumps([uuid.uuid4().hex, entry], allow_nan=False)
    except (TypeError, ValueError) as error:
        raise CapslogError(f"the log cannot hold {entry!r}: {error}; use JSON's values only") from error


def unpack_entry(text: str) -> Entry:
    """The entry that `pack_entry` made this of."""
    entry: Entry = json.loads(text)[1]
    return entry


def _seconds(seconds: float) -> datetime.timedelta:
    return datetime.timedelta(seconds=seconds)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
