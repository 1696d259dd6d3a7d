"""Compares the variants, cuts and memory intervals that planner budget chooses with all choices of the three.

Random chains of 3 to 5 layers, up to 3 ways for each (as configured and two variants), 2 devices, schedule 1F1B; the
memory of a device is a fraction of the bytes without recomputation. The exhaustive search simulates every cut list with
every list of kept and recomputed intervals that fits by the fold, for every choice of variants.
"""

from __future__ import annotations

import argparse
import itertools
import random
import time

from tests.planning.test_variant_search import least_step, plan_of, random_variants
from varuna_capslog.planners.layerwise import Layerwise
from varuna_capslog.planning.variant_search import choose_variants
from varuna_capslog.profiles.runs import PLAIN, alternatives_of, under
from varuna_capslog.schedules import RunShape

PARTS = (0.35, 0.5, 0.65, 0.8)


def instance(seed: int) -> tuple[float, float, int, int]:
    """Return the step of the plan, the shortest step of all, the number of layers with a variant, and of choices."""
    draw = random.Random(seed)
    size = draw.choice([3, 3, 4, 4, 5])
    counts = [2, 2, 1, 0, 0] if size == 5 else [2, 2, 1][: size - 1] + [0]
    draw.shuffle(counts)
    profile, run = random_variants(draw, size, counts), RunShape(4, "1f1b", num_blocks=1, recompute=False)
    plain = Layerwise.of_profile(under(profile, {}), run, 2)
    usable = int(draw.choice(PARTS) * max(plain.peak(1, 1, size, ()), plain.peak(0, 0, size - 1, ())))
    choices = itertools.product(*((PLAIN, *alternatives_of(profile).get(at, ())) for at in range(size)))
    chosen = [{at: name for at, name in enumerate(names) if name != PLAIN} for names in choices]
    least = min(least_step(under(profile, choice), 2, run, usable) for choice in chosen)
    best = choose_variants(profile, 2, 4, lambda choice: plan_of(choice, 2, run, usable))
    step = best.plan.step_seconds if best.plan.fits and best.plan.step_seconds is not None else float("inf")
    return step, least, len(best.chosen), len(chosen)


def main() -> None:
    """Prints how many instances are worse than the exhaustive search."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--instances", type=int, default=500)
    parser.add_argument("--first", type=int, default=0, help="seed of the first one")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="of processor time, after which it ends")
    args = parser.parse_args()
    worse = unfit = with_variants = done = choices = 0
    for seed in range(args.first, args.first + args.instances):
        if time.process_time() > args.seconds:
            break
        step, least, layers, count = instance(seed)
        done += 1
        choices += count
        if step > least * (1 + 1e-9):
            worse += 1
            print(f"seed {seed}: {step:.6g} s, the least is {least:.6g} s", flush=True)
        unfit += least == float("inf")
        with_variants += layers > 0
    print(
        f"{worse} worse of {done}; {with_variants} plans with variants, {unfit} where nothing fits, "
        f"{choices / done:.1f} choices of variants each; {time.process_time():.0f} s of processor time"
    )


if __name__ == "__main__":
    main()
