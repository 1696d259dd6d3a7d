"""Several "machines" on this one for tests of commands and launchers: process groups that share a run's folder."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.elastic.live import Truth, truth_of
from tests.engine import cases
from tests.forks import Fork, start_command
from varuna_capslog.base import files
from varuna_capslog.config.reading import dump_config

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = (sys.executable, "-c", "from varuna_capslog.cli import program; program()")
CAPSLOG = "capslog"
"""Stands for `PROGRAM` in a command of `Machines.start` that may run as a fork."""
Process = subprocess.Popen[bytes] | Fork
LONG = 100000
"""Steps of a run that the test stops."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def write_config(folder: Path, devices: int = 2, steps: int = LONG, **elastic: Any) -> Path:
    """Write the tiny workload's config file, with given cuts so that nothing is profiled; the run is `folder`/run."""
    cuts = {1: [0], 2: [0, 5], 3: [0, 3, 8], 4: [0, 3, 6, 9]}[devices]
    config = cases.run_config(
        str(folder / "run"),
        train={"max_steps": steps},
        data={"pause_seconds": 0.3},  # every step is made again, alone, to judge it
        pipeline={"devices": devices, "cuts": cuts, "timeout_seconds": 60.0},
        elastic={"enabled": True, "lease_seconds": 2.0, "patience_seconds": 0.3} | elastic,
    )
    path = folder / "config.yaml"
    path.write_text(dump_config(config))
    return path


class Machines:
    """Commands with a process group each, which share the run's folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run_dir = folder / "run"
        self.processes: list[Process] = []

    def start(self, command: Sequence[str], environment: Mapping[str, str] | None = None) -> Process:
        number = len(self.processes)
        variables = {**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1", **(environment or {})}
        process: Process
        with open(self.folder / f"machine-{number}.log", "ab") as log:
            if command[0] == CAPSLOG:
                process = start_command(command[1:], variables, log.fileno(), log.fileno(), ROOT)
            else:
                process = subprocess.Popen(
                    command,
                    cwd=ROOT,
                    env=variables,
                    stdout=log,
                    stderr=log,
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                )
        self.processes.append(process)
        return process

    def text(self, number: int) -> str:
        return (self.folder / f"machine-{number}.log").read_text()

    def said(self) -> str:
        """Return output and events for a failed assertion."""
        events = [str(event)[:300] for event in self.events()]
        return "\n".join([self.text(number)[-3000:] for number in range(len(self.processes))] + events)

    def rows(self) -> list[dict[str, Any]]:
        path = self.run_dir / "metrics.jsonl"
        return files.read_jsonl(path) if path.exists() else []

    def events(self, kind: str | None = None) -> list[dict[str, Any]]:
        path = self.run_dir / "events.jsonl"
        events = files.read_jsonl(path) if path.exists() else []
        return [event for event in events if kind in (None, event["kind"])]

    def wait_for_steps(self, more: int) -> None:
        """Wait for this many further steps."""
        begin = len(self.rows())
        self.wait_for(lambda: len(self.rows()) >= begin + more, f"{more} steps after {begin}")

    def wait_for_members(self, *members: str) -> None:
        """Wait until a generation of exactly these members has trained."""
        wanted = set(members)
        awaited = f"a generation of {sorted(wanted)}"
        self.wait_for(lambda: any(set(e["members"]) == wanted for e in self.events() if "members" in e), awaited)

    def wait_for(self, condition: Callable[[], Any], awaited: str, seconds: float = 200.0) -> None:
        until = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < until, f"waited in vain for {awaited}:\n{self.said()}"
            time.sleep(0.02)

    def kill(self, process: Process) -> None:
        """Kill all processes of the machine at once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(60)

    def end(self, process: Process, seconds: float = 200.0) -> int:
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it does not end:\n{self.said()}") from None

    def check_losses(self, folder: Path) -> int:
        """Compare every line of the history with an uninterrupted run; return the last step."""
        rows = self.rows()
        last = max(row["step"] for row in rows)
        truth: Truth = truth_of(folder, last)
        assert {row["step"] for row in rows} == set(range(1, last + 1))
        for row in rows:
            assert (row["loss"], row["grad_norm"]) == (truth.loss[row["step"]], truth.grad_norm[row["step"]]), row
        return last

    def close(self) -> None:
        for process in self.processes:
            self.kill(process)
