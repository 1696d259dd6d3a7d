"""Text for people: a table that the commands print and that answers show, and what of a text a terminal may get.

Names come from files of strangers, and a terminal obeys what it is sent: everything that a command or a worker says
goes through `printable`, or is JSON, which has escapes of its own.
"""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["Table", "log_to", "printable"]

_UNPRINTABLE = re.compile(
    # control characters (C0, DEL, C1), those that turn the direction of writing or end a line, invisible ones and
    # halves of surrogate pairs, which no stream can encode
    "[\\x00-\\x1f\\x7f-\\x9f\\u061c\\u200b\\u200e\\u200f\\u2028-\\u202e\\u2060-\\u206f\\ufeff\\ufff9-\\ufffb\\ud800-\\udfff]"
)

_COLUMNS = 160
"""Of text, wide enough that no cell is folded where names are not very long."""


def printable(text: str) -> str:
    """The text in one line, with escapes in place of what would drive the terminal, such as \\x1b, or hide in it."""
    return _UNPRINTABLE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


class _Formatter(logging.Formatter):
    """A record as text that may go to a terminal; the lines of a traceback stay lines."""

    def format(self, record: logging.LogRecord) -> str:
        return "\n".join(map(printable, super().format(record).split("\n")))


def log_to(stream: TextIO) -> None:
    """Sends the log's warnings to a stream, unless the process has other plans for them."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(_Formatter("%(message)s"))
    logging.basicConfig(handlers=[handler])


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
        from rich.text import Text

        # as Text, in which rich reads neither markup nor emoji: [/x] and :car: are names like others
        drawn = table.Table(title=Text(printable(self.title), style="table.title"))
        for column, heading in enumerate(self.headings):
            drawn.add_column(heading, justify="left" if column in self.left else "right")
        for row in self.rows:
            drawn.add_row(*(Text(printable(cell)) for cell in row))
        console.print(drawn)
        for note in self.notes:
            console.print(printable(note), highlight=False, markup=False, emoji=False)
