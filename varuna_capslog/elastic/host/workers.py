"""Worker processes of one host: has them forked, watches, signals and kills them, and words their failures.

Detects hung workers: `HostWorkers.kill_hung` kills those that are stopped, do not answer after their generation broke,
or were declared dead. The fork server reports ended processes; `host.Host` reads `note_exits` and tells the log.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from varuna_capslog.base.clock import wall_seconds
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.base.failures import Failure, exit_failure, read_failure, root_cause
from varuna_capslog.base.fork_server import PRELOADED, ForkServer
from varuna_capslog.base.machine_memory import MemoryKills
from varuna_capslog.base.processes import is_stopped, signal_group, write_unless_there
from varuna_capslog.base.supervisor import WorkerFailed
from varuna_capslog.config.settings import Elastic
from varuna_capslog.elastic.network import network_variables
from varuna_capslog.elastic.notices.interface import Listener
from varuna_capslog.membership.entries import BrokenEntry, DeadEntry, Entry, FinishedEntry, Roster
from varuna_capslog.membership.generation import INITIAL, Member, Stamp

__all__ = ["SETTLE_SECONDS", "HostOptions", "HostWorker", "HostWorkers", "member_server"]


# -- Options of a host: its run, its workers, its store.


@dataclass(frozen=True)
class HostOptions:
    """Options of a `Host`. Raises CapslogError for fewer than one worker.

    Attributes:
        run_dir: the run's folder, shared by all hosts.
        entry: "module:function" that a worker runs; set by the start-up.
        arguments: the argument of `entry` (any JSON value); default: [run_dir].
        num_workers: devices of this host.
        name: of this host in the run; default: the machine's host name. A second host with the same name gets a suffix.
        store: address of the run's store; None: this host begins the run, and locks its folder.
        serve_at: "host:port" at which other hosts reach the store that this host serves (port 0: any free port); or the
            address of a store in etcd (see `elastic/store/etcd_store`), which needs no host to serve it.
        keys: keys and values that the host that begins the run puts into the store before its first worker starts.
        first: the boundary that the run begins with.
        hosts: number of hosts that begin together. The host that begins the run founds the first generation once all
            have named their workers; a later host joins.
        environment: variables for workers on top of this process's own.
        say: prints one line for the user.
        look: called again and again; True: the caller wants the run to end after the step under way.
        sources: of notices; None: those of `auto_sources`, and the file `run_dir/notices/<host>`.
        modules: imported by the fork server before it forks workers, besides the module of `entry`.
        fork_server: a running server with this entry, which the host closes; None: the host starts one.
    """

    run_dir: Path
    entry: str = ""
    arguments: Any = None
    num_workers: int = 1
    name: str | None = None
    store: str | None = None
    serve_at: str = "127.0.0.1:0"
    keys: Mapping[str, str] = field(default_factory=dict)
    first: Stamp = INITIAL
    hosts: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)
    settings: Elastic = field(default_factory=Elastic)
    say: Callable[[str], None] = lambda line: None
    look: Callable[[], bool] = lambda: False
    sources: Sequence[Listener] | None = None
    modules: Sequence[str] = PRELOADED
    fork_server: ForkServer | None = None

    def __post_init__(self) -> None:
        if self.num_workers < 1:
            raise CapslogError(f"num_workers={self.num_workers}; a host needs at least one worker")

    @property
    def serves(self) -> bool:
        """True where this host begins the run, and serves its store unless that is in etcd."""
        return self.store is None

    @property
    def folder(self) -> Path:
        """Folder of the workers' logs."""
        return self.run_dir / "workers"


# -- Worker processes of one host


SETTLE_SECONDS = 0.3
"""Seconds after a worker's end by which this host has read the log entries that came before that end."""

FAREWELL_SECONDS = 60.0
"""Limit for a worker to end after the run has finished."""

JOIN_SECONDS = 60.0
"""Seconds from a worker's start after which the user is told that it has not joined the run."""

_QUIET = {
    # gloo resolves this machine's name; with this timeout a lost answer of the name server costs 1 s instead of 5
    "RES_OPTIONS": "timeout:1 attempts:5",
    # keeps C++ stacks out of the log: our error for a lost peer or store is one sentence
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}


def member_server(
    entry: str,
    modules: Sequence[str],
    environment: Mapping[str, str],
    hear: Callable[[Mapping[str, Any]], None] = lambda message: None,
    log: Path | None = None,
    prepared: bool = False,
) -> ForkServer:
    """Start the fork server of a host's workers; see `ForkServer`. environment: added to this process's variables."""
    return ForkServer(entry, hear, log, modules, {**_QUIET, **os.environ, **environment}, prepared)


