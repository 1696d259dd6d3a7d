"""A table for people: printed by the commands, shown as text or HTML by what the Python functions return."""

from __future__ import annotations

import io
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["Table"]

_COLUMNS = 160
"""Of text, wide enough that no cell is folded where names are not very long."""


@dataclass(frozen=True)
class Table:
    """Rows of text under headings; columns are set to the right but for those in `left`. A line below for each note."""

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: Collection[int] = ()
    notes: Sequence[str] = ()

    def print(self) -> None:
        """To standard output, in the width of the terminal."""
        from rich.console import Console

        self._print_on(Console())

    def text(self) -> str:
        """As it is printed, without colours."""
        from rich.console import Console

        written = io.StringIO()
        self._print_on(Console(file=written, width=_COLUMNS))
        return written.getvalue().rstrip("\n")

    def html(self) -> str:
        """For notebooks: a table without a style sheet of its own."""

        def cells(tag: str, row: Sequence[str]) -> str:
            sides = ("left" if column in self.left else "right" for column in range(len(row)))
            return "".join(
                f'<{tag} style="text-align:{side}">{escape(cell)}</{tag}>'
                for side, cell in zip(sides, row, strict=True)
            )

        rows = "".join(f"<tr>{cells('td', row)}</tr>" for row in self.rows)
        notes = "".join(f"<p>{escape(note)}</p>" for note in self.notes)
        return (
            f"<table><caption>{escape(self.title)}</caption><thead><tr>{cells('th', self.headings)}</tr></thead>"
            f"<tbody>{rows}</tbody></table>{notes}"
        )

    def _print_on(self, console: Console) -> None:
        from rich import table

        drawn = table.Table(title=self.title)
        for column, heading in enumerate(self.headings):
            drawn.add_column(heading, justify="left" if column in self.left else "right")
        for row in self.rows:
            drawn.add_row(*row)
        console.print(drawn)
        for note in self.notes:
            console.print(note, highlight=False, markup=False)
