"""Starts workers without import time: a process (`main`) imports everything once and forks a worker for each order.
`ForkServer` is the client's side; its `call` runs a function in a fork, so that the client itself imports nothing.
"""

from __future__ import annotations

import base64
import contextlib
import gc
import importlib
import itertools
import json
import os
import pickle
import queue
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.base.files import no_link
from varuna_capslog.base.functions import add_current_folder
from varuna_capslog.base.processes import (
    JOB_SIGNALS,
    OwnedThread,
    die_with_parent,
    ends_forks_as_usual,
    outlives,
    python_command,
    reaped,
    signal_group,
    startable,
)
from varuna_capslog.base.tables import LastingStream

__all__ = ["PRELOADED", "ForkServer", "NoAnswer", "answer", "begun_early", "main", "may_fork", "renew_threads"]


# -- The fork server's own process: it imports everything once, then forks a worker for each order.
#
# `ForkServer` starts `main` with ENTRY MODULE...; an order may bring them later. `main` reads one JSON line per ordered
# worker, and writes a report line at each fork and at each worker's end. The process runs no torch operation and starts
# no thread, since a fork would copy its locks but not its threads. Both pipes get other descriptors than 0 and 1 before
# any module is imported, so that modules cannot read orders, and their output is not taken for a report.


PRELOADED = ("torch",)
"""Modules that all workers need and that are slow to import; a workload's package may name more (its `PRELOADED`)."""

