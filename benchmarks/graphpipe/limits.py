"""Compares wider limits in flight with every grain and group of calls on small graphs: prints a row for README.md."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.planning.placed.test_replicated_limits import drawn_graph, shortest_in_groups
from varuna_capslog.planning.placed.replicated import with_wider_limits
from varuna_capslog.schedules import RunShape


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--graphs", type=int, default=60)
    args = parser.parse_args()
    ratios, gains = list[float](), list[float]()
    for seed in range(args.graphs):
        profile, plan, link = drawn_graph(seed, 4)
        wider = with_wider_limits(profile, plan, RunShape(8, "1f1b", False), link)
        assert wider.step_seconds is not None
        assert plan.step_seconds is not None
        ratios.append(wider.step_seconds / shortest_in_groups(profile, plan, link))
        gains.append(plan.step_seconds / wider.step_seconds)
    longer, shorter = (sum(ratio > 1 + 1e-9 for ratio in ratios), sum(ratio < 1 - 1e-9 for ratio in ratios))
    faster = sum(gain > 1 for gain in gains)
    print(f"| {args.graphs} | {faster} | {max(gains):.2f} | {shorter} | {longer} | {max(ratios):.3f} |")


if __name__ == "__main__":
    main()
