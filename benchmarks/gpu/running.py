"""Runs parts of the GPU command, each in a process group of its own, takes their rows as they come, ends them in time.

`gpu.py` calls it. Whatever ends a part, no process of it stays: the group is killed, and workers of an elastic run,
which have groups of their own, die with their supervisor.
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
    """From now on SIGINT and SIGTERM raise `Ended`, once."""

    def end(number: int, frame: Any) -> None:
        for one in (signal.SIGINT, signal.SIGTERM):
            signal.signal(one, signal.SIG_IGN)
        raise Ended(number)

    for one in (signal.SIGINT, signal.SIGTERM):
        signal.signal(one, end)


@dataclass(frozen=True)
class Part:
    """A command that writes lines of JSON to `folder`/rows.

    Attributes:
        folder: its own; its processes find it as TMPDIR.
        seconds: after which it is ended.
        take: called with every line.
    """

    command: Sequence[str]
    folder: Path
    seconds: float
    take: Callable[[dict[str, Any]], object]


def run_parts(parts: Sequence[Part]) -> list[str | None]:
    """Runs parts side by side; for each None, or why it did not come to its end."""
    running: list[_Running] = []
    try:
        for part in parts:
            running.append(_Running(part))
        while sum(not one.has_ended() for one in running):
            time.sleep(_LOOK_SECONDS)
    finally:
        for one in running:
            one.end()
    return [one.why for one in running]


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
        """Takes its new rows; ends it when its time is over."""
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
        """No process of it stays."""
        self._ended = True
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def _last_words(log: Path, status: int) -> str:
    """The last line of an error, as a reason."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    sys.stderr.write("".join(f"    {line}\n" for line in lines[-12:]))
    return f"its part failed with status {status}: {lines[-1][:300] if lines else 'no word'}"
