"""One question has one answer, through whichever door it is asked."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path
from typing import Any

import pytest

import varuna_capslog as capslog
from tests.memory.machine import Model, profile_of
from tests.start.test_ordinary import problem as drawn_model
from varuna_capslog import cli
from varuna_capslog.config.settings import Config
from varuna_capslog.planning.comparison import compare
from varuna_capslog.planning.problem import Problem
from varuna_capslog.planning.registry import REGISTRY
from varuna_capslog.planning.solve import solve
from varuna_capslog.planning.traces.replanning import Replanner
from varuna_capslog.plans.plan import Plan
from varuna_capslog.profiles.record import Profile, write_profile
from varuna_capslog.schedules import RunShape
from varuna_capslog.start.choices import with_choices_of
from varuna_capslog.start.ordinary import config_of_profile
from varuna_capslog.start.prepare import plan_run

PLANNERS = ("budget", "budget", "exact", "joint", "throughput", "pipedream", "vpipe", "capslog")


def timed(dice: random.Random, layers: int) -> Profile:
    """A line of layers with all runs, and seconds."""
    profile = profile_of(Model.random(dice, layers, True, 100), "cuda")
    rows = [
        dataclasses.replace(
            row, forward_seconds=dice.uniform(0.5, 1), backward_seconds=dice.uniform(1, 2), parameter_bytes=20_000
        )
        for row in profile.layers
    ]
    return dataclasses.replace(profile, layers=tuple(rows))


@dataclasses.dataclass(frozen=True)
class Question:
    """What is asked; keys: of a config."""

    profile: Profile
    devices: int
    capacity: int | None
    minibatch: int
    keys: dict[str, Any]

    @property
    def config(self) -> Config:
        pipeline = {"devices": self.devices, "planner": self.keys["pipeline.planner"]}
        pipeline |= {} if self.capacity is None else {"capacity": f"{self.capacity}B"}
        return config_of_profile(self.profile, pipeline, self.minibatch, self.keys)


def drawn(seed: int) -> Question:
    dice = random.Random(seed)
    profile, devices = timed(dice, dice.randint(3, 5)), dice.randint(1, 3)
    keys: dict[str, Any] = {"pipeline.planner": PLANNERS[seed % len(PLANNERS)]}
    if dice.random() < 0.4:
        keys["pipeline.schedule"] = dice.choice(["1f1b", "varuna"])
    if dice.random() < 0.5:
        keys |= {"pipeline.bandwidth": "3kB/s", "pipeline.latency": "10ms"}
    if dice.random() < 0.3:
        keys["train.accumulation_blocks"] = dice.choice([1, 2])
    peak = solve(Problem.of(profile, devices, None, RunShape(4)), "exact").peak_bytes or 0
    capacity = dice.choice([None, peak, int(peak * 0.8), int(peak * 1.3)])
    return Question(profile, devices, capacity, 4, keys)


def same(plan: Plan, other: Plan) -> None:
    """Cuts, actions, bytes, seconds, whether it fits and what it says; but for what its search took."""
    first, second = plan.to_json(), other.to_json()
    assert first | {"search_seconds": None} == second | {"search_seconds": None}


@pytest.mark.parametrize("seed", range(20))
def test_a_profile_is_planned_alike_through_every_door(
    seed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    question = drawn(seed)
    config, planner = question.config, question.keys["pipeline.planner"]
    expected = plan_run(config, question.profile)
    same(solve(Problem.of_config(config, question.profile), planner), expected)
    settings = {key: value for key, value in question.keys.items() if key != "pipeline.planner"}
    by_name = capslog.plan(
        question.profile,
        devices=question.devices,
        capacity=question.capacity,
        planner=planner,
        minibatch_size=question.minibatch,
        settings=settings,
    )
    same(by_name, expected)
    write_profile(tmp_path / "profile.json", question.profile)
    words = ["--profile", str(tmp_path / "profile.json"), "--devices", str(question.devices), "--json"]
    words += ["--minibatch", str(question.minibatch), *(f"{key}={value}" for key, value in settings.items())]
    words += [] if question.capacity is None else ["--capacity", f"{question.capacity}B"]
    capsys.readouterr()
    assert cli._run(["plan", *words, "--planner", planner]) == (3 if expected.fits is False else 0)
    shown = capsys.readouterr()
    same(Plan.from_json(json.loads(shown.out)), expected)
    assert expected.fits is not False or "; ".join(expected.notes) in shown.err
    (row,) = compare(Problem.of_config(question.config, question.profile), [planner])
    assert row.plan is not None
    same(row.plan, expected)
    assert (row.step_seconds, row.peak_bytes) == (expected.step_seconds, expected.peak_bytes)
    if REGISTRY[planner].elastic and config.train.accumulation_blocks != 2:
        run = RunShape.of_config(config)
        blocks = None if config.train.blocks_are_open else config.num_blocks
        problem = Problem.of_config(config, question.profile)
        replanner = Replanner(
            question.profile, question.minibatch, planner, question.capacity, run, blocks, problem.link
        )
        deployment = replanner(question.devices)
        assert (deployment is None) == (expected.fits is False)
        if deployment is not None and expected.step_seconds is not None:
            assert deployment.samples_per_second == question.minibatch / expected.step_seconds


@pytest.mark.parametrize("number", range(6))
def test_a_model_its_estimate_and_the_start_of_its_run_are_planned_alike(number: int) -> None:
    config, profile, memo = drawn_model(number)
    expected = plan_run(config, profile, memo)
    pipeline = {"devices": config.pipeline.devices, "capacity": "8GiB"}
    of_file = plan_run(config_of_profile(profile, pipeline, config.train.minibatch_size), profile)
    same(of_file, expected)
    again = plan_run(with_choices_of(config, expected), profile, memo)
    assert (again.stages, again.actions, again.fits) == (expected.stages, expected.actions, expected.fits)


@pytest.mark.parametrize("seed", range(8))
def test_the_default_is_never_slower_than_another_planner(seed: int) -> None:
    """Of answers that fit and run under the same problem, by the one judge and the one player."""
    dice = random.Random(1000 + seed)
    profile, devices = timed(dice, dice.randint(3, 5)), dice.randint(2, 3)
    run = RunShape(4, dice.choice(["auto", "1f1b", "varuna"]))
    free = solve(Problem.of(profile, devices, None, run), "exact")
    capacity = dice.choice([None, int((free.peak_bytes or 0) * dice.uniform(0.6, 1.2))])
    problem = Problem.of(profile, devices, capacity, run)
    best = solve(problem, "budget")
    for row in compare(problem, [name for name in REGISTRY if name not in ("budget", "mcap-bo")]):
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
    one = dataclasses.replace(Problem.of(profile, 2, None, RunShape(4, "auto")), blocks_open=False)
    free = dataclasses.replace(one, blocks_open=True)
    plans = [solve(problem, "budget") for problem in (one, free)]
    assert all(plan.search_space for plan in plans)
    steps = [plan.step_seconds for plan in plans]
    if steps[0] != steps[1] and all(plan.proven for plan in plans):
        assert plans[0].search_space != plans[1].search_space
