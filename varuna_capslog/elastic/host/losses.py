"""The workers of a host that failed: what the user reads about each, and which failure ends the run."""

from __future__ import annotations

import time

from varuna_capslog.base.failures import Failure, read_failure, root_cause
from varuna_capslog.base.processes import last_line, signal_name
from varuna_capslog.base.supervisor import WorkerFailed
from varuna_capslog.elastic.host.options import HostOptions
from varuna_capslog.elastic.host.workers import HostWorker, HostWorkers
from varuna_capslog.membership.roster import Roster

__all__ = ["SETTLE_SECONDS", "Losses"]

SETTLE_SECONDS = 0.3
"""By then the log's entries from before a worker's end have been heard."""


class Losses:
    """Failures of this host's workers.

    Args:
        roster: what the log says so far; kept by the host.

    Attributes:
        failures: oldest first.
    """

    def __init__(self, options: HostOptions, roster: Roster) -> None:
        self.failures: list[Failure] = []
        self._folder, self._say, self._roster = options.folder, options.say, roster
        self._said: set[str] = set()
        self._unsaid: list[tuple[float, str]] = []

    def failure(self, worker: HostWorker, status: int, workers: HostWorkers, killed_as_asked: bool) -> Failure:
        """What happened to a worker that ended.

        Args:
            status: its exit status, or minus the number of the signal that ended it.
        """
        if worker.verdict is not None:
            return Failure(worker.slot, worker.verdict, "signal", time.time(), member=worker.member)
        if status < 0:
            cause = "was killed as asked" if killed_as_asked else f"was killed by {signal_name(-status)}"
            return Failure(worker.slot, cause, "signal", time.time(), member=worker.member)
        reported = read_failure(self._folder / f"{worker.member}.error.json", worker.slot, None, worker.member)
        cause = f"exit status {status}: {last_line(workers.log(worker.member))}"
        return reported or Failure(worker.slot, cause, "exit", time.time(), member=worker.member)

    def add(self, failure: Failure, aloud: bool) -> None:
        """Keeps a failure.

        Args:
            aloud: whether the user is to read it, too; a sentence is said once.
        """
        self.failures.append(failure)
        if aloud and failure.sentence() not in self._said:
            self._said.add(failure.sentence())  # what all have agreed on, all of them report
            # the log may tell that it is everybody's failure: then it is the end's sentence
            self._unsaid.append((time.monotonic() + SETTLE_SECONDS * (failure.kind != "signal"), failure.sentence()))
            self.say()

    def say(self, all_of_them: bool = False) -> None:
        """Says what is due, or all; nothing once the run has ended by a failure that stops every member."""
        unsaid, self._unsaid = self._unsaid, []
        for due, sentence in unsaid if self._roster.failed_for_all is None else ():
            if all_of_them or time.monotonic() >= due:
                self._say(sentence)
            else:
                self._unsaid.append((due, sentence))

    def root(self, since: float, workers: HostWorkers) -> WorkerFailed:
        """The error that ends a run of which all workers here have failed.

        Args:
            since: wall time at which the newest generation began; what happened before was survived.
        """
        last = [one for one in self.failures if one.time >= since] or self.failures
        root = root_cause(last)
        alike = len(last) > 1 and all(one.cause == root.cause for one in last)
        return WorkerFailed(root, workers.log(str(root.member)), everywhere=alike)
