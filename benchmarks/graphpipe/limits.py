"""Compares the calls that graphpipe chooses with every grain and k on small graphs: prints the rows of README.md."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.planning.placed.test_replicated_calls import RUN, with_calls
from tests.planning.placed.test_replicated_limits import drawn_graph, shortest_in_groups
from varuna_capslog.planning.placed.replicated import with_larger_calls, with_wider_limits
from varuna_capslog.planning.playing import with_step_seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--graphs", type=int, default=60)
    args = parser.parse_args()
    for fixed in (0.0, 0.1, 0.3, 0.6):
        rows = [steps(seed, fixed) for seed in range(args.graphs)]
        cells = []
        for choice in (1, 2):
            ratios = [row[choice] / row[3] for row in rows]
            shorter, longer = sum(ratio < 1 - 1e-9 for ratio in ratios), sum(ratio > 1 + 1e-9 for ratio in ratios)
            gain = max(row[0] / row[choice] for row in rows)
            cells.append(f"{gain:.2f} | {shorter} | {longer} | {max(0.0, 100 * (max(ratios) - 1)):.1f} %")
        print(f"| {fixed:.1f} | {args.graphs} | {' | '.join(cells)} |")


def steps(seed: int, fixed: float) -> tuple[float, float, float, float]:
    """Return the step under 1F1B's limits, wider limits, graphpipe's calls, and the shortest of all grains and k."""
    profile, plan, link = drawn_graph(seed, 4)
    profile = with_calls(profile, fixed)
    plan = with_step_seconds(profile, plan, RUN, link)
    wider = with_wider_limits(profile, plan, RUN, link)
    larger = with_larger_calls(profile, wider, RUN, link)
    rows = (plan.step_seconds, wider.step_seconds, larger.step_seconds)
    first, second, third = (step or 0.0 for step in rows)
    return first, second, third, shortest_in_groups(profile, plan, link)


if __name__ == "__main__":
    main()
