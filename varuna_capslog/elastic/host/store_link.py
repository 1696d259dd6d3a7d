"""A host's connection with the run's store: opened or served here, followed, and written to.

While the store does not answer, entries for the log are kept; they are sent when it answers again. What the store, its
log and the other hosts' leases say is passed on as events, from threads of their own.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from typing import Any

from varuna_capslog.elastic.host import hooks
from varuna_capslog.elastic.host.leases import Leases
from varuna_capslog.elastic.host.options import HostOptions
from varuna_capslog.elastic.store.etcd_store import begin_run
from varuna_capslog.elastic.store.opening import MembershipStore, StoreGone, open_store, serve_store
from varuna_capslog.membership.entries import Entry, HostsEntry
from varuna_capslog.membership.generation import Generation, Member
from varuna_capslog.membership.roster import Roster

__all__ = ["HostStore"]


class HostStore:
    """The store as one host uses it. Called by the host's thread, once `connect` has returned.

    Args:
        roster: what the log says so far; kept by the host.
        hear: called from other threads with ("log", entry), ("unheard", why the log is not heard any more), ("silent",
            a host without a sign of life) and ("store", whether it answers).

    Attributes:
        store: the client.
        address: of the store, as workers reach it.
        name: of this host in the run.
        answers: whether the store answered last.
        ends_with_us: whether this process serves it.
    """

    store: MembershipStore

    def __init__(self, options: HostOptions, roster: Roster, hear: Callable[[str, Any], None]) -> None:
        self.address = options.store or options.serve_at
        self.name = options.name or socket.gethostname()
        self.answers = True
        self.ends_with_us = False
        self._options, self._roster, self._hear = options, roster, hear
        self._untold: list[Entry] = []
        self._unfollow: Callable[[], None] | None = None

    def connect(self, stack: contextlib.ExitStack) -> None:
        """Opens the store, serves it first where this host begins the run, and finds the host's name.

        Args:
            stack: closes all of it.

        Raises:
            StoreGone: the store does not answer.
            CapslogError: it cannot be served, or another run goes on there.
        """
        options, identity = self._options, None
        if options.serves and "://" in self.address:
            identity = begin_run(self.address, options.settings.lease_seconds)
        elif options.serves:
            self.ends_with_us = True
            host, _, port = self.address.rpartition(":")
            server, number = serve_store(int(port))
            stack.callback(server.close)
            self.address, identity = f"{host}:{number}", server.identity
        self.store = open_store(self.address, identity)
        stack.callback(self.store.close)
        known = (self.address, self.store.identity)
        hooks.tell_where(options.run_dir, *known, options.serves)
        stack.callback(hooks.forget, *known)
        if options.serves:
            for key, value in options.keys.items():
                self.store.put(key, value)
        number = self.store.count(f"host/{self.name}")
        if number > 1:
            self.name = f"{self.name}.{number}"

    def begin(self, stack: contextlib.ExitStack) -> None:
        """Gives signs of life, tells that the host is here, and follows the log."""
        leases = Leases(
            self.store,
            self.name,
            self._options.settings.lease_seconds,
            lambda: [host for host in tuple(self._roster.hosts) if host != self.name],
            lambda host: self._hear("silent", host),
            lambda answers: self._hear("store", answers),
        )
        leases.start()
        stack.callback(leases.stop)
        self.tell_here()
        self._follow()

    def tell_here(self) -> None:
        """Tells the log that this host is part of the run."""
        self.tell(HostsEntry(self.name, "here", self._options.num_workers))

    def tell(self, entry: Entry) -> None:
        """Append to the log; while the store is lost, keep it for later."""
        if self.answers:
            try:
                self.store.append(entry.to_json())
                return
            except StoreGone as error:
                self.lost(str(error))
        self._untold.append(entry)

    def found(self, expected: int, record: Generation) -> None:
        """Writes a generation, if `expected` is still the newest and the store answers."""
        with contextlib.suppress(StoreGone):
            self.store.compare_and_set(expected, record)

    def new_member(self) -> Member | None:
        """A name that no worker has had yet; None where the store does not answer, so that no worker could join."""
        try:
            return f"{self.name}-{self.store.count(f'members/{self.name}')}"
        except StoreGone as error:
            self.lost(str(error))
            return None

    def lost(self, why: str) -> None:
        """The store does not answer: says so once."""
        if self.answers and self._roster.finished is None:
            self._options.say(f"{why}; the run goes on, and stops safely at the next change")
        self.answers = False
        if self._roster.finished is not None:
            self._roster.hosts.clear()  # its host has gone home

    def unheard(self, why: str) -> None:
        """The log's follower has ended; all that it heard before was passed on."""
        self._unfollow = None
        self.lost(why)

    def back(self) -> None:
        """The store answers: sends what was kept, and follows the log again."""
        if not self.answers:
            self._options.say("the store answers again")
            self.answers = True
            untold, self._untold = self._untold, []
            for entry in untold:
                self.tell(entry)
        if self._unfollow is None:
            self._follow()

    def leave(self) -> None:
        """Tells the log that this host has gone."""
        if self._unfollow is not None:
            self._unfollow()  # before the last entry, which wakes the thread that waits for it
        self.tell(HostsEntry(self.name, "gone"))

    def variables(self) -> dict[str, str]:
        """What a worker must know to reach the store."""
        return {
            "CAPSLOG_HOST": self.name,
            "CAPSLOG_STORE": self.address,
            "CAPSLOG_STORE_IDENTITY": self.store.identity,
        }

    def _follow(self) -> None:
        self._unfollow = self.store.follow(
            lambda entry: self._hear("log", entry), lambda why: self._hear("unheard", why), self._roster.taken
        )
