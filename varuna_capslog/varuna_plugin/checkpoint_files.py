"""Files of a run on Varuna: reads a checkpoint's folder, and finds where an elastic run continues.

A checkpoint (`varuna_ckpt_<step>`) has Varuna's layout, one file per piece and kind, with a manifest where the plugin
wrote it. A member of an elastic run that must stop between two checkpoints writes the pieces that it holds into
`run_dir/held/`. The next run begins with the newest boundary of which every piece is there, if that is newer than the
last checkpoint. Nothing here knows ranks, stages or a model.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from varuna_capslog.base import fields, files
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.elastic.member.held_state import take_newest, write_boundaries
from varuna_capslog.membership.generation import Generation, Stamp
from varuna_capslog.training.checkpoint import read_file, write_whole
from varuna_capslog.training.layer_state import LayerState, flatten

__all__ = [
    "COMMON",
    "EXTRA",
    "FORMAT",
    "MANIFEST",
    "PARAMETERS",
    "RESUMED",
    "STATE",
    "Reader",
    "begin_with",
    "newest",
    "read_held",
    "read_tensors",
    "write_held",
]

MANIFEST = "capslog-manifest.json"
FORMAT = "varuna-capslog/varuna-checkpoint/1"
PARAMETERS, STATE, COMMON = "opt-fp32-params-{}", "opt-state-{}", "opt-common-state"
EXTRA = "capslog-extra-{}"
_MOST_PIECES = 100_000
RESUMED = "resumed-"
"""Folders in a run's, with the step behind it: boundaries that members left and a later run began with."""


def newest(folder: Path) -> tuple[int, Path] | None:
    """Return step and path of the newest complete checkpoint that the plugin wrote; None without one."""
    steps = _numbered("varuna_ckpt_", (path.parent for path in folder.glob(f"varuna_ckpt_*/{MANIFEST}")))
    return max(steps.items()) if steps else None


def _numbered(prefix: str, paths: Iterable[Path]) -> dict[int, Path]:
    """Return the paths by the number behind the prefix of their names; paths of other names are left out."""
    return {int(match[1]): path for path in paths if (match := re.fullmatch(f"{prefix}([0-9]{{1,18}})", path.name))}


def read_tensors(place: Path, parameters: Iterable[str], buffers: Iterable[str]) -> LayerState:
    """Read parts of a checkpoint that the plugin wrote, in the form of `training.layer_state`.

    Raises:
        CapslogError: it is damaged, incomplete, of unpatched Varuna, or lacks a name.
    """
    reader = Reader(place, check=True)
    if reader.manifest is None:
        raise CapslogError(f"{place} was written by Varuna itself, which leaves parts out; load it in a script")
    wanted, extra = list(parameters), [name for name in buffers if name in reader.manifest["buffers"]]
    values, kept = reader.search(PARAMETERS, wanted), reader.search(EXTRA, extra, "buffers")
    missing = sorted({*wanted, *extra} - values.keys() - kept.keys())
    if missing:
        raise CapslogError(f"{place} lacks {', '.join(missing[:4])}: it was written for another model")
    return flatten(values, kept, reader.search(STATE, wanted))


def _manifest(path: Path) -> dict[str, Any]:
    """Read the manifest of a checkpoint. Raises CapslogError where it has another form."""
    manifest = files.read_json(path)
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise CapslogError(f"{path}: format is not {FORMAT!r}; load an older checkpoint")

    def check() -> None:
        if fields.whole(manifest.get("num_pieces"), "num_pieces", 1) > _MOST_PIECES:
            raise CapslogError(f"num_pieces is {manifest['num_pieces']}, more than the {_MOST_PIECES} of any model")
        for kind in ("parameters", "buffers"):
            for name, piece in fields.mapping(manifest.get(kind), kind).items():
                fields.whole(piece, f"{kind}[{name!r}]")
        for name, entry in fields.mapping(manifest.get("files"), "files").items():
            fields.text(fields.mapping(entry, f"files[{name!r}]").get("digest"), f"files[{name!r}].digest")
        fields.mapping(manifest.get("stage_to_rank_map"), "stage_to_rank_map")
        fields.listed(manifest.get("cuts"), "cuts")

    fields.within(str(path), check)
    return manifest


