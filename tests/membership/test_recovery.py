"""The boundary from which survivors resume and the layers that move, against brute force."""

from __future__ import annotations

import random
from collections.abc import Mapping

from tests.rig.search.places import even_places
from varuna_capslog.membership.generation import EMPTY, INITIAL, Generation, MemberLayout, Stamp
from varuna_capslog.membership.messages import Contribution
from varuna_capslog.membership.recovery import CHECKPOINT, decide, list_moves, newest_boundary

A, B, C = Stamp(1, 1), Stamp(2, 1), Stamp(3, 1)


def everything(stamp: Stamp) -> bool:
    return True


def test_one_member_that_did_not_see_the_vote_takes_all_back_one_step() -> None:
    held = {"a": {(0, B), (0, A)}, "b": {(1, A), (1, INITIAL)}}
    boundary = newest_boundary(2, held, everything, INITIAL)
    assert (boundary.stamp, boundary.on_disk) == (A, False)
    assert boundary.passed_over == ((B, (1,)),)
    assert not boundary.loses_settled(reached=2)  # step 2 was the one interrupted


def test_lost_layers_come_from_the_checkpoint_only_as_a_last_resort() -> None:
    held = {"a": {(0, C), (1, C)}}
    boundary = newest_boundary(3, held, everything, A)
    assert (boundary.stamp, boundary.on_disk) == (A, True)
    assert boundary.passed_over == ((C, (2,)),)
    assert boundary.loses_settled(reached=0)
    # a newer checkpoint serves the missing layers, and only those
    boundary = newest_boundary(3, held, everything, C)
    moves = list_moves(boundary, {"a": (0, 1), "b": (2,)}, [5, 6, 7])
    assert [(move.layer, move.source, move.target, move.bytes) for move in moves] == [(2, CHECKPOINT, "b", 7)]


def test_void_states_are_passed_by() -> None:
    record = Generation(3, ("a",), lineage=((1, INITIAL), (2, A)))
    held = {"a": {(0, C), (0, A)}}
    assert newest_boundary(1, held, record.continues, INITIAL).stamp == A


def test_the_newest_boundary_and_the_moves_by_brute_force() -> None:
    dice = random.Random(7)
    for _ in range(400):
        layers, members = dice.randint(1, 5), [f"m{i}" for i in range(dice.randint(1, 5))]
        stamps = [Stamp(step, 1) for step in range(1, 5)]
        held = {
            member: {(layer, stamp) for layer in range(layers) for stamp in stamps if dice.random() < 0.55}
            for member in members
        }
        checkpoint = dice.choice([INITIAL, *stamps])
        boundary = newest_boundary(layers, held, everything, checkpoint)
        complete = [
            stamp
            for stamp in [INITIAL, *stamps]
            if stamp == checkpoint
            or all(any((layer, stamp) in mine for mine in held.values()) for layer in range(layers))
        ]
        assert boundary.stamp == max(stamp for stamp in complete if stamp >= checkpoint)
        owners: dict[str, list[int]] = {member: [] for member in members}
        for layer in range(layers):
            for member in dice.sample(members, dice.randint(1, len(members))):
                owners[member].append(layer)
        moves = list_moves(boundary, owners, [1] * layers)
        _check_moves(moves, owners, held, boundary.stamp)


def _check_moves(moves, owners: Mapping[str, list[int]], held, stamp: Stamp) -> None:  # type: ignore[no-untyped-def]
    assert len({(move.layer, move.target) for move in moves}) == len(moves)
    wanted = {
        (layer, owner) for owner, layers in owners.items() for layer in layers if (layer, stamp) not in held[owner]
    }
    assert {(move.layer, move.target) for move in moves} == wanted
    for move in moves:
        holders = [member for member, mine in held.items() if (move.layer, stamp) in mine]
        assert move.source in holders if holders else move.source is CHECKPOINT


def test_senders_share_the_work() -> None:
    held = {"a": {(layer, A) for layer in range(6)}, "b": {(layer, A) for layer in range(6)}, "c": set()}
    moves = list_moves(newest_boundary(6, held, everything, INITIAL), {"c": range(6)}, [10] * 6)
    assert sorted(move.source or "" for move in moves) == ["a", "a", "a", "b", "b", "b"]


def contributions(held: Mapping[str, set[tuple[int, Stamp]]]) -> dict[str, Contribution]:
    return {member: Contribution(frozenset(mine), f"host of {member}") for member, mine in held.items()}


def test_rather_than_lose_settled_steps_it_waits_until_told_otherwise() -> None:
    record = EMPTY.successor(["a"]).successor(["a"], base=INITIAL, reached=3)
    values = contributions({"a": {(0, C), (0, B)}})
    decision = decide(record, values, (1, 1), even_places(2, 0))
    assert decision.layout is None
    assert decision.for_holders
    assert "holds layers 1 at step 3" in (decision.waiting or "")
    again = record.successor(["a"], regress=True)
    decision = decide(again, values, (1, 1), even_places(2, 0))
    assert decision.layout is not None
    assert decision.boundary.stamp == INITIAL
    assert {move.source for move in decision.moves} == {CHECKPOINT}


def test_too_few_devices_wait() -> None:
    record = EMPTY.successor(["a"])
    decision = decide(record, contributions({"a": set()}), (1, 1), even_places(2, 0, fewest=2))
    assert (decision.layout, decision.waiting) == (None, "1 device(s); 2 are needed")
    assert not decision.for_holders


def test_those_that_leave_send_but_own_nothing() -> None:
    record = EMPTY.successor(["a", "b"]).successor(["a"], ["b"], INITIAL, reached=1)
    values = contributions({"a": {(0, A), (0, INITIAL)}, "b": {(1, A), (1, INITIAL)}})
    decision = decide(record, values, (1, 1), even_places(2, 1))
    assert isinstance(decision.layout, MemberLayout)
    assert decision.layout.owned == {"a": (0, 1)}
    assert decision.boundary.stamp == A
    assert [(move.layer, move.source, move.target) for move in decision.moves] == [(1, "b", "a")]
    assert sum(move.bytes for move in decision.moves) == 1
