"""Causes of a lost worker, by real errors and ends, and the choice among several failures."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from varuna_capslog.base.errors import DiskFailed, PeerLost
from varuna_capslog.base.failures import (
    CAUSES,
    Failure,
    exit_failure,
    kind_of,
    loss_cause,
    read_failure,
    report_failure,
    root_cause,
    shortage,
)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("can't start new thread"),
        RuntimeError("Resource temporarily unavailable"),  # from torch's own threads, for a backward
        BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN)),
    ],
)
def test_a_limit_of_threads_is_named_whoever_meets_it(error: BaseException) -> None:
    """The estimator told the user to let a layer depend on shapes only, and `capslog` called it a defect."""
    assert "raise the limit of processes and threads (ulimit -u" in str(shortage(error))
    assert shortage(RuntimeError("shapes differ")) is None


def failed_allocation() -> BaseException:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    return caught.value


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (failed_allocation(), "memory"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB."), "memory"),
        (MemoryError(), "memory"),
        (OSError(errno.ENOSPC, "No space left on device"), "disk"),
        (OSError(errno.EROFS, "Read-only file system"), "disk"),
        (OSError(errno.ENOENT, "No such file"), "defect"),
        (torch.AcceleratorError("CUDA error: an illegal memory access was encountered"), "device"),
        (RuntimeError("CUDA error: device-side assert triggered"), "device"),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), "defect"),
        (ValueError("DefaultCPUAllocator: can't allocate memory"), "defect"),
    ],
)
def test_the_kind_of_an_error(error: BaseException, kind: str) -> None:
    assert kind_of(error) == kind


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (MemoryError(), "memory"),
        (DiskFailed("metrics.jsonl cannot be written: No space left on device"), "disk"),
        (RuntimeError("CUDA error: device-side assert triggered"), "device"),
        (PeerLost("rank 1 closed its connection", 1), "network"),
        (RuntimeError("oops"), "failed"),
    ],
)
def test_a_report_says_what_the_worker_was_lost_by(tmp_path: Path, error: Exception, cause: str) -> None:
    (tmp_path / "workers").mkdir()
    report_failure(tmp_path, "m1", "worker m1", error, {"rank": 1})
    failure = read_failure(tmp_path / "workers" / "m1.error.json", 1, None)
    assert failure is not None
    assert loss_cause(failure) == cause
    assert cause in CAUSES


@pytest.mark.parametrize(
    ("code", "cause"),
    [
        ("import os; os.kill(os.getpid(), 9)", "killed"),
        ("import os; os.kill(os.getpid(), 15)", "killed"),
        ("import ctypes; ctypes.string_at(0)", "crashed"),
        ("import os; os.abort()", "crashed"),
        ("raise SystemExit(3)", "failed"),
    ],
)
def test_an_end_without_a_report_says_it_too(tmp_path: Path, code: str, cause: str) -> None:
    status = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True).returncode
    assert loss_cause(exit_failure(0, status, tmp_path / "no.log", 1.0)) == cause


def test_the_first_failure_that_is_no_consequence_is_the_cause() -> None:
    peer, exit_, defect = (Failure(rank, "x", kind, 5.0 - rank) for rank, kind in enumerate(("peer", "exit", "defect")))
    assert root_cause([peer, exit_, defect]) == defect
    assert root_cause([peer, exit_]) == exit_
    assert "SIGKILL" in exit_failure(0, -int(signal.SIGKILL), Path("none"), 0.0).sentence()
