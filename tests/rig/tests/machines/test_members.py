"""Which members there are by the log, and signals to their processes."""

from __future__ import annotations

import json
import signal
import subprocess

import pytest

from tests.rig.judge import Segment
from tests.rig.machines.members import Members
from varuna_capslog.membership.entries import AskEntry, BrokenEntry, DeadEntry, GenerationEntry, NoticeEntry
from varuna_capslog.membership.generation import Generation


def founded(generation):
    return GenerationEntry(generation).to_json()


@pytest.fixture
def sleeper():
    process = subprocess.Popen(["sleep", "60"])
    yield process
    process.kill()
    process.wait()


def write_pid(run_dir, member, pid):
    (run_dir / "workers").mkdir(exist_ok=True)
    (run_dir / "workers" / f"{member}.json").write_text(json.dumps({"pid": pid}))


def test_generations_joins_and_breaks_are_counted(tmp_path):
    members, segment = Members(tmp_path), Segment(broken=set())
    first = Generation(1, ("a-1", "b-1"))
    members.take(founded(first), 10.0, segment)
    members.take(AskEntry("a-2", "a").to_json(), 11.0, segment)
    members.take(AskEntry("a-2", "a").to_json(), 12.0, segment)
    members.take(BrokenEntry(1, "a-1").to_json(), 12.0, segment)
    members.take(founded(first.successor(("a-1", "a-2"))), 13.0, segment)
    assert [(record.number, at) for record, at in segment.founded] == [(1, 10.0), (2, 13.0)]
    assert segment.broken == {1}
    assert members.asked == {"a-2": 11.0}
    assert members.joins == 1, "the members of the first generation joined none"
    assert members.of(2) == ("a-1", "a-2")
    assert members.of(3) == ()
    members.begin()
    assert (members.of(2), members.asked, members.roster.generation.number) == ((), {}, 0)
    assert members.joins == 1


def test_voters_have_a_process_and_neither_died_nor_are_about_to_leave(tmp_path):
    members, segment = Members(tmp_path), Segment()
    members.take(founded(Generation(1, ("d", "c", "b", "a", "e"))), 1.0, segment)
    for name in "abcd":
        write_pid(tmp_path, name, 1)
    members.take(DeadEntry("b").to_json(), 1.0, segment)
    members.take(NoticeEntry("c").to_json(), 1.0, segment)
    assert members.voters() == ["a", "d"]
    members.begin()
    assert members.pid_of("a") is None, "of a run that begins again no process is there yet"


def test_a_signal_reaches_a_living_member_only(tmp_path, sleeper):
    members = Members(tmp_path)
    write_pid(tmp_path, "a", sleeper.pid)
    members.signal("nobody", signal.SIGKILL)
    members.roster.dead.add("a")
    members.signal("a", signal.SIGKILL)
    with pytest.raises(subprocess.TimeoutExpired):
        sleeper.wait(0.1)
    members.roster.dead.clear()
    members.roster.members["a"] = "a"
    assert members.has_process(sleeper.pid)
    assert not members.has_process(1)
    members.signal("a", signal.SIGTERM)
    assert sleeper.wait(5.0) == -signal.SIGTERM
    members.signal("a", signal.SIGTERM)  # it has ended, which the log does not say yet
