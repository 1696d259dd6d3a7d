"""Interface of a run's store: the newest generation, and one log of entries that every process reads.

The log is a sequence of write-once entries without gaps, so that every reader gets the same entries in one order.
Writing the entry of a generation both founds and announces it. `opening` and `etcd_store` read and write entries; the
rest is here. A store decides nothing.
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
"""Gets each entry of the log in order."""
Lost = Callable[[str], None]
"""Called once, with the reason, when the store is gone."""

ENDED = " ended"
"""Stands behind a host's last sign of life where its connection to the store has ended since it gave it."""

LOOK_SECONDS = 1.0
"""Seconds between a follower's checks that the store still answers: a connection that was cut off reports nothing."""


class StoreGone(CapslogError):
    """The store does not answer, or another one, which knows nothing of the run, answers in its place."""


class StoreRefuses(StoreGone):
    """The store that answers has another secret than this process: waiting does not help."""


class MembershipStore(abc.ABC):
    """Store of a run, from any thread. Every call raises `StoreGone` where it is gone, hangs or was started anew."""

    address: str
    """As `open_store` reads it."""

    identity: str
    """Made by the server when it started, or by the run when it began."""

    def __init__(self) -> None:
        self._log_lock = threading.Lock()
        self._followers: list[LogFollower] = []
        self._position = 0  # entries of the log that were read, by any call
        self._newest = EMPTY

    # -- the log ---------------------------------------------------------------------------------------------------

    def read(self, known: int = 0) -> Generation:
        """Newest record; EMPTY before the first. Raises StoreGone where the store has forgotten record `known`."""
        newest = self._catch_up()[1]
        if newest.number < known:
            raise StoreGone(
                f"the store at {self.address} has forgotten generation {known}: its newest is {newest.number}"
            )
        return newest

    def compare_and_set(self, expected: int, record: Generation) -> Generation:
        """Write `record`, the successor of generation `expected`, if that is the newest; return the store's record.

        That is `record` itself, or a newer one than `expected`. After `StoreGone` it is unknown whether `record` was
        written.
        """
        if record.number != expected + 1:
            raise CapslogError(f"generation {record.number} cannot follow {expected}; number them one by one")
        text = pack_entry(GenerationEntry(record).to_json())
        while True:
            position, newest = self._catch_up()
            if newest.number != expected:
                return newest
            # The write fails if there is an entry after those that were read, which may be a generation.
            if self._write(position, text):
                return record

    def append(self, entry: Entry) -> None:
        """Add an entry (kinds: `docs/membership-protocol.md`), exactly once. Raises CapslogError where it is invalid.

        A "generation" is refused; see `compare_and_set`.
        """
        if entry.get("kind") == "generation":
            raise CapslogError("a generation enters the log by compare_and_set only")
        read(entry)
        text = pack_entry(entry)
        while not self._write(self._catch_up()[0], text):
            pass

    def history(self) -> list[Entry]:
        """All entries that the log holds now."""
        return [_unpack_entry(text) for text in self.entries(0)]

    def follow(self, take: Take, lost: Lost, start: int = 0) -> Callable[[], None]:
        """Pass every entry from number `start` on to `take`, in order, as soon as it is there, in its own thread.

        A generation's entry is {"kind": "generation", "number": n, "record": its JSON}. `lost` is called once with the
        reason if the store is gone; then the thread ends. Returns a function that ends it; after its return (in other
        threads than the follower's) `take` is not called.
        """
        follower = LogFollower(self, take, lost, start)
        with self._log_lock:
            self._followers.append(follower)
        follower.thread.start()
        return follower.stop

    def _catch_up(self) -> tuple[int, Generation]:
        """Read on to the end of the log; return its length, and the newest generation in it."""
        while True:
            with self._log_lock:
                start = self._position
            texts = self.entries(start)
            generations = [entry for entry in map(_unpack_entry, texts) if entry.get("kind") == "generation"]
            newest = Generation.from_json(generations[-1].get("record"), "the store") if generations else None
            with self._log_lock:
                # another thread may have read farther meanwhile
                if start + len(texts) >= self._position:
                    self._position = start + len(texts)
                    self._newest = newest or self._newest
                return self._position, self._newest

    @abc.abstractmethod
    def entries(self, start: int) -> Sequence[str]:
        """Texts of all entries from number `start` on."""

    @abc.abstractmethod
    def _write(self, position: int, text: str) -> bool:
        """Write entry number `position` if there is none yet; True where the entry there is now this one.

        Texts are unique, so a call that is repeated after a broken connection recognises its own entry.
        """

    @abc.abstractmethod
    def read_on(self, follower: LogFollower) -> None:
        """Read the log from `follower.next` on and deliver it, until the follower is stopped. Raises StoreGone."""

    # -- keys and counters -----------------------------------------------------------------------------------------

    @abc.abstractmethod
    def count(self, name: str) -> int:
        """1, 2, 3, ...: every call under one name gets another number."""

    @abc.abstractmethod
    def put(self, key: str, value: str) -> None:
        """Set a key; the last value counts."""

    @abc.abstractmethod
    def get(self, key: str, wait_seconds: float = 0.0) -> str | None:
        """Value of a key; wait for its first one at most so long; None if there is none."""

    @abc.abstractmethod
    def get_all(self, keys: Sequence[str]) -> dict[str, str | None]:
        """Values of many keys now, in one question; None where there is none."""

    def give_sign(self, host: str, sign: str) -> None:
        """Record that a host of the run lives; every sign is another text than the one before."""
        self.put(f"lease/{host}", sign)

    def signs_of(self, hosts: Sequence[str]) -> dict[str, str | None]:
        """Last sign of life of each host, followed by `ENDED` where its connection to the store has ended."""
        if not hosts:
            return {}
        signs = self.get_all([f"lease/{host}" for host in hosts])
        return dict(zip(hosts, signs.values(), strict=True))

    # -- the store itself ------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def rendezvous(self) -> dist.Store:
        """Separate client for `torch.distributed`'s groups; its timeout does not bound calls to a hanging store."""

    @abc.abstractmethod
    def look(self) -> None:
        """Return if the store answers."""

    def signs(self) -> Sequence[object] | None:
        """Values that change as long as machines of the run live; None: the store itself ends with them."""
        return None

    def close(self) -> None:
        """End all connections and followers of this client; later calls raise StoreGone."""
        with self._log_lock:
            followers, self._followers = self._followers, []
        for follower in followers:
            follower.stop()


class LogFollower:
    """Thread that reads the log and passes its entries on, from number `next`.

    stopped: True once it has ended or is to end. heard: for the store's `read_on`, which alone knows the content; None:
    the follower was stopped.
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
        """End; returns when a call of `take` that is under way has returned."""
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
    """Text of an entry, unlike that of any other. Raises CapslogError where it is not JSON."""
    try:
        return json.dumps([uuid.uuid4().hex, entry], allow_nan=False)
    except (TypeError, ValueError) as error:
        raise CapslogError(f"the log cannot hold {entry!r}: {error}; use JSON's values only") from error


def _unpack_entry(text: str) -> Entry:
    """Entry in a text of `pack_entry`; for any other text, an entry of a kind that is ignored."""
    try:
        entry = json.loads(text)[1]
    except (ValueError, TypeError, LookupError, RecursionError):
        entry = None
    return entry if isinstance(entry, dict) else {"kind": "unreadable"}
