"""The exact planner, compared with exhaustive search, for additive costs and for costs of any form."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from tests.planners.instances import TableCosts, exhaustive, instances, peaks, statistics, table
from tests.sweeps import some
from varuna_capslog.memory import NEVER, StageCosts
from varuna_capslog.memory.additive import AdditiveCosts
from varuna_capslog.memory.inflight import InflightCosts, Ranges
from varuna_capslog.planners import exact
from varuna_capslog.planners.exact import exact_cuts, fewest_devices
from varuna_capslog.schedules import RunShape

KINDS = ["any", "ties", "growing", "falling"]
"""Kinds of tables, for costs of any form."""


@pytest.mark.parametrize("kind", ["any", "negative", "ties", "monotone"])
def test_equals_exhaustive_search_with_its_tie_break(kind: str) -> None:
    rng = random.Random(f"exact {kind}")
    for isolated, added, costs, devices in instances(rng, kind, 1500, 9):
        best = min(
            exhaustive(costs, devices),
            key=lambda cuts: (sorted(peaks(isolated, added, cuts), reverse=True), cuts),
        )
        assert exact_cuts(costs, devices) == best, (isolated, added, devices)


@pytest.mark.parametrize("seconds_per_cell", [0.0, exact._SECONDS_PER_CELL])
@pytest.mark.parametrize("kind", ["any", "negative", "ties", "monotone"])
def test_splitting_the_search_changes_nothing(
    kind: str, seconds_per_cell: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps that are for large searches only, and only as long as they pay off, always run to the end here."""
    monkeypatch.setattr(exact, "_MANY", 0)
    monkeypatch.setattr(exact, "_SECONDS_PER_CELL", seconds_per_cell)
    rng = random.Random(f"even {kind}")
    for isolated, added, costs, devices in instances(rng, kind, 600, 9):
        order = [(sorted(peaks(isolated, added, cuts), reverse=True), cuts) for cuts in exhaustive(costs, devices)]
        assert exact_cuts(costs, devices) == min(order)[1], (isolated, added, devices)
    for _ in range(4):
        costs = AdditiveCosts.of_statistics(*statistics(rng, kind, 48))
        assert exact_cuts(costs, 24) == by_sorted_tuples(costs, 24)


@pytest.mark.parametrize("kind", ["any", "negative", "ties", "monotone"])
def test_hundreds_of_layers_by_parts_and_at_once(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact, "_MANY", 10_000)
    costs = AdditiveCosts.of_statistics(*statistics(random.Random(f"parts {kind}"), kind, 400))
    parts = exact_cuts(costs, 40)
    searched: list[int] = []
    search = exact._of_states

    def watch(band: exact.Band, devices: int, *others: Any) -> list[int]:
        searched.append(devices)
        return search(band, devices, *others)

    monkeypatch.setattr(exact, "_of_states", watch)
    assert exact_cuts(costs, 40) == parts
    assert kind in ("ties", "negative") or max(searched) < 40
    searched.clear()
    monkeypatch.setattr(exact, "_MANY", 1 << 60)
    monkeypatch.setattr(exact, "_WIDEST", 1 << 24)
    assert exact_cuts(costs, 40) == parts
    assert searched == [40]


def test_peaks_that_are_not_told_apart_cost_evenness_but_never_the_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact, "_WIDEST", 0)
    rng = random.Random("lumped")
    uneven = 0
    for isolated, added, costs, devices in instances(rng, "ties", 400, 8):
        stage_peaks = sorted(peaks(isolated, added, exact_cuts(costs, devices)), reverse=True)
        best = min(sorted(peaks(isolated, added, cuts), reverse=True) for cuts in exhaustive(costs, devices))
        assert stage_peaks[0] == best[0]
        assert stage_peaks.count(stage_peaks[0]) == best.count(best[0])
        uneven += stage_peaks != best
    assert uneven > 0


