"""Compares planner `budget` with every plan of random small chains, judged by the same simulator.

For each chain (3 to 7 layers, 1 to 4 devices, random seconds and bytes, 2 to 5 microbatches) every cut list with every
choice of intervals that recompute is one plan, under one of three schedules. With `--offload` the chains have 3 or 4
layers and intervals of every kind; copies run beside the computation or block it. With `--links` messages take time,
with `--blocks` the gradients of a step are summed in several blocks.
Prints a row for README.md.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2]))

from common import judged_layerwise_plan

from tests.planners.test_budget import timed
from tests.planning.test_fastest import every_plan
from varuna_capslog.planners.budget import BudgetSearch
from varuna_capslog.planners.layerwise import Layerwise
from varuna_capslog.planners.seconds import Link
from varuna_capslog.plans.parts import INTERVAL_KINDS
from varuna_capslog.schedules import RunShape

SHAPES = ((3, 2), (4, 2), (4, 3), (3, 3), (4, 1))
LONGER = ((5, 2), (5, 3), (5, 4), (6, 1), (6, 2), (6, 3), (7, 2))
PARTS = (0.5, 0.65, 0.8, 0.95, 2.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chains", type=int, default=100)
    parser.add_argument("--first", type=int, default=0, help="seed of the first chain")
    parser.add_argument("--longer", action="store_true", help="chains of 5 to 7 layers only")
    parser.add_argument("--offload", action="store_true", help="copies to the host too, at a random bandwidth")
    parser.add_argument("--blocks", action="store_true", help="several accumulation blocks per step")
    parser.add_argument("--links", action="store_true", help="messages between stages take time, by a random bandwidth")
    args = parser.parse_args()
    kinds = INTERVAL_KINDS if args.offload else ("recompute",)
    ratios: list[float] = []
    gaps: list[float] = []
    missed = above = proven = wrong = 0
    begun = time.perf_counter()
    for seed in range(args.first, args.first + args.chains):
        draw = random.Random(seed)
        size, devices = draw.choice(LONGER if args.longer else SHAPES)
        profile, name = timed(draw, size), draw.choice(["1f1b", "varuna", "gpipe"])
        calls = draw.choice([2, 4, 6] if args.blocks else [2, 3, 5])
        blocks = draw.choice([count for count in (2, 3, calls) if calls % count == 0]) if args.blocks else 1
        run = RunShape(calls, name, microbatch_size=1, num_blocks=blocks)
        host = draw.choice([1e3, 1e4, 1e5]) if args.offload else None
        rate = draw.choice([1e3, 1e4, 1e5]) if args.links else None
        link = Link(rate, host_bandwidth=host, copies_beside=draw.random() < 0.7) if host or rate else None
        everything = every_plan(profile, devices, run, kinds, link)
        kept = judged_layerwise_plan(profile, devices, "budget", "auto", None, run, link)
        most = max(rank.bytes or 0 for rank in kept.ranks)
        for part in PARTS:
            capacity = int(most * part)
            fitting = [step for step, peak in everything if peak <= capacity]
            answer = judged_layerwise_plan(profile, devices, "budget", "auto", capacity, run, link)
            if not fitting:
                continue
            if not answer.fits or answer.step_seconds is None or answer.bound_seconds is None:
                missed += 1
                continue
            ratios.append(answer.step_seconds / min(fitting))
            gaps.append(answer.step_seconds / answer.bound_seconds - 1)
            # the answer's own bound is never above its step, so the bound of the problem is computed anew
            chain = Layerwise.of_profile(profile, run, devices, [capacity] * devices, link)
            above += BudgetSearch(chain).bound_seconds(chain) > min(fitting) * (1 + 1e-9)
            proven += bool(answer.proven)
            wrong += bool(answer.proven) and ratios[-1] > 1 + 1e-9
    slower = [ratio for ratio in ratios if ratio > 1 + 1e-9]
    counts = (args.chains, len(ratios) + missed, missed, len(slower), f"{max(ratios):.3f}", proven, wrong, above)
    gap = f"{100 * sum(gaps) / len(gaps):.1f} %"
    print(f"| {' | '.join(map(str, counts))} | {gap} | {time.perf_counter() - begun:.0f} |")


if __name__ == "__main__":
    main()
