"""Starts workers without import time: a process that has imported everything forks a worker on each request.

`ForkServer` is the host's side of the two pipes to that process (`varuna_capslog.base.forking`). `ForkServer.call` has
a function called in such a fork, for a process that does not want to import anything itself.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import pickle
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from varuna_capslog.base import forking
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.base.files import no_link
from varuna_capslog.base.forking import PRELOADED, Order
from varuna_capslog.base.processes import die_with_parent, python_command, signal_group, startable
from varuna_capslog.base.threads import OwnedThread

__all__ = ["PRELOADED", "ForkServer", "NoAnswer"]


class NoAnswer(CapslogError):
    """Error: a function that was called in a fork gave no answer.

    how: its process ended, such as "signal 9"; or it was killed, such as "no answer within 20 s".
    """

    def __init__(self, entry: str, how: str) -> None:
        super().__init__(f"the process that should call {entry} ended without an answer ({how}); start anew")
        self.how = how


_LAST_SECONDS = 5.0
"""From the end of the reports to that of their process."""


class ForkServer:
    """The fork server's process, and a thread that reads its reports.

    Args:
        entry: "module:function"; a worker calls it with its arguments and ends with the status that it returns.
        tell: called in that thread with {"ready": True, "pid"} once, {"member", "pid"} per fork, {"member", "pid",
            "status"} or {"member", "pid", "signal"} per end, and at last {"gone": status}: no worker of it is left. The
            last two may have a "why", in one sentence.
        log: gets the fork server's own output; None: the output is dropped until `settle` names a file.
        modules: imported ahead besides the entry's, and the modules in their `PRELOADED`; missing ones are left out.
        environment: variables on top of this process's own.
        prepared: this process has imported all of that, so the fork server is a fork of it, if it has one thread only.

    Use it as a context, or `close` it: its end kills the workers that are left.

    Attributes:
        output, errors: copies of this process's standard output and errors that orders may name.
    """

    def __init__(
        self,
        entry: str,
        tell: Callable[[dict[str, Any]], None],
        log: Path | None,
        modules: Sequence[str] = PRELOADED,
        environment: Mapping[str, str] | None = None,
        prepared: bool = False,
    ) -> None:
        self.output, self.errors = os.dup(1), os.dup(2)
        command = python_command(forking.__name__, entry, *modules)
        start = _started_as_fork if prepared and forking.may_fork() else subprocess.Popen
        try:
            with startable("the process that forks workers"), open(log or os.devnull, "ab", opener=no_link) as errors:
                self._process = start(
                    command,
                    env={"OMP_NUM_THREADS": "1", **os.environ, **(environment or {})},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    preexec_fn=die_with_parent(),
                    pass_fds=(self.output, self.errors),
                )
        except CapslogError:
            self._close_copies()
            raise
        self.pid = self._process.pid
        self._tell, self._ready = tell, False
        self._gone: dict[str, Any] | None = None
        self._numbers = itertools.count()
        self._calls: dict[str, queue.SimpleQueue[dict[str, Any]]] = {}
        self._writing = threading.Lock()
        self._thread = OwnedThread("fork-server", self._hear, self._fail)
        try:
            self._thread.start()
        except CapslogError:
            self.close()
            raise

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def settle(self, tell: Callable[[dict[str, Any]], None], log: Path) -> None:
        """Call `tell` from now on, and write the fork server's own output to `log`. To be called before any `fork`."""
        self._tell = tell
        self.fork({"server_log": str(log)})

    def fork(self, order: Order) -> None:
        """Ask for a worker. Raises nothing where the fork server has ended, which `tell` reports."""
        with self._writing, contextlib.suppress(OSError, ValueError):
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
            self._process.stdin.flush()

    def call(self, entry: str, *arguments: Any, seconds: float | None = None) -> Any:
        """Call "module:function" in a fork that writes to this process's own output and errors.

        Args:
            arguments: of the function; like its result, anything that can be pickled.
            seconds: time after which its process is killed; None: never.

        Raises:
            Exception: the function's own (a CapslogError of the same sentence and status where it cannot be pickled).
            NoAnswer: the process ended without an answer, or was killed.
        """
        name = f"call-{next(self._numbers)}"
        heard = self._calls[name] = queue.SimpleQueue()  # kept, so that reports of an abandoned call go nowhere else
        if self._gone is not None:
            heard.put(self._gone)
        pid = None
        with tempfile.TemporaryDirectory(prefix="capslog-call-") as folder:
            answer = Path(folder) / "answer"
            call_arguments = [entry, base64.b64encode(pickle.dumps(arguments)).decode(), str(answer)]
            order: Order = {"member": name, "environment": {}, "log": os.devnull, "arguments": call_arguments}
            order |= {"entry": f"{forking.__name__}:answer", "output": self.output, "errors": self.errors}
            self.fork(order)
            try:
                while not {"status", "signal", "gone"} & (report := heard.get(timeout=seconds if pid else None)).keys():
                    pid = report.get("pid")
                pid = None
            except queue.Empty:
                raise NoAnswer(entry, f"no answer within {seconds:g} s") from None
            finally:
                if pid is not None:
                    signal_group(pid, signal.SIGKILL)
            if not answer.exists():
                ended = ", ".join(
                    f"{key} {report[key]}" for key in ("status", "signal", "gone", "why") if key in report
                )
                raise NoAnswer(entry, ended)
            value, error = pickle.loads(answer.read_bytes())
        if error is not None:
            raise error
        return value

    def close(self, seconds: float = 5.0) -> None:
        """Kill all workers that are left, and the fork server, at once if it is still importing."""
        if not self._ready:
            self._process.kill()
        with self._writing, contextlib.suppress(OSError, ValueError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()  # the system then kills its workers
            self._process.wait()
        if threading.current_thread() is not self._thread and self._thread.ident is not None:
            self._thread.join(seconds)
        self._close_copies()

    def _close_copies(self) -> None:
        for copy in {self.output, self.errors} - {-1}:
            os.close(copy)
        self.output = self.errors = -1

    def _hear(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            try:
                report = json.loads(line)
            except ValueError:  # it was not written whole when the process ended
                continue
            self._ready = True
            call = self._calls.get(report.get("member", ""))
            (self._tell if call is None else call.put)(report)
        self._end()

    def _fail(self, error: CapslogError) -> None:
        self._process.kill()
        self._end(why=str(error))

    def _end(self, **why: str) -> None:
        """Tell all callers that wait that the process is gone. A process that reports no more is killed."""
        try:
            status = self._process.wait(_LAST_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            status = self._process.wait()
        self._gone = {"gone": status, **why}
        for call in list(self._calls.values()):
            call.put(self._gone)
        self._tell(self._gone)


class _ServerFork:
    """A forked process with the part of the `subprocess.Popen` interface that a fork server needs."""

    def __init__(self, pid: int, stdin: BinaryIO, stdout: BinaryIO) -> None:
        self.pid, self.stdin, self.stdout = pid, stdin, stdout
        self._status: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the process like `Popen.wait`, from any thread."""
        until = None if timeout is None else time.monotonic() + timeout
        while self._status is None:
            with contextlib.suppress(ChildProcessError):  # another thread has waited for it
                ended_pid, status = os.waitpid(self.pid, os.WNOHANG)
                if ended_pid:
                    self._status = os.waitstatus_to_exitcode(status)
            if until is not None and self._status is None and time.monotonic() > until:
                raise subprocess.TimeoutExpired("the fork server", timeout or 0.0)
            time.sleep(0.005)
        return self._status

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


def _started_as_fork(
    command: Sequence[str],
    env: Mapping[str, str],
    stdin: int,
    stdout: int,
    stderr: BinaryIO,
    preexec_fn: Callable[[], None],
    pass_fds: Sequence[int],
) -> _ServerFork:
    """Fork this process in place of starting the command; the arguments are those of `subprocess.Popen`."""
    (orders, order), (reports, report) = os.pipe(), os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        os.close(orders)
        os.close(report)
        return _ServerFork(pid, open(order, "wb"), open(reports, "rb"))
    status = 1
    try:
        preexec_fn()
        for source, target in ((orders, 0), (report, 1), (stderr.fileno(), 2)):
            os.dup2(source, target)
        for descriptor in (orders, order, reports, report):
            os.close(descriptor)
        os.environ.update(env)
        status = forking.main(command[3:])
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)
