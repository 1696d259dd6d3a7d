"""Workers that may still join, by the log's entries."""

from __future__ import annotations

import pickle
from typing import Any

from varuna_capslog.membership.entries import Roster
from varuna_capslog.membership.generation import EMPTY

RECORDS = [EMPTY.successor(["a-1", "b-1"])]
RECORDS.append(RECORDS[0].successor(["b-1", "a-2"], leaving=["a-1"]))
RECORDS.append(RECORDS[1].successor(["a-2"]))


def roster_of(*entries: dict[str, Any]) -> Roster:
    roster = Roster()
    for member in ("a-1", "b-1", "a-2", "b-2"):
        roster.take({"kind": "worker", "member": member, "host": member[0], "slot": 0})
    for entry in entries:
        roster.take(entry)
    return roster


def generation(index: int) -> dict[str, Any]:
    return {"kind": "generation", "number": index + 1, "record": RECORDS[index].to_json()}


def dead(member: str, by: str) -> dict[str, Any]:
    return {"kind": "dead", "member": member, "why": "x", "by": by}


def test_who_took_part_and_was_not_told_to_have_ended_is_astray() -> None:
    assert roster_of().astray == set()
    assert roster_of(generation(0)).astray == set(), "all are in it"
    assert roster_of(generation(0), generation(1)).astray == set(), "whoever leaves may still be asked to send"
    taken = [generation(0), generation(1), generation(2)]
    assert roster_of(*taken).astray == {"a-1", "b-1"}
    assert roster_of(*taken, {"kind": "left", "member": "a-1"}).astray == {"b-1"}
    assert roster_of(*taken, {"kind": "left", "member": "a-1"}, dead("b-1", by="b")).astray == set()
    # it may live, where another host has said so; but a worker that reads that it is dead ends at once
    assert roster_of(*taken, {"kind": "left", "member": "a-1"}, dead("b-1", by="a")).astray == set()


def test_who_took_part_in_a_broken_generation_and_has_said_nothing_since() -> None:
    roster = roster_of(generation(0), generation(1), {"kind": "broken", "generation": 2, "member": "a-2"})
    assert set(roster.silent(2)) == {"a-1", "b-1"}
    assert roster.silent(1) == (), "all of its members were named in the next one"
    roster.take(generation(2))
    assert set(roster.silent(2)) == {"a-1", "b-1"}
    roster.take({"kind": "ask", "member": "b-1", "host": "b", "capacity": 0})
    assert roster.silent(2) == ("a-1",)


def test_a_roster_does_not_grow_with_the_generations_of_the_same_members() -> None:
    members, roster, record, sizes = [f"a-{number}" for number in range(100)], roster_of(), EMPTY, []
    for _ in range(30):
        record = record.successor(members)
        roster.take({"kind": "generation", "number": record.number, "record": record.to_json()})
        sizes.append(len(pickle.dumps(roster)))
    assert sizes[-1] < sizes[0] + 100
