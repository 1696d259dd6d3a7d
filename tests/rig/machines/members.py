"""Members of a chaos run, by the store's log so far, and signals to their processes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.rig.judge import Segment
from varuna_capslog.base import files
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.membership.entries import AskEntry, BrokenEntry, DeadEntry, GenerationEntry, Roster
from varuna_capslog.membership.generation import Member

__all__ = ["Members"]


class Members:
    """The members since the run was begun, or begun again.

    Attributes:
        roster: the members by the log.
        asked: members that wanted to join, with the time at which that was seen (seconds since the epoch).
        lost_at: time when each member was first seen to be considered dead, in the whole run (seconds since the epoch).
        joins: number of members that joined an existing generation, in the whole run.
    """

    def __init__(self, run_dir: Path) -> None:
        self.roster = Roster()
        self.asked: dict[Member, float] = {}
        self.lost_at: dict[Member, float] = {}
        self.joins = 0
        self._folder = run_dir / "workers"
        self._of: dict[int, tuple[Member, ...]] = {}
        self._known: set[Member] = set()

    def begin(self) -> None:
        """The run begins, or begins again: members of before are forgotten."""
        for stale in self._folder.glob("*.json"):
            stale.unlink()
        self.roster = Roster()
        self.asked.clear()
        self._of.clear()
        self._known.clear()

    def take(self, entry: Mapping[str, Any], now: float, segment: Segment) -> None:
        """Add the log's next entry, and a generation that it founds or aborts to `segment`.

        Args:
            now: seconds since the epoch.
        """
        match self.roster.take(entry):
            case GenerationEntry(record):
                segment.founded.append((record, now))
                self._of[record.number] = record.members
                new = set(record.members) - self._known
                self._known |= new
                self.joins += len(new) if record.number > 1 else 0
            case DeadEntry(member):
                self.lost_at.setdefault(member, now)
            case AskEntry(member):
                self.asked.setdefault(member, now)
            case BrokenEntry(generation) if segment.broken is not None:
                segment.broken.add(generation)

    def of(self, generation: int) -> tuple[Member, ...]:
        """The voters of a generation; () where the log has not named it yet."""
        return self._of.get(generation, ())

    def pid_of(self, member: Member) -> int | None:
        """The process of a member."""
        try:
            return int(files.read_json(self._folder / f"{member}.json")["pid"])
        except (CapslogError, KeyError, ValueError):
            return None

    def voters(self) -> list[Member]:
        """Return the newest generation's members that are neither dead nor about to leave, in a fixed order."""
        roster = self.roster
        return sorted(
            member
            for member in roster.generation.members
            if member not in roster.dead and member not in roster.noticed and self.pid_of(member) is not None
        )

    def has_process(self, pid: int) -> bool:
        """Return True if this is the process of a member."""
        return any(self.pid_of(member) == pid for member in self.roster.members)

    def signal(self, member: Member, number: int) -> None:
        """Sends a signal to a member that is not known to be dead."""
        pid = self.pid_of(member)
        if pid is not None and member not in self.roster.dead:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
