"""Commands before a run: `capslog init` copies the package's configs, `capslog check` finds faults of a run."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from varuna_capslog.base.errors import CapslogError, RunFinding, findings_of
from varuna_capslog.commands import shared
from varuna_capslog.commands.shared import option, say

if TYPE_CHECKING:
    from varuna_capslog.config.settings import Config

__all__ = ["check", "init"]


# -- `capslog init`: the configs, examples and launchers that come with the package, copied into a folder.


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
    """Return the folder of the files to copy: inside an installed package, beside the package in a clone."""
    package = Path(__file__).resolve().parents[1]
    return next(place for place in (package / "shipped", package.parent) if (place / _FOLDERS[0]).is_dir())


# -- `capslog check`: finds faults that would stop a run or spoil its training, before it begins.


_BEFORE = {"fact": "", "note": "note: ", "stops": "stops the run: ", "does_not_fit": "does not fit: "}


@dataclass(frozen=True)
class CheckFlags:
    """The command line of `check`."""

    config: shared.ConfigFile
    overrides: shared.Overrides = None
    as_json: shared.AsJson = False
    trust: shared.Trust = False


@shared.options_of(CheckFlags)
def check(flags: CheckFlags) -> None:
    """Find what would stop a run or spoil its training (exit status 2), or does not fit (3); train nothing."""
    findings: list[RunFinding] = []
    with contextlib.redirect_stdout(sys.stderr) if flags.as_json else contextlib.nullcontext():
        for finding in _findings(flags):
            findings.append(finding)
            if not flags.as_json:
                text = finding.text.removeprefix(_BEFORE[finding.kind])
                shared.say(f"{finding.part}: {_BEFORE[finding.kind]}{' '.join(text.split())}")
    if flags.as_json:
        shared.print_json([{name: getattr(finding, name) for name in ("part", "kind", "text")} for finding in findings])
    kinds = [finding.kind for finding in findings]
    against = kinds.count("stops") + kinds.count("does_not_fit")
    if against:
        shared.tell(f"{against} of these would stop the run or teach it wrong things; mend them and check again")
        raise typer.Exit(2 if "stops" in kinds else 3)
    if not flags.as_json:
        shared.say("nothing stops this run")


def _findings(flags: CheckFlags) -> Iterator[RunFinding]:
    configs: list[Config] = []

    def load() -> tuple[RunFinding, ...]:
        configs.append(shared.load(flags.config, flags.overrides, trust=flags.trust))
        return ()

    yield from (dataclasses.replace(finding, part="config") for finding in findings_of(load))
    if configs:
        from varuna_capslog.start.readiness import check_run

        yield from check_run(configs[0], shared.tell, show=not flags.as_json and sys.stdout.isatty())
