"""Which workers of a host must be killed: those that are stopped, hang, or were taken for dead by another host."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from varuna_capslog.base.processes import is_stopped
from varuna_capslog.config.settings import Elastic
from varuna_capslog.elastic.host.workers import HostWorker, HostWorkers
from varuna_capslog.membership.entries import BrokenEntry, DeadEntry, Entry, FinishedEntry
from varuna_capslog.membership.roster import Roster

__all__ = ["WorkerWatch"]

FAREWELL_SECONDS = 60.0  # so long a worker may take to end after the run has finished


class WorkerWatch:
    """Looks at the living workers and at the log.

    Args:
        roster: what the log says so far; kept by the host.
    """

    def __init__(self, settings: Elastic, roster: Roster) -> None:
        self._settings, self._roster = settings, roster
        self._breaks: dict[int, float] = {}
        self._ended_at: float | None = None

    def take(self, entry: Entry | None, workers: HostWorkers) -> None:
        """An entry of the log; None: of a kind that is unknown here."""
        match entry:
            case FinishedEntry():
                self._ended_at = time.monotonic()
            case BrokenEntry(generation):
                self._breaks.setdefault(generation, time.monotonic())
            case DeadEntry(member):
                worker = workers.by_member.get(member)
                if worker is not None and not worker.ended:
                    # Others shun it from now on; it hears so itself and goes.
                    worker.expelled_since = worker.expelled_since or time.monotonic()

    def verdicts(self, now: float, living: Sequence[HostWorker]) -> Iterator[tuple[HostWorker, str]]:
        """The workers to be killed now, and why. Some may come twice, or be under the same verdict already."""
        settings = self._settings
        for worker in living:
            if worker.pid is None or worker.verdict is not None:
                continue
            if self._ended_at is not None and now - self._ended_at > FAREWELL_SECONDS:
                yield worker, f"did not end within {FAREWELL_SECONDS:g} s after the run and was killed"
            stopped = is_stopped(worker.pid)
            worker.stopped_since = (worker.stopped_since or now) if stopped else None
            if worker.stopped_since is not None and now - worker.stopped_since > settings.stopped_seconds:
                yield worker, "was stopped (SIGSTOP, or a debugger) and killed"
            elif worker.expelled_since is not None and now - worker.expelled_since > settings.hang_seconds:
                yield worker, "was taken for dead by another host and killed"
        for generation, since in list(self._breaks.items()):
            if now - since > settings.hang_seconds:
                del self._breaks[generation]
                patience = f"{settings.hang_seconds:g} s after generation {generation} broke"
                for worker in living:
                    if worker.member in self._roster.silent(generation):
                        yield worker, f"did not answer within {patience} and was killed"
