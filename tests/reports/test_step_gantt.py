"""Pictures of small and large steps: no label overlaps another or leaves its box."""

from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib.figure import Figure

from tests.reports.legible import TITLE, assert_legible, assert_titled
from tests.sweeps import some
from varuna_capslog.planners.seconds import Link
from varuna_capslog.planning.simulation import Simulation, simulate_plan
from varuna_capslog.plans.parts import PlanStage, Units
from varuna_capslog.plans.plan import Plan
from varuna_capslog.profiles.conditions import UPDATE_RATE
from varuna_capslog.profiles.record import LayerProfile, Profile
from varuna_capslog.reports.step import Limits, draw_simulation, plot_schedule, simulation_title
from varuna_capslog.schedules import StageGraph, StageSeconds, make_schedule, schedule_of, simulate

GIB = 2**30


@pytest.mark.parametrize(("stages", "ranks", "microbatches"), [(1, 1, 1), (4, 2, 4), (8, 8, 64)])
def test_schedule(stages: int, ranks: int, microbatches: int) -> None:
    schedule = make_schedule("varuna", stages, microbatches, [stage % ranks for stage in range(stages)])
    timeline = simulate(schedule, StageSeconds([0.01 * (1 + stage % 3) for stage in range(stages)], [0.03] * stages))
    drawn = plot_schedule(timeline, in_seconds=True)
    assert drawn is not None
    unit = 1.0 if "[s]" in drawn["layout"]["xaxis"]["title"]["text"] else 1e-3
    idle, *kinds = drawn["data"]
    shown = {
        (row, text, round(base * unit, 4), round((base + length) * unit, 4))
        for trace in kinds
        for row, text, base, length in zip(trace["y"], trace["text"], trace["base"], trace["x"], strict=True)
    }
    expected = {
        (
            f"stage {box.action.stage}" if stages == ranks else f"rank {rank}",
            str(box.action.microbatch) if stages == ranks else f"{box.action.stage}.{box.action.microbatch}",
            round(box.start_seconds, 4),
            round(box.end_seconds, 4),
        )
        for rank, row in enumerate(timeline.actions)
        for box in row
    }
    assert {row[:2] for row in shown} == {row[:2] for row in expected}
    assert len(shown) == len(expected)
    assert sorted(row[3] for row in shown) == pytest.approx(sorted(row[3] for row in expected), abs=1e-3)
    assert idle["x"] == [timeline.step_seconds / unit] * ranks


def test_copies_that_take_no_time_are_marks() -> None:
    rows = schedule_of("gpipe", StageGraph.line(1, 3), offload=[True])
    seconds = StageSeconds([1.0], [2.0], other={"O": [0.0], "L": [0.0]})
    drawn = plot_schedule(simulate(rows, seconds), in_seconds=True)
    assert drawn is not None
    marks = {trace["name"]: trace["x"] for trace in drawn["data"] if trace["type"] == "scatter"}
    assert marks == {"offload": [1.0, 2.0, 3.0], "load": [2.0, 3.0, 5.0]}  # F0 O0 F1 O1 L0 F2 O2 L1 B0 L2 B1 B2
    assert [trace["name"] for trace in drawn["data"]] == ["idle", "forward", "backward", "offload", "load"]


