"""All entry points give the same answer to the same planning question."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import pytest

from tests.planning.doors import (
    answers_about,
    answers_about_model,
    drawn,
    elastic,
    equal_steps,
    step_of,
    step_of_front,
    step_of_replanning,
    timed,
)
from tests.sweeps import some
from varuna_capslog.planning.comparison import compare
from varuna_capslog.planning.problem import Problem
from varuna_capslog.planning.registry import REGISTRY
from varuna_capslog.planning.solve import solve
from varuna_capslog.schedules import RunShape


@pytest.mark.parametrize("seed", some(range(20), 5))
def test_a_profile_is_planned_alike_through_every_door(seed: int, tmp_path: Path) -> None:
    question = drawn(seed)
    answers = answers_about(question, tmp_path)
    expected = answers.pop("train")
    for answer in answers.values():
        assert answer == expected
    if elastic(question):
        assert equal_steps(step_of_replanning(question), step_of(expected))


@pytest.mark.parametrize("seed", some([4, 6, 12, 14, 22, 33], 2))
def test_the_front_ends_with_the_plan_of_its_capacity(seed: int, tmp_path: Path) -> None:
    question = drawn(seed)
    expected = answers_about(question, tmp_path)["train"]
    assert equal_steps(step_of_front(question, tmp_path), step_of(expected))


@pytest.mark.parametrize("number", some(range(6), 2))
def test_a_model_its_estimate_and_the_start_of_its_run_are_planned_alike(number: int, tmp_path: Path) -> None:
    answers = answers_about_model(number, tmp_path)
    expected = answers.pop("train")
    for answer in answers.values():
        assert answer == expected


@pytest.mark.parametrize("seed", some(range(8), 3))
def test_the_default_is_never_slower_than_another_planner(seed: int) -> None:
    """Compares plans that fit and run under the same problem, judged and simulated alike."""
    dice = random.Random(1000 + seed)
    profile, devices = timed(dice, dice.randint(3, 5)), dice.randint(2, 3)
    run = RunShape(4, dice.choice(["auto", "1f1b", "varuna"]))
    free = solve(Problem.of(profile, devices, None, run), "exact")
    capacity = dice.choice([None, int((free.peak_bytes or 0) * dice.uniform(0.6, 1.2))])
    problem = Problem.of(profile, devices, capacity, run)
    best = solve(problem, "budget")
    rows = compare(problem, [name for name in REGISTRY if name not in ("budget", "mcap-bo")])
    bounds = {row.bound_seconds for row in rows if row.step_seconds is not None}
    assert len(bounds) <= 1, "rows side by side have one bound"
    for row in rows:
        assert row.step_seconds is None or row.step_seconds >= (row.bound_seconds or 0.0) * (1 - 1e-9), row.planner
        plan = row.plan
        if plan is None or not plan.fits or plan.step_seconds is None:
            continue
        if run.schedule not in ("auto", plan.schedule):
            continue
        assert best.fits, f"{row.planner} fits"
        assert best.step_seconds is not None
        assert best.step_seconds <= plan.step_seconds * (1 + 1e-9), row.planner


def test_two_plans_of_different_speed_name_the_spaces_that_they_are_proven_in() -> None:
    profile = timed(random.Random(5), 5)
    closed = dataclasses.replace(Problem.of(profile, 2, None, RunShape(4, "auto")), blocks_open=False)
    free = dataclasses.replace(closed, blocks_open=True)
    plans = [solve(problem, "budget") for problem in (closed, free)]
    assert all(plan.search_space for plan in plans)
    steps = [plan.step_seconds for plan in plans]
    if steps[0] != steps[1] and all(plan.proven for plan in plans):
        assert plans[0].search_space != plans[1].search_space
