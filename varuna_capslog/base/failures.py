"""Failures of workers. A worker writes a report as it ends. From reports and exit statuses its supervisor finds why a
worker was lost, and which failure caused the others.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
import traceback
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from varuna_capslog.base import files
from varuna_capslog.base.clock import wall_seconds
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.base.processes import PROCESS_LIMIT
from varuna_capslog.base.tables import printable

__all__ = [
    "CAUSES",
    "Failure",
    "StopWish",
    "exit_failure",
    "is_consequence",
    "is_out_of_memory",
    "kind_of",
    "leave",
    "loss_cause",
    "losses_by_cause",
    "losses_in_words",
    "read_failure",
    "report_failure",
    "root_cause",
    "shortage",
    "signal_name",
]

_SECONDARY_KINDS = ("peer", "stopped", "interrupted")  # consequences of another rank's end

CAUSES = {
    "killed": "killed by a signal",
    "crashed": "crashed by a signal of its own, such as SIGSEGV",
    "hung": "stopped or without an answer for too long",
    "memory": "out of memory",
    "disk": "disk full or not writable",
    "device": "an error of its device",
    "network": "cut off from the network",
    "host": "its machine gone",
    "failed": "an error of its program or its data",
}
"""Why a worker was lost, in words."""

_OWN_SIGNALS = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE)
_OF_DEVICES = ("CUDA error", "cuDNN error", "CUBLAS_STATUS", "device-side assert", "HIP error")


@dataclass(frozen=True)
class Failure:
    """Failure of a worker, from its report in `workers/<rank>.error.json` or from the end of its process.

    Attributes:
        cause: one sentence without a period.
        kind: "user", "step_refused", "peer" (another rank went away), "memory", "disk", "device", "defect", ... from
            the worker; "signal", "exit" and "hang" from the supervisor.
        time: seconds since the epoch.
        peer: the rank that the worker was waiting for, if its failure names another rank.
        after_step: the last step that the run finished, if the step of the failure is unknown.
        member: the worker's name, if workers have names instead of ranks.
        loss: a name of `CAUSES`, where the supervisor observed the cause; None: the cause follows from `kind`.
    """

    rank: int
    cause: str
    kind: str
    time: float
    stage: Any = None
    step: int | None = None
    microbatch: int | None = None
    peer: int | None = None
    after_step: int | None = None
    member: str | None = None
    loss: str | None = None

    def sentence(self) -> str:
        """Return rank, stage, step, microbatch and cause, as far as known."""
        worker = f"rank {self.rank}" if self.member is None else f"worker {self.member}"
        where = "" if self.stage is None else f" (stage {self.stage})"
        when = ""
        if self.step is not None:
            when = f" at step {self.step}" + ("" if self.microbatch is None else f", microbatch {self.microbatch}")
        elif self.after_step is not None:
            when = f" after step {self.after_step}"
        if self.kind == "signal":
            return f"{worker}{where} {self.cause}{when}"
        if self.kind == "hang":
            return f"{worker}{where} does not answer{when}: {self.cause}"
        if self.kind == "step_refused":
            return self.cause  # all ranks agreed to refuse the step: no rank failed
        return f"{worker}{where} failed{when}: {self.cause}"


def read_failure(path: Path, rank: int, stage: Any, member: str | None = None) -> Failure | None:
    """Return a worker's report, with `stage` if it names none; None if the file is missing or incomplete."""
    try:
        report = files.read_json(path)
        return Failure(
            rank=rank,
            cause=str(report["cause"]),
            kind=str(report.get("kind", "exit")),
            time=float(report.get("time") or path.stat().st_mtime),
            stage=report.get("stage", stage),
            step=report.get("step"),
            microbatch=report.get("microbatch"),
            peer=report.get("peer"),
            member=member,
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # missing, or cut off by the failure itself, such as a full disk


def exit_failure(rank: int, status: int, log: Path, time: float, memory_killed: bool = False, **fields: Any) -> Failure:
    """Return the failure of a worker without a report, from the end of its process.

    Args:
        status: exit status, or minus the number of the signal that ended it.
        memory_killed: the system killed a process for lack of memory at that time (`machine_memory.MemoryKills`).
        fields: further fields of the failure.
    """
    if status < 0:
        for_memory = memory_killed and status == -signal.SIGKILL
        loss = "memory" if for_memory else "crashed" if -status in _OWN_SIGNALS else "killed"
        cause = f"was killed by {signal_name(-status)}" + (" for lack of memory" if for_memory else "")
        return Failure(rank, cause, "signal", time, loss=loss, **fields)
    return Failure(rank, f"exit status {status}: {_last_line(log)}", "exit", time, **fields)


def is_out_of_memory(error: BaseException) -> bool:
    """True where an allocation failed, on a device or in the memory of a CPU."""
    named = any(base.__name__ in ("MemoryError", "OutOfMemoryError") for base in type(error).__mro__)
    return named or (isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error))


