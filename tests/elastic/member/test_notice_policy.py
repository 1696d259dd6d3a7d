"""What a member makes of notices while the clock runs and layers are on their way."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from varuna_capslog.elastic.member import notice_policy as departures
from varuna_capslog.elastic.member.notice_policy import CHANGE_SECONDS, LINK, Departures, leaves_alone
from varuna_capslog.membership import messages as m
from varuna_capslog.membership.generation import Generation, Layout
from varuna_capslog.membership.recovery import Seat
from varuna_capslog.rig.search.world import even_places

MEMBERS = ("m0", "m1", "m2")
LEAVE = ("leave", "m1")
SIZE = int(10 * LINK)  # a layer takes ten seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Both the listener's and the member's."""
    now = SimpleNamespace(at=100.0)
    monkeypatch.setattr(departures, "time", SimpleNamespace(monotonic=lambda: now.at))
    monkeypatch.setattr("varuna_capslog.elastic.host.hooks.Clock", lambda: SimpleNamespace(monotonic=lambda: now.at))
    return now


def member(copies: int = 0, usual: float = 0.5, layers: int = 3) -> Any:
    """m1 of three that own a layer each."""
    place = even_places(layers, copies)
    layout = place([Seat(name, name, 0) for name in MEMBERS])
    assert isinstance(layout, Layout)
    state = SimpleNamespace(record=Generation(1, MEMBERS), layout=layout, changes=frozenset(), urgent=False)
    sent: set[int] = set()
    return SimpleNamespace(
        me="m1", state=state, seats={name: Seat(name, name, 0) for name in MEMBERS}, sent=sent,
        job=SimpleNamespace(layer_bytes=(SIZE,) * layers),
        work=SimpleNamespace(place=place),
        training=SimpleNamespace(usual_seconds=usual, is_sent=lambda layer: layer in sent),
    )  # fmt: skip


def entry(kind: str = "notice", seconds: float | None = None, urgent: bool = False, name: str = "m1") -> dict[str, Any]:
    return {"kind": kind, "member": name, "urgent": urgent, "deadline": seconds, "source": "test"}


def test_each_rung(clock: SimpleNamespace) -> None:
    del clock
    heard = Departures(member()).heard
    assert heard(entry("hint", 1.0)) == m.Hint(LEAVE)
    assert heard(entry()) == m.Notice(LEAVE)
    assert heard(entry(urgent=True)) == m.Notice(LEAVE, urgent=True)
    least = 10 + 2 * 0.5 + CHANGE_SECONDS  # its layer, two steps, the change
    assert heard(entry(seconds=least + 0.1)) == m.Notice(LEAVE)
    assert heard(entry(seconds=least - 0.1)) == m.Notice(LEAVE, urgent=True, save=True)


def test_what_others_hold_needs_no_checkpoint(clock: SimpleNamespace) -> None:
    del clock
    heard = Departures(member(copies=1)).heard
    assert heard(entry(seconds=0.5)) == m.Notice(LEAVE, urgent=True)


def test_another_ones_deadline_counts_as_well_whoever_hears_of_it_first(clock: SimpleNamespace) -> None:
    del clock
    found = Departures(member()).heard(entry(seconds=3.0, name="m0"))
    assert found == m.Notice(("leave", "m0"), urgent=True, save=True)


def test_time_that_runs_out_is_seen_before_a_step_and_told_once_per_generation(clock: SimpleNamespace) -> None:
    runtime = member()
    one = Departures(runtime)
    assert one.heard(entry(seconds=60.0)) == m.Notice(LEAVE)
    assert one.watch() is None  # the protocol has not taken it yet
    runtime.state.changes = frozenset({LEAVE})
    clock.at += 40
    assert one.watch() is None
    clock.at += 10  # ten seconds are left, the layer takes ten
    runtime.sent.add(1)  # but it is on its way
    assert one.watch() is None
    runtime.sent.clear()
    assert one.watch() == m.Notice(LEAVE, urgent=True, save=True)
    assert one.watch() is None
    runtime.state.record = Generation(2, MEMBERS)
    assert one.watch() == m.Notice(LEAVE, urgent=True, save=True)


def test_the_earliest_deadline_counts(clock: SimpleNamespace) -> None:
    runtime = member()
    one = Departures(runtime)
    runtime.state.changes = frozenset({LEAVE})
    one.heard(entry(seconds=30.0))
    one.heard(entry(seconds=120.0))
    clock.at += 25
    assert one.watch() == m.Notice(LEAVE, urgent=True, save=True)


def test_who_leaves_alone() -> None:
    layout = Layout(3, {"m0": (0, 1), "m1": (2,)}, {"m2": (2,)})
    assert not leaves_alone(layout, ["m0", "m2"], 3)
    assert leaves_alone(layout, ["m0"], 3)
    assert leaves_alone(layout, ["m2"], 3)
    assert not leaves_alone(layout, [], 3)  # all leave: all is written when the run is parked
