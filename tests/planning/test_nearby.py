"""The bound that rules a plan out before it is folded, beside the fold."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from tests.planners.intervals.stages import random_profile
from tests.planners.test_budget import choices, timed
from tests.planning.asking import judged_layerwise_plan
from tests.planning.faster_plans import faster_plan, seconds_of_actions
from varuna_capslog.planners.layerwise import Intervals, Layerwise
from varuna_capslog.planners.seconds import Link
from varuna_capslog.planning.nearby import Turn, Ways, last_fullest_pair
from varuna_capslog.planning.verdict import HostMemory
from varuna_capslog.plans.parts import INTERVAL_KINDS
from varuna_capslog.profiles.record import Profile
from varuna_capslog.schedules import RunShape, make_schedule


@pytest.mark.parametrize(("seed", "schedule"), list(enumerate(["1f1b", "varuna", "gpipe", "kfkb", "zb-h1"])))
def test_no_stage_takes_less_than_its_fullest_turn(seed: int, schedule: str) -> None:
    draw, told, near = random.Random(seed), 0, 0
    for _ in range(3):
        profile, devices = timed(draw, 4), draw.choice([2, 3])
        run = RunShape(draw.choice([3, 6]), schedule, microbatch_size=1, num_blocks=draw.choice([1, 3]))
        link = Link(host_bandwidth=draw.choice([1e3, 1e5]))
        chain = Layerwise.of_profile(profile, run, devices, None, link)
        ways = Ways(chain, lambda *_: None, 1e9)
        for stage, (first, end) in itertools.product(range(devices), itertools.combinations(range(5), 2)):
            if (first == 0) != (stage == 0) or (end == 4) != (stage == devices - 1) or end - first > 2:
                continue
            for intervals in choices(first, end, INTERVAL_KINDS):
                least, peak = ways.least_bytes(stage, first, end, intervals), chain.peak(stage, first, end, intervals)
                assert least <= peak
                told += least > 0
                near += least > 0.9 * peak
    assert near > told / 4 or schedule == "zb-h1"
    assert told or schedule == "zb-h1"


def test_the_fullest_turn_is_one_of_two_calls() -> None:
    """Under 1F1B the last stage's backwards follow at once, so no call waits there."""
    first, last = make_schedule("1f1b", 2, 4, recompute=True)
    assert last_fullest_pair(first) == Turn(in_flight=2, forwards=4, begun=True)
    assert last_fullest_pair(last) is None
    assert last_fullest_pair(make_schedule("gpipe", 2, 4, recompute=True)[0]) == Turn(4, 4, begun=False)


def with_tensors(draw: random.Random, size: int) -> Profile:
    """Return a chain on a GPU whose layers read tensors of several layers, of which some stay there or are shared."""
    while True:
        profile = random_profile(draw, size)
        if profile.tensors and not HostMemory().is_device(profile):
            return replace(profile, source="measured", conditions={"device": "cuda", "microbatch_size": 1})


@pytest.mark.parametrize("seed", [0, 3])
def test_no_intervals_are_left_out_whose_calls_and_copies_take_less(seed: int) -> None:
    """A copy takes the bytes that the play counts, not those that leave the device: none do of layer 0 here. No
    backward of the first of two stages directly follows its forward."""
    draw = random.Random(seed)
    profile, run = with_tensors(draw, 4), RunShape(3, draw.choice(["1f1b", "gpipe"]), microbatch_size=1, num_blocks=1)
    link = Link(host_bandwidth=1e4, copies_beside=draw.random() < 0.5)
    chain = Layerwise.of_profile(profile, run, 2, None, link)
    chain = replace(chain, moved=[0, *chain.moved[1:]])
    peaks = {intervals: chain.peak(0, 0, 3, intervals) for intervals in choices(0, 3, INTERVAL_KINDS)}
    limit = sorted(peaks.values())[len(peaks) // 3]

    def seconds_of(intervals: Intervals) -> tuple[float, ...]:
        *seconds, _at_once, copy = seconds_of_actions(profile, run, link, intervals)
        return *seconds, copy

    ways = Ways(replace(chain, usable=[limit] * 2), lambda *_: None, 1e9).of(0, 0, 3)
    kept = [seconds_of(way.intervals) for way in ways]
    for intervals, peak in peaks.items():
        if peak <= limit:
            assert any(all(map(float.__le__, of_way, seconds_of(intervals))) for of_way in kept)


def test_a_host_tier_hides_no_faster_plan() -> None:
    draw = random.Random(3)
    profile, run = with_tensors(draw, 3), RunShape(3, "1f1b", microbatch_size=1, num_blocks=1)
    for part, beside in ((0.85, True), (0.95, False)):
        link = Link(host_bandwidth=2e4, copies_beside=beside)
        capacity = int(Layerwise.of_profile(profile, run, 2).peak(0, 0, 2, ()) * part)
        budget_plan = judged_layerwise_plan(profile, 2, "budget", "auto", capacity, run, link)
        assert budget_plan.fits
        assert budget_plan.step_seconds is not None
        assert faster_plan(profile, 2, run, link, capacity, budget_plan.step_seconds * 1.001) is not None
        assert faster_plan(profile, 2, run, link, capacity, budget_plan.step_seconds * (1 - 1e-9)) is None
