"""A host's connection to the run's store: opens or serves it, follows its log, appends entries, watches other hosts.

Detects lost hosts: `HostStore._watch_hosts` gives this host's signs of life and reads those of all others. A host that
gives none, or whose connection to the store ended, is reported to `host.Host._host_silent`. While the store does not
answer, entries are kept and sent later. Threads read store and log, and pass events on to the host's thread.

Notices, losses and joins go into events.jsonl, too, each written by one host: the reporter of a loss, else the member's
own host. Members that train write the changes of the generation (start, resume, morph).
"""

from __future__ import annotations

import contextlib
import math
import socket
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from varuna_capslog.base import files
from varuna_capslog.base.clock import wall_seconds
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.base.processes import OwnedThread
from varuna_capslog.base.secret import run_secret
from varuna_capslog.base.supervisor import last_step
from varuna_capslog.elastic.host import hooks
from varuna_capslog.elastic.host.workers import HostOptions
from varuna_capslog.elastic.store.etcd_store import begin_run
from varuna_capslog.elastic.store.opening import ENDED, MembershipStore, StoreGone, StoreServer, open_store
from varuna_capslog.membership.entries import DeadEntry, Entry, GenerationEntry, HostsEntry, NoticeEntry, Roster, read
from varuna_capslog.membership.generation import Generation, Member

__all__ = ["HostStore", "age_of", "run_age"]


# -- The sign of life that a host writes to the store: a count, and the age of the run in seconds.
#
# Every host counts the seconds since the first generation with its own monotonic clock; a host that comes later takes
# the age from other hosts' signs. So a joining worker knows the age of the run, whatever the machines' times of day.


def sign_of(beat: int, age_seconds: float) -> str:
    """Sign of life; it differs with every beat of this host."""
    return f"{beat} {age_seconds:.3f}"


def age_of(sign: str | None) -> float:
    """Age of the run in seconds by a sign; 0 for None and for a sign of another version."""
    try:
        seconds = float((sign or "").split(" ")[1])
    except (IndexError, ValueError):
        return 0.0
    return seconds if math.isfinite(seconds) else 0.0


def run_age(store: MembershipStore, host: str) -> float:
    """Age of the run in seconds, by the newest sign of this host. Raises StoreGone."""
    return age_of(store.signs_of([host])[host])


# -- the connection with the store


