"""Predicted and measured peaks are compared at one input size only."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.reports.page_reader import Page
from tests.reports.runs import write_run
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.config.reading import Config
from varuna_capslog.plans.plan import Plan, read_plan, write_plan
from varuna_capslog.profiles.record import Profile, read_profile, write_profile
from varuna_capslog.reports.markup import UNKNOWN
from varuna_capslog.reports.memory import size_text
from varuna_capslog.reports.page import write_report

GIB = 2**30
LARGEST, USUAL = {"images": [2, 3, 64, 64]}, {"images": [2, 3, 48, 56]}


class Rehearsals:
    """Rehearsal stub: predicts 3 and 5 GiB for every size and records its calls."""

    def __init__(self) -> None:
        self.asked: list[tuple[list[int], dict[str, list[int]]]] = []

    def __call__(self, config: Config, plan: Plan, shapes: Mapping[str, Sequence[int]]) -> list[int]:
        self.asked.append((list(plan.cut_list), {name: list(sizes) for name, sizes in shapes.items()}))
        return [3 * GIB, 5 * GIB]


def impossible(config: Config, plan: Plan, shapes: Mapping[str, Sequence[int]]) -> list[int]:
    raise CapslogError("the data are not here")


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Return a run on two stages whose profile holds for the largest input."""
    plan = write_run(tmp_path / "run", num_layers=6, stages=2, steps=60, evaluations=2, microbatches=4)
    path = tmp_path / "run" / "profile.json"
    profile = read_profile(path)
    conditions = {**profile.conditions, "input": LARGEST}
    write_profile(path, Profile(profile.layers, profile.model, profile.source, conditions))
    assert plan.stage_bytes is not None
    return tmp_path / "run"


def measured_at(run_dir: Path, *lines: tuple[list[int], dict[str, Any] | None]) -> None:
    """Write these measured peaks and sizes into the run's metrics."""
    rows = [
        {"step": step, "loss": 1.0, "generation": 0, "peak_bytes": peaks}
        | ({} if shapes is None else {"peak_input": shapes})
        for step, (peaks, shapes) in enumerate(lines, 1)
    ]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_peaks_measured_at_other_sizes_are_predicted_for_those(run_dir: Path) -> None:
    """The quickstart's report gave an error of +13 % for its first stage, since the plan predicts the largest input
    and the measured step had a smaller one.
    """
    measured_at(run_dir, ([2 * GIB, 5 * GIB], USUAL))
    rehearse = Rehearsals()
    page = Page(write_report(run_dir, rehearse))
    cuts = json.loads((run_dir / "plan-0.json").read_text())["cuts"]
    assert rehearse.asked == [(cuts, USUAL)]
    assert page.column("peak-table", "predicted for the measured size") == ["3.00", "5.00"]
    assert page.column("peak-table", "error") == ["+50.0 %", "+0.0 %"]
    text = page.texts["memory"]
    assert "at images 2x3x48x56" in text
    assert "for the largest input, images 2x3x64x64" in text
    assert "predicted for the measured size less measured" in text


def test_a_rank_with_two_stages_shows_its_prediction(run_dir: Path) -> None:
    """The tutorial's report had no predicted peaks, and said that the plan predicts none: only its ranks do."""
    plan = read_plan(run_dir / "plan-0.json")
    spans, ranks = [(0, 2), (2, 4), (4, 6)], (0, 1, 0)
    stages = tuple(
        dataclasses.replace(plan.stages[0], layers=(span,), ranks=(rank,), bytes=None)
        for span, rank in zip(spans, ranks, strict=True)
    )
    uses = tuple(dataclasses.replace(use, bytes=size * GIB) for use, size in zip(plan.ranks, (4, 3), strict=True))
    write_plan(run_dir / "plan-0.json", dataclasses.replace(plan, stages=stages, ranks=uses))
    measured_at(run_dir, ([2 * GIB, 3 * GIB, 2 * GIB], USUAL))
    page = Page(write_report(run_dir, Rehearsals()))
    assert page.column("peak-table", "predicted") == ["4.00", "3.00", "4.00"]
    assert page.column("peak-table", "error") == [UNKNOWN] * 3
    assert "predicts no bytes" not in page.texts["memory"]


def test_each_stage_is_compared_at_the_size_of_its_own_peak(run_dir: Path) -> None:
    measured_at(run_dir, ([2 * GIB, 5 * GIB], USUAL), ([1 * GIB, 8 * GIB], LARGEST))
    rehearse = Rehearsals()
    page = Page(write_report(run_dir, rehearse))
    assert len(rehearse.asked) == 1
    predicted = json.loads((run_dir / "plan-0.json").read_text())["stage_bytes"]
    unit = 1024**2 if page.column("peak-table", "measured")[0] == "2,048.00" else GIB
    assert page.column("peak-table", "predicted for the measured size") == [
        f"{3 * GIB / unit:,.2f}",
        f"{predicted[1] / unit:,.2f}",
    ]


@pytest.mark.parametrize("shapes", [LARGEST, None])
def test_the_plans_own_prediction_is_compared_at_its_own_size_and_where_no_size_is_recorded(
    run_dir: Path, shapes: dict[str, list[int]] | None
) -> None:
    measured_at(run_dir, ([2 * GIB, 5 * GIB], shapes))
    rehearse = Rehearsals()
    page = Page(write_report(run_dir, rehearse))
    assert rehearse.asked == []
    predicted = json.loads((run_dir / "plan-0.json").read_text())["stage_bytes"]
    errors = [100 * (peak / measured - 1) for peak, measured in zip(predicted, [2 * GIB, 5 * GIB], strict=True)]
    assert page.column("peak-table", "error") == [f"{error:+.1f} %" for error in errors]


@pytest.mark.parametrize("rehearse", [impossible, None])
def test_sizes_that_differ_are_not_compared_where_nothing_predicts_them(run_dir: Path, rehearse: Any) -> None:
    """The page showed the text of the exception: unknown schedule 'auto'; use one of gpipe, ..."""
    measured_at(run_dir, ([2 * GIB, 5 * GIB], USUAL))
    page = Page(write_report(run_dir, rehearse))
    assert page.column("peak-table", "error") == [UNKNOWN] * 2
    assert "measured at another input size than the plan's, and no peaks could be predicted" in page.texts["memory"]
    assert "the data are not here" not in page.texts["memory"]


def test_shapes_are_worded() -> None:
    assert size_text({"images": (8, 3, 72, 72), "scale": ()}) == "images 8x3x72x72, scale scalar"