def shortage(error: BaseException) -> CapslogError | None:
    """Return the error to raise if `error` means that the system had no more threads or processes; else None."""
    sentence = f"{type(error).__name__}: {error}"
    refused = any(words in sentence for words in ("can't start new thread", os.strerror(errno.EAGAIN)))
    return CapslogError(f"no thread or process can be started ({sentence}); {PROCESS_LIMIT}") if refused else None


def kind_of(error: BaseException) -> str:
    """Return the kind of failure for an unexpected error."""
    if is_out_of_memory(error):
        return "memory"
    if isinstance(error, OSError) and files.is_full(error):
        return "disk"
    named = any(base.__name__ == "AcceleratorError" for base in type(error).__mro__)
    return "device" if named or any(word in str(error) for word in _OF_DEVICES) else "defect"


def loss_cause(failure: Failure) -> str:
    """Return the cause of the loss, a name of `CAUSES`."""
    by_kind = {"signal": "killed", "hang": "hung", "peer": "network"}.get(failure.kind, failure.kind)
    return failure.loss or (by_kind if by_kind in CAUSES else "failed")


def signal_name(number: int) -> str:
    """Return the name of a signal, such as SIGKILL for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _last_line(log: Path) -> str:
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError:
        lines = []
    return next((line.strip() for line in reversed(lines) if line.strip()), "it left no message")


def is_consequence(failure: Failure) -> bool:
    """True where the failure only reports that another rank is gone."""
    return failure.kind in _SECONDARY_KINDS


def root_cause(failures: Iterable[Failure]) -> Failure:
    """Return the earliest failure that is a cause; without one, the earliest exit without a report, or consequence."""
    return min(failures, key=lambda failure: (_distance(failure), failure.time))


def _distance(failure: Failure) -> int:
    # A process that exits without a report has often crashed because a neighbor was lost.
    return 2 if is_consequence(failure) else int(failure.kind == "exit")


# -- The causes of a run's lost workers, from the hosts' entries in events.jsonl.
#
# A silent host counts as gone; if it comes back, it reports whether it was cut off from the network or paused.


def losses_by_cause(events: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Return member -> a name of `CAUSES` for all lost members; "failed" for an entry without a cause."""
    causes: dict[str, str] = {}
    silent: dict[str, list[str]] = {}
    for event in events:
        cause = str(event.get("cause"))
        if event.get("kind") == "lost":
            member = str(event.get("member"))
            causes[member] = cause if cause in CAUSES else "failed"
            if cause == "host":
                silent.setdefault(str(event.get("host")), []).append(member)
        elif event.get("kind") == "cause" and cause in CAUSES:
            for member in silent.pop(str(event.get("host")), ()):
                causes[member] = cause
    return causes


def losses_in_words(events: Iterable[Mapping[str, Any]]) -> str | None:
    """Return the number of lost workers for each cause in words, most frequent first; None where none was lost."""
    counted = Counter(losses_by_cause(events).values())
    return ", ".join(f"{count} {CAUSES[cause]}" for cause, count in counted.most_common()) or None


# -- Functions that every worker process needs (`start.worker`, `elastic.member`): stop request, failure report, exit.


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

    Called from the handler of `error`. label: this worker's name on stderr. where: the rank, and stage, step and
    microbatch as far as they are known.
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
