"""What the store's log says of the membership, for people: notice, lost and join lines in the run's events.jsonl.

Every host reads the same log, so every entry has one host that writes it down: the one that reported a loss, else the
host of the member in question. Changes of the generation (start, resume, morph) are written by those who train.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from varuna_capslog.base import files
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.membership.entries import DeadEntry, GenerationEntry, NoticeEntry, read
from varuna_capslog.membership.roster import Roster

__all__ = ["EventWriter"]

_TAIL_BYTES = 1 << 14


class EventWriter:
    """Writes what concerns one host's members.

    Args:
        host: its name in the run.
        offset: generation n of the store is n + offset in the run's files.
    """

    def __init__(self, run_dir: Path, host: str, offset: int) -> None:
        self._run_dir, self._host, self._offset = run_dir, host, offset
        self._noticed: dict[str, bool] = {}

    def take(self, entry: Mapping[str, Any], before: Roster) -> None:
        """Writes down an entry of the log; `before` is the roster without it. A full disk stops no supervisor."""
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
        about = {"time": time.time(), "generation": generation + self._offset, "step": self.last_step()}
        with contextlib.suppress(CapslogError):
            files.append_jsonl(self._run_dir / "events.jsonl", {"kind": kind, **about, **details})

    def last_step(self) -> int | None:
        """The last step in the metrics: where the run stands, or stood."""
        try:
            lines = files.last_lines(self._run_dir / "metrics.jsonl", _TAIL_BYTES)
        except CapslogError:
            return None
        return next((int(line["step"]) for line in reversed(lines) if "step" in line), None)
