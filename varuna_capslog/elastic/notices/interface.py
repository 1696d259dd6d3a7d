"""What a notice is, and what every source of notices looks like.

A `Listener` watches one source in threads of its own and delivers `Notice`s; `listen` gathers them. Nothing here, nor
in any listener, runs in the thread that trains, and no listener decides anything: `ladder` says what a notice asks for.
"""

from __future__ import annotations

import enum
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

__all__ = ["Clock", "Deadline", "Deliver", "Kind", "Listener", "Notice"]


class Kind(enum.IntEnum):
    """How strong a notice is; a later one of the same id counts only if it is stronger."""

    HINT = 1  # something may come: copy ahead, do not leave
    LEAVE = 2  # the host goes at the deadline
    NOW = 3  # the host is going already


_WORDS = {Kind.HINT: "may have to leave", Kind.LEAVE: "is to leave", Kind.NOW: "is to leave now"}


@dataclass(frozen=True, slots=True)
class Clock:
    """The two clocks of a listener, to be replaced in tests.

    Attributes:
        monotonic: seconds that never jump; every deadline is one of its values.
        wall: seconds since 1970 in UTC, for sources that announce a time of day.
    """

    monotonic: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time


@dataclass(frozen=True, slots=True)
class Deadline:
    """When the host may be gone.

    Attributes:
        at: seconds of the listener's monotonic clock.
        based_on: from what it was computed, for the log.
    """

    at: float
    based_on: str

    def remaining(self, now: float) -> float:
        """Seconds that are left at `now` of the monotonic clock; 0 once it has passed."""
        return max(0.0, self.at - now)


@dataclass(frozen=True, slots=True)
class Notice:
    """One warning of one source.

    Attributes:
        kind: how strong it is.
        source: the listener's name, e.g. "aws".
        id: the same for repeats of the same warning by its source.
        hosts: which hosts of the run are meant, by the names that the run gives them.
        deadline: None where the source names none (hints).
        resources: the machines meant in the source's own words, where it has such.
        detail: what the source said.
    """

    kind: Kind
    source: str
    id: str
    hosts: tuple[str, ...]
    deadline: Deadline | None = None
    resources: tuple[str, ...] = ()
    detail: str = ""

    def __str__(self) -> str:
        until = f", {self.deadline.based_on}" if self.deadline else ""
        return f"{self.source}: {', '.join(self.hosts)} {_WORDS[self.kind]} ({self.detail or self.id}{until})"


Deliver = Callable[[Notice], None]
"""Where a listener puts what it hears; returns at once."""


@dataclass(eq=False)
class Listener(ABC):
    """One source of notices. Started once, stopped once; may deliver the same notice again and again.

    Attributes:
        host: this host's name in the run; default: what the system calls it.
        clock: replaced in tests.
    """

    source: ClassVar[str]

    host: str = ""
    _: KW_ONLY
    clock: Clock = Clock()

    def __post_init__(self) -> None:
        self.host = self.host or socket.gethostname()

    @abstractmethod
    def start(self, deliver: Deliver) -> None:
        """Begin to listen; returns at once."""

    @abstractmethod
    def stop(self) -> None:
        """End within a few seconds; nothing is delivered afterwards."""

    def host_left(self, resources_left: Collection[str] = ()) -> tuple[str, ...]:
        """Acknowledge, after the last rank of this host has left, where the source knows such a thing.

        Args:
            resources_left: other machines, in the source's own words, whose last rank has left too.

        Returns:
            Ids of the notices that were acknowledged.
        """
        return ()
