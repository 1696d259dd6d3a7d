"""Reads the records of a chaos run's members while they write: generations they open and steps they apply."""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path
from typing import Any

from tests.rig.judge import Segment, Stepped, read_segment
from tests.rig.watch import records_folder

__all__ = ["Records"]

_LIST_SECONDS = 0.05
_READ_ALL_SECONDS = 1.0
_SILENT_SECONDS = 3.0


class Records:
    """The members' lines so far.

    Attributes:
        segments: one for each time that the run was begun, the newest last; see `judge.Segment`.
        step: the newest step that any member has applied.
        step_times: seconds since the epoch at which each step of a generation was first seen applied, by the member's
            own clock.
    """

    def __init__(self, run_dir: Path) -> None:
        self.segments: list[Segment] = []
        self.step = 0
        self.step_times: list[float] = []
        self._folder = records_folder(run_dir)
        self._seen: set[tuple[int, int]] = set()
        self._ends: dict[str, int] = {}
        self._wrote: dict[str, float] = {}
        self._listed = self._read_all = 0.0

    @property
    def segment(self) -> Segment:
        """The newest one."""
        return self.segments[-1]

    @property
    def number(self) -> int:
        """Number of the newest segment, from 1; 0 where there is none."""
        return len(self.segments)

    def begin(self, first: int) -> None:
        """The run begins, or begins again, with the checkpoint of the step `first`."""
        self.segments.append(Segment(first, broken=set()))
        self._seen.clear()

    def read(self, everything: bool = False) -> list[Stepped]:
        """The steps that were written down since the last call.

        Args:
            everything: also look into files that have been silent for long, which are otherwise looked into once a
                second: most of their members have ended, and of thousands every one would be opened at each call.
        """
        now = time.monotonic()
        if everything or now - self._listed > _LIST_SECONDS:
            self._listed = now
            with contextlib.suppress(FileNotFoundError):
                for name in os.listdir(self._folder):
                    if name.startswith(f"{self.number}-"):
                        self._ends.setdefault(name, 0)
        everything = everything or now - self._read_all > _READ_ALL_SECONDS
        if everything:
            self._read_all = now
        lines: list[dict[str, Any]] = []
        for name in self._ends:
            if everything or now - self._wrote.get(name, now) <= _SILENT_SECONDS:
                lines += self._new_lines(name, now)
        return self._take(lines)

    def _new_lines(self, name: str, now: float) -> list[dict[str, Any]]:
        position = self._ends[name]
        with open(self._folder / name, "rb") as file:
            file.seek(position)
            unread = file.read()
        complete_bytes = unread.rfind(b"\n") + 1
        self._ends[name] = position + complete_bytes
        if complete_bytes or name not in self._wrote:
            self._wrote[name] = now
        return [json.loads(line) for line in unread[:complete_bytes].splitlines()]

    def _take(self, lines: list[dict[str, Any]]) -> list[Stepped]:
        if not lines:
            return []
        before = len(self.segment.stepped)
        read_segment(lines, self.segment)
        new_steps = self.segment.stepped[before:]
        for event in sorted(new_steps, key=lambda event: event.time):
            if (event.step, event.generation) not in self._seen:
                self._seen.add((event.step, event.generation))
                self.step_times.append(event.time)
            self.step = max(self.step, event.step)
        return new_steps
