"""Records of generations: which states lie on the past, and the form in which the store keeps them."""

from __future__ import annotations

import dataclasses
import json

import pytest

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.membership import generation
from varuna_capslog.membership.generation import EMPTY, INITIAL, Generation, MemberLayout, Stamp
from varuna_capslog.plans.parts import PlanStage, Units
from varuna_capslog.plans.plan import Plan


def test_states_taken_back_are_void_for_ever() -> None:
    first = EMPTY.successor(["a", "b", "c"])
    # generation 1 came to step 7; generation 2 went on from step 5
    second = first.successor(["a", "b"], base=INITIAL, reached=7)
    third = second.successor(["a", "b", "c"], base=Stamp(5, 1), reached=6)
    assert second.continues(Stamp(7, 1))  # not decided there yet: all that generation 1 did may still be taken
    assert third.continues(Stamp(5, 1))
    assert third.continues(Stamp(4, 1))
    assert third.continues(Stamp(6, 2))
    assert not third.continues(Stamp(6, 1))  # done again by generation 2
    assert not third.continues(Stamp(7, 1))  # after the last step of generation 2, and void all the same
    fourth = third.successor(["a"], base=Stamp(6, 2), reached=9)
    assert not fourth.continues(Stamp(7, 1))


def test_a_generation_that_went_far_back_voids_all_between() -> None:
    second = EMPTY.successor(["a"]).successor(["a"], base=INITIAL, reached=100)
    third = second.successor(["a"], base=Stamp(50, 1), reached=60)
    fourth = third.successor(["a"], base=Stamp(55, 2))
    assert not fourth.continues(Stamp(52, 1))
    assert fourth.continues(Stamp(55, 2))
    assert not fourth.continues(Stamp(58, 2))


def test_what_is_older_than_the_checkpoint_needs_no_lineage() -> None:
    record = EMPTY.successor(["a"])
    for number in range(1, 40):
        record = record.successor(["a"], base=Stamp(10 * (number - 1), number - 1), reached=10 * number)
    assert len(record.lineage) == 39
    kept = record.successor(["a"], base=Stamp(390, 39), checkpoint=Stamp(385, 39))
    assert kept.checkpoint == Stamp(385, 39)
    assert kept.lineage == ((40, Stamp(390, 39)),)
    assert kept.continues(Stamp(385, 39))
    assert not kept.continues(Stamp(380, 38))
    assert kept.continues(Stamp(388, 39))


def test_a_checkpoint_off_the_lineage_is_left_aside() -> None:
    third = EMPTY.successor(["a"]).successor(["a"], base=INITIAL).successor(["a"], base=Stamp(5, 1))
    assert third.successor(["a"], checkpoint=Stamp(6, 1)).checkpoint == INITIAL
    assert third.successor(["a"], checkpoint=Stamp(5, 1)).checkpoint == Stamp(5, 1)


def test_the_store_s_form_round_trips_and_is_checked() -> None:
    record = EMPTY.successor(["a", "b"]).successor(["b"], ["a"], Stamp(3, 1), reached=4, regress=True)
    assert Generation.from_json(json.loads(json.dumps(record.to_json()))) == record
    value = record.to_json()
    with pytest.raises(CapslogError, match="'reached' is missing"):
        Generation.from_json({key: part for key, part in value.items() if key != "reached"})
    with pytest.raises(CapslogError, match="another program"):
        Generation.from_json(value | {"format": "x"})
    with pytest.raises(CapslogError, match="twice"):
        Generation.from_json(value | {"members": ["a", "a"]})


PLAN = Plan(4, (PlanStage(((0, 4),), (1,), (0,)), PlanStage(((0, 2),), (0,), (1,)), PlanStage(((2, 4),), (2,), (1,))),
            Units(4, 1, 2), "varuna", step_seconds=0.1)  # fmt: skip


