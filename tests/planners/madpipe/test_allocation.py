"""MadPipe's stages, compared with every allocation of small chains and with its recursion as printed."""

from __future__ import annotations

import dataclasses
import math
import random

import pytest

from tests.planners.madpipe.chains import ceiling, draw_chain, every_allocation, fits, plus
from varuna_capslog.planners.madpipe import COMPARED_COUNTINGS, allocations_by_counting
from varuna_capslog.planners.madpipe.allocation import Allocation, ChainCosts, allocation_within, best_allocation
from varuna_capslog.planners.seconds import Link
from varuna_capslog.profiles.record import LayerProfile, Profile

CLOSE = 1.0011


def printed_recursion(costs: ChainCosts, target: float) -> float:
    """Return T(L, P - 1, 0, 0, 0) of Sec. 4.2.2, with C(k - 1) in V' as the text around the formula requires."""
    usable = (costs.usable or math.inf) * (1 + 1e-9)

    def period(layer: int, normal: int, busy: float, held: float, delay: float) -> float:
        if layer == 0:
            return busy
        best = math.inf
        for first in range(1, layer + 1):  # layers first .. layer, counted from 1
            seconds = sum(costs.forward[first - 1 : layer]) + sum(costs.backward[first - 1 : layer])
            in_flight = ceiling((delay + seconds) / target)
            link, wait = costs.link_load(first - 1), costs.delay(first - 1)
            behind = plus(plus(delay, seconds, target), wait, target)
            if normal and costs.memory(first - 1, layer, in_flight) <= usable:
                earlier = period(first - 1, normal - 1, busy, held, behind)
                best = min(best, max(seconds, link, earlier))
            more = held + costs.memory(first - 1, layer, in_flight - 1)
            if more <= usable:
                earlier = period(first - 1, normal, busy + seconds, more, behind)
                best = min(best, max(busy + seconds, link, earlier))
        return best

    return period(costs.num_layers, costs.devices - 1, 0.0, 0.0, 0.0)


def check_against_every_allocation(dice: random.Random) -> bool:
    """Check the best allocation of a random chain; return True if there is one."""
    layers, devices = dice.randrange(2, 9), dice.randrange(2, 5)
    costs, counting = draw_chain(dice, layers, devices), dice.choice(["least", "most", "printed"])
    allocation = best_allocation(costs, counting)
    all_parts = list(every_allocation(layers, devices - 1))
    if allocation is None:
        largest = sum(costs.forward) + sum(costs.backward) + 2 * sum(costs.transfer)
        assert not any(fits(costs, parts, largest, counting) for parts in all_parts)
        return False
    parts = [(stage.first, stage.end, stage.special) for stage in allocation.stages]
    assert parts in all_parts
    assert fits(costs, parts, allocation.period, counting)
    assert not any(fits(costs, parts, allocation.period / CLOSE, counting) for parts in all_parts)
    return True


def test_no_allocation_of_a_small_chain_has_a_shorter_period() -> None:
    dice = random.Random(3)
    assert sum(check_against_every_allocation(dice) for _ in range(80)) > 50


def test_contiguous_ones_use_every_processor_as_a_normal_one() -> None:
    dice, better = random.Random(4), 0
    for _ in range(60):
        layers, devices = dice.randrange(2, 9), dice.randrange(2, 5)
        costs = draw_chain(dice, layers, devices)
        allocation = best_allocation(costs, "none")
        all_parts = [
            parts for parts in every_allocation(layers, devices) if not any(special for _, _, special in parts)
        ]
        if allocation is not None:
            assert allocation.contiguous
            assert not any(fits(costs, parts, allocation.period / CLOSE) for parts in all_parts)
        free = best_allocation(costs)
        better += free is not None and (allocation is None or free.period < allocation.period / 1.05)
    assert better > 10  # the gain of the special processor


def test_the_countings_are_searched_together_with_the_same_answers() -> None:
    dice, several = random.Random(9), 0
    for _ in range(40):
        costs = draw_chain(dice, dice.randrange(2, 9), dice.randrange(1, 5))
        allocations = allocations_by_counting(costs)
        countings = COMPARED_COUNTINGS if costs.devices > 1 else ("none",)
        separate = {counting: best_allocation(costs, counting) for counting in countings}
        periods = [allocation.period for allocation in separate.values() if allocation is not None]
        assert bool(allocations) == bool(periods)
        for name, allocation in allocations.items():
            single = separate[name]
            assert single is not None
            assert allocation.period == pytest.approx(single.period, rel=2e-3)
        shortest = min((allocation.period for allocation in allocations.values()), default=0)
        assert shortest <= min(periods, default=0) * 1.001
        several += len({allocation.stages for allocation in allocations.values()}) > 1
    assert several > 5


