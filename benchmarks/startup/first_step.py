"""Seconds from the command to the first step, with a cached profile, of `configs/tiny.yaml` and of a captured ViT.

Every round runs each config once in a new run folder; the first round fills the caches. Processor seconds are those of
the command and all its workers until the run has ended; other programs on the cores change them less than the wall
time. Prints the table of README.md. `--tree` names another checkout to run in turn with this one.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from torch import nn

ROOT = Path(__file__).resolve().parents[2]
VIT = """
workload: varuna_capslog.model.model_workload:workload
model: {factory: first_step:vit, inputs: ["x=float32[2,3,32,32]"]}
train: {minibatch_size: 8, microbatch_size: 2}
pipeline: {devices: 3}
"""


def vit() -> nn.Module:
    """Return a small vision transformer."""
    from torchvision.models import VisionTransformer

    return VisionTransformer(image_size=32, patch_size=8, num_layers=6, num_heads=4, hidden_dim=64, mlp_dim=128)


def run(tree: Path, config: Path, folder: Path) -> tuple[float, float]:
    """Run a command; return (seconds to the first step, processor seconds in all)."""
    metrics, before = folder / "metrics.jsonl", os.times()
    paths = f"{tree}{os.pathsep}{Path(__file__).parent}"
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "varuna_capslog.cli", "train", str(config), "train.max_steps=1"]
    command += ["train.evaluate_every=null", f"run_dir={folder}"]
    began, first = time.perf_counter(), None
    with subprocess.Popen(command, env=environment, cwd=tree, stdout=subprocess.DEVNULL) as process:
        while process.poll() is None:
            if first is None and metrics.exists() and metrics.stat().st_size:
                first = time.perf_counter() - began
            time.sleep(0.01)
    if process.returncode or first is None:
        raise SystemExit(f"{' '.join(command)} ended with status {process.returncode}")
    after = os.times()
    return first, after.children_user + after.children_system - before.children_user - before.children_system


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--tree", type=Path, action="append", default=[], help="another checkout, run in turn")
    arguments = parser.parse_args()
    trees = [ROOT, *arguments.tree]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "vit.yaml").write_text(VIT)
        configs = [ROOT / "configs" / "tiny.yaml", folder / "vit.yaml"]
        runs: dict[tuple[int, int], list[tuple[float, float]]] = {}
        for number in range(arguments.rounds + 1):
            for at, tree in enumerate(trees):
                for which, config in enumerate(configs):
                    taken = run(tree.resolve(), config, folder / f"{number}-{at}-{which}")
                    if number:
                        runs.setdefault((which, at), []).append(taken)
    print("| config | checkout | median s to the first step | fastest s | median processor s of the run |")
    print("|---|---|---|---|---|")
    for (which, at), rows in sorted(runs.items()):
        seconds, worked = [row[0] for row in rows], [row[1] for row in rows]
        times = f"{statistics.median(seconds):.1f} | {min(seconds):.1f} | {statistics.median(worked):.1f}"
        print(f"| {configs[which].stem} | {'other' if at else 'this'} | {times} |")
    print(f"\nload of the machine: {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
