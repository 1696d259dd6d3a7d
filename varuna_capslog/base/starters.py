"""Starts a supervisor's workers: as new processes of a command, or as forks of a process that is prepared.

Both return a `Worker`: the part of `subprocess.Popen` that the supervisor uses.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.base.files import no_link
from varuna_capslog.base.fork_server import ForkServer
from varuna_capslog.base.processes import die_with_parent, reaped, startable

__all__ = ["Forks", "Starter", "Worker", "starter_of"]


class Worker(Protocol):
    """A process of one rank. When it has ended, its group is killed: children of its own do not stay behind.

    Attributes:
        pid: also of its process group.
        returncode: None while it runs; its exit status, or minus the number of the signal that ended it.
    """

    pid: int
    returncode: int | None

    def poll(self) -> int | None:
        """The return code, looked up now."""

    def wait(self) -> int:
        """The return code, when it has ended."""


Starter = Callable[[int, Mapping[str, str], Path], Worker]
"""Starts the worker of a rank with this environment on top of the starter's own. Its output goes to the file, but for
the standard output of rank 0, which is this process's own. Raises CapslogError where it cannot be started."""


def starter_of(command: Sequence[str]) -> Starter:
    """Workers that run a command line."""
    die_with = die_with_parent()

    def start(rank: int, environment: Mapping[str, str], log: Path) -> Worker:
        with open(log, "wb", opener=no_link) as file:
            with startable(f"worker {rank}: {command[0]!r}"):
                return _Started(
                    command,
                    env={**os.environ, **environment},
                    stdin=subprocess.DEVNULL,
                    stdout=None if rank == 0 else file,
                    stderr=file,
                    preexec_fn=die_with,
                )

    return start


class _Started(subprocess.Popen[bytes]):
    """A `Worker` that runs a command line."""

    def poll(self) -> int | None:
        return self._look(os.WNOHANG)

    def wait(self, timeout: float | None = None) -> int:
        assert timeout is None
        code = self._look(0)
        assert code is not None
        return code

    def _look(self, options: int) -> int | None:
        if self.returncode is None:
            try:
                self.returncode = reaped(self.pid, options)
            except ChildProcessError:  # SIGCHLD is ignored here: nobody knows its status, as in `subprocess`
                self.returncode = 0
        return self.returncode


class Forks:
    """Workers that a fork server forks once it has imported their modules; it begins to import at once.

    Attributes:
        server: the fork server.

    Args:
        entry: "module:function", called with `arguments`; a worker ends with the status that it returns.
        arguments: any JSON value.
        modules: imported ahead.
        environment: of the fork server and all workers, on top of this process's own.

    Use it as a context: its end kills the workers that are left.
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
        """Start a worker like `Starter`; wait until its modules are imported."""
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
    """A `Worker` whose state the fork server reports."""

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
