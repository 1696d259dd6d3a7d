"""System functions for processes and threads of one machine: death with the parent, signals, process groups."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import json
import logging
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from varuna_capslog.base.errors import CapslogError

__all__ = [
    "JOB_SIGNALS",
    "PROCESS_LIMIT",
    "Ends",
    "OwnedThread",
    "collecting_rarely",
    "die_with_parent",
    "ends_forks_as_usual",
    "free_port",
    "heard_signals",
    "is_spared",
    "is_stopped",
    "killed_with",
    "logged",
    "outlives",
    "python_command",
    "reaped",
    "signal_group",
    "startable",
    "write_unless_there",
]


_PR_SET_PDEATHSIG = 1

JOB_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
"""Signals that Slurm, systemd and a closing terminal send to all processes of a job; the command handles them."""
PROCESS_LIMIT = "raise the limit of processes and threads (ulimit -u, or pids.max of the container)"
"""Advice where the system starts no more threads or processes."""

_LIMITS = {
    errno.EAGAIN: PROCESS_LIMIT,
    errno.ENOMEM: "free memory, or raise its limit (ulimit -v, or that of the container)",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
}


_OBJECTS_BEFORE_COLLECTION = 100_000
"""New objects between two collections; Python's 700 took a sixth of the time of a plan."""


@contextlib.contextmanager
def collecting_rarely() -> Iterator[None]:
    """Make Python's garbage collector run rarely: imports, graphs of models and planners make many objects that stay,
    and each collection scans them again.
    """
    before = gc.get_threshold()
    gc.set_threshold(_OBJECTS_BEFORE_COLLECTION, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def python_command(module: str, *arguments: str) -> list[str]:
    """Return a command that runs a module's `main()` and ends with its status. Unlike `python -m` it imports nothing
    from the current folder, where a user may have a `queue.py` or a `torch.py`.
    """
    root = str(Path(__file__).parents[2])  # this package may be a clone that is not installed
    code = (
        f"import sys; root, path = {root!r}, [*filter(None, sys.path)]; "
        "place = next((number for number, folder in enumerate(path) if folder.endswith('-packages')), len(path)); "
        "sys.path[:] = path if root in path else [*path[:place], root, *path[place:]]; "
        f"from {module} import main; sys.exit(main())"
    )
    # -P (Python 3.11) has the same effect in the processes that multiprocessing starts
    return [sys.executable, "-Pc" if sys.version_info >= (3, 11) else "-c", code, *arguments]


@contextlib.contextmanager
def startable(program: str) -> Iterator[None]:
    """Raise CapslogError, with the limit to raise, where the system refuses to start a process in the block."""
    try:
        yield
    except OSError as error:
        remedy = _LIMITS.get(error.errno or 0, "check the installation")
        raise CapslogError(f"{program} cannot be started: {error.strerror or error}; {remedy}") from error


def die_with_parent() -> Callable[[], None]:
    """Return a worker's `preexec_fn`: it makes a process group and, on Linux, lets the worker die with this process."""
    follow = killed_with(os.getpid())

    def prepare() -> None:
        os.setpgid(0, 0)
        follow()

    return prepare


def killed_with(parent: int) -> Callable[[], None]:
    """Return a function with which a child of `parent` asks to be killed when `parent` ends; no effect outside Linux.
    The signal is SIGKILL, since a worker stuck in a collective must not survive. Linux also kills the child when the
    thread that started it ends.
    """
    # Loaded here: between fork and exec a child should do as little as it can.
    prctl = ctypes.CDLL(None, use_errno=True).prctl if sys.platform == "linux" else None

    def prepare() -> None:
        if prctl is not None:
            prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
            if os.getppid() != parent:  # the parent ended before prctl took effect
                os._exit(1)

    return prepare


def outlives(numbers: Sequence[signal.Signals]) -> None:
    """Make these signals do nothing to this process; programs that it starts still end by them. Installs an empty
    handler instead of SIG_IGN, which programs inherit: `Popen.terminate` would not end them, and the parent would wait
    for ever, as in `multiprocessing.Pool`.
    """
    for number in numbers:
        if not is_spared(number):
            signal.signal(number, lambda number, frame: None)
            signal.siginterrupt(number, False)


def ends_forks_as_usual() -> None:
    """Make `JOB_SIGNALS` and SIGINT end this process's later forks, also where this process handles or ignores them."""

    def restore() -> None:
        for number in (*JOB_SIGNALS, signal.SIGINT):
            if not is_spared(number):
                signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)

    os.register_at_fork(after_in_child=restore)


