"""Starts the workers of a run on this machine, watches them, and ends all when one fails. No worker outlives the
supervisor, however the supervisor ends. This module never touches a tensor or a process group of torch.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Protocol

from varuna_capslog.base import files
from varuna_capslog.base.clock import wall_seconds
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.base.failures import Failure, exit_failure, is_consequence, read_failure, root_cause
from varuna_capslog.base.fork_server import ForkServer
from varuna_capslog.base.machine_memory import MemoryKills
from varuna_capslog.base.processes import (
    free_port,
    heard_signals,
    is_stopped,
    signal_group,
    write_unless_there,
)

__all__ = [
    "Forks",
    "Interrupted",
    "Starter",
    "Supervisor",
    "Worker",
    "WorkerFailed",
    "check_unused",
    "last_step",
    "new_run",
    "reserve",
    "usable",
]


# -- Starts a supervisor's workers as forks of a process that has imported their modules.


class Worker(Protocol):
    """Process of one rank: the part of `subprocess.Popen` that the supervisor uses. When the process has ended, its
    process group is killed, so that none of its children stays.

    Attributes:
        pid: also the number of its process group.
        returncode: None while it runs, then its exit status, or minus the number of the signal that ended it.
    """

    pid: int
    returncode: int | None

    def poll(self) -> int | None:
        """Update and return `returncode`."""

    def wait(self) -> int:
        """Wait for the end; return `returncode`."""


Starter = Callable[[int, Mapping[str, str], Path], Worker]
"""Starts the worker of a rank, with this environment added to the starter's own. The worker writes to the file, but
rank 0 shares this process's standard output. Raises CapslogError where the worker cannot be started."""


class Forks:
    """Workers that a fork server (`server`) forks once it has imported their modules; the import begins at once. Use
    this object as a context: leaving it kills the remaining workers.

    Args:
        entry: "module:function", called with `arguments`; a worker ends with the returned status.
        arguments: any JSON value.
        modules: imported before the first fork.
        environment: variables of the fork server and all workers, added to this process's own.
    """

    def __init__(self, entry: str, arguments: Any, modules: Sequence[str], environment: Mapping[str, str]) -> None:
        self._arguments = arguments
        self._changed = threading.Condition()
        self._workers: dict[str, _Forked] = {}
        self._gone: int | None = None
        self.server = ForkServer(entry, self._hear, None, modules, environment)

    def __enter__(self) -> Forks:
        return self

    def __exit__(self, *error: object) -> None:
        self.server.close()

    def __call__(self, rank: int, environment: Mapping[str, str], log: Path) -> Worker:
        """Start a worker as a `Starter` does, once its modules are imported."""
        name, worker = str(rank), _Forked(self._changed)
        self._workers[name] = worker
        log.write_bytes(b"")
        order = {"member": name, "environment": dict(environment), "log": str(log), "arguments": self._arguments}
        if rank == 0 and not getattr(sys.stdout, "gone", False):
            order |= {"output": self.server.output, "terminal": self.server.errors}
        self.server.fork(order)
        with self._changed:
            self._changed.wait_for(lambda: worker.pid or worker.returncode is not None or self._gone is not None)
        if not worker.pid:
            why = worker.why or f"the process that forks workers failed; see {log}"
            raise CapslogError(f"worker {rank} cannot be started: {why}")
        return worker

    def _hear(self, report: Mapping[str, Any]) -> None:
        with self._changed:
            if "gone" in report:
                self._gone = report["gone"]
                for worker in self._workers.values():  # the system has killed them
                    worker.returncode = -9 if worker.returncode is None else worker.returncode
                    worker.why = report.get("why", "")
            elif "member" in report:
                worker = self._workers[report["member"]]
                worker.pid, worker.why = report["pid"] or 0, report.get("why", "")
                if "signal" in report or "status" in report:
                    worker.returncode = -report["signal"] if "signal" in report else report["status"]
            self._changed.notify_all()


class _Forked:
    def __init__(self, changed: threading.Condition) -> None:
        self._changed, self.pid, self.why = changed, 0, ""
        self.returncode: int | None = None

    def poll(self) -> int | None:
        return self.returncode

    def wait(self) -> int:
        with self._changed:
            self._changed.wait_for(lambda: self.returncode is not None)
        assert self.returncode is not None
        return self.returncode


# -- Starts the workers of a run on this machine