def test_fill_first_counterexample() -> None:
    costs = AdditiveCosts.of_statistics([5, 5, 10], [None, 1, 2])
    assert exact_cuts(costs, 2) == [0, 1]
    assert costs.peaks([0, 1]) == [5, 7]


def test_second_largest_stage_counts_and_then_the_smallest_cut_list() -> None:
    # Stage 0 must hold the big layer alone; the rest may be cut at 2, 3 or 4 with the same peak of 90.
    costs = AdditiveCosts.of_statistics([90, 5, 5, 5, 5], [None, 90, 5, 5, 5])
    assert exact_cuts(costs, 3) == [0, 1, 3]
    # All stage peaks are equal wherever the cut lies.
    assert exact_cuts(AdditiveCosts.of_statistics([4, 4, 4], [None, 0, 0]), 2) == [0, 1]


def test_one_stage_and_one_layer_per_stage() -> None:
    costs = AdditiveCosts.of_statistics([3, 4, 5], [None, 1, 1])
    assert exact_cuts(costs, 1) == [0]
    assert exact_cuts(costs, 3) == [0, 1, 2]


@pytest.mark.parametrize("kind", ["any", "negative", "ties"])
def test_devices_that_differ(kind: str) -> None:
    """The best cut list that fits is returned; if none fits, the one with the smallest peak."""
    rng = random.Random(f"capacities {kind}")
    fitting = 0
    for isolated, added, costs, devices in instances(rng, kind, 800, 7):
        top = max(isolated) * 2 + 1
        capacities = [rng.randrange(1, top + 1) for _ in range(devices)]

        def order(cuts: list[int]) -> tuple[list[int], list[int]]:
            return sorted(peaks(isolated, added, cuts), reverse=True), cuts  # noqa: B023

        everything = list(exhaustive(costs, devices))
        fits = [
            cuts
            for cuts in everything
            if all(used <= size for used, size in zip(peaks(isolated, added, cuts), capacities, strict=True))
        ]
        fitting += bool(fits)
        best = min(fits or everything, key=order)
        assert exact_cuts(costs, devices, capacities) == best, (isolated, added, capacities)
    assert 100 < fitting < 700


@pytest.mark.parametrize("kind", ["any", "negative", "ties"])
def test_fewest_devices_equals_exhaustive_search(kind: str) -> None:
    rng = random.Random(f"fewest {kind}")
    answers = set()
    for _ in range(600):
        isolated, added = statistics(rng, kind, rng.randrange(1, 9))
        costs = AdditiveCosts.of_statistics(isolated, added)
        capacity = rng.randrange(1, 2 * max(isolated) + 2)
        counts = [
            devices
            for devices in range(1, len(isolated) + 1)
            if any(max(peaks(isolated, added, cuts)) <= capacity for cuts in exhaustive(costs, devices))
        ]
        assert fewest_devices(costs, capacity) == (counts[0] if counts else None), (isolated, added, capacity)
        answers.add(counts[0] if counts else None)
    assert {None, 1, 2, 3} <= answers


def by_sorted_tuples(costs: StageCosts, devices: int) -> list[int]:
    """Return the best cut list by a plain dynamic program over sorted tuples of peaks and cut lists."""
    best: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = {costs.num_layers: ((), ())}
    for stage in reversed(range(devices)):
        best = {
            first: min(
                (
                    tuple(sorted((*peaks, costs.stage_bytes(first, end, stage, devices)), reverse=True)),
                    (first, *cuts),
                )
                for end, (peaks, cuts) in best.items()
                if end > first
            )
            for first in range(max(best))
        }
    return list(best[0][1])


@pytest.mark.parametrize("kind", ["any", "negative", "ties", "monotone"])
def test_equals_a_plain_dynamic_program_at_full_size(kind: str) -> None:
    rng = random.Random(f"full size {kind}")
    for _ in range(4):
        costs = AdditiveCosts.of_statistics(*statistics(rng, kind, 48))
        assert exact_cuts(costs, 24) == by_sorted_tuples(costs, 24)


