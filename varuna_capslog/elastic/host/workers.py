"""The worker processes of one host: forked by its nursery, signalled and killed here.

Nothing here decides about the membership; `host` does, from what `HostWorkers.heard` returns.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from varuna_capslog.base.processes import is_stopped, signal_group, write_unless_there
from varuna_capslog.elastic.host.fork_server import ForkServer
from varuna_capslog.elastic.host.options import HostOptions
from varuna_capslog.membership.generation import Member

__all__ = ["HostWorker", "HostWorkers"]

_QUIET = {
    # torch asks for the name of every peer; a lost answer costs 1 s instead of 5
    "RES_OPTIONS": "timeout:1 attempts:5",
    # the error for a lost peer or store is one sentence, without C++ stacks
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "OMP_NUM_THREADS": "1",
}


@dataclass
class HostWorker:
    """One process.

    Attributes:
        slot: number of its device here.
        pid: None until the nursery has forked it.
        verdict: why it was killed by us.
        stopped_since: when it was first seen stopped, by the monotonic clock.
        expelled_since: when the log said that it is dead while it lived.
    """

    member: Member
    slot: int
    pid: int | None = None
    ended: bool = False
    verdict: str | None = None
    stopped_since: float | None = None
    expelled_since: float | None = None


class HostWorkers:
    """All workers that this host ever had.

    Args:
        host: the host's name in the run.
        hear: called from another thread with what the nursery says, for `heard`.

    Attributes:
        by_member: every worker, also those that have ended.
        nursery_gone: no worker can be started any more.
    """

    def __init__(self, options: HostOptions, host: str, hear: Callable[[Mapping[str, Any]], None]) -> None:
        self.by_member: dict[Member, HostWorker] = {}
        self.nursery_gone = False
        self._host, self._folder = host, options.folder
        self._run_dir = str(options.run_dir)
        self._arguments = [self._run_dir] if options.arguments is None else options.arguments
        self._signal: int | None = None
        environment = {**_QUIET, **os.environ, **options.environment, "CAPSLOG_RUN_DIR": self._run_dir}
        self._nursery_log = self._folder / f"{host}.nursery.log"
        self.nursery = ForkServer(options.entry, hear, self._nursery_log, tuple(options.modules), environment)

    def close(self) -> None:
        """Ends the nursery and all workers that are left."""
        self.nursery.close()

    def living(self) -> list[HostWorker]:
        """Those that have not ended."""
        return [worker for worker in self.by_member.values() if not worker.ended]

    def log(self, member: Member) -> Path:
        """The file with what a worker prints."""
        return self._folder / f"{member}.log"

    def free_slot(self) -> int:
        """The lowest device number without a living worker."""
        taken = {worker.slot for worker in self.living()}
        return next(number for number in range(len(taken) + 1) if number not in taken)

    def start(self, member: Member, slot: int, variables: Mapping[str, str]) -> None:
        """Asks the nursery for a worker."""
        self.by_member[member] = HostWorker(member, slot)
        own = {"CAPSLOG_MEMBER": member, "CAPSLOG_RUN_DIR": self._run_dir, "CAPSLOG_LOCAL_RANK": str(slot)}
        self.nursery.fork(
            {
                "member": member,
                "environment": {**variables, **own},
                "log": str(self.log(member)),
                "arguments": self._arguments,
            }
        )

    def heard(self, what: Mapping[str, Any]) -> list[tuple[HostWorker, int]]:
        """Takes what the nursery says.

        Returns:
            The workers that have ended, each with its exit status, or minus the number of the signal that ended it.
        """
        if "gone" in what:
            self.nursery_gone = True
            ended = [(worker, -int(signal.SIGKILL)) for worker in self.living()]
            for worker, _ in ended:
                worker.verdict = worker.verdict or f"was lost with its nursery (see {self._nursery_log})"
        elif "signal" in what or "status" in what:
            status = -what["signal"] if "signal" in what else what["status"]
            ended = [(self.by_member[what["member"]], status)]
        else:
            if "member" in what:
                self._forked(self.by_member[what["member"]], what["pid"])
            return []
        for worker, _ in ended:
            worker.ended = True
        return ended

    def _forked(self, worker: HostWorker, pid: int) -> None:
        worker.pid = pid
        known = {"member": worker.member, "pid": pid, "host": self._host}
        write_unless_there(self._folder / f"{worker.member}.json", known)
        if self._signal is not None:
            signal_group(pid, self._signal)

    def signal(self, number: int) -> None:
        """Sends a signal to every worker, and to those that are still being forked."""
        self._signal = number
        for worker in self.living():
            if worker.pid is not None:
                signal_group(worker.pid, number)

    def kill(self, worker: HostWorker, verdict: str) -> None:
        """Kills a worker. The log hears of it only when the nursery has seen its end."""
        if worker.verdict is None and worker.pid is not None:
            worker.verdict = verdict
            signal_group(worker.pid, signal.SIGKILL)

    def wake_nursery(self) -> None:
        """Continues a nursery that was stopped: it has no reason to be, and tells nothing while it is."""
        if is_stopped(self.nursery.pid):
            signal_group(self.nursery.pid, signal.SIGCONT)
