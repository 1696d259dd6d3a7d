"""Times planner budget's search for long chains: random layers, a thousand at most, on 8 devices."""

from __future__ import annotations

import argparse
import dataclasses
import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2]))

from common import layerwise_plan

from tests.memory.machine import Model, profile_of
from varuna_capslog.planning.verdict import fold_plan
from varuna_capslog.plans.plan import Plan
from varuna_capslog.profiles.record import Profile
from varuna_capslog.schedules import RunShape

DEVICES, RUN = 8, RunShape(32, "auto")


def long_chain(layers: int, seed: int) -> Profile:
    """Return layers of random bytes and seconds, whose tensors are also read by layers after the next one."""
    dice = random.Random(seed)
    profile = profile_of(Model.random(dice, layers, True, 1000), "cuda")
    rows = []
    for row in profile.layers:
        forward = dice.uniform(0.5e-3, 2e-3)
        rows.append(dataclasses.replace(row, forward_seconds=forward, backward_seconds=2 * forward))
    return dataclasses.replace(profile, layers=tuple(rows))


def searched(profile: Profile, capacity: int | None) -> tuple[float, float, Plan]:
    """Search; return wall-clock seconds, processor seconds, and the plan."""
    begun = time.perf_counter(), time.process_time()
    plan = layerwise_plan(profile, DEVICES, "budget", capacity, RUN)
    return time.perf_counter() - begun[0], time.process_time() - begun[1], plan


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, nargs="+", default=[100, 200, 400, 1000])
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    print("| layers | of the peak that keeps all | seconds | processor seconds | step, s | above the bound |")
    print("|---|---|---|---|---|---|")
    for layers in args.layers:
        profile = long_chain(layers, args.seed)
        free = searched(profile, None)
        run = dataclasses.replace(RUN, schedule=free[2].schedule or "1f1b")
        most = max(stage.peak_bytes for stage in fold_plan(profile, free[2], run))
        for part in (1.0, 0.7, 0.4):
            clock, processor, plan = free if part == 1.0 else searched(profile, int(most * part))
            step, bound = plan.step_seconds, plan.bound_seconds
            assert step is not None, "a plan that fits was found"
            assert bound is not None, "every plan has a bound"
            gap = f"{step / bound - 1:.1%}"
            print(f"| {layers} | {part:.0%} | {clock:.1f} | {processor:.1f} | {step:.3f} | {gap} |", flush=True)


if __name__ == "__main__":
    main()
