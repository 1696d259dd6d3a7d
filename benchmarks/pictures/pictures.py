"""Draws the two pictures of README.md: see README.md of this folder."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from varuna_capslog.base.gpus import gpu_of
from varuna_capslog.reports.style import ALARM, BLUE, GREY, INK, SKY, name_rows, picture

ROOT = Path(__file__).parents[2]
CONFIG = "configs/paper/rn50_d_e6.yaml"
PLANNERS = {"varuna": "equal parts", "capslog": "CAPSlog: smallest peak", "budget": "default: fastest that fits"}
GIB = 1 << 30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "pictures", help="folder for the pictures")
    folder = parser.parse_args().output
    folder.mkdir(parents=True, exist_ok=True)
    draw_planners(folder / "planners.png", compared())
    draw_errors(folder / "predicted.png", predicted_and_measured())


def compared() -> list[dict[str, Any]]:
    """Return the rows of `capslog compare` for DETR on eight T4s."""
    words = ["compare", CONFIG, "--estimate", "--device", "cuda:t4", "--planners", ",".join(PLANNERS), "--json"]
    command = [sys.executable, "-m", "varuna_capslog", *words]
    answer = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    rows: list[dict[str, Any]] = json.loads(answer.stdout)
    return rows


def predicted_and_measured() -> list[tuple[str, int, int]]:
    """Return (model and precision, predicted bytes, measured bytes) of the models that ran on an H200."""
    sys.path.insert(0, str(ROOT / "benchmarks" / "gpu_bytes"))
    import h200

    return [(f"{row['model']}, {row['mode']}", row["predicted"], row["peak"]) for row in h200.compare_peaks()]


def draw_planners(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Draw step time and memory of the fullest device for each planner, beside the capacity."""
    with picture(path, 1.9) as figure:
        figure.suptitle("DETR with a dilated ResNet-50 over eight T4s, predicted before any run", x=0.01, ha="left")
        times, peaks = figure.subplots(1, 2, sharey=True)
        card = gpu_of("cuda:t4")
        assert card is not None
        for place, row in enumerate(rows):
            fits = row["margin_bytes"] >= 0
            color = (BLUE if row["planner"] == "budget" else SKY) if fits else ALARM
            used = (card.memory_bytes - row["margin_bytes"]) / GIB
            times.barh(place, row["step_seconds"], height=0.6, color=color)
            times.text(row["step_seconds"], place, f" {row['step_seconds']:.2f} s", va="center", color=INK)
            words = f"{used:.1f} GiB{'' if fits else ': does not fit'}"
            peaks.barh(place, used, height=0.6, color=color)
            peaks.text(used + 0.3, place, words, va="center", color=INK, bbox={"fc": "white", "ec": "none", "pad": 1})
        name_rows(times, [PLANNERS[row["planner"]] for row in rows])
        times.set_xlim(0, 1.2 * max(row["step_seconds"] for row in rows))
        times.set_xlabel("time of a step [s]")
        peaks.axvline(card.memory_bytes / GIB, color=GREY, linestyle="--", linewidth=1)
        peaks.text(card.memory_bytes / GIB, -0.62, "capacity of a T4", ha="center", va="bottom", color=GREY, fontsize=8)
        peaks.set_xlim(0, 24)
        peaks.set_xlabel("memory of the fullest device [GiB]")


def draw_errors(path: Path, rows: Sequence[tuple[str, int, int]]) -> None:
    """Draw the predicted peak of each model beside the measured one, and the error in percent."""
    ordered = sorted(rows, key=lambda row: row[2])
    with picture(path, 3.0) as figure:
        figure.suptitle(
            "Peak memory of a training step, predicted without a GPU and measured on an H200", x=0.01, ha="left"
        )
        peaks, errors = figure.subplots(1, 2, gridspec_kw={"width_ratios": (1, 1.2)})
        largest = 1.15 * max(row[2] for row in rows) / GIB
        peaks.plot([0, largest], [0, largest], color=GREY, linewidth=0.8)
        peaks.scatter([row[2] / GIB for row in ordered], [row[1] / GIB for row in ordered], s=16, color=BLUE, zorder=3)
        peaks.set_xlabel("measured [GiB]")
        peaks.set_ylabel("predicted [GiB]")
        percents = [100 * (row[1] / row[2] - 1) for row in ordered]
        errors.axhline(0, color=GREY, linewidth=0.8)
        errors.bar(range(len(ordered)), percents, color=[BLUE if percent >= 0 else ALARM for percent in percents])
        errors.set_ylim(-1, 1)
        errors.set_xticks([])
        errors.set_xlabel(f"{len(ordered)} runs: torchvision models, float32, bfloat16 and float16")
        errors.set_ylabel("error of the prediction [%]")


if __name__ == "__main__":
    main()
