"""Parses a report's page: its tables by id, its sections' texts and figures, and what it refers to."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

VOID = {"meta", "img", "br", "hr", "link", "input"}


class Page(HTMLParser):
    """Parsed page. tables: id -> rows of cells (heading row included); texts: section id -> its text; plots: section id
    -> the figures of plotly in it; sources: src and href values.

    A wrongly closed tag raises an error.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(convert_charrefs=True)
        self.tables: dict[str, list[list[str]]] = {}
        self.texts: dict[str, str] = {}
        self.plots: dict[str, list[dict[str, Any]]] = {}
        self.sources: list[str] = []
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self._open: list[str] = []
        self._table = self._section = ""
        self._cell: list[str] | None = None
        self.feed(path.read_text(encoding="utf-8"))
        self.close()
        assert not self._open, f"never closed: {self._open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.tags.add(tag)
        self.attributes |= set(values)
        self.sources += [value for key in ("src", "href") if (value := values.get(key))]
        if tag not in VOID:
            self._open.append(tag)
        if tag == "section":
            self._section = values["id"] or ""
        elif tag == "table":
            self._table = values["id"] or ""
            self.tables[self._table] = []
        elif tag == "tr":
            self.tables[self._table].append([])
        elif tag in ("td", "th"):
            self._cell = []

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open, f"</{tag}> closes nothing"
        assert self._open.pop() == tag, f"</{tag}> closes something else"
        if tag in ("td", "th") and self._cell is not None:
            self.tables[self._table][-1].append("".join(self._cell))
            self._cell = None
        elif tag == "section":
            self._section = ""

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] in ("script", "style"):
            if self._section:
                self.plots.setdefault(self._section, []).append(json.loads(data))
            return
        if self._cell is not None:
            self._cell.append(data)
        if self._section:
            self.texts[self._section] = self.texts.get(self._section, "") + data

    def facts(self, table: str) -> dict[str, str]:
        """Return a table of two columns as a mapping."""
        return {row[0]: row[1] for row in self.tables[table]}

    def column(self, table: str, heading: str) -> list[str]:
        """Return the cells under the heading that begins with `heading`."""
        head, *rows = self.tables[table]
        place = next(i for i, text in enumerate(head) if text.startswith(heading))
        return [row[place] for row in rows]
