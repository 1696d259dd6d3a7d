"""The fork server's own process: it imports everything once, then forks a worker whenever it is told to.

`python -m varuna_capslog.base.forking ENTRY MODULE...` reads one JSON line per requested worker, and writes one line
per fork and, as soon as the system knows it, one per end; `varuna_capslog.base.fork_server` starts it. The process runs
no torch operation and starts no thread, since a fork would copy its locks but not its threads.
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
from varuna_capslog.base.processes import die_with_parent, signal_group

__all__ = ["PRELOADED", "Order", "answer", "main", "may_fork", "renew_threads"]

PRELOADED = ("torch",)
"""What all workers need and what takes long to import; a workload's package names more (`PRELOADED` in it)."""

Order = dict[str, Any]
"""{"member", "environment", "log", "arguments"}: the name, variables on top of the fork server's own, the file for
standard output and errors, and what the entry is called with (any JSON value). Where given, "output" and "errors" are
descriptors that the fork server shares, instead of the file, and "entry" is called instead of the fork server's."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Serves until standard input ends, then kills all its workers."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["--alone"]:  # a worker that could not be forked; it dies with the fork server already
        order = json.loads(given[2])
        _become(order, given[1])
    entry, modules = given[0], given[1:]
    wakes, wake = os.pipe()
    for end in (wakes, wake):
        os.set_blocking(end, False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGUSR1):  # Slurm and systemd send them to all processes; the host answers
        signal.signal(number, signal.SIG_IGN)  # the workers inherit that
    gc.disable()  # what is imported stays: looking for garbage in it took a sixth of the time
    _preload(entry, modules)
    gc.freeze()  # so that a worker's collector does not touch, hence copy, the shared memory
    gc.enable()
    _write({"ready": True, "pid": os.getpid()})
    children: dict[int, str] = {}
    try:
        for order in _orders(wakes, children):
            if "server_log" in order:
                _write_errors_to(order["server_log"])
                continue
            try:
                pid = _fork(order, entry, (wakes, wake))
            except OSError:  # no memory, too many processes
                traceback.print_exc()
                _write({"member": order["member"], "pid": None, "status": 1})
                continue
            children[pid] = order["member"]
            _write({"member": order["member"], "pid": pid})
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
    """The first thing in a fork, before it has another thread. Where torch has had a thread pool, it makes a new one
    when it is first asked for it, and two threads that ask at once abort the process ("Invalid thread pool!").
    """
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(torch.get_num_threads())


def _preload(entry: str, modules: Sequence[str]) -> None:
    names = [*modules, entry.partition(":")[0]]
    for name in names:
        try:
            module = importlib.import_module(name)
            names += [one for one in getattr(module, "PRELOADED", ()) if one not in names]
        except Exception:  # a worker that needs the module fails with the same error
            traceback.print_exc()
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


def _orders(wakes: int, children: dict[int, str]) -> Iterator[Order]:
    """Orders from standard input as they come; between them, workers' ends are reported as they happen."""
    standard_input = 0  # also in a fork of a process that has replaced sys.stdin
    buffered = b""
    while True:
        ready, _, _ = select.select([standard_input, wakes], [], [])
        if wakes in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(wakes, 4096)
            _reap(children)
        if standard_input in ready:
            data = os.read(standard_input, 1 << 16)
            if not data:
                return
            *lines, buffered = (buffered + data).split(b"\n")
            for line in lines:
                yield json.loads(line)
            _reap(children)  # a worker may have ended before its fork was reported


def _reap(children: dict[int, str]) -> None:
    for pid in list(children):
        try:
            found, status = os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:
            continue
        if found:
            signal_group(pid, signal.SIGKILL)  # children of its own must not stay behind
            code = os.waitstatus_to_exitcode(status)
            _write({"member": children.pop(pid), "pid": pid, **({"signal": -code} if code < 0 else {"status": code})})


def _fork(order: Order, entry: str, private: Sequence[int]) -> int:
    prepare = die_with_parent()
    if not may_fork():
        command = [sys.executable, "-m", "varuna_capslog.base.forking", "--alone", entry, json.dumps(order)]
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
    """Whether no module has started an accelerator or a thread while it was imported: neither survives a fork."""
    if accelerator_started():
        return False
    with contextlib.suppress(OSError):
        return len(os.listdir("/proc/self/task")) == 1
    return threading.active_count() == 1


def accelerator_started() -> bool:
    """Whether this process uses an accelerator; False where torch was not imported, which nothing here does."""
    torch = sys.modules.get("torch")
    if torch is None or (here := torch.accelerator.current_accelerator()) is None:
        return False
    ask = getattr(torch.get_device_module(here), "is_initialized", None)
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
    """Replaces what was inherited from the fork server: signals, pipes, variables."""
    signal.set_wakeup_fd(-1)
    for descriptor in private:
        os.close(descriptor)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    nothing = os.open(os.devnull, os.O_RDONLY)
    output, errors = order.get("output", log), order.get("errors", log)
    for target, source in ((0, nothing), (1, output), (2, errors)):
        os.dup2(source, target)
    for descriptor in {log, nothing, output, errors}:
        os.close(descriptor)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    os.environ.update(order["environment"])


def _write_errors_to(path: str) -> None:
    with contextlib.suppress(OSError), open(path, "ab") as file:
        os.dup2(file.fileno(), 2)


def answer(given: Sequence[str]) -> int:
    """What the process of `ForkServer.call` does: leaves (value, error) in a file."""
    entry, arguments, path = given
    value, error = None, None
    for number in (signal.SIGTERM, signal.SIGUSR1):
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
    found = CapslogError(str(error))
    found.exit_status = error.exit_status
    return found


def _write(value: dict[str, Any]) -> None:
    os.write(1, json.dumps(value).encode() + b"\n")


if __name__ == "__main__":
    sys.exit(main())
