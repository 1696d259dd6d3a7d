"""Asks `madpipe` on devices that just hold a plan of its kind, found by trying all: see README.md.

A plan of its kind: stages on consecutive layers that keep everything, of which one rank may have several. The fewest
bytes are those of one microbatch after the other, by the fold. Exit status 1 where the planner misses a plan, or says
that one fits that does not.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.memory.machine import Model, profile_of
from tests.planning.asking import plan
from tests.planning.placed.test_periodic import least_bytes
from varuna_capslog.planners.seconds import Link
from varuna_capslog.planning.verdict import fold_plan
from varuna_capslog.profiles.record import Profile
from varuna_capslog.schedules import RunShape

RUN = RunShape(4, "1f1b", False)
LINK = Link(10**4)


def drawn(dice: random.Random) -> Profile:
    """Return a profile of 3 to 6 random layers on a GPU, whose runs tell the bytes of each action."""
    profile = profile_of(Model.random(dice, dice.randrange(3, 7), dice.random() < 0.3), "cuda")
    rows = [
        dataclasses.replace(row, forward_seconds=dice.uniform(0.1, 2.0), backward_seconds=dice.uniform(0.1, 4.0))
        for row in profile.layers
    ]
    return dataclasses.replace(profile, layers=tuple(rows))


def misses(seed: int) -> dict[float, str]:
    """Return capacity / least capacity -> what is wrong with the planner's answer: "" where nothing."""
    dice = random.Random(seed)
    profile = drawn(dice)
    devices = dice.randrange(2, min(4, profile.num_layers) + 1)
    least, answers = least_bytes(profile, devices, RUN), dict[float, str]()
    for share in (0.999, 1.0, 1.05):
        capacity = int(least * share) if share >= 1 else least - 1
        answer = plan(profile, devices, "madpipe", capacity=capacity, run=RUN, link=LINK)
        peak = max(rank.peak_bytes for rank in fold_plan(profile, answer, RUN))
        wrong = "" if (peak <= capacity) == answer.fits else "fits is wrong"
        answers[share] = wrong or ("missed" if share >= 1 and not answer.fits else "")
    return answers


def main() -> int:
    """Print how many questions have a wrong answer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profiles", type=int, default=100)
    parser.add_argument("--first", type=int, default=0, help="first seed")
    arguments = parser.parse_args()
    begun, wrong = time.process_time(), list[str]()
    for seed in range(arguments.first, arguments.first + arguments.profiles):
        wrong += [f"seed {seed}, {share} of the least capacity: {what}" for share, what in misses(seed).items() if what]
    print(*wrong, sep="\n")
    print(
        f"{arguments.profiles} profiles, three capacities each: {len(wrong)} wrong; "
        f"{time.process_time() - begun:.0f} s of processor time"
    )
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
