"""When a chaos run counts as recovered from a fault, and when it hangs."""

from __future__ import annotations

import time

import pytest

from tests.rig.recovery import Hung, Recovery
from tests.rig.tally import Hit
from tests.rig.tests.worlds import FakeMachines, stepped

MEMBERS = {1: ("a-1", "a-2", "b-1"), 2: ("a-1", "b-1"), 3: ("a-1",)}


def world(*turns):
    machines = FakeMachines(MEMBERS)
    machines.script = [lambda new_steps=new_steps: new_steps for new_steps in turns]
    return machines, Recovery(machines.as_machines, hang_seconds=0.05)


def test_the_first_later_step_without_the_victim_ends_the_waiting():
    now = time.time()
    machines, recovery = world(
        [stepped("a-1", 1, 7, now - 1.0)],  # before the fault
        [stepped("b-1", 1, 8, now + 0.25)],  # of the generation that the victim is still a member of
        [stepped("b-1", 2, 8, now + 3.5), stepped("a-1", 2, 8, now + 3.0)],
    )
    machines.records.step_times = [now - 2.0]
    hit = recovery.recover(Hit(1, "kill", now, generation=1), ["a-2"])
    assert hit.victims == ("a-2",)
    assert hit.recovered == pytest.approx(3.0)
    assert hit.gap == pytest.approx(2.75)  # between the two steps of now + 0.25 and now + 3
    assert recovery.sizes == {3, 2}


def test_a_step_of_an_older_generation_or_one_with_dead_members_is_no_recovery():
    now = time.time()
    machines, recovery = world(
        [stepped("a-1", 3, 8, now + 0.5)],
        [stepped("a-1", 4, 8, now + 0.5)],  # the log has not named its members yet
        [stepped("a-1", 2, 8, now + 1.0)],
    )
    machines.members.roster.dead = {"b-1"}
    with pytest.raises(Hung):  # generation 2 has a dead member, and generation 3 is older than the fault's
        recovery.recover(Hit(1, "kill", now, generation=4), ["a-2"])


def test_a_pause_is_over_with_a_step_after_its_end():
    now = time.time()
    _, recovery = world([stepped("a-1", 1, 8, now + 1.0)], [stepped("a-1", 1, 9, now + 2.5)])
    assert recovery.recover(Hit(1, "pause", now), [], until=now + 2.0).recovered == pytest.approx(2.5)


def test_a_step_without_all_that_a_cut_has_excused_ends_the_waiting_before_the_cut_is_healed():
    now = time.time()
    _, recovery = world([stepped("a-1", 2, 8, now + 1.0)], [stepped("a-1", 3, 9, now + 1.5)])
    hit = recovery.recover(Hit(1, "cut", now), [], until=now + 9.0, excused=frozenset({"b-1"}))
    assert hit.recovered == pytest.approx(1.5)


def test_a_run_that_makes_no_step_hangs_and_the_fault_is_named():
    _, recovery = world()
    hit = Hit(1, "kill", time.time(), generation=1)
    with pytest.raises(Hung, match=r"no step within 0.05 s of kill \(a-2\)") as caught:
        recovery.recover(hit, ["a-2"])
    assert caught.value.hit is hit


def test_a_condition_is_waited_for_and_named_where_it_does_not_come():
    machines, recovery = world([], [stepped("a-1", 1, 1, 1.0)])
    recovery.until(lambda: bool(machines.records.step_times), "its first step", 5.0)
    with pytest.raises(Hung, match=r"did not come to two steps within 0.05 s") as caught:
        recovery.until(lambda: len(machines.records.step_times) > 1, "two steps", 0.05)
    assert caught.value.hit is None
