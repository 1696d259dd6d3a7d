"""Peaks of planner `capture` beside the smallest of every placement with every number of blocks: see README.md."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import random
import statistics
import time

from torch import nn

import varuna_capslog as capslog
from tests.planning.asking import plan
from tests.planning.placed.test_replicated_capture_peaks import every_peak, key_of, peak_of, question, split_question
from varuna_capslog.planners.replicas import REPLICATED, GraphCosts
from varuna_capslog.planners.seconds import Link
from varuna_capslog.profiles.record import Profile
from varuna_capslog.schedules import RunShape

Question = tuple[Profile, int, int, RunShape]
DRAWN, NETWORKS, SPLIT = 48, 36, 24


def network(seed: int) -> Question:
    """Draw three linear layers, estimated for the CPU or a GPU, on four devices of one node."""
    draw = random.Random(seed)
    sizes = [draw.choice([4, 8, 16, 32, 48, 96]) for _ in range(4)]
    layers = [nn.Sequential(nn.Tanh(), nn.Linear(*pair)) for pair in itertools.pairwise(sizes)]
    device = draw.choice(["cpu", "cuda:a100-80gb"])
    profile = capslog.estimate(nn.Sequential(*layers), f"x=float32[2,{sizes[0]}]", device=device, cut_points=["1", "2"])
    rows = [dataclasses.replace(row, forward_seconds=1.0, backward_seconds=2.0) for row in profile.layers]
    return dataclasses.replace(profile, layers=tuple(rows)), 4, 4, RunShape(8, "1f1b", False, microbatch_size=2)


def questions(first: int) -> list[Question]:
    """Return `DRAWN` drawn profiles of 3 to 7 layers that have a placement, and `NETWORKS` estimated ones of 3. first:
    seed of the networks; those of the others begin 1,000 above.
    """
    drawn = (question(seed) for seed in range(1000 + first, 1200 + first))
    fitting = [
        asked
        for asked in drawn
        if asked[0].num_layers >= asked[1] // asked[2] * asked[2].bit_count() and asked[0].num_layers + asked[1] < 13
    ]
    return fitting[:DRAWN] + [network(seed) for seed in range(first, first + NETWORKS)]


def by_sums(profile: Profile, devices: int, node: int, run: RunShape, peaks: dict[tuple[object, int], int]) -> int:
    """Return the least peak of the placements that have the least sums for some number of blocks."""
    costs = GraphCosts.of_profile(profile, devices, run.microbatches, link=Link(node_devices=node), peaks=True)
    placements = [key_of(stages) for stages in REPLICATED["capture"](costs)]
    return min(peak for (placed, _), peak in peaks.items() if placed in placements)


def of_cuts_and_replicas(first: int) -> None:
    """Print how often the peak is the smallest and how far above it is else, by the sums alone and as planned."""
    above: dict[str, list[float]] = {"sums alone": [], "with bounds": []}
    seconds = []
    for profile, devices, node, run in questions(first):
        peaks = every_peak(profile, devices, node, run)
        least = min(peaks.values())
        began = time.process_time()
        answer = plan(profile, devices, "capture", run=run, link=Link(node_devices=node))
        seconds.append(time.process_time() - began)
        above["sums alone"].append(by_sums(profile, devices, node, run, peaks) / least - 1)
        above["with bounds"].append(peak_of(profile, answer, run) / least - 1)
    for name, parts in above.items():
        worse = [f"{part:.1%}" for part in sorted(parts) if part > 0]
        print(f"| {name} | {len(parts) - len(worse)} of {len(parts)} | {', '.join(worse)} |")
    print(f"{statistics.median(seconds):.2f} s for a plan (median), at most {max(seconds):.2f} s")


def of_shared_layers(first: int) -> None:
    """Print the same for layers split into 2 or 4 parts, and how much larger peaks are where no device shares them."""
    worse, helped, placements = 0, list[float](), 0
    for seed, parts in itertools.product(range(first, first + SPLIT), (2, 4)):
        profile, devices, node, run = split_question(seed, parts)
        peaks = every_peak(profile, devices, node, run, parts)
        answer = plan(profile, devices, "capture", run=run, link=Link(node_devices=node))
        least, placements = min(peaks.values()), placements + len(peaks)
        alone = min(peak for (stages, _), peak in peaks.items() if not any(stage[-1] for stage in stages))
        worse += peak_of(profile, answer, run) > least
        helped += [alone / least - 1] * (alone > least)
    most = f"{statistics.median(helped):.1%} | {max(helped):.1%}"
    print(f"| {2 * SPLIT} | {placements:,} | {worse} | {len(helped)} | {most} |")


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--split", action="store_true", help="layers that `splits` divides")
    arguments = parser.parse_args()
    (of_shared_layers if arguments.split else of_cuts_and_replicas)(arguments.first)


if __name__ == "__main__":
    main()
