"""A member's response to notices while the clock runs and layers are on their way."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from tests.rig.search.places import even_places, make_job
from varuna_capslog.elastic.member import runtime as departures
from varuna_capslog.elastic.member.runtime import CHANGE_SECONDS, LINK, NoticePolicy
from varuna_capslog.membership import messages as m
from varuna_capslog.membership import protocol
from varuna_capslog.membership.changes import Phase, State
from varuna_capslog.membership.entries import HintEntry, NoticeEntry
from varuna_capslog.membership.generation import Generation, MemberLayout
from varuna_capslog.membership.recovery import Seat

MEMBERS = ("m0", "m1", "m2")
LEAVE = ("leave", "m1")
WALL = 1.7e9  # the time of day at which the test begins
SIZE = int(10 * LINK)  # a layer takes ten seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Clock of both the listener and the member."""
    now = SimpleNamespace(at=100.0)
    monkeypatch.setattr(departures, "time", SimpleNamespace(monotonic=lambda: now.at))
    monkeypatch.setattr("varuna_capslog.elastic.host.hooks.time", SimpleNamespace(monotonic=lambda: now.at))
    monkeypatch.setattr("varuna_capslog.elastic.host.hooks.wall_seconds", lambda: WALL + now.at - 100.0)
    return now


def member(copies: int = 0, usual: float = 0.5, layers: int = 3) -> Any:
    """Return m1 of three members that own a layer each."""
    place = even_places(layers, copies)
    layout = place([Seat(name, name, 0) for name in MEMBERS])
    assert isinstance(layout, MemberLayout)
    state = SimpleNamespace(
        record=Generation(1, MEMBERS),
        roles=SimpleNamespace(layout=layout),
        wishes=SimpleNamespace(changes=frozenset(), urgent=False),
    )
    sent: set[int] = set()
    return SimpleNamespace(
        me="m1", state=state, seats={name: Seat(name, name, 0) for name in MEMBERS}, sent=sent,
        work=SimpleNamespace(layer_bytes=(SIZE,) * layers),
        proposals=SimpleNamespace(place=place, known={}),
        training=SimpleNamespace(usual_seconds=usual, is_sent=lambda layer: layer in sent),
    )  # fmt: skip


def entry(seconds: float | None = None, urgent: bool = False, name: str = "m1") -> NoticeEntry:
    return NoticeEntry(name, urgent, None if seconds is None else WALL + seconds, "test")


def departures_of(runtime: Any) -> NoticePolicy:
    return NoticePolicy(runtime, runtime.training)


def heard_by(runtime: Any) -> Callable[[NoticeEntry | HintEntry], m.ProtocolEvent]:
    policy = departures_of(runtime)
    return lambda notice: policy.event_of(notice, runtime.state)


@pytest.mark.parametrize(
    ("told", "left", "move_seconds", "expected"),
    [
        ("hint", None, 99.0, m.Hint(LEAVE)),
        ("hint", 0.0, 99.0, m.Hint(LEAVE)),
        ("leave", 120.0, 30.0, m.Wished(LEAVE)),
        ("leave", 30.0, 30.0, m.Wished(LEAVE)),
        ("leave", 15.0, 15.1, m.Wished(LEAVE, urgent=True, save=True)),
        ("leave", -5.0, 1.1, m.Wished(LEAVE, urgent=True, save=True)),  # passed already
        ("leave", None, 1e9, m.Wished(LEAVE)),  # nobody said until when
        ("now", 15.0, 2.0, m.Wished(LEAVE, urgent=True)),
        ("now", 15.0, 20.0, m.Wished(LEAVE, urgent=True, save=True)),
    ],
)
def test_what_the_protocol_hears(
    clock: SimpleNamespace, told: str, left: float | None, move_seconds: float, expected: m.ProtocolEvent
) -> None:
    del clock
    runtime = member(usual=(move_seconds - CHANGE_SECONDS) / 2)
    runtime.sent.add(1)  # so that nothing is left to move but two steps and the change
    deadline = None if left is None else WALL + left
    notice = HintEntry("m1", deadline=deadline) if told == "hint" else NoticeEntry("m1", told == "now", deadline)
    assert heard_by(runtime)(notice) == expected


