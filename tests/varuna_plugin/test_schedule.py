"""The task lists equal those that Varuna's own generator printed.

`recorded_schedules.json` was recorded once from `genschedule`, compiled outside this project: all lists of small
pipelines (f forward, r recomputation, b backward, then the microbatch), and the first 16 digits of the SHA-256 of what
it prints for all stages of large ones, a line each.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import pytest

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.varuna_plugin.schedule import varuna_tasks

RECORDED = json.loads((Path(__file__).parent / "recorded_schedules.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("size", RECORDED["lists"])
def test_small_pipelines_list_by_list(size: str) -> None:
    stages, microbatches = map(int, size.split(","))
    for stage, text in enumerate(RECORDED["lists"][size]):
        recorded = [("frb".index(kind), int(number)) for kind, number in re.findall(r"([frb])(\d+)", text)]
        assert varuna_tasks(microbatches, stage, stages) == recorded


def test_large_pipelines_by_digest() -> None:
    assert len(RECORDED["digests"]) == 72
    for size, expected in RECORDED["digests"].items():
        stages, microbatches = map(int, size.split(","))
        digest = hashlib.sha256()
        for stage in range(stages):
            tasks = varuna_tasks(microbatches, stage, stages)
            digest.update(("".join(f"{task},{number};" for task, number in tasks) + "\n").encode())
        assert digest.hexdigest()[:16] == expected, size


@pytest.mark.parametrize(("microbatches", "stage", "stages"), [(0, 0, 1), (4, 2, 2), (4, -1, 2)])
def test_numbers_that_make_no_pipeline_are_refused(microbatches: int, stage: int, stages: int) -> None:
    with pytest.raises(CapslogError, match="at least one microbatch and a stage"):
        varuna_tasks(microbatches, stage, stages)
