"""What one member hears, from whatever thread, in one inbox: messages, the store's log, ends of connections.

The threads behind it only listen. They do two things besides, which cannot wait for the member's own thread: they break
off a collective that can no longer end, and they answer for a member that is busy with work of its own.
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
        """From now on the loss of one of these breaks off what is under way in this generation."""
        with self._lock:
            self._generation, self._engaged = generation, members - {self._me}

    def guard(self, communicator: Communicator | None) -> None:
        """The communicator that is to be broken off; None: there is none."""
        with self._lock:
            self._communicator = communicator

    def is_engaged(self, member: Member) -> bool:
        """Whether the generation waits for this member."""
        return member in self._engaged

    def disturbed(self) -> bool:
        """Whether a member is lost for which the generation waits, or there is a newer one."""
        with self._lock:
            return bool(self._engaged & (self._unreachable | self._dead)) or self._newest > self._generation

    @contextlib.contextmanager
    def busy(self, seconds: float) -> Iterator[None]:
        """For work of this member alone, during which it hears nothing: so long it is answered for."""
        self._busy_until = time.monotonic() + seconds
        try:
            yield
        finally:
            self._busy_until = 0.0

    def close(self, flush_seconds: float) -> None:
        """Ends all connections after what is queued was sent, and hears no more."""
        self._closed = True
        self._unfollow()
        self.peers.close(flush_seconds)

    # -- threads -------------------------------------------------------------------------------------------------------

    def _find(self, member: Member) -> str | None:
        # It may still be loading: whether it will ever come is for those to say who watch its process.
        while not self._closed and member not in self._dead:
            found = self._store.get(f"address/{member}", wait_seconds=_FIND_SECONDS)
            if found is not None:
                return found
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
            # once: its own word, and each one that answers it, comes back by the log
            if time.monotonic() < self._busy_until and self._answered < self._generation:
                self._answered = self._generation
                with contextlib.suppress(StoreGone):
                    self._store.append(replace(entry, member=self._me).to_json())

    def _break_off(self, member: Member) -> None:
        """Whatever waits for a lost peer ends now."""
        with self._lock:
            communicator = self._communicator if member in self._engaged else None
        if communicator is not None:
            communicator.abort()
