"""Reads the main memory that this machine and its control groups (cgroups) allow and have free. Slurm, systemd,
containers and Kubernetes limit memory by the process's own group or by any group above it, in cgroup version 1 or 2.
Tests pass another `root` of the file system.
"""

from __future__ import annotations

__all__ = ["MemoryKills", "available_bytes", "granted_bytes", "oom_kills"]

import os
import re
import time
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

_ROOT = Path("/")
_LIMITS = ("memory.max", "memory.high", "memory.limit_in_bytes")
"""Files with a limit. `memory.high` counts, too: above it the system throttles a process and reclaims its pages, so
that no step ends in time."""
_USED = ("memory.current", "memory.usage_in_bytes")
_FREED = ("total_inactive_file", "inactive_file")
"""Bytes of cached files, which the system reclaims first; in version 1, `total_` includes the groups below."""


def granted_bytes(root: Path = _ROOT) -> int:
    """Return the bytes of main memory that all programs here may use together."""
    machine_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([machine_bytes, *(limit for group in _groups(root) for limit in _limits(group))])


def available_bytes(root: Path = _ROOT) -> int:
    """Return the bytes that can be allocated now: the system's MemAvailable, or less where a control group has less."""
    of_machine = _number_after(root / "proc/meminfo", "MemAvailable:")
    rooms = [granted_bytes(root) if of_machine is None else of_machine * 1024]
    for group in _groups(root):
        used = next((size for name in _USED if (size := _number(group / name)) is not None), None)
        freed = next((size for name in _FREED if (size := _number_after(group / "memory.stat", name)) is not None), 0)
        rooms += [limit if used is None else limit - used + freed for limit in _limits(group)]
    return max(0, min(rooms))


def oom_kills(root: Path = _ROOT) -> int:
    """Return the number of out-of-memory kills in this control group, else on this machine; 0 without a counter."""
    counters = [group / name for group in _groups(root) for name in ("memory.events", "memory.oom_control")]
    counts = (_number_after(path, "oom_kill") for path in [*counters, root / "proc/vmstat"])
    return next((count for count in counts if count is not None), 0)


class MemoryKills:
    """Detects whether the system has killed a process for lack of memory in the last seconds."""

    _SECONDS = 2.0
    """Seconds between two readings of the counter; callers notice a killed process much sooner."""

    def __init__(self) -> None:
        self._counts, self._looked = [oom_kills()] * 2, time.monotonic()  # counts at the last two readings

    def look(self, now: float) -> None:
        """Update the counts; call it often. now: `time.monotonic`."""
        if now - self._looked > self._SECONDS:
            self._counts, self._looked = [self._counts[1], oom_kills()], now

    def any_now(self) -> bool:
        """True where a process was killed since the second-last reading."""
        return oom_kills() > self._counts[0]


def _groups(root: Path) -> list[Path]:
    """Return the folders of the control groups that limit this process's memory: its own first, then those above it.
    If its own group lies below no mounted group (in a control group namespace), the mounted groups replace it.
    """
    groups: list[Path] = []
    for version, path in _memberships(root):
        mounts = [(top, folder) for kind, top, folder in _mounts(root) if kind == version]
        inside = [(folder, path.relative_to(top)) for top, folder in mounts if path.is_relative_to(top)]
        inside = [(folder, below) for folder, below in inside if ".." not in below.parts]
        for folder, below in inside or [(folder, PurePosixPath()) for _, folder in mounts]:
            groups += [folder / below, *(folder / above for above in below.parents)]
    return groups or [root / "sys/fs/cgroup/memory", root / "sys/fs/cgroup"]  # /proc is hidden: the usual folders


def _memberships(root: Path) -> Iterator[tuple[int, PurePosixPath]]:
    """Yield (version, path) of each group of this process that may limit memory, version 1 first; see proc(5)."""
    lines = [line.split(":", 2) for line in _text(root / "proc/self/cgroup").splitlines() if line.count(":") >= 2]
    yield from ((1, PurePosixPath(path)) for _, controllers, path in lines if "memory" in controllers.split(","))
    yield from ((2, PurePosixPath(path)) for number, controllers, path in lines if (number, controllers) == ("0", ""))


def _mounts(root: Path) -> Iterator[tuple[int, PurePosixPath, Path]]:
    """Yield (version, mounted group, mount point) of each control group hierarchy that may limit memory."""
    for line in _text(root / "proc/self/mountinfo").splitlines():
        before, _, behind = line.partition(" - ")
        fields, kinds = before.split(" "), behind.split(" ")
        if len(fields) > 4 and (kinds[0] == "cgroup2" or (kinds[0] == "cgroup" and "memory" in kinds[-1].split(","))):
            top, folder = (re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), name) for name in fields[3:5])
            yield 1 + (kinds[0] == "cgroup2"), PurePosixPath(top), root / folder.lstrip("/")


def _limits(group: Path) -> list[int]:
    """Return the limits of a group in bytes; version 1 also reports the smallest limit above the mounted group."""
    limits = [_number(group / name) for name in _LIMITS]
    limits.append(_number_after(group / "memory.stat", "hierarchical_memory_limit"))
    return [limit for limit in limits if limit is not None]


def _number(path: Path) -> int | None:
    """Return the number in a file; None for other content, such as "max", and for a missing file."""
    text = _text(path).strip()
    return int(text) if text.isascii() and text.isdigit() else None


def _number_after(path: Path, name: str) -> int | None:
    rows = (line.split() for line in _text(path).splitlines())
    return next((int(row[1]) for row in rows if row[:1] == [name] and len(row) > 1 and row[1].isdigit()), None)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:  # missing, or not to be read
        return ""