def test_many_equal_stages_do_not_outweigh_one_larger_stage() -> None:
    """Fourteen stages of 5 beat one of 6 and thirteen of 2: a count must not carry into the next peak's digit.

    Layer 0 stands alone at 9. Of the rest, stages that begin at odd layers and end before odd layers cost 5, and only a
    stage of 6 leads to the cheap ones that begin at even layers.
    """
    isolated = [9] + [6, 1] * 14
    added = [None, 9] + [-1, 1] * 13 + [-1]
    costs = AdditiveCosts.of_statistics(isolated, added)
    cuts = exact_cuts(costs, 15)
    assert cuts == by_sorted_tuples(costs, 15)
    assert sorted(costs.peaks(cuts)) == [5] * 14 + [9]


# -- costs of any form


def best(costs: StageCosts, lists: list[list[int]]) -> list[int]:
    return min(lists, key=lambda cuts: (sorted(costs.peaks(cuts), reverse=True), cuts))


def fitting(costs: StageCosts, capacities: list[int], lists: Iterable[list[int]]) -> list[list[int]]:
    """Return the cut lists whose stages fit devices of these capacities."""
    return [
        cuts for cuts in lists if all(used <= size for used, size in zip(costs.peaks(cuts), capacities, strict=True))
    ]


@pytest.mark.parametrize("position_free", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "settings", [{}, {"_FEW": 0}, {"_FEW": 10, "_KEPT": 0}, {"_FEW": 0, "_SMALL": 0, "_NARROWED": 1, "_FEW_RANGES": 0}]
)
def test_costs_of_any_form_equal_exhaustive_search_with_its_tie_break(
    settings: dict[str, int], kind: str, position_free: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with settings where steps for large instances always run."""
    for name, value in settings.items():
        monkeypatch.setattr(exact, name, value)
    rng = random.Random(f"general {kind} {position_free}")
    for _ in some(range(250), 60):
        num_layers = rng.randrange(1, 9)
        devices = rng.randrange(1, num_layers + 1)
        costs = table(rng, kind, num_layers, position_free)
        assert exact_cuts(costs, devices) == best(costs, list(exhaustive(costs, devices))), (costs.entries, devices)


@pytest.mark.parametrize("settings", [{}, {"_FEW": 0, "_SMALL": 0, "_NARROWED": 1, "_FEW_RANGES": 0}])
@pytest.mark.parametrize(("schedule", "recompute"), [("1f1b", False), ("gpipe", False), ("varuna", True)])
def test_what_waits_in_flight_is_searched_part_by_part(
    schedule: str, recompute: bool, settings: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For memory models of schedules. Negative parts, which no profile should have, must not hide a range."""
    for name, value in settings.items():
        monkeypatch.setattr(exact, name, value)
    rng = random.Random(f"in flight {schedule}")
    for number in range(150):
        num_layers = rng.randrange(2, 10)
        devices = rng.randrange(2, num_layers + 1)
        high = rng.choice([3, 100, 10**10])
        alone, *parts = (
            np.array([[rng.randrange(high) for _ in range(num_layers + 1)] for _ in range(num_layers)])
            for _ in range(4)
        )
        parts = [part - number % 2 * high // 4 for part in parts]
        none = np.tri(num_layers, num_layers + 1, dtype=bool)
        for part in parts:
            part[none] = 0
        alone[none] = NEVER
        run = RunShape(rng.randrange(1, 7), schedule, recompute, "device")
        costs = InflightCosts(alone, *parts, run=run, one_memory=bool(number % 3))
        expected = best(costs, list(exhaustive(costs, devices)))
        assert exact_cuts(costs, devices) == expected
        capacities = [peak + rng.randrange(high) for peak in costs.peaks(rng.choice(list(exhaustive(costs, devices))))]
        if len(set(capacities)) > 1:
            within = fitting(costs, capacities, exhaustive(costs, devices))
            assert exact_cuts(costs, devices, capacities) == best(costs, within)


@pytest.mark.parametrize("position_free", [True, False])
@pytest.mark.parametrize("kind", ["any", "ties"])
def test_devices_that_differ_with_costs_of_any_form(kind: str, position_free: bool) -> None:
    """The best cut list that fits is returned; if none fits, the one with the smallest peak."""
    rng = random.Random(f"general capacities {kind}")
    fitted = 0
    for _ in range(300):
        num_layers = rng.randrange(1, 8)
        devices = rng.randrange(1, num_layers + 1)
        costs = table(rng, kind, num_layers, position_free)
        everything = list(exhaustive(costs, devices))
        top = max(costs.peaks(rng.choice(everything)))
        capacities = [rng.randrange(1, 2 * top + 2) for _ in range(devices)]
        fits = fitting(costs, capacities, everything)
        fitted += bool(fits)
        # Equal capacities do not change the result, whether or not it fits them.
        expected = best(costs, (fits if len(set(capacities)) > 1 else []) or everything)
        assert exact_cuts(costs, devices, capacities) == expected, (costs.entries, capacities)
    assert 50 < fitted < 270


def test_loose_capacities_leave_long_ranges_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only ranges up to the length of a stage of the even split are searched, of 20,100 for 200 equal layers."""
    range_counts: list[int] = []
    search = exact._with_smallest_peak

    def watch(ranges: Ranges, *others: Any) -> Any:
        range_counts.append(len(ranges.firsts))
        return search(ranges, *others)

    monkeypatch.setattr(exact, "_with_smallest_peak", watch)
    costs = AdditiveCosts.of_statistics([1] * 200, [1] * 200)
    even = [10 * stage for stage in range(20)]
    assert exact_cuts(costs, 20, [1000, 2000] * 10) == even
    assert range_counts == [sum(200 - longer for longer in range(10))]


@pytest.mark.parametrize("position_free", [True, False])
def test_fewest_devices_with_costs_of_any_form(position_free: bool) -> None:
    rng = random.Random("general fewest")
    answers = set()
    for _ in range(300):
        costs = table(rng, rng.choice(KINDS), rng.randrange(1, 8), position_free)
        capacity = rng.randrange(1, 2 * max(costs.stage_bytes(0, 1), 1) + 2)
        counts = [
            devices
            for devices in range(1, costs.num_layers + 1)
            if any(max(costs.peaks(cuts)) <= capacity for cuts in exhaustive(costs, devices))
        ]
        fewest = fewest_devices(costs, capacity)
        assert fewest == (counts[0] if counts else None), (costs.entries, capacity)
        answers.add(fewest)
    assert {None, 1, 2, 3} <= answers


@pytest.mark.parametrize("kind", KINDS)
def test_costs_of_any_form_equal_a_plain_dynamic_program(kind: str) -> None:
    rng = random.Random(f"general full size {kind}")
    for position_free in (True, False):
        costs = table(rng, kind, 48, position_free)
        assert exact_cuts(costs, 24) == by_sorted_tuples(costs, 24)


def test_a_costly_layer_goes_where_little_waits() -> None:
    """Under 1F1B the same layers need fewer bytes on late stages; a search that ignores this finds 42, not 18."""
    saved = [2, 2, 2, 8, 8, 8]
    entries = {
        (stage, 3, first, end): (3 - stage) * sum(saved[first:end])
        for stage in range(3)
        for first in range(6)
        for end in range(first + 1, 7)
    }
    costs = TableCosts(6, entries)
    assert exact_cuts(costs, 3) == [0, 3, 4]
    assert costs.peaks([0, 3, 4]) == [18, 16, 16]
    blind = TableCosts(6, {(0, 1, *key[2:]): used for key, used in entries.items() if key[0] == 2}, position_free=True)
    assert costs.peaks(exact_cuts(blind, 3)) == [42, 16, 8]
