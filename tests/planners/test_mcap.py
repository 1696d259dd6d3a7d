"""mCAP's recommenders, compared with the exact planner and with a literal version of the rule."""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.planners.instances import exhaustive, instances, peaks, statistics
from tests.planning import asking
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.memory.additive import AdditiveCosts
from varuna_capslog.memory.costs import full_matrix, peaks_of
from varuna_capslog.planners import mcap
from varuna_capslog.planners.exact import exact_cuts
from varuna_capslog.planners.mcap import count_cut_lists, mcap_bf_cuts, mcap_bo_cuts
from varuna_capslog.profiles.record import LayerProfile, Profile


def by_rounds(isolated: list[int], added: list[int], devices: int) -> list[int]:
    """Run brute force and the tie-break rule as the text says: drop the highest device, compare the others' peak."""
    costs = AdditiveCosts.of_statistics(isolated, added)
    race = [(cuts, peaks(isolated, added, cuts)) for cuts in exhaustive(costs, devices)]
    for _ in range(devices):
        lowest = min(max(stage_peaks) for _, stage_peaks in race)
        race = [(cuts, stage_peaks) for cuts, stage_peaks in race if max(stage_peaks) == lowest]
        for _, stage_peaks in race:
            stage_peaks.remove(max(stage_peaks))
    return min(cuts for cuts, _ in race)


@pytest.mark.parametrize("kind", ["any", "negative", "ties", "monotone"])
@pytest.mark.parametrize("block", [1, 7, 1 << 18])
def test_brute_force_follows_the_rule_and_equals_exact(kind: str, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mcap, "_BLOCK", block)
    rng = random.Random(f"mcap {kind}")
    for isolated, added, costs, devices in instances(rng, kind, 150, 9):
        cuts = mcap_bf_cuts(costs, devices)
        assert cuts == by_rounds(isolated, added, devices), (isolated, added, devices)
        assert cuts == exact_cuts(costs, devices)


@pytest.mark.parametrize("kind", ["any", "negative", "ties"])
def test_brute_force_equals_exact_over_hundreds_of_thousands(kind: str) -> None:
    rng = random.Random(f"mcap size {kind}")
    for devices in (3, 8, 20):
        costs = AdditiveCosts.of_statistics(*statistics(rng, kind, 25))
        assert mcap_bf_cuts(costs, devices) == exact_cuts(costs, devices)


@dataclass(frozen=True)
class PlacedCosts:
    """Bytes that depend on the stage's position; `table[stage][first][end]`."""

    num_layers: int
    table: list[list[list[int]]]
    position_free: bool = False

    def stage_bytes(self, first: int, end: int, stage: int = 0, stages: int = 1) -> int:
        return self.table[stage][first][end]

    def matrix(self, stage: int = 0, stages: int = 1) -> NDArray[np.int64]:
        return full_matrix(self, stage, stages)

    def peaks(self, cuts: list[int]) -> list[int]:  # type: ignore[override]
        return peaks_of(self, cuts)


def test_brute_force_knows_the_place_of_a_stage() -> None:
    rng = random.Random("mcap placed")
    for _ in range(150):
        num_layers = rng.randrange(2, 9)
        devices = rng.randrange(1, num_layers + 1)
        table = [[[rng.randrange(9) for _ in range(num_layers + 1)] for _ in range(num_layers)] for _ in range(devices)]
        costs = PlacedCosts(num_layers, table)
        best = min(exhaustive(costs, devices), key=lambda cuts: (sorted(costs.peaks(cuts), reverse=True), cuts))
        assert mcap_bf_cuts(costs, devices) == best


def test_count_is_the_papers() -> None:
    """Sec. III-B2 prints 1.57 billion for 50 layers on 16 GPUs; its formula gives 1.57e12, a thousand times as many."""
    assert count_cut_lists(25, 8) == 346_104
    assert count_cut_lists(50, 16) == 1_575_580_702_584


def test_refuses_what_would_take_too_long_unless_told(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = AdditiveCosts.of_statistics(*statistics(random.Random(4), "any", 48))
    with pytest.raises(CapslogError, match=r"1\.61e\+13 cut lists, C\(47, 23\), about .* CAPSLOG_MCAP_LIMIT"):
        mcap_bf_cuts(costs, 24)
    monkeypatch.setenv("CAPSLOG_MCAP_LIMIT", "20")
    with pytest.raises(CapslogError, match="weighs at most 20 unless"):
        mcap_bf_cuts(costs, 2)
    monkeypatch.setenv("CAPSLOG_MCAP_LIMIT", "1e20")
    assert mcap_bf_cuts(costs, 2) == exact_cuts(costs, 2)
    with pytest.raises(CapslogError, match="GiB of tables"):
        mcap_bf_cuts(costs, 24)
    monkeypatch.setenv("CAPSLOG_MCAP_LIMIT", "many")
    with pytest.raises(CapslogError, match="CAPSLOG_MCAP_LIMIT=many"):
        mcap_bf_cuts(costs, 2)


def test_bayesian_optimisation_repeats_itself_and_is_no_better_than_brute_force() -> None:
    pytest.importorskip("skopt", reason="scikit-optimize, the extra `bo`, is not installed")
    costs = AdditiveCosts.of_statistics(*statistics(random.Random(5), "any", 12))
    cuts = mcap_bo_cuts(costs, 4, seed=1, calls=34)
    assert cuts == mcap_bo_cuts(costs, 4, seed=1, calls=34)
    assert cuts[0] == 0
    assert len(cuts) == 4
    assert sorted(set(cuts)) == cuts
    drawn = [max(costs.peaks(mcap_bo_cuts(costs, 4, seed=seed, calls=1))) for seed in range(6)]
    best = max(costs.peaks(mcap_bf_cuts(costs, 4)))
    assert best <= max(costs.peaks(cuts)) < max(drawn)


def test_shares_of_what_is_left() -> None:
    assert mcap._cuts_of_shares([1, 1, 1], 10) == [0, 1, 2, 3]
    assert mcap._cuts_of_shares([100, 1, 1], 10) == [0, 7, 8, 9]
    assert mcap._cuts_of_shares([50, 50], 9) == [0, 4, 6]  # 3.5 of 7 rounds to 4, half of the 4 that are free then is 2
    assert mcap._cuts_of_shares([], 5) == [0]


def test_without_the_extra_one_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "skopt", None)
    with pytest.raises(CapslogError, match=r"mcap-bo needs scikit-optimize.*\[bo\]"):
        mcap_bo_cuts(AdditiveCosts.of_statistics([1, 2, 3], [None, 1, 1]), 2)


def test_does_not_fit_is_an_answer_here_too() -> None:
    layers = tuple(LayerProfile(f"l{i}", 4, 4 if i else None) for i in range(3))
    for name in ("mcap-bf", "capslog-tb"):
        plan = asking.plan(Profile(layers=layers), 2, name, capacity=7)
        assert plan.fits is False
        assert plan.shortfall is not None
        assert (plan.shortfall.bytes, plan.shortfall.devices_that_fit) == (1, 3)
