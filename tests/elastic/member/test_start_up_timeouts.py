"""Waiting times of a member, by a clock that the test moves."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from varuna_capslog.elastic.member.start_up import Timeouts, WaitingTime
from varuna_capslog.membership.changes import Phase, State
from varuna_capslog.membership.entries import Roster
from varuna_capslog.membership.generation import Generation

LIMITS = Timeouts(peer=30.0, change=2.0, retry=0.5, gather=5.0)
NEW = State("m", "h", 0)
ALL_HERE, ONE_ASTRAY = Roster(), Roster()
for number, members in ((1, ["m", "n"]), (2, ["m"])):
    record = Generation(number, tuple(members))
    ONE_ASTRAY.take({"kind": "generation", "number": number, "record": record.to_json()})


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        self.waiting = WaitingTime(LIMITS)

    def moves(self, at: float, state: State) -> None:
        self.now = at
        self.waiting.restart(state)

    def ended(self, at: float) -> None:
        self.now = at
        self.waiting.limit_passed()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def in_phase(phase: Phase, regress: bool = False) -> State:
    return replace(NEW, phase=phase, regress=regress)


@pytest.mark.parametrize(
    ("phase", "first", "again"),
    [
        (Phase.CHANGE, 2.0, 0.5),
        (Phase.WAIT, 6.0, 6.0),
        (Phase.GATHER, 5.0, 5.0),
        (Phase.INSTALL, 30.0, 0.5),
        (Phase.OUTSIDE, 0.5, 0.5),
    ],
)
def test_each_phase_has_its_time_limit(clock: Clock, phase: Phase, first: float, again: float) -> None:
    state = in_phase(phase)
    clock.moves(110.0, state)
    assert clock.waiting.ends(state, 0.0, 0.0, ALL_HERE) == 110.0 + first
    clock.ended(150.0)
    assert clock.waiting.ends(state, 0.0, 0.0, ALL_HERE) == 150.0 + again
    clock.moves(160.0, state)
    assert clock.waiting.ends(state, 0.0, 0.0, ALL_HERE) == 160.0 + first


def test_a_step_is_waited_for_from_the_end_of_the_own_computation(clock: Clock) -> None:
    state = in_phase(Phase.RUN)
    clock.moves(110.0, state)
    assert clock.waiting.ends(state, 1.0, 130.0, ALL_HERE) == 160.0


def test_slow_steps_are_gathered_for_longer(clock: Clock) -> None:
    state = in_phase(Phase.GATHER)
    clock.moves(110.0, state)
    assert clock.waiting.ends(state, 4.0, 0.0, ALL_HERE) == 122.0
    assert (LIMITS.without_events(0.0), LIMITS.without_events(1.0), LIMITS.without_events(4.0)) == (30.0, 5.0, 12.0)


def test_a_run_goes_back_at_once_where_nobody_can_come_who_holds_more(clock: Clock) -> None:
    state = in_phase(Phase.WAIT, regress=True)
    clock.moves(110.0, state)
    assert clock.waiting.ends(state, 0.0, 0.0, ONE_ASTRAY) == 116.0
    assert clock.waiting.ends(state, 0.0, 0.0, ALL_HERE) == 110.0


def test_newcomers_do_not_prolong_the_wait_for_lost_layers(clock: Clock) -> None:
    state = in_phase(Phase.WAIT, regress=True)
    clock.moves(110.0, state)
    for at in (112.0, 114.0):
        for phase in (Phase.CHANGE, Phase.GATHER):
            clock.moves(at, in_phase(phase))
        clock.moves(at, state)
        assert clock.waiting.ends(state, 0.0, 0.0, ONE_ASTRAY) == 116.0
    clock.ended(116.0)  # somebody else was first to found, and that came to nothing
    assert clock.waiting.ends(state, 0.0, 0.0, ONE_ASTRAY) == 122.0
    clock.moves(130.0, in_phase(Phase.RUN))
    clock.moves(140.0, state)
    assert clock.waiting.ends(state, 0.0, 0.0, ONE_ASTRAY) == 146.0, "another loss"