POLL_SECONDS = 0.05
SETTLE_SECONDS = 1.0  # a failing worker's neighbors often end before it does: wait until it reports the cause
HANG_SECONDS = 5.0  # where all reports name a silent rank: wait also for the reports of ranks that wait for it
STOPPED_SECONDS = 10.0  # a worker may be stopped (SIGSTOP) for this long; the workers that wait for it give up later
_TAIL_BYTES = 1 << 14
EXIT_STATUS = {"user": 2, "disk": 2, "does_not_fit": 3, "step_refused": 4, "interrupted": 130}


class WorkerFailed(CapslogError):
    """A worker failed and all others were stopped. `exit_status` is that of `EXIT_STATUS` for the kind of failure, else
    1. everywhere: all workers report the same cause, so that naming one worker would mislead.
    """

    def __init__(self, failure: Failure, log: Path, everywhere: bool = False) -> None:
        sentence = failure.cause if everywhere else failure.sentence()
        super().__init__(f"{sentence} (all workers are stopped; its output is in {log})")
        self.failure = failure
        self.exit_status = EXIT_STATUS.get(failure.kind, 1)


class Interrupted(CapslogError):
    """The run ended as the user (Ctrl-C, exit status 130) or the system (SIGTERM: 143, SIGHUP: 129) requested."""

    def __init__(self, message: str, exit_status: int = 130) -> None:
        super().__init__(message)
        self.exit_status = exit_status


