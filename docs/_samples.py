"""Make the sample outputs of a page again: `python docs/_samples.py docs/export.md`, then look at the diff.

A sample is a fenced `text` block that begins with `$ command`. Its commands run in one empty folder for each page,
beside configs/, docs/ and examples/, and what they print, progress left out, stands below them. A `yaml` block below a
line that ends with "`NAME.yaml`:" is that file. Blocks that leave lines out ("..." alone on a line), or whose command
fails, stay.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_SAMPLE = re.compile(r"(?<=^```text\n)(\$ .*?)(?=^```$)", re.MULTILINE | re.DOTALL)
_FILE = re.compile(r"`([\w-]+\.yaml)`:\n\n```yaml\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_PROGRESS = re.compile(r"asking \S+ \(\d+ of \d+\)|capslog: estimating \S+")
_COMMAND = re.compile(r"^\$ (?:.*\\\n)*.*$", re.MULTILINE)


def remade(page: str, run: Callable[[str], str | None]) -> str:
    """Return a page with its samples made again; `run` returns what a command prints, None where it fails."""

    def sample(block: re.Match[str]) -> str:
        if re.search(r"^\.\.\.$", block[0], re.MULTILINE):
            return block[0]
        shown = []
        for command in _COMMAND.findall(block[0]):
            printed = run(command.removeprefix("$ "))
            if printed is None:
                return block[0]
            shown.append(f"{command}\n{printed.strip(chr(10))}\n")
        return "\n".join(shown)

    return _SAMPLE.sub(sample, page)


def _run_in(folder: Path, command: str) -> str | None:
    code = "from varuna_capslog.cli import program; program()"
    (folder / "capslog").write_text(f'#!/bin/sh\nexec "{sys.executable}" -c "{code}" "$@"\n', encoding="utf-8")
    (folder / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n', encoding="utf-8")
    for program in ("capslog", "python"):
        (folder / program).chmod(0o755)
    paths = {"PATH": f"{folder}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "COLUMNS": "80"}
    done = subprocess.run(
        command,
        shell=True,
        cwd=folder,
        env=os.environ | paths,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode not in (0, 3):  # 3: an answer, too, that nothing fits
        print(f"{command}\n{done.stdout}", file=sys.stderr)  # noqa: T201
        return None
    return "\n".join(line.rstrip() for line in done.stdout.splitlines() if not _PROGRESS.fullmatch(line))


def main(pages: list[str]) -> None:
    """Make the samples of these pages again."""
    for page in map(Path, pages):
        text = page.read_text(encoding="utf-8")
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            for place in ("configs", "docs", "examples"):
                shutil.copytree(ROOT / place, folder / place)
            for file, content in _FILE.findall(text):
                (folder / file).write_text(content, encoding="utf-8")
            page.write_text(remade(text, lambda command, folder=folder: _run_in(folder, command)), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
