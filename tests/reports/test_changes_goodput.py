"""Accounting of a run's time: each kind of time is found where it was spent, and all kinds add up."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from tests.reports.page_reader import Page
from tests.reports.runs import write_run
from varuna_capslog.reports.changes import KINDS, Account, account_of
from varuna_capslog.reports.page import write_report
from varuna_capslog.reports.run import read_run

START = 1_753_000_000.0


class Course:
    """Simulated history of a run: the lines that its files would have, and the true account of its time."""

    def __init__(self) -> None:
        self.now, self.step, self.generation = START, 0, 0
        self.metrics: list[dict[str, Any]] = []
        self.events: list[dict[str, Any]] = []
        self.evaluations: list[dict[str, Any]] = []
        self.truth = dict.fromkeys(KINDS, 0.0)

    def spend(self, kind: str, seconds: float) -> None:
        self.truth[kind] += seconds
        self.now += seconds

    def event(self, kind: str, **more: Any) -> None:
        about = {"kind": kind, "time": self.now, "step": self.step, "generation": self.generation}
        self.events.append(about | more)

    def launch(self, seconds: float) -> None:
        self.event("launch")
        self.spend("starting", seconds)

    def steps(self, count: int, seconds: float = 0.2, between: float = 0.01) -> None:
        for number in range(count):
            if number:
                self.spend("between steps", between)
            self.spend("productive", seconds)
            self.step += 1
            about = {"step": self.step, "time": self.now, "generation": self.generation}
            self.metrics.append(about | {"step_seconds": seconds, "loss": 1.0})

    def back(self, count: int) -> None:
        """Repeat the last `count` steps."""
        for line in self.metrics[len(self.metrics) - count :]:
            self.truth["productive"] -= line["step_seconds"]
            self.truth["repeated"] += line["step_seconds"]
        self.step -= count

    def change(self, pause: float, lost: float = 0.0, waits: float = 0.0) -> None:
        if lost:
            self.spend("repeated", lost)
        self.spend("paused", pause / 2)
        if waits:
            self.event("waiting", why="a device")
            self.spend("waiting", waits)
            self.event("join", member="m9")
        self.spend("paused", pause / 2)
        self.generation += 1
        morph = {"kind": "morph", "step": self.step + 1, "generation": self.generation, "lost_step_seconds": lost}
        if self.generation % 2:  # the event measures the pause itself; what lies around it is no part of the change
            morph["pause_seconds"] = pause + lost + waits
            self.spend("between steps", 0.03)
        self.events.append(morph | {"time": self.now + 0.2})

    def write(self, folder: Path) -> None:
        for name in ("metrics", "events", "evaluations"):
            lines = getattr(self, name)
            (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def account(course: Course, folder: Path) -> Account:
    folder.mkdir(exist_ok=True)
    course.write(folder)
    times = account_of(read_run(folder))
    assert times is not None
    return times


@pytest.mark.parametrize("seed", range(20))
def test_every_moment_is_found_where_it_was_spent(tmp_path: Path, seed: int) -> None:
    draw, course = random.Random(seed), Course()
    course.launch(draw.uniform(2, 9))
    course.steps(draw.randrange(1, 9))
    for _ in range(draw.randrange(3, 12)):
        match draw.choice(["leave", "crash", "wait", "checkpoint", "evaluation", "restart", "steps"]):
            case "leave":
                course.change(draw.uniform(0.02, 0.5))
            case "crash":
                course.change(draw.uniform(0.1, 2.0), lost=draw.uniform(0.01, 0.2))
            case "wait":
                course.change(0.3, waits=draw.uniform(1.0, 50.0))
            case "checkpoint":
                stall = draw.uniform(0.01, 0.3)
                course.spend("checkpointing", stall)
                course.events.append(
                    {
                        "kind": "checkpoint",
                        "time": course.now + draw.choice([0.0, 0.5]),
                        "step": course.step,
                        "generation": course.generation,
                        "stall_seconds": stall,
                    }
                )
                course.spend("between steps", 0.01)
            case "evaluation":
                course.spend("evaluating", draw.uniform(0.5, 5))
                about = {"step": course.step, "generation": course.generation, "time": course.now}
                course.evaluations.append(about | {"scores": {"loss": 1.0}})
            case "restart":
                course.spend("ending", 0.2)
                course.event("stop")
                course.spend("not running", draw.uniform(10, 1000))
                course.launch(draw.uniform(2, 9))
                course.generation += 1
                course.back(min(course.step, draw.randrange(3)))
            case _:
                course.spend("between steps", 0.02)
        course.steps(draw.randrange(4, 8))
    course.spend("ending", 0.7)
    course.event("stop")
    times = account(course, tmp_path / "run")
    assert times.total == pytest.approx(course.now - START, abs=1e-3)
    for kind in KINDS:
        assert times.seconds[kind] == pytest.approx(course.truth[kind], abs=2e-3), kind
    told = sum(event.get("pause_seconds", 0.0) for event in course.events)
    unmeasured = [event for event in course.events if event["kind"] == "morph" and "pause_seconds" not in event]
    assert unmeasured or sum(times.pauses.values()) == pytest.approx(told, abs=1e-3)
    assert times.goodput == pytest.approx(course.truth["productive"] / (course.now - START), abs=1e-4)


def test_a_run_without_times_has_no_account(tmp_path: Path) -> None:
    course = Course()
    course.steps(3)
    del course.metrics[1]["time"]
    (tmp_path / "run").mkdir()
    course.write(tmp_path / "run")
    assert account_of(read_run(tmp_path / "run")) is None


def test_the_report_has_the_table_and_the_summary_the_share(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    write_run(run_dir, num_layers=6, stages=2, steps=4, evaluations=1, microbatches=4)
    course = Course()
    course.launch(1.0)
    course.steps(4, seconds=2.0, between=0.25)
    course.spend("ending", 0.25)
    course.event("stop")
    course.write(run_dir)
    page = Page(write_report(run_dir))
    kinds = [row[0] for row in page.tables["goodput-table"][1:]]
    assert kinds == [
        kind + KINDS.get(kind, "") for kind in ("productive", "starting", "between steps", "ending", "all")
    ]
    assert page.column("goodput-table", "share") == ["80.00 %", "10.00 %", "7.50 %", "2.50 %", "100.00 %"]
    productive = page.facts("result-table")["Productive"]
    assert productive == "80.0 % of 10.0 s (starting 10.0 %, between steps 7.5 %, ending 2.5 %)"
