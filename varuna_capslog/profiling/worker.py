"""The processes of a profile: workers that measure one trimmed run after another, each with its own neighbour process.

A worker makes the chain's skeleton once and then forks the process that stands in for its neighbours, so that torch is
imported only once. No process outlives the process that started it.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, Generic, TypeVar

import torch

from varuna_capslog import accelerator
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.base.failures import signal_name
from varuna_capslog.base.fork_server import accelerator_started, may_fork, renew_threads
from varuna_capslog.base.processes import OwnedThread, killed_with, startable
from varuna_capslog.engine.communicator import PeerLost, connect, local_store
from varuna_capslog.model.workload import Workload
from varuna_capslog.profiles.record import Observation
from varuna_capslog.profiling.conditions import RunConditions
from varuna_capslog.profiling.trim import (
    MEASURED_RANK,
    NEIGHBOUR_RANK,
    TrimmedRun,
    measure_run,
    run_neighbours,
    skeleton,
)

__all__ = [
    "Play",
    "ReadyValue",
    "Role",
    "WorkerFailure",
    "WorkerGroup",
    "Workers",
    "cause_of_loss",
    "next_task",
    "pass_on",
    "report",
]

_MESSAGE_SECONDS = 3600.0
_GRACE_SECONDS = 10.0
"""Time for which a worker that lost a neighbour waits until the neighbour's process reports the reason, or ends."""
_LAST_WORD_SECONDS = 2.0
"""Time for which a worker that lost another worker waits, so that the lost worker reports first."""

T = TypeVar("T")

Task = tuple[TrimmedRun, int]
"""A run and an upper bound on its bytes."""

Play = Callable[[TrimmedRun, RunConditions], "Observation | None"]
"""Executes one process's part of a run. Returns the measurement; None if the process stands in for neighbour stages."""

Role = Callable[[], Play]
"""Called once in the process, before its first run; returns its `Play`."""

Roles = Callable[[Callable[[], Any], int, int, torch.device], tuple[Role, list[Role]]]
"""(source, the worker's number, the store's port, device) -> the worker's role, and the roles of its neighbours; each
neighbour is a process forked from the worker's."""

FreeBytes = Callable[[torch.device], int]
"""Device -> its free bytes."""


class WorkerFailure(CapslogError):
    """Error where a worker could not be started, or failed in a run. run: None where it was not started."""

    def __init__(self, task: Task | None, reason: str) -> None:
        super().__init__(reason)
        self.run = None if task is None else task[0]


@dataclass(frozen=True)
class ReadyValue(Generic[T]):
    """Source that returns an existing value; it can be sent to workers if the value can be pickled."""

    value: T

    def __call__(self) -> T:
        return self.value


@dataclass(frozen=True)
class Workers:
    """Settings with which processes are started.

    source: makes the workload in every process.
    devices: one per worker. threads: CPU threads of each worker; neighbours have one thread.
    preload: modules to import once, before processes fork; modules that cannot be imported are left out.
    conditions: of all runs. free_bytes: device -> its free bytes. names: of the layers.
    roles: the roles of a worker and its neighbours; None: stages on our own engine.
    """

    source: Callable[[], Workload]
    devices: Sequence[torch.device]
    threads: int
    preload: Sequence[str]
    conditions: RunConditions
    free_bytes: FreeBytes
    names: Sequence[str]
    roles: Roles | None = None

    def group(self, count: int) -> WorkerGroup:
        """Return a group of the first `count` workers."""
        return WorkerGroup(self, count)


