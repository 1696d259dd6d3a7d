"""Measures the cost of protection without faults: steps of runs that differ only in it, in turns on the same cores.

Four runs exist at once, three of them stopped (SIGSTOP) at any time: `off` is `capslog train` without `elastic`, `none`
an elastic run without copies, `sync` and `async` copy every step. Each turn lasts some steps; turns change order from
round to round. Per turn: the median time between the ends of steps (metrics.jsonl), and the processor time of all
workers per step. Reported: medians over rounds of the ratios to the same round's turn of `off`.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from live import HERE, ROOT, Clock, Live, append_result

TICKS = os.sysconf("SC_CLK_TCK")
PROTECTION = {
    "none": ["elastic.redundancy=0"],
    "sync": ["elastic.redundancy=1", "elastic.protection=sync"],
    "async": ["elastic.redundancy=1", "elastic.protection=async"],
}
PATIENT = ["elastic.stopped_seconds=100000", "elastic.hang_seconds=100000", "pipeline.timeout_seconds=3600"]


def plain(arguments: list[str]) -> None:
    """Run `capslog train` under a supervisor that tolerates workers stopped for a long time."""
    from varuna_capslog.base import supervisor
    from varuna_capslog.cli import program as capslog

    supervisor.STOPPED_SECONDS = 1e9
    sys.argv = ["capslog", "train", *arguments]
    capslog()


class Turns:
    """Run that is stopped and continued in turns."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def pids(self) -> list[int]:
        records = [json.loads(path.read_text()) for path in (self.folder / "workers").glob("*.json")]
        failed = [record["cause"] for record in records if "cause" in record]
        if failed:
            raise RuntimeError(f"{self.folder.name}: {failed}")
        return [record["pid"] for record in records if "pid" in record]

    def rows(self) -> list[dict[str, Any]]:
        path = self.folder / "metrics.jsonl"
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

    def signal(self, number: int) -> None:
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def processor_seconds(self) -> float:
        total = 0
        for pid in self.pids():
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            total += int(fields[11]) + int(fields[12])
        return total / TICKS

    def wait_for(self, steps: int, seconds: float = 300.0) -> None:
        until = time.monotonic() + seconds
        while len(self.rows()) < steps:
            if time.monotonic() > until:
                logs = [path.read_text()[-400:] for path in (self.folder / "workers").glob("*.log")]
                raise TimeoutError(f"{self.folder}: {len(self.rows())} of {steps} steps; {logs}")
            time.sleep(0.01)

    def turn(self, steps: int) -> tuple[float, float]:
        """Return (seconds, processor seconds of all workers) of a step; the first, interrupted one does not count."""
        self.signal(signal.SIGCONT)
        first = len(self.rows()) + 1
        self.wait_for(first)
        worked = self.processor_seconds()
        self.wait_for(first + steps)
        worked = self.processor_seconds() - worked
        self.signal(signal.SIGSTOP)
        ends = [row["time"] for row in self.rows()[first - 1 :]]
        return statistics.median(b - a for a, b in itertools.pairwise(ends)), worked / (len(ends) - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="3 rounds")
    size.add_argument("--full", action="store_true", help="60 rounds")
    parser.add_argument("--rounds", type=int, default=0, help="instead of 20")
    parser.add_argument("--minutes", type=float, default=0.0, help="and no more than fit into so many")
    parser.add_argument("--steps", type=int, default=40, help="of a turn")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--runs", nargs="+", default=["off", *PROTECTION])
    parser.add_argument("--config", type=Path, default=HERE / "small.yaml")
    parser.add_argument("overrides", nargs="*", help="of the config's keys")
    args = parser.parse_args()
    rounds = args.rounds or (3 if args.quick else 60 if args.full else 20)
    common = [*PATIENT, *args.overrides]
    clock = Clock(args.minutes)
    with contextlib.ExitStack() as stack:
        holder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="capslog-steady-")))
        runs = {name: Turns(holder / name) for name in args.runs}
        for name, run in runs.items():
            if name == "off":
                overrides = [f"run_dir={run.folder}", f"pipeline.devices={args.devices}", "elastic.enabled=false"]
                environment = {**os.environ, "PYTHONPATH": f"{HERE}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
                command = [sys.executable, __file__, "--plain", str(args.config), *overrides, *common]
                process = subprocess.Popen(
                    command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
                )
                stack.callback(process.wait)
                stack.callback(process.kill)
            else:
                stack.enter_context(
                    Live(args.config, [*PROTECTION[name], *common], args.devices, folder=run.folder, entry=ENTRY)
                )
            run.wait_for(8)  # beyond the step in which peaks are measured
            run.signal(signal.SIGSTOP)
        for run in runs.values():
            stack.callback(run.signal, signal.SIGKILL)
        base = args.runs[0]
        turns: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
        for number in range(rounds):
            if clock.over and number > 1:
                break
            for name in list(runs) if number % 2 == 0 else list(runs)[::-1]:
                turns[name].append(runs[name].turn(args.steps))
        sizes = protected_bytes(args.config, [*PROTECTION["sync"], *common], args.devices)
    append_result(
        "steady",
        {
            "config": args.config.name,
            "overrides": args.overrides,
            "devices": args.devices,
            "rounds": len(turns[base]),
            "steps_per_turn": args.steps,
            "seconds": clock.seconds,
            "step_ms": {name: middle(rows, 0) for name, rows in turns.items()},
            "step_cpu_ms": {name: middle(rows, 1) for name, rows in turns.items()},
            "time_ratio": {name: ratio(rows, turns[base], 0) for name, rows in turns.items() if name != base},
            "cpu_ratio": {name: ratio(rows, turns[base], 1) for name, rows in turns.items() if name != base},
            "base": base,
            **sizes,
        },
    )


def middle(rows: list[tuple[float, float]], which: int) -> float:
    """Return the median over the rounds, in thousandths."""
    return round(1e3 * statistics.median(row[which] for row in rows), 2)


def ratio(mine: list[tuple[float, float]], base: list[tuple[float, float]], which: int) -> list[float]:
    """Return lower quartile, median and upper quartile of the rounds' ratios."""
    ratios = [a[which] / b[which] for a, b in zip(mine, base, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return [round(value, 4) for value in (low, middle, high)]


def protected_bytes(config_path: Path, overrides: list[str], devices: int) -> dict[str, int]:
    """Return the bytes of the model's state, and those copied per step: one gradient per trained parameter."""
    from varuna_capslog.config.reading import load_config
    from varuna_capslog.model.workload import load_workload
    from varuna_capslog.training import layer_state
    from varuna_capslog.training.run_setup import set_up_run

    sys.path.insert(0, str(HERE))
    config = load_config(config_path, [f"pipeline.devices={devices}", "elastic.enabled=true", *overrides])
    setup = set_up_run(config, load_workload(config))
    chain, recipe = setup.chain, setup.options.recipe
    parameters = [p for layer in chain.layers for p in layer.module.parameters()]
    return {
        "layers": len(chain),
        "state_bytes": sum(layer_state.size_of(chain, index, recipe) for index in range(len(chain))),
        "copied_bytes_per_step": sum(p.numel() * p.element_size() for p in parameters if p.requires_grad),
    }


ENTRY = "varuna_capslog.start.member_worker:main"

if __name__ == "__main__":
    if sys.argv[1:2] == ["--plain"]:
        plain(sys.argv[2:])
    else:
        main()
