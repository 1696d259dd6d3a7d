"""Actions that are due later in a chaos run."""

from __future__ import annotations

from types import SimpleNamespace

from tests.rig.machines import agenda
from tests.rig.machines.agenda import Agenda


def test_what_is_due_is_done_once_in_the_order_of_the_moments(monkeypatch):
    clock = SimpleNamespace(now=10.0)
    monkeypatch.setattr(agenda, "time", SimpleNamespace(monotonic=lambda: clock.now))
    calendar, done = Agenda(), []
    for name, seconds in (("late", 2.0), ("first", 1.0), ("second", 1.0), ("never", 9.0)):
        calendar.later(seconds, lambda name=name: done.append(name))
    calendar.run_due()
    assert done == []
    clock.now = 11.5
    calendar.run_due()
    assert done == ["first", "second"]
    clock.now = 13.0
    calendar.run_due()
    assert done == ["first", "second", "late"]
