"""Measures how profiles of some models improve the estimates of others, with a user's commands on this machine's CPU.

Half of twelve small models, drawn by a seed, are measured by `capslog profile --measure`, which corrects later
estimates; the other half is estimated by `capslog profile --estimate` before that and after it, and measured last,
where it corrects nothing.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))

from common import write_json
from small_models import MODELS

from varuna_capslog.profiles.record import read_profile

HERE = Path(__file__).resolve().parent
COMMAND = "import sys; from varuna_capslog.cli import program; sys.exit(program())"


def step_seconds(name: str, how: str, cache: Path) -> float:
    """Return the seconds of a step of a model's layers in sequence, by `capslog profile` in a separate process."""
    output = cache / f"{name}{how}.json"
    command = [sys.executable, "-c", COMMAND, "profile", "--model", f"small_models:{name}", how]
    environment = {**os.environ, "PYTHONPATH": str(HERE), "XDG_CACHE_HOME": str(cache)}
    done = subprocess.run(
        [*command, "--device", "cpu", "--output", str(output)], env=environment, capture_output=True, text=True
    )
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} failed: {done.stderr.strip()}")
    layers = read_profile(output).layers
    return sum((layer.forward_seconds or 0.0) + (layer.backward_seconds or 0.0) for layer in layers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="of the half that is measured first (default: 0)")
    parser.add_argument("--json", type=Path, help="file for all numbers")
    arguments = parser.parse_args()
    names = [model.__name__ for model in MODELS]
    measured = set(random.Random(arguments.seed).sample(names, len(names) // 2))
    others = [name for name in names if name not in measured]
    with tempfile.TemporaryDirectory() as folder:
        corrected, elsewhere = Path(folder) / "corrected", Path(folder) / "elsewhere"
        corrected.mkdir()
        elsewhere.mkdir()
        before = {name: step_seconds(name, "--estimate", elsewhere) for name in others}
        for name in sorted(measured):
            print(f"measured {name}: {step_seconds(name, '--measure', corrected) * 1e3:.1f} ms", flush=True)
        after = {name: step_seconds(name, "--estimate", corrected) for name in others}
        truth = {name: step_seconds(name, "--measure", elsewhere) for name in others}
        (speeds,) = (corrected / "varuna-capslog" / "speeds").glob("*.json")
        print(f"corrected for {speeds.stem}")
    print("| model | measured ms | estimate | corrected |\n|---|---|---|---|")
    for name in others:
        errors = [f"{estimates[name] / truth[name] - 1:+.0%}" for estimates in (before, after)]
        print(f"| {name} | {truth[name] * 1e3:.1f} | {errors[0]} | {errors[1]} |")
    medians = [
        statistics.median(abs(estimates[name] / truth[name] - 1) for name in others) for estimates in (before, after)
    ]
    print(f"median error of a step: {medians[0]:.0%} before, {medians[1]:.0%} after")
    if arguments.json is not None:
        rows = {name: {"measured": truth[name], "before": before[name], "after": after[name]} for name in others}
        write_json(arguments.json, {"seed": arguments.seed, "models": rows})


if __name__ == "__main__":
    main()
