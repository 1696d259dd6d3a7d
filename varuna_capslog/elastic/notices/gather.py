"""Many sources, one callback: repeats are dropped, notices close together become one announcement.

`listen` starts the listeners and a thread that gathers what they hear. It decides nothing; see `member/notice_policy`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import queue
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from varuna_capslog.elastic.notices import callback as program
from varuna_capslog.elastic.notices.interface import Kind, Listener, Notice

__all__ = ["Announcement", "Gathering", "listen"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Announcement:
    """Notices that came close together, to be answered by one change of the membership. At least one."""

    notices: tuple[Notice, ...]

    @property
    def hosts(self) -> tuple[str, ...]:
        """All that are meant, in the order in which they were named."""
        return tuple(dict.fromkeys(host for notice in self.notices for host in notice.hosts))

    @property
    def kind(self) -> Kind:
        """The strongest."""
        return max(notice.kind for notice in self.notices)

    def of(self, host: str) -> Notice | None:
        """What counts for a host: its strongest notice, with the earliest deadline of all that ask it to leave."""
        mine = [notice for notice in self.notices if host in notice.hosts]
        if not mine:
            return None
        strongest = max(mine, key=lambda notice: notice.kind)  # the first of equals
        leaving = [notice for notice in mine if notice.kind is not Kind.HINT] or mine
        deadlines = [notice.deadline for notice in leaving if notice.deadline is not None]
        return dataclasses.replace(
            strongest,
            hosts=(host,),
            deadline=min(deadlines, key=lambda deadline: deadline.at, default=None),
            detail="; ".join(notice.detail or notice.id for notice in mine),
        )


class Gathering:
    """Listeners at work, and the thread between them and the callback. Made by `listen`."""

    def __init__(
        self, sources: Sequence[Listener], callback: Callable[[Announcement], None], window: float = 0.05
    ) -> None:
        self.sources = tuple(sources)
        self.window = window
        self._callback = callback
        self._heard: queue.SimpleQueue[Notice | None] = queue.SimpleQueue()
        self._known: dict[tuple[str, str], Kind] = {}
        self._thread = threading.Thread(target=self._run, name="notices", daemon=True)

    def start(self) -> None:
        """Start all; if one cannot start, none is left running."""
        self._thread.start()
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(self._end)
            for source in self.sources:
                source.start(self._heard.put)
                on_failure.callback(source.stop)
            on_failure.pop_all()

    def stop(self) -> None:
        """Stop all, within some seconds. What was heard before is still told."""
        for source in self.sources:
            source.stop()
        self._end()

    def hear(self, notice: Notice) -> None:
        """Take a notice as if a source had delivered it. From any thread."""
        self._heard.put(notice)

    def host_left(self, resources_left: Collection[str] = ()) -> tuple[str, ...]:
        """Have every source acknowledge that the last rank of this host has left; see `Listener.host_left`."""
        return tuple(name for source in self.sources for name in source.host_left(resources_left))

    def __enter__(self) -> Gathering:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _end(self) -> None:
        self._heard.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(2.0)

    def _run(self) -> None:
        ended = False
        while not ended:
            notices: list[Notice] = []
            until: float | None = None  # of the window, which the first new notice opens
            while True:
                try:
                    notice = self._heard.get(timeout=None if until is None else max(0.0, until - time.monotonic()))
                except queue.Empty:
                    break
                if notice is None:
                    ended = True
                    break
                if not self._is_new(notice):
                    continue
                notices.append(notice)
                if notice.kind is Kind.NOW:  # nothing is worth waiting for
                    break
                if until is None:
                    until = time.monotonic() + self.window
            if notices:
                self._tell(Announcement(tuple(notices)))

    def _is_new(self, notice: Notice) -> bool:
        """Whether nothing as strong was heard under its name."""
        name = (notice.source, notice.id)
        if notice.kind <= self._known.get(name, 0):
            return False
        self._known[name] = notice.kind
        return True

    def _tell(self, announcement: Announcement) -> None:
        for notice in announcement.notices:
            _log.info("notice from %s", notice)
        try:
            self._callback(announcement)
        except Exception as error:  # the next notice must still be heard
            _log.error("a callback for notices failed: %s: %s", type(error).__name__, error)
        for notice in announcement.notices:
            program.tell(notice)


def listen(sources: Sequence[Listener], callback: Callable[[Announcement], None], window: float = 0.05) -> Gathering:
    """Start to listen to all sources; `callback` is called in a thread of its own with each announcement.

    Args:
        window: seconds that notices are gathered for after the first one. Of kind NOW none waits.

    Returns:
        What is at work; `stop` ends it.
    """
    gathering = Gathering(sources, callback, window)
    gathering.start()
    return gathering
