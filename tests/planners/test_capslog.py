"""CAPSlog's search beside exhaustive search and beside a literal reading of its two algorithms."""

from __future__ import annotations

import random

import pytest

from tests.planners.instances import exhaustive, instances, peaks, statistics
from varuna_capslog.memory.additive import AdditiveCosts
from varuna_capslog.planners.capslog import capslog_cuts


def fill_first(isolated: list[int], added: list[int], devices: int, threshold: int) -> list[int]:
    """Devices 0 .. G-2 are filled in turn, at least one layer each and one left for each that follows."""
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
    """Algorithm 1 with a memory capacity that everything fits."""
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
    """Without monotone statistics it may miss the best; what it recommends is what fill-first gives for its peak."""
    rng = random.Random(f"capslog {kind}")
    worse = 0
    for isolated, added, costs, devices in instances(rng, kind, 1000, 9):
        cuts = capslog_cuts(costs, devices)
        assert len(cuts) == devices
        peak = max(peaks(isolated, added, cuts))
        # With a negative M_a a stage may rise above its final peak on the way, so any reached threshold may be the one.
        reached = {costs.stage_bytes(l, m) for l in range(len(added)) for m in range(l + 1, len(added) + 1)}
        thresholds = sorted(bytes for bytes in reached if bytes >= peak) if kind == "negative" else [peak]
        assert any(fill_first(isolated, added, devices, bytes) == cuts for bytes in thresholds), (isolated, added)
        worse += peak > min(max(peaks(isolated, added, other)) for other in exhaustive(costs, devices))
    assert 0 < worse < 800


def test_misses_the_best_cut_of_the_counterexample() -> None:
    costs = AdditiveCosts.of_statistics([5, 5, 10], [None, 1, 2])
    assert capslog_cuts(costs, 2) == [0, 2]
    assert costs.peaks([0, 2]) == [6, 10]


def test_last_device_takes_the_rest() -> None:
    """Algorithm 2 as printed runs past the last layer or makes one stage too many; its text rules."""
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
