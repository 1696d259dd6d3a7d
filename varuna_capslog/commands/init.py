"""`capslog init`: the configs, examples and launchers that come with the package, copied into a folder."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import typer

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.commands.shared import option, say

__all__ = ["init"]

_FOLDERS = ("configs", "examples", "launch")
_OF_CLONES = ("chaos.sh", "install.sh", "quickstart.sh", "test.sh")
"""Launchers that need a clone."""


def init(
    folder: Annotated[
        Path, typer.Argument(metavar="[DIR]", help="Folder for the copies; created if it is missing.")
    ] = (Path(".")),
    force: Annotated[bool, option("Overwrite files that differ from the package's.", False, "--force")] = False,
) -> None:
    """Copy the package's configs, examples and launchers into a folder, to run and to change."""
    source = _source()
    copies = {
        path: folder / path.relative_to(source)
        for name in _FOLDERS
        for path in sorted((source / name).rglob("*"))
        if path.is_file() and path.name not in _OF_CLONES and "__pycache__" not in path.parts
    }
    differing = [copy for path, copy in copies.items() if copy.exists() and not _equal(path, copy)]
    _refuse(differing, force)
    try:
        for path, copy in copies.items():
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, copy)
    except OSError as error:
        raise CapslogError(f"{folder} cannot be written: {error.strerror or error}; give another folder") from error
    for copy in differing:
        say(f"replaced {copy}")
    say(f"{len(copies)} files in {', '.join(str(folder / name) for name in _FOLDERS)}")


def _equal(path: Path, copy: Path) -> bool:
    return copy.is_file() and copy.read_bytes() == path.read_bytes()


def _refuse(differing: list[Path], force: bool) -> None:
    """Raise CapslogError for files that may not be overwritten, and for folders in their places."""
    for copy in differing:
        if not copy.is_file():
            raise CapslogError(
                f"{copy} is no file, so that no file can be copied there; give another folder, or move it"
            )
    if differing and not force:
        others = len(differing) - 1
        more = f", like {others} other file{'' if others == 1 else 's'}" if others else ""
        raise CapslogError(
            f"{differing[0]} is there and differs from the package's{more}; give another folder, move what differs "
            "away, or overwrite it with --force"
        )


def _source() -> Path:
    """Inside an installed package, beside the package in a clone."""
    package = Path(__file__).resolve().parents[1]
    return next(place for place in (package / "shipped", package.parent) if (place / _FOLDERS[0]).is_dir())
