"""CAPSlog's search, compared with exhaustive search and with a literal version of its two algorithms; its tie-breaker,
compared with a literal recursion, `capslog` and `exact`.
"""

from __future__ import annotations

import random

import pytest

from tests.planners.instances import exhaustive, instances, peaks, statistics
from tests.planners.test_mcap import PlacedCosts
from varuna_capslog.memory.additive import AdditiveCosts
from varuna_capslog.planners.capslog import capslog_cuts, capslog_tb_cuts
from varuna_capslog.planners.exact import exact_cuts


def fill_first(isolated: list[int], added: list[int], devices: int, threshold: int) -> list[int]:
    """Fill devices 0 .. G-2 in turn: at least one layer each, and one layer left for each later device."""
    cuts = [0]
    for device in range(devices - 1):
        end = cuts[-1] + 1
        while end < len(isolated) - (devices - 1 - device):
            if isolated[cuts[-1]] + sum(added[cuts[-1] + 1 : end + 1]) > threshold:
                break
            end += 1
        cuts.append(end)
    return cuts


def literal(isolated: list[int], added: list[int], devices: int) -> list[int] | None:
    """Run Algorithm 1 with unlimited memory capacity."""
    low, high, recommended = 0, sum(isolated) + sum(abs(part) for part in added), None
    while low <= high:
        threshold = (low + high) // 2
        cuts = fill_first(isolated, added, devices, threshold)
        if max(peaks(isolated, added, cuts)) <= threshold:
            recommended, high = cuts, threshold - 1
        else:
            low = threshold + 1
    return recommended


def test_smallest_peak_where_peaks_grow_at_both_ends() -> None:
    rng = random.Random("capslog monotone")
    for isolated, added, costs, devices in instances(rng, "monotone", 2000, 9):
        smallest = min(max(peaks(isolated, added, cuts)) for cuts in exhaustive(costs, devices))
        cuts = capslog_cuts(costs, devices)
        assert max(peaks(isolated, added, cuts)) == smallest, (isolated, added, devices)
        assert cuts == literal(isolated, added, devices)


def test_same_stages_as_the_literal_algorithm_at_full_size() -> None:
    rng = random.Random("capslog full size")
    for _ in range(40):
        isolated, added = statistics(rng, "monotone", 48)
        devices = rng.randrange(2, 25)
        assert capslog_cuts(AdditiveCosts.of_statistics(isolated, added), devices) == literal(isolated, added, devices)


@pytest.mark.parametrize("kind", ["any", "negative", "ties"])
def test_always_a_fill_first_answer(kind: str) -> None:
    """Without monotone statistics it may miss the best cuts, but its cuts are those of fill-first for its peak."""
    rng = random.Random(f"capslog {kind}")
    worse = 0
    for isolated, added, costs, devices in instances(rng, kind, 1000, 9):
        cuts = capslog_cuts(costs, devices)
        assert len(cuts) == devices
        peak = max(peaks(isolated, added, cuts))
        # With a negative M_a a stage may exceed its final peak while it is filled, so any reached threshold may count.
        reached = {costs.stage_bytes(l, m) for l in range(len(added)) for m in range(l + 1, len(added) + 1)}
        thresholds = sorted(bytes for bytes in reached if bytes >= peak) if kind == "negative" else [peak]
        assert any(fill_first(isolated, added, devices, bytes) == cuts for bytes in thresholds), (isolated, added)
        worse += peak > min(max(peaks(isolated, added, candidate)) for candidate in exhaustive(costs, devices))
    assert 0 < worse < 800


def test_misses_the_best_cut_of_the_counterexample() -> None:
    costs = AdditiveCosts.of_statistics([5, 5, 10], [None, 1, 2])
    assert capslog_cuts(costs, 2) == [0, 2]
    assert costs.peaks([0, 2]) == [6, 10]


def test_last_device_takes_the_rest() -> None:
    """Algorithm 2 as printed runs past the last layer or makes one stage too many; the paper's text is followed."""
    costs = AdditiveCosts.of_statistics([1, 1, 1, 1, 1], [None, 1, 1, 1, 1])
    assert capslog_cuts(costs, 2) == [0, 3]
    assert capslog_cuts(costs, 5) == [0, 1, 2, 3, 4]
    assert capslog_cuts(costs, 1) == [0]


def test_ten_thousand_layers() -> None:
    rng = random.Random("capslog large")
    isolated, added = statistics(rng, "monotone", 10_000)
    costs = AdditiveCosts.of_statistics(isolated, added)
    cuts = capslog_cuts(costs, 1000)
    peak = max(costs.peaks(cuts))
    assert fill_first(isolated, added, 1000, peak) == cuts
    assert max(costs.peaks(fill_first(isolated, added, 1000, peak - 1))) > peak - 1


def recursion(isolated: list[int], added: list[int], devices: int) -> list[int]:
    """Plan, fix the stage with the highest peak, then plan the layers before it and behind it, on sliced lists."""
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


def test_tie_breaker_equals_the_literal_recursion_where_peaks_grow_at_both_ends() -> None:
    rng = random.Random("tie-breaker")
    changed = 0
    for number in range(500):
        num_layers = 48 if number < 15 else rng.randrange(1, 12)
        devices = rng.randrange(1, num_layers + 1)
        isolated, added = statistics(rng, "monotone", num_layers)
        costs = AdditiveCosts.of_statistics(isolated, added)
        cuts = capslog_tb_cuts(costs, devices)
        assert cuts == recursion(isolated, added, devices), (isolated, added, devices)
        changed += cuts != capslog_cuts(costs, devices)
    assert changed > 50


@pytest.mark.parametrize("kind", ["any", "negative", "ties", "monotone"])
def test_tie_breaker_lies_between_capslog_and_exact(kind: str) -> None:
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
    """Costs by stage position give the same cuts as additive costs if the position makes no difference."""
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


def test_tie_breaker_on_many_devices() -> None:
    costs = AdditiveCosts.of_statistics(*statistics(random.Random("many"), "monotone", 2000))
    cuts = capslog_tb_cuts(costs, 400)
    assert len(cuts) == 400
    assert cuts == sorted(set(cuts))
    assert descending(costs, cuts) < descending(costs, capslog_cuts(costs, 400))
