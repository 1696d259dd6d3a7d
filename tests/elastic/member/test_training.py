"""What members send and expect ahead of a planned change: all the same, or nobody is ever prepared."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from varuna_capslog.elastic.member.training import Training
from varuna_capslog.membership.generation import Generation, MemberLayout, Stamp
from varuna_capslog.membership.recovery import Seat

MEMBERS = ("a-1", "a-2", "a-3")
BEFORE = MemberLayout(3, {"a-1": (0,), "a-2": (1,), "a-3": (2,)}, {})
JOIN = frozenset({("join", "a-4")})


def place(seats: Sequence[Seat]) -> MemberLayout:
    """Copies lie on another host, where there is one: the place of a layer hangs on where the newcomer is."""
    others = [seat.member for seat in seats if seat.host != seats[0].host]
    owned = {seat.member: (layer,) if layer < 3 else () for layer, seat in enumerate(seats)}
    return MemberLayout(3, owned, {(others or ["a-3"])[0]: (0,)})


def member(name: str, seats: dict[str, Seat]) -> Training:
    record = Generation(1, MEMBERS)
    roles = SimpleNamespace(layout=BEFORE, own=BEFORE.owned[name])
    state = SimpleNamespace(roles=roles, record=record, at=Stamp(5, 1))
    parts: Any = SimpleNamespace(me=name, seats=seats, job=SimpleNamespace(layer_bytes=(1, 1, 1), place=place))
    loop: Any = SimpleNamespace(state=state)
    return Training(parts, loop)


def test_nobody_prepares_for_a_newcomer_whose_host_it_has_not_heard_of() -> None:
    known = {name: Seat(name, "a", 0) for name in MEMBERS}
    asked = known | {"a-4": Seat("a-4", "a", 0)}
    sender, receiver = member("a-1", asked), member("a-3", known)
    assert sender.prepare(JOIN)
    assert not receiver.prepare(JOIN)  # it would take a-4 for a host of its own, and expect nothing
    known["a-4"] = asked["a-4"]
    assert receiver.prepare(JOIN)
    assert sender._ahead is not None
    assert receiver._ahead is not None
    assert sender._ahead.targets == {0: ("a-3",)}
    assert receiver._ahead.mine == {0}
    assert not receiver.prepare(JOIN)  # that is known by now


def test_who_sent_copies_ahead_proves_its_layers_until_a_generation_trains() -> None:
    # the second of two changes in a row had no proofs of owners, so that a damaged copy passed for a sound one
    known = {name: Seat(name, "a", 0) for name in (*MEMBERS, "a-4")}
    sender = member("a-1", known)
    assert sender.prepare(JOIN)
    assert sender._ahead is not None
    assert [layer for layer, _ in sender._ahead.due()] == [0]
    sender.adopt()
    assert sender.sent_ahead == {0}
    sender.adopt()  # that generation broke before it trained
    assert sender.sent_ahead == {0}