def test_the_protocol_takes_it(clock: SimpleNamespace) -> None:
    """The event belongs to the protocol: a running member casts it in its next vote."""
    del clock
    job = make_job(2, even_places(2, 0))
    state = State("m1", "a", phase=Phase.RUN, record=Generation(1, ("m0", "m1")), round=1)
    after, _ = protocol.step(job, state, heard_by(member())(entry(urgent=True)))
    assert after.wishes.changes == {LEAVE}
    assert after.wishes.urgent


def test_each_kind_of_notice(clock: SimpleNamespace) -> None:
    del clock
    heard = heard_by(member())
    assert heard(HintEntry("m1", deadline=WALL + 1)) == m.Hint(LEAVE)
    assert heard(entry()) == m.Wished(LEAVE)
    assert heard(entry(urgent=True)) == m.Wished(LEAVE, urgent=True)
    least = 10 + 2 * 0.5 + CHANGE_SECONDS  # its layer, two steps, the change
    assert heard(entry(seconds=least + 0.1)) == m.Wished(LEAVE)
    assert heard(entry(seconds=least - 0.1)) == m.Wished(LEAVE, urgent=True, save=True)


def test_what_others_hold_needs_no_checkpoint(clock: SimpleNamespace) -> None:
    del clock
    heard = heard_by(member(copies=1))
    assert heard(entry(seconds=0.5)) == m.Wished(LEAVE, urgent=True)


def test_another_ones_deadline_counts_as_well_whoever_hears_of_it_first(clock: SimpleNamespace) -> None:
    del clock
    event = heard_by(member())(entry(seconds=3.0, name="m0"))
    assert event == m.Wished(("leave", "m0"), urgent=True, save=True)


def test_time_that_runs_out_is_seen_before_a_step_and_told_once_per_generation(clock: SimpleNamespace) -> None:
    runtime = member()
    policy = departures_of(runtime)
    assert policy.event_of(entry(seconds=60.0), runtime.state) == m.Wished(LEAVE)
    assert policy.watch(runtime.state) is None  # the protocol has not taken it yet
    runtime.state.wishes.changes = frozenset({LEAVE})
    clock.at += 40
    assert policy.watch(runtime.state) is None
    clock.at += 10  # ten seconds are left, the layer takes ten
    runtime.sent.add(1)  # but it is on its way
    assert policy.watch(runtime.state) is None
    runtime.sent.clear()
    assert policy.watch(runtime.state) == m.Wished(LEAVE, urgent=True, save=True)
    assert policy.watch(runtime.state) is None
    runtime.state.record = Generation(2, MEMBERS)
    assert policy.watch(runtime.state) == m.Wished(LEAVE, urgent=True, save=True)


def test_the_earliest_deadline_counts(clock: SimpleNamespace) -> None:
    runtime = member()
    policy = departures_of(runtime)
    runtime.state.wishes.changes = frozenset({LEAVE})
    policy.event_of(entry(seconds=30.0), runtime.state)
    policy.event_of(entry(seconds=120.0), runtime.state)
    clock.at += 25
    assert policy.watch(runtime.state) == m.Wished(LEAVE, urgent=True, save=True)


@pytest.mark.parametrize(
    ("leave", "alone"), [(("m1",), False), (("m1", "m2"), True), (("m0", "m1"), True), (("m0", "m1", "m2"), False)]
)
def test_who_leaves_alone(clock: SimpleNamespace, leave: tuple[str, ...], alone: bool) -> None:
    """Layers that no remaining member holds are saved. Where all leave, all is written when the run is parked."""
    del clock
    runtime = member()
    runtime.state.roles.layout = MemberLayout(3, {"m0": (0, 1), "m1": (2,)}, {"m2": (2,)})
    runtime.state.wishes.changes = frozenset(("leave", name) for name in leave)
    assert heard_by(runtime)(entry(seconds=0.5)) == m.Wished(LEAVE, urgent=True, save=alone)