class HostStore:
    """Store as one host uses it. Called by the host's thread, once `connect` has returned.

    Args:
        roster: content of the log so far; updated by the host.
        take_entry: called in the host's thread with every entry of the log.
        host_silent: called in the host's thread with the name of a host without a sign of life, and the reason.
        later: queues a function for the host's thread; may be called in any thread.

    Attributes:
        address: of the store, as workers reach it.
        name: of this host in the run.
        answers: False after a call that the store did not answer, until it answers again.
        ends_with_us: True where this process serves the store.
    """

    store: MembershipStore

    def __init__(
        self,
        options: HostOptions,
        roster: Roster,
        take_entry: Callable[[dict[str, Any]], None],
        host_silent: Callable[[str, str], None],
        later: Callable[[Callable[[], None]], None],
    ) -> None:
        self.address = options.store or options.serve_at
        self.name = options.name or socket.gethostname()
        self.answers = True
        self.ends_with_us = False
        self._options, self._roster = options, roster
        self._take_entry, self._host_silent, self._later = take_entry, host_silent, later
        self._untold: list[Entry] = []
        self._offset = 0  # generation n of the store is n + offset in the run's files
        self._noticed: dict[Member, bool] = {}  # member -> urgent
        self._unfollow: Callable[[], None] | None = None
        # by the monotonic clock: `_awoke`: when this process ran again after it stood still; `_late_call`: when the
        # last call began that the store answered late or not at all
        self._awoke = self._late_call = 0.0
        self._run_began: float | None = None  # by the monotonic clock, as far as this host knows

    def connect(self, stack: contextlib.ExitStack) -> None:
        """Open the store, after starting its server where this host begins the run, and set this host's name.

        `stack` closes store and server. Raises StoreGone where the store does not answer; CapslogError where it cannot
        be served, another run uses it, or the run's secret cannot be used.
        """
        options, identity = self._options, None
        secret = run_secret(options.run_dir, create=options.serves)
        if options.serves and "://" in self.address:
            identity = begin_run(self.address, options.settings.lease_seconds, secret)
        elif options.serves:
            self.ends_with_us = True
            host, _, port = self.address.rpartition(":")
            server = StoreServer(secret, host, int(port))
            stack.callback(server.close)
            self.address, identity = f"{host}:{server.port}", server.identity
        self.store = open_store(self.address, secret, identity)
        stack.callback(self.store.close)
        hooks.belong(stack, self.address, self.store.identity, options.run_dir)
        if options.serves:
            hooks.tell_address(options.run_dir, self.address, self.store.identity)
            for key, value in options.keys.items():
                self.store.put(key, value)
        number = self.store.count(f"host/{self.name}")
        if number > 1:
            self.name = f"{self.name}.{number}"
        first = self.store.get("first-plan", 0.0 if options.serves else 0.3)
        self._offset = 0 if first is None else int(first) - 1

    def begin(self, stack: contextlib.ExitStack) -> None:
        """Give signs of life, report that the host is here, and follow the log."""
        ended = threading.Event()
        self.store.give_sign(self.name, sign_of(0, 0.0))
        OwnedThread("leases", self._watch_hosts, self._fail, ended).start()
        OwnedThread("stops", self._notice_stops, self._fail, ended).start()
        stack.callback(ended.set)
        self.tell_here()
        self._follow()

    def tell_here(self) -> None:
        """Report to the log that this host is part of the run."""
        self.tell(HostsEntry(self.name, "here", self._options.num_workers))

    def tell(self, entry: Entry) -> None:
        """Append to the log; while the store is lost, keep the entry for later."""
        if self.answers:
            try:
                self.store.append(entry.to_json())
                return
            except StoreGone as error:
                self.store_lost(str(error))
        self._untold.append(entry)

    def run_begins(self) -> None:
        """Record that a generation exists. For a host that comes later, `_watch_hosts` corrects the run's age."""
        self._run_began = self._run_began or time.monotonic()

    def _age(self) -> float:
        return 0.0 if self._run_began is None else time.monotonic() - self._run_began

    def write_generation(self, expected: int, record: Generation) -> None:
        """Write a generation, if the number of the newest is still `expected` and the store answers."""
        with contextlib.suppress(StoreGone):
            self.store.compare_and_set(expected, record)

    def new_member(self) -> Member | None:
        """Return a name that no worker had before; None where the store does not answer: no worker could join."""
        try:
            return f"{self.name}-{self.store.count(f'members/{self.name}')}"
        except StoreGone as error:
            self.store_lost(str(error))
            return None

    def store_lost(self, why: str) -> None:
        """Record that the store does not answer; tell the user once."""
        if self.answers and self._roster.finished is None:
            self._options.say(f"{why}; the run goes on, and stops safely at the next change")
        self.answers = False
        if self._roster.finished is not None:
            self._roster.hosts.clear()  # the host that served it has ended

    def follower_ended(self, why: str) -> None:
        """Record that the thread that follows the log has ended; it has passed on all entries that it received."""
        self._unfollow = None
        self.store_lost(why)

    def store_back(self) -> None:
        """Record that the store answers: send the kept entries, and follow the log again."""
        if not self.answers:
            self._options.say("the store answers again")
            self.answers = True
            untold, self._untold = self._untold, []
            for entry in untold:
                self.tell(entry)
        if self._unfollow is None:
            self._follow()

    def write_event(self, value: Mapping[str, Any]) -> None:
        """Write the event of a log entry to events.jsonl. Call it before the roster takes the entry."""
        before, number = self._roster, self._roster.generation.number
        match read(value):
            case NoticeEntry(member, urgent) as notice if before.members.get(member) == self.name:
                if member in self._noticed and urgent <= self._noticed[member]:
                    return
                about = {"deadline": hooks.seconds_left(notice), "source": notice.source}
                self._append("notice", number, member=member, host=self.name, urgent=urgent, **about)
                self._noticed[member] = urgent
            case DeadEntry(member, why, by, cause) if member not in before.dead:
                where = before.members.get(member, self.name)
                if (by or where) == self.name:
                    self._append("lost", number, member=member, host=where, why=why, cause=cause)
            case GenerationEntry(record) if number:
                for name in record.members:
                    if before.members.get(name) == self.name and not before.was_named(name):
                        self._append("join", record.number, member=name, host=self.name)

    def _append(self, kind: str, generation: int, **details: Any) -> None:
        run_dir = self._options.run_dir
        about = {"time": wall_seconds(), "generation": generation + self._offset, "step": last_step(run_dir)}
        with contextlib.suppress(CapslogError):  # a full disk stops no supervisor
            files.append_jsonl(run_dir / "events.jsonl", {"kind": kind, **about, **details})

    def explain_absence(self) -> None:
        """Write why other hosts declared this host lost: only this host knows if it hung or the network failed."""
        cause = "hung" if self._awoke > self._late_call else "network"
        self._append("cause", self._roster.generation.number, host=self.name, cause=cause)

    def leave(self) -> None:
        """Report to the log that this host has gone."""
        if self._unfollow is not None:
            self._unfollow()  # before the last entry, which wakes the thread that follows the log
        self.tell(HostsEntry(self.name, "gone"))

    def variables(self) -> dict[str, str]:
        """Environment variables with which a worker reaches the store."""
        return {
            "CAPSLOG_HOST": self.name,
            "CAPSLOG_STORE": self.address,
            "CAPSLOG_STORE_IDENTITY": self.store.identity,
        }

    def _follow(self) -> None:
        self._unfollow = self.store.follow(
            lambda entry: self._later(partial(self._take_entry, entry)),
            lambda why: self._later(partial(self.follower_ended, why)),
            self._roster.taken,
        )

    def _fail(self, error: CapslogError) -> None:
        """End this host with the error: without signs of life, other hosts would declare it lost."""

        def end() -> None:
            raise error

        self._later(end)

    def _notice_stops(self, ended: threading.Event) -> None:
        """Record when this whole process stood still. Runs in a thread that waits only for the clock."""
        seconds, last = self._options.settings.lease_seconds, time.monotonic()
        while not ended.wait(seconds / 8):
            now = time.monotonic()
            if now - last > seconds / 2:
                self._awoke = now
            last = now

    def _watch_hosts(self, ended: threading.Event) -> None:
        """Give signs of life, and report hosts that give none. A thread does it: a busy supervisor must not seem lost.

        No clocks are compared: this host measures how long it has seen no new sign. A host without a new sign for
        `lease_seconds` is reported again and again while it stays silent. A host whose connection to the store ended is
        reported a quarter of `lease_seconds` after this was first seen, unless a new sign came.
        """
        seconds = self._options.settings.lease_seconds
        signs: dict[str, str | None] = {}
        changed: dict[str, float] = {}
        looked = time.monotonic()
        answers, beat = True, 0
        while not ended.wait(seconds / 4):
            beat, began = beat + 1, time.monotonic()
            try:
                self.store.give_sign(self.name, sign_of(beat, self._age()))
                others = [host for host in tuple(self._roster.hosts) if host != self.name]
                host_signs = self.store.signs_of(others)
            except StoreGone:
                answers, self._late_call = False, began
                self._later(partial(self.store_lost, "the store does not answer"))
                continue
            now = time.monotonic()
            if now - began > seconds / 2:
                self._late_call = began
            # Where this host has not looked for long (stopped, swapped out, cut off), it missed signs, and counts anew.
            away = not answers or now - looked > seconds / 2
            looked = now
            for peer, sign in host_signs.items():
                if away or peer not in changed or sign != signs[peer]:
                    signs[peer], changed[peer] = sign, now
                elif now - changed[peer] > seconds:
                    self._later(partial(self._host_silent, peer, f"does not answer for {seconds:g} s"))
                elif sign is not None and sign.endswith(ENDED):
                    self._later(partial(self._host_silent, peer, "has ended: its connection to the store was closed"))
            for gone in set(changed) - set(host_signs):
                del signs[gone], changed[gone]
            older = max(map(age_of, host_signs.values()), default=0.0)
            if older > self._age():
                self._run_began = now - older
            answers = True
            self._later(self.store_back)
