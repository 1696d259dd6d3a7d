"""Notices, and the interface of every source of notices.

A `Listener` watches one source in threads of its own; `gather` joins the notices. No listener runs in the thread that
trains, and none decides anything: `member/runtime` turns notices into requests.
"""

from __future__ import annotations

import enum
import logging
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

from varuna_capslog.base.clock import wall_seconds
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.base.processes import OwnedThread, logged

__all__ = [
    "Clock",
    "Deadline",
    "Deliver",
    "Kind",
    "Listener",
    "Notice",
    "PollingListener",
    "Round",
    "Unavailable",
    "backoff",
]

_log = logging.getLogger(__name__)

LONGEST_PAUSE = 5.0
"""Seconds: the shortest notices are of 15 to 30 s, and one may come during an outage."""

JOIN_SECONDS = 3.0


class Kind(enum.IntEnum):
    """Strength of a notice; a later one of the same id counts only if it is stronger."""

    HINT = 1  # something may come: copy ahead, do not leave
    LEAVE = 2  # the host goes at the deadline
    NOW = 3  # the host is going already


_WORDS = {Kind.HINT: "may have to leave", Kind.LEAVE: "is to leave", Kind.NOW: "is to leave now"}


@dataclass(frozen=True, slots=True)
class Clock:
    """Two clocks, replaced in tests. monotonic: for deadlines. wall: seconds since 1970 in UTC, for announced times."""

    monotonic: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = wall_seconds


@dataclass(frozen=True, slots=True)
class Deadline:
    """Time at which the host may be gone. at: on the listener's monotonic clock, in seconds. based_on: for the log."""

    at: float
    based_on: str

    def remaining(self, now: float) -> float:
        """Seconds that are left at `now` of the monotonic clock; 0 once it has passed."""
        return max(0.0, self.at - now)


@dataclass(frozen=True, slots=True)
class Notice:
    """Warning of one source.

    Attributes:
        source: the listener's name, e.g. "aws".
        id: the same for repeats of the same warning by its source.
        hosts: that are meant, by their names in the run.
        deadline: None where the source names none (hints).
        resources, detail: the machines that are meant, if named, and the warning, both in the source's own words.
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
"""Takes the notices that a listener hears; returns at once."""


@dataclass(eq=False)
class Listener(ABC):
    """Source of notices. Started once, stopped once; may repeat a notice. host: its name; default: the system's."""

    source: ClassVar[str]

    host: str = ""
    _: KW_ONLY
    clock: Clock = Clock()

    def __post_init__(self) -> None:
        self.host = self.host or socket.gethostname()

    @abstractmethod
    def start(self, deliver: Deliver) -> None:
        """Begin to listen; return at once."""

    @abstractmethod
    def stop(self) -> None:
        """End within a few seconds; nothing is delivered afterwards."""

    def host_left(self, resources_left: Collection[str] = ()) -> tuple[str, ...]:
        """Acknowledge that the last rank of this host has left, where the source takes that; return the notices' ids.

        resources_left: other machines, in the source's own words, whose last rank has left too.
        """
        return ()


class Unavailable(Exception):
    """The source gave no usable answer this time; the message says why."""


@dataclass(frozen=True, slots=True)
class Round:
    """Notices of one question, and the seconds until the next."""

    notices: tuple[Notice, ...]
    pause: float


def backoff(failures: int, interval: float) -> float:
    """Seconds to wait after so many failures in a row (at least 1): doubled each time, up to 5 s."""
    return min(LONGEST_PAUSE, max(interval, 0.1) * 2.0 ** min(failures - 1, 16))


@dataclass(eq=False)
class PollingListener(Listener):
    """Source that a daemon thread asks every `interval` seconds, less often (and silently) after failures."""

    _: KW_ONLY
    interval: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        self._threads: list[OwnedThread] = []
        self._stopped = threading.Event()

    @abstractmethod
    def rounds(self) -> Sequence[Callable[[], Round]]:
        """Questions; each is asked by one thread only. They raise `Unavailable`."""

    def interrupt(self) -> None:
        """End a question that waits for its answer; called once, by `stop`."""

    def start(self, deliver: Deliver) -> None:
        if self._threads or self._stopped.is_set():
            raise CapslogError(f"the {self.source} listener was started before; make a new one")
        for number, ask in enumerate(self.rounds()):
            name = f"notices-{self.source}-{number}"
            self._threads.append(OwnedThread(name, self._run, logged, ask, deliver))
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self.interrupt()
        for thread in self._threads:
            thread.join(JOIN_SECONDS)

    def _run(self, ask: Callable[[], Round], deliver: Deliver) -> None:
        failures = 0
        while not self._stopped.is_set():
            try:
                answer = ask()
            except Exception as error:  # Unavailable, or an unexpected error: the next answer may be a good one
                if self._stopped.is_set():
                    return
                failures += 1
                if failures == 1:
                    _log.warning("notices of %s are not heard for now: %s", self.source, error)
                self._stopped.wait(backoff(failures, self.interval))
                continue
            if failures:
                _log.warning("notices of %s are heard again", self.source)
            failures = 0
            for notice in answer.notices:
                if not self._stopped.is_set():
                    deliver(notice)
            self._stopped.wait(answer.pause)
