"""The entries of the store's log: messages of hosts, members and people to all participants of a run.

Every entry is a record that checks itself when it is made, so none that is invalid is ever written or acted on.
`to_json` gives the form in which the store keeps it, `read` is the way back. `docs/elastic.md` lists their writers.
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
from varuna_capslog.membership.generation import Generation, Member

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
    "WorkerEntry",
    "read",
]

_EARLIEST = 1e9
"""Seconds since 1970 in 2001: a smaller deadline is not a time of day but seconds that are left."""


_KINDS: dict[str, type[Entry]] = {}


@dataclass(frozen=True)
class Entry:
    """Base of all entries: a field of one name means the same in each of them.

    Raises:
        CapslogError: the value of a field is not valid.
    """

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
        """The form in which the store keeps it."""
        return {"kind": self.kind, **{field.name: getattr(self, field.name) for field in dataclasses.fields(self)}}


@dataclass(frozen=True)
class GenerationEntry(Entry, kind="generation"):
    """The record of the newest generation. Only the store writes it, as its compare-and-set."""

    record: Generation

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "number": self.record.number, "record": self.record.to_json()}


@dataclass(frozen=True)
class HostsEntry(Entry, kind="hosts"):
    """A supervisor has come ("here", with so many `workers`), has gone home ("gone"), or does not answer ("lost")."""

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
    """A member wants to be let in; `capacity` is the bytes of its device, 0 where the run has no capacities."""

    member: Member
    host: str | None = None
    capacity: int = 0


@dataclass(frozen=True)
class DeadEntry(Entry, kind="dead"):
    """A member has ended, or is taken for dead; this is final.

    Attributes:
        why: in a sentence.
        by: the host that says so.
        cause: a name of `base/failures.CAUSES`.
    """

    member: Member
    why: str | None = None
    by: str | None = None
    cause: str | None = None


@dataclass(frozen=True)
class LeftEntry(Entry, kind="left"):
    """A member has ended as it should, and no member waits for it any more."""

    member: Member


@dataclass(frozen=True)
class NoticeEntry(Entry, kind="notice"):
    """A member is to leave.

    Attributes:
        urgent: at the next boundary, whatever was copied ahead.
        deadline: when it may be gone, in seconds since 1970; None: no deadline.
        left: seconds until then as its writer counted; never more are left, whatever a reader's clock says.
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
    """A host is to leave and tells its members.

    Attributes:
        notice: "hint", "leave" or "now".
        deadline, left: as in `NoticeEntry`.
    """

    host: str
    notice: str
    deadline: float | None = None
    id: str = "announced"
    left: float | None = None


@dataclass(frozen=True)
class RequestEntry(Entry, kind="request"):
    """The run is to have so many workers: hosts start or send away their share."""

    devices: int


@dataclass(frozen=True)
class BrokenEntry(Entry, kind="broken"):
    """A member answers this generation no more."""

    generation: int
    member: Member


@dataclass(frozen=True)
class CheckpointEntry(Entry, kind="checkpoint"):
    """A checkpoint of this boundary is complete."""

    step: int
    generation: int


@dataclass(frozen=True)
class FinishedEntry(Entry, kind="finished"):
    """The run has ended.

    Attributes:
        step: the last one that was applied.
        stopped: early, as it was asked to; `asked`: by a person.
        failure: what would stop every member: its `member`, `cause`, `kind` and `time`.
    """

    step: int = 0
    stopped: bool = False
    asked: bool = False
    failure: Mapping[str, Any] | None = None


def read(value: Mapping[str, Any]) -> Entry | None:
    """The entry that the store keeps as this JSON object; None: its kind is unknown here.

    Raises:
        CapslogError: a field is missing, unknown or not valid.
    """
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
