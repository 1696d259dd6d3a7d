"""No label lies on another one in the pictures of simulated steps, comparisons and replays; what they show is drawn."""

from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib.figure import Figure

from tests.reports.test_pictures import assert_legible, figures  # noqa: F401  (a fixture)
from varuna_capslog.planners.seconds import Link
from varuna_capslog.planning.comparison import Row
from varuna_capslog.planning.simulation import UPDATE_RATE, Simulation, simulate_plan
from varuna_capslog.planning.trace_replay import Deployment, TraceEvent, replay
from varuna_capslog.plans.plan import Plan, PlanStage
from varuna_capslog.profiles.record import LayerProfile, Profile
from varuna_capslog.reports.forecasts import draw_comparison, draw_replay
from varuna_capslog.reports.gantt import draw_simulation

GIB = 2**30


def simulation(stages: int, microbatches: int, ranks: int, pipelines: int = 1, known: bool = True) -> Simulation:
    parts = {"static_bytes": GIB, "saved_bytes": GIB // 4} if known else {}
    layers = [
        LayerProfile(
            f"l{n}", 3 * GIB, GIB if n else None, boundary_bytes=2**20, parameter_bytes=2**26,
            forward_seconds=0.01 * (1 + n % 3), backward_seconds=0.03, **parts,  # type: ignore[arg-type]
        )
        for n in range(stages)
    ]  # fmt: skip
    placed = [
        PlanStage(number, ((stage, stage + 1),), (number * ranks + stage % ranks,))
        for number in range(pipelines)
        for stage in range(stages)
    ]
    plan = Plan(stages, tuple(range(stages)), num_microbatches=microbatches * pipelines, placed=tuple(placed))
    return simulate_plan(
        Profile(tuple(layers), conditions={UPDATE_RATE: 1e-10}), plan, schedule="1f1b", recompute=False, link=Link(1e9)
    )


@pytest.mark.parametrize(
    ("stages", "microbatches", "ranks", "pipelines"),
    [(1, 1, 1, 1), (4, 8, 4, 1), (4, 4, 2, 1), (8, 16, 8, 1), (3, 4, 3, 2), (24, 8, 24, 1)],
)
def test_simulations(
    stages: int,
    microbatches: int,
    ranks: int,
    pipelines: int,
    tmp_path: Path,
    figures: list[Figure],  # noqa: F811
) -> None:
    found = simulation(stages, microbatches, ranks, pipelines)
    draw_simulation(tmp_path / "x.png", found, [16 * GIB] * ranks * pipelines)
    assert (tmp_path / "x.svg").stat().st_size > 1000
    assert_legible(figures[0])
    above, below = figures[0].axes
    assert above.get_xlim() == below.get_xlim()
    rows = [label.get_text() for label in above.get_yticklabels()]
    assert rows == [label.get_text() for label in below.get_yticklabels()]
    assert len(rows) == ranks * pipelines == len(set(rows))


def test_without_known_bytes_there_is_no_course_of_memory(tmp_path: Path, figures: list[Figure]) -> None:  # noqa: F811
    draw_simulation(tmp_path / "x.png", simulation(2, 2, 2, known=False))
    assert len(figures[0].axes) == 1


def test_a_comparison_keeps_a_row_for_who_has_no_answer(tmp_path: Path, figures: list[Figure]) -> None:  # noqa: F811
    rows = [
        Row("varuna", Plan(4, (0, 2)), 5 * GIB, -GIB, 0.2, 0.3, 3e-6),
        Row("mcap-bf", reason="too many cut lists"),
        Row("exact", Plan(4, (0, 1)), 3 * GIB, GIB, 0.1, 0.2, 0.004),
    ]
    draw_comparison(tmp_path / "x.png", rows)
    assert_legible(figures[0])
    left, middle, right = figures[0].axes
    assert [text.get_text() for text in left.texts] == ["5.00", "none", "3.00"]
    assert [text.get_text() for text in middle.texts] == ["200", "none", "100"]
    assert [label.get_text() for label in left.get_yticklabels()] == ["varuna", "mcap-bf", "exact"]
    assert "capacity" in left.get_xlabel()
    assert right.get_xscale() == "log"


def test_a_comparison_of_nothing_known(tmp_path: Path, figures: list[Figure]) -> None:  # noqa: F811
    draw_comparison(tmp_path / "x.png", [Row("exact", reason="no profile"), Row("varuna", reason="neither")])
    assert_legible(figures[0])


def test_replays(tmp_path: Path, figures: list[Figure]) -> None:  # noqa: F811
    events = [TraceEvent(0.0, "add", f"n{n}") for n in range(9)]
    events += [TraceEvent(600.0 * n, "remove", f"n{n}") for n in range(1, 9)]

    def deployed(devices: int) -> Deployment | None:
        return Deployment(devices * 3.0, devices - devices % 2, 0.001) if devices > 2 else None

    found = replay(events, deployed)
    draw_replay(tmp_path / "x.png", found)
    assert_legible(figures[0])
    above, below = figures[0].axes
    assert above.get_xlim() == (0.0, 4800 / 3600)
    assert below.get_ylim()[1] >= 27
