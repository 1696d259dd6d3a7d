"""The exact search for costs of any form beside exhaustive search."""

from __future__ import annotations

import random

import numpy as np
import pytest

from tests.planners.instances import TableCosts, exhaustive, table
from varuna_capslog.memory import NEVER
from varuna_capslog.memory.inflight import InflightCosts
from varuna_capslog.planners import exact_general
from varuna_capslog.planners.exact import exact_cuts, fewest_devices
from varuna_capslog.schedules import RunShape

KINDS = ["any", "ties", "growing", "falling"]


def best(costs: TableCosts, lists: list[list[int]]) -> list[int]:
    return min(lists, key=lambda cuts: (sorted(costs.peaks(cuts), reverse=True), cuts))


@pytest.mark.parametrize("position_free", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "settings", [{}, {"_FEW": 0}, {"_FEW": 10, "_KEPT": 0}, {"_FEW": 0, "_SMALL": 0, "_NARROWED": 1, "_FEW_RANGES": 0}]
)
def test_equals_exhaustive_search_with_its_tie_break(
    settings: dict[str, int], kind: str, position_free: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where what is done only for large instances is done always."""
    for name, value in settings.items():
        monkeypatch.setattr(exact_general, name, value)
    rng = random.Random(f"general {kind} {position_free}")
    for _ in range(250):
        num_layers = rng.randrange(1, 9)
        devices = rng.randrange(1, num_layers + 1)
        costs = table(rng, kind, num_layers, position_free)
        assert exact_cuts(costs, devices) == best(costs, list(exhaustive(costs, devices))), (costs.entries, devices)


@pytest.mark.parametrize("settings", [{}, {"_FEW": 0, "_SMALL": 0, "_NARROWED": 1, "_FEW_RANGES": 0}])
@pytest.mark.parametrize(("schedule", "recompute"), [("1f1b", False), ("gpipe", False), ("varuna", True)])
def test_what_waits_in_flight_is_searched_part_by_part(
    schedule: str, recompute: bool, settings: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory models of schedules; parts below 0, which no profile should have, must not hide a range."""
    for name, value in settings.items():
        monkeypatch.setattr(exact_general, name, value)
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
            within = [
                cuts
                for cuts in exhaustive(costs, devices)
                if all(used <= size for used, size in zip(costs.peaks(cuts), capacities, strict=True))
            ]
            assert exact_cuts(costs, devices, capacities) == best(costs, within)


@pytest.mark.parametrize("position_free", [True, False])
@pytest.mark.parametrize("kind", ["any", "ties"])
def test_devices_that_differ(kind: str, position_free: bool) -> None:
    """Where some cut list fits, one that fits comes out, the best of those; where none does, the smallest peak."""
    rng = random.Random(f"general capacities {kind}")
    fitting = 0
    for _ in range(300):
        num_layers = rng.randrange(1, 8)
        devices = rng.randrange(1, num_layers + 1)
        costs = table(rng, kind, num_layers, position_free)
        everything = list(exhaustive(costs, devices))
        top = max(costs.peaks(rng.choice(everything)))
        capacities = [rng.randrange(1, 2 * top + 2) for _ in range(devices)]
        fits = [
            cuts
            for cuts in everything
            if all(used <= size for used, size in zip(costs.peaks(cuts), capacities, strict=True))
        ]
        fitting += bool(fits)
        # Equal capacities change nothing, whether or not they are kept to.
        expected = best(costs, (fits if len(set(capacities)) > 1 else []) or everything)
        assert exact_cuts(costs, devices, capacities) == expected, (costs.entries, capacities)
    assert 50 < fitting < 270


@pytest.mark.parametrize("position_free", [True, False])
def test_fewest_devices_equals_exhaustive_search(position_free: bool) -> None:
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
        found = fewest_devices(costs, capacity)
        assert found == (counts[0] if counts else None), (costs.entries, capacity)
        answers.add(found)
    assert {None, 1, 2, 3} <= answers


def by_sorted_tuples(costs: TableCosts, devices: int) -> list[int]:
    """The same answer by a plain dynamic program over sorted tuples of peaks and cut lists."""
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


@pytest.mark.parametrize("kind", KINDS)
def test_equals_a_plain_dynamic_program_at_full_size(kind: str) -> None:
    rng = random.Random(f"general full size {kind}")
    for position_free in (True, False):
        costs = table(rng, kind, 48, position_free)
        assert exact_cuts(costs, 24) == by_sorted_tuples(costs, 24)


def test_a_costly_layer_goes_where_little_waits() -> None:
    """Under 1F1B the same layers weigh less on late stages: a search that takes stages as equal gives 42, not 18."""
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
