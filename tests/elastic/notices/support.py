"""Helpers of the listeners' tests: clocks that stand still, an inbox for notices, an opener of set answers."""

from __future__ import annotations

import queue
from collections.abc import Mapping

from varuna_capslog.elastic.notices.clouds import Answer, HttpOpener
from varuna_capslog.elastic.notices.interface import Clock, Notice, Unavailable

WALL = 1505722800.0  # 2017-09-18T08:20:00Z


class SetClock(Clock):
    """Clock whose two times are set; `advance` moves both."""

    def __init__(self, monotonic: float = 1000.0, wall: float = WALL) -> None:
        self.values = [monotonic, wall]
        super().__init__(lambda: self.values[0], lambda: self.values[1])

    __setattr__ = object.__setattr__

    def advance(self, seconds: float) -> None:
        self.values[0] += seconds
        self.values[1] += seconds


class Inbox:
    """Queue of the notices that arrive, in order."""

    def __init__(self) -> None:
        self._queue: queue.Queue[Notice] = queue.Queue()

    def __call__(self, notice: Notice) -> None:
        self._queue.put(notice)

    def next(self, seconds: float = 60.0) -> Notice:
        """Return the next notice; fail after `seconds`."""
        return self._queue.get(timeout=seconds)

    def empty(self) -> bool:
        return self._queue.empty()


class Script(HttpOpener):
    """Opener that gives set answers in turn, and records the requests. None stands for no answer."""

    def __init__(self, *answers: Answer | None) -> None:
        super().__init__()
        self.answers = list(answers)
        self.asked: list[tuple[str, str, Mapping[str, str], bytes | None]] = []
        self.timeouts: list[float] = []

    def __call__(
        self, method: str, url: str, headers: Mapping[str, str], body: bytes | None = None, timeout: float = 2.0
    ) -> Answer:
        self.asked.append((method, url, headers, body))
        self.timeouts.append(timeout)
        answer = self.answers.pop(0)
        if answer is None:
            raise Unavailable("nobody is there")
        return answer