def simulation(stages: int, microbatches: int, ranks: int, pipelines: int = 1, known: bool = True) -> Simulation:
    byte_counts = {"static_bytes": GIB, "saved_bytes": GIB // 4} if known else {}
    layers = [
        LayerProfile(
            f"l{n}", 3 * GIB, GIB if n else None, boundary_bytes=2**20, parameter_bytes=2**26,
            forward_seconds=0.01 * (1 + n % 3), backward_seconds=0.03, **byte_counts,  # type: ignore[arg-type]
        )
        for n in range(stages)
    ]  # fmt: skip
    placed = [
        PlanStage(((stage, stage + 1),), (number * ranks + stage % ranks,), (number,))
        for number in range(pipelines)
        for stage in range(stages)
    ]
    plan = Plan(stages, tuple(placed), Units(microbatches * pipelines, 1, pipelines))
    return simulate_plan(
        Profile(tuple(layers), conditions={UPDATE_RATE: 1e-10}), plan, schedule="1f1b", recompute=False, link=Link(1e9)
    )


@pytest.mark.parametrize(
    ("stages", "microbatches", "ranks", "pipelines"),
    some([(1, 1, 1, 1), (4, 4, 2, 1), (3, 4, 3, 2), (24, 4, 24, 1), (4, 8, 4, 1), (8, 16, 8, 1)], 4),
)
def test_simulations(
    stages: int,
    microbatches: int,
    ranks: int,
    pipelines: int,
    tmp_path: Path,
    figures: list[Figure],
) -> None:
    simulated = simulation(stages, microbatches, ranks, pipelines)
    draw_simulation(tmp_path / "x.png", TITLE, simulated, Limits(*[[16 * GIB] * ranks * pipelines] * 2))
    assert (tmp_path / "x.svg").stat().st_size > 1000
    assert_legible(figures[0])
    assert_titled(figures[0], TITLE)
    above, below = figures[0].axes
    assert above.get_xlim() == below.get_xlim()
    rows = [label.get_text() for label in above.get_yticklabels()]
    assert rows == [label.get_text() for label in below.get_yticklabels()]
    assert len(rows) == ranks * pipelines == len(set(rows))


def test_without_known_bytes_there_is_no_course_of_memory(tmp_path: Path, figures: list[Figure]) -> None:
    draw_simulation(tmp_path / "x.png", TITLE, simulation(2, 2, 2, known=False))
    assert len(figures[0].axes) == 1


@pytest.mark.parametrize(
    ("limits", "sentence"),
    [
        (Limits([8 * GIB] * 2, [8 * GIB] * 2), "capacity 8 GiB"),
        (Limits([8 * GIB] * 2, [7 * GIB] * 2), "capacity 8 GiB less headroom: 7 GiB"),
        (Limits([8 * GIB, 6 * GIB], [7 * GIB, 5 * GIB]), "capacity of the device less headroom"),
        (Limits([80 * GIB] * 2, [80 * GIB] * 2), "capacity 80 GiB, far above the curves"),
    ],
)
def test_memory_over_time_names_capacity_and_peak(
    limits: Limits, sentence: str, tmp_path: Path, figures: list[Figure]
) -> None:
    """Beside the curves stood a number, which nothing said was the peak, and a dashed line called "usable" or none."""
    draw_simulation(tmp_path / "x.png", TITLE, simulation(2, 2, 2), limits)
    assert_legible(figures[0])
    below = figures[0].axes[1]
    legend = below.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["peak of the step", sentence]
    assert [text.get_text().partition(" ")[0] for text in below.texts] == ["peak", "peak"]
    dashed = [line for line in below.lines if line.get_linestyle() == "--"]
    assert len(dashed) == (0 if "far" in sentence else 2)
    assert below.get_xlabel() == "time [ms] from the start of the step"


def test_the_dot_lies_on_the_peak(tmp_path: Path, figures: list[Figure]) -> None:
    simulated = simulation(2, 2, 2)
    draw_simulation(tmp_path / "x.png", TITLE, simulated)
    courses = simulated.pipelines[0].rank_memory or simulated.pipelines[0].memory
    assert courses is not None
    dots = [line.get_xdata()[0] for line in figures[0].axes[1].lines if line.get_marker() == "o"]
    assert dots == [1e3 * max(course, key=lambda point: point[1])[0] for course in courses]


def test_the_title_of_a_step_names_model_devices_and_schedule() -> None:
    """The picture of a step said neither of what model nor of what schedule it is."""
    plan = Plan.of_cuts(4, (0, 2), schedule="1f1b", num_microbatches=8, model="vit", planner="budget")
    layers = [
        LayerProfile(f"l{n}", GIB, GIB if n else None, forward_seconds=0.1, backward_seconds=0.2) for n in range(4)
    ]
    profile = Profile(tuple(layers), conditions={"device": "cuda", "gpu": "t4"})
    step = simulate_plan(profile, plan, recompute=False)
    assert simulation_title(step, plan, profile) == (
        "One step of vit on a pipeline of 2 devices (cuda:t4), planner budget, schedule 1f1b, 8 microbatches"
    )
