"""Capuchin's greedy choice: worked examples, and a second, slow implementation of its rules."""

from __future__ import annotations

import dataclasses
import random
from fractions import Fraction

import pytest

from tests.planners.layered import chain_of, random_chain
from tests.sweeps import some
from varuna_capslog.planners.capuchin import treated_stage
from varuna_capslog.planners.layerwise import Layerwise, StageChoice


def kinds(choice: StageChoice) -> dict[int, str]:
    assert all(interval.end == interval.first + 1 for interval in choice.intervals)
    return {interval.first: interval.kind for interval in choice.intervals}


def three_layers(usable: int, bandwidth: float | None, beside: bool = True) -> StageChoice:
    """Treat three layers of 1 s forward and 2 s backward, two microbatches in flight. Each layer saves 10 bytes, of
    which recomputation frees 5 and a swap 8."""
    chain = chain_of(
        [1.0] * 3,
        [10] * 3,
        [2],
        [usable],
        freed=[5] * 3,
        moved=[8] * 3,
        host_bandwidth=bandwidth,
        copies_beside=beside,
    )
    return treated_stage(chain, 0, 0, 3)


def test_a_stage_that_fits_is_left_alone() -> None:
    assert three_layers(60, 2.0) == StageChoice(0, 3, (), 9.0, 0)


def test_swaps_come_first_by_falling_free_time_as_long_as_copies_overlap() -> None:
    """A copy of 8 bytes at 2 bytes/s takes 4 s. Layer 0 has 15 s between its forward and its backward (6 s of layers 1
    and 2, 9 s of the other microbatch), so its FreeTime is 7 s; layers 1 and 2 have 4 s and 1 s. Two copies fit into
    the 9 s of a microbatch, three do not."""
    assert three_layers(59, 2.0) == three_layers(44, 2.0)
    assert kinds(three_layers(44, 2.0)) == {0: "offload"}
    assert three_layers(44, 2.0).seconds == 9.0
    assert kinds(three_layers(43, 2.0)) == {0: "offload", 1: "offload"}
    assert three_layers(28, 2.0).seconds == 9.0


def test_then_the_larger_number_of_bytes_per_second_is_taken() -> None:
    """A third swap frees 8 bytes in the 12 - 9 = 3 s that do not overlap. Recomputing layer 2 frees 5 bytes in 1 s."""
    choice = three_layers(27, 2.0)
    assert kinds(choice) == {0: "offload", 1: "offload", 2: "recompute"}
    assert (choice.seconds, choice.lack) == (10.0, 0)
    # at 2.5 bytes/s 0.6 s do not overlap, which frees more per second than recomputation
    choice = three_layers(27, 2.5)
    assert kinds(choice) == {0: "offload", 1: "offload", 2: "offload"}
    assert choice.seconds == pytest.approx(9.6)


def test_a_free_time_below_zero_ends_the_swaps_that_cost_nothing() -> None:
    """Copies take 2 s, with one microbatch in flight. Between forward and backward of the layers lie 6, 3 and 0 s, so
    0, 1 and 4 s of their copies do not overlap. Recomputing layer 1 would free 5 bytes in 1 s, its swap frees 8."""
    chains = [
        chain_of([1.0] * 3, [10] * 3, [1], [usable], freed=[5, 5, 0], moved=[8] * 3, host_bandwidth=4.0)
        for usable in (22, 14, 13)
    ]
    choices = [treated_stage(chain, 0, 0, 3) for chain in chains]
    assert [kinds(choice) for choice in choices] == [dict.fromkeys(range(count), "offload") for count in (1, 2, 3)]
    assert [(choice.seconds, choice.lack) for choice in choices] == [(9.0, 0), (10.0, 0), (14.0, 0)]


def test_where_calls_keep_what_they_save_until_they_end_two_in_flight_swap_nothing() -> None:
    for in_flight, kind in ((1, "recompute"), (2, "recompute"), (3, "offload")):
        usable = 22 * in_flight
        chain = chain_of([1.0] * 3, [10] * 3, [in_flight], [usable], freed=[5, 5, 0], moved=[8] * 3, host_bandwidth=4.0)
        choice = treated_stage(dataclasses.replace(chain, swaps_within_calls=False), 0, 0, 3)
        assert set(kinds(choice).values()) == {kind}, in_flight


