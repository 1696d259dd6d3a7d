"""Losing one of eight workers over links of a given bandwidth: pause and bytes with new cuts and with small motions.

Every round runs `launch/chaos.sh` once per setting, with the same seed: eight hosts of one worker in network
namespaces, which are killed and replaced one after the other. Only single losses count, from
`events.jsonl`: the time from the end of the last step before the loss to the end of the first step after it, less a
usual step (the median of that generation). The judge of chaos compares all training losses and weights with a run of
one process.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from live import append_result, quantiles

CHAOS = Path(__file__).parents[3] / "launch" / "chaos.sh"
MODEL = (
    "model.blocks=30",
    "model.dim=256",
    "model.block_seconds=0.005",
    "pipeline.planner=throughput",
    "train.accumulation_blocks=1",
    "train.checkpoint_every=1000",
    "train.minibatch_size=32",
    "pipeline.timeout_seconds=20",
)
"""25 MB of state in 30 equal blocks whose forwards sleep 5 ms, eight microbatches."""


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """Return the losses of single workers in a run."""
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    steps = defaultdict(list)
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        steps[row["generation"]].append((row["step"], row["step_seconds"]))
    losses = []
    for event in events:
        if event["kind"] != "morph" or len(event["why"]) != 1 or not event["why"][0].endswith(" lost"):
            continue
        later = [seconds for step, seconds in steps[event["generation"]] if step > event["step"]]
        if len(event["why"][0].split(",")) > 1 or not later:
            continue
        motion = event.get("motion", {})
        small = motion.get("chosen") == "small motion"
        way = motion.get("small_motion" if small else "new_cuts", {})
        losses.append(
            {
                "small": small,
                "pause": event["pause_seconds"],
                "whole": event["pause_seconds"] + event["first_step_seconds"] - statistics.median(later),
                "search": event["search_seconds"],
                "step": statistics.median(later),
                "moved": event["moved_bytes"],
                "copied": way.get("copied_bytes"),
            }
        )
    return losses


def run(setting: str, bandwidth: str, kills: int, seed: int) -> tuple[list[dict[str, Any]], bool]:
    """Run once; return the losses and whether the judge found everything right."""
    with tempfile.TemporaryDirectory(prefix="capslog-small-motion-") as holder:
        folder = Path(holder) / "run"
        command = [str(CHAOS), *MODEL, f"elastic.small_motion={setting}"]
        command += ["--network", "namespaces", "--bandwidth", bandwidth, "--hosts", "8", "--workers", "1"]
        command += ["--kinds", "kill", "--faults", str(kills), "--mean", "8s", "--seed", str(seed)]
        environment = {**os.environ, "PYTHON": sys.executable}
        done = subprocess.run(
            [*command, "--output", str(folder)], env=environment, capture_output=True, text=True, check=False
        )
        if done.returncode:
            sys.stderr.write(done.stderr[-2000:])
        began = (folder / "metrics.jsonl").exists()  # else it did not reach its first step in time
        return rows_of(folder) if began else [], done.returncode == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=8, help="of each run")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--bandwidth", default="100Mbit", help="that each host can send")
    parser.add_argument("--settings", nargs="*", default=["never", "always"])
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    rows: dict[str, list[dict[str, Any]]] = defaultdict(list)
    right = True
    for turn in range(args.rounds):
        for setting in args.settings:
            losses, passed = run(setting, args.bandwidth, args.kills, args.seed + turn)
            rows[setting] += losses
            right &= passed
    append_result(
        "small_motion",
        {
            "bandwidth": args.bandwidth,
            "seed": args.seed,
            "rounds": args.rounds,
            "judge": "right" if right else "wrong",
            "settings": {
                setting: {
                    "losses": len(losses),
                    "small_motions": sum(row["small"] for row in losses),
                    "pause_ms": quantiles([row["pause"] for row in losses]),
                    "to_next_step_ms": quantiles([row["whole"] for row in losses]),
                    "search_ms": quantiles([row["search"] for row in losses]),
                    "step_ms": quantiles([row["step"] for row in losses]),
                    "moved_kilobytes": quantiles([row["moved"] for row in losses], 1e-3),
                    "copied_kilobytes": quantiles([row["copied"] for row in losses if row["copied"] is not None], 1e-3),
                }
                for setting, losses in rows.items()
            },
        },
    )


if __name__ == "__main__":
    main()
