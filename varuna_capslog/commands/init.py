"""`capslog init`: the configs, examples and launchers that come with the package, copied into a folder."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import typer

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.commands.shared import say

__all__ = ["init"]

_FOLDERS = ("configs", "examples", "launch")
_OF_CLONES = ("chaos.sh", "install.sh", "quickstart.sh", "test.sh")
"""Launchers that need a clone."""


def init(
    folder: Annotated[
        Path, typer.Argument(metavar="[DIR]", help="Folder for the copies; created if it is missing.")
    ] = (Path(".")),
) -> None:
    """Copy the package's configs, examples and launchers into a folder, to run and to change."""
    source = _source()
    copies = {
        path: folder / path.relative_to(source)
        for name in _FOLDERS
        for path in sorted((source / name).rglob("*"))
        if path.is_file() and path.name not in _OF_CLONES and "__pycache__" not in path.parts
    }
    for path, copy in copies.items():
        if copy.exists() and (not copy.is_file() or copy.read_bytes() != path.read_bytes()):
            raise CapslogError(f"{copy} is there and differs from the package's; give another folder, or move it away")
    try:
        for path, copy in copies.items():
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, copy)
    except OSError as error:
        raise CapslogError(f"{folder} cannot be written: {error.strerror or error}; give another folder") from error
    say(f"{len(copies)} files in {', '.join(str(folder / name) for name in _FOLDERS)}")


def _source() -> Path:
    """Inside an installed package, beside the package in a clone."""
    package = Path(__file__).resolve().parents[1]
    return next(place for place in (package / "shipped", package.parent) if (place / _FOLDERS[0]).is_dir())
