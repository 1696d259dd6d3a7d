"""Compares GraphPipe's Table 3.2 with every warm-up: two stages of unequal calls, all kFkB orders simulated.

Stage x takes `b_x` samples per call and runs `k_x` forwards and `k_x` backwards in turn after a warm-up; stage y, which
computes the loss, takes `b_y` and has a warm-up of `k_y` forwards. A forward of n samples takes n, a backward n or 2 n.
The smallest warm-up of x that gives the shortest step is compared with the table, rounded up to a multiple of `b_x`.
Then pipelines of three and four stages under 1F1B, with the table's limits for each pair of neighbours, and with ours.
Prints the tables of README.md.
"""

from __future__ import annotations

import argparse
from collections import Counter
from itertools import pairwise, product

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.schedules import Action, StageGraph, StageSeconds, schedule_of, simulate
from varuna_capslog.schedules.generators import in_flight_microbatches, table_3_2

SAMPLES = 96


def order(stage: int, calls: int, warm_up: int, k: int) -> list[Action]:
    """Return `warm_up` forwards, then k backwards and k forwards in turn, then the remaining backwards."""
    actions = [Action(stage, "F", call) for call in range(warm_up)]
    forward, backward = warm_up, 0
    while backward < calls:
        actions += [Action(stage, "B", call) for call in range(backward, min(backward + k, calls))]
        actions += [Action(stage, "F", call) for call in range(forward, min(forward + k, calls))]
        backward, forward = min(backward + k, calls), min(forward + k, calls)
    return actions


def step(x: tuple[int, int], y: tuple[int, int], warm_up: int, backward: float) -> float:
    """Return the seconds of a step; inf if the stages deadlock. x, y: samples per call and k of each stage."""
    graph = StageGraph((0, 1), ((0, 1),) * SAMPLES, grains=(x[0], y[0]))
    calls = [SAMPLES // x[0], SAMPLES // y[0]]
    rows = [order(0, calls[0], warm_up, x[1]), order(1, calls[1], y[1], y[1])]
    sizes = [float(x[0]), float(y[0])]
    try:
        return simulate(rows, StageSeconds(sizes, [backward * size for size in sizes]), graph=graph).step_seconds
    except CapslogError:
        return float("inf")


def smallest(x: tuple[int, int], y: tuple[int, int], backward: float) -> int:
    """Return the samples of the smallest warm-up that gives the shortest step."""
    steps = {count: step(x, y, count, backward) for count in range(1, SAMPLES // x[0] + 1)}
    best = min(steps.values())
    return x[0] * min(count for count, seconds in steps.items() if seconds <= best + 1e-9)


def printed(grains: tuple[int, ...]) -> int:
    """Return the first stage's samples in flight by the table alone, pair by pair from the last stage."""
    samples = grains[-1]
    for grain, next_grain in reversed(list(pairwise(grains))):
        samples = -(-table_3_2(1, grain, 1, next_grain, samples) // grain) * grain
    return samples


def limits(stages: int) -> None:
    """Print in how many cases the table's limits and ours are minimal, too large or too small."""
    counts = {name: Counter[str]() for name in ("pair by pair", "ours")}
    longest = dict.fromkeys(counts, 1.0)
    for grains in product((1, 2, 4), repeat=stages):
        ranks = tuple(range(stages))
        graph = StageGraph(ranks, (ranks,) * 32, grains=grains)
        seconds = StageSeconds([float(grain) for grain in grains], [2.0 * grain for grain in grains])
        steps = {}
        for calls in range(1, 32 // grains[0] + 1):
            try:
                rows = schedule_of("1f1b", graph, in_flight=[calls])
            except CapslogError:
                continue  # too few for a later stage to start
            steps[calls] = simulate(rows, seconds, graph=graph).step_seconds
        best = min(steps.values())
        least = min(calls for calls, took in steps.items() if took <= best + 1e-9)
        for name, samples in (("pair by pair", printed(grains)), ("ours", in_flight_microbatches(graph)[0])):
            calls = min(max(steps), samples // grains[0])
            counts[name]["few" if calls < least else "many" if calls > least else "minimal"] += 1
            longest[name] = max(longest[name], steps.get(calls, float("inf")) / best)
    for name, row in counts.items():
        cells = f"{row['minimal']} | {row['many']} | {row['few']} | {longest[name]:.2f}"
        print(f"| {stages} | {name} | {row.total()} | {cells} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    print("| backward | cases | the table is minimal | one call of x too few | otherwise |")
    print("|---|---|---|---|---|")
    for backward in (1.0, 2.0):
        counts: Counter[str] = Counter()
        for b_x, b_y, k_x, k_y in product((1, 2, 4, 8), (1, 2, 4, 8), (1, 2, 4), (1, 2, 4)):
            needed = table_3_2(k_x, b_x, k_y, b_y, k_y * b_y)
            rounded = -(-needed // b_x) * b_x
            least = smallest((b_x, k_x), (b_y, k_y), backward)
            counts["minimal" if least == rounded else "few" if least == rounded + b_x else "otherwise"] += 1
            if least != rounded:
                print(f"  x {b_x} k {k_x}, y {b_y} k {k_y}: table {rounded}, played {least}")
        total = sum(counts.values())
        print(f"| {backward:.0f} F | {total} | {counts['minimal']} | {counts['few']} | {counts['otherwise']} |")
    print("\n| stages | limits | cases | minimal | too many | too few | longest step |")
    print("|---|---|---|---|---|---|---|")
    for stages in (2, 3, 4):
        limits(stages)


if __name__ == "__main__":
    main()
