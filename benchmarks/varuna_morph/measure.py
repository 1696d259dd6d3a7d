"""Measures worker changes of a training on the real Varuna: 4 -> 3 (SIGKILL) -> 2 (SIGUSR1) -> 4 (capslog morph).

    PYTHONPATH=/path/to/varuna python benchmarks/varuna_morph/measure.py [ROUNDS]

Appends one line per change to results.jsonl and prints a table. Needs an importable Varuna.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.common import machine
from varuna_capslog.base import files
from varuna_capslog.varuna_plugin.checkpoint import newest

HERE = Path(__file__).parent
STEPS = 400
AIMS = {"SIGKILL": 3.0, "SIGUSR1": 1.0, "capslog morph": 1.0}


def rows(path: Path) -> list[dict[str, Any]]:
    """Read the complete lines of a file that a run may still be writing."""
    return files.read_jsonl(path) if path.exists() else []


class Run:
    """Running script."""

    def __init__(self, folder: Path, workers: int) -> None:
        self.folder = folder
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command = [sys.executable, str(HERE / "train.py"), str(folder), str(STEPS), str(workers)]
        self.process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)

    def until(self, done: Callable[[], bool]) -> None:
        while not done():
            if self.process.poll() is not None:
                raise SystemExit(f"{self.folder}: the run ended too early with {self.process.returncode}")
            time.sleep(0.05)

    def step(self) -> int:
        return max((row["step"] for row in rows(self.folder / "times.jsonl")), default=0)

    def generations(self) -> list[dict[str, Any]]:
        return [row for row in rows(self.folder / "events.jsonl") if row["kind"] in ("begin", "morph")]

    def pids(self) -> dict[str, int]:
        """Return the processes of the members that train, in the order of their ranks."""
        members = self.generations()[-1]["members"]
        return {name: files.read_json(self.folder / "workers" / f"{name}.json")["pid"] for name in members}

    def settle(self, members: int) -> None:
        """Wait until `members` train and have made twelve steps."""
        self.until(lambda: bool(self.generations()) and len(self.generations()[-1]["members"]) == members)
        reached = self.step() + 12
        self.until(lambda: self.step() >= reached)


def outcome(folder: Path) -> tuple[dict[int, float], dict[str, Any]]:
    """Return the losses by step, and the parameters and moments of the last checkpoint."""
    checkpoint = newest(folder / "checkpoints")
    assert checkpoint is not None
    assert checkpoint[0] == STEPS
    state = {}
    for path in sorted(checkpoint[1].glob("opt-fp32-params-*")) + sorted(checkpoint[1].glob("opt-state-*")):
        for name, value in torch.load(path, weights_only=True).items():
            for key, tensor in value.items() if isinstance(value, dict) else [("", value)]:
                state[f"{path.name.rpartition('-')[0]}/{name}/{key}"] = torch.as_tensor(tensor)
    return {row["step"]: row["loss"] for row in rows(folder / "metrics.jsonl")}, state


def pause(run: Run, event: dict[str, Any], signalled: float) -> dict[str, float]:
    """Return the durations of a change, in seconds.

    pause: from the last step before to the beginning of the first step after, as the run reports it. gap: between the
    two steps' ends as the script saw them, less a usual step. until_step: from the signal to the next step's end.
    """
    times = {row["step"]: row["time"] for row in rows(run.folder / "times.jsonl")}
    first = event["step"]
    around = [times[step + 1] - times[step] for step in range(first, first + 10)]
    before = [times[step] - times[step - 1] for step in range(first - 10, first)]
    return {
        "pause": event["pause_seconds"],
        "gap": times[first] - times[first - 1] - statistics.median(around),
        "until_step": times[first] - signalled,
        "step_before": statistics.median(before),
        "step_after": statistics.median(around),
        "search": event["search_seconds"],
        "transfer": event["transfer_seconds"],
    }


def disturbed(folder: Path) -> list[dict[str, Any]]:
    """Train a run with all changes; return a row for each."""
    run, changes = Run(folder, 4), []
    run.settle(4)
    began = run.pids()
    victim = list(began)[1]
    changes.append(("SIGKILL", "4 -> 3", time.time()))
    os.kill(began[victim], signal.SIGKILL)
    run.settle(3)
    leaver = next(iter(run.pids()))
    changes.append(("SIGUSR1", "3 -> 2", time.time()))
    os.kill(run.pids()[leaver], signal.SIGUSR1)
    run.settle(2)
    changes.append(("capslog morph", "2 -> 4", time.time()))
    command = [str(Path(sys.executable).with_name("capslog")), "morph", str(folder), "--devices", "4"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    run.settle(4)
    ended = run.pids()
    stayed = began.keys() - {victim, leaver}
    assert {name: ended[name] for name in stayed} == {name: began[name] for name in stayed}, "a survivor restarted"
    run.until(lambda: run.step() >= STEPS)
    assert run.process.wait(60) == 0
    events = [row for row in run.generations() if row["kind"] == "morph"]
    assert len(events) == 3, events
    return [
        {"by": by, "workers": workers, "cuts": event["cuts"]} | pause(run, event, when)
        for (by, workers, when), event in zip(changes, events, strict=True)
    ]


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    records: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temporary:
        undisturbed = Run(Path(temporary) / "whole", 4)
        assert undisturbed.process.wait(600) == 0
        losses, state = outcome(undisturbed.folder)
        for number in range(rounds):
            folder = Path(temporary) / f"round-{number}"
            load = os.getloadavg()[0]
            changes = disturbed(folder)
            mine, theirs = outcome(folder), state
            assert mine[0].keys() == losses.keys()
            loss = max(abs(mine[0][step] - losses[step]) for step in losses)
            weights = max(float((mine[1][name].double() - theirs[name].double()).abs().max()) for name in theirs)
            for change in changes:
                records.append(change | {"round": number, "load": load, "loss_differs": loss, "state_differs": weights})
    with open(HERE / "results.jsonl", "a", encoding="utf-8") as file:
        date = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
        file.write(json.dumps({"date": date, "machine": machine()}) + "\n")
        for row in records:
            file.write(json.dumps(row) + "\n")
    for by, aim in AIMS.items():
        chosen = [row for row in records if row["by"] == by]
        columns = {key: " ".join(f"{row[key]:.2f}" for row in chosen) for key in ("pause", "gap", "until_step")}
        shown = ", ".join(f"{key} {numbers}" for key, numbers in columns.items())
        sys.stdout.write(f"{chosen[0]['workers']} by {by} (aim {aim:g} s): {shown}\n")
    worst = [max(row[key] for row in records) for key in ("loss_differs", "state_differs")]
    sys.stdout.write(f"largest difference from the undisturbed run: loss {worst[0]:g}, state {worst[1]:g}\n")


if __name__ == "__main__":
    main()
