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
    "die_with_parent",
    "free_port",
    "heard_signals",
    "is_stopped",
    "killed_with",
    "signal_group",
    "write_unless_there",
]

_PR_SET_PDEATHSIG = 1


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


@contextlib.contextmanager
def heard_signals(numbers: Sequence[signal.Signals], hear: Callable[[int], object]) -> Iterator[None]:
    """Calls `hear` with the number of each of these signals that this process gets in the block.

    Outside the main thread Python cannot: there the caller keeps the signals.
    """
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
    """Sends a signal to the group that `pid` leads, if there is still one."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def write_unless_there(path: Path, value: dict[str, Any]) -> None:
    """Write what is known about a worker, unless the worker has already written its own file, which has more facts."""
    temporary = path.with_suffix(".new")
    temporary.unlink(missing_ok=True)  # in a stranger's folder it may be a link
    temporary.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    with contextlib.suppress(FileExistsError):  # link() never replaces
        os.link(temporary, path)
    temporary.unlink()
