"""The result of the GPU command: a row for everything that it tries, each measured or with the reason why not.

`gpu.py` fills it, writes it as one JSON after every part, and prints it as one table. It measures nothing.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Report", "Row"]


@dataclass
class Row:
    """One thing that is tried on one device.

    Attributes:
        aim: what it should show; empty where it is only told.
        result: what was measured, as the table shows it; empty where it was not run.
        not_run: why it was not; empty where it was.
        passed: whether the aim was met; None where there is none, or it was not run.
        lacks: not run because this machine does not have what it needs, which is no failure.
        numbers: what was measured, for programs.
        seconds: of the command, at which its line came.
    """

    part: str
    device: str
    name: str
    aim: str = ""
    result: str = ""
    not_run: str = ""
    passed: bool | None = None
    lacks: bool = False
    numbers: dict[str, Any] = field(default_factory=dict)
    seconds: float | None = None

    @property
    def is_open(self) -> bool:
        """Whether it has neither a result nor a reason."""
        return not self.result and not self.not_run

    @property
    def is_failure(self) -> bool:
        """Whether the command has to say by its exit status that this row is not as it should be."""
        return self.passed is False or (not self.result and not self.lacks)


@dataclass
class Report:
    """All rows, and what they were measured with."""

    path: Path
    machine: dict[str, Any] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    def of(self, part: str, device: str) -> list[Row]:
        """The rows of a part on a device."""
        return [row for row in self.rows if (row.part, row.device) == (part, device)]

    def take(self, line: dict[str, Any]) -> Row:
        """Puts a line that a part has written into its row."""
        (row,) = [row for row in self.of(line["part"], line["device"]) if row.name == line["name"]]
        for key in ("result", "not_run", "passed", "lacks", "numbers"):
            setattr(row, key, line.get(key, getattr(row, key)))
        row.seconds = round(time.monotonic() - self.began, 1)
        return row

    def close(self, rows: Iterable[Row], why: str, lacks: bool = False) -> None:
        """Gives those of the rows that have no result a reason."""
        for row in rows:
            if row.is_open:
                row.not_run, row.lacks = why, lacks

    def write(self) -> None:
        """Writes the JSON anew, never half."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_name(self.path.name + ".partial")
        whole = {"machine": self.machine, "rows": [asdict(row) for row in self.rows]}
        temporary.write_text(json.dumps(whole, indent=1) + "\n")
        temporary.replace(self.path)

    def table(self) -> str:
        """All rows as a table in Markdown."""
        lines = ["| part | device | row | result | aim |", "|---|---|---|---|---|"]
        for row in self.rows:
            mark = {True: "", False: " **missed**", None: ""}[row.passed]
            said = (row.result + mark) if row.result else f"not run: {row.not_run or 'its turn has not come'}"
            lines.append(f"| {row.part} | {row.device} | {row.name} | {said} | {row.aim or '-'} |")
        return "\n".join(lines)
