"""Measures the time to estimate the paper's six configurations from shapes alone, and estimates Fig. 8.

One process, one thread, no GPU and no data set. Times are CPU seconds; nothing is cached between processes.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

BEGAN = time.process_time()
ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from common import plan  # noqa: E402

from varuna_capslog.config.reading import load_config  # noqa: E402
from varuna_capslog.model.workload import load_workload  # noqa: E402
from varuna_capslog.profiling.conditions import RunConditions  # noqa: E402
from varuna_capslog.profiling.estimate import Memo, StageEstimator, estimate_config  # noqa: E402

CONFIGS = ("rn50_e6", "rn50_d_e6", "rn101_e6", "rn101_d_e6", "rn101_e12", "rn101_d_e12")
DEVICES = 8
GIB = 2**30
RESIDENT = 8 * 1333 * 1333 * (3 * 4 + 1)
"""Images and masks of a minibatch of eight, which the reference code keeps on every GPU; our engine does not."""


def seconds_of_all() -> list[dict[str, Any]]:
    """Return a row per configuration, in the order in which they are estimated."""
    memo, rows = Memo(), []
    for name in CONFIGS:
        before, runs_before = time.process_time(), len(memo.runs)
        profile = estimate_config(load_config(str(ROOT / f"configs/paper/{name}.yaml")), memo=memo)
        rows.append(
            {
                "config": name,
                "layers": profile.num_layers,
                "stages": len(profile.observations),
                "run": len(memo.runs) - runs_before,
                "cpu_seconds": round(time.process_time() - before, 2),
                "largest_alone_gib": round(max(layer.isolated_bytes for layer in profile.layers) / GIB, 3),
            }
        )
    return rows


def figure_8(name: str, memo: Memo) -> dict[str, Any]:
    """Return the peaks of all stages, each estimated as a whole, under uniform cuts and under our plan's."""
    config = load_config(str(ROOT / f"configs/paper/{name}.yaml"))
    profile = estimate_config(config, memo=memo)
    estimator = StageEstimator(load_workload(config), RunConditions(device="cuda"), memo=memo)
    row: dict[str, Any] = {"config": name}
    cuts = {
        "uniform": list(plan(profile, DEVICES, planner="varuna").cuts),
        "ours": list(plan(profile, DEVICES, planner="exact").cuts),
    }
    for label, first in cuts.items():
        peaks = [estimator.stage(*stage).peak_bytes for stage in pairwise([*first, profile.num_layers])]
        row[label] = {
            "cuts": first,
            "stage_gib": [round(peak / GIB, 2) for peak in peaks],
            "peak_gib": round(max(peaks) / GIB, 3),
            "with_resident_minibatch_gib": round((max(peaks) + RESIDENT) / GIB, 3),
        }
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="also write everything here")
    options = parser.parse_args()
    torch.set_num_threads(1)
    loaded = time.process_time() - BEGAN
    rows = seconds_of_all()
    total = sum(row["cpu_seconds"] for row in rows)
    print(f"load {os.getloadavg()[0]:.1f}, import {loaded:.1f} s, {platform.machine()}, torch {torch.__version__}")
    print("| configuration | layers | stage runs | run (the rest known) | CPU s | largest M_i, GiB |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        print("| " + " | ".join(str(value) for value in row.values()) + " |")
    print(f"\nall six: {total:.1f} CPU s\n")
    memo = Memo()
    figures = [figure_8(name, memo) for name in CONFIGS]
    print("| configuration | uniform, GiB | ours, GiB | with the minibatch on every GPU | reduction |")
    print("|---|---|---|---|---|")
    for row in figures:
        uniform, ours = row["uniform"], row["ours"]
        pair = [part["with_resident_minibatch_gib"] for part in (uniform, ours)]
        print(
            f"| {row['config']} | {uniform['peak_gib']} | {ours['peak_gib']} | {pair[0]:.2f} / {pair[1]:.2f} | "
            f"{100 * (1 - pair[1] / pair[0]):.1f} % |"
        )
    if options.json:
        result = {"seconds": rows, "total_cpu_seconds": total, "import_seconds": loaded, "figure_8": figures}
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
