"""How much memory this machine grants its programs."""

from __future__ import annotations

__all__ = ["granted_bytes"]

import os
from pathlib import Path

_GROUP_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)
"""Where a container's limit stands: control groups of version 2, and of version 1."""


def granted_bytes() -> int:
    """Bytes of main memory that all programs here may use together: the machine's, or the limit of its container."""
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for path in _GROUP_LIMITS:
        try:
            return min(whole, int(path.read_text()))
        except (OSError, ValueError):  # no such file, or "max"
            continue
    return whole
