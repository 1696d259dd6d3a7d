"""Speeds of the devices, estimated from measured seconds, and the decision for another plan."""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Sequence

import pytest

from tests.membership.test_placing import placer_of, plain, seats_of, steps_of
from varuna_capslog.elastic.member.balance import WINDOW, Balance, Finding
from varuna_capslog.membership.generation import MemberLayout
from varuna_capslog.membership.recovery import Seat
from varuna_capslog.planners.seconds import Link
from varuna_capslog.planning.playing import play
from varuna_capslog.plans.plan import Plan

PROFILE = plain(12)
RUN = steps_of(8, microbatch_size=1, schedule="1f1b", recompute=False)


class Members:
    """Members whose devices have different speeds, as one of them measures their steps.

    noise: relative error of each measured number.
    """

    def __init__(self, speeds: Sequence[float], noise: float = 0.0) -> None:
        self.placer = placer_of(PROFILE, RUN, planner="throughput")
        self.balance = Balance(self.placer)
        self.seats = seats_of([0] * len(speeds))
        self.speeds, self.noise, self.draw = list(speeds), noise, random.Random(3)
        layout = self.placer(self.seats)
        assert isinstance(layout, MemberLayout)
        assert layout.plan is not None
        self.begin(layout.plan)

    def begin(self, plan: Plan) -> None:
        self.plan = plan
        self.balance.begin([seat.member for seat in self.seats], plan)

    @property
    def cuts(self) -> tuple[int, ...]:
        return tuple(stage.first for stage in self.plan.stages)

    def step_seconds(self) -> float:
        busy = self._busy()
        return 1.2 * max(busy)

    def _busy(self) -> list[float]:
        bare = dataclasses.replace(self.plan, ranks=())
        planned = play(PROFILE, bare, None, None, False, RUN, Link()).busy_seconds
        took = [planned.get(rank, 0.0) / speed for rank, speed in enumerate(self.speeds)]
        return [seconds * (1 + self.noise * self.draw.uniform(-1, 1)) for seconds in took]

    def steps(self, count: int) -> Finding | None:
        """Run up to `count` steps; return the first finding, None if there is none."""
        for _ in range(count):
            self.balance.measured(self._busy(), self.step_seconds())
            finding = self.balance.wanted(self.seats)
            until = time.monotonic() + 10
            while finding is None and self.balance._search is not None and time.monotonic() < until:
                finding = self.balance.wanted(self.seats)
            if finding is not None:
                return finding
        return None

    def follow(self) -> None:
        """Begin a generation with the proposed plan."""
        plan = self.placer.propose(self.balance.seated(self.seats))
        layout = self.placer(self.seats, plan)
        assert isinstance(layout, MemberLayout)
        assert layout.plan is not None
        self.begin(layout.plan)


def test_a_member_twice_as_slow_gets_fewer_layers_and_all_of_them_back_when_it_is_fast_again() -> None:
    members = Members([1.0, 1.0, 1.0, 1.0])
    assert members.cuts == (0, 3, 6, 9)
    assert members.steps(3 * WINDOW) is None
    members.speeds[2] = 0.5
    finding = members.steps(WINDOW)
    assert finding is not None
    assert (finding.member, finding.slower) == ("m2", pytest.approx(2.0))
    assert finding.speeds == {"m0": 1.0, "m1": 1.0, "m2": 0.5, "m3": 1.0}
    assert finding.why == "new cuts, since m2 takes 2.00 times as long as planned"
    before = 1.2 * max(members._busy())
    members.follow()
    assert members.cuts in {(0, 4, 8, 10), (0, 3, 7, 9), (0, 4, 7, 9), (0, 4, 8, 9)}
    assert before / members.step_seconds() >= 1.4
    assert members.steps(3 * WINDOW) is None
    members.speeds[2] = 1.0
    finding = members.steps(3 * WINDOW)
    assert finding is not None
    assert finding.why == "new cuts, since no device is slow any more"
    members.follow()
    assert members.cuts == (0, 3, 6, 9)


def test_noise_and_a_few_slow_steps_change_nothing() -> None:
    members = Members([1.0, 1.0, 1.0, 1.0], noise=0.08)
    for _ in range(5):
        assert members.steps(2 * WINDOW) is None
        members.speeds[1] = 0.2
        assert members.steps(WINDOW // 2) is None
        members.speeds[1] = 1.0


def test_a_profile_that_is_wrong_by_the_same_factor_everywhere_says_nothing() -> None:
    assert Members([0.1, 0.1, 0.1]).steps(3 * WINDOW) is None


def test_a_change_that_does_not_bring_what_it_promised_makes_the_next_one_wait_longer() -> None:
    """The member of the first stage is always slow, as if the profile underestimated the first layer."""
    members, waited = Members([1.0, 1.0]), []
    for _ in range(3):
        members.speeds, count = [0.6, 1.0] if len(waited) % 2 == 0 else [1.0, 0.6], 0
        while (finding := members.steps(1)) is None and count < 200:
            count += 1
        assert finding is not None
        waited.append(count)
        members.follow()
        members.speeds = members.speeds[::-1]
    assert waited[1] >= waited[0]
    assert waited[2] >= 1.8 * waited[0], waited


def test_a_member_that_is_too_slow_for_any_layer_is_tried_again_after_a_long_time() -> None:
    members = Members([1.0, 1.0, 1.0])
    members.speeds[2] = 0.02
    assert members.steps(2 * WINDOW) is not None
    members.follow()
    assert len(members.cuts) == 2, "it has no layers"
    members.speeds[2] = 1.0
    assert members.steps(10 * WINDOW) is None, "nobody can know it yet"
    finding = members.steps(20 * WINDOW)
    assert finding is not None
    members.follow()
    assert len(members.cuts) == 3


def test_a_change_that_brings_what_it_promised_keeps_the_next_one_as_near() -> None:
    """Steps that still run by the old plan, until the change is prepared, do not count for the promised gain."""
    members = Members([1.0, 1.0, 1.0, 1.0])
    members.steps(WINDOW)
    members.speeds[2] = 0.5
    assert members.steps(2 * WINDOW) is not None
    assert members.steps(3) is None
    members.follow()
    assert members.steps(WINDOW + 1) is None
    members.speeds = [1.0, 0.5, 1.0, 1.0]
    count = 1
    while members.steps(1) is None and count < 100:
        count += 1
    assert count == WINDOW // 2 + 1, "as soon as most steps of the window are slow"


def test_speeds_stay_as_they_are_for_the_planner_where_measurements_differ_a_little() -> None:
    members = Members([1.0, 0.5, 1.0], noise=0.03)
    members.steps(WINDOW + 2)
    first = [seat.speed for seat in members.balance.seated(members.seats)]
    assert first[0] == first[2] == 1.0
    assert first[1] == pytest.approx(0.5, rel=0.06)
    for _ in range(30):
        members.steps(1)
        assert [seat.speed for seat in members.balance.seated(members.seats)] == first


def test_a_member_that_comes_is_taken_for_as_fast_as_most() -> None:
    members = Members([1.0, 0.5, 1.0])
    members.steps(WINDOW + 2)
    more = [*members.seats, Seat("new", "h9", 0)]
    assert [seat.speed for seat in members.balance.seated(more)] == [1.0, 0.5, 1.0, 1.0]
    assert [seat.speed for seat in members.balance.seated([members.seats[1]])] == [1.0], "alone it is the fastest"
