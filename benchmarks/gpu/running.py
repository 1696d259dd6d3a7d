"""Runs one part of the GPU command in a process group of its own, takes its rows as they come, and ends it in time.

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
from pathlib import Path
from typing import Any

from varuna_capslog.base.processes import killed_with

__all__ = ["Ended", "raise_when_ended", "run_part"]

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


def run_part(
    command: Sequence[str], folder: Path, seconds: float, take: Callable[[dict[str, Any]], object]
) -> str | None:
    """Runs a command that writes lines of JSON to `folder`/rows; None, or why it did not come to its end.

    Args:
        folder: the part's own; its processes find it as TMPDIR.
        seconds: after which it is ended.
        take: called with every line.
    """
    rows, log = folder / "rows", folder / "log"
    rows.touch()
    environment = os.environ | {"TMPDIR": str(folder), "XDG_CACHE_HOME": str(folder), "OMP_NUM_THREADS": "1"}
    until, taken = time.monotonic() + seconds, 0
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            preexec_fn=killed_with(os.getpid()),
        )
        try:
            while True:
                ended = process.poll() is not None
                lines = rows.read_text().split("\n")[:-1]  # the last one may be half
                for line in lines[taken:]:
                    take(json.loads(line))
                taken = len(lines)
                if ended or time.monotonic() > until:
                    break
                time.sleep(_LOOK_SECONDS)
        finally:
            _end(process)
    if not ended:
        return f"its part took longer than {seconds:.0f} s"
    return None if process.returncode == 0 else _last_words(log, process.returncode)


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _last_words(log: Path, status: int) -> str:
    """The last line of an error, as a reason."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    sys.stderr.write("".join(f"    {line}\n" for line in lines[-12:]))
    return f"its part failed with status {status}: {lines[-1][:300] if lines else 'no word'}"
