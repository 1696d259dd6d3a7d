"""Starts workers without import time: a process that has imported everything forks one whenever the host asks.

`python -m varuna_capslog.base.fork_server ENTRY MODULE...` reads one JSON line per requested worker, and writes
one line per fork and, as soon as the system knows it, one per end. `ForkServer` is the host's side of these pipes. The
process runs no torch operation and starts no thread, since a fork would copy its locks but not its threads.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.base.processes import die_with_parent, signal_group

__all__ = ["PRELOADED", "ForkServer", "main"]

PRELOADED = ("torch", "scipy.optimize")
"""What workers need and what takes long to import; scipy alone cost a recovered run 0.2 s at its first loss."""

Order = dict[str, Any]
"""{"member", "environment", "log", "arguments"}: the name, variables on top of the fork server's own, the file for
standard output and errors, and what the entry is called with (any JSON value). "output", where given: a descriptor that
the fork server shares, for standard output instead of the file."""


class ForkServer:
    """The fork server's process, and a thread that reads its reports.

    Args:
        entry: "module:function"; a worker calls it with its arguments and ends with the status that it returns.
        tell: called in that thread with {"ready": True, "pid"} once, {"member", "pid"} per fork, {"member", "pid",
            "status"} or {"member", "pid", "signal"} per end, and at last {"gone": status}: no worker of it is left.
        log: gets the fork server's own output; None: nobody does.
        modules: imported ahead besides the entry's, and what they name as `PRELOADED`; one that is missing is left out.
        environment: variables on top of this process's own.
        shared: descriptors of this process that orders may name.
    """

    def __init__(
        self,
        entry: str,
        tell: Callable[[dict[str, Any]], None],
        log: Path | None,
        modules: Sequence[str] = PRELOADED,
        environment: Mapping[str, str] | None = None,
        shared: Sequence[int] = (),
    ) -> None:
        command = [sys.executable, "-m", "varuna_capslog.base.fork_server", entry, *modules]
        try:
            with open(log or os.devnull, "ab") as errors:
                self._process = subprocess.Popen(
                    command,
                    env={"OMP_NUM_THREADS": "1", **os.environ, **(environment or {})},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    preexec_fn=die_with_parent(),
                    pass_fds=tuple(shared),
                )
        except OSError as error:
            raise CapslogError(f"workers cannot be started: {error}; check the installation") from error
        self.pid = self._process.pid
        self._tell = tell
        self._writing = threading.Lock()
        self._thread = threading.Thread(target=self._hear, name="fork-server", daemon=True)
        self._thread.start()

    def fork(self, order: Order) -> None:
        """Ask for a worker. Raises nothing where the fork server has ended, which `tell` reports."""
        with self._writing, contextlib.suppress(OSError, ValueError):
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
            self._process.stdin.flush()

    def close(self, seconds: float = 5.0) -> None:
        """Kill all workers that are left, and the fork server."""
        with self._writing, contextlib.suppress(OSError, ValueError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()  # the system then kills its workers
            self._process.wait()
        if threading.current_thread() is not self._thread:
            self._thread.join(seconds)

    def _hear(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with contextlib.suppress(ValueError):  # a line that was not written whole when the process ended
                self._tell(json.loads(line))
        self._tell({"gone": self._process.wait()})


# -- the fork server's own process -------------------------------------------------------------------------------------


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
    _preload(entry, modules)
    gc.collect()
    gc.freeze()  # so that a worker's collector does not touch, hence copy, the shared memory
    _write({"ready": True, "pid": os.getpid()})
    children: dict[int, str] = {}
    try:
        for order in _orders(wakes, children):
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
    standard_input = sys.stdin.fileno()
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
    if not _may_fork():
        command = [sys.executable, "-m", "varuna_capslog.base.fork_server", "--alone", entry, json.dumps(order)]
        output = (order["output"],) if "output" in order else ()
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


def _may_fork() -> bool:
    """Whether no module has started CUDA or a thread while it was imported: neither survives a fork."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return False
    with contextlib.suppress(OSError):
        return len(os.listdir("/proc/self/task")) == 1
    return threading.active_count() == 1


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
        _settle(order, private)
        module, _, function = entry.partition(":")
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
    output = order.get("output", log)
    for target, source in ((0, nothing), (1, output), (2, log)):
        os.dup2(source, target)
    for descriptor in {log, nothing, output}:
        os.close(descriptor)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    os.environ.update(order["environment"])


def _write(value: dict[str, Any]) -> None:
    os.write(sys.stdout.fileno(), json.dumps(value).encode() + b"\n")


if __name__ == "__main__":
    sys.exit(main())
