"""Limits in flight of their own and several stages on each device: never slower, and faster where links are slow or
stages are equal.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from tests.planners.test_budget import timed
from tests.planning.asking import judged_layerwise_plan
from tests.sweeps import some
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.planners.seconds import Link
from varuna_capslog.planning.simulation import simulate_plan
from varuna_capslog.planning.verdict import fold_plan
from varuna_capslog.plans.plan import Plan
from varuna_capslog.profiles.record import Profile
from varuna_capslog.schedules import RunShape

RUN = RunShape(8, "auto", microbatch_size=1, num_blocks=1)


def planned(profile: Profile, devices: int, capacity: int | None, schedule: str, link: Link | None = None) -> Plan:
    return judged_layerwise_plan(profile, devices, "budget", "auto", capacity, replace(RUN, schedule=schedule), link)


def most_of(profile: Profile, devices: int) -> int:
    return max(rank.bytes or 0 for rank in planned(profile, devices, None, "gpipe").ranks)


def check(plan: Plan, profile: Profile, capacity: int | None, link: Link | None) -> None:
    """Check the plan's step by simulation, its bytes by the fold, and its bound against its step."""
    run = replace(RUN, schedule=plan.schedule or "")
    assert plan.fits
    assert simulate_plan(profile, plan, run=run, link=link).step_seconds == plan.step_seconds
    peaks = [fold.peak_bytes for fold in fold_plan(profile, plan, run)]
    assert [rank.bytes for rank in plan.ranks] == peaks
    assert capacity is None or max(peaks) <= capacity
    assert (plan.bound_seconds or 0) <= (plan.step_seconds or 0)


@pytest.mark.parametrize("seed", some(range(4), 2))
def test_slow_links_get_more_in_flight_and_a_shorter_step(seed: int) -> None:
    profile, link = timed(random.Random(seed), 6), Link(latency_seconds=8.0)
    plain, star = (planned(profile, 3, None, name, link) for name in ("1f1b", "1f1b-star"))
    check(star, profile, None, link)
    assert (star.step_seconds or 0) < (plain.step_seconds or 0)
    assert [stage.in_flight or 0 for stage in star.stages] >= [3, 2, 1]
    assert max(stage.in_flight or 0 for stage in star.stages) > 3


@pytest.mark.parametrize("seed", some(range(6), 3))
def test_limits_of_their_own_never_make_a_plan_slower_or_too_large(seed: int) -> None:
    draw = random.Random(seed)
    profile, link = timed(draw, 6), Link(latency_seconds=draw.choice([0.0, 1.0, 5.0]))
    for part in (2, 3, 4):
        capacity = most_of(profile, 3) * part // 4
        plain = planned(profile, 3, capacity, "1f1b", link)
        star = planned(profile, 3, capacity, "1f1b-star", link)
        if plain.fits:
            check(star, profile, capacity, link)
            assert (star.step_seconds or 0) <= (plain.step_seconds or 0) * (1 + 1e-9)
            both = planned(profile, 3, capacity, "auto", link)
            check(both, profile, capacity, link)
            assert (both.step_seconds or 0) <= (star.step_seconds or 0) * (1 + 1e-9)


def test_equal_stages_go_round_the_devices_where_that_fits() -> None:
    profile = timed(random.Random(3), 8)
    equal = replace(
        profile,
        layers=tuple(replace(layer, forward_seconds=1.0, backward_seconds=2.0) for layer in profile.layers),
    )
    plain, interleaved = planned(equal, 4, None, "1f1b"), planned(equal, 4, None, "interleaved")
    check(interleaved, equal, None, None)
    best, link = planned(equal, 4, None, "auto", Link(latency_seconds=1e-6)), Link(latency_seconds=1e-6)
    assert (best.step_seconds or 0) <= (planned(equal, 4, None, "interleaved", link).step_seconds or 0)
    assert planned(equal, 4, None, "auto").schedule != "interleaved", "nobody says what messages cost"
    assert [stage.rank for stage in interleaved.stages] == [0, 1, 2, 3, 0, 1, 2, 3]
    assert interleaved.step_seconds == pytest.approx(8 * 6 + 3 * 3)  # half of 1F1B's bubble
    assert plain.step_seconds == pytest.approx(8 * 6 + 3 * 6)
    assert interleaved.bound_seconds == pytest.approx(8 * 6)
    assert not interleaved.proven
    peak = max(rank.bytes or 0 for rank in interleaved.ranks)
    tight = planned(equal, 4, peak - 1, "interleaved")
    check(tight, equal, peak - 1, None)
    assert any(stage.memory for stage in tight.stages), "some stages run again"
    with pytest.raises(CapslogError, match="4 devices with 2 stages each, but only 6 layers"):
        planned(timed(random.Random(3), 6), 4, None, "interleaved")
