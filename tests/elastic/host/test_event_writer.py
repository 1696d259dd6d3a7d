"""Each notice, loss and join is written down once, whichever of the hosts that read the log does it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from varuna_capslog.base import files
from varuna_capslog.elastic.host.event_writer import EventWriter
from varuna_capslog.elastic.host.terminal import describe
from varuna_capslog.membership.generation import EMPTY
from varuna_capslog.membership.roster import Roster


def play(folder: Path, log: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the hosts a and b write of a log; each reads all of it."""
    for host in ("a", "b"):
        roster, events = Roster(), EventWriter(folder, host, offset=2)
        for entry in log:
            events.take(entry, roster)
            roster.take(entry)
    path = folder / "events.jsonl"
    return files.read_jsonl(path) if path.exists() else []


@pytest.fixture
def log() -> list[dict[str, Any]]:
    hosts = [{"kind": "hosts", "host": host, "state": "here", "workers": 1} for host in ("a", "b")]
    workers = [{"kind": "worker", "member": f"{host}-1", "host": host, "slot": 0} for host in ("a", "b")]
    return [*hosts, *workers, generation(1, "a-1", "b-1")]


def generation(number: int, *members: str) -> dict[str, Any]:
    record = EMPTY
    for _ in range(number):
        record = record.successor(members)
    return {"kind": "generation", "number": number, "record": record.to_json()}


def test_the_first_members_join_nothing(tmp_path: Path, log: list[dict[str, Any]]) -> None:
    assert play(tmp_path, log) == []


def test_a_notice_is_told_once_until_it_becomes_urgent(tmp_path: Path, log: list[dict[str, Any]]) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 7}\n{"step": 8}\n{"step":')
    notice = {"kind": "notice", "member": "b-1", "urgent": False, "deadline": time.time() + 30.2, "source": "aws"}
    told = play(tmp_path, [*log, notice, notice, {**notice, "urgent": True}, notice])
    assert [(event["kind"], event["member"], event["host"], event["urgent"]) for event in told] == [
        ("notice", "b-1", "b", False),
        ("notice", "b-1", "b", True),
    ]
    assert {(event["generation"], event["step"], round(event["deadline"]), event["source"]) for event in told} == {
        (3, 8, 30, "aws")
    }, "people read how many seconds are left"
    assert [describe(event) for event in told] == [
        "notice (aws): b-1 is to leave within 30 s",
        "notice (aws): b-1 is to leave at once",
    ]


def test_who_tells_of_a_loss_first_writes_it_down(tmp_path: Path, log: list[dict[str, Any]]) -> None:
    loss = {"kind": "dead", "member": "b-1", "why": "host b does not answer for 3 s", "by": "a"}
    (event,) = play(tmp_path, [*log, loss, {**loss, "by": "b", "why": "too late"}])
    assert (event["kind"], event["member"], event["host"], event["why"]) == ("lost", "b-1", "b", loss["why"])
    assert (event["generation"], event["step"]) == (3, None)
    assert describe(event) == loss["why"]


def test_a_loss_that_a_program_tells_is_written_by_the_host_of_the_lost(
    tmp_path: Path, log: list[dict[str, Any]]
) -> None:
    events = play(tmp_path, [*log, {"kind": "dead", "member": "a-1", "why": "so says the test"}])
    assert [(event["kind"], event["host"]) for event in events] == [("lost", "a")]


def test_whoever_is_named_for_the_first_time_joins(tmp_path: Path, log: list[dict[str, Any]]) -> None:
    newcomer = {"kind": "worker", "member": "b-2", "host": "b", "slot": 1}
    later = [generation(2, "a-1", "b-1", "b-2"), generation(3, "a-1", "b-2"), generation(4, "a-1", "b-1", "b-2")]
    events = play(tmp_path, [*log, newcomer, *later])
    assert [(event["kind"], event["member"], event["host"], event["generation"]) for event in events] == [
        ("join", "b-2", "b", 4)
    ]


def test_a_disk_that_is_full_stops_no_supervisor(tmp_path: Path, log: list[dict[str, Any]]) -> None:
    (tmp_path / "events.jsonl").mkdir()
    loss = {"kind": "dead", "member": "b-1", "why": "x", "by": "a"}
    events, roster = EventWriter(tmp_path, "a", 0), Roster()
    for entry in [*log, loss]:
        events.take(entry, roster)
        roster.take(entry)
    assert roster.dead == {"b-1"}
