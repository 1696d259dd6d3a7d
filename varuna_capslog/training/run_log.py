"""The record of a run, as every rank sees it: one rank keeps the journal, and that rank may change.

Every rank hands its steps, evaluations and events to its `RunLog`; only that of the rank that writes does something.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from varuna_capslog.training.journal import Journal
from varuna_capslog.training.recent_steps import RecentSteps

__all__ = ["RunLog"]


class RunLog:
    """One rank's side of the record.

    Args:
        total_steps: where the progress bar ends; None if only time limits the run.
        log_every: steps between refreshes of terminal and TensorBoard.
    """

    def __init__(self, run_dir: Path, total_steps: int | None, log_every: int) -> None:
        self._run_dir, self._total_steps, self._log_every = run_dir, total_steps, log_every
        self._journal: Journal | None = None
        # with the generation and the number of members that made the step
        self._recent: RecentSteps[tuple[int, int, Mapping[str, Any]]] = RecentSteps(run_dir / "metrics.jsonl")
        self._generation = self._world_size = 0

    @property
    def writes(self) -> bool:
        """Whether this rank is the one that writes."""
        return self._journal is not None

    def begin(self, writes: bool, base: int, generation: int, world_size: int) -> None:
        """A generation begins after step `base`; a rank that begins to write adds the lines that are missing."""
        self._generation, self._world_size = generation, world_size
        if not writes:
            self.close()
        elif self._journal is not None:
            self._journal.change(generation, world_size)
        else:
            journal = Journal(self._run_dir, self._total_steps, base + 1, generation, world_size, self._log_every)
            for number, members, record in self._recent.missing(base):
                journal.change(number, members)
                journal.step(record)
            journal.change(generation, world_size)
            self._journal = journal

    def step(self, record: Mapping[str, Any]) -> None:
        """One step's line of metrics.jsonl, as `journal.step_record` has it."""
        self._recent.add(int(record["step"]), (self._generation, self._world_size, record))
        if self._journal is not None:
            self._journal.step(record)

    def scores(self, step: int, scores: Mapping[str, Any]) -> None:
        """One evaluation."""
        if self._journal is not None:
            self._journal.scores(step, scores)

    def event(self, kind: str, **details: Any) -> None:
        """One line of events.jsonl."""
        if self._journal is not None:
            self._journal.event(kind, **details)

    def say(self, text: str) -> None:
        """One line on the terminal."""
        if self._journal is not None:
            self._journal.say(text)

    def close(self) -> None:
        """Stops the progress bar; this rank writes no more until it begins again."""
        if self._journal is not None:
            self._journal.close()
            self._journal = None
