"""Notices by signal: Slurm, Kubernetes, a terminal that closes, and any sender of SIGTERM or SIGUSR1.

The handler only puts a number into a queue; a thread makes the notice of it. Signals carry no deadline, so the budget
is a parameter; `signal_meanings` has the default of each sender:

- Kubernetes: SIGTERM, then SIGKILL after terminationGracePeriodSeconds (30 s, preStop time included). GKE gives 15 of
  the 30 s of a preemption to ordinary pods: that is the default here.
- Slurm: at preemption SIGCONT and SIGTERM, SIGKILL after GraceTime or KillWait (30 s); `--signal=USR1@120` sends
  SIGUSR1 that many seconds before the time limit (60 s by default).
- torchrun passes SIGTERM on to its workers at once and kills them after 30 s; SIGUSR1 only on request.
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar

from varuna_capslog.base import fields, files
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.base.processes import OwnedThread, is_spared, logged
from varuna_capslog.elastic.notices.interface import (
    Clock,
    Deadline,
    Deliver,
    Kind,
    Listener,
    Notice,
    PollingListener,
    Round,
    Unavailable,
)

__all__ = ["FileListener", "SignalListener", "plain", "signal_meanings"]


@dataclass(frozen=True, slots=True)
class Meaning:
    """Kind of notice of a signal, and its seconds to the end. wall_limit: when all ends, seconds since 1970."""

    kind: Kind
    seconds: float
    wall_limit: float | None = None


class SignalListener(Listener):
    """Turns signals (`meanings`) into notices, in the process that installed it; also calls an earlier handler.

    A child that was forked from this process (a data loader's worker) acts as if there were no handler: it ends.
    """

    source: ClassVar[str] = "signal"

    def __init__(self, meanings: Mapping[signal.Signals, Meaning], host: str = "", clock: Clock = Clock()) -> None:  # noqa: B008
        super().__init__(host, clock=clock)
        self.meanings = dict(meanings)
        self._before: dict[signal.Signals, Any] = {}
        # SimpleQueue.put may interrupt itself: the one queue that a handler may use.
        self._caught: queue.SimpleQueue[tuple[int, float] | None] = queue.SimpleQueue()
        self._thread: OwnedThread | None = None
        self._owner = os.getpid()
        self._stopped = False

    def start(self, deliver: Deliver) -> None:
        """Install the handlers. Only the main thread may, in Python; elsewhere this raises CapslogError."""
        if threading.current_thread() is not threading.main_thread():
            raise CapslogError("signals can only be listened to from the main thread; start this listener there")
        if self._thread is not None:
            raise CapslogError("the signal listener was started before; make a new one")
        self._owner = os.getpid()
        self._thread = OwnedThread("notices-signal", self._run, logged, deliver)
        self._thread.start()
        for number in (number for number in self.meanings if not is_spared(number)):
            self._before[number] = signal.signal(number, self._handle)

    def stop(self) -> None:
        """Restore the former handlers where ours have not been replaced since.

        Python cannot do that in another thread than the main one: then the next signal reaches ours, which steps aside.
        """
        self._stopped = True
        if threading.current_thread() is threading.main_thread():
            for number, before in self._before.items():
                if signal.getsignal(number) == self._handle:
                    signal.signal(number, before if before is not None else signal.SIG_DFL)
        if self._thread is not None:
            self._caught.put(None)
            self._thread.join(1.0)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._stopped or os.getpid() != self._owner:
            before = self._before.get(signal.Signals(number), signal.SIG_DFL)
            signal.signal(number, before if self._stopped and before is not None else signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self._caught.put((number, self.clock.monotonic()))
        before = self._before.get(signal.Signals(number))
        if callable(before) and before is not signal.default_int_handler:
            before(number, frame)

    def _run(self, deliver: Deliver) -> None:
        count = 0
        while (caught := self._caught.get()) is not None:
            count += 1
            deliver(self._notice(*caught, count))

    def _notice(self, number: int, at: float, count: int) -> Notice:
        name = signal.Signals(number).name
        meaning = self.meanings[signal.Signals(number)]
        deadline = Deadline(at + meaning.seconds, f"{meaning.seconds:g} s from the signal")
        if meaning.wall_limit is not None:
            remaining = meaning.wall_limit - self.clock.wall()
            limit = Deadline(self.clock.monotonic() + max(0.0, remaining), "the job's time limit")
            deadline = min(deadline, limit, key=lambda candidate: candidate.at)
        return Notice(meaning.kind, self.source, f"{name}-{count}", (self.host,), deadline, detail=name)


def plain(seconds: float = 30.0) -> dict[signal.Signals, Meaning]:
    """SIGTERM, and SIGHUP when a terminal closes: leave now. SIGUSR1: leave. All with so many seconds."""
    now = Meaning(Kind.NOW, seconds)
    return {signal.SIGTERM: now, signal.SIGHUP: now, signal.SIGUSR1: Meaning(Kind.LEAVE, seconds)}


def signal_meanings(environ: Mapping[str, str]) -> dict[signal.Signals, Meaning]:
    """Meanings of signals in a process with these variables: Slurm's or Kubernetes' budgets where theirs are set.

    Slurm's job time limit (SLURM_JOB_END_TIME) bounds both of its budgets.
    """
    if "SLURM_JOB_ID" in environ:
        text = environ.get("SLURM_JOB_END_TIME", "")
        limit = float(text) if text.isascii() and text.isdigit() else None
        return {
            **plain(),
            signal.SIGTERM: Meaning(Kind.NOW, 30.0, limit),
            signal.SIGUSR1: Meaning(Kind.LEAVE, 60.0, limit),
        }
    return plain(15.0) if "KUBERNETES_SERVICE_HOST" in environ else plain()


# -- Notices by file: a file that appears or changes names the hosts that are to leave, and when. For scripts, people.
#
# An empty file means "this host is to leave". Otherwise it is a JSON object with any of `kind` ("hint", "leave",
# "now"), `seconds` (from when the file was written), `hosts`, `id` and `detail`; anything else is refused in the log.


_log = logging.getLogger(__name__)

LARGEST_FILE = 1 << 16
FILE_SECONDS = 30.0
"""Budget where the file names none."""


class FileListener(PollingListener):
    """Reads `path` several times a second; a file that exists at the start counts, too. On a shared file system every
    host sees the file, so it should name `hosts`.
    """

    source: ClassVar[str] = "file"

    def __init__(
        self,
        path: str | os.PathLike[str],
        host: str = "",
        interval: float = 0.2,
        clock: Clock = Clock(),  # noqa: B008
    ) -> None:
        super().__init__(host, interval=interval, clock=clock)
        self.path = Path(path)
        self._seen: tuple[int, int, int] | None = None
        self._refused: tuple[int, int, int] | None = None

    def rounds(self) -> Sequence[Callable[[], Round]]:
        return (self.ask,)

    def ask(self) -> Round:
        """Read the file once. A file that cannot be understood yet may be half written: it is read again."""
        try:
            status = os.stat(self.path)
            version = (status.st_ino, status.st_mtime_ns, status.st_size)
            if version == self._seen:
                return Round((), self.interval)
        except FileNotFoundError:
            self._seen = None
            return Round((), self.interval)
        except OSError as error:
            raise Unavailable(str(error)) from error
        try:
            notice = self._notice(files.read_bytes(self.path, LARGEST_FILE), status.st_mtime, status.st_mtime_ns)
        except CapslogError as error:
            if version != self._refused:
                _log.warning("notice file %s is refused: %s", self.path, error)
            self._refused = version
            return Round((), self.interval)
        self._seen = version
        return Round((notice,), self.interval)

    def _notice(self, text: bytes, written: float, version: int) -> Notice:
        try:
            value = files.parse_json(text, "it") if text.strip() else {}
        except CapslogError as error:
            raise CapslogError(f"it holds no JSON: {text[:60]!r}") from error
        if not isinstance(value, dict):
            raise CapslogError("it must be empty or one JSON object of at most 64 KiB")
        fields.refuse_unknown(value, ["kind", "seconds", "hosts", "id", "detail"])
        names = {kind.name.lower(): kind for kind in Kind}
        kind = value.get("kind", "leave")
        if not isinstance(kind, str) or kind not in names:
            raise CapslogError(f"kind is {kind!r}; known: {', '.join(names)}")
        seconds = fields.seconds(value.get("seconds", FILE_SECONDS), "seconds")
        hosts = tuple(fields.text(host, "hosts") for host in fields.listed(value.get("hosts", [self.host]), "hosts"))
        # A file from the future (clocks of a shared file system) counts as written now.
        age = max(0.0, self.clock.wall() - written)
        deadline = Deadline(self.clock.monotonic() + max(0.0, seconds - age), f"{seconds:g} s from when it was written")
        name = fields.text(value.get("id", f"{self.path}@{version}"), "id")
        detail = fields.text(value.get("detail", self.path.name), "detail")
        return Notice(names[kind], self.source, name, hosts or (self.host,), deadline, detail=detail)
