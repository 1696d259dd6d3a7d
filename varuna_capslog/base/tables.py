"""Text for people: tables, text that is safe for a terminal, and output that never ends a run."""

from __future__ import annotations

import contextlib
import errno
import io
import logging
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["LastingStream", "Table", "lasting_output", "log_to", "printable"]


# -- Standard output and error streams whose writes never fail: lost output must not end a run.
#
# The command and its workers install these streams at their start, so the output of data sets passes through them, too.


_READER_GONE = (errno.EPIPE, errno.EIO)
"""Errors of a pipe whose reader (head, less) has ended, and of a closed terminal."""


class LastingStream:
    """Text stream whose writes raise no OSError: after the first failed write it drops all text.

    Args:
        stream: the wrapped stream, which provides all other attributes.
        lost: called with a sentence about the first error, except where only the reader has ended.

    `gone` is True after an error.
    """

    def __init__(self, stream: TextIO, lost: Callable[[str], object] = lambda sentence: None) -> None:
        self._stream, self._lost = stream, lost
        self.gone = False

    def write(self, text: str) -> int:
        """Write like `TextIO.write`."""
        try:
            return self._stream.write(text)
        except OSError as error:
            self._give_up(error)
            return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write like `TextIO.writelines`."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Flush like `TextIO.flush`."""
        try:
            self._stream.flush()
        except OSError as error:
            self._give_up(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _give_up(self, error: OSError) -> None:
        """Redirect the descriptor to the null device, so that buffered text and later child processes do not fail."""
        with contextlib.suppress(OSError, ValueError):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self._stream.fileno())
            os.close(null)
        first, self.gone = not self.gone, True
        if first and error.errno not in _READER_GONE:
            with contextlib.suppress(OSError):  # the receiver of the sentence may be gone as well
                self._lost(f"standard output cannot be written: {error.strerror}; what follows is not shown")


@contextlib.contextmanager
def lasting_output(lost: Callable[[str], object] = lambda sentence: None) -> Iterator[None]:
    """Replace standard output and error by `LastingStream` in the block; `lost` is called for standard output only."""
    before: Any = sys.stdout, sys.stderr  # None where the shell has closed them
    lasting: Any = before[0] and LastingStream(before[0], lost), before[1] and LastingStream(before[1])
    sys.stdout, sys.stderr = lasting
    try:
        yield
    finally:
        for stream in filter(None, lasting):
            stream.flush()
        sys.stdout, sys.stderr = before


# -- Tables, and text that is safe for a terminal.
#
# Names may come from untrusted files, and a terminal executes control characters. So all that a command or a worker
# prints goes through `printable`, or is JSON, which escapes such characters itself.


_UNPRINTABLE = re.compile(
    # control characters (C0, DEL, C1), characters that change the writing direction or end a line, invisible
    # characters, and halves of surrogate pairs, which no stream can encode
    "[\\x00-\\x1f\\x7f-\\x9f\\u061c\\u200b\\u200e\\u200f\\u2028-\\u202e\\u2060-\\u206f\\ufeff\\ufff9-\\ufffb\\ud800-\\udfff]"
)

_COLUMNS = 160
"""Width for drawing a table as text, so that no cell is wrapped."""
_PAGE = 80
"""Most columns of a note, and of a table as text, whose names are cut to keep this limit."""
_SHORTEST = 8
"""Names are cut to no fewer characters."""


def printable(text: str) -> str:
    r"""Return the text in one line, with escapes for characters that are invisible or control the terminal (\x1b)."""
    return _UNPRINTABLE.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


class _Formatter(logging.Formatter):
    """Formats a log record as text that is safe for a terminal, and keeps the line breaks of a traceback."""

    def format(self, record: logging.LogRecord) -> str:
        return "\n".join(map(printable, super().format(record).split("\n")))


def log_to(stream: TextIO) -> None:
    """Send the log's warnings to a stream, unless the process has configured its log."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(_Formatter("%(message)s"))
    logging.basicConfig(handlers=[handler])


@dataclass(frozen=True)
class Table:
    """Rows of text under headings, with a line below for each note. Columns are right-aligned except those in `left`. A
    column without any text is omitted. If all headings are empty, none is drawn, and long cells are wrapped. names:
    columns whose texts are cut in the middle where the table is wider than the terminal.
    """

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: Collection[int] = ()
    notes: Sequence[str] = ()
    names: Collection[int] = ()

    def print(self) -> None:
        """Print to standard output, as wide as the terminal."""
        from rich.console import Console

        console = Console()
        self._print_on(console, console.width)

    def text(self) -> str:
        """Return the table as printed, without colors."""
        from rich.console import Console

        written = io.StringIO()
        self._print_on(Console(file=written, width=_COLUMNS if any(self.headings) else _PAGE), _PAGE)
        return written.getvalue().rstrip("\n")

    def html(self) -> str:
        """Return HTML for notebooks: a table without a style sheet."""

        def cells(tag: str, row: Sequence[str]) -> str:
            sides = ("left" if column in self.left else "right" for column in self._columns)
            return "".join(
                f'<{tag} style="text-align:{side}">{escape(row[column])}</{tag}>'
                for side, column in zip(sides, self._columns, strict=True)
            )

        rows = "".join(f"<tr>{cells('td', row)}</tr>" for row in self.rows)
        notes = "".join(f"<p>{escape(note)}</p>" for note in self.notes)
        head = f"<thead><tr>{cells('th', self.headings)}</tr></thead>" if any(self.headings) else ""
        return f"<table><caption>{escape(self.title)}</caption>{head}<tbody>{rows}</tbody></table>{notes}"

    @property
    def _columns(self) -> list[int]:
        return [
            column for column in range(len(self.headings)) if not self.rows or any(row[column] for row in self.rows)
        ]

    def _print_on(self, console: Console, width: int) -> None:
        from rich import table
        from rich.text import Text

        # as rich's Text, which interprets neither markup nor emoji: [/x] and :car: are valid names
        drawn, title = table.Table(show_header=any(self.headings)), printable(self.title)
        columns = self._columns
        cells = [[printable(row[column]) for column in columns] for row in self.rows]
        widths = [max((len(cell) for cell in column), default=0) for column in zip(*cells, strict=True)]
        for place, column in enumerate(columns):
            heading = self.headings[column]
            drawn.add_column(heading, justify="left" if column in self.left else "right")
            if widths:
                widths[place] = max(widths[place], *map(len, heading.split("\n")))
        named = [place for place, column in enumerate(columns) if column in self.names] if widths else []
        other_width = sum(widths) + 3 * len(widths) + 1 - sum(widths[place] for place in named)
        longest = max((widths[place] for place in named), default=0)
        while longest > _SHORTEST and other_width + sum(min(widths[place], longest) for place in named) > width:
            longest -= 1
        for row in cells:
            shown = (_cut(cell, longest) if place in named else cell for place, cell in enumerate(row))
            drawn.add_row(*map(Text, shown))
        # printed above the table, since rich would wrap a table's own title to the table's width
        width = min(console.width, other_width + sum(min(widths[place], longest) for place in named))
        middle = (width - len(title)) // 2
        if title:
            console.print(Text(" " * min(middle, console.width - len(title)) + title, style="table.title"))
        console.print(drawn)
        for note in self.notes:
            console.print(printable(note), highlight=False, markup=False, emoji=False, width=min(console.width, _PAGE))


def _cut(name: str, longest: int) -> str:
    if len(name) <= longest:
        return name
    ends = longest - 3
    return f"{name[: ends - ends // 2]}...{name[-(ends // 2) :]}"
