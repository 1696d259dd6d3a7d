"""The record of a step: its measured peak, and that no line is lost together with its writer."""

from __future__ import annotations

import dataclasses
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from varuna_capslog.base import files
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.engine.interface import Verdict
from varuna_capslog.model.chain import TensorSpec
from varuna_capslog.training.journal import (
    Journal,
    RecentSteps,
    check_loggers,
    peak_record,
    score_line,
    step_bar,
    step_numbers,
    step_record,
)


def test_a_peak_is_recorded_with_the_shapes_of_the_largest_microbatch() -> None:
    """A peak holds for the sizes at which it was measured; without them it was compared with the largest input's."""
    sizes = [(2, 3, 40, 60), (2, 3, 64, 48), (2, 3, 50, 50)]
    microbatches = [
        {"images": TensorSpec(size), "sizes": TensorSpec((2, 2), torch.int64, requires_grad=False)} for size in sizes
    ]
    assert peak_record((7, 5), "a meter", microbatches) == {
        "peak_bytes": [7, 5],
        "peak_source": "a meter",
        "peak_input": {"images": [2, 3, 64, 48], "sizes": [2, 2]},
    }
    assert peak_record((7,), None, []) == {"peak_bytes": [7], "peak_source": None}


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
    files.append_jsonl(metrics, {"step": [2]})
    assert recent.missing(9) == ["line 2", "line 4"], "a damaged line is no step"


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
    rows = [(line["step"], line["generation"], line["world_size"]) for line in lines]
    assert rows == [(1, 4, 2), (2, 4, 2), (3, 4, 2), (4, 5, 1)]
    for log in (first, second):
        log.close()


def test_a_function_of_the_users_gets_the_numbers_until_it_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, dict[str, float]]] = []

    def take(numbers: dict[str, float], step: int) -> None:
        seen.append((step, dict(numbers)))
        if step == 3:
            raise OSError("no route to it")

    monkeypatch.setitem(sys.modules, "my_logger", SimpleNamespace(take=take))
    log = Journal(tmp_path, 5, 1, ["my_logger:take"])
    log.begin(True, 0, generation=0, world_size=1)
    for step in (1, 2, 3, 4):
        log.step({**record(step), "parts": {"boxes": 0.25}})
        log.scores(step, {"AP": 0.5, "per_class": {}})
    log.close()
    assert [step for step, _ in seen] == [1, 1, 2, 2, 3]
    assert seen[0][1] == {
        "train/loss": 1.0, "train/lr": 1e-3, "train/grad_norm": 1.0, "train/step_seconds": 0.1,
        "train/samples_per_second": 10.0, "parts/boxes": 0.25,
    }  # fmt: skip
    assert seen[1][1] == {"val/AP": 0.5}
    output = " ".join(capsys.readouterr().out.split())
    assert output.count("my_logger:take failed and gets no more of this run (OSError: no route to it)") == 1
    assert len(files.read_jsonl(tmp_path / "metrics.jsonl")) == 4, "the training's own record goes on"


def test_without_a_terminal_there_are_plain_lines_and_no_bar(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers whose output is a file need no library for terminals, which a machine with GPUs may lack."""
    monkeypatch.setitem(sys.modules, "rich", None)
    monkeypatch.setitem(sys.modules, "rich.progress", None)
    log = Journal(tmp_path, 5, 1)
    log.begin(True, 0, generation=0, world_size=1)
    for step in (1, 2):
        log.step(record(step))
    log.say("a long line " + 20 * "that is not broken ")
    log.close()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2, "the second step came within the ten seconds of the first"
    assert lines[0].startswith("step 1 of 5, epoch 1  loss 1.0000")
    assert lines[1].endswith("that is not broken ")


def test_a_skipped_step_has_no_norm_and_says_why() -> None:
    verdict = Verdict(3, {"loss": 2.0, "part": 1.0}, math.inf, 0.0, False, None, False, loss_scale=1024.0)
    line = step_record(verdict, 1e-3, 0.5, 0, 8)
    assert (line["grad_norm"], line["loss_scale"], line["skipped"]) == (None, 1024.0, True)
    assert step_numbers(line) == ["loss 2.0000", "lr 0.001", "16.0 samples/s", "skipped, since its gradients overflow"]
    applied = step_record(dataclasses.replace(verdict, grad_norm=1.5, scale=0.25), 1e-3, 0.5, 0, 8)
    assert (applied["grad_norm"], applied["skipped"], len(step_numbers(applied))) == (1.5, False, 4)
    plain = step_record(dataclasses.replace(verdict, scale=1.0, loss_scale=None), 1e-3, 0.5, 0, 8)
    assert {"loss_scale", "skipped"}.isdisjoint(plain)


def test_a_logger_that_is_not_there_is_said_before_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setitem(sys.modules, "my_logger", SimpleNamespace(take=print))
    with pytest.raises(CapslogError, match=r"train.loggers has wandb, which cannot be imported .*; pip install wandb"):
        check_loggers(["tensorboard", "wandb"])
    with pytest.raises(CapslogError, match="has no function 'taek'; did you mean 'take'"):
        check_loggers(["my_logger:taek"])


def test_scores_of_zero_are_said_to_be_expected_of_a_detector_in_its_first_steps() -> None:
    """A newcomer's first ten steps ended in a row of zeros without a word."""
    assert score_line(10, {"AP": 0.0, "AP50": 0.0}).endswith(
        "AP50 0.000  (as expected of a detector in its first steps)"
    )
    assert score_line(10, {"AP": 0.0, "AP50": 0.1}) == "step 10: AP 0.000  AP50 0.100"
    assert score_line(10, {"accuracy": 0.0}) == "step 10: accuracy 0.000"


@pytest.mark.parametrize(
    ("total", "max_seconds", "left"),
    [(None, None, ""), (None, 100.0, "0:01:30 left"), (40, None, "0:00:30 left"), (40, 15.0, "0:00:05 left")],
)
def test_the_bar_says_the_time_left_by_steps_or_by_seconds(
    total: int | None, max_seconds: float | None, left: str
) -> None:
    """A run that only seconds limited had no remaining time, and elapsed time had no name."""
    _, progress, task = step_bar(total, 0, max_seconds)
    now = [0.0]
    progress.get_time = lambda: now[0]
    progress.tasks[0]._get_time = progress.get_time
    progress.tasks[0].start_time = 0.0
    for step in (5, 10):
        now[0] = float(step)
        progress.update(task, completed=step)
    column = progress.columns[-1]
    assert str(column(progress.tasks[0])) == left  # type: ignore[operator]
