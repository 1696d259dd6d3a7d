"""Measures what a join costs the training members: a worker starts, loads, warms up and enters; then one leaves again.

A join has failed if the worker has not applied a step within a minute, or if it took the run with it. The stall is the
pause of the incumbents, net of the median step of the new layout, measured between the ends of their steps. Also
reported: the time from the order to the newcomer's first step, and by how much steps are longer while it loads.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import itertools

from live import HERE, Clock, Live, append_result, pauses, quantiles, step_ends

from varuna_capslog.base.errors import CapslogError


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="10 joins")
    size.add_argument("--full", action="store_true", help="1,000 joins")
    parser.add_argument("--joins", type=int, default=0, help="how many instead of 150")
    parser.add_argument("--minutes", type=float, default=0.0, help="and no more than fit into so many")
    parser.add_argument("--devices", type=int, default=3, help="that train when nobody has joined")
    parser.add_argument("--steps", type=int, default=10, help="of every generation, before the next change")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--config", type=Path, default=HERE / "small.yaml")
    parser.add_argument("overrides", nargs="*", help="of the config's keys")
    args = parser.parse_args()
    wanted = args.joins or (10 if args.quick else 1000 if args.full else 150)
    dice, devices = random.Random(args.seed), args.devices
    clock = Clock(args.minutes)
    stalls, waits, longer, failures = [], [], [], []
    with Live(args.config, args.overrides, devices) as live:
        newest = live.wait_steps(devices, 2 * args.steps, 120)
        for number in range(wanted):
            if clock.over:
                break
            before = live.members
            ordered = live.join()
            try:
                joined = live.wait_steps(devices + 1, args.steps, after=newest)
            except (TimeoutError, RuntimeError, CapslogError) as error:
                failures.append(f"join {number}: {error}")
                break
            (newcomer,) = set(live.members) - set(before)
            marks = [mark for mark in live.marks() if mark.generation >= newest]
            waits.append(min(mark.end for mark in marks if mark.member == newcomer) - ordered)
            incumbents = [mark for mark in marks if mark.member in before]
            stalls += [pause.net for pause in pauses(incumbents) if pause.generation == joined]
            ends = [end for _, end in step_ends(incumbents)[newest].values()]
            quiet = [b - a for a, b in itertools.pairwise(ends) if b < ordered]
            loading = [b - a for a, b in itertools.pairwise(ends) if a > ordered]
            if quiet and loading:
                longer.append(statistics.median(loading) / statistics.median(quiet))
            live.leave(dice.choice(live.members))
            newest = live.wait_steps(devices, args.steps, after=joined)
    append_result(
        "join",
        {
            "config": str(args.config.name),
            "overrides": args.overrides,
            "seed": args.seed,
            "devices": devices,
            "seconds": clock.seconds,
            "joins": len(waits) + len(failures),
            "failed": len(failures),
            "failures": failures,
            "stall_net_ms": quantiles(stalls),
            "order_to_first_step_s": quantiles(waits, 1.0, 2),
            "steps_while_loading_to_before": quantiles(longer, 1.0, 2),
        },
    )


if __name__ == "__main__":
    main()
