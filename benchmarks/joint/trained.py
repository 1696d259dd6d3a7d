"""Trains joint plans and checks that no device is idle and that losses and weights equal those of one device bitwise.

For each number of devices two runs of the small DETR of `configs/tiny.yaml`: with the plan that `capslog plan --planner
joint` writes (`pipeline.plan`), and with `pipeline.planner=joint`. Prints the table of README.md; exit status 1 where a
device is idle or a bit differs.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "morph"))
sys.path.append(str(Path(__file__).parents[1] / "morph/equality"))

from equality import compare

from varuna_capslog.plans.plan import Plan, latest_plan

ROOT = Path(__file__).parents[2]
SIZES = ["train.minibatch_size=8", "train.microbatch_size=2", "train.checkpoint_every=null", "profile.source=estimated"]


def capslog(*words: str) -> None:
    """Run the command; raise unless its exit status is 0."""
    command = [sys.executable, "-m", "varuna_capslog.cli", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)} ended with {done.returncode}: {done.stderr[-2000:]}")


def trained(config: str, folder: Path, *overrides: str) -> Plan:
    """Train in the folder and return the plan of the run."""
    capslog("train", config, f"run_dir={folder}", *SIZES, *overrides)
    newest = latest_plan(folder)
    assert newest is not None
    return newest[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, nargs="*", default=[3, 5, 6, 7])
    parser.add_argument("--blocks", type=int, default=4, help="accumulation blocks of the four microbatches of a step")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--config", default=str(ROOT / "configs/tiny.yaml"))
    args = parser.parse_args()
    common = [f"train.accumulation_blocks={args.blocks}", f"train.max_steps={args.steps}"]
    wrong = False
    print(
        "| devices | from | pipelines of stages | stages in all | idle | losses that differ | tensors that differ | s |"
    )
    print("|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory(prefix="capslog-joint-") as holder:
        base = Path(holder)
        trained(args.config, base / "one", *common, "pipeline.devices=1", "pipeline.cuts=[0]")
        for devices in args.devices:
            file = base / f"joint-{devices}.json"
            count = ["--devices", str(devices), "--planner", "joint", "-o", str(file)]
            capslog("plan", args.config, *SIZES, *common, *count)
            joint = ["pipeline.planner=joint", f"pipeline.devices={devices}"]
            for source, words in (("`plan`", [f"pipeline.plan={file}"]), ("`planner=joint`", joint)):
                began, folder = time.perf_counter(), base / f"{devices}{source.strip('`')}"
                plan = trained(args.config, folder, *common, *words)
                seconds, comparison = time.perf_counter() - began, compare(folder, base / "one")
                idle = devices - len(set(plan.placement()))
                lengths = " + ".join(str(len(path)) for path in plan.paths())
                tensors = f"{comparison['tensors_that_differ']} of {comparison['tensors']}"
                cells = [devices, source, lengths, len(plan.stages), idle, comparison["losses_that_differ"], tensors]
                print("| " + " | ".join(map(str, cells)) + f" | {seconds:.0f} |", flush=True)
                wrong |= bool(idle or comparison["losses_that_differ"] or comparison["tensors_that_differ"])
    raise SystemExit(wrong)


if __name__ == "__main__":
    main()
