"""Passes notices from the sources of a host to callbacks: drops repeats, joins notices that come close together.

Nothing is decided here: `member/runtime` turns notices into requests.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.base.processes import OwnedThread, logged
from varuna_capslog.elastic.notices.clouds import (
    LINK_LOCAL,
    AwsListener,
    AzureListener,
    GcpListener,
    HttpOpener,
    MetadataListener,
)
from varuna_capslog.elastic.notices.interface import Deadline, Deliver, Kind, Listener, Notice, Unavailable
from varuna_capslog.elastic.notices.signals import FileListener, SignalListener, signal_meanings

__all__ = [
    "Announcement",
    "CallbackListener",
    "Gathering",
    "auto_sources",
    "detect_cloud",
    "on_notice",
    "tell",
]

_log = logging.getLogger(__name__)
_lock = threading.Lock()
_callbacks: list[Callable[[Notice], None]] = []

CLOUDS: dict[str, type[MetadataListener]] = {cloud.source: cloud for cloud in (AwsListener, GcpListener, AzureListener)}


def detect_cloud(timeout: float = 1.0, endpoint: str = LINK_LOCAL) -> str | None:
    """Return the cloud whose metadata server answers: aws, gcp or azure; None if none did within `timeout` seconds."""
    answers: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    asks = HttpOpener()

    def ask(name: str) -> None:
        try:
            answers.put(name if CLOUDS[name].answers(asks, endpoint, timeout) else None)
        except Unavailable:
            answers.put(None)

    for name in CLOUDS:
        OwnedThread(f"notices-detect-{name}", ask, lambda error: answers.put(None), name).start()
    until = time.monotonic() + timeout
    cloud = None
    with contextlib.suppress(queue.Empty):
        for _ in CLOUDS:
            cloud = answers.get(timeout=max(0.0, until - time.monotonic()))
            if cloud:
                break
    asks.cut()
    return cloud


def auto_sources(
    host: str = "",
    file: str | os.PathLike[str] | None = None,
    timeout: float = 1.0,
    environ: Mapping[str, str] | None = None,
    endpoint: str = LINK_LOCAL,
) -> tuple[Listener, ...]:
    """Return listeners for this host, not started: program, signals (in the main thread only), `file` and cloud.

    host: its name in the run. timeout: seconds of the search for a cloud. environ: default: this process's.
    """
    environ = os.environ if environ is None else environ
    sources: list[Listener] = [CallbackListener(host)]
    if threading.current_thread() is threading.main_thread():
        sources.append(SignalListener(signal_meanings(environ), host))
    if file is not None:
        sources.append(FileListener(file, host))
    cloud = detect_cloud(timeout, endpoint)
    if cloud is not None:
        sources.append(CLOUDS[cloud](host, endpoint=endpoint))
    _log.info("notices are listened for from: %s", ", ".join(source.source for source in sources))
    return tuple(sources)


def on_notice(callback: Callable[[Notice], None]) -> Callable[[], None]:
    """Call `callback` with every notice that reaches this process from now on, from any source.

    A host's process gets all notices of its sources, a worker's process those for itself. The call is made in the
    thread that receives the notices, not in the one that trains, and should return soon. Its exceptions are only
    logged.

    Returns:
        A function that removes the callback.
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
    """Call all callbacks; their exceptions are logged."""
    with _lock:
        callbacks = tuple(_callbacks)
    for callback in callbacks:
        _call(callback, notice)


def _call(callback: Callable[[Any], None], notices: Notice | Announcement) -> None:
    try:
        callback(notices)
    except Exception as error:  # in a user's code; the next notice must still be passed on
        _log.error("a callback for notices failed: %s: %s", type(error).__name__, error)


class CallbackListener(Listener):
    """Source of the program's own notices (schedulers, notebooks, tests); call `announce` from any thread."""

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
        """Announce that hosts (default: this one) must leave. Raises CapslogError unless the listener is started.

        seconds: until the deadline; None: no deadline. id: the same for repeats; default: a new id for each call.
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


@dataclass(frozen=True, slots=True)
class Announcement:
    """Notices that came close together, at least one, to be handled by one change of the membership."""

    notices: tuple[Notice, ...]

    @property
    def hosts(self) -> tuple[str, ...]:
        """Hosts that must leave, in the order in which the notices named them."""
        return tuple(dict.fromkeys(host for notice in self.notices for host in notice.hosts))

    @property
    def kind(self) -> Kind:
        """Strongest kind."""
        return max(notice.kind for notice in self.notices)

    def of(self, host: str) -> Notice | None:
        """Strongest notice for a host, with the earliest deadline of all notices to leave; None: there is no notice."""
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
    """Listens to all sources from now on. If one of them cannot start, none is left running.

    callback: called in a thread of its own with each announcement. window: seconds from the first notice in which
    further ones are added to its announcement; kind NOW does not wait.
    """

    def __init__(
        self, sources: Sequence[Listener], callback: Callable[[Announcement], None], window: float = 0.05
    ) -> None:
        self._sources = tuple(sources)
        self._window = window
        self._callback = callback
        self._notices: queue.SimpleQueue[Notice | None] = queue.SimpleQueue()
        self._kinds: dict[tuple[str, str], Kind] = {}
        self._thread = OwnedThread("notices", self._run, logged)
        self._thread.start()
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(self._end)
            for source in self._sources:
                source.start(self._notices.put)
                on_failure.callback(source.stop)
            on_failure.pop_all()

    def stop(self) -> None:
        """Stop all sources, within a few seconds. Notices received before are still passed on."""
        for source in self._sources:
            source.stop()
        self._end()

    def hear(self, notice: Notice) -> None:
        """Add a notice as if a source had delivered it. From any thread."""
        self._notices.put(notice)

    def host_left(self, resources_left: Collection[str] = ()) -> tuple[str, ...]:
        """Have every source acknowledge that the last rank of this host has left; see `Listener.host_left`."""
        return tuple(name for source in self._sources for name in source.host_left(resources_left))

    def __enter__(self) -> Gathering:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _end(self) -> None:
        self._notices.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(2.0)

    def _run(self) -> None:
        ended = False
        while not ended:
            notices: list[Notice] = []
            until: float | None = None  # end of the window, which the first new notice opens
            while True:
                try:
                    notice = self._notices.get(timeout=None if until is None else max(0.0, until - time.monotonic()))
                except queue.Empty:
                    break
                if notice is None:
                    ended = True
                    break
                if not self._is_new(notice):
                    continue
                notices.append(notice)
                if notice.kind is Kind.NOW:  # no time to wait for further notices
                    break
                if until is None:
                    until = time.monotonic() + self._window
            if notices:
                self._tell(Announcement(tuple(notices)))

    def _is_new(self, notice: Notice) -> bool:
        """True for a notice that is stronger than all earlier ones of its source and id."""
        name = (notice.source, notice.id)
        if notice.kind <= self._kinds.get(name, 0):
            return False
        self._kinds[name] = notice.kind
        return True

    def _tell(self, announcement: Announcement) -> None:
        for notice in announcement.notices:
            _log.info("notice from %s", notice)
        _call(self._callback, announcement)
        for notice in announcement.notices:
            tell(notice)