@dataclass
class HostWorker:
    """Worker process. slot: number of its device on this host. pid: None until the fork server has forked it.

    verdict: why this host killed it. cause: the kind of that reason, a key of `base/failures.CAUSES`. All times are of
    the monotonic clock. stopped_since: when it was first seen stopped. expelled_since: when the log declared it dead
    while it lived. asked_at: when the fork server was asked for it. absence_said: its absence was printed.
    """

    member: Member
    slot: int
    pid: int | None = None
    ended: bool = False
    verdict: str | None = None
    cause: str = "hung"
    stopped_since: float | None = None
    expelled_since: float | None = None
    asked_at: float = field(default_factory=time.monotonic)
    absence_said: bool = False


class HostWorkers:
    """All workers that this host ever had.

    Args:
        roster: content of the log so far; updated by the host.
        hear: called in another thread with each message of the fork server; it must reach `note_exits`.

    Attributes:
        by_member: every worker, also those that have ended.
        failures: oldest first.
        fork_server: ends all remaining workers when it is closed.
        server_gone: the fork server has ended, so no worker can be started any more.
    """

    def __init__(
        self, options: HostOptions, host: str, roster: Roster, hear: Callable[[Mapping[str, Any]], None]
    ) -> None:
        self.by_member: dict[Member, HostWorker] = {}
        self.failures: list[Failure] = []
        self.server_gone = False
        self._options, self._host, self._roster = options, host, roster
        self._memory_kills = MemoryKills()
        self._signal: int | None = None
        self._breaks: dict[int, float] = {}
        self._finished_at: float | None = None
        self._said: set[str] = set()
        self._unsaid: list[tuple[float, str]] = []
        self._variables = {**network_variables(options.store or options.serve_at), **options.environment}
        self._server_log = options.folder / f"{host}.fork-server.log"
        if options.fork_server is None:
            self.fork_server = member_server(options.entry, options.modules, self._variables, hear, self._server_log)
        else:
            self.fork_server = options.fork_server
            self.fork_server.settle(hear, self._server_log)

    def living(self) -> list[HostWorker]:
        """The workers that have not ended."""
        return [worker for worker in self.by_member.values() if not worker.ended]

    def log(self, member: Member) -> Path:
        """File with a worker's output."""
        return self._options.folder / f"{member}.log"

    def free_slot(self) -> int:
        """Lowest device number without a living worker."""
        taken = {worker.slot for worker in self.living()}
        return next(number for number in range(len(taken) + 1) if number not in taken)

    def start(self, member: Member, slot: int, variables: Mapping[str, str]) -> None:
        """Ask the fork server for a worker."""
        self.by_member[member] = HostWorker(member, slot)
        run_dir, arguments = str(self._options.run_dir), self._options.arguments
        member_variables = {"CAPSLOG_MEMBER": member, "CAPSLOG_RUN_DIR": run_dir, "CAPSLOG_LOCAL_RANK": str(slot)}
        self.fork_server.fork(
            {
                "member": member,
                "environment": {**self._variables, **variables, **member_variables},
                "log": str(self.log(member)),
                "arguments": [run_dir] if arguments is None else arguments,
            }
        )

    def note_exits(self, message: Mapping[str, Any]) -> list[tuple[HostWorker, int]]:
        """Take a message of the fork server; return ended workers, each with its exit status or minus its signal."""
        if "gone" in message:
            self.server_gone = True
            ends = [(worker, -int(signal.SIGKILL)) for worker in self.living()]
            for worker, _ in ends:
                if worker.verdict is None:
                    why = message.get("why") or f"see {self._server_log}"
                    worker.verdict, worker.cause = f"was killed when its fork server ended ({why})", "killed"
        elif "signal" in message or "status" in message:
            status = -message["signal"] if "signal" in message else message["status"]
            ends = [(self.by_member[message["member"]], status)]
        else:
            if "member" in message:
                self._forked(self.by_member[message["member"]], message["pid"])
            return []
        for worker, _ in ends:
            worker.ended = True
        return ends

    def _forked(self, worker: HostWorker, pid: int) -> None:
        worker.pid = pid
        record = {"member": worker.member, "pid": pid, "host": self._host}
        write_unless_there(self._options.folder / f"{worker.member}.json", record)
        if self._signal is not None:
            signal_group(pid, self._signal)

    def signal(self, number: int) -> None:
        """Send a signal to every worker, and to those that are still being forked."""
        self._signal = number
        for worker in self.living():
            if worker.pid is not None:
                signal_group(worker.pid, number)

    # -- workers that must be killed -----------------------------------------------------------------------------------

    def take(self, entry: Entry | None) -> None:
        """Take an entry of the log; None: an entry of an unknown kind."""
        match entry:
            case FinishedEntry():
                self._finished_at = time.monotonic()
            case BrokenEntry(generation):
                self._breaks.setdefault(generation, time.monotonic())
            case DeadEntry(member):
                worker = self.by_member.get(member)
                if worker is not None and not worker.ended:
                    # Other members no longer answer it. It should read this entry, too, and end; else it is killed.
                    worker.expelled_since = worker.expelled_since or time.monotonic()

    def kill_hung(self, now: float) -> None:
        """Kill the workers that are stopped, hang, or were declared dead by another host."""
        self._memory_kills.look(now)
        if is_stopped(self.fork_server.pid):  # a stopped fork server reports no ended workers
            signal_group(self.fork_server.pid, signal.SIGCONT)
        settings = self._options.settings
        for worker in self.living():
            if worker.pid is None or worker.verdict is not None:
                continue
            if self._finished_at is not None and now - self._finished_at > FAREWELL_SECONDS:
                self._kill(worker, f"did not end within {FAREWELL_SECONDS:g} s after the run and was killed")
            worker.stopped_since = (worker.stopped_since or now) if is_stopped(worker.pid) else None
            if worker.stopped_since is not None and now - worker.stopped_since > settings.stopped_seconds:
                self._kill(worker, "was stopped (SIGSTOP, or a debugger) and killed")
            elif worker.expelled_since is not None and now - worker.expelled_since > settings.hang_seconds:
                self._kill(worker, "was taken for dead by another host and killed", "host")
        for generation, since in list(self._breaks.items()):
            if now - since > settings.hang_seconds:
                del self._breaks[generation]
                within = f"{settings.hang_seconds:g} s after generation {generation} broke"
                for worker in self.living():
                    if worker.member in self._roster.silent(generation):
                        self._kill(worker, f"did not answer within {within} and was killed")

    def _kill(self, worker: HostWorker, verdict: str, cause: str = "hung") -> None:
        """Kill a worker. Its loss goes into the log when the fork server reports that the process ended."""
        if worker.verdict is None and worker.pid is not None:
            worker.verdict, worker.cause = verdict, cause
            signal_group(worker.pid, signal.SIGKILL)

    # -- workers that failed -------------------------------------------------------------------------------------------

    def failure(self, worker: HostWorker, status: int, stop_requests: int) -> Failure:
        """Record and return the failure of a worker that ended; `say_losses` prints each sentence once.

        status: its exit status, or minus the number of the signal that ended it. stop_requests: how often the user
        asked the run to stop; after the second request all workers are killed and nothing is printed.
        """
        failure = self._failure(worker, status, killed_as_asked=stop_requests > 1)
        self.failures.append(failure)
        if stop_requests < 2 and failure.sentence() not in self._said:
            self._said.add(failure.sentence())  # all workers report a step that was voted down with the same sentence
            # printed later: if the log says that the failure stops all members, only the error at the end says so
            self._unsaid.append((time.monotonic() + SETTLE_SECONDS * (failure.kind != "signal"), failure.sentence()))
        return failure

    def _failure(self, worker: HostWorker, status: int, killed_as_asked: bool) -> Failure:
        about: dict[str, Any] = {"member": worker.member}
        if worker.verdict is not None or (status < 0 and killed_as_asked):
            cause, loss = (worker.verdict, worker.cause) if worker.verdict else ("was killed as asked", "killed")
            return Failure(worker.slot, cause, "signal", wall_seconds(), loss=loss, **about)
        report = read_failure(self._options.folder / f"{worker.member}.error.json", worker.slot, None, **about)
        log, short = self.log(worker.member), self._memory_kills.any_now()
        observed_failure = exit_failure(worker.slot, status, log, wall_seconds(), memory_killed=short, **about)
        return observed_failure if status < 0 or report is None else report

    def say_losses(self, all_of_them: bool = False) -> None:
        """Print the failures that are due, or all; none if the run ended by a failure of all, which `Host` raises."""
        unsaid, self._unsaid = self._unsaid, []
        for due, sentence in unsaid if self._roster.failed_for_all is None else ():
            if all_of_them or time.monotonic() >= due:
                self._options.say(sentence)
            else:
                self._unsaid.append((due, sentence))

    def say_absent(self, now: float) -> None:
        """Print each worker that was started `JOIN_SECONDS` ago and has been in no generation; each once."""
        if self._roster.finished is not None:
            return
        for worker in self.living():
            absent = now - worker.asked_at > JOIN_SECONDS and not self._roster.was_named(worker.member)
            if absent and not worker.absence_said:
                worker.absence_said = True
                self._options.say(
                    f"worker {worker.member} (device {worker.slot} of {self._host}) has not joined the run, "
                    f"{JOIN_SECONDS:g} s after it was asked for; its output is in {self.log(worker.member)}"
                )

    def root(self, since: float) -> WorkerFailed:
        """Return the error for a host whose workers have all failed. since: when the newest generation began."""
        last = [failure for failure in self.failures if failure.time >= since] or self.failures
        root = root_cause(last)
        alike = len(last) > 1 and all(failure.cause == root.cause for failure in last)
        return WorkerFailed(root, self.log(str(root.member)), everywhere=alike)
