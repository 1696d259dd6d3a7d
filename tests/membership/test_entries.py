"""Entries of the log: valid ones are read back as written, invalid ones are neither written nor acted on."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.membership import entries
from varuna_capslog.membership.generation import EMPTY

NOON = 1.7e9

ALL = [
    entries.GenerationEntry(EMPTY.successor(["a-1", "b-1"])),
    entries.HostsEntry("a", "here", 2),
    entries.HostsEntry("a", "gone"),
    entries.WorkerEntry("a-1", "a", 0),
    entries.HelloEntry("a-1", "a"),
    entries.AskEntry("a-1", "a", 1 << 34),
    entries.DeadEntry("a-1", "was killed by SIGKILL", "a"),
    entries.LeftEntry("a-1"),
    entries.NoticeEntry("a-1", True, NOON + 30.5, "aws"),
    entries.NoticeEntry("a-1"),
    entries.HintEntry("a-1", deadline=NOON, source="gcp"),
    entries.AnnounceEntry("a", "leave", NOON, "x"),
    entries.RequestEntry(3),
    entries.BrokenEntry(4, "a-1"),
    entries.CheckpointEntry(40, 2),
    entries.FinishedEntry(40, True, True),
    entries.FinishedEntry(
        40, stopped=True, failure={"member": "a-1", "cause": "no space", "kind": "user", "time": NOON}
    ),
]


@pytest.mark.parametrize("entry", ALL, ids=lambda entry: entry.kind)
def test_an_entry_is_read_back_as_it_was_written(entry: entries.Entry) -> None:
    text = json.dumps(entry.to_json())
    assert json.loads(text)["kind"] == entry.kind
    assert entries.read(json.loads(text)) == entry


def test_every_kind_is_tried() -> None:
    assert {entry.kind for entry in ALL} == {kind.kind for kind in entries.Entry.__subclasses__()}


def test_what_another_program_tells_is_passed_by() -> None:
    assert entries.read({"kind": "weather", "member": 3}) is None
    assert entries.read({}) is None


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ({"kind": "notice", "member": "a-1", "deadline": 30.0}, "30; it must be a time in seconds since 1970, not the"),
        ({"kind": "notice", "member": "a-1", "deadline": "soon"}, "deadline is 'soon'; it must be a number of seconds"),
        ({"kind": "notice", "member": "a-1", "urgent": 1}, "urgent is 1; it must be true or false"),
        ({"kind": "notice"}, r"log \(notice\): field 'member' is missing"),
        ({"kind": "left", "member": "a-1", "when": 3}, r"log \(left\): unknown field 'when'"),
        ({"kind": "left", "member": ""}, "entry 'left' of the log: member is ''; it must be a non-empty string"),
        ({"kind": "request", "devices": 0}, "devices is 0; it must be at least 1"),
        ({"kind": "hosts", "host": "a", "state": "away"}, "state is 'away'; it must be one of here, gone, lost"),
        ({"kind": "broken", "member": "a-1", "generation": None}, "generation is null; it must be a whole number"),
        ({"kind": "generation", "number": 3}, "the store: format is not"),
    ],
)
def test_what_is_not_valid_is_refused_in_one_sentence(value: dict[str, Any], sentence: str) -> None:
    with pytest.raises(CapslogError, match=sentence):
        entries.read(value)


def test_the_seconds_that_are_left_are_not_written_as_a_deadline() -> None:
    with pytest.raises(CapslogError, match="entry 'notice' of the log: deadline is 20"):
        entries.NoticeEntry("a-1", deadline=20.0)
    assert entries.NoticeEntry("a-1", deadline=time.time() + 20).deadline is not None