def test_the_printed_recursion_has_the_same_smallest_period_for_any_target() -> None:
    dice, feasible = random.Random(5), 0
    for _ in range(60):
        costs = draw_chain(dice, dice.randrange(2, 7), dice.randrange(2, 4))
        work = sum(costs.forward) + sum(costs.backward)
        target = work * dice.uniform(0.3, 1.2)
        period = printed_recursion(costs, target)
        if period == math.inf:
            assert allocation_within(costs, target, 2 * work, counting="printed") is None
            continue
        feasible += 1
        allocation = allocation_within(costs, target, period * (1 + 1e-6), counting="printed")
        assert allocation is not None
        assert allocation.load(costs) <= period * (1 + 1e-5)
        assert allocation_within(costs, target, period * (1 - 1e-6), counting="printed") is None
    assert feasible > 20


def test_algorithm_1_keeps_the_old_period_as_a_bound_where_nothing_fits_at_the_first() -> None:
    """In the printed algorithm the lower bound becomes infinite then, and no allocation is found."""
    costs = ChainCosts((1.0, 1.0), (1.0, 1.0), (0.0, 0.0), (4.0, 4.0), (0.0, 0.0, 0.0), (0.0, 0.0, 0.0), 2, 4.0)
    assert allocation_within(costs, 2.0) is None
    allocation = best_allocation(costs)
    assert allocation is not None
    assert allocation.period == pytest.approx(4.0, rel=1e-3)


def test_labels_that_are_many_are_thinned_and_lose_little(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = draw_chain(random.Random(8), 24, 4)
    costs = dataclasses.replace(costs, usable=(costs.usable or 0) * 2)
    exact = best_allocation(costs)
    monkeypatch.setattr("varuna_capslog.planners.madpipe.allocation._LABELS", 20)
    coarse = best_allocation(costs)
    assert exact is not None
    assert coarse is not None
    assert exact.period / CLOSE <= coarse.period <= 1.1 * exact.period
    assert fits(costs, [(stage.first, stage.end, stage.special) for stage in coarse.stages], coarse.period)


def test_ranks_are_counted_as_they_appear_and_the_special_one_comes_back() -> None:
    costs = draw_chain(random.Random(0), 5, 3)
    allocation = Allocation.of(costs, [(0, 1, False), (1, 2, True), (2, 4, False), (4, 5, True)])
    assert [stage.rank for stage in allocation.stages] == [0, 1, 2, 1]
    assert not allocation.contiguous
    busy = [sum(costs.forward[a:b]) + sum(costs.backward[a:b]) for a, b in ((0, 1), (2, 4))]
    busy.append(sum(costs.forward[k] + costs.backward[k] for k in (1, 4)))
    assert allocation.period == pytest.approx(max([*busy, *map(costs.link_load, (1, 2, 4))]))


def rows(**missing: None) -> Profile:
    fields = {
        "static_bytes": 16, "saved_bytes": 5, "boundary_bytes": 2, "parameter_bytes": 4,
        "forward_seconds": 1.0, "backward_seconds": 2.0,
    }  # fmt: skip
    return Profile(tuple(LayerProfile(f"l{at}", 30, 9 if at else None, **fields | missing) for at in range(3)))


def test_a_profile_gives_what_the_devices_and_the_link_ask_for() -> None:
    plain = ChainCosts.of_profile(rows(boundary_bytes=None, static_bytes=None, saved_bytes=None), 2)
    assert (plain.usable, sum(plain.static), sum(plain.crossing), sum(plain.transfer)) == (None, 0, 0, 0)
    costs = ChainCosts.of_profile(rows(), 2, 100, Link(2.0, 0.5, shared=True))
    assert (costs.static, costs.saved, costs.crossing) == ((16.0,) * 3, (5.0,) * 3, (0.0, 2.0, 2.0, 0.0))
    assert (costs.transfer, costs.delay(1), costs.link_load(1)) == ((0.0, 1.5, 1.5, 0.0), 3.0, 3.0)
    assert costs.memory(0, 2, 3) == 2 * 16 + 3 * 10 + 2 * 2
    assert ChainCosts.of_profile(rows(), 2, 100, two_versions=True).static == (12.0,) * 3
