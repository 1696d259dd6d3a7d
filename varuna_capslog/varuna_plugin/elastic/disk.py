"""Where an elastic run on Varuna goes on from: its checkpoints, and what members left on disk when they stopped.

Checkpoints are Varuna's (`run_dir/checkpoints/varuna_ckpt_<step>`). A member that must stop between two of them writes
the pieces that it holds into `run_dir/held/`; the next run begins with the newest boundary of which every piece is
there, if that is newer than the last checkpoint.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from varuna_capslog.elastic.member.held_state import take_newest, write_boundaries
from varuna_capslog.membership.generation import Generation, Stamp
from varuna_capslog.training.checkpoint import read_file, write_whole
from varuna_capslog.training.layer_state import LayerState
from varuna_capslog.varuna_plugin.checkpoint_files import newest

__all__ = ["RESUMED", "begin_with", "read_held", "write_held"]

RESUMED = "resumed-"
"""Folders in a run's, with the step behind it: boundaries that members left and a later run began with."""


def write_held(
    run_dir: Path, held: Mapping[tuple[int, Stamp], LayerState], record: Generation, num_pieces: int
) -> None:
    """Writes what a member holds; see `held_state.write_boundaries`."""

    def write(place: Path, piece: int, state: LayerState) -> None:
        if not _file(place, piece).exists():
            write_whole(_file(place, piece), {key: tensor.cpu() for key, tensor in state.items()})

    write_boundaries(run_dir, held, record, {"num_pieces": num_pieces}, write)


def begin_with(run_dir: Path) -> tuple[int, str]:
    """The step with which a run goes on, and the folder it is in; (0, "") at the very beginning.

    Called by one process before a run starts, whose generations begin anew: what cannot be used of an earlier one goes.
    """
    found: tuple[int, Path | None] = newest(run_dir / "checkpoints") or (0, None)
    _recover(run_dir, found[0])
    resumed = {int(path.name.removeprefix(RESUMED)): path for path in run_dir.glob(f"{RESUMED}*") if path.is_dir()}
    step, path = max([found, *resumed.items()], key=lambda boundary: boundary[0])
    for place in resumed.values():
        if place != path:
            shutil.rmtree(place, ignore_errors=True)
    return step, "" if path is None else str(path.absolute())


def _recover(run_dir: Path, after: int) -> None:
    """Gives the newest whole boundary in `held/`, if after step `after`, a folder of its own; removes the rest."""

    def take(place: Path, step: int, about: Mapping[str, Any]) -> Path | None:
        if not all(_file(place, piece).exists() for piece in range(int(about["num_pieces"]))):
            return None
        final = run_dir / f"{RESUMED}{step:08d}"
        shutil.rmtree(final, ignore_errors=True)
        os.replace(place, final)
        return final

    take_newest(run_dir, after, take)


def read_held(folder: Path, piece: int) -> LayerState:
    """A piece's state from such a folder.

    Raises:
        CapslogError: it cannot be read.
    """
    state: LayerState = read_file(_file(folder, piece), f"remove {folder} to use the last checkpoint")
    return state


def _file(folder: Path, piece: int) -> Path:
    return folder / f"piece-{piece:04d}.pt"
