"""Notices from and to Python: a program announces one itself, or has a function called with every notice.

For schedulers with an API of their own, for notebooks and tests. `announce` may be called from any thread.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Sequence
from typing import ClassVar

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.elastic.notices.interface import Deadline, Deliver, Kind, Listener, Notice

__all__ = ["CallbackListener", "on_notice", "tell"]

_log = logging.getLogger(__name__)
_lock = threading.Lock()
_callbacks: list[Callable[[Notice], None]] = []


def on_notice(callback: Callable[[Notice], None]) -> Callable[[], None]:
    """Call `callback` with every notice that reaches this process from now on, from any source.

    A host's process gets all that its sources deliver, a worker's those that concern itself. The call is made in the
    thread that receives the notices, not in the one that trains, and should return soon. What it raises is logged and
    changes nothing.

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
    """Calls all callbacks; what they raise is logged."""
    with _lock:
        callbacks = tuple(_callbacks)
    for callback in callbacks:
        try:
            callback(notice)
        except Exception as error:  # of somebody else's code; the next notice must still be heard
            _log.error("a callback for notices failed: %s: %s", type(error).__name__, error)


class CallbackListener(Listener):
    """The source for notices that the program itself makes."""

    source: ClassVar[str] = "program"

    def __post_init__(self) -> None:
        super().__post_init__()
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
