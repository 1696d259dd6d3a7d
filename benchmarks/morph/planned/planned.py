"""Measures the pause of a planned morph: members leave with notice, at random, while the others train on.

One run of four devices: one or two members leave, as many new ones come, and so on. A pause is the time from the end of
the last step of the old generation to the end of the first step of the new one, each when its last member is done, less
the median step of the new layout. Pauses of the joins in between are reported, too; `../join` counts joins.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from live import HERE, Clock, Live, append_result, pauses, quantiles, step_ends

from varuna_capslog.base.errors import CapslogError


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="10 morphs")
    size.add_argument("--full", action="store_true", help="300 morphs")
    parser.add_argument("--morphs", type=int, default=0, help="how many instead of 100")
    parser.add_argument("--minutes", type=float, default=0.0, help="and no more than fit into so many")
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--steps", type=int, default=12, help="of every generation, before the next change")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--config", type=Path, default=HERE / "small.yaml")
    parser.add_argument("overrides", nargs="*", help="of the config's keys")
    args = parser.parse_args()
    wanted = args.morphs or (10 if args.quick else 300 if args.full else 100)
    dice, devices = random.Random(args.seed), args.devices
    clock, ended_early = Clock(args.minutes), None
    leaves: set[int] = set()
    with Live(args.config, args.overrides, devices) as live:
        newest = live.wait_steps(devices, 2 * args.steps, 120)
        try:
            while len(leaves) < wanted and not clock.over:
                count = dice.choice((1, 1, 2))
                for member in dice.sample(live.members, count):
                    live.leave(member)
                newest = live.wait_steps(devices - count, args.steps, after=newest)
                leaves.add(newest)
                for _ in range(count):
                    live.join()
                newest = live.wait_steps(devices, args.steps, after=newest)
        except (TimeoutError, RuntimeError, CapslogError) as error:  # the measurements so far are reported
            ended_early = str(error)[:500]
        changes = pauses(live.marks())
        ends = step_ends(live.marks())
        morphs = [event for event in live.events() if event["kind"] == "morph"]
    steps = [
        b[1] - a[1]
        for row in ends.values()
        for a, b in zip(list(row.values())[2:], list(row.values())[3:], strict=False)
    ]
    repeated = sum(min(ends[new]) - max(ends[old]) != 1 for old, new in zip(ends, list(ends)[1:], strict=False))
    append_result(
        "planned",
        {
            "config": str(args.config.name),
            "overrides": args.overrides,
            "seed": args.seed,
            "devices": devices,
            "seconds": clock.seconds,
            "ended_early": ended_early,
            "leave_net_ms": quantiles([pause.net for pause in changes if pause.generation in leaves]),
            "leave_whole_ms": quantiles([pause.whole for pause in changes if pause.generation in leaves]),
            "join_net_ms": quantiles([pause.net for pause in changes if pause.generation not in leaves]),
            "step_ms": quantiles(steps),
            "search_ms": quantiles([event["search_seconds"] for event in morphs], digits=2),
            "steps_computed_again": repeated,
        },
    )


if __name__ == "__main__":
    main()
