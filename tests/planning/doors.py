"""Entry points (doors) that answer the same planning question; `benchmarks/doors` asks more than `test_doors`."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import json
import math
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import varuna_capslog as capslog
from tests.memory.machine import Model, profile_of
from tests.start.test_ordinary import convolutions, transformer
from varuna_capslog import cli
from varuna_capslog.config.settings import Config
from varuna_capslog.planning.comparison import compare
from varuna_capslog.planning.problem import Problem
from varuna_capslog.planning.registry import REGISTRY
from varuna_capslog.planning.solve import solve
from varuna_capslog.planning.trace_replay import Replanner
from varuna_capslog.plans.plan import Plan, read_plan
from varuna_capslog.profiles.record import Profile, write_profile
from varuna_capslog.schedules import RunShape
from varuna_capslog.start.ordinary import OrdinaryModel, config_of_profile, ordinary_config, with_choices_of
from varuna_capslog.start.prepare import estimate_memo, plan_run, profile_run

PLANNERS = ("budget", "budget", "exact", "joint", "throughput", "pipedream", "vpipe", "capslog")

Answers = dict[str, dict[str, Any]]
"""The answer of each door, by its name."""


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
    """A planning question; keys: config keys and their values."""

    profile: Profile
    devices: int
    capacity: int | None
    minibatch: int
    keys: Mapping[str, Any]

    @property
    def planner(self) -> str:
        name: str = self.keys["pipeline.planner"]
        return name

    @property
    def settings(self) -> dict[str, Any]:
        """The config keys that the API has no argument for."""
        return {key: value for key, value in self.keys.items() if key != "pipeline.planner"}

    @property
    def config(self) -> Config:
        pipeline = {"devices": self.devices, "planner": self.planner}
        pipeline |= {} if self.capacity is None else {"capacity": f"{self.capacity}B"}
        return config_of_profile(self.profile, pipeline, self.minibatch, dict(self.keys))

    def words(self, folder: Path) -> list[str]:
        """Return the question as command-line arguments; writes its profile into the folder."""
        write_profile(folder / "profile.json", self.profile)
        words = ["--profile", str(folder / "profile.json"), "--devices", str(self.devices), "--json"]
        words += ["--planner", self.planner, "--minibatch", str(self.minibatch)]
        words += [f"{key}={value}" for key, value in self.settings.items()]
        return words if self.capacity is None else [*words, "--capacity", f"{self.capacity}B"]


def drawn(seed: int) -> Question:
    """Draw a question so small that every search ends without a time limit."""
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


def said(plan: Plan) -> dict[str, Any]:
    """Return the plan as JSON (cuts, actions, bytes, seconds, fits, notes) without its search time."""
    return plan.to_json() | {"search_seconds": None}


def of_command(*words: str) -> tuple[int, str, str]:
    """Run `capslog` in this process; return its exit status, standard output and standard error."""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        status = cli._run(list(words))
    return status, out.getvalue(), err.getvalue()


def answers_about(question: Question, folder: Path) -> Answers:
    """Return the answer of each door that plans a profile; the first door starts a run."""
    config, profile, planner = question.config, question.profile, question.planner
    started = plan_run(config, profile)
    answers = {"train": said(started), "solve": said(solve(Problem.of_config(config, profile), planner))}
    by_name = capslog.plan(
        profile,
        devices=question.devices,
        capacity=question.capacity,
        planner=planner,
        minibatch_size=question.minibatch,
        settings=question.settings,
    )
    answers["capslog.plan"] = said(by_name)
    status, out, err = of_command("plan", *question.words(folder))
    shown = Plan.from_json(json.loads(out))
    assert status == (3 if shown.fits is False else 0)
    assert shown.fits is not False or "; ".join(shown.notes) in err
    answers["plan --profile"] = said(shown)
    (row,) = compare(Problem.of_config(config, profile), [planner])
    assert row.plan is not None
    assert (row.step_seconds, row.peak_bytes) == (row.plan.step_seconds, row.plan.peak_bytes)
    answers["compare"] = said(row.plan)
    return answers


def step_of(answer: Mapping[str, Any]) -> float | None:
    """Return the step time of a door's plan; None if it does not fit."""
    step: float | None = answer["step_seconds"]
    return None if answer["fits"] is False else step


def equal_steps(first: float | None, second: float | None) -> bool:
    """Return True if both steps are equal up to the order of summation, or both are None."""
    if first is None or second is None:
        return first is second
    return math.isclose(first, second, rel_tol=1e-12)


def step_of_replanning(question: Question) -> float | None:
    """Return the step time of a run replanned with unchanged members; None if nothing fits."""
    config = question.config
    blocks = None if config.train.blocks_are_open else config.num_blocks
    link, run = Problem.of_config(config, question.profile).link, RunShape.of_config(config)
    ask = Replanner(question.profile, question.minibatch, question.planner, question.capacity, run, blocks, link)
    deployment = ask(question.devices)
    return None if deployment is None else question.minibatch / deployment.samples_per_second


def step_of_front(question: Question, folder: Path) -> float | None:
    """Return the shortest step on the front up to the question's capacity; None if nothing fits."""
    status, out, _ = of_command("front", *question.words(folder))
    points = json.loads(out)["front"] if status == 0 else []
    for before, after in itertools.pairwise(points):
        assert before["step_seconds"] > after["step_seconds"]
    return points[-1]["step_seconds"] if points else None


def answers_about_model(number: int, folder: Path) -> Answers:
    """Return the answer of each door for a drawn model, its estimate, and the estimate's file."""
    model, sample = (transformer, convolutions)[number % 2](random.Random(number))
    dice = random.Random(number)
    devices, minibatch = dice.choice([1, 2, 3]), len(sample) * dice.choice([2, 4])
    pipeline, kind = {"devices": devices, "capacity": "8GiB"}, dice.choice(["cuda:h100-80gb", "cuda:t4"])
    config = ordinary_config(OrdinaryModel(model, sample), pipeline, minibatch, kind)
    memo = estimate_memo(config)
    profile = profile_run(config, show=False, memo=memo)
    started = plan_run(config, profile, memo)
    arguments: dict[str, Any] = {"devices": devices, "capacity": "8GiB", "minibatch_size": minibatch}
    estimate = capslog.estimate(model, sample, device=kind)
    write_profile(folder / "profile.json", estimate)
    words = ["--profile", str(folder / "profile.json"), "--devices", str(devices), "--capacity", "8GiB"]
    status, *_ = of_command("plan", *words, "--minibatch", str(minibatch), "-o", str(folder / "plan.json"))
    assert status == (3 if started.fits is False else 0)
    again = plan_run(with_choices_of(config, started), profile, memo)
    assert (again.stages, again.actions, again.fits) == (started.stages, started.actions, started.fits)
    return {
        "train": said(started),
        "capslog.plan, model": said(capslog.plan(model, sample, device=kind, **arguments)),
        "capslog.plan, estimate": said(capslog.plan(estimate, **arguments)),
        "plan --profile": said(read_plan(folder / "plan.json")),
    }


def elastic(question: Question) -> bool:
    """Return True if an elastic run may ask this question."""
    return REGISTRY[question.planner].elastic and question.config.train.accumulation_blocks != 2
