"""No line of metrics.jsonl is lost together with the rank that should have written it."""

from __future__ import annotations

from pathlib import Path

from varuna_capslog.base import files
from varuna_capslog.training.journal import Journal
from varuna_capslog.training.recent_steps import RecentSteps


def record(step: int) -> dict[str, object]:
    return {
        "step": step, "epoch": 0, "loss": 1.0 / step, "parts": {}, "lr": 1e-3, "grad_norm": 1.0, "step_seconds": 0.1,
        "samples_per_second": 10.0,
    }  # fmt: skip


def test_what_the_file_lacks_is_missing_and_no_more(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    recent: RecentSteps[str] = RecentSteps(metrics)
    assert recent.missing(9) == []
    for step in (1, 2, 3, 4):
        recent.add(step, f"line {step}")
    assert recent.missing(9) == ["line 2", "line 3", "line 4"], "without a file all that is kept is missing"
    files.append_jsonl(metrics, {"step": 3})
    assert recent.missing(9) == ["line 2", "line 4"]
    assert recent.missing(3) == ["line 2"], "step 4 was taken back: it is made again"


def test_a_rank_that_begins_to_write_adds_the_lines_of_the_one_that_is_lost(tmp_path: Path) -> None:
    """The first rank was lost after step 3 was applied everywhere and before its line was written."""
    first, second = (Journal(tmp_path, total_steps=5, log_every=10) for _ in range(2))
    first.begin(True, 0, generation=4, world_size=2)
    second.begin(False, 0, generation=4, world_size=2)
    for step in (1, 2, 3):
        if step < 3:
            first.step(record(step))
        second.step(record(step))
    assert (first.writes, second.writes) == (True, False)
    second.begin(True, 3, generation=5, world_size=1)
    second.step(record(4))
    lines = files.read_jsonl(tmp_path / "metrics.jsonl")
    found = [(line["step"], line["generation"], line["world_size"]) for line in lines]
    assert found == [(1, 4, 2), (2, 4, 2), (3, 4, 2), (4, 5, 1)]
    for log in (first, second):
        log.close()
