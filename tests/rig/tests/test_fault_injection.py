"""Effect and victims of each fault, on machines without processes; each ends with a step that counts as recovery."""

from __future__ import annotations

import dataclasses
import itertools
import signal
import time

import pytest

from tests.rig.fault_injection import Strikes
from tests.rig.faults import JumpedClock
from tests.rig.recovery import Recovery
from tests.rig.schedule import schedule
from tests.rig.tests.worlds import FakeMachines, stepped

KILL, STOP, CONT = int(signal.SIGKILL), int(signal.SIGSTOP), int(signal.SIGCONT)
STORE = "store"


def fault_of(kind, **values):
    (fault,) = itertools.islice(schedule(1, {kind: 1.0}, 0.0), 1)
    return dataclasses.replace(fault, whom=(0.0, 0.99, 0.0, 0.0), delay=0.1, lasts=2.0, **values)


def strike(kind, members=("a-1", "a-2", "b-1", "b-2"), machines=("a", "b"), **values):
    """Inject a fault; return its hit and all calls. Functions that were due later are called at once."""
    world = FakeMachines({1: members}, machines)

    def recovered():
        """A new generation without any of the old members."""
        world.generations[2] = ("c-1",)
        for name, *arguments in list(world.calls):
            if name == "later":
                arguments[1]()
        return [stepped("c-1", 2, 9, time.time() + 60.0)]

    world.script = [recovered]
    hit = Strikes(world.as_machines, Recovery(world.as_machines, 1.0), lambda line: None).strike(
        fault_of(kind, **values)
    )
    return hit, [call for call in world.calls if call[0] != "later"], world


def both(*names):
    return {way for source, target in itertools.combinations(names, 2) for way in ((source, target), (target, source))}


@pytest.mark.parametrize(
    ("kind", "values", "calls"),
    [
        ("kill", {}, [("signal", "a-1", KILL)]),
        ("stop", {}, [("signal", "a-1", STOP)]),
        ("bulk", {"count": 3}, [("signal", name, KILL) for name in ("a-1", "b-2", "a-2")]),
        ("double", {}, [("signal", "a-1", KILL), ("signal", "b-2", KILL)]),
        ("pause", {}, [("signal", "a-1", STOP), ("signal", "a-1", CONT)]),
        ("notice", {}, [("notice", "a-1", "chaos", False)]),
        ("urgent", {}, [("notice", "a-1", "chaos", True)]),
        ("notice-kill", {}, [("notice", "a-1", "chaos", False), ("signal", "b-2", KILL)]),
        ("host", {}, [("signal machine", "a", KILL, False)]),
        ("freeze", {}, [("signal machine", "a", STOP, True), ("signal machine", "a", CONT, True)]),
    ],
)
def test_who_is_hit_and_how(kind, values, calls):
    hit, done, _ = strike(kind, **values)
    assert done == calls
    assert hit.kind == kind
    assert hit.recovered > 0


@pytest.mark.parametrize(
    ("kind", "ways", "delay", "note"),
    [
        ("cut", both("a", "b") | both("a", STORE), None, "a | all for 2.0 s"),
        ("half-open", {("a", "b")}, None, "a | b for 2.0 s"),
        ("delay", both("a", "b"), 0.125, "a ~ b for 2.0 s"),
        ("store-cut", both("a", STORE), None, "a | b for 2.0 s"),
    ],
)
def test_which_ways_are_disturbed_and_healed(kind, ways, delay, note):
    hit, done, world = strike(kind, size=0.125)
    assert done == [("disturb", frozenset(ways), delay), ("heal", frozenset(ways))]
    assert hit.note == note
    partitions = world.records.segment.partitions
    assert [partition.away for partition in partitions] == ([frozenset({"a-1", "a-2"})] if kind == "cut" else [])


def test_one_member_at_least_is_left():
    _, done, _ = strike("bulk", ("a-1", "a-2"), count=3)
    assert done == [("signal", "a-1", KILL)]


def test_the_only_machine_with_members_is_not_killed_and_one_machine_has_no_network():
    assert strike("host", ("a-1", "a-2"))[:2] == (None, [])
    assert strike("cut", ("a-1", "a-2"), machines=("a",))[:2] == (None, [])


def test_the_time_of_day_of_a_machine_jumps_by_hours_and_stays_so(tmp_path):
    world = FakeMachines({1: ("a-1", "b-1")})
    world.run_dir = tmp_path
    world.script = [lambda: [stepped("a-1", 1, 9, time.time() + 60.0)]]
    fault = dataclasses.replace(fault_of("clock"), whom=(0.99, 0.0, 0.0, 0.25))
    hit = Strikes(world.as_machines, Recovery(world.as_machines, 1.0), lambda line: None).strike(fault)
    assert (hit.note, hit.causes, world.calls) == ("b -6.0 h", {}, [])
    assert JumpedClock(tmp_path / "chaos", "b")() == pytest.approx(time.time() - 6 * 3600, abs=30)
    assert JumpedClock(tmp_path / "chaos", "a")() == pytest.approx(time.time(), abs=30)
