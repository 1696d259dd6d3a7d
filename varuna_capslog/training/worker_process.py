"""Parts that every worker process needs, whatever it trains: stop requests, the report of a failure, its end.

`start.worker` is a rank of a run of a fixed number of steps, `elastic.member` a member of an elastic run.
"""

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
    """Says on stderr and in `workers/<name>.error.json` why this process ends, from the handler of `error`.

    Args:
        label: name of this worker on stderr.
        where: the rank, and stage, step and microbatch as far as they are known.

    Returns:
        The exit status that goes with the error.
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
    """Ends this process at once, everything written.

    Not by `sys.exit`: after a failure gloo's threads may wait for ever for peers that are gone, and after success a
    thread of C++ that wants the interpreter while it ends aborts the process now and then ("terminate called without
    an active exception", seen in one run of eight), which would make a failure of a finished run.
    """
    for stream in (sys.stderr, sys.stdout):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(status)
