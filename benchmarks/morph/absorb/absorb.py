"""Four devices become one by SIGKILL, and four again, where one cannot keep everything: waits, pauses and losses.

One host, planner `budget`, the small model (`../small.yaml`). The capacity is 1 % below what one device needs to
train without recomputation, with its snapshot. Devices are killed one after the other, each `--rest` seconds after the
last change, so that the next plan was searched ahead of time; `--rest 0` shows the search without this preparation.
The losses are compared with those of one device without a limit.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from live import HERE, Clock, Live, append_result, losses, quantiles

from varuna_capslog.config.reading import load_config
from varuna_capslog.membership.placing import RunProtection
from varuna_capslog.start.prepare import profile_run

OVERRIDES = [
    "pipeline.planner=budget",
    "pipeline.schedule=auto",
    "train.accumulation_blocks=1",
    "train.epochs=null",
    "elastic.enabled=true",
    "train.log_every=1",
    # a larger share of the memory goes to activations than with small batches, a smaller one to state and its copies
    "train.minibatch_size=256",
    "train.microbatch_size=64",
]


def capacity_of(config: Path, overrides: Sequence[str]) -> int:
    """Return 99 % of the smallest capacity at which one device trains without recomputation, found to 0.2 %."""
    low, high = 1 << 16, 1 << 28
    profile = None
    while high - low > low // 500:
        middle = (low + high) // 2
        limited_config = load_config(config, [*overrides, "pipeline.devices=1", f"pipeline.capacity={middle}"])
        profile = profile or profile_run(limited_config, show=False)
        plan = RunProtection(limited_config, profile).plan([middle])
        keeps = plan is not None and plan.fits and not any(stage.memory for stage in plan.stages)
        low, high = (low, middle) if keeps else (middle, high)
    return high * 99 // 100


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="of 4 -> 3 -> 2 -> 1 -> 4")
    parser.add_argument("--rest", type=float, default=6.0, help="seconds between changes")
    parser.add_argument("--config", type=Path, default=HERE / "small.yaml")
    args = parser.parse_args()
    clock = Clock()
    overrides = [*OVERRIDES, "train.max_steps=1000000"]
    capacity = capacity_of(args.config, overrides)
    with Live(args.config, [*overrides, f"pipeline.capacity={capacity}"], 4) as live:
        newest = live.wait_steps(4, 10, 120)
        for _round in range(args.rounds):
            for remaining in (3, 2, 1):
                time.sleep(args.rest)
                live.kill(live.members[0] if remaining == 2 else live.members[-1])
                newest = live.wait_steps(remaining, 5, after=newest)
            time.sleep(args.rest)
            for _ in range(3):
                live.join()
            newest = live.wait_steps(4, 5, 120, after=newest)
        events, elastic = live.events(), losses(live.folder)
    steps = min(max(elastic), 300)
    with Live(args.config, [*OVERRIDES, f"train.max_steps={steps}", "pipeline.planner=exact"], 1) as alone:
        alone.finish(300)
        kept = losses(alone.folder)
    morphs = [event for event in events if event["kind"] == "morph"]
    lost = [event for event in morphs if any("lost" in why for why in event["why"])]
    last = [event for event in lost if len(event["members"]) == 1]
    append_result(
        "absorb",
        {
            "capacity": capacity,
            "rest_seconds": args.rest,
            "rounds": args.rounds,
            "seconds": clock.seconds,
            "waits": sum(event["kind"] == "waiting" for event in events),
            "losses_compared": steps,
            "losses_bitwise": all(elastic[step] == kept[step] for step in range(1, steps + 1)),
            "recomputed_layers_of_one": sorted({event["recomputed_layers"] for event in last}),
            "planned_step_ratio_of_one": round(statistics.median(event["planned_step_ratio"] for event in last), 3),
            "pause_after_loss_ms": quantiles([event["pause_seconds"] for event in lost]),
            "search_after_loss_ms": quantiles([event["search_seconds"] for event in lost]),
            "pause_at_joins_ms": quantiles([event["pause_seconds"] for event in morphs if event not in lost]),
        },
    )


if __name__ == "__main__":
    main()