class WorkerGroup:
    """Processes of the first `count` workers, with a pipe to each; a context manager that always ends the processes.
    idle: numbers of the workers that are ready for a run.
    """

    def __init__(self, workers: Workers, count: int) -> None:
        self._workers, self._count = workers, count
        self._context = _process_context(workers.source, workers.preload)
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        self._doing: dict[int, Task] = {}
        self.idle: list[int] = []

    def __enter__(self) -> WorkerGroup:
        workers, roles = self._workers, self._workers.roles or _engine_roles
        self._store = local_store()
        try:
            for number, device in enumerate(workers.devices[: self._count]):
                ours, theirs = self._context.Pipe()
                arguments = (theirs, roles, workers.source, number, self._store.port, device, workers.threads)
                process = self._context.Process(target=_work, args=arguments, name=f"profile-{number}")
                with startable("a profiling worker"):
                    process.start()
                theirs.close()
                self._processes.append(process)
                self._pipes.append(ours)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()

    def wait_until_ready(self) -> None:
        """Wait until every worker is idle; to be called before the first run. Raises WorkerFailure where one could not
        be started.
        """
        while len(self.idle) < len(self._processes):
            ended = list(self.finished())
            assert not ended, "no run is under way"

    def start(self, worker: int, task: Task) -> None:
        """Send an idle worker its next run."""
        self.idle.remove(worker)
        self._doing[worker] = task
        try:
            self._pipes[worker].send((task[0], self._workers.conditions))
        except OSError as error:
            raise self.failure(worker, None) from error

    def finished(self) -> Iterator[tuple[int, Task, Observation]]:
        """Wait for messages; yield (worker, task, result) of every run that has ended, if any: a message may also say
        that a worker is ready. Raises WorkerFailure where a run failed or its worker died.
        """
        for ready in multiprocessing.connection.wait(self._pipes):
            worker = self._pipes.index(ready)  # type: ignore[arg-type]
            try:
                kind, value = self._pipes[worker].recv()
            except (EOFError, OSError) as error:
                raise self.failure(worker, None) from error
            if kind == "failed":
                raise self.failure(worker, value)
            self.idle.append(worker)
            if kind == "done":
                yield worker, self._doing.pop(worker), value

    def failure(self, worker: int, reason: str | None) -> WorkerFailure:
        """Return the error for a worker that failed; reason: None where its process ended without a report."""
        if reason is None:
            process = self._processes[worker]
            process.join(_GRACE_SECONDS)
            reason = f"its process {_how_it_ended(process.exitcode)}"
        return WorkerFailure(self._doing.get(worker), reason)


def _process_context(source: Callable[[], Workload], preload: Sequence[str]) -> Any:
    """Return the context to start processes: by forking this one if that is safe, else from a clean fork server."""
    if sys.platform == "linux" and may_fork():  # on other systems, threads that are not Python's cannot be detected
        return multiprocessing.get_context("fork")
    try:
        pickle.dumps(source)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        if accelerator_started():
            raise CapslogError(
                f"the workload cannot be sent to other processes ({error}), and this one uses an accelerator: define "
                "the model at the top level of a module"
            ) from error
        return multiprocessing.get_context("fork")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, *preload])
    # Ctrl-C is for this process alone: the fork server, while it imports, would print a traceback.
    resource_tracker.ensure_running()  # first: it unblocks the signal again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return context


def _work(
    pipe: Connection,
    roles: Roles,
    source: Callable[[], Any],
    number: int,
    port: int,
    device: torch.device,
    threads: int,
) -> None:
    """Run a worker: measure the runs that come through `pipe`, until it closes."""
    belong_to_parent()
    torch.set_num_threads(1)
    neighbours: list[tuple[BaseProcess, Connection]] = []
    try:
        measured, others = roles(source, number, port, device)
        # forked before this process has threads or a device context
        pipes = [multiprocessing.Pipe() for _ in others]
        for role, (ours, theirs) in zip(others, pipes, strict=True):
            foreign = [pipe, *(end for pair in pipes for end in pair if end is not theirs)]
            process = multiprocessing.get_context("fork").Process(
                target=_neighbour, args=(theirs, foreign, role), daemon=True
            )
            with startable("a profiling worker"):
                process.start()
            neighbours.append((process, ours))
        for _, theirs in pipes:
            theirs.close()
        follow_client()
        torch.set_num_threads(threads)
        play = measured()
        report(pipe, "ready", None)
        while (task := next_task(pipe)) is not None:
            pass_on(task, [ours for _, ours in neighbours])
            report(pipe, "done", play(*task))
    except PeerLost as error:
        if not neighbours:  # the lost rank is a worker too, and reports the cause itself
            time.sleep(_LAST_WORD_SECONDS)
        report(pipe, "failed", cause_of_loss(error, neighbours))
    except Exception as error:
        report(pipe, "failed", sentence(error))


def _neighbour(tasks: Connection, foreign: Sequence[Connection], role: Role) -> None:
    """Stand in for the stages around a worker's runs. foreign: ends of pipes that this process must not keep open."""
    belong_to_parent()
    renew_threads()
    for connection in foreign:
        connection.close()
    try:
        play = role()
        while (task := next_task(tasks)) is not None:
            play(*task)
    except Exception as error:
        report(tasks, "lost" if isinstance(error, PeerLost) else "failed", sentence(error))


