"""Pictures of comparisons and replays: no label overlaps another, and what they show is drawn."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from tests.reports.legible import TITLE, assert_legible, assert_titled
from tests.sweeps import some
from varuna_capslog.planning.comparison import Row
from varuna_capslog.planning.simulation import RankStep
from varuna_capslog.planning.trace_replay import Deployment, TraceEvent, replay
from varuna_capslog.plans.plan import Plan
from varuna_capslog.reports.curves import FrontPoint, draw_comparison, draw_front, draw_ranks, draw_replay

GIB = 2**30


def test_a_comparison_keeps_a_row_for_who_has_no_answer(tmp_path: Path, figures: list[Figure]) -> None:
    rows = [
        Row("varuna", Plan.of_cuts(4, (0, 2)), 5 * GIB, -GIB, 0.2, 0.3, 3e-6),
        Row("mcap-bf", reason="too many cut lists"),
        Row("exact", Plan.of_cuts(4, (0, 1)), 3 * GIB, GIB, 0.1, 0.2, 0.004),
    ]
    draw_comparison(tmp_path / "x.png", TITLE, rows, [4 * GIB] * 2)
    assert_legible(figures[0])
    assert_titled(figures[0], TITLE)
    peak_axes, step_axes, search_axes = figures[0].axes
    assert [text.get_text() for text in peak_axes.texts] == ["5.00", "none", "3.00"]
    assert [text.get_text() for text in step_axes.texts] == ["200", "none", "100"]
    assert [label.get_text() for label in peak_axes.get_yticklabels()] == ["varuna", "mcap-bf", "exact"]
    assert "capacity" in peak_axes.get_xlabel()
    assert search_axes.get_xscale() == "log"


def test_two_plans_stand_beside_each_other_on_every_rank(tmp_path: Path, figures: list[Figure]) -> None:
    plans = {
        name: [RankStep(0, rank, [rank], 0.2 + rank / 10, 0.1, [1], (3 + rank) * GIB) for rank in range(4)]
        for name in ("megatron layout", "planner throughput")
    }
    draw_ranks(tmp_path / "x.png", TITLE, plans, [8 * GIB] * 4)
    assert_legible(figures[0])
    assert_titled(figures[0], TITLE)
    peak_axes, busy_axes = figures[0].axes
    assert [round(bar.get_height()) for bar in peak_axes.patches] == [3, 4, 5, 6] * 2
    assert [round(bar.get_height()) for bar in busy_axes.patches] == [200, 300, 400, 500] * 2
    assert [line.get_ydata()[0] for line in peak_axes.lines] == [8]  # type: ignore[index]


def test_planners_with_the_same_plan_share_a_row(tmp_path: Path, figures: list[Figure]) -> None:
    """Nine of 17 planners had the same bar, one below the other."""
    plan = Plan.of_cuts(4, (0, 2))
    rows = [
        Row("budget", plan, 5 * GIB, GIB, 0.2, 0.3, 0.5),
        Row("exact", Plan.of_cuts(4, (0, 1)), 3 * GIB, GIB, 0.1, 0.2, 0.004),
        Row("vpipe", dataclasses.replace(plan, planner="vpipe"), 5 * GIB, GIB, 0.2, 0.3, 2.0),
        Row("joint", plan, 5 * GIB, GIB, 0.4, 0.3, None),
    ]
    draw_comparison(tmp_path / "x.png", TITLE, rows)
    assert_legible(figures[0])
    peak_axes, step_axes, search_axes = figures[0].axes
    assert [label.get_text() for label in peak_axes.get_yticklabels()] == ["budget, vpipe", "exact", "joint"]
    assert [text.get_text() for text in step_axes.texts] == ["200", "100", "400"]
    assert [text.get_text() for text in search_axes.texts] == ["500 ms to 2.00 s", "4.00 ms", "unknown"]


@pytest.mark.parametrize("longest", some([1e-5, 0.25, 7000.0, 9e-3, 30.0], 3))
@pytest.mark.parametrize("span", some([1.0, 1e7, 5.0, 1e3], 2))
def test_the_numbers_of_a_comparison_do_not_overlap(
    longest: float, span: float, tmp_path: Path, figures: list[Figure]
) -> None:
    """The axis of search times read "10000100000": two numbers, one over the other."""
    names = ["exact", "capslog", "capslog-tb", "mcap-bf", "varuna", "gpipe", "gpipe-size"]
    alike = [Row(name, Plan.of_cuts(4, (0, 2)), 5 * GIB, GIB, 0.2, 0.3, longest / span) for name in names]
    rows = [*alike, Row("joint", Plan.of_cuts(4, (0, 1)), 100 * GIB, GIB, 9.0, 0.1, longest)]
    draw_comparison(tmp_path / "x.png", TITLE, rows, [101 * GIB])
    assert_legible(figures[0])
    search_axes = figures[0].axes[2]
    left, right = search_axes.get_xlim()
    assert [place for place in search_axes.get_xticks() if left <= place <= right]


@pytest.mark.parametrize("limit", [GIB, 100 * GIB])
def test_a_capacity_far_above_a_front_is_named_not_drawn(limit: int, tmp_path: Path, figures: list[Figure]) -> None:
    """A capacity of 14.5 GiB pressed all points of a front of 0.7 GiB into the left edge."""
    front = [FrontPoint(GIB // 2, 2.0, 1.5, False), FrontPoint(GIB, 1.0, 1.0, True)]
    draw_front(tmp_path / "x.png", TITLE, front, "budget", limit)
    assert_legible(figures[0])
    assert_titled(figures[0], TITLE)
    axes = figures[0].axes[0]
    assert ("100 GiB, lies far to the right" in axes.get_xlabel()) == (limit > GIB)
    assert axes.get_xlim()[1] < 2
    texts = [text.get_text() for text in figures[0].legends[0].get_texts()]
    assert ("capacity" in texts) == (limit == GIB)


def test_a_comparison_of_nothing_known(tmp_path: Path, figures: list[Figure]) -> None:
    draw_comparison(tmp_path / "x.png", TITLE, [Row("exact", reason="no profile"), Row("varuna", reason="neither")])
    assert_legible(figures[0])
    assert_titled(figures[0], TITLE)


def test_replays(tmp_path: Path, figures: list[Figure]) -> None:
    events = [TraceEvent(0.0, "add", f"n{n}") for n in range(9)]
    events += [TraceEvent(600.0 * n, "remove", f"n{n}") for n in range(1, 9)]

    def deployed(devices: int) -> Deployment | None:
        return Deployment(devices * 3.0, devices - devices % 2, 0.001) if devices > 2 else None

    deployments = replay(events, deployed)
    draw_replay(tmp_path / "x.png", TITLE, deployments)
    assert_legible(figures[0])
    assert_titled(figures[0], TITLE)
    above, below = figures[0].axes
    assert above.get_xlim() == (0.0, 4800 / 3600)
    assert below.get_ylim()[1] >= 27
