"""How much memory this machine, or the container that its programs run in, grants them, and how much of it is left."""

from __future__ import annotations

__all__ = ["available_bytes", "granted_bytes", "oom_kills"]

import os
from pathlib import Path

_GROUP = Path("/sys/fs/cgroup")
"""The container's control group of version 2; its limits of version 1 are in `memory/`."""


def granted_bytes() -> int:
    """Bytes of main memory that all programs here may use together: the machine's, or the limit of its container."""
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        try:
            return min(whole, int((_GROUP / name).read_text()))
        except (OSError, ValueError):  # no such file, or "max"
            continue
    return whole


def available_bytes() -> int:
    """Bytes of it that new work may take now: what the system calls available, or less where a container has less."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    try:
        limit = int((_GROUP / "memory.max").read_text())
        used = int((_GROUP / "memory.current").read_text())
        cache = next(
            int(line.split()[1])
            for line in (_GROUP / "memory.stat").read_text().splitlines()
            if line.startswith("inactive_file ")
        )
    except (OSError, ValueError, StopIteration):  # no container, or one without a limit ("max")
        return available
    return max(0, min(available, limit - used + cache))


def oom_kills() -> int:
    """How many processes the system has ended for lack of memory: in this container where it counts them, else on this
    machine; 0 where nobody counts.
    """
    for path, name in ((_GROUP / "memory.events", "oom_kill "), (Path("/proc/vmstat"), "oom_kill ")):
        try:
            return next(int(line.split()[1]) for line in path.read_text().splitlines() if line.startswith(name))
        except (OSError, ValueError, StopIteration):
            continue
    return 0