class Supervisor:
    """Starts a worker for each rank and waits for all of them.

    Each worker gets RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT, its own process group
    (so that only the supervisor hears the terminal's Ctrl-C) and a log `run_dir/workers/<rank>.log`; rank 0 shares the
    supervisor's standard output. `run_dir/workers/<rank>.json` holds pid and host; a worker may add its stage.

    Args:
        run_dir: made where it is missing.
        num_workers: the world size.
        environment: variables for every worker, added to this process's own.
        grace_seconds: time between SIGTERM and SIGKILL for a worker.
        say: prints one line for the user.
        look: called about every `POLL_SECONDS` while the workers run; True: stop at the end of the current step.
    """

    def __init__(
        self,
        run_dir: Path,
        start_worker: Starter,
        num_workers: int,
        *,
        environment: Mapping[str, str] | None = None,
        grace_seconds: float = 10.0,
        say: Callable[[str], None] = lambda line: None,
        look: Callable[[], bool] = lambda: False,
    ) -> None:
        if num_workers < 1:
            raise CapslogError(f"num_workers={num_workers}; a run needs at least one worker")
        self.run_dir = Path(run_dir)
        self.folder = self.run_dir / "workers"
        self._start_worker = start_worker
        self.num_workers = num_workers
        self.environment = dict(environment or {})
        self.grace_seconds = grace_seconds
        self.say, self._look = say, look
        self._workers: list[Worker] = []
        self._ended: dict[int, float] = {}
        self._stopped: dict[int, float] = {}
        self._signals: list[int] = []
        self._memory_kills = MemoryKills()

    def run(self) -> None:
        """Start the workers and return when all have ended with status 0.

        Raises:
            WorkerFailed: a worker failed; the others have been stopped.
            Interrupted: SIGINT, SIGTERM or SIGHUP arrived; the workers have ended.
            CapslogError: the folder cannot be written, or a worker cannot be started.
        """
        with new_run(self.run_dir), heard_signals((signal.SIGINT, signal.SIGTERM, signal.SIGHUP), self._hear):
            try:
                self._start()
                self._watch()
            finally:
                self._kill()

    def _hear(self, number: int) -> None:
        """Record a signal. A second SIGINT or SIGTERM kills the workers. SIGHUP never counts as the second signal: when
        a terminal closes, shell, kernel and systemd may all send SIGHUP, besides a SIGTERM.
        """
        if self._signals == [signal.SIGHUP]:
            self._signals[0] = number
        elif not (self._signals and number == signal.SIGHUP):
            self._signals.append(number)

    def _start(self) -> None:
        omp = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        environment = {**omp, **self.environment, **_rendezvous(self.num_workers)}
        for rank in range(self.num_workers):
            if self._signals:
                raise Interrupted(self._farewell("stopped before the first step"), 128 + self._signals[0])
            environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            worker = self._start_worker(rank, environment, self.log(rank))
            self._workers.append(worker)
            started = {"rank": rank, "pid": worker.pid, "host": socket.gethostname()}
            write_unless_there(self.folder / f"{rank}.json", started)

    def _watch(self) -> None:
        num_signals, called_off = 0, False
        while len(self._ended) < self.num_workers:
            if len(self._signals) > num_signals:
                num_signals = len(self._signals)
                if num_signals > 1:
                    self._kill()
                    raise Interrupted(self._farewell("killed in the middle of a step"), 128 + self._signals[0])
                self.say("stopping at the end of this step; Ctrl-C again kills the workers at once")
                self._signal(signal.SIGINT)
            if not (called_off or num_signals) and self._look():
                called_off = True
                self._signal(signal.SIGINT)
            stopping = called_off or num_signals > 0
            self._memory_kills.look(time.monotonic())
            self._collect()
            # During a requested stop, a worker without a handler yet is killed by SIGINT, which is no failure.
            if any(self._is_failure(rank, stopping) for rank in self._ended):
                self._fail(stopping)
            if self._stopped_for_long():
                self._fail(stopping)
            if num_signals and any(self._workers[rank].returncode == -signal.SIGINT for rank in self._ended):
                self._stop()
            time.sleep(POLL_SECONDS)
        if num_signals:
            raise Interrupted(self._farewell("stopped cleanly"), 128 + self._signals[0])

    def _is_failure(self, rank: int, stopping: bool) -> bool:
        expected = (0, 130, -signal.SIGINT) if stopping else (0,)
        return self._workers[rank].returncode not in expected

    def _fail(self, stopping: bool) -> None:
        """Collect the workers' failure reports, end all workers and raise the root cause."""
        self._settle(SETTLE_SECONDS, self.num_workers)
        if all(is_consequence(failure) for failure in self._failures(stopping)):
            # The cause is a rank without a report. More ranks may report later: those that wait for it indirectly.
            self._settle(HANG_SECONDS, self.num_workers - 1)
        failures = self._failures(stopping)
        hanging, own_end = self._hanging(failures), set(self._ended)
        self._stop()
        # Reports that workers wrote while they were being stopped count as well.
        reported_ranks = {failure.rank for failure in failures}
        late = [self._reported(rank) for rank in range(self.num_workers) if rank not in reported_ranks | own_end]
        failures += [failure for failure in late if failure is not None]
        if all(is_consequence(failure) for failure in failures):
            failures += hanging
        root = root_cause(failures)
        alike = all((failure.cause, failure.step) == (root.cause, None) for failure in failures)
        raise WorkerFailed(root, self.log(root.rank), everywhere=alike and len(failures) == self.num_workers > 1)

    def _settle(self, seconds: float, enough: int) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and len(self._ended) < enough:
            self._collect()
            time.sleep(POLL_SECONDS)

    def _failures(self, stopping: bool) -> list[Failure]:
        """Return the reported failures, and for ended workers without a report the failures that their status shows."""
        reported = [failure for rank in range(self.num_workers) if (failure := self._reported(rank)) is not None]
        reported_ranks, short = {failure.rank for failure in reported}, self._memory_kills.any_now()
        exit_failures = [
            exit_failure(rank, self._workers[rank].wait(), self.log(rank), moment, short, **self._where(rank, reported))
            for rank, moment in self._ended.items()
            if self._is_failure(rank, stopping) and rank not in reported_ranks
        ]
        return reported + exit_failures

    def _hanging(self, complaints: Sequence[Failure]) -> list[Failure]:
        """Return the failure of the rank that all others wait for, which has not ended; [] if all ranks have ended."""
        silent = [rank for rank in range(self.num_workers) if rank not in self._ended]
        if not silent:
            return []
        named = [failure.peer for failure in complaints if failure.peer in silent]
        stopped = [rank for rank in silent if is_stopped(self._workers[rank].pid)]
        rank = next(iter([*stopped, *named, *silent]))
        if rank in stopped:
            cause = "it is stopped (SIGSTOP, or a debugger)"
        else:
            cause = "it hangs, or it is so slow that pipeline.timeout_seconds must be raised"
        return [Failure(rank, cause, "hang", wall_seconds(), **self._where(rank, complaints))]

    def _reported(self, rank: int) -> Failure | None:
        return read_failure(self.folder / f"{rank}.error.json", rank, self._stage(rank))

    def _where(self, rank: int, others: Sequence[Failure]) -> dict[str, Any]:
        """Return stage and step of a failure without a report: the step of other reports, else the last finished."""
        step = next((failure.step for failure in others if failure.step is not None), None)
        after = last_step(self.run_dir) if step is None else None
        return {"stage": self._stage(rank), "step": step, "after_step": after}

    def _stage(self, rank: int) -> Any:
        with contextlib.suppress(CapslogError, AttributeError):
            return files.read_json(self.folder / f"{rank}.json").get("stage")
        return None

    def _farewell(self, how: str) -> str:
        step = last_step(self.run_dir)
        reached = "" if step is None else f" after step {step}"
        return f"interrupted: {how}{reached}; the same command continues the run in {self.run_dir}"

    def _stopped_for_long(self) -> bool:
        """True where a worker has been stopped for STOPPED_SECONDS; the others would wait for it for ever."""
        now = time.monotonic()
        stopped = [rank for rank, worker in enumerate(self._workers) if is_stopped(worker.pid)]
        self._stopped = {rank: self._stopped.get(rank, now) for rank in stopped if rank not in self._ended}
        return any(now - since > STOPPED_SECONDS for since in self._stopped.values())

    def _collect(self) -> None:
        for rank, worker in enumerate(self._workers):
            if rank not in self._ended and worker.poll() is not None:
                self._ended[rank] = wall_seconds()

    def _signal(self, number: int) -> None:
        for worker in self._workers:
            if worker.poll() is None:
                signal_group(worker.pid, number)

    def _stop(self) -> None:
        """Send SIGTERM, then SIGKILL after `grace_seconds`, or at once after a second Ctrl-C."""
        self._signal(signal.SIGTERM)
        self._signal(signal.SIGCONT)  # a stopped worker handles SIGTERM only when it continues
        deadline = time.monotonic() + self.grace_seconds
        while len(self._ended) < self.num_workers and time.monotonic() < deadline and len(self._signals) < 2:
            self._collect()
            time.sleep(POLL_SECONDS)
        self._kill()

    def _kill(self) -> None:
        self._signal(signal.SIGKILL)
        for worker in self._workers:
            worker.wait()
        self._collect()

    def log(self, rank: int) -> Path:
        """Return the file of the worker's error output (and its standard output, except rank 0's)."""
        return self.folder / f"{rank}.log"


