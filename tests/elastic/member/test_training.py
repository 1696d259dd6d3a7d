"""Layers that members send and expect ahead of a planned change: unless they agree, no member is ever prepared."""

from __future__ import annotations

import json
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from varuna_capslog.elastic.member.process_groups import Proposals
from varuna_capslog.elastic.member.training import Training
from varuna_capslog.membership.generation import Generation, MemberLayout, Stamp
from varuna_capslog.membership.recovery import Seat
from varuna_capslog.plans.parts import PlanStage
from varuna_capslog.plans.plan import Plan

MEMBERS = ("a-1", "a-2", "a-3")
BEFORE = MemberLayout(3, {"a-1": (0,), "a-2": (1,), "a-3": (2,)}, {})
JOIN = frozenset({("join", "a-4")})


def place(seats: Sequence[Seat], plan: Plan | None = None) -> MemberLayout:
    """Place copies on another host if there is one: the place of a layer depends on the newcomer's host."""
    if plan is not None:
        return MemberLayout.of_plan(plan, [seat.member for seat in seats], {})
    others = [seat.member for seat in seats if seat.host != seats[0].host]
    owned = {seat.member: (layer,) if layer < 3 else () for layer, seat in enumerate(seats)}
    return MemberLayout(3, owned, {(others or ["a-3"])[0]: (0,)})


class Told:
    """Messages that a member sends to others."""

    def __init__(self) -> None:
        self.messages: list[tuple[str, str, dict[str, Any]]] = []

    def send(self, target: str, kind: str, tensors: Any = None, **header: Any) -> None:
        self.messages.append((target, kind, json.loads(json.dumps(header))))


def member(name: str, seats: dict[str, Seat], proposed: Plan | None = None) -> Training:
    """Return a member's training.

    proposed: plan that this member's own search finds; None: all members find the same plan by themselves.
    """
    record = Generation(1, MEMBERS)
    roles = SimpleNamespace(layout=BEFORE, own=BEFORE.owned[name])
    state = SimpleNamespace(roles=roles, record=record, at=Stamp(5, 1))
    work: Any = SimpleNamespace(proposes=proposed is not None, propose=lambda seats: proposed)
    peers: Any = Told()
    parts: Any = SimpleNamespace(
        me=name,
        seats=seats,
        job=SimpleNamespace(layer_bytes=(1, 1, 1), place=place),
        peers=peers,
        proposals=Proposals(name, work, peers, place),
    )
    loop: Any = SimpleNamespace(state=state)
    return Training(parts, loop)


def test_nobody_prepares_for_a_newcomer_whose_host_it_has_not_heard_of() -> None:
    seats = {name: Seat(name, "a", 0) for name in MEMBERS}
    newer_seats = seats | {"a-4": Seat("a-4", "a", 0)}
    sender, receiver = member("a-1", newer_seats), member("a-3", seats)
    assert sender.prepare(JOIN)
    assert not receiver.prepare(JOIN)  # it would take a-4 for a host of its own, and expect nothing
    seats["a-4"] = newer_seats["a-4"]
    assert receiver.prepare(JOIN)
    assert sender._ahead is not None
    assert receiver._ahead is not None
    assert sender._ahead.targets == {0: ("a-3",)}
    assert receiver._ahead.mine == {0}
    assert not receiver.prepare(JOIN)  # that is known by now


def test_what_one_member_has_found_is_sent_and_expected_by_all() -> None:
    """Regression: each member used the plan of its own search. Copies were made of layers that did not move, and where
    two machines found different plans, one waited for a layer that was never sent, and the change was never made.
    """

    def order(*ranks: int) -> Plan:
        """Return a plan with layers 0, 1 and 2 on these ranks."""
        stages = tuple(PlanStage(((layer, layer + 1),), (rank,)) for layer, rank in enumerate(ranks))
        return Plan(3, stages, schedule="1f1b")

    all_seats = {name: Seat(name, "a", 0) for name in MEMBERS}
    leave = frozenset({("leave", "a-1")})
    first, second, third = (
        member(name, all_seats, order(*ranks))
        for name, ranks in zip(MEMBERS, ((1, 0, 1), (0, 1, 1), (0, 0, 1)), strict=True)
    )
    assert not second.prepare(leave)
    assert second._awaited
    assert first.prepare(leave)  # it leaves, and is the first voter all the same
    told: Any = first._parts.peers
    assert [(target, kind) for target, kind, _ in told.messages] == [("a-2", "plan"), ("a-3", "plan")]
    for training, (_, _, header) in zip((second, third), told.messages, strict=True):
        training._parts.proposals.record(header["members"], header["plan"])
        assert training.prepare(leave)
        assert not training._awaited
    assert [
        training._ahead and (training._ahead.targets, training._ahead.mine) for training in (first, second, third)
    ] == [
        ({0: ("a-3",)}, frozenset()),
        ({}, frozenset()),
        ({}, {0}),
    ]
    seats = [all_seats["a-2"], all_seats["a-3"]]
    assert all(training._parts.proposals.of(seats) == order(1, 0, 1) for training in (second, third)), (
        "whoever founds it"
    )


def test_who_sent_copies_ahead_proves_its_layers_until_a_generation_trains() -> None:
    # the second of two changes in a row had no proofs of owners, so that a damaged copy passed for a sound one
    seats = {name: Seat(name, "a", 0) for name in (*MEMBERS, "a-4")}
    sender = member("a-1", seats)
    assert sender.prepare(JOIN)
    assert sender._ahead is not None
    assert [layer for layer, _ in sender._ahead.due()] == [0]
    sender.adopt()
    assert sender.sent_ahead == {0}
    sender.adopt()  # that generation broke before it trained
    assert sender.sent_ahead == {0}
