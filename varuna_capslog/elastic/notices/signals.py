"""Notices by signal: Slurm, Kubernetes, a terminal that closes, and any sender of SIGTERM or SIGUSR1.

The handler only puts a number into a queue; a thread makes the notice of it. Signals carry no deadline, so the budget
is a parameter; `signal_meanings` has the default of each sender:

- Kubernetes: SIGTERM, then SIGKILL after terminationGracePeriodSeconds (30 s, preStop time included). GKE gives 15 of
  the 30 s of a preemption to ordinary pods: that is the default here.
- Slurm: at preemption SIGCONT and SIGTERM, SIGKILL after GraceTime or KillWait (30 s); `--signal=USR1@120` sends
  SIGUSR1 that many seconds before the time limit (60 s by default).
- torchrun passes SIGTERM on to its workers at once and kills them after 30 s; SIGUSR1 only where it is told to.
"""

from __future__ import annotations

import os
import queue
import signal
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any, ClassVar

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.base.processes import is_spared
from varuna_capslog.base.threads import OwnedThread, logged
from varuna_capslog.elastic.notices.interface import Clock, Deadline, Deliver, Kind, Listener, Notice

__all__ = ["Meaning", "SignalListener", "plain", "signal_meanings"]


@dataclass(frozen=True, slots=True)
class Meaning:
    """The meaning of a signal.

    Attributes:
        kind: of the notice.
        seconds: from the signal to the end.
        wall_limit: seconds since 1970 when all ends in any case (a job's time limit).
    """

    kind: Kind
    seconds: float
    wall_limit: float | None = None


class SignalListener(Listener):
    """Turns signals into notices, in the process that installed it; a handler that was there before is called too.

    A child that was forked from this process (a data loader's worker) does as if there were no handler: it ends.

    Args:
        meanings: by signal; see `plain` and `signal_meanings`.
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
        """Put the former handlers back where nobody has replaced ours since.

        From another thread than the main one Python cannot: then the next signal finds ours, which steps aside.
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
    """The meanings of signals in a process with these variables: Slurm's or Kubernetes' budgets where theirs are set.

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
