"""Notices from and to Python: a program announces one itself, and `on_notice` tells it of every notice.

For schedulers with an API of their own, for notebooks and tests. `announce` may be called from any thread.
"""

from __future__ import annotations

import itertools
import logging
import socket
import threading
from collections.abc import Callable, Sequence
from typing import ClassVar

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.elastic.notices.interface import Clock, Deadline, Deliver, Kind, Listener, Notice

__all__ = ["CallbackListener", "on_notice", "tell"]

_log = logging.getLogger(__name__)
_lock = threading.Lock()
_callbacks: list[Callable[[Notice], None]] = []


def on_notice(callback: Callable[[Notice], None]) -> Callable[[], None]:
    """Have `callback` told of every notice that is heard in this process from now on, whatever its source.

    In a host's process these are all that its sources deliver, in a worker's those that concern itself. It is called in
    the thread that hears of them, not in the one that trains; it should return soon. What it raises
    is logged and changes nothing.

    Returns:
        A function that takes it back.
    """
    entry: list[Callable[[Notice], None]] = [callback]
    with _lock:
        _callbacks.append(entry[0])

    def take_back() -> None:
        with _lock:
            if entry:
                _callbacks.remove(entry.pop())

    return take_back


def tell(notice: Notice) -> None:
    """Tell everybody who wants to be told; what they raise is logged."""
    with _lock:
        told = tuple(_callbacks)
    for callback in told:
        try:
            callback(notice)
        except Exception as error:  # of somebody else's code; the next notice must still be heard
            _log.error("a callback for notices failed: %s: %s", type(error).__name__, error)


class CallbackListener(Listener):
    """The source for notices that the program itself makes."""

    source: ClassVar[str] = "program"

    def __init__(self, host: str | None = None, clock: Clock | None = None) -> None:
        self.host = host or socket.gethostname()
        self.clock = clock or Clock()
        self._numbers = itertools.count(1)
        self._deliver: Deliver | None = None

    def start(self, deliver: Deliver) -> None:
        self._deliver = deliver

    def stop(self) -> None:
        self._deliver = None

    def announce(
        self,
        kind: Kind = Kind.LEAVE,
        seconds: float | None = None,
        hosts: Sequence[str] = (),
        detail: str = "announced by the program",
        id: str | None = None,
    ) -> Notice:
        """Say that hosts (default: this one) are to leave.

        Args:
            seconds: that are left; None: no deadline.
            id: the same for repeats; default: another one each time.

        Raises:
            CapslogError: nobody listens.
        """
        deliver = self._deliver
        if deliver is None:
            raise CapslogError("a notice was announced and nobody listens; start listening first")
        deadline = None
        if seconds is not None:
            deadline = Deadline(self.clock.monotonic() + max(0.0, seconds), f"{seconds:g} s from the announcement")
        name = id if id is not None else f"announced-{next(self._numbers)}"
        notice = Notice(kind, self.source, name, tuple(hosts) or (self.host,), deadline, detail=detail)
        deliver(notice)
        return notice
