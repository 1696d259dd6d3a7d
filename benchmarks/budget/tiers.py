"""Looks for plans faster than those of `budget` with a host tier: random chains of 3 to 8 layers, every interval.

Each chain has 1 to 6 devices (so many that no stage has more than 4 layers), tensors that several layers read, 2 to 5
microbatches, schedule `1f1b` or `gpipe`, a host bandwidth, and a capacity from a little below the smallest peak that
`budget` reaches to nearly what keeps all; copies run beside the computation or block it. Prints a row for README.md,
and every chain with a faster plan.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.planners.intervals.stages import random_profile
from tests.planning.asking import judged_layerwise_plan
from tests.planning.faster_plans import faster_plan
from varuna_capslog.planners.seconds import Link
from varuna_capslog.planning.verdict import HostMemory
from varuna_capslog.profiles.record import Profile
from varuna_capslog.schedules import RunShape

DEVICES = {3: (1, 2), 4: (1, 2, 3), 5: (2, 3, 4), 6: (3, 4), 7: (4, 5), 8: (5, 6)}


def chain_with_tensors(draw: random.Random, size: int) -> Profile:
    """Return a random chain on a GPU whose layers read tensors of several layers; some begin with frozen layers."""
    while True:
        profile = random_profile(draw, size)
        if profile.tensors and not HostMemory().is_device(profile):
            return dataclasses.replace(profile, source="measured", conditions={"device": "cuda", "microbatch_size": 1})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chains", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, help="seed of the first chain")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="of the processor, after which it ends")
    args = parser.parse_args()
    chains = unfit = slower = proven = wrong = 0
    most, begun = 1.0, time.process_time()
    for seed in range(args.first, args.first + args.chains):
        if time.process_time() > args.seconds:
            break
        chains, draw = chains + 1, random.Random(seed)
        size = draw.randrange(3, 9)
        profile, devices, schedule = (
            chain_with_tensors(draw, size),
            draw.choice(DEVICES[size]),
            draw.choice(["1f1b", "gpipe"]),
        )
        run = RunShape(draw.choice([2, 3, 5]), schedule, microbatch_size=1, num_blocks=1)
        link = Link(host_bandwidth=draw.choice([1e3, 1e4, 2e4, 1e5]), copies_beside=draw.random() < 0.7)
        plans = (judged_layerwise_plan(profile, devices, "budget", "auto", limit, run, link) for limit in (1, None))
        smallest, kept = (max(rank.bytes or 0 for rank in plan.ranks) for plan in plans)
        capacity = int(smallest + (kept - smallest) * draw.uniform(-0.03, 0.9))
        answer = judged_layerwise_plan(profile, devices, "budget", "auto", capacity, run, link)
        step = answer.step_seconds if answer.fits and answer.step_seconds else float("inf")
        faster = faster_plan(profile, devices, run, link, capacity, step * (1 - 1e-9))
        unfit += step == float("inf") and faster is None
        proven += bool(answer.proven)
        wrong += bool(answer.proven) and faster is not None
        if faster is not None:
            slower, most = slower + 1, max(most, step / faster[0])
            print(seed, size, devices, schedule, link, capacity, step, faster, flush=True)
        sys.stderr.write(f"{seed}: {time.process_time() - begun:.0f} s\n")
    print(f"| {chains} | {unfit} | {slower} | {most:.3f} | {proven} | {wrong} | {time.process_time() - begun:.0f} |")


if __name__ == "__main__":
    main()
