"""Compares the exact planner and CAPSlog's with exhaustive search, on random instances of all kinds of statistics.

Prints the table of README.md. The exhaustive search orders all cut lists of an instance by their descending list of
stage peaks, then by the cuts, which is the order that `exact` promises.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from varuna_capslog.memory.additive import AdditiveCosts
from varuna_capslog.memory.costs import NEVER, RangeCosts, StageCosts, peaks_of
from varuna_capslog.memory.inflight import InflightCosts
from varuna_capslog.planners.capslog import capslog_cuts
from varuna_capslog.planners.exact import exact_cuts
from varuna_capslog.schedules import RunShape


@dataclass(frozen=True)
class Placed:
    """Bytes [S, L, L + 1] of every range as every stage of S."""

    bytes: NDArray[np.int64]
    position_free: bool = False

    @property
    def num_layers(self) -> int:
        return self.bytes.shape[1]

    def stage_bytes(self, first: int, end: int, stage: int = 0, stages: int = 1) -> int:
        return int(self.bytes[stage, first, end])

    def matrix(self, stage: int = 0, stages: int = 1) -> NDArray[np.int64]:
        return self.bytes[stage]

    def peaks(self, cuts: Sequence[int]) -> list[int]:
        return peaks_of(self, cuts)


def draw(rng: random.Random, count: int) -> list[int]:
    """Draw whole numbers, tiny in a third of the instances so that ties are common."""
    high = rng.choice([4, 100, 10**11])
    return [rng.randrange(high) for _ in range(count)]


def independent(rng: random.Random, size: int, stages: int) -> StageCosts:
    """Additive; M_i and M_a independent of each other."""
    return AdditiveCosts.of_statistics(draw(rng, size), draw(rng, size))


def negative(rng: random.Random, size: int, stages: int) -> StageCosts:
    """Additive; M_a of either sign."""
    return AdditiveCosts.of_statistics(
        draw(rng, size), [a - b for a, b in zip(draw(rng, size), draw(rng, size), strict=True)]
    )


def monotone(rng: random.Random, size: int, stages: int) -> StageCosts:
    """Additive; a peak never falls when a layer joins at either end: what CAPSlog assumes."""
    isolated = draw(rng, size)
    added = [
        max(0, alone - before) + extra
        for alone, before, extra in zip(isolated, [0, *isolated], draw(rng, size), strict=False)
    ]
    return AdditiveCosts.of_statistics(isolated, added)


def composed(rng: random.Random, size: int, stages: int) -> StageCosts:
    """Saved prefix and transient, the same at every place."""
    return RangeCosts(_composed(rng, size)[0])


def in_flight(rng: random.Random, size: int, stages: int) -> StageCosts:
    """The same, with up to S - s graphs alive on stage s: 1F1B without recomputation."""
    alone, saved = _composed(rng, size)
    nothing = np.zeros_like(saved)
    return InflightCosts(alone, saved, nothing, nothing, RunShape(rng.randrange(1, 12), "1f1b", False), False)


def arbitrary(rng: random.Random, size: int, stages: int) -> StageCosts:
    """No rule at all between ranges or places."""
    table = np.array(draw(rng, stages * size * (size + 1)), dtype=np.int64).reshape(stages, size, size + 1)
    table[:, np.tri(size, size + 1, dtype=np.bool_)] = NEVER
    return Placed(table)


def _composed(rng: random.Random, size: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    static, saved, transient = (draw(rng, size) for _ in range(3))
    alone = np.full((size, size + 1), NEVER, dtype=np.int64)
    kept = np.zeros((size, size + 1), dtype=np.int64)
    for first, end in itertools.combinations(range(size + 1), 2):
        peaks = [sum(saved[first:layer]) + transient[layer] for layer in range(first, end)]
        alone[first, end] = sum(static[first:end]) + max(peaks)
        kept[first, end] = sum(saved[first:end])
    return alone, kept


KINDS: list[Callable[[random.Random, int, int], StageCosts]] = [
    independent,
    negative,
    monotone,
    composed,
    in_flight,
    arbitrary,
]


def row(kind: Callable[[random.Random, int, int], StageCosts], instances: int) -> str:
    """Return a line of the table."""
    rng = random.Random(kind.__name__)
    worse = uneven = above = 0
    ratios = [1.0]
    for _ in range(instances):
        size = rng.randrange(2, 10)
        stages = rng.randrange(2, size + 1)
        costs = kind(rng, size, stages)
        lists = ([0, *later] for later in itertools.combinations(range(1, size), stages - 1))
        best = min((sorted(costs.peaks(cuts), reverse=True), cuts) for cuts in lists)
        exact = exact_cuts(costs, stages)
        greedy = max(costs.peaks(capslog_cuts(costs, stages)))
        peak = best[0][0]
        worse += max(costs.peaks(exact)) > peak
        uneven += exact != best[1]
        above += greedy > peak
        if greedy > peak > 0:
            ratios.append(greedy / peak)
    return (
        f"| {kind.__name__} | {instances:,} | {worse} | {uneven} | {100 * above / instances:.1f} % | "
        f"{statistics.median(ratios):.2f}, {max(ratios):.1f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--instances", type=int, default=10_000, help="over all kinds (default 10,000)")
    each = -(-parser.parse_args().instances // len(KINDS))
    print(
        "| statistics | instances | exact: larger peak | exact: other cuts | "
        "capslog: larger peak | by (median, at most) |"
    )
    print("|---" * 6 + "|")
    for kind in KINDS:
        print(row(kind, each), flush=True)
    costs = AdditiveCosts.of_statistics([5, 5, 10], [None, 1, 2])
    print("\nM_i = [5, 5, 10], M_a = [-, 1, 2], two devices:")
    for name, cuts in (("exact", exact_cuts(costs, 2)), ("capslog", capslog_cuts(costs, 2))):
        print(f"  {name}: cuts {cuts}, peaks {costs.peaks(cuts)}")


if __name__ == "__main__":
    main()