class Reader:
    """Reads a checkpoint folder; files are read once.

    Args:
        home: the piece where each parameter and buffer should be, where the manifest does not have it.
    """

    def __init__(self, folder: Path, check: bool, home: Mapping[str, int] | None = None) -> None:
        self.folder, self.check = folder, check
        self._home = dict(home or {})
        self.manifest: dict[str, Any] | None = None
        self._cache: dict[str, Any] = {}
        if not folder.is_dir():
            raise CapslogError(f"{folder} is not there; give the folder that holds varuna_ckpt_* and a step of it")
        if (folder / MANIFEST).exists():
            self.manifest = _manifest(folder / MANIFEST)
            self._home |= self.manifest["parameters"] | self.manifest["buffers"]
        names = (path.name for path in folder.glob(PARAMETERS.format("*")))
        numbers = (re.match(PARAMETERS.format("([0-9]{1,9})(_|$)"), name) for name in names)
        self.pieces = sorted({int(number[1]) for number in numbers if number})
        wanted = range(self.manifest["num_pieces"]) if self.manifest else range(max(self.pieces, default=-1) + 1)
        if check and (not self.pieces or self.pieces != list(wanted)):
            raise CapslogError(
                f"{folder} holds the pieces {self.pieces}, not all of 0 to {max(wanted, default=0)}: it was broken "
                "off; load an older one"
            )

    def piece(self, pattern: str, piece: int) -> dict[str, Any]:
        """Return the content of a piece's file, its shards together; empty where there is none."""
        name = pattern.format(piece)
        if name not in self._cache:
            piece_file = self.folder / name
            paths = [piece_file] if piece_file.exists() else sorted(self.folder.glob(f"{name}_*"))
            self._cache[name] = {key: value for path in paths for key, value in self.file(path).items()}
        return dict(self._cache[name])

    def file(self, path: Path) -> Any:
        """Return a file's content, checked against the manifest where there is one."""
        if self.check and self.manifest is not None:
            entry = self.manifest["files"].get(path.name)
            if entry is None or not path.is_file() or files.digest_of(path) != entry["digest"]:
                raise CapslogError(f"{path}: damaged (not what the manifest says); load an older checkpoint")
        return read_file(path, "load an older checkpoint")

    def search(self, pattern: str, names: Collection[str], part: str | None = None) -> dict[str, Any]:
        """Return the entries of `names`; search first the pieces where they should be, then all pieces."""
        entries: dict[str, Any] = {}
        for piece in [*sorted({self._home[name] for name in names if name in self._home}), *self.pieces]:
            if len(entries) == len(names):
                break
            content = self.piece(pattern, piece)
            content = content.get(part, {}) if part is not None else content
            entries |= {name: content[name] for name in names if name in content and name not in entries}
        return entries


# -- state that members of an elastic run leave


def write_held(
    run_dir: Path, held: Mapping[tuple[int, Stamp], LayerState], record: Generation, num_pieces: int
) -> None:
    """Write the states that a member holds; see `held_state.write_boundaries`."""

    def write(place: Path, piece: int, state: LayerState) -> None:
        if not _file(place, piece).exists():
            write_whole(_file(place, piece), {key: tensor.cpu() for key, tensor in state.items()})

    write_boundaries(run_dir, held, record, {"num_pieces": num_pieces}, write)


def begin_with(run_dir: Path) -> tuple[int, Path | None]:
    """Return the step after which a run continues, and the folder of its state; (0, None) at the very beginning.

    Called by one process before a run starts. The generations begin anew, so unusable state of an earlier run is
    removed.
    """
    newest_checkpoint: tuple[int, Path | None] = newest(run_dir / "checkpoints") or (0, None)

    def take(place: Path, step: int, about: Mapping[str, Any]) -> Path | None:
        """Move a complete boundary into a folder of its own; return None for an incomplete one."""
        count = fields.whole(about.get("num_pieces"), f"{run_dir}/held: num_pieces", 1)
        if not all(_file(place, piece).exists() for piece in range(count)):
            return None
        final = run_dir / f"{RESUMED}{step:08d}"
        shutil.rmtree(final, ignore_errors=True)
        os.replace(place, final)
        return final

    take_newest(run_dir, newest_checkpoint[0], take)
    resumed = _numbered(RESUMED, (path for path in run_dir.glob(f"{RESUMED}*") if path.is_dir()))
    step, path = max([newest_checkpoint, *resumed.items()], key=lambda boundary: boundary[0])
    for place in resumed.values():
        if place != path:
            shutil.rmtree(place, ignore_errors=True)
    return step, None if path is None else path.absolute()


def read_held(folder: Path, piece: int) -> LayerState:
    """Read a piece's state from such a folder.

    Raises:
        CapslogError: it cannot be read.
    """
    state: LayerState = read_file(_file(folder, piece), f"remove {folder} to use the last checkpoint")
    return state


def _file(folder: Path, piece: int) -> Path:
    return folder / f"piece-{piece:04d}.pt"
