"""Writes the notice, lost and join lines of the run's events.jsonl from the entries of the store's log.

Every host reads the same log, so one host writes each line: the one that reported a loss, else the host of the member
in question. Changes of the generation (start, resume, morph) are written by the members that train.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from varuna_capslog.base import files
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.base.supervisor import last_step
from varuna_capslog.membership.entries import DeadEntry, GenerationEntry, NoticeEntry, read
from varuna_capslog.membership.roster import Roster

__all__ = ["EventWriter"]


class EventWriter:
    """Writes the events of one host's members.

    Args:
        host: its name in the run.
        offset: generation n of the store is n + offset in the run's files.
    """

    def __init__(self, run_dir: Path, host: str, offset: int) -> None:
        self._run_dir, self._host, self._offset = run_dir, host, offset
        self._noticed: dict[str, bool] = {}

    def take(self, entry: Mapping[str, Any], before: Roster) -> None:
        """Writes the event of a log entry; `before` is the roster without it. A full disk stops no supervisor."""
        number = before.generation.number
        match read(entry):
            case NoticeEntry(member, urgent) as notice if before.members.get(member) == self._host:
                if member in self._noticed and urgent <= self._noticed[member]:
                    return
                left = None if notice.deadline is None else max(0.0, notice.deadline - time.time())
                about = {"deadline": left, "source": notice.source}
                self._write("notice", number, member=member, host=self._host, urgent=urgent, **about)
                self._noticed[member] = urgent
            case DeadEntry(member, why, by) if member not in before.dead:
                where = before.members.get(member, self._host)
                if (by or where) == self._host:
                    self._write("lost", number, member=member, host=where, why=why)
            case GenerationEntry(record) if number:
                for name in record.members:
                    if before.members.get(name) == self._host and not before.was_named(name):
                        self._write("join", record.number, member=name, host=self._host)

    def _write(self, kind: str, generation: int, **details: Any) -> None:
        about = {"time": time.time(), "generation": generation + self._offset, "step": last_step(self._run_dir)}
        with contextlib.suppress(CapslogError):
            files.append_jsonl(self._run_dir / "events.jsonl", {"kind": kind, **about, **details})