def is_spared(number: signal.Signals) -> bool:
    """True for a SIGHUP that this process ignores because of nohup."""
    return number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN


@contextlib.contextmanager
def heard_signals(numbers: Sequence[signal.Signals], hear: Callable[[int], object]) -> Iterator[None]:
    """Call `hear` with the number of each of these signals that arrives in the block; under nohup not with SIGHUP.
    Outside the main thread, where Python allows no handlers, the signals keep their effect.
    """
    numbers = [number for number in numbers if not is_spared(number)]
    try:
        before = {number: signal.signal(number, lambda number, frame: hear(number)) for number in numbers}
    except ValueError:
        before = {}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def free_port() -> int:
    """Return a free port of this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def is_stopped(pid: int) -> bool:
    """True where a process is stopped by a signal or a debugger; always False outside Linux."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("T", "t")
    except (OSError, IndexError):
        return False


def signal_group(pid: int, number: int) -> None:
    """Send a signal to the group that `pid` leads, if it still exists. SIGINT goes to the leader alone: it asks for a
    stop after the current step, which may still need the processes that read data.
    """
    with contextlib.suppress(ProcessLookupError, PermissionError):
        (os.kill if number == signal.SIGINT else os.killpg)(pid, number)


def reaped(pid: int) -> int | None:
    """Return the exit code of a child that leads a group, as `subprocess` counts it; None while it runs. Kills the
    group first: no process of it may stay, and a reaped leader's pid may be reused. Raises ChildProcessError where the
    child was reaped before.
    """
    if hasattr(os, "waitid"):
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
            return None
        signal_group(pid, signal.SIGKILL)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    ended, status = os.waitpid(pid, os.WNOHANG)  # macOS
    if not ended:
        return None
    signal_group(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(status)


def write_unless_there(path: Path, value: dict[str, Any]) -> None:
    """Write facts about a worker, unless the worker has already written the file, with more facts."""
    temporary = path.with_suffix(".new")
    temporary.unlink(missing_ok=True)  # in an untrusted folder it may be a link
    temporary.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    with contextlib.suppress(FileExistsError):  # link() never replaces a file
        os.link(temporary, path)
    temporary.unlink()


# -- The threads of this package: an unexpected error in a thread ends the thread's owner, with a sentence.
#
# Otherwise other threads could wait for ever for one that has ended. So every thread is an `OwnedThread`;
# `tests/base/test_processes_threads.py` refuses any other kind.


_log = logging.getLogger(__name__)

Ends = Callable[[CapslogError], object]
"""Ends the owner of the thread with this error; called in the thread."""


def logged(error: CapslogError) -> None:
    """Log the error; for a thread whose owner goes on without it."""
    _log.warning("%s", error)


class OwnedThread(threading.Thread):
    """Daemon thread that calls `target` with `arguments`; `ends` is called with its error, as a CapslogError."""

    def __init__(self, name: str, target: Callable[..., object], ends: Ends, *arguments: object) -> None:
        super().__init__(target=target, name=name, args=arguments, daemon=True)
        self._ends = ends

    def start(self) -> None:
        """Start the thread. Raises CapslogError where the system has no more threads."""
        try:
            super().start()
        except RuntimeError as error:
            raise CapslogError(f"the thread {self.name} cannot be started: {error}; {PROCESS_LIMIT}") from error

    def run(self) -> None:
        """Call the target; `ends` also gets a SystemExit, which Python does not print."""
        try:
            super().run()
        except BaseException as error:
            if os.environ.get("CAPSLOG_DEBUG", "") not in ("", "0"):
                traceback.print_exc()
            self._ends(error if isinstance(error, CapslogError) else self._defect(error))

    def _defect(self, error: BaseException) -> CapslogError:
        return CapslogError(
            f"the thread {self.name} failed with {type(error).__name__}: {error}; this is a defect: CAPSLOG_DEBUG=1 "
            "shows where"
        )
