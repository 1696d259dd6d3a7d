"""Parts that every worker process needs (`start.worker`, `elastic.member`): stop requests, failure report, exit."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from varuna_capslog.base import files
from varuna_capslog.base.clock import wall_seconds
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.base.failures import kind_of, shortage
from varuna_capslog.base.tables import printable

__all__ = ["StopWish", "leave", "report_failure"]


class StopWish:
    """Flag that this process was asked to stop; SIGINT sets it, a step boundary reads it."""

    def __init__(self) -> None:
        self.stop = False
        signal.signal(signal.SIGINT, self._hear)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self.stop = True

    def __call__(self) -> bool:
        return self.stop


def report_failure(run_dir: Path, name: str, label: str, error: Exception, where: Mapping[str, Any]) -> int:
    """Report on stderr and in `workers/<name>.error.json` why this process ends; return the exit status for `error`.

    Called from the handler of `error`. label: of this worker on stderr. where: the rank, and stage, step and microbatch
    as far as they are known.
    """
    if isinstance(error, CapslogError):
        cause, kind, status = str(error), error.kind, error.exit_status
    else:
        cause = str(shortage(error) or f"{type(error).__name__}: {error}")
        kind, status = kind_of(error), 1
    with contextlib.suppress(OSError):  # the log may lie on a disk that is full
        if not isinstance(error, CapslogError) or os.environ.get("CAPSLOG_DEBUG"):
            traceback.print_exc()
        sys.stderr.write(f"{label}: {printable(cause)}\n")
    report = {"peer": getattr(error, "peer", None), **where}
    report |= {"kind": kind, "cause": cause, "time": wall_seconds()}
    with contextlib.suppress(CapslogError):
        files.write_json(run_dir / "workers" / f"{name}.error.json", report)
    return status


def leave(status: int) -> NoReturn:
    """End this process at once, with all output flushed.

    Not by `sys.exit`: after a failure gloo's threads may wait for ever for lost peers, and after success a C++ thread
    that needs the interpreter while it ends sometimes aborts the process ("terminate called without an active
    exception", seen in one run of eight), so that a finished run would count as failed.
    """
    for stream in (sys.stderr, sys.stdout):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(status)
