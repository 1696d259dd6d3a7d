"""Report of the GPU command: a row for each test, either measured or with the reason why it was not run.

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
    """Test on one device.

    Attributes:
        aim: expected result; empty where there is no aim.
        result: measured result, as the table shows it; empty where the test was not run.
        not_run: reason why it was not run; empty where it was.
        passed: the aim was met; None where there is no aim, or the test was not run.
        lacks: not run because this machine lacks what it needs, which is no failure.
        numbers: measured numbers, for programs.
        seconds: seconds since the command began when the row came.
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
        """True while it has neither a result nor a reason."""
        return not self.result and not self.not_run

    @property
    def is_failure(self) -> bool:
        """True where this row must make the command's exit status an error."""
        return self.passed is False or (not self.result and not self.lacks)


@dataclass
class Report:
    """All rows, and the machine that they were measured on."""

    path: Path
    machine: dict[str, Any] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    def of(self, part: str, device: str) -> list[Row]:
        """The rows of a part on a device."""
        return [row for row in self.rows if (row.part, row.device) == (part, device)]

    def take(self, line: dict[str, Any]) -> Row:
        """Put a line that a part has written into its row, and return the row."""
        (row,) = [row for row in self.of(line["part"], line["device"]) if row.name == line["name"]]
        for key in ("result", "not_run", "passed", "lacks", "numbers"):
            setattr(row, key, line.get(key, getattr(row, key)))
        row.seconds = round(time.monotonic() - self.began, 1)
        return row

    def close(self, rows: Iterable[Row], why: str, lacks: bool = False) -> None:
        """Give the rows without a result a reason."""
        for row in rows:
            if row.is_open:
                row.not_run, row.lacks = why, lacks

    def write(self) -> None:
        """Rewrite the JSON file atomically."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_name(self.path.name + ".partial")
        contents = {"machine": self.machine, "rows": [asdict(row) for row in self.rows]}
        temporary.write_text(json.dumps(contents, indent=1) + "\n")
        temporary.replace(self.path)

    def table(self) -> str:
        """All rows as a table in Markdown."""
        lines = ["| part | device | row | result | aim |", "|---|---|---|---|---|"]
        for row in self.rows:
            mark = {True: "", False: " **missed**", None: ""}[row.passed]
            cell = (row.result + mark) if row.result else f"not run: {row.not_run or 'its turn has not come'}"
            lines.append(f"| {row.part} | {row.device} | {row.name} | {cell} | {row.aim or '-'} |")
        return "\n".join(lines)
