"""Search time of the planners `capslog` and `exact`: medians over many instances, planners interleaved.

Prints the tables of README.md. Each instance is timed once per planner, so that only the interpreter is warm. The time
to sum M_i and M_a up into stage costs is not counted, as it is the same for all.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import statistics
import time
from collections.abc import Callable

import numpy as np

from varuna_capslog.memory.additive import AdditiveCosts
from varuna_capslog.planners.capslog import capslog_cuts, capslog_tb_cuts
from varuna_capslog.planners.exact import exact_cuts

Instance = tuple[list[int], list[int]]
GIB = 1 << 30


def independent(rng: random.Random, num_layers: int) -> Instance:
    """M_i and M_a drawn independently: no monotone statistics."""
    return [rng.randrange(GIB) for _ in range(num_layers)], [rng.randrange(GIB) for _ in range(num_layers)]


def monotone(rng: random.Random, num_layers: int) -> Instance:
    """A stage's peak never falls when a layer joins it at either end: what CAPSlog assumes."""
    isolated = [rng.randrange(1, GIB) for _ in range(num_layers)]
    least = [max(0, alone - before) for before, alone in zip([0, *isolated], isolated, strict=False)]
    added = [low + rng.randrange(1 + alone // 2) for low, alone in zip(least, isolated, strict=True)]
    return isolated, added


def small_added(rng: random.Random, num_layers: int) -> Instance:
    """M_a a tenth of M_i at most: long stages are possible."""
    return (
        [rng.randrange(GIB, 2 * GIB) for _ in range(num_layers)],
        [rng.randrange(GIB // 10) for _ in range(num_layers)],
    )


def ties(rng: random.Random, num_layers: int) -> Instance:
    """Tiny whole numbers: very many cut lists with the same peaks."""
    return [rng.randrange(1, 8) for _ in range(num_layers)], [rng.randrange(5) for _ in range(num_layers)]


def falling(rng: random.Random, num_layers: int) -> Instance:
    """A third of the M_a below 0."""
    return (
        [rng.randrange(GIB) for _ in range(num_layers)],
        [rng.randrange(-GIB // 2, GIB) for _ in range(num_layers)],
    )


def detr_like(rng: random.Random, num_layers: int) -> Instance:
    """A dilated DETR: 12 encoders at 6.02 GiB that rule the peak, 6 small decoders, the rest small uneven blocks."""
    encoders, decoders = min(12, num_layers // 4), min(6, num_layers // 8)
    blocks = [rng.uniform(0.1, 0.5) for _ in range(num_layers - encoders - decoders)]
    isolated = blocks + [6.02] * encoders + [0.43] * decoders
    added = [block * rng.uniform(0.2, 0.8) for block in blocks]
    added += [5.9] + [3.54] * (encoders - 1) + [0.2] * decoders
    return [int(part * GIB) for part in isolated], [int(part * GIB) for part in added]


def detr_like_equal(rng: random.Random, num_layers: int) -> Instance:
    """The same with equal blocks: ties on top of the ruling group."""
    encoders, decoders = min(12, num_layers // 4), min(6, num_layers // 8)
    blocks = num_layers - encoders - decoders
    isolated = [0.4] * blocks + [6.02] * encoders + [0.43] * decoders
    added = [0.13] * blocks + [5.9] + [3.54] * (encoders - 1) + [0.2] * decoders
    return [int(part * GIB) for part in isolated], [int(part * GIB) for part in added]


def algorithm_1(costs: AdditiveCosts, devices: int) -> list[int]:
    """Return the cuts of the paper's Algorithms 1 and 2 as plain loops, r = 16 GiB: the baseline of the last column."""
    low, high, recommended = 0, 16 * GIB, [0]
    while low <= high:
        threshold = (low + high) // 2
        cuts = [0]
        for remaining in range(devices - 1, 0, -1):
            end = cuts[-1] + 1
            while end < costs.num_layers - remaining and costs.stage_bytes(cuts[-1], end + 1) <= threshold:
                end += 1
            cuts.append(end)
        if max(costs.peaks(cuts)) <= threshold:
            recommended, high = cuts, threshold - 1
        else:
            low = threshold + 1
    return recommended


KINDS: list[Callable[[random.Random, int], Instance]] = [
    independent,
    monotone,
    small_added,
    ties,
    falling,
    detr_like,
    detr_like_equal,
]
PLANNERS = {"capslog": capslog_cuts, "capslog-tb": capslog_tb_cuts, "exact": exact_cuts, "algorithm 1": algorithm_1}


def row(
    kind: Callable[[random.Random, int], Instance], num_layers: int, devices: int, trials: int, names: list[str]
) -> str:
    """Time every named planner on the same instances, in turn; return a line of the table, in milliseconds."""
    rng = random.Random(kind.__name__)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    above = 0
    for _ in range(trials):
        costs = AdditiveCosts.of_statistics(*kind(rng, num_layers))
        peaks = {}
        for name in names:
            begun = time.thread_time()
            cuts = PLANNERS[name](costs, devices)
            seconds[name].append(time.thread_time() - begun)
            peaks[name] = max(costs.peaks(cuts))
        above += peaks["capslog"] > peaks.get("exact", peaks["capslog"])
    cells = []
    for name in names:
        times = sorted(1e3 * value for value in seconds[name])
        cells.append(f"{statistics.median(times):.3f} ({times[int(0.99 * (len(times) - 1))]:.3f})")
    worse = f"{100 * above / trials:.1f} %" if "exact" in names else "-"
    return f"| {kind.__name__} | {' | '.join(cells)} | {worse} |"


def table(num_layers: int, devices: int, trials: int, names: list[str], kinds: list[Callable[..., Instance]]) -> None:
    """Print one table."""
    print(f"\nL={num_layers:,} G={devices:,}: milliseconds, median (99th percentile) of {trials:,} instances\n")
    print(f"| instances | {' | '.join(names)} | capslog's peak above exact's |")
    print("|---" * (len(names) + 2) + "|")
    for kind in kinds:
        print(row(kind, num_layers, devices, trials, names), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=1000, help="instances per row at L=48 (default 1,000)")
    trials = parser.parse_args().trials
    print(f"Python {platform.python_version()}, numpy {np.__version__}, {os.cpu_count()} CPUs ({platform.machine()})")
    table(48, 24, trials, list(PLANNERS), KINDS)
    table(1000, 100, max(1, trials // 100), ["capslog", "capslog-tb", "exact"], KINDS)
    table(10_000, 1000, max(1, trials // 300), ["capslog", "exact"], KINDS)


if __name__ == "__main__":
    main()
