"""Interface of a run's store: the newest generation, and one log of entries that every process reads.

The log is a sequence of write-once entries without gaps, so every reader gets the same entries in the same order. A
generation exists once its entry is written, and its readers learn of it from that entry. `opening` and `etcd_store`
read and write entries; the rest is here. A store decides nothing.
"""

from __future__ import annotations

import abc
import json
import queue
import threading
import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.base.processes import OwnedThread
from varuna_capslog.membership.entries import GenerationEntry, read
from varuna_capslog.membership.generation import EMPTY, Generation

if TYPE_CHECKING:
    import torch.distributed as dist

__all__ = ["ENDED", "LOOK_SECONDS", "LogFollower", "MembershipStore", "StoreGone", "StoreRefuses", "pack_entry"]

Entry = dict[str, Any]
Take = Callable[[Entry], None]
"""Called with each entry of the log, in order."""
Lost = Callable[[str], None]
"""Called once, with the reason, when the store does not answer any more."""

ENDED = " ended"
"""Suffix of a host's last sign of life once the host's connection to the store has ended."""

LOOK_SECONDS = 1.0
"""Seconds between a follower's checks that the store still answers: a connection that is cut off gives no error."""


class StoreGone(CapslogError):
    """The store does not answer, or another store answers in its place, without the run's data."""


class StoreRefuses(StoreGone):
    """The store that answers has another secret than this process, so that waiting does not help."""


class MembershipStore(abc.ABC):
    """Client of a run's store, for any thread. Every call raises `StoreGone` if it is gone, hangs or was restarted."""

    address: str
    """Address in a form that `open_store` takes."""

    identity: str
    """Random name of this store: of the server since its start, or, in etcd, of the run since its beginning."""

    def __init__(self) -> None:
        self._log_lock = threading.Lock()
        self._followers: list[LogFollower] = []
        self._position = 0  # number of log entries that any call has read
        self._newest = EMPTY

    # -- the log ---------------------------------------------------------------------------------------------------

    def read(self, known: int = 0) -> Generation:
        """Return the newest generation; EMPTY before the first. Raises StoreGone if the store lost number `known`."""
        newest = self._catch_up()[1]
        if newest.number < known:
            raise StoreGone(
                f"the store at {self.address} has forgotten generation {known}: its newest is {newest.number}"
            )
        return newest

    def compare_and_set(self, expected: int, record: Generation) -> Generation:
        """Write `record` if the newest generation is its predecessor, number `expected`; return the newest then.

        A result other than `record` means that another process has written a generation first. After `StoreGone` it is
        unknown if `record` was written.
        """
        if record.number != expected + 1:
            raise CapslogError(f"generation {record.number} cannot follow {expected}; number them one by one")
        text = pack_entry(GenerationEntry(record).to_json())
        while True:
            position, newest = self._catch_up()
            if newest.number != expected:
                return newest
            # The write fails if entries were added after those that were read: one of them may be a generation.
            if self._write(position, text):
                return record

    def append(self, entry: Entry) -> None:
        """Append an entry (kinds: `docs/membership-protocol.md`) exactly once. Raises CapslogError where it is invalid,
        and for a "generation", which only `compare_and_set` writes.
        """
        if entry.get("kind") == "generation":
            raise CapslogError("a generation enters the log by compare_and_set only")
        read(entry)
        text = pack_entry(entry)
        while not self._write(self._catch_up()[0], text):
            pass

    def history(self) -> list[Entry]:
        """Return all present entries of the log."""
        return [_unpack_entry(text) for text in self.entries(0)]

    def follow(self, take: Take, lost: Lost, start: int = 0) -> Callable[[], None]:
        """Call `take`, in a new thread, with every entry from number `start` on, in order, as soon as it is written.

        A generation's entry is {"kind": "generation", "number": n, "record": its JSON}. If the store is gone, `lost` is
        called once with the reason, and the thread ends. Returns a function that ends the thread; once that function
        has returned (in another thread than the follower's), `take` is not called any more.
        """
        follower = LogFollower(self, take, lost, start)
        with self._log_lock:
            self._followers.append(follower)
        follower.thread.start()
        return follower.stop

    def _catch_up(self) -> tuple[int, Generation]:
        """Read the rest of the log; return its length and newest generation."""
        while True:
            with self._log_lock:
                start = self._position
            texts = self.entries(start)
            generations = [entry for entry in map(_unpack_entry, texts) if entry.get("kind") == "generation"]
            newest = Generation.from_json(generations[-1].get("record"), "the store") if generations else None
            with self._log_lock:
                # another thread may have read further in the meantime
                if start + len(texts) >= self._position:
                    self._position = start + len(texts)
                    self._newest = newest or self._newest
                return self._position, self._newest

    @abc.abstractmethod
    def entries(self, start: int) -> Sequence[str]:
        """Return the texts of all entries from number `start` on."""

    @abc.abstractmethod
    def _write(self, position: int, text: str) -> bool:
        """Write entry number `position` if there is none yet; return True where `text` is the entry there now.

        Texts are unique, so a call that is repeated after a broken connection recognizes its own entry.
        """

    @abc.abstractmethod
    def read_on(self, follower: LogFollower) -> None:
        """Read the log from `follower.next` on, and deliver it until the follower is stopped. Raises StoreGone."""

    # -- keys and counters -----------------------------------------------------------------------------------------

    @abc.abstractmethod
    def count(self, name: str) -> int:
        """Return the next number of the counter `name`: 1, 2, 3, ...; each call gets another number."""

    @abc.abstractmethod
    def put(self, key: str, value: str) -> None:
        """Set the value of a key, also again."""

    @abc.abstractmethod
    def get(self, key: str, wait_seconds: float = 0.0) -> str | None:
        """Return the value of a key; wait at most `wait_seconds` until it is set; None if it is not."""

    @abc.abstractmethod
    def get_all(self, keys: Sequence[str]) -> dict[str, str | None]:
        """Return the present values of many keys, with one request; None for a key without a value."""

    def give_sign(self, host: str, sign: str) -> None:
        """Record that a host of the run lives; each sign of a host differs from the one before."""
        self.put(f"lease/{host}", sign)

    def signs_of(self, hosts: Sequence[str]) -> dict[str, str | None]:
        """Return the last sign of life of each host, with `ENDED` appended where its connection has ended since."""
        if not hosts:
            return {}
        signs = self.get_all([f"lease/{host}" for host in hosts])
        return dict(zip(hosts, signs.values(), strict=True))

    # -- the store itself ------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def rendezvous(self) -> dist.Store:
        """Return a separate client for `torch.distributed`'s groups. Its timeout does not limit calls that hang."""

    @abc.abstractmethod
    def look(self) -> None:
        """Check that the store answers. Raises StoreGone."""

    def signs(self) -> Sequence[object] | None:
        """Return values that change while machines of the run live; None: the store itself ends with the run."""
        return None

    def close(self) -> None:
        """End all connections and followers of this client; later calls raise StoreGone."""
        with self._log_lock:
            followers, self._followers = self._followers, []
        for follower in followers:
            follower.stop()