_reserved: ContextVar[frozenset[Path]] = ContextVar("reserved", default=frozenset())
"""Folders that the calling code has reserved. They do not count for a run in another thread of this process, since a
thread's context begins empty."""


@contextlib.contextmanager
def reserve(run_dir: Path) -> Iterator[None]:
    """Lock a run's folder for this process until the block or the process ends, so that no second run writes there.

    `capslog train` holds the lock from before the plan is written until the last worker has ended; nested calls are
    allowed. Raises CapslogError where another process holds the lock, or the folder cannot be written.
    """
    folder = (Path(run_dir) / "workers").absolute()
    if folder in _reserved.get():
        yield
        return
    with usable(folder):
        files.refuse_link(folder)
        folder.mkdir(parents=True, exist_ok=True)
        lock = open(folder / "lock", "ab", opener=files.no_link)  # noqa: SIM115 (held as long as the run)
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _in_use(run_dir) from None
        _reserved.set(_reserved.get() | {folder})
        try:
            yield
        finally:
            _reserved.set(_reserved.get() - {folder})  # no `reset`: the block may end in another thread


def check_unused(run_dir: Path) -> None:
    """Raise CapslogError where another process has reserved a run's folder; changes nothing there."""
    with contextlib.suppress(OSError), open(run_dir / "workers" / "lock", "rb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _in_use(run_dir) from None


def _in_use(run_dir: Path) -> CapslogError:
    return CapslogError(f"{run_dir} is in use by another run; wait for it to end or choose another run_dir")


@contextlib.contextmanager
def usable(folder: Path) -> Iterator[None]:
    """Raise CapslogError instead of an OSError of the block, which uses a run's folder."""
    try:
        yield
    except OSError as error:
        raise CapslogError(f"{folder} cannot be used: {error.strerror}; choose another run_dir") from error


@contextlib.contextmanager
def new_run(run_dir: Path) -> Iterator[None]:
    """Reserve a run's folder, and remove the files of an earlier run's workers."""
    with reserve(run_dir):
        for suffix in ("json", "log"):
            for stale in (Path(run_dir) / "workers").glob(f"*.{suffix}"):
                stale.unlink()
        yield


def last_step(run_dir: Path) -> int | None:
    """Return the last step in a run's metrics; None where there is none."""
    with contextlib.suppress(CapslogError):
        lines = files.last_lines(run_dir / "metrics.jsonl", _TAIL_BYTES)
        return next((step for line in reversed(lines) if isinstance(step := line.get("step"), int)), None)
    return None


def _rendezvous(num_workers: int) -> dict[str, str]:
    return {
        "WORLD_SIZE": str(num_workers),
        "LOCAL_WORLD_SIZE": str(num_workers),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
