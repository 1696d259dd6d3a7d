"""Pictures of comparisons and replays: no label overlaps another, and what they show is drawn."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from tests.reports.legible import assert_legible
from varuna_capslog.planning.comparison import Row
from varuna_capslog.planning.trace_replay import Deployment, TraceEvent, replay
from varuna_capslog.plans.plan import Plan
from varuna_capslog.reports.curves import draw_comparison, draw_replay

GIB = 2**30


def test_a_comparison_keeps_a_row_for_who_has_no_answer(tmp_path: Path, figures: list[Figure]) -> None:
    rows = [
        Row("varuna", Plan.of_cuts(4, (0, 2)), 5 * GIB, -GIB, 0.2, 0.3, 3e-6),
        Row("mcap-bf", reason="too many cut lists"),
        Row("exact", Plan.of_cuts(4, (0, 1)), 3 * GIB, GIB, 0.1, 0.2, 0.004),
    ]
    draw_comparison(tmp_path / "x.png", rows)
    assert_legible(figures[0])
    peak_axes, step_axes, search_axes = figures[0].axes
    assert [text.get_text() for text in peak_axes.texts] == ["5.00", "none", "3.00"]
    assert [text.get_text() for text in step_axes.texts] == ["200", "none", "100"]
    assert [label.get_text() for label in peak_axes.get_yticklabels()] == ["varuna", "mcap-bf", "exact"]
    assert "capacity" in peak_axes.get_xlabel()
    assert search_axes.get_xscale() == "log"


def test_a_comparison_of_nothing_known(tmp_path: Path, figures: list[Figure]) -> None:
    draw_comparison(tmp_path / "x.png", [Row("exact", reason="no profile"), Row("varuna", reason="neither")])
    assert_legible(figures[0])


def test_replays(tmp_path: Path, figures: list[Figure]) -> None:
    events = [TraceEvent(0.0, "add", f"n{n}") for n in range(9)]
    events += [TraceEvent(600.0 * n, "remove", f"n{n}") for n in range(1, 9)]

    def deployed(devices: int) -> Deployment | None:
        return Deployment(devices * 3.0, devices - devices % 2, 0.001) if devices > 2 else None

    deployments = replay(events, deployed)
    draw_replay(tmp_path / "x.png", deployments)
    assert_legible(figures[0])
    above, below = figures[0].axes
    assert above.get_xlim() == (0.0, 4800 / 3600)
    assert below.get_ylim()[1] >= 27
