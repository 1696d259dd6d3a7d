"""The inbox of one member: messages, entries of the store's log and ends of connections, from all threads.

The threads behind it only listen, but for two things that cannot wait for the member's own thread: they break off a
collective that can no longer end, and they answer for a member that is busy with work of its own.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.elastic.host.hooks import notice_of
from varuna_capslog.elastic.member.peers import PeerMessage, Peers
from varuna_capslog.elastic.member.start_up import MemberStart
from varuna_capslog.elastic.notices.gather import tell
from varuna_capslog.elastic.store.opening import MembershipStore, StoreGone
from varuna_capslog.engine.communicator import Communicator
from varuna_capslog.membership.entries import BrokenEntry, DeadEntry, GenerationEntry, HintEntry, NoticeEntry, read
from varuna_capslog.membership.generation import Member

__all__ = ["Inbox"]

_FIND_SECONDS = 5.0


class Inbox:
    """Opens this member's connections and follows the store's log from its beginning.

    Attributes:
        peers: for sending.
        events: ("mail", PeerMessage), ("log", entry), ("lost", member), ("store lost", why) or ("failed", CapslogError)
            of this member itself, in the order of hearing.

    Raises:
        StoreGone: the store does not answer.
    """

    def __init__(self, start: MemberStart, store: MembershipStore) -> None:
        self._me, self._host, self._store = start.me, start.host, store
        self.events: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._generation = self._newest = self._answered = 0
        self._engaged: frozenset[Member] = frozenset()
        self._unreachable: frozenset[Member] = frozenset()
        self._dead: frozenset[Member] = frozenset()
        self._communicator: Communicator | None = None
        self._busy_until = 0.0
        self._closed = False
        key = start.secret.key(f"peers {store.identity}")
        self.peers = Peers(start.me, key, self._find, self._got, self._lost, self._failed, start.address)
        store.put(f"address/{start.me}", self.peers.address)
        self._unfollow = store.follow(self._hear, lambda why: self.events.put(("store lost", why)))

    # -- for the member's own thread -----------------------------------------------------------------------------------

    def engage(self, generation: int, members: frozenset[Member]) -> None:
        """Makes the loss of one of these members break off the collective under way in this generation."""
        with self._lock:
            self._generation, self._engaged = generation, members - {self._me}

    def guard(self, communicator: Communicator | None) -> None:
        """Sets the communicator that a loss breaks off; None: there is none."""
        with self._lock:
            self._communicator = communicator

    def is_engaged(self, member: Member) -> bool:
        """True where the generation waits for this member."""
        return member in self._engaged

    def disturbed(self) -> bool:
        """True where a member is lost for which the generation waits, or where there is a newer generation."""
        with self._lock:
            return bool(self._engaged & (self._unreachable | self._dead)) or self._newest > self._generation

    @contextlib.contextmanager
    def busy(self, seconds: float) -> Iterator[None]:
        """Context around work of this member alone, during which it hears nothing; threads answer for it meanwhile.

        seconds: longest time that they do so.
        """
        self._busy_until = time.monotonic() + seconds
        try:
            yield
        finally:
            self._busy_until = 0.0

    def close(self, flush_seconds: float) -> None:
        """Ends all connections after queued messages were sent, and hears no more."""
        self._closed = True
        self._unfollow()
        self.peers.close(flush_seconds)

    # -- threads -------------------------------------------------------------------------------------------------------

    def _find(self, member: Member) -> str | None:
        # It may still be loading: its supervisor, which watches its process, says whether it will ever come.
        while not self._closed and member not in self._dead:
            address = self._store.get(f"address/{member}", wait_seconds=_FIND_SECONDS)
            if address is not None:
                return address
        return None

    def _got(self, message: PeerMessage) -> None:
        with self._lock:
            self._unreachable -= {message.sender}
        self.events.put(("mail", message))

    def _lost(self, member: Member) -> None:
        with self._lock:
            self._unreachable |= {member}
        self.events.put(("lost", member))
        self._break_off(member)

    def _failed(self, error: CapslogError) -> None:
        self.events.put(("failed", error))
        with self._lock:
            communicator = self._communicator
        if communicator is not None:
            communicator.abort()

    def _hear(self, value: dict[str, Any]) -> None:
        entry = None
        with contextlib.suppress(CapslogError):  # the member's own thread reads it again and says what is wrong
            entry = read(value)
        match entry:
            case DeadEntry(member):
                with self._lock:
                    self._dead |= {member}
            case GenerationEntry(record):
                self._newest = max(self._newest, record.number)
            case NoticeEntry(self._me) | HintEntry(self._me):
                tell(notice_of(entry, self._host))
        self.events.put(("log", value))
        if isinstance(entry, DeadEntry):
            self._break_off(entry.member)
        elif isinstance(entry, BrokenEntry) and entry.generation == self._generation:
            self._break_off(entry.member)
            # once: this entry, and each answer to it, comes back by the log
            if time.monotonic() < self._busy_until and self._answered < self._generation:
                self._answered = self._generation
                with contextlib.suppress(StoreGone):
                    self._store.append(replace(entry, member=self._me).to_json())

    def _break_off(self, member: Member) -> None:
        """Ends all waits for a lost peer."""
        with self._lock:
            communicator = self._communicator if member in self._engaged else None
        if communicator is not None:
            communicator.abort()
