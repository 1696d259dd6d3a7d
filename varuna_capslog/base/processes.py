"""What starting and ending processes of one machine needs from the system: death with the parent, groups, states.

Supervisors and the fork server use it. It knows nothing about runs.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

__all__ = [
    "JOB_SIGNALS",
    "die_with_parent",
    "ends_forks_as_usual",
    "free_port",
    "heard_signals",
    "is_spared",
    "is_stopped",
    "killed_with",
    "outlives",
    "signal_group",
    "write_unless_there",
]

_PR_SET_PDEATHSIG = 1

JOB_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
"""What Slurm, systemd and a closing terminal send to all processes of a job; the command answers for all of them."""


def die_with_parent() -> Callable[[], None]:
    """What a child does before it becomes a worker: its own process group, and on Linux death with this process."""
    follow = killed_with(os.getpid())

    def prepare() -> None:
        os.setpgid(0, 0)
        follow()

    return prepare


def killed_with(parent: int) -> Callable[[], None]:
    """What a child of `parent` does to be killed when `parent` ends; nothing where the system is not Linux.

    SIGKILL, since a worker that is stuck in a collective must not survive either. Linux counts the death of the thread
    that starts the child, too.
    """
    # Loaded here: between fork and exec a child should do as little as it can.
    prctl = ctypes.CDLL(None, use_errno=True).prctl if sys.platform == "linux" else None

    def prepare() -> None:
        if prctl is not None:
            prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
            if os.getppid() != parent:  # it died before prctl could take effect
                os._exit(1)

    return prepare


def outlives(numbers: Sequence[signal.Signals]) -> None:
    """From now on these signals do nothing to this process; programs that it starts end by them as usual.

    Hence a handler: a signal that is ignored stays so in a program that is started, whose parent then waits for ever
    for the end that it asked for (`Popen.terminate`, `multiprocessing.Pool`).
    """
    for number in numbers:
        if not is_spared(number):
            signal.signal(number, lambda number, frame: None)
            signal.siginterrupt(number, False)


def ends_forks_as_usual(numbers: Sequence[signal.Signals] = (*JOB_SIGNALS, signal.SIGINT)) -> None:
    """From now on these signals end the forks of this process, whatever they do to this process itself."""

    def restore() -> None:
        for number in numbers:
            if not is_spared(number):
                signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)

    os.register_at_fork(after_in_child=restore)


def is_spared(number: signal.Signals) -> bool:
    """Whether this is a SIGHUP that nohup has had this process ignore."""
    return number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN


@contextlib.contextmanager
def heard_signals(numbers: Sequence[signal.Signals], hear: Callable[[int], object]) -> Iterator[None]:
    """Calls `hear` with the number of each of these signals that this process gets in the block; under nohup not with
    SIGHUP.

    Outside the main thread Python cannot: there the caller keeps the signals.
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
    """A port of this machine that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped by a signal, as far as the system tells (Linux)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("T", "t")
    except (OSError, IndexError):
        return False


def signal_group(pid: int, number: int) -> None:
    """Sends a signal to the group that `pid` leads, if there is still one.

    SIGINT goes to the leader alone: it asks for the end of a step, which processes of a data set may have to read for.
    """
    with contextlib.suppress(ProcessLookupError, PermissionError):
        (os.kill if number == signal.SIGINT else os.killpg)(pid, number)


def write_unless_there(path: Path, value: dict[str, Any]) -> None:
    """Write what is known about a worker, unless the worker has already written its own file, which has more facts."""
    temporary = path.with_suffix(".new")
    temporary.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    with contextlib.suppress(FileExistsError):  # link() never replaces
        os.link(temporary, path)
    temporary.unlink()
