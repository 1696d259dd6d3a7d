"""Planner `auto`: never slower than a planner that it asks, by plans that fit, and honest about who did not answer."""

from __future__ import annotations

import dataclasses
import itertools
import random
from types import SimpleNamespace

import pytest
from varuna_capslog.planning.automatic import ASKED, automatic_plan

from tests.memory.machine import Model, profile_of
from tests.planning.placed.test_replicated import profile_of_graph, towers
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.planners import EVERY_PLANNER, JOINT
from varuna_capslog.planners.seconds import Link
from varuna_capslog.planning import automatic
from varuna_capslog.planning.comparison import compare
from varuna_capslog.planning.ranks import fold_plan
from varuna_capslog.planning.simulation import simulate_plan
from varuna_capslog.profiles.record import Profile
from varuna_capslog.schedules import RunShape

RUN = RunShape(8)


def timed(seed: int, layers: int) -> Profile:
    """A line of layers with all runs, and seconds."""
    dice = random.Random(seed)
    found = profile_of(Model.random(dice, layers, True, 100), "cuda")
    rows = [
        dataclasses.replace(
            row, forward_seconds=dice.uniform(0.5, 1), backward_seconds=dice.uniform(1, 2), parameter_bytes=20_000
        )
        for row in found.layers
    ]
    return dataclasses.replace(found, layers=tuple(rows))


def test_every_planner_is_asked_but_the_one_that_searches_for_a_minute() -> None:
    assert sorted(ASKED) == sorted({*EVERY_PLANNER, JOINT} - {"mcap-bo"})


def test_no_planner_has_a_faster_plan_that_fits() -> None:
    """Beside a comparison, which asks each alone and plays the plan itself."""
    winners = set()
    for seed, devices in ((0, 2), (1, 3), (2, 3)):
        profile, link = timed(seed, 5), Link(3000.0)
        peak = min(row.peak_bytes or 0 for row in compare(profile, devices, names=["budget"], run=RUN, link=link))
        for capacity in (None, int(peak * 1.1)):
            found = automatic_plan(profile, devices, "auto", capacity, RUN, link)
            assert found.fits
            step = simulate_plan(profile, found, run=RUN.settled(), link=link).step_seconds
            assert step == pytest.approx(found.step_seconds)
            rows = compare(profile, devices, run=RUN, capacity=capacity, link=link)
            fitting = [row for row in rows if row.plan is not None and row.plan.fits]
            assert len(fitting) > (6 if capacity is None else 0)
            assert all(row.step_seconds is None or step <= row.step_seconds * (1 + 1e-9) for row in fitting)
            assert found.bound_seconds is not None
            assert all((row.step_seconds or 1e9) >= found.bound_seconds for row in fitting)
            if capacity is not None and found.memory_model == "ranks":
                assert max(one.peak_bytes for one in fold_plan(profile, found, RUN.settled())) <= capacity
            winners.add(found.planner)
    assert "budget" in winners, "on a line of layers nobody has more to choose from"


def test_towers_go_side_by_side_and_the_note_says_who_came_next() -> None:
    profile = towers([2, 2])
    found = automatic_plan(profile, 4, "auto", None, RUN, Link(10000.0))
    assert found.planner in ("graphpipe", "piper")
    assert found.routes == "direct"
    note = found.notes[-1]
    assert note.startswith(f"planner auto has taken the plan of {found.planner}, of ")
    assert "the next, of " in note
    assert "no answer from " in note  # budget among them: the profile has no runs of layers and pairs
    assert found.proven is False
    even = profile_of_graph([], [1.0])
    alone = automatic_plan(even, 1, "auto", None, RUN)
    assert (alone.proven, alone.step_seconds, alone.bound_seconds) == (True, 8.0, 8.0)


def test_no_further_planner_is_asked_when_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count(0.0, 1.0)
    monkeypatch.setattr(automatic, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    found = automatic_plan(towers([2, 1]), 2, "auto", None, RUN, None, 3.5)
    asked = [name for name in ASKED if name in found.notes[0].split("not asked in time: ")[1].split(", ")]
    assert asked == list(ASKED[3:])  # one tick each
    assert found.search_seconds is not None


def test_where_nothing_fits_the_plan_that_lacks_least_says_so() -> None:
    profile = timed(4, 4)
    found = automatic_plan(profile, 2, "auto", 1000, RUN)
    assert (found.fits, found.bound_seconds) == (False, None)
    rows = compare(profile, 2, run=RUN, capacity=1000)
    lacks = [row.plan.shortfall.bytes for row in rows if row.plan is not None and row.plan.shortfall is not None]
    assert found.shortfall is not None
    assert found.shortfall.bytes <= min(lacks)


def test_a_profile_without_seconds_is_refused() -> None:
    profile = towers([2, 1])
    bare = dataclasses.replace(profile.layers[1], forward_seconds=None)
    profile = dataclasses.replace(profile, layers=(profile.layers[0], bare, *profile.layers[2:]))
    with pytest.raises(CapslogError, match=r"the profile has no forward_seconds for layers\[1\]"):
        automatic_plan(profile, 2, "auto", None, RUN)
    with pytest.raises(CapslogError, match="unknown memory model 'grand'"):
        automatic_plan(towers([2, 1]), 2, "grand", None, RUN)
