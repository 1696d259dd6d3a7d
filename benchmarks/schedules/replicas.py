"""Compares the limits in flight of plans with replicas with every vector of limits: prints the table of README.md."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.planning.placed.test_replicated_limits import drawn_plan, fewest_held, held
from varuna_capslog.planning.placed.replicated import with_least_limits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plans", type=int, default=400)
    args = parser.parse_args()
    of_table = least = shorter = longer = 0
    for seed in range(args.plans):
        profile, plan, run, link = drawn_plan(seed)
        limited = with_least_limits(profile, plan, run, link)
        assert plan.step_seconds is not None
        assert limited.step_seconds is not None
        fewest = fewest_held(profile, limited, run, link)
        of_table += held(plan) > fewest
        least += held(limited) > fewest
        shorter += limited.step_seconds < plan.step_seconds * (1 - 1e-9)
        longer += limited.step_seconds > plan.step_seconds * (1 + 1e-9)
    print(f"| {args.plans} | {of_table} | {least} | {shorter} | {longer} |")


if __name__ == "__main__":
    main()