def _engine_roles(
    source: Callable[[], Workload], number: int, port: int, device: torch.device
) -> tuple[Role, list[Role]]:
    """Return the roles on our own engine: one neighbour process stands in for the stages before and behind."""
    workload = source()
    chain = skeleton(workload)

    def measured() -> Play:
        accelerator.select(device)
        communicator = connect(MEASURED_RANK, 2, "127.0.0.1", port, number, _MESSAGE_SECONDS)
        return lambda run, conditions: measure_run(chain, run, conditions, workload.loss, communicator, device)

    def neighbour() -> Play:
        communicator = connect(NEIGHBOUR_RANK, 2, "127.0.0.1", port, number, _MESSAGE_SECONDS)
        return lambda run, conditions: run_neighbours(chain, run, conditions, communicator)

    return measured, [neighbour]


def next_task(pipe: Connection) -> tuple[TrimmedRun, RunConditions] | None:
    """Wait for the next run; return None when the process that assigns runs has closed the pipe or ended."""
    try:
        return pipe.recv()
    except (EOFError, ConnectionError):
        return None


def pass_on(task: tuple[TrimmedRun, RunConditions], neighbours: Sequence[Connection]) -> None:
    """Send a run to the processes that stand in for the stages around it. Raises PeerLost where one has ended."""
    for pipe in neighbours:
        try:
            pipe.send(task)
        except ConnectionError as error:
            raise PeerLost("the process that plays the stages around the run has ended", NEIGHBOUR_RANK) from error


def report(pipe: Connection, kind: str, value: Any) -> None:
    """Send (kind, value) to the process that waits for this one; without effect where that process has ended."""
    with contextlib.suppress(ConnectionError):
        pipe.send((kind, value))


def cause_of_loss(lost: PeerLost, neighbours: Sequence[tuple[BaseProcess, Connection]]) -> str:
    """Return the reason why a worker's run lost a neighbour: the neighbour's error, or else the end of its process.
    `neighbours`: each with the worker's end of its pipe.
    """
    deadline = time.monotonic() + _GRACE_SECONDS
    messages = [_last_message(pipe, deadline) for _, pipe in neighbours]
    failures = [text for kind, text in messages if kind == "failed"]
    if failures:
        return failures[0]
    for (process, _), (kind, _) in zip(neighbours, messages, strict=True):
        if kind is None:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.exitcode is not None:
                return f"{lost}; the process that plays its neighbours {_how_it_ended(process.exitcode)}"
    reasons = [text for kind, text in messages if kind == "lost"]
    return "; ".join([str(lost), *(f"its neighbour says: {text}" for text in reasons)])


def _last_message(pipe: Connection, deadline: float) -> tuple[str | None, str]:
    """Return (kind, text) of a neighbour's last message; kind is None without a message.

    `poll` also returns True for a pipe whose other end is closed, and only `recv` shows that nothing was sent.
    """
    try:
        if pipe.poll(max(0.0, deadline - time.monotonic())):
            kind, text = pipe.recv()
            return kind, text
    except (EOFError, OSError):
        pass
    return None, ""


def _how_it_ended(status: int | None) -> str:
    """Describe the end of a process as the rest of a sentence, with a remedy."""
    if status is None:
        return "closed its pipe and still runs"
    if status >= 0:
        return f"ended with status {status} and gave no reason"
    name = signal_name(-status)
    if name != "SIGKILL":
        return f"was killed by {name}"
    return (
        f"was killed by {name}, as the system does where memory runs out; free memory, or set "
        "profile.source=estimated, which runs nothing"
    )


def sentence(error: Exception) -> str:
    """Return a worker's report of an error: its first line, after its type if it is no `CapslogError`."""
    text = str(error).split("\n", 1)[0]
    return text if isinstance(error, CapslogError) else f"{type(error).__name__}: {text}"


def follow_client() -> None:
    """Make this worker end at once when the profiling process has ended, also in the middle of a long run."""
    client = multiprocessing.parent_process()
    assert client is not None

    def end(_: object = None) -> None:
        os._exit(1)

    def follow() -> None:
        multiprocessing.connection.wait([client.sentinel])
        end()

    OwnedThread("client", follow, end).start()


def belong_to_parent() -> None:
    """Make this process end with its parent, and leave Ctrl-C to the process that the user sees."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    killed_with(os.getppid())()
