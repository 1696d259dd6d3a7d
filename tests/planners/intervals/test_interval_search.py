"""The search, compared with every choice of memory intervals of small random stages."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from tests.planners.intervals.stages import random_handling, random_profile, weighed
from tests.sweeps import some
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.memory.range_bytes import RangeBytes
from varuna_capslog.planners.intervals import Handling, IntervalSearch, stage_bytes
from varuna_capslog.planners.seconds import LayerSeconds
from varuna_capslog.plans.parts import MemoryInterval
from varuna_capslog.profiles.record import Profile

MOST_IN_FLIGHT = 4
SIZES = [1, 2, 2, 3, 3, 3, 4, 4]
LARGER = {0: 6, 1: 5, 2: 5, 3: 5}


class Stage:
    """A stage of a random chain, all its choices, and the search."""

    def __init__(self, draw: random.Random, size: int, labels: int | None = None) -> None:
        self.profile: Profile = random_profile(draw, size)
        self.handling = random_handling(draw, self.profile)
        self.ranges = RangeBytes(self.profile, "ranks", True)
        self.first = 0 if draw.random() < 0.5 else draw.randrange(size)
        self.end = draw.randrange(self.first + 1, size + 1)
        self.choices = weighed(self.profile, self.ranges, self.first, self.end, self.handling, MOST_IN_FLIGHT)
        seconds = LayerSeconds.of_profile(self.profile)
        self.search = IntervalSearch(self.ranges, seconds, self.handling, labels)

    def budgets(self, draw: random.Random, in_flight: int) -> list[int]:
        """Return the least and the most bytes of any choice, some between, and a budget below all."""
        sizes = sorted({choice.bytes[in_flight - 1] for choice in self.choices})
        return [sizes[0] - 1, sizes[0], sizes[-1], *draw.sample(sizes, min(3, len(sizes)))]

    def best(self, in_flight: int, budget: int) -> tuple[float, int] | None:
        """Return the seconds and bytes of the cheapest choice."""
        fit = [
            (choice.seconds, choice.bytes[in_flight - 1])
            for choice in self.choices
            if choice.bytes[in_flight - 1] <= budget
        ]
        return min(fit, default=None)

    def least(self, in_flight: int) -> int:
        """Return the fewest bytes of any choice."""
        return min(choice.bytes[in_flight - 1] for choice in self.choices)

    def bytes_of(self, intervals: tuple[MemoryInterval, ...], in_flight: int) -> int:
        """Return the bytes of the stage by `stage_bytes`, which uses `treated`."""
        return stage_bytes(self.ranges, self.first, self.end, intervals, in_flight, self.handling)


@pytest.mark.parametrize("seed", some(range(4), 2))
def test_the_cheapest_of_all_choices(seed: int) -> None:
    draw = random.Random(seed)
    for size in [*(draw.choice(SIZES) for _ in range(45)), LARGER[seed]]:
        stage = Stage(draw, size)
        for in_flight in range(1, MOST_IN_FLIGHT + 1):
            least = stage.least(in_flight)
            assert stage.search.least_bytes(stage.first, stage.end, in_flight) == (least, least)
            for budget in stage.budgets(draw, in_flight):
                best = stage.best(in_flight, budget)
                choice = stage.search.cheapest(stage.first, stage.end, in_flight, budget)
                seconds, bounds = stage.search.seconds(in_flight, budget)
                if best is None:
                    assert choice is None
                    assert seconds[stage.first, stage.end] == bounds[stage.first, stage.end] == float("inf")
                    continue
                assert choice is not None
                assert (choice.seconds, choice.bytes) == best
                assert choice.bytes == stage.bytes_of(choice.intervals, in_flight)
                assert (
                    choice.bound_seconds == seconds[stage.first, stage.end] == bounds[stage.first, stage.end] == best[0]
                )


@pytest.mark.parametrize("labels", [1, 3, 8])
def test_fewer_labels_are_never_too_good_and_know_what_they_may_have_missed(labels: int) -> None:
    draw = random.Random(labels)
    worse = 0
    for _ in some(range(35), 12):
        stage = Stage(draw, draw.choice(SIZES), labels)
        for in_flight in range(1, MOST_IN_FLIGHT + 1):
            found_least, bound_least = stage.search.least_bytes(stage.first, stage.end, in_flight)
            assert bound_least <= stage.least(in_flight) <= found_least
            for budget in stage.budgets(draw, in_flight):
                best = stage.best(in_flight, budget)
                choice = stage.search.cheapest(stage.first, stage.end, in_flight, budget)
                bound = stage.search.seconds(in_flight, budget)[1][stage.first, stage.end]
                assert best is None or bound <= best[0]
                assert (choice is None) == (found_least > budget)
                if choice is None:
                    worse += best is not None
                    continue
                assert best is not None
                assert choice.bytes == stage.bytes_of(choice.intervals, in_flight) <= budget
                assert (choice.seconds, choice.bytes) in [
                    (candidate.seconds, candidate.bytes[in_flight - 1])
                    for candidate in stage.choices
                    if candidate.intervals == choice.intervals
                ]
                assert choice.bound_seconds == bound <= best[0] <= choice.seconds
                worse += choice.seconds > best[0]
    assert worse  # with so few labels some choice must be missed, or the bounds were not tested


@pytest.mark.parametrize("labels", [0, 2])
def test_no_list_is_below_the_bound_of_what_a_rank_can_hold(labels: int) -> None:
    """A waiting call may hold only its bytes that stay on the device, and a step may count only part of the copies."""
    draw, below = random.Random(labels), 0
    for _ in range(12):
        stage = Stage(draw, draw.choice(SIZES), labels)
        if stage.handling.split:
            continue
        size = stage.ranges.num_layers
        copied = [stage.ranges.saved(at, at + 1) for at in range(size)]
        entering = [stage.ranges.crossing[at] for at in range(size + 1)]
        for in_flight in range(1, MOST_IN_FLIGHT + 1):
            for budget in stage.budgets(draw, in_flight):
                usual = stage.search.seconds(in_flight, budget)[1][stage.first, stage.end]
                bound = stage.search.bounds(in_flight, budget, copied, entering)[stage.first, stage.end]
                assert bound <= usual
                if not stage.handling.later and stage.handling.host_bandwidth is None:
                    assert bound == usual
                below += bound < usual
                if copied[0]:
                    half = stage.search.bounds(
                        in_flight, budget, [layer_bytes // 2 for layer_bytes in copied], entering
                    )
                    assert half[stage.first, stage.end] <= bound
    assert below


def test_moved_bytes_and_reruns_are_told() -> None:
    draw = random.Random(5)
    told = 0
    for _ in range(12):
        stage = Stage(draw, 3)
        choice = stage.search.cheapest(stage.first, stage.end, 2, stage.least(2))
        assert choice is not None
        layer_seconds = sum(
            (layer.forward_seconds or 0) + (layer.backward_seconds or 0)
            for layer in stage.profile.layers[stage.first : stage.end]
        )
        bandwidth = stage.handling.host_bandwidth
        copies = 0.0 if bandwidth is None else 2 * choice.moved_bytes / bandwidth
        compute = layer_seconds + choice.again_seconds
        assert choice.seconds == (max(compute, copies) if stage.handling.copies_beside else compute + copies)
        told += choice.moved_bytes > 0
    assert told


def test_other_numbers_of_calls_and_waiting_blocks_need_no_other_search() -> None:
    draw, differ = random.Random(6), 0
    for _ in range(5):
        stage = Stage(draw, 2)
        one_block = replace(stage.handling, calls=1, waiting_blocks=0)
        alone = IntervalSearch(stage.ranges, LayerSeconds.of_profile(stage.profile), one_block)
        again = alone.with_blocks(stage.handling.calls, stage.handling.waiting_blocks)
        for budget in stage.budgets(draw, 2):
            choices = [search.cheapest(stage.first, stage.end, 2, budget) for search in (stage.search, again, alone)]
            assert choices[0] == choices[1]
            differ += choices[0] != choices[2]
    assert differ


def test_a_range_that_was_not_searched_is_refused() -> None:
    profile = random_profile(random.Random(1), 3)
    ranges, seconds = RangeBytes(profile, "ranks", True), LayerSeconds.of_profile(profile)
    search = IntervalSearch(ranges, seconds, firsts=[0])
    assert search.cheapest(0, 2, 1, 1e18)
    part = IntervalSearch(ranges, seconds, firsts=[0], borders=range(3))
    assert part.cheapest(0, 2, 1, 1e18) == search.cheapest(0, 2, 1, 1e18)
    with pytest.raises(CapslogError, match="name 0 among the firsts, and both it and 3 among the borders"):
        part.cheapest(0, 3, 1, 1e18)
    with pytest.raises(CapslogError, match="no stage of layers 1 to 1 was searched; name 1 among the firsts"):
        search.cheapest(1, 2, 1, 1e18)


def test_halves_that_a_profile_does_not_tell_are_refused() -> None:
    profile = random_profile(random.Random(2), 3)
    profile = replace(profile, observations=tuple(replace(row, weight_bytes=None) for row in profile.observations))
    ranges, seconds = RangeBytes(profile, "ranks", True), LayerSeconds.of_profile(profile)
    with pytest.raises(CapslogError, match="weight_bytes"):
        IntervalSearch(ranges, seconds, Handling(split=True))
