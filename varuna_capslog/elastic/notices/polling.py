"""Asking a source again and again in threads of its own: pauses, growing after failures, and one log line per outage.

The base of the listeners that ask (clouds, file). What a round does is theirs.
"""

from __future__ import annotations

import logging
import threading
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.elastic.notices.interface import Deliver, Listener, Notice

__all__ = ["PollingListener", "Round", "Unavailable", "backoff"]

_log = logging.getLogger(__name__)

LONGEST_PAUSE = 5.0
"""Seconds: the shortest notices are of 15 to 30 s, and one may come during an outage."""

JOIN_SECONDS = 3.0


class Unavailable(Exception):
    """The source gave no usable answer this time; the message says why."""


@dataclass(frozen=True, slots=True)
class Round:
    """What asking once gave, and after how many seconds to ask again."""

    notices: tuple[Notice, ...]
    pause: float


def backoff(failures: int, interval: float) -> float:
    """Seconds to wait after so many failures in a row (at least 1): doubled each time, up to 5 s."""
    return min(LONGEST_PAUSE, max(interval, 0.1) * 2.0 ** min(failures - 1, 16))


@dataclass(eq=False)
class PollingListener(Listener):
    """Runs each of `rounds()` in a daemon thread of its own until `stop`.

    Attributes:
        interval: seconds between two questions.
    """

    _: KW_ONLY
    interval: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        self._threads: list[threading.Thread] = []
        self._stopped = threading.Event()

    @abstractmethod
    def rounds(self) -> Sequence[Callable[[], Round]]:
        """The questions; each is asked by one thread only. They raise `Unavailable`."""

    def interrupt(self) -> None:
        """End a question that waits for its answer; called once, by `stop`."""

    def start(self, deliver: Deliver) -> None:
        if self._threads or self._stopped.is_set():
            raise CapslogError(f"the {self.source} listener was started before; make a new one")
        for number, ask in enumerate(self.rounds()):
            name = f"notices-{self.source}-{number}"
            self._threads.append(threading.Thread(target=self._run, args=(ask, deliver), name=name, daemon=True))
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
                found = ask()
            except Unavailable as error:
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
            for notice in found.notices:
                if not self._stopped.is_set():
                    deliver(notice)
            self._stopped.wait(found.pause)
