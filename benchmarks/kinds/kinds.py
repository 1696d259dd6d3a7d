"""Compares, for one small model of each of twelve kinds, what is said of it before a run with what a run shows.

Each kind runs in a process of its own. The step of the captured model, cut into three stages, is compared with the
module's own, as in `benchmarks/captured/captured60.py`. `capslog.fits` for a device with too little memory names the
plan with the smallest peak; `capslog train` runs this plan on the CPU, and its allocator's peak is compared with the
estimates. Then `capslog.fits` is asked for devices with 0.99, 1.01 and 1.02 times the measured peak. Prints the table
of README.md; exits 1 if a row misses an aim.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "captured"))

from captured60 import PRECISION, compare
from common import machine, trained_peaks, write_json
from drawn_models import Drawn
from small_models import KINDS, ROWS

import varuna_capslog as capslog
from varuna_capslog.plans.plan import write_plan

HERE = Path(__file__).parent
MICROBATCHES = 4
PARTS = (0.99, 1.01, 1.02)
"""Of the measured peak; `fits` needs 1 % more of a CPU than the peak."""
MOST_ERROR = 0.001


def ask(kind: str, capacity: int) -> Any:
    """Return the answer of `capslog.fits` for one CPU with this memory."""
    train = {"train.microbatch_size": ROWS, "train.minibatch_size": ROWS * MICROBATCHES}
    settings = {"model.arguments.kind": kind, **train}
    return capslog.fits("small_models:example", devices=1, device="cpu", capacity=capacity, settings=settings)


def measured_peak(kind: str, plan: Any, folder: Path) -> int:
    """Train four steps of the plan on the CPU; return the allocator's peak of the second."""
    write_plan(folder / "plan.json", plan)
    config = {
        "workload": "varuna_capslog.model.model_workload:workload",
        "model": {"factory": "small_models:example", "arguments": {"kind": kind}},
        "train": {
            "microbatch_size": ROWS,
            "minibatch_size": ROWS * MICROBATCHES,
            "max_steps": 4,
            "evaluate_every": None,
        },
        "pipeline": {"plan": str(folder / "plan.json"), "capacity": "8GiB"},
        "profile": {"source": "estimated"},
        "device": "cpu",
        "run_dir": str(folder / "run"),
    }
    path = folder / "config.yaml"
    path.write_text(json.dumps(config))
    return trained_peaks(path, folder / "run", os.environ)[0]


def measure(kind: str) -> dict[str, Any]:
    """Return the row of one kind."""
    row: dict[str, Any] = {"kind": kind}
    drawn = Drawn(*KINDS[kind])
    compare(drawn, row)
    if row["verdict"] == "differs":
        PRECISION["dtype"], in_float64 = torch.float64, {}
        compare(drawn, in_float64)
        if "largest" in in_float64:
            row["in_float64"] = max(in_float64["largest"], in_float64["loss_difference"])
    smallest = ask(kind, 1 << 20)
    with tempfile.TemporaryDirectory(prefix="kinds-") as folder:
        row["measured"] = measured_peak(kind, smallest.plan, Path(folder))
    answers = [ask(kind, math.ceil(part * row["measured"])) for part in PARTS]
    row["folded"], row["rehearsed"] = smallest.memory.peaks[0], answers[1].memory.peaks[0]
    row["split"], row["fits"] = answers[1].split, [answer.fits for answer in answers]
    return row


def table_row(row: dict[str, Any]) -> str:
    """Return a line of the table."""
    if "measured" not in row:
        return f"| {row['kind']} | failed | {row['error']} |"
    step = "equal bits"
    if row["verdict"] != "bitwise":
        step = f"{row['largest']:.0e}" if "largest" in row else row["verdict"]
    if "in_float64" in row:
        step += f"; {row['in_float64']:.0e}"
    folded, rehearsed = (f"{row[name] / row['measured'] - 1:+.3%}" for name in ("folded", "rehearsed"))
    answers = " | ".join("fits" if answer else "does not fit" for answer in row["fits"])
    return (
        f"| {row['kind']} | {row.get('parameters', 0):,} | {row.get('layers')} | {step} | {row['measured']:,} | "
        f"{folded} | {rehearsed} | {answers} | {row['seconds']:.0f} |"
    )


def meets_aims(row: dict[str, Any]) -> bool:
    """True where the step, the peak and all verdicts are right."""
    if row.get("verdict") not in ("bitwise", "close") or "measured" not in row:
        return False
    return abs(row["rehearsed"] / row["measured"] - 1) <= MOST_ERROR and row["fits"] == [False, True, True]


def run_alone(kind: str) -> dict[str, Any]:
    """Measure a kind in a process of its own."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kinds-cache-") as cache:
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parents[1])]),
            "XDG_CACHE_HOME": cache,
        }
        command = [sys.executable, __file__, "--child", kind]
        done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False, env=environment)
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    row = rows[-1] if rows else {"kind": kind, "error": done.stderr.strip().splitlines()[-1:]}
    if not rows:
        sys.stderr.write(done.stderr[-3000:])
    return row | {"seconds": time.monotonic() - started}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--json", type=Path, help="where to write the rows")
    parser.add_argument("--child", choices=list(KINDS), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(measure(arguments.child)), flush=True)
        os._exit(0)
    print(machine())
    print("| kind | parameters | layers | step | measured peak | fold | rehearsal | 0.99 | 1.01 | 1.02 | seconds |")
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    rows = []
    for kind in arguments.only:
        rows.append(run_alone(kind))
        print(table_row(rows[-1]), flush=True)
    write_json(arguments.json, {"rows": rows})
    missed = [row["kind"] for row in rows if not meets_aims(row)]
    print(f"\n{len(rows) - len(missed)} of {len(rows)} met" + (f"; missed: {', '.join(missed)}" if missed else ""))
    if missed:
        sys.exit(1)


if __name__ == "__main__":
    main()