class LogFollower:
    """Thread that reads the log and passes its entries on, from number `next`.

    stopped: True once it has ended or must end. heard: queue for use by the store's `read_on`; None in it: the follower
    was stopped.
    """

    def __init__(self, store: MembershipStore, take: Take, lost: Lost, start: int) -> None:
        self.next = start
        self.stopped = False
        self.heard: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._store = store
        self._take = take
        self._lost = lost
        self._telling = threading.RLock()
        self.thread = OwnedThread("store-follow", self._run, self._end)

    def stop(self) -> None:
        """End the thread; wait until a call of `take` that is under way has returned."""
        self.stopped = True
        self.heard.put(None)  # so that the thread does not wait for the next entry
        with self._telling:
            pass

    def deliver(self, texts: Iterable[str]) -> None:
        """Pass the next entries on, unless the follower was stopped."""
        for text in texts:
            with self._telling:
                if self.stopped:
                    return
                self.next += 1
                self._take(_unpack_entry(text))

    def _run(self) -> None:
        self._store.read_on(self)
        self.stopped = True

    def _end(self, error: CapslogError) -> None:
        with self._telling:
            stopped, self.stopped = self.stopped, True
            if not stopped:
                self._lost(str(error))


def pack_entry(entry: Entry) -> str:
    """Return a unique text with the entry. Raises CapslogError where the entry is not JSON."""
    try:
        return json.dumps([uuid.uuid4().hex, entry], allow_nan=False)
    except (TypeError, ValueError) as error:
        raise CapslogError(f"the log cannot hold {entry!r}: {error}; use JSON's values only") from error


def _unpack_entry(text: str) -> Entry:
    """Return the entry in a text of `pack_entry`; for any other text, an entry of a kind that readers ignore."""
    try:
        entry = json.loads(text)[1]
    except (ValueError, TypeError, LookupError, RecursionError):
        entry = None
    return entry if isinstance(entry, dict) else {"kind": "unreadable"}