def test_a_record_carries_the_plan_that_its_founder_chose() -> None:
    record = EMPTY.successor(["a", "b", "c"])
    assert "plan" not in record.to_json(), "nothing else is written where all members compute it alike"
    carried = dataclasses.replace(record, plan=PLAN)
    read = Generation.from_json(json.loads(json.dumps(carried.to_json())))
    assert read == carried != record
    assert read.plan == PLAN
    assert hash(read) == hash(record)
    assert carried.successor(["a"]).plan is None, "it is for these members"
    wrong = carried.to_json() | {"plan": PLAN.to_json() | {"num_layers": 5}}
    with pytest.raises(CapslogError, match=r"the store: plan: no stage holds layer 4 for block 0"):
        Generation.from_json(wrong, "the store")
    with pytest.raises(CapslogError, match="generation 1 has 2 members, but a plan for 3 ranks"):
        dataclasses.replace(record, members=("a", "b"), plan=PLAN)


def test_pieces_and_direct_routes_travel_in_the_record() -> None:
    stages = (PlanStage(((0, 1), (3, 4)), (1,)), PlanStage(((1, 3),), (0,)))
    plan = Plan(4, stages, Units(2, 1, 1), actions=(("1F0", "1B0", "1F1", "1B1"), ("0F0", "0B0", "0F1", "0B1")),
                routes="direct")  # fmt: skip
    record = dataclasses.replace(EMPTY.successor(["a", "b"]), plan=plan)
    read = Generation.from_json(json.loads(json.dumps(record.to_json()))).plan
    assert read == plan
    assert MemberLayout.of_plan(plan, ["a", "b"], {}).owned == {"a": (1, 2), "b": (0, 3)}


def test_who_owns_what_under_a_plan() -> None:
    layout = MemberLayout.of_plan(PLAN, ["x", "y", "z"], {})
    assert layout.owned == {"x": (0, 1), "y": (0, 1, 2, 3), "z": (2, 3)}
    assert layout.covers(["y"])
    assert layout.covers(["x", "z"])
    assert not layout.covers(["x"])


def test_what_a_later_change_voids_as_well_is_named_once() -> None:
    record = EMPTY.successor(["a"]).successor(["a"], base=INITIAL).successor(["a"], base=Stamp(5, 1))
    again = record.successor(["a"], base=Stamp(5, 1)).successor(["a"], base=Stamp(5, 1))
    assert again.lineage == ((1, INITIAL), (4, Stamp(5, 1)))
    back = again.successor(["a"], base=Stamp(3, 1))
    assert back.lineage == ((1, INITIAL), (5, Stamp(3, 1)))
    assert [back.continues(Stamp(step, 1)) for step in (2, 3, 4, 5)] == [True, True, False, False]


def test_a_record_does_not_grow_with_the_changes_of_the_past(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a checkpoint older entries are needed; entries that may be lost at once are kept."""
    monkeypatch.setattr(generation, "LINEAGE_ENTRIES", 3)
    record = EMPTY.successor(["a"])
    for number in range(1, 40):
        record = record.successor(["a"], base=Stamp(10 * (number - 1), number - 1), reached=10 * number)
    assert record.lineage == tuple((number, Stamp(10 * (number - 1), number - 1)) for number in (37, 38, 39))
    assert record.forgotten == 36
    assert record.continues(Stamp(385, 39))  # under way
    assert record.continues(Stamp(380, 38))
    assert record.continues(Stamp(379, 38))
    assert record.continues(Stamp(360, 36))  # the base of the oldest entry
    assert record.continues(Stamp(359, 36))
    assert not record.continues(Stamp(361, 36))  # taken back
    assert not record.continues(Stamp(350, 35))  # nobody can tell
    assert record.continues(INITIAL)  # the checkpoint
    assert Generation.from_json(json.loads(json.dumps(record.to_json()))) == record
    assert record.successor(["a"], base=Stamp(385, 39), checkpoint=Stamp(380, 38)).continues(Stamp(380, 38))
