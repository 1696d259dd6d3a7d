"""Entries of the store's log: messages of hosts, members and people to all participants of a run.

An entry checks its fields when it is created, so no invalid entry is written or handled. `docs/membership-protocol.md`
lists the writers.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from varuna_capslog.base import fields
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.base.failures import CAUSES
from varuna_capslog.membership.generation import EMPTY, INITIAL, Generation, Member, Stamp

__all__ = [
    "AnnounceEntry",
    "AskEntry",
    "BrokenEntry",
    "CheckpointEntry",
    "DeadEntry",
    "Entry",
    "FinishedEntry",
    "GenerationEntry",
    "HelloEntry",
    "HintEntry",
    "HostsEntry",
    "LeftEntry",
    "NoticeEntry",
    "RequestEntry",
    "Roster",
    "WorkerEntry",
    "read",
]


_EARLIEST = 1e9
"""A time in 2001, in seconds since 1970: a smaller deadline is no time of day but a number of remaining seconds."""


_KINDS: dict[str, type[Entry]] = {}


@dataclass(frozen=True)
class Entry:
    """Base of all entries: a field of one name means the same in each. Raises CapslogError for an invalid field."""

    kind: ClassVar[str]

    def __init_subclass__(cls, kind: str) -> None:
        cls.kind = kind
        _KINDS[kind] = cls

    def __post_init__(self) -> None:
        def check() -> None:
            for field in dataclasses.fields(self):
                value = getattr(self, field.name)
                if value is not None or field.default is not None:
                    _CHECKS[field.name](value, field.name)

        fields.within(f"entry {self.kind!r} of the log", check)

    def to_json(self) -> dict[str, Any]:
        """Return the form in which the store keeps it; `read` is the inverse."""
        return {"kind": self.kind, **{field.name: getattr(self, field.name) for field in dataclasses.fields(self)}}


@dataclass(frozen=True)
class GenerationEntry(Entry, kind="generation"):
    """Record of the newest generation. Written only by `MembershipStore.compare_and_set`."""

    record: Generation

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "number": self.record.number, "record": self.record.to_json()}


@dataclass(frozen=True)
class HostsEntry(Entry, kind="hosts"):
    """A host has come ("here", with devices for `workers` workers), has left ("gone"), or does not answer ("lost")."""

    host: str
    state: str
    workers: int | None = None


@dataclass(frozen=True)
class WorkerEntry(Entry, kind="worker"):
    """A worker is being started on this device of a host."""

    member: Member
    host: str
    slot: int


@dataclass(frozen=True)
class HelloEntry(Entry, kind="hello"):
    """A member has loaded and reads the log."""

    member: Member
    host: str | None = None


@dataclass(frozen=True)
class AskEntry(Entry, kind="ask"):
    """A member asks to join. capacity: bytes of its device, 0 where the run has no capacities."""

    member: Member
    host: str | None = None
    capacity: int = 0


@dataclass(frozen=True)
class DeadEntry(Entry, kind="dead"):
    """A member has ended, or is declared dead for good. by: host that says so. cause: key of `base/failures.CAUSES`."""

    member: Member
    why: str | None = None
    by: str | None = None
    cause: str | None = None


@dataclass(frozen=True)
class LeftEntry(Entry, kind="left"):
    """A member has ended without a failure, and no other member waits for it."""

    member: Member


@dataclass(frozen=True)
class NoticeEntry(Entry, kind="notice"):
    """A member must leave. urgent: at the next boundary, even if nothing was copied ahead.

    deadline: when it may be gone, in seconds since 1970; None: no deadline.
    left: seconds until the deadline by the writer's clock; a reader counts no more, whatever its own clock says.
    """

    member: Member
    urgent: bool = False
    deadline: float | None = None
    source: str = "person"
    left: float | None = None


@dataclass(frozen=True)
class HintEntry(Entry, kind="hint"):
    """A member may have to leave later; fields as in `NoticeEntry`."""

    member: Member
    urgent: bool = False
    deadline: float | None = None
    source: str = "person"
    left: float | None = None


@dataclass(frozen=True)
class AnnounceEntry(Entry, kind="announce"):
    """A host must leave; it gives notice to its members. notice: "hint", "leave" or "now"; see also `NoticeEntry`."""

    host: str
    notice: str
    deadline: float | None = None
    id: str = "announced"
    left: float | None = None


@dataclass(frozen=True)
class RequestEntry(Entry, kind="request"):
    """The run shall have `devices` workers: each host starts or releases its share."""

    devices: int


@dataclass(frozen=True)
class BrokenEntry(Entry, kind="broken"):
    """A member has stopped answering this generation after a fault."""

    generation: int
    member: Member


@dataclass(frozen=True)
class CheckpointEntry(Entry, kind="checkpoint"):
    """A checkpoint of this boundary is complete."""

    step: int
    generation: int


@dataclass(frozen=True)
class FinishedEntry(Entry, kind="finished"):
    """The run has ended. step: the last applied step; stopped: early, on request; asked: by a person.

    failure: `member`, `cause`, `kind` and `time` of a failure that would stop every member; None: there was none.
    """

    step: int = 0
    stopped: bool = False
    asked: bool = False
    failure: Mapping[str, Any] | None = None


def read(value: Mapping[str, Any]) -> Entry | None:
    """Return the entry of this JSON object; None for an unknown kind. Raises CapslogError for missing or bad fields."""
    record = _KINDS.get(str(value.get("kind")))
    if record is None:
        return None
    if record is GenerationEntry:
        return GenerationEntry(Generation.from_json(value.get("record"), "the store"))
    parts = {name: part for name, part in value.items() if name != "kind"}
    return fields.build(record, parts, f"the store's log ({record.kind})")


def _time(value: Any, name: str) -> None:
    if fields.seconds(value, name) < _EARLIEST:
        raise CapslogError(
            f"{name} is {value:g}; it must be a time in seconds since 1970, not the seconds that are left"
        )


def _is_a(kind: type, words: str) -> Callable[[Any, str], object]:
    def check(value: Any, name: str) -> None:
        if not isinstance(value, kind):
            raise CapslogError(f"{name} is {value!r}; it must be {words}")

    return check


_CHECKS: Mapping[str, Callable[[Any, str], object]] = {
    **dict.fromkeys(("member", "host", "by", "source", "id"), fields.text),
    **dict.fromkeys(("slot", "capacity", "generation", "step", "workers"), fields.whole),
    **dict.fromkeys(("urgent", "stopped", "asked"), _is_a(bool, "true or false")),
    "why": _is_a(str, "a string"),
    "cause": functools.partial(fields.choice, allowed=tuple(CAUSES)),
    "deadline": _time,
    "left": fields.seconds,
    "devices": functools.partial(fields.whole, minimum=1),
    "state": functools.partial(fields.choice, allowed=("here", "gone", "lost")),
    "notice": functools.partial(fields.choice, allowed=("hint", "leave", "now")),
    "record": _is_a(Generation, "a generation"),
    "failure": _is_a(Mapping, "an object"),
}


# -- State of the store's log so far: the hosts and workers, the newest generation, and the members that answer.
#
# A pure fold over entries: all readers of the log up to the same entry have the same roster. No clock, no I/O.


class Roster:
    """State of the log for supervisors and members. Attributes must only be read.

    Attributes:
        taken: number of entries.
        hosts: hosts that are here, each with the largest number of its workers.
        members: workers that have neither ended nor been declared dead, oldest first, with their hosts.
        dead: workers declared dead by any host. gone: workers whose own host has reported their end, which is certain.
        here: workers that have loaded and read the log. noticed: workers with a notice to leave.
        generation, checkpoint: the newest. broken: newest generation that a member reported as broken.
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
        self.finished: FinishedEntry | None = None
        self._hosts: dict[Member, str] = {}
        self._named: dict[Member, int] = {}
        self._spoke: dict[Member, int] = {}

    def take(self, value: Mapping[str, Any]) -> Entry | None:
        """Add the next entry, a JSON object, and return it; None for an unknown kind, which is only counted."""
        self.taken += 1
        entry = read(value)
        match entry:
            case GenerationEntry(record):
                self.generation = record
                for name in record.participants:
                    self._named[name] = record.number
            case WorkerEntry(member, host):
                self.members[member] = self._hosts[member] = host
            case HelloEntry(member):
                self.here.add(member)
            case DeadEntry(member):
                if entry.by == self._hosts.get(member):
                    self.gone.add(member)
                self.dead.add(member)
                self.members.pop(member, None)
            case LeftEntry(member):
                self.gone.add(member)
                self.members.pop(member, None)
            case NoticeEntry(member):
                self.noticed.add(member)
            case BrokenEntry(generation, member):
                self.broken = max(self.broken, generation)
                self._heard(member, generation)
            case AskEntry(member):
                self._heard(member, self.broken)
            case HostsEntry(host, "here"):
                self.hosts[host] = entry.workers or 0
            case HostsEntry(host):
                self.hosts.pop(host, None)
            case CheckpointEntry(step, generation):
                self.checkpoint = Stamp(step, generation)
            case FinishedEntry() if self.finished is None or self.finished.failure is None:  # first failure: the cause
                self.finished = entry
        return entry

    @property
    def failed_for_all(self) -> Mapping[str, Any] | None:
        """Failure that ended the run, where it would stop every member."""
        return None if self.finished is None else self.finished.failure

    @property
    def has_no_voter_left(self) -> bool:
        """True once all members that could train, or found the next generation, are gone for certain."""
        voters = self.generation.members
        return bool(voters) and self.finished is None and self.gone.issuperset(voters)

    @property
    def astray(self) -> set[Member]:
        """Members of earlier generations that may come back: not in the newest, not ended, not declared dead."""
        return self._named.keys() - self.gone - self.dead - set(self.generation.participants)

    def is_complete(self, hosts: int) -> bool:
        """True where this many hosts have named all their first workers, and no generation was founded yet."""
        if self.generation.number or len(self.hosts) < hosts:
            return False
        named = [*self.members.values()]
        return all(named.count(host) >= workers for host, workers in self.hosts.items())

    def was_named(self, member: Member) -> bool:
        """True where this member ever took part in a generation."""
        return member in self._named

    def silent(self, generation: int) -> tuple[Member, ...]:
        """Members of a broken generation that have reported nothing since, and are in no later generation."""
        return tuple(
            member
            for member, last in self._named.items()
            if last == generation and self._spoke.get(member, 0) < generation
        )

    @property
    def staying(self) -> list[Member]:
        """Members without a notice to leave, oldest first."""
        return [member for member in self.members if member not in self.noticed]

    def share(self, host: str, devices: int) -> tuple[int, tuple[Member, ...]]:
        """Return this host's share of a run with `devices` workers: how many to start, and which of its workers leave.
        All hosts compute the same division: in the order of their names they start missing workers, as many as each can
        have; superfluous workers leave, the newest first.
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
