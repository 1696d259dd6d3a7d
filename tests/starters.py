"""Workers of a supervisor that are new processes of a command line: a few lines of Python, with no engine."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from varuna_capslog.base.files import no_link
from varuna_capslog.base.processes import die_with_parent, reaped, startable
from varuna_capslog.base.supervisor import Starter, Worker

__all__ = ["starter_of"]


def starter_of(command: Sequence[str]) -> Starter:
    """Return a starter of workers that run a command line."""
    die_with = die_with_parent()

    def start(rank: int, environment: Mapping[str, str], log: Path) -> Worker:
        with open(log, "wb", opener=no_link) as file:
            with startable(f"worker {rank}: {command[0]!r}"):
                return _Started(
                    command,
                    env={**os.environ, **environment},
                    stdin=subprocess.DEVNULL,
                    stdout=None if rank == 0 else file,
                    stderr=file,
                    preexec_fn=die_with,
                )

    return start


class _Started(subprocess.Popen[bytes]):
    def poll(self) -> int | None:
        if self.returncode is None:
            try:
                self.returncode = reaped(self.pid)
            except ChildProcessError:  # SIGCHLD is ignored here: nobody knows its status, as in `subprocess`
                self.returncode = 0
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        assert timeout is None
        while (code := self.poll()) is None:
            time.sleep(0.002)
        return code
