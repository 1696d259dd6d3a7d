"""Judging the runs of benchmarks."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

RIVALS = Path(__file__).parents[1] / "benchmarks" / "rivals" / "judge.py"


def _judge() -> ModuleType:
    spec = importlib.util.spec_from_file_location("judge_of_rivals", RIVALS)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _step(step: int, attempt: str, when: float, *workers: list[int]) -> list[dict]:
    tried = [{"tried": step, "attempt": attempt, "samples": samples, "time": when} for samples in workers]
    return [*tried, {"kept": step, "attempt": attempt, "time": when + 0.5}]


def test_samples_of_restarts_count_once_and_their_steps_as_repeated():
    order = [[1, 2, 3, 4], [5, 6, 7, 8]]
    lines = [
        *_step(1, "a", 0.0, [1, 2], [3, 4]),
        *_step(2, "a", 1.0, [5, 6], [7, 8]),
        {"tried": 3, "attempt": "a", "samples": [9], "time": 2.0},  # given up
        *_step(2, "b", 3.0, [5, 6, 7, 8]),  # made again from the checkpoint of step 1
    ]
    verdict = _judge().judge(lines[:7], order)
    assert verdict[:4] == (2, 0, 0, 1)
    verdict = _judge().judge(lines, order)
    assert verdict[:4] == (2, 0, 0, 2)
    assert verdict.finished == 3.5


def test_lost_and_doubled_samples_are_found():
    order = [[1, 2, 3, 4], [5, 6, 7, 8]]
    lost = [*_step(1, "a", 0.0, [1, 2], [3, 4]), *_step(2, "b", 1.0, [5, 6])]
    assert _judge().judge(lost, order)[:4] == (2, 2, 0, 0)
    doubled = [*_step(1, "a", 0.0, [1, 2], [3, 4]), *_step(2, "b", 1.0, [5, 6], [7, 8], [1])]
    assert _judge().judge(doubled, order)[:4] == (2, 0, 1, 0)
    instead = [*_step(1, "a", 0.0, [1, 2], [3, 4]), *_step(2, "b", 1.0, [5, 6], [1, 2])]
    assert _judge().judge(instead, order)[:4] == (2, 2, 2, 0)
