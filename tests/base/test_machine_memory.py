"""The memory of a machine, and of a container with less."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from varuna_capslog.base import machine_memory
from varuna_capslog.base.machine_memory import granted_bytes, oom_kills

WHOLE = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize(
    ("told", "granted"), [("max\n", WHOLE), (f"{1 << 30}\n", 1 << 30), (f"{1 << 60}\n", WHOLE), (None, WHOLE)]
)
def test_a_container_may_grant_less(
    told: str | None, granted: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if told is not None:
        (tmp_path / "memory.max").write_text(told)
    monkeypatch.setattr(machine_memory, "_GROUP", tmp_path)
    assert granted_bytes() == granted


def test_the_container_counts_what_was_killed_for_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert oom_kills() >= 0
    monkeypatch.setattr(machine_memory, "_GROUP", tmp_path)
    of_machine = oom_kills()
    (tmp_path / "memory.events").write_text("low 0\nhigh 0\nmax 3\noom 2\noom_kill 7\noom_group_kill 1\n")
    assert oom_kills() == 7
    (tmp_path / "memory.events").write_text("torn")
    assert oom_kills() == of_machine
