"""The fork server's own process: it imports everything once, then forks a worker for each order.

`main`, called with ENTRY MODULE..., reads one JSON line per requested worker, and writes one line per fork and, as soon
as the system knows it, one per end; `varuna_capslog.base.fork_server` starts it. The process runs no torch operation
and starts no thread, since a fork would copy its locks but not its threads. Both pipes have descriptors of their own
before a module is imported, so that output of modules is not taken for a report, and they cannot read orders.
"""

from __future__ import annotations

import base64
import contextlib
import gc
import importlib
import json
import os
import pickle
import select
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.base.files import no_link
from varuna_capslog.base.functions import add_current_folder
from varuna_capslog.base.output import LastingStream
from varuna_capslog.base.processes import (
    JOB_SIGNALS,
    die_with_parent,
    ends_forks_as_usual,
    outlives,
    python_command,
    reaped,
    signal_group,
    startable,
)

__all__ = ["PRELOADED", "Order", "answer", "main", "may_fork", "renew_threads"]

PRELOADED = ("torch",)
"""Modules that all workers need and that take long to import; a workload's package names more (its `PRELOADED`)."""

Order = dict[str, Any]
"""{"member", "environment", "log", "arguments"}: the name, variables on top of the fork server's own, the file for
standard output and errors, and what the entry is called with (any JSON value). Where given, "output" and "errors" are
descriptors that the fork server shares, instead of the file, "terminal" one for a sentence about output that is lost,
and "entry" is called instead of the fork server's."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Serves until standard input ends, then kills all its workers."""
    command_arguments = list(sys.argv[1:] if arguments is None else arguments)
    outlives(JOB_SIGNALS)  # and the workers do, for which the host answers
    if command_arguments[:1] == ["--alone"]:  # a worker that could not be forked; it dies with the fork server already
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
    gc.disable()  # imported objects stay: collecting garbage during imports took a sixth of the time
    add_current_folder()
    _preload(entry, modules)
    gc.freeze()  # so that a worker's collector does not touch, hence copy, the shared memory
    gc.enable()
    _report(reports, pid=os.getpid(), ready=True)
    children: dict[int, str] = {}
    try:
        for order in _orders(orders, wakes, reports, children):
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
    """Renew torch's thread pool; called first in a fork, before it has another thread. Torch would make a new pool at
    its first use, and two threads that use it at once abort the process ("Invalid thread pool!").
    """
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(torch.get_num_threads())


def _preload(entry: str, modules: Sequence[str]) -> None:
    names = [*modules, entry.partition(":")[0]]
    for name in names:
        try:
            module = importlib.import_module(name)
            names += [module_name for module_name in getattr(module, "PRELOADED", ()) if module_name not in names]
        except (Exception, SystemExit):  # a worker that needs the module fails with the same error
            traceback.print_exc()
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


def _orders(orders: int, wakes: int, reports: int, children: dict[int, str]) -> Iterator[Order]:
    """Orders as they come; between them, workers' ends are reported as they happen."""
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
        process.returncode = 0  # it is reaped with the others, not by subprocess
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
    """Return whether no imported module has started an accelerator or a thread: neither survives a fork."""
    if accelerator_started():
        return False
    with contextlib.suppress(OSError):
        return len(os.listdir("/proc/self/task")) == 1
    return threading.active_count() == 1


def accelerator_started() -> bool:
    """Return whether this process uses an accelerator; False where torch was not imported, which this module never
    does.
    """
    torch = sys.modules.get("torch")
    if torch is None or (device := torch.accelerator.current_accelerator()) is None:
        return False
    ask = getattr(torch.get_device_module(device), "is_initialized", None)
    return ask is not None and bool(ask())


def _become(
    order: Order, entry: str, prepare: Callable[[], None] | None = None, private: Sequence[int] = ()
) -> NoReturn:
    """Runs the worker and ends this process.

    Args:
        prepare: to be called first, unless that was done.
        private: descriptors of the fork server.
    """
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
    """Replace the signals, pipes and variables inherited from the fork server."""
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
    """Entry of the process of `ForkServer.call`: call the function and write (value, error) to a file."""
    entry, arguments, path = order_arguments
    value, error = None, None
    for number in JOB_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup has SIGHUP
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
    """The error, or one with the same sentence and status that survives being pickled."""
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
