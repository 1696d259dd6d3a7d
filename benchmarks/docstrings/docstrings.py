"""Counts the lines of docstrings per 100 lines of code, by folder, and the public functions without a docstring.

    python -m benchmarks.docstrings.docstrings varuna_capslog detr_pipeline

A line of code is neither empty nor a comment nor part of a docstring; strings below attributes and fields are code.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class Lines:
    """Counts of a folder.

    public, bare: functions without a leading underscore, and those of them without a docstring.
    """

    code: int = 0
    docstring: int = 0
    public: int = 0
    bare: int = 0

    def add(self, more: Lines) -> None:
        """Add the counts of a file or a folder."""
        self.code, self.docstring = self.code + more.code, self.docstring + more.docstring
        self.public, self.bare = self.public + more.public, self.bare + more.bare

    def row(self, name: str) -> str:
        """Return the table's row."""
        per_hundred, bare = 100 * self.docstring / max(1, self.code), 100 * self.bare / max(1, self.public)
        return f"{name:36} {self.code:6} {self.docstring:6} {per_hundred:6.1f} {bare:6.1f}"


def count_lines(source: str) -> Lines:
    """Count one file."""
    tree, of_docstrings, lines = ast.parse(source), set[int](), Lines()
    for node in ast.walk(tree):
        if isinstance(node, Documented) and ast.get_docstring(node) is not None:
            of_docstrings |= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and not node.name.startswith("_"):
            lines.public += 1
            lines.bare += ast.get_docstring(node) is None
    lines.docstring = len(of_docstrings)
    for number, line in enumerate(source.splitlines(), 1):
        text = line.strip()
        lines.code += bool(text) and not text.startswith("#") and number not in of_docstrings
    return lines


def main(folders: list[str]) -> None:
    """Print a row for each folder that holds Python files, and one for all."""
    table, total = defaultdict[str, Lines](Lines), Lines()
    for path in (path for folder in folders for path in Path(folder).rglob("*.py")):
        table[str(path.parent)].add(count_lines(path.read_text(encoding="utf-8")))
    print(f"{'folder':36} {'code':>6} {'lines':>6} {'/100':>6} {'% bare':>6}")
    for name, lines in sorted(table.items()):
        total.add(lines)
        print(lines.row(name))
    print(total.row("all"))


if __name__ == "__main__":
    main(sys.argv[1:])
