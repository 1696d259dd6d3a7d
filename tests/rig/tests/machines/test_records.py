"""Records that the chaos rig reads from its members."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.rig.machines import records
from tests.rig.machines.records import Records
from tests.rig.watch import records_folder


def write(run_dir: Path, name: str, step: int, time: float, generation: int = 1) -> None:
    line = {"kind": "step", "member": "m", "generation": generation, "step": step, "loss": 1.0, "grad_norm": 1.0}
    records_folder(run_dir).mkdir(parents=True, exist_ok=True)
    with open(records_folder(run_dir) / name, "a", encoding="utf-8") as file:
        file.write(json.dumps({**line, "digests": {}, "time": time}) + "\n")


def test_a_member_that_was_silent_for_long_is_heard_within_a_second(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(records, "time", SimpleNamespace(monotonic=lambda: clock.now))
    member_records = Records(tmp_path)
    member_records.begin(0)

    def steps_at(now: float, everything: bool = False) -> list[int]:
        clock.now = now
        return [stepped.step for stepped in member_records.read(everything)]

    write(tmp_path, "1-m.jsonl", 1, clock.now)
    assert steps_at(100.0) == [1]
    write(tmp_path, "1-m.jsonl", 2, clock.now)
    assert steps_at(100.01) == [2], "a member that writes is read at every look"
    assert steps_at(104.0) == []
    write(tmp_path, "1-m.jsonl", 3, clock.now)
    assert steps_at(104.5) == [], "a member that is silent is read once a second"
    assert steps_at(105.1) == [3]
    assert steps_at(109.0) == []
    write(tmp_path, "1-m.jsonl", 4, clock.now)
    assert steps_at(109.5) == []
    assert steps_at(109.5, everything=True) == [4], "at the end of a run all files are read at once"
    assert member_records.step == 4


def test_a_step_of_two_members_is_one_step_and_half_a_line_waits_for_its_other_half(tmp_path: Path) -> None:
    member_records = Records(tmp_path)
    member_records.begin(3)
    write(tmp_path, "1-a.jsonl", 4, 10.0)
    write(tmp_path, "1-b.jsonl", 4, 11.0)
    write(tmp_path, "2-a.jsonl", 9, 12.0)  # of a segment that has not begun
    path = records_folder(tmp_path) / "1-a.jsonl"
    text = path.read_text()
    path.write_text(text + text[:20])
    assert [event.step for event in member_records.read(everything=True)] == [4, 4]
    assert (member_records.step, member_records.step_times, member_records.segment.first) == (4, [10.0], 3)
    path.write_text(text + text.replace('"step": 4', '"step": 5'))
    assert [event.step for event in member_records.read(everything=True)] == [5]
    member_records.begin(4)  # the same step of the same generation number is another one now
    write(tmp_path, "2-a.jsonl", 4, 13.0)
    assert [event.step for event in member_records.read(everything=True)] == [9, 4]
    assert (member_records.number, len(member_records.segments[0].stepped), len(member_records.segment.stepped)) == (
        2,
        3,
        2,
    )
    assert member_records.step_times == [10.0, 10.0, 12.0, 13.0]
