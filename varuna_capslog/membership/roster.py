"""State of the store's log so far: the hosts and workers, the newest generation, and the members that answer.

A pure fold over entries: all readers of the log up to the same entry have the same roster. No clock, no I/O.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from varuna_capslog.membership import entries
from varuna_capslog.membership.generation import EMPTY, INITIAL, Generation, Member, Stamp

__all__ = ["Roster"]


class Roster:
    """Everything that supervisors and members need of the log. Attributes are to be read only.

    Attributes:
        taken: number of entries.
        hosts: those that are here, with the number of workers each can have.
        members: workers that have neither ended nor been declared dead, oldest first, with their hosts.
        dead: declared dead, by any host or member.
        here: workers that have loaded and read the log.
        gone: workers whose own host has reported their end, so that it is certain.
        noticed: workers that have got a notice to leave.
        generation: the newest.
        broken: newest generation that a member said is broken.
        checkpoint: the newest that was written.
        finished: the entry that ended the run.
    """

    def __init__(self) -> None:
        self.taken = 0
        self.hosts: dict[str, int] = {}
        self.members: dict[Member, str] = {}
        self.dead: set[Member] = set()
        self.here: set[Member] = set()
        self.gone: set[Member] = set()
        self.noticed: set[Member] = set()
        self.generation: Generation = EMPTY
        self.broken = 0
        self.checkpoint = INITIAL
        self.finished: entries.FinishedEntry | None = None
        self._hosts: dict[Member, str] = {}
        self._named: dict[Member, int] = {}
        self._spoke: dict[Member, int] = {}

    def take(self, value: Mapping[str, Any]) -> entries.Entry | None:
        """Add the next entry, as the store keeps it; kinds that are of no interest here only count.

        Returns:
            The entry; None where its kind is unknown.
        """
        self.taken += 1
        entry = entries.read(value)
        match entry:
            case entries.GenerationEntry(record):
                self.generation = record
                for name in record.participants:
                    self._named[name] = record.number
            case entries.WorkerEntry(member, host):
                self.members[member] = self._hosts[member] = host
            case entries.HelloEntry(member):
                self.here.add(member)
            case entries.DeadEntry(member):
                if entry.by == self._hosts.get(member):
                    self.gone.add(member)
                self.dead.add(member)
                self.members.pop(member, None)
            case entries.LeftEntry(member):
                self.gone.add(member)
                self.members.pop(member, None)
            case entries.NoticeEntry(member):
                self.noticed.add(member)
            case entries.BrokenEntry(generation, member):
                self.broken = max(self.broken, generation)
                self._heard(member, generation)
            case entries.AskEntry(member):
                self._heard(member, self.broken)
            case entries.HostsEntry(host, "here"):
                self.hosts[host] = entry.workers or 0
            case entries.HostsEntry(host):
                self.hosts.pop(host, None)
            case entries.CheckpointEntry(step, generation):
                self.checkpoint = Stamp(step, generation)
            case entries.FinishedEntry() if (
                self.finished is None or self.finished.failure is None
            ):  # the first is the cause
                self.finished = entry
        return entry

    @property
    def failed_for_all(self) -> Mapping[str, Any] | None:
        """The failure that ended the run, if it is one that would stop every member: {"member", "cause", "kind"}."""
        return None if self.finished is None else self.finished.failure

    @property
    def is_bereft(self) -> bool:
        """True once all members that could train, or found the next generation, are gone for certain."""
        voters = self.generation.members
        return bool(voters) and self.finished is None and self.gone.issuperset(voters)

    @property
    def astray(self) -> set[Member]:
        """Members of earlier generations that may come back: not in the newest one, not ended, not declared dead."""
        return self._named.keys() - self.gone - self.dead - set(self.generation.participants)

    def is_complete(self, hosts: int) -> bool:
        """Return True if so many hosts have named all their first workers, and no generation was founded yet."""
        if self.generation.number or len(self.hosts) < hosts:
            return False
        named = [*self.members.values()]
        return all(named.count(host) >= workers for host, workers in self.hosts.items())

    def was_named(self, member: Member) -> bool:
        """Return True if this member ever took part in a generation."""
        return member in self._named

    def silent(self, generation: int) -> tuple[Member, ...]:
        """Members of a generation that have said nothing since it broke, nor were named in a later one."""
        return tuple(
            member
            for member, last in self._named.items()
            if last == generation and self._spoke.get(member, 0) < generation
        )

    @property
    def staying(self) -> list[Member]:
        """The workers without a notice to leave, oldest first."""
        return [member for member in self.members if member not in self.noticed]

    def share(self, host: str, devices: int) -> tuple[int, tuple[Member, ...]]:
        """Return one host's share so that the run has `devices` workers: how many to start, and which of its own leave.

        All hosts work out the same division. Missing workers are started by the hosts in the order of their names, up
        to what each can have; of too many the youngest leave.
        """
        staying = self.staying
        missing = devices - len(staying)
        if missing <= 0:
            return 0, tuple(member for member in staying[devices:] if self.members[member] == host)
        for name in sorted(self.hosts):
            present = sum(1 for member in staying if self.members[member] == name)
            start = min(missing, max(0, self.hosts[name] - present))
            if name == host:
                return start, ()
            missing -= start
        return 0, ()

    def _heard(self, member: Member, generation: int) -> None:
        self._spoke[member] = max(self._spoke.get(member, 0), generation)
