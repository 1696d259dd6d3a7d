"""The ranges of layers that fit a limit of bytes, compared with the matrices of their costs."""

from __future__ import annotations

import random

import numpy as np
import pytest

from tests.memory.chains import profile_of, random_chain
from tests.planners.instances import table
from varuna_capslog.memory import MEMORY_MODELS
from varuna_capslog.memory.costs import NEVER, StageCosts
from varuna_capslog.memory.inflight import Ranges, ranges_within
from varuna_capslog.schedules import RunShape

RUNS = [("gpipe", False), ("gpipe", True), ("1f1b", False), ("1f1b", True), ("varuna", True), ("composition", True)]


def check(costs: StageCosts, ranges: Ranges, stages: int, searched: int, most: int) -> int:
    """Check the ranges against the matrices of the first `searched` stages; return how many ranges those have."""
    matrices = [costs.matrix(stage, stages) for stage in range(searched)]
    pairs = list(zip(ranges.firsts.tolist(), ranges.ends.tolist(), strict=True))
    assert pairs == sorted(set(pairs))
    assert np.all(ranges.firsts < ranges.ends)
    fitting = np.logical_or.reduce([matrix <= most for matrix in matrices])
    assert {(int(first), int(end)) for first, end in np.argwhere(fitting)} <= set(pairs)
    chosen = slice(len(pairs) // 3, len(pairs))
    for stage, matrix in enumerate(matrices):
        expected = [matrix[pair] for pair in pairs[chosen]]
        assert ranges.bytes(stage, chosen).tolist() == expected
    return int(np.count_nonzero(fitting))


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize(("name", "recompute"), RUNS)
def test_ranges_are_those_of_the_matrices(name: str, recompute: bool, device: str) -> None:
    rng = random.Random(f"ranges {name} {recompute} {device}")
    dropped = kept = 0
    for _ in range(20):
        layers, boundaries = random_chain(rng, rng.randrange(2, 9))
        size = len(layers)
        run = RunShape(6, "varuna" if name == "composition" else name, recompute, "device")
        costs = MEMORY_MODELS[name].stage_costs(profile_of(layers, boundaries, device), run)
        stages = rng.randrange(1, size + 1)
        matrix = costs.matrix(0, stages)
        most = int(rng.choice(matrix[matrix < NEVER]))
        ranges = ranges_within(costs, stages, most)
        kept += check(costs, ranges, stages, stages, most)
        dropped += size * (size + 1) // 2 - len(ranges.firsts)
        searched = rng.randrange(1, stages + 1)
        narrower = ranges.within(most * 2 // 3, searched)
        assert len(narrower.firsts) <= len(ranges.firsts)
        check(costs, narrower, stages, searched, most * 2 // 3)
    assert kept > 0
    assert dropped > 0


def test_costs_without_a_rule_keep_every_range() -> None:
    rng = random.Random("ranges of tables")
    costs = table(rng, "any", 6, position_free=False)
    ranges = ranges_within(costs, 3, 0)
    assert len(ranges.firsts) == 21
    check(costs, ranges, 3, 3, 0)
    assert ranges.within(0, 1) is ranges
