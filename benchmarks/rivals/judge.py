"""Judges the samples of a run: which were lost, which counted twice, and how many steps were computed again.

A run's steps are those whose effect the final weights hold. If a step was kept more than once, because a restart
went back to a checkpoint, the last kept attempt counts; the samples of an attempt are those of all workers that took
part in it.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["Verdict", "judge", "read_lines"]


class Verdict(NamedTuple):
    """Findings of the judge.

    Attributes:
        steps: number of steps of the final weights.
        lost: samples of the order that no step of the final weights has used, counted once per missing use.
        doubled: uses of samples beyond the order's, likewise.
        repeated: attempts beyond the first of each step: given up, or undone by going back to a checkpoint.
        finished: seconds of the wall clock (`time.time()`) when the last step was kept.
    """

    steps: int
    lost: int
    doubled: int
    repeated: int
    finished: float


def read_lines(folder: Path) -> list[dict[str, Any]]:
    """Return all complete lines of all workers."""
    lines = []
    for path in sorted(folder.glob("*.jsonl")):
        text = path.read_text()
        lines += [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
    return lines


def judge(lines: Iterable[Mapping[str, Any]], order: Sequence[Sequence[int]]) -> Verdict:
    """Compare the workers' log with the order of the samples.

    Args:
        lines: lines of `task.StepLog`.
        order: the samples that each step should use, from step 1 on.
    """
    tried: defaultdict[tuple[int, str], Counter[int]] = defaultdict(Counter)
    last: dict[int, tuple[float, str]] = {}
    for line in lines:
        if "tried" in line:
            tried[line["tried"], line["attempt"]].update(line["samples"])
        elif line["kept"] not in last or last[line["kept"]][0] < line["time"]:
            last[line["kept"]] = line["time"], line["attempt"]
    used: Counter[int] = Counter()
    for step, (_, attempt) in last.items():
        used += tried[step, attempt]
    wanted = Counter(sample for samples in order for sample in samples)
    return Verdict(
        steps=len(last),
        lost=(wanted - used).total(),
        doubled=(used - wanted).total(),
        repeated=len(tried) - len(last),
        finished=max((when for when, _ in last.values()), default=0.0),
    )
