"""Memory of a machine, and of control groups with less, on file trees of real machines."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from varuna_capslog.base import machine_memory
from varuna_capslog.base.machine_memory import MemoryKills, available_bytes, granted_bytes, oom_kills

WHOLE = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
V2 = "31 23 0:28 {top} {at} rw,nosuid - cgroup2 cgroup2 rw,nsdelegate,memory_recursiveprot\n"
V1 = (
    "32 31 0:29 {top} /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
    "35 31 0:32 {top} {at} rw,relatime shared:9 - cgroup cgroup rw,memory\n"
)
MANY = (1 << 63) - 4096
"""What version 1 writes where there is no limit."""


def machine(root: Path, cgroup: str, mounts: str, files: dict[str, object]) -> Path:
    """Write a tree with these files and the control groups that /proc lists, and return its root."""
    for name, text in {"proc/self/cgroup": cgroup, "proc/self/mountinfo": mounts, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text}\n")
    return root


def v2(top: str = "/", at: str = "/sys/fs/cgroup") -> str:
    return V2.format(top=top, at=at)


def v1(top: str = "/", at: str = "/sys/fs/cgroup/memory") -> str:
    return V1.format(top=top, at=at)


G = 1 << 30
SLURM = "sys/fs/cgroup/system.slice/slurmstepd.scope/job_7"
TREES = {
    "no group has a limit": ("0::/a.slice/b", v2(), {"sys/fs/cgroup/a.slice/b/memory.max": "max"}, WHOLE),
    "Slurm limits the job, not the step or the task": (
        "0::/system.slice/slurmstepd.scope/job_7/step_0/user/task_0",
        v2(),
        {f"{SLURM}/memory.max": 2 * G, f"{SLURM}/step_0/memory.max": "max", f"{SLURM}/step_0/user/memory.max": 3 * G},
        2 * G,
    ),
    "systemd-run limits the own group": ("0::/run-1.scope", v2(), {"sys/fs/cgroup/run-1.scope/memory.max": G}, G),
    "systemd-run -p MemoryHigh": (
        "0::/run-1.scope",
        v2(),
        {"sys/fs/cgroup/run-1.scope/memory.max": 2 * G, "sys/fs/cgroup/run-1.scope/memory.high": G},
        G,
    ),
    "another group's limit": (
        "0::/a",
        v2(),
        {"sys/fs/cgroup/b/memory.max": G, "sys/fs/cgroup/a/memory.max": "x"},
        WHOLE,
    ),
    "a container with its own namespace": ("0::/", v2(), {"sys/fs/cgroup/memory.max": G}, G),
    "a namespace that the process was moved out of": ("0::/../..", v2(), {"sys/fs/cgroup/memory.max": G}, G),
    "beside what is mounted": ("0::/../other", v2(), {"sys/fs/cgroup/memory.max": G}, G),
    "mounted above the namespace": ("0::/../job", v2("/.."), {"sys/fs/cgroup/job/memory.max": G}, G),
    "docker of version 1 mounts its group": (
        "4:memory:/docker/c0\n0::/",
        v1("/docker/c0"),
        {"sys/fs/cgroup/memory/memory.limit_in_bytes": G},
        G,
    ),
    "a group inside a container's": (
        "4:memory:/docker/c0/inner",
        v1("/docker/c0"),
        {
            "sys/fs/cgroup/memory/memory.limit_in_bytes": 2 * G,
            "sys/fs/cgroup/memory/inner/memory.limit_in_bytes": G,
        },
        G,
    ),
    "Slurm of version 1 beside an empty version 2": (
        "9:name=systemd:/x\n5:cpu,cpuacct:/y\n4:memory:/slurm/uid_1/job_7\n0::/x",
        v1() + v2(at="/sys/fs/cgroup/unified"),
        {
            "sys/fs/cgroup/memory/memory.limit_in_bytes": MANY,
            "sys/fs/cgroup/memory/slurm/uid_1/memory.limit_in_bytes": G,
            "sys/fs/cgroup/memory/slurm/uid_1/job_7/memory.limit_in_bytes": MANY,
            "sys/fs/cgroup/unified/x/cgroup.procs": 1,
        },
        G,
    ),
    "a limit of version 1 above what is mounted": (
        "4:memory:/",
        v1(),
        {"sys/fs/cgroup/memory/memory.stat": f"cache 0\nhierarchical_memory_limit {G}"},
        G,
    ),
    "a folder with a space": ("0::/", v2(at=r"/sys/fs/c\040g"), {"sys/fs/c g/memory.max": G}, G),
    "the group's folder is missing": ("0::/gone/by/now", v2(), {"sys/fs/cgroup/memory.max": G}, G),
    "mounts are hidden": ("0::/", "", {"sys/fs/cgroup/memory.max": G}, G),
    "torn lines": ("0:\nx\n::\n", "1 2\n - cgroup2\n", {"sys/fs/cgroup/memory/memory.limit_in_bytes": G}, G),
}


@pytest.mark.parametrize("name", TREES)
def test_the_smallest_limit_of_any_group_on_the_way_up(name: str, tmp_path: Path) -> None:
    """A plan under Slurm's --mem once counted the whole machine's memory: only the root group's limit was read
    (rstudio/rstudio#13690, JuliaLang/julia#46796, dask/distributed#1712).
    """
    cgroup, mounts, files, granted = TREES[name]
    assert granted_bytes(machine(tmp_path, cgroup, mounts, files)) == granted


def test_a_machine_that_tells_nothing(tmp_path: Path) -> None:
    """Without /proc and control groups, the machine's own memory is the limit."""
    assert (granted_bytes(tmp_path), available_bytes(tmp_path), oom_kills(tmp_path)) == (WHOLE, WHOLE, 0)
    assert granted_bytes() <= WHOLE
    assert 0 < available_bytes() <= WHOLE


def test_what_a_group_uses_is_not_available(tmp_path: Path) -> None:
    """Cached files can be reclaimed. Of several limits, the one with the fewest bytes available counts, in both
    versions.
    """
    group = "sys/fs/cgroup/a"
    files = {"proc/meminfo": "MemTotal: 9 kB\nMemAvailable:  8388608 kB", f"{group}/memory.max": 3 * G}
    files |= {f"{group}/memory.current": 2 * G, f"{group}/memory.stat": f"anon 5\ninactive_file {G // 2}"}
    assert available_bytes(machine(tmp_path / "own", "0::/a/b", v2(), files)) == 3 * G - 2 * G + G // 2
    files |= {f"{group}/b/memory.max": G, f"{group}/b/memory.current": G}
    assert available_bytes(machine(tmp_path / "below", "0::/a/b", v2(), files)) == 0
    memory_files = "sys/fs/cgroup/memory/job/memory"
    old_files = {
        f"{memory_files}.limit_in_bytes": 2 * G,
        f"{memory_files}.usage_in_bytes": G,
        f"{memory_files}.stat": f"inactive_file 1\ntotal_inactive_file {G}",
    }
    assert available_bytes(machine(tmp_path / "old", "3:memory:/job", v1(), old_files)) == 2 * G


def test_the_own_group_counts_what_was_killed_for_memory(tmp_path: Path) -> None:
    """A group counts the processes in it and below; if no group counts, the machine's count is taken."""
    assert oom_kills() >= 0
    events = "low 0\nmax 3\noom 2\noom_kill 7\noom_group_kill 1"
    root = machine(tmp_path, "0::/a", v2(), {"sys/fs/cgroup/a/memory.events": events, "proc/vmstat": "oom_kill 9"})
    assert oom_kills(root) == 7
    (root / "sys/fs/cgroup/a/memory.events").write_text("torn")
    assert oom_kills(root) == 9
    old = {"sys/fs/cgroup/memory/a/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 4"}
    assert oom_kills(machine(tmp_path / "old", "2:memory:/a", v1(), old)) == 4


def test_a_process_that_was_killed_for_memory_long_ago_is_no_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the last seconds count: a process killed for memory an hour ago does not explain a present failure."""
    count = [3]
    monkeypatch.setattr(machine_memory, "oom_kills", lambda: count[0])
    kills = MemoryKills()
    assert not kills.any_now()
    count[0] += 1
    kills.look(kills._looked + 60)
    assert kills.any_now()
    kills.look(kills._looked + 60)
    assert not kills.any_now()
