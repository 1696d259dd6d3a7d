"""Work of each rank: planned beside measured."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tests.reports.page_reader import Page
from tests.reports.runs import write_run
from varuna_capslog.planning.simulation import simulate_plan
from varuna_capslog.profiles.record import read_profile
from varuna_capslog.reports.markup import UNKNOWN
from varuna_capslog.reports.page import write_report


def measured(run_dir: Path, busy: Sequence[Sequence[float]]) -> None:
    lines = [json.dumps({"step": step + 1, "busy_seconds": row}) + "\n" for step, row in enumerate(busy)]
    (run_dir / "metrics.jsonl").write_text("".join(lines))


def test_ranks_that_are_slower_than_planned_are_seen(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    plan = write_run(run_dir, num_layers=6, stages=2, steps=9, evaluations=1, microbatches=4)
    assert "busy-table" not in Page(write_report(run_dir)).tables, "this run measured nothing"
    profile = read_profile(run_dir / "profile.json")
    planned = simulate_plan(profile, plan).pipelines[0].timeline.busy_seconds
    measured(run_dir, [[planned[0], (20.0 if number == 3 else 2.0) * planned[1]] for number in range(9)])
    page = Page(write_report(run_dir))
    assert page.column("busy-table", "stages") == ["0", "1"]
    assert page.column("busy-table", "planned") != page.column("busy-table", "measured (median)")
    assert page.column("busy-table", "measured / planned") == ["1.00", "2.00"]
    (run_dir / "profile.json").unlink()
    page = Page(write_report(run_dir))
    assert page.column("busy-table", "planned") == [UNKNOWN, UNKNOWN]


def test_two_replicas_have_the_stages_of_the_one_pipeline_of_the_plan(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    write_run(run_dir, num_layers=6, stages=2, steps=4, evaluations=1, microbatches=4)
    measured(run_dir, [[1.0, 2.0, 3.0, 4.0]] * 4)
    page = Page(write_report(run_dir))
    assert page.column("busy-table", "stages") == ["0", "1", "0", "1"]
    planned = page.column("busy-table", "planned")
    assert planned[:2] == planned[2:]
