"""From SIGKILL to the next finished optimizer step, detection included: any rank, at any moment of a step.

One run of four devices on one host, `redundancy: 1`, `protection: sync`. The clock runs from before the kill to the end
of the first step of the new generation, when its last member has applied it. The lost worker is replaced and the next
one is killed once all members have trained again.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import itertools

from live import HERE, Clock, Live, append_result, quantiles, step_ends

from varuna_capslog.base.errors import CapslogError


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="8 kills")
    size.add_argument("--full", action="store_true", help="300 kills")
    parser.add_argument("--kills", type=int, default=0, help="how many instead of 100")
    parser.add_argument("--minutes", type=float, default=0.0, help="and no more than fit into so many")
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--steps", type=int, default=10, help="of every generation, before the next change")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--config", type=Path, default=HERE / "small.yaml")
    parser.add_argument("overrides", nargs="*", help="of the config's keys")
    args = parser.parse_args()
    wanted = args.kills or (8 if args.quick else 300 if args.full else 100)
    dice, devices = random.Random(args.seed), args.devices
    clock, ended_early = Clock(args.minutes), None
    rows = []
    with Live(args.config, args.overrides, devices) as live:
        newest = live.wait_steps(devices, 2 * args.steps, 120)
        try:
            for number in range(wanted):
                if clock.over:
                    break
                members, rank = live.members, number % devices
                marks = [mark for mark in live.marks() if mark.generation == newest]
                ends = [last for _, last in step_ends(marks)[newest].values()]
                step = statistics.median(b - a for a, b in itertools.pairwise(ends))
                time.sleep(dice.random() * step)
                killed = live.kill(members[rank])
                recovered = live.wait_steps(devices - 1, args.steps, after=newest)
                after = step_ends([mark for mark in live.marks() if mark.generation >= newest])
                steps = after[recovered]
                reached = max(after[newest])
                rows.append(
                    {
                        "rank": rank,
                        "generations": recovered - newest,
                        "again": reached + 1 - min(steps),
                        "seconds": steps[min(steps)][1] - killed,
                        "step": step,
                    }
                )
                live.join()
                newest = live.wait_steps(devices, args.steps, after=recovered)
        except (TimeoutError, RuntimeError, CapslogError) as error:  # the measurements so far are reported
            ended_early = str(error)[:500]
    append_result(
        "crash",
        {
            "config": str(args.config.name),
            "overrides": args.overrides,
            "seed": args.seed,
            "devices": devices,
            "seconds": clock.seconds,
            "ended_early": ended_early,
            "kill_to_step_ms": quantiles([row["seconds"] for row in rows]),
            "by_rank_p50_ms": [
                quantiles([row["seconds"] for row in rows if row["rank"] == rank])["p50"]
                for rank in range(min(devices, len(rows)))
            ],
            "step_ms": quantiles([row["step"] for row in rows]),
            "steps_taken_back": quantiles([row["again"] for row in rows], 1, 0),
            "changes_per_kill": quantiles([row["generations"] for row in rows], 1, 0),
        },
    )


if __name__ == "__main__":
    main()
