"""CAPSlog's tie-breaker beside a literal recursion, and beside `capslog` and `exact`."""

from __future__ import annotations

import random

import pytest

from tests.planners.instances import instances, peaks, statistics
from tests.planners.test_capslog import literal
from tests.planners.test_mcap import PlacedCosts
from varuna_capslog.memory.additive import AdditiveCosts
from varuna_capslog.planners.capslog import capslog_cuts
from varuna_capslog.planners.capslog_tb import capslog_tb_cuts
from varuna_capslog.planners.exact import exact_cuts


def recursion(isolated: list[int], added: list[int], devices: int) -> list[int]:
    """Plan, fix the highest stage, plan what lies before it and what lies behind it; lists are sliced, not indexed."""
    if devices == 0:
        return []
    cuts = literal(isolated, added, devices)
    assert cuts is not None
    used = peaks(isolated, added, cuts)
    fixed = used.index(max(used))
    first, end = cuts[fixed], [*cuts, len(isolated)][fixed + 1]
    before = recursion(isolated[:first], added[:first], fixed)
    behind = recursion(isolated[end:], added[end:], devices - fixed - 1)
    return [*before, first, *(end + cut for cut in behind)]


def descending(costs: AdditiveCosts, cuts: list[int]) -> list[int]:
    return sorted(costs.peaks(cuts), reverse=True)


def test_equals_the_literal_recursion_where_peaks_grow_at_both_ends() -> None:
    rng = random.Random("tie-breaker")
    changed = 0
    for number in range(500):
        num_layers = 48 if number < 15 else rng.randrange(1, 12)
        devices = rng.randrange(1, num_layers + 1)
        isolated, added = statistics(rng, "monotone", num_layers)
        costs = AdditiveCosts.of_statistics(isolated, added)
        found = capslog_tb_cuts(costs, devices)
        assert found == recursion(isolated, added, devices), (isolated, added, devices)
        changed += found != capslog_cuts(costs, devices)
    assert changed > 50


@pytest.mark.parametrize("kind", ["any", "negative", "ties", "monotone"])
def test_lies_between_capslog_and_exact(kind: str) -> None:
    rng = random.Random(f"between {kind}")
    better = worse = 0
    for _, _, costs, devices in instances(rng, kind, 600, 11):
        plain, broken = (descending(costs, planner(costs, devices)) for planner in (capslog_cuts, capslog_tb_cuts))
        best = descending(costs, exact_cuts(costs, devices))
        assert best <= broken
        assert broken[0] == plain[0]
        better += broken < plain
        worse += broken > best
    assert better > 0
    assert worse > 0


def test_a_part_keeps_its_place_in_the_pipeline() -> None:
    """Costs that depend on the place: the same cuts as with additive costs where the place makes no difference."""
    rng = random.Random("placed tie-breaker")
    differs = 0
    for _, _, costs, devices in instances(rng, "monotone", 100, 8, least=2):
        table = costs.matrix().tolist()
        assert capslog_tb_cuts(PlacedCosts(len(table), [table] * devices), devices) == capslog_tb_cuts(costs, devices)
        placed = PlacedCosts(len(table), [[[b * (g + 1) for b in row] for row in table] for g in range(devices)])
        cuts = capslog_tb_cuts(placed, devices)
        assert max(placed.peaks(cuts)) == max(placed.peaks(capslog_cuts(placed, devices)))
        differs += cuts != capslog_tb_cuts(costs, devices)
    assert differs > 10


def test_many_devices() -> None:
    costs = AdditiveCosts.of_statistics(*statistics(random.Random("many"), "monotone", 2000))
    cuts = capslog_tb_cuts(costs, 400)
    assert len(cuts) == 400
    assert cuts == sorted(set(cuts))
    assert descending(costs, cuts) < descending(costs, capslog_cuts(costs, 400))
