"""Preemption notices, and the interface of their sources.

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
"""Longest pause after failures, in seconds: the shortest notices leave 15 to 30 s, and may come during an outage."""

JOIN_SECONDS = 3.0


class Kind(enum.IntEnum):
    """Strength of a notice; a repeat with the same id counts only if it is stronger."""

    HINT = 1  # a notice may follow: copy layers ahead, do not leave
    LEAVE = 2  # the host is taken away at the deadline
    NOW = 3  # the host is already being taken away


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
        """Seconds until the deadline at `now` of the monotonic clock; 0 once it has passed."""
        return max(0.0, self.at - now)


@dataclass(frozen=True, slots=True)
class Notice:
    """Warning of one source.

    Attributes:
        source: the listener's name, such as "aws".
        id: the same for repeats of one warning by its source.
        hosts: names in the run of the hosts that must leave.
        deadline: None where the source gives none (hints).
        resources: machines that must leave, if named, in the source's own words. detail: the warning in those words.
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
"""Called with every notice of a listener; must return at once."""


@dataclass(eq=False)
class Listener(ABC):
    """Source of notices. Started once, stopped once; may repeat a notice. host: this host's name; default: system's."""

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
        """Tell the source, if it accepts that, that the last rank of this host has left; return the notices' ids.

        resources_left: other machines, in the source's own words, whose last rank has left, too.
        """
        return ()


class Unavailable(Exception):
    """The source gave no usable answer this time; the message says why."""


@dataclass(frozen=True, slots=True)
class Round:
    """Notices in the answer to one question, and the seconds until the next question."""

    notices: tuple[Notice, ...]
    pause: float


def backoff(failures: int, interval: float) -> float:
    """Seconds to wait after this many failures in a row (at least 1): doubled each time, up to 5 s."""
    return min(LONGEST_PAUSE, max(interval, 0.1) * 2.0 ** min(failures - 1, 16))


@dataclass(eq=False)
class PollingListener(Listener):
    """Source that daemon threads ask every `interval` seconds, less often after failures; the first is logged."""

    _: KW_ONLY
    interval: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        self._threads: list[OwnedThread] = []
        self._stopped = threading.Event()

    @abstractmethod
    def rounds(self) -> Sequence[Callable[[], Round]]:
        """Return the functions that ask the source; each is called by one thread only, and may raise `Unavailable`."""

    def interrupt(self) -> None:
        """Break off questions that wait for an answer; called once, by `stop`."""

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
