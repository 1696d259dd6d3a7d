"""The bound that rules a plan out before it is folded, beside the fold."""

from __future__ import annotations

import itertools
import random

import pytest

from tests.planners.test_budget import choices, timed
from varuna_capslog.planners.layerwise import Layerwise
from varuna_capslog.planners.seconds import Link
from varuna_capslog.planning.nearby import Turn, Ways, last_fullest_pair
from varuna_capslog.plans.parts import INTERVAL_KINDS
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