def test_copies_that_take_the_devices_time_never_overlap() -> None:
    """Copying 8 bytes out and back takes 8 s at 2 bytes/s; recomputation frees 5 bytes in 1 s."""
    choice = three_layers(50, 2.0, beside=False)
    assert kinds(choice) == {0: "recompute"}
    # at 32 bytes/s both copies take half a second
    choice = three_layers(44, 32.0, beside=False)
    assert kinds(choice) == {0: "offload"}
    assert choice.seconds == 9.5
    # copies that take no time do not take the device's either
    assert three_layers(28, None, beside=False).seconds == 9.0


def test_what_cannot_fit_says_what_it_lacks() -> None:
    choice = three_layers(10, None)
    assert (kinds(choice), choice.lack) == (dict.fromkeys(range(3), "offload"), 2)
    bare = chain_of([1.0], [10], [2], [15])
    assert treated_stage(bare, 0, 0, 1) == StageChoice(0, 1, (), 3.0, 5)


def slowly(chain: Layerwise, stage: int, first: int, end: int) -> tuple[dict[int, str], float, int]:
    """Choose layer after layer in exact fractions until the stage fits; return (kinds, seconds, lacking bytes)."""
    rate = None if chain.host_bandwidth is None else Fraction(chain.host_bandwidth)
    copy = {n: Fraction(0) if rate is None else chain.moved[n] / rate for n in range(first, end)}
    took = {n: Fraction(chain.forward[n]) + Fraction(chain.backward[n]) for n in range(first, end)}
    total = sum(took.values())
    gap = {n: sum(took[m] for m in took if m > n) + (chain.in_flight[stage] - 1) * total for n in took}
    chosen: dict[int, str] = {}
    costs: dict[int, Fraction] = {}
    lane, free = Fraction(0), True
    blocks = not chain.copies_beside and rate is not None

    def lack(of: dict[int, str]) -> int:
        less = {"offload": chain.moved, "recompute": chain.freed}
        held = sum(chain.peak(stage, n, n + 1, ()) for n in took)
        held -= chain.in_flight[stage] * sum(less[kind][n] for n, kind in of.items())
        return max(0, held - chain.usable[stage])

    def exposed(n: int) -> Fraction:
        return 2 * copy[n] if blocks else max(Fraction(0), 2 * copy[n] - gap[n], min(copy[n], lane + copy[n] - total))

    while lack(chosen):
        remaining = [n for n in took if n not in chosen]
        able = sorted((n for n in remaining if chain.moved[n]), key=lambda n: 2 * copy[n] - gap[n])
        if free and able and not blocks and gap[able[0]] >= 2 * copy[able[0]] and lane + copy[able[0]] <= total:
            chosen[able[0]] = "offload"
            costs[able[0]] = Fraction(0)
            lane += copy[able[0]]
            continue
        free = False
        options = []
        for n in remaining:
            shown = exposed(n)
            if chain.moved[n]:
                options.append((chain.moved[n], shown, n, "offload"))
            if chain.freed[n]:
                options.append((chain.freed[n], Fraction(chain.forward[n]), n, "recompute"))
        if not options:
            break
        options.sort(
            key=lambda option: (option[1] > 0, -option[0] / option[1] if option[1] else 0, option[2], option[3])
        )
        _, seconds, n, kind = options[0]
        chosen[n] = kind
        costs[n] = seconds
        lane += copy[n] if kind == "offload" else 0
    for n in list(chosen):  # all layers are treated: the other way where it frees more
        kind = "recompute" if chain.freed[n] >= chain.moved[n] else "offload"
        if lack(chosen) and kind != chosen[n]:
            costs[n] = Fraction(chain.forward[n]) if kind == "recompute" else exposed(n)
            lane += copy[n] if kind == "offload" else -copy[n]
            chosen[n] = kind
    if (missing := lack(chosen)) and missing >= lack({}):
        chosen, costs = {}, {}
    outcome = chosen, float(total + sum(costs.values())), lack(chosen)
    if outcome[2] and any(chain.moved):
        alone = slowly(dataclasses.replace(chain, moved=[0] * len(chain.moved)), stage, first, end)
        return min(outcome, alone, key=lambda answer: answer[2])
    return outcome


@pytest.mark.parametrize("seed", some(range(300), 80))
def test_the_rules_read_slowly_choose_the_same(seed: int) -> None:
    dice = random.Random(f"capuchin {seed}")
    stages = dice.randint(1, 4)
    chain = random_chain(dice, stages)
    stage, first = dice.randrange(stages), dice.randrange(chain.num_layers)
    end = dice.randint(first + 1, chain.num_layers)
    choice = treated_stage(chain, stage, first, end)
    expected = slowly(chain, stage, first, end)
    assert (kinds(choice), choice.lack) == (expected[0], expected[2])
    assert choice.seconds == pytest.approx(expected[1])