Order = dict[str, Any]
"""{"member", "environment", "log", "arguments"}: the worker's name, variables added to the fork server's, the file for
standard output and errors, and the argument of the entry (any JSON value). Optional keys: "output" and "errors" are
descriptors of the fork server that replace the file; "terminal" is a descriptor for a sentence about lost output;
"entry" replaces the fork server's entry."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until standard input ends, then kill all workers."""
    command_arguments = list(sys.argv[1:] if arguments is None else arguments)
    outlives(JOB_SIGNALS)  # workers inherit this: the host handles these signals
    if command_arguments[:1] == ["--alone"]:  # not forked (`may_fork`); dies with the fork server by its `preexec_fn`
        order = json.loads(command_arguments[2])
        add_current_folder()
        _become(order, command_arguments[1])
    entry, modules = command_arguments[0], command_arguments[1:]
    orders, reports = os.dup(0), os.dup(1)
    os.dup2(2, 1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    wakes, wake = os.pipe()
    for end in (wakes, wake):
        os.set_blocking(end, False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    add_current_folder()
    _preload(entry, modules)
    if entry:
        _report(reports, pid=os.getpid(), ready=True)
    children: dict[int, str] = {}
    try:
        for order in _orders(orders, wakes, reports, children):
            if "modules" in order:  # of a process that was started before its entry was known (`begun_early`)
                entry = order["entry"]
                os.environ.update(order["environment"])
                _preload(entry, order["modules"])
                _report(reports, pid=os.getpid(), ready=True)
                continue
            if "server_log" in order:
                _write_errors_to(order["server_log"])
                continue
            try:
                with startable("the process"):
                    pid = _fork(order, entry, (orders, reports, wakes, wake))
            except CapslogError as error:  # no memory, too many processes
                with contextlib.suppress(OSError), open(order["log"], "a") as log:
                    log.write(f"{error}\n")
                _report(reports, member=order["member"], pid=None, status=1, why=str(error))
                continue
            children[pid] = order["member"]
            _report(reports, member=order["member"], pid=pid)
    except BrokenPipeError:
        pass  # the host is gone
    finally:
        for pid in children:
            signal_group(pid, signal.SIGKILL)
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
    return 0


def renew_threads() -> None:
    """Renew torch's thread pool; call it first in a fork, before another thread starts. Otherwise torch makes the pool
    at its first use, and two threads that use it at once abort the process ("Invalid thread pool!").
    """
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(torch.get_num_threads())


def _preload(entry: str, modules: Sequence[str]) -> None:
    """Import the modules, then the entry's. entry: "" if it is not known yet."""
    gc.disable()  # imported objects stay, and collecting garbage took a sixth of the import time
    names = [*modules, *filter(None, [entry.partition(":")[0]])]
    for name in names:
        try:
            module = importlib.import_module(name)
            names += [module_name for module_name in getattr(module, "PRELOADED", ()) if module_name not in names]
        except (Exception, SystemExit):  # a worker that needs the module fails with the same error
            traceback.print_exc()
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    gc.freeze()  # so that a worker's collector does not touch, hence copy, the shared memory
    gc.enable()


def _orders(orders: int, wakes: int, reports: int, children: dict[int, str]) -> Iterator[Order]:
    """Yield orders as they arrive; between orders, report the workers that have ended."""
    buffered = b""
    while True:
        ready, _, _ = select.select([orders, wakes], [], [])
        if wakes in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(wakes, 4096)
            _reap(reports, children)
        if orders in ready:
            data = os.read(orders, 1 << 16)
            if not data:
                return
            *lines, buffered = (buffered + data).split(b"\n")
            for line in lines:
                yield json.loads(line)
            _reap(reports, children)  # a worker may have ended before its fork was reported


def _reap(reports: int, children: dict[int, str]) -> None:
    for pid in list(children):
        try:
            code = reaped(pid)
        except ChildProcessError:
            continue
        if code is not None:
            how = {"signal": -code} if code < 0 else {"status": code}
            _report(reports, member=children.pop(pid), pid=pid, **how)


def _fork(order: Order, entry: str, private: Sequence[int]) -> int:
    prepare = die_with_parent()
    if not may_fork():
        command = python_command(__name__, "--alone", entry, json.dumps(order))
        output = [order[name] for name in ("output", "errors") if name in order]
        process = subprocess.Popen(command, preexec_fn=prepare, pass_fds=output)
        process.returncode = 0  # so that `_reap` waits for it, not subprocess
        return process.pid
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        _become(order, entry, prepare, private)
    with contextlib.suppress(OSError):  # so that its group can be signalled even before it has made the group itself
        os.setpgid(pid, pid)
    return pid


def may_fork() -> bool:
    """True where no imported module has started an accelerator or a thread: neither survives a fork."""
    if accelerator_started():
        return False
    with contextlib.suppress(OSError):
        return len(os.listdir("/proc/self/task")) == 1
    return threading.active_count() == 1


def accelerator_started() -> bool:
    """True where torch has started an accelerator in this process; False where no other module has imported torch."""
    torch = sys.modules.get("torch")
    if torch is None or (device := torch.accelerator.current_accelerator()) is None:
        return False
    ask = getattr(torch.get_device_module(device), "is_initialized", None)
    return ask is not None and bool(ask())


def _become(
    order: Order, entry: str, prepare: Callable[[], None] | None = None, private: Sequence[int] = ()
) -> NoReturn:
    """Run the worker and end this process. prepare: called first. private: the fork server's descriptors, to close."""
    status = 1
    try:
        if prepare is not None:
            prepare()
        renew_threads()
        _settle(order, private)
        module, _, function = order.get("entry", entry).partition(":")
        status = int(getattr(importlib.import_module(module), function)(order["arguments"]) or 0)
    except KeyboardInterrupt:  # before the worker has installed its handler
        status = 128 + signal.SIGINT
    except SystemExit as ending:
        status = ending.code if isinstance(ending.code, int) else int(ending.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status & 0xFF)


def _settle(order: Order, private: Sequence[int]) -> None:
    """Replace the signal handlers, descriptors and variables inherited from the fork server."""
    signal.set_wakeup_fd(-1)
    for descriptor in private:
        os.close(descriptor)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    ends_forks_as_usual()
    log = no_link(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    nothing = os.open(os.devnull, os.O_RDONLY)
    output, errors = order.get("output", log), order.get("errors", log)
    for target, source in ((0, nothing), (1, output), (2, errors)):
        os.dup2(source, target)
    for descriptor in {log, nothing, output, errors}:
        os.close(descriptor)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    terminal = order.get("terminal")
    say = lambda sentence: terminal is None or os.write(terminal, f"capslog: {sentence}\n".encode())  # noqa: E731
    sys.stdout, sys.stderr = LastingStream(sys.stdout, say), LastingStream(sys.stderr)
    os.environ.update(order["environment"])


def _write_errors_to(path: str) -> None:
    with contextlib.suppress(OSError), open(path, "ab", opener=no_link) as file:
        os.dup2(file.fileno(), 2)


def answer(order_arguments: Sequence[str]) -> int:
    """Call a function and write (value, error) to a file. This is the entry of the forks of `ForkServer.call`."""
    entry, arguments, path = order_arguments
    value, error = None, None
    for number in JOB_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(number, signal.SIG_DFL)
    module, _, function = entry.partition(":")
    try:
        value = getattr(importlib.import_module(module), function)(*pickle.loads(base64.b64decode(arguments)))
    except Exception as raised:
        if os.environ.get("CAPSLOG_DEBUG", "") not in ("", "0"):
            traceback.print_exc()
        error = _sendable(raised)
    Path(path).write_bytes(pickle.dumps((value, error)))
    return 0


def _sendable(error: Exception) -> Exception:
    """Return the error if it can be pickled, else an error with its sentence (and status, of a CapslogError)."""
    with contextlib.suppress(Exception):
        if type(pickle.loads(pickle.dumps(error))) is type(error):
            return error
    if not isinstance(error, CapslogError):
        return RuntimeError(f"{type(error).__name__}: {error}")
    sendable = CapslogError(str(error))
    sendable.exit_status = error.exit_status
    return sendable


def _report(reports: int, **report: Any) -> None:
    os.write(reports, json.dumps(report).encode() + b"\n")


# -- The client's side


class NoAnswer(CapslogError):
    """A function called in a fork gave no answer. how: the reason, such as "signal 9" or "no answer within 20 s"."""

    def __init__(self, entry: str, how: str) -> None:
        super().__init__(f"the process that should call {entry} ended without an answer ({how}); start anew")
        self.how = how


_LAST_SECONDS = 5.0
"""Longest wait for the fork server's end after its last report."""


_Started = tuple[Any, int, int]
"""A fork server's process, and its copies of this process's standard output and errors."""

_early: list[_Started] = []
"""The process of `begun_early`, until a `ForkServer` takes it over."""


@contextlib.contextmanager
def begun_early() -> Iterator[None]:
    """Start a fork server that imports `PRELOADED` while the body reads the config and imports its own modules. The
    first `ForkServer` of the body takes it over; otherwise it is killed at the end. Variables that Python reads as it
    starts must be set before. Raises CapslogError like `ForkServer`.
    """
    _early.append(_started(["", *PRELOADED], None, {}))
    try:
        yield
    finally:
        for process, *copies in _early:
            with process:  # closes its pipes
                process.kill()
                process.wait(_LAST_SECONDS)
            for copy in copies:
                os.close(copy)
        _early.clear()


def _started(
    arguments: Sequence[str],
    log: Path | None,
    environment: Mapping[str, str],
    start: Callable[..., Any] = subprocess.Popen,
) -> _Started:
    """Start `main` with these arguments. start: `subprocess.Popen`, or a function with its arguments."""
    copies = os.dup(1), os.dup(2)
    try:
        with startable("the process that forks workers"), open(log or os.devnull, "ab", opener=no_link) as errors:
            process = start(
                python_command(__name__, *arguments),
                env={"OMP_NUM_THREADS": "1", **os.environ, **environment},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                preexec_fn=die_with_parent(),
                pass_fds=copies,
            )
    except CapslogError:
        for copy in copies:
            os.close(copy)
        raise
    return process, *copies


class ForkServer:
    """The fork server's process, and a thread that reads its reports. Use it as a context, or `close` it; both kill the
    remaining workers.

    Args:
        entry: "module:function"; a worker calls the function with its arguments and ends with the returned status.
        tell: called in the reading thread with {"ready": True, "pid"} once, {"member", "pid"} per fork, {"member",
            "pid", "status"} or {"member", "pid", "signal"} per worker's end, and finally {"gone": status}, when no
            worker is left. Reports of an end, and "gone", may have a "why" of one sentence.
        log: gets the fork server's output; None: dropped until `settle` names a file.
        modules: imported before the first fork, with the entry's module and the modules in their `PRELOADED`; missing
            modules are skipped.
        environment: variables added to this process's own.
        prepared: this process has imported all modules, and forks itself as the fork server where `may_fork`.

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
        environment, taken = dict(environment or {}), bool(_early) and not prepared
        if taken:
            self._process, self.output, self.errors = _early.pop()
        else:
            start = _started_as_fork if prepared and may_fork() else subprocess.Popen
            self._process, self.output, self.errors = _started([entry, *modules], log, environment, start)
        self.pid = self._process.pid
        self._tell, self._ready = tell, False
        self._gone: dict[str, Any] | None = None
        self._numbers = itertools.count()
        self._calls: dict[str, _Call] = {}
        self._writing = threading.Lock()
        if taken:
            if log is not None:
                self.fork({"server_log": str(log)})
            self.fork({"entry": entry, "modules": [*modules], "environment": environment})
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
        """Call `tell` from now on, and write the fork server's output to `log`. Must precede any `fork`."""
        self._tell = tell
        self.fork({"server_log": str(log)})

    def fork(self, order: Order) -> None:
        """Order a worker. Raises no error where the fork server has ended: `tell` gets that report."""
        with self._writing, contextlib.suppress(OSError, ValueError):
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
            self._process.stdin.flush()

    def call(self, entry: str, *arguments: Any, seconds: float | None = None) -> Any:
        """Call "module:function" in a fork that writes to this process's output and errors.

        Args:
            arguments: of the function; arguments and result can be pickled.
            seconds: time after which the process is killed; None: never.

        Raises:
            Exception: the function's own; if it cannot be pickled, one with its sentence: CapslogError or RuntimeError.
            NoAnswer: the process ended without an answer, or was killed.
        """
        name = f"call-{next(self._numbers)}"
        call = self._calls[name] = _Call()  # kept, so that no report of an abandoned call reaches `tell`
        if self._gone is not None:
            call.put(self._gone)
        with tempfile.TemporaryDirectory(prefix="capslog-call-") as folder:
            answer = Path(folder) / "answer"
            call_arguments = [entry, base64.b64encode(pickle.dumps(arguments)).decode(), str(answer)]
            order: Order = {"member": name, "environment": {}, "log": os.devnull, "arguments": call_arguments}
            order |= {"entry": f"{__name__}:answer", "output": self.output, "errors": self.errors}
            try:
                self.fork(order)
                call.wait()
                if not call.ended:
                    call.wait(seconds)
            except queue.Empty:
                raise NoAnswer(entry, f"no answer within {seconds:g} s") from None
            finally:
                call.kill()
            if not answer.exists():
                ended = ", ".join(f"{key} {call.end[key]}" for key in (*_Call.ENDS, "why") if key in call.end)
                raise NoAnswer(entry, ended)
            value, error = pickle.loads(answer.read_bytes())
        if error is not None:
            raise error
        return value

    def close(self, seconds: float = 5.0) -> None:
        """Kill the remaining workers and the fork server; at once if it is still importing."""
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
            except ValueError:  # cut off by the end of the process
                continue
            self._ready = True
            call = self._calls.get(report.get("member", ""))
            (self._tell if call is None else call.put)(report)
        self._end()

    def _fail(self, error: CapslogError) -> None:
        self._process.kill()
        self._end(why=str(error))

    def _end(self, **why: str) -> None:
        """Report to all waiting callers that the process is gone; kill it if it only closed its reports."""
        try:
            status = self._process.wait(_LAST_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            status = self._process.wait()
        self._gone = {"gone": status, **why}
        for call in list(self._calls.values()):
            call.put(self._gone)
        self._tell(self._gone)


class _Call:
    """Reports about the process of one call. The reading thread keeps its pid and end as attributes, because Ctrl-C can
    lose a report that was just taken from the queue.
    """

    ENDS = ("status", "signal", "gone")
    """A report with one of these keys is the last one."""

    TELLING_SECONDS = 5.0
    """Longest wait for the pid of a process that was just ordered."""

    def __init__(self) -> None:
        self.pid: int | None = None
        self.end: dict[str, Any] = {}
        self._reports: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()

    @property
    def ended(self) -> bool:
        """True where the process has ended."""
        return bool(self.end)

    def put(self, report: dict[str, Any]) -> None:
        """Keep a report; called in the reading thread."""
        if set(self.ENDS) & report.keys():
            self.end = report
        else:
            self.pid = report["pid"]
        self._reports.put(report)

    def wait(self, seconds: float | None = None) -> None:
        """Wait for the next report. Raises `queue.Empty` after these seconds; None: never."""
        self._reports.get(timeout=seconds)

    def kill(self) -> None:
        """Kill the process unless it has ended. If the fork server has not reported the pid yet, wait for it first."""
        until = time.monotonic() + self.TELLING_SECONDS
        while self.pid is None and not self.ended and time.monotonic() < until:
            time.sleep(0.005)
        if self.pid is not None and not self.ended:
            signal_group(self.pid, signal.SIGKILL)


class _ServerFork:
    """Forked process with the part of `subprocess.Popen` that `ForkServer` uses."""

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
    """Fork this process instead of starting the command; arguments like those of `subprocess.Popen`."""
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
        status = main(command[3:])
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)
