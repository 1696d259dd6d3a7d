"""Runs parts of the GPU command in separate process groups, reads their rows as they come, and ends them in time.

`gpu.py` calls it. However a part ends, none of its processes stays: the group is killed, and workers of an elastic
run, which have separate groups, die with their supervisor.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from varuna_capslog.base.processes import killed_with

__all__ = ["Ended", "Part", "raise_when_ended", "run_parts"]

_LOOK_SECONDS = 0.1


class Ended(BaseException):
    """The command got a signal to end."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number
        self.why = f"the command was ended by {signal.Signals(number).name}"


def raise_when_ended() -> None:
    """Make SIGINT and SIGTERM raise `Ended`, once."""

    def end(number: int, frame: Any) -> None:
        for signal_number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signal_number, signal.SIG_IGN)
        raise Ended(number)

    for signal_number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signal_number, end)


@dataclass(frozen=True)
class Part:
    """A command that writes lines of JSON to `folder`/rows.

    Attributes:
        folder: folder of this part, the TMPDIR of its processes.
        seconds: time limit.
        take: called with every line.
    """

    command: Sequence[str]
    folder: Path
    seconds: float
    take: Callable[[dict[str, Any]], object]


def run_parts(parts: Sequence[Part]) -> list[str | None]:
    """Run parts side by side; return for each None, or the reason why it did not finish."""
    running: list[_Running] = []
    try:
        for part in parts:
            running.append(_Running(part))
        while sum(not member.has_ended() for member in running):
            time.sleep(_LOOK_SECONDS)
    finally:
        for member in running:
            member.end()
    return [member.why for member in running]


class _Running:
    """A part that was started."""

    def __init__(self, part: Part) -> None:
        self._part, self._taken, self._until = part, 0, time.monotonic() + part.seconds
        self._rows, self._log = part.folder / "rows", part.folder / "log"
        self._rows.touch()
        self._ended = False
        self.why: str | None = None
        folder = str(part.folder)
        with self._log.open("wb") as output:
            self._process = subprocess.Popen(
                part.command,
                env=os.environ | {"TMPDIR": folder, "XDG_CACHE_HOME": folder, "OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                preexec_fn=killed_with(os.getpid()),
            )

    def has_ended(self) -> bool:
        """Read its new rows, and end it when its time is over; True once it has ended."""
        if self._ended:
            return True
        status = self._process.poll()
        lines = self._rows.read_text().split("\n")[:-1]  # the last one may be half
        for line in lines[self._taken :]:
            self._part.take(json.loads(line))
        self._taken = len(lines)
        if status is None and time.monotonic() <= self._until:
            return False
        if status is None:
            self.why = f"its part took longer than {self._part.seconds:.0f} s"
        elif status:
            self.why = _last_words(self._log, status)
        self.end()
        return True

    def end(self) -> None:
        """Kill all of its processes."""
        self._ended = True
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def _last_words(log: Path, status: int) -> str:
    """Return the last line of the log as the reason for a failure."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    sys.stderr.write("".join(f"    {line}\n" for line in lines[-12:]))
    return f"its part failed with status {status}: {lines[-1][:300] if lines else 'no word'}"
