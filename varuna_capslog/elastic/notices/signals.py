"""Notices by signal: Slurm, Kubernetes, a terminal that closes, and any sender of SIGTERM or SIGUSR1.

The handler only puts the signal's number into a queue; a thread makes the notice. Signals carry no deadline, so the
seconds until the end are a parameter; `signal_meanings` has the default of each sender:

- Kubernetes: SIGTERM, then SIGKILL after terminationGracePeriodSeconds (30 s, preStop time included). At a preemption
  GKE gives ordinary pods 15 of the 30 s, which is the default here.
- Slurm: at preemption SIGCONT and SIGTERM, SIGKILL after GraceTime or KillWait (30 s); `--signal=USR1@120` sends
  SIGUSR1 120 s before the time limit (without a number 60 s, the default here).
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
    """Kind of notice of a signal, and the seconds until the end. wall_limit: end of the job, in seconds since 1970."""

    kind: Kind
    seconds: float
    wall_limit: float | None = None


class SignalListener(Listener):
    """Turns signals (`meanings`) into notices in the process that started it, and calls earlier handlers as well.

    In a child forked from this process (a data loader's worker) the signal has its default action: the child ends.
    """

    source: ClassVar[str] = "signal"

    def __init__(self, meanings: Mapping[signal.Signals, Meaning], host: str = "", clock: Clock = Clock()) -> None:  # noqa: B008
        super().__init__(host, clock=clock)
        self.meanings = dict(meanings)
        self._before: dict[signal.Signals, Any] = {}
        # SimpleQueue.put is reentrant, so a signal handler may call it; queue.Queue.put is not.
        self._caught: queue.SimpleQueue[tuple[int, float] | None] = queue.SimpleQueue()
        self._thread: OwnedThread | None = None
        self._owner = os.getpid()
        self._stopped = False

    def start(self, deliver: Deliver) -> None:
        """Install the handlers. Raises CapslogError outside the main thread, where Python refuses handlers."""
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
        """Restore the earlier handlers, unless ours have been replaced since.

        Python can do this in the main thread only. Otherwise ours stays until the next signal, and then restores them.
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
    """Return the meanings: SIGTERM, and SIGHUP when a terminal closes: leave now; SIGUSR1: leave; all in `seconds`."""
    now = Meaning(Kind.NOW, seconds)
    return {signal.SIGTERM: now, signal.SIGHUP: now, signal.SIGUSR1: Meaning(Kind.LEAVE, seconds)}


def signal_meanings(environ: Mapping[str, str]) -> dict[signal.Signals, Meaning]:
    """Return the meanings of signals by environment variables: with the seconds of Slurm or Kubernetes in such a job.

    In Slurm the job's end (SLURM_JOB_END_TIME) limits them.
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


# -- Notices by file, for scripts and people: a file that appears or changes names the hosts that must leave, and when.
#
# An empty file means "this host must leave". Otherwise it is a JSON object with any of `kind` ("hint", "leave",
# "now"), `seconds` (from when the file was written), `hosts`, `id` and `detail`; others are refused with a warning.


_log = logging.getLogger(__name__)

LARGEST_FILE = 1 << 16
FILE_SECONDS = 30.0
"""Seconds until the deadline where the file gives none."""


class FileListener(PollingListener):
    """Reads the file `path` every `interval` seconds; a file that exists at the start counts, too. On a shared file
    system every host sees the file, so it should name `hosts`.
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
        self._seen_version: tuple[int, int, int] | None = None
        self._refused: tuple[int, int, int] | None = None

    def rounds(self) -> Sequence[Callable[[], Round]]:
        return (self.ask,)

    def ask(self) -> Round:
        """Read the file once. A file that cannot be understood yet may be half written: it is read again."""
        try:
            status = os.stat(self.path)
            version = (status.st_ino, status.st_mtime_ns, status.st_size)
            if version == self._seen_version:
                return Round((), self.interval)
        except FileNotFoundError:
            self._seen_version = None
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
        self._seen_version = version
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
        # A file with a time in the future (another machine's clock) counts as written now.
        age = max(0.0, self.clock.wall() - written)
        deadline = Deadline(self.clock.monotonic() + max(0.0, seconds - age), f"{seconds:g} s from when it was written")
        name = fields.text(value.get("id", f"{self.path}@{version}"), "id")
        detail = fields.text(value.get("detail", self.path.name), "detail")
        return Notice(names[kind], self.source, name, hosts or (self.host,), deadline, detail=detail)
