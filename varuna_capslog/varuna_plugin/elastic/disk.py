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

import torch

from varuna_capslog.base import files
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.membership.generation import Generation, Stamp
from varuna_capslog.training.checkpoint import write_synced
from varuna_capslog.varuna_plugin.checkpoint_files import newest
from varuna_capslog.varuna_plugin.piece_state import PieceState

__all__ = ["RESUMED", "begin_with", "read_held", "write_held"]

RESUMED = "resumed-"
"""Folders in a run's, with the step behind it: boundaries that members left and a later run began with."""


def write_held(
    run_dir: Path, held: Mapping[tuple[int, Stamp], PieceState], record: Generation, num_pieces: int
) -> None:
    """Writes what a member holds. Several members may write the same state: equal stamps are equal states.

    Raises:
        CapslogError: the disk is full or cannot be written.
    """
    folder = run_dir / "held"
    try:
        for (piece, stamp), state in sorted(held.items()):
            place = folder / f"{stamp.step:08d}-{stamp.generation:06d}"
            place.mkdir(parents=True, exist_ok=True)
            file = place / f"piece-{piece:04d}.pt"
            if not file.exists():
                fresh = file.with_suffix(f".{os.getpid()}")
                write_synced(fresh, {key: tensor.cpu() for key, tensor in state.items()})
                os.replace(fresh, file)
    except OSError as error:
        raise files.write_failure(f"{folder}: what this member holds cannot be written", error) from error
    content = {"record": record.to_json(), "num_pieces": num_pieces}
    files.write_json(folder / f"record-{record.number:06d}.json", content)


def begin_with(run_dir: Path) -> tuple[int, str]:
    """The step with which a run goes on, and the folder it is in; (0, "") at the very beginning.

    Called by one process before a run starts, whose generations begin anew: what cannot be used of an earlier one goes.
    """
    found = newest(run_dir / "checkpoints")
    best: tuple[int, Path | None] = (0, None) if found is None else found
    _recover(run_dir, best[0])
    for place in run_dir.glob(f"{RESUMED}*/"):
        step = int(place.name.removeprefix(RESUMED))
        if step > best[0]:
            best = (step, place)
    for place in run_dir.glob(f"{RESUMED}*/"):
        if place != best[1]:
            shutil.rmtree(place, ignore_errors=True)
    step, path = best
    return step, "" if path is None else str(path.absolute())


def _recover(run_dir: Path, after: int) -> None:
    """Gives the newest whole boundary in `held/`, if after step `after`, a folder of its own; removes the rest."""
    folder = run_dir / "held"
    records = sorted(folder.glob("record-*.json"))
    if records:
        content = files.read_json(records[-1])
        record, count = Generation.from_json(content["record"], str(records[-1])), int(content["num_pieces"])
        for place in sorted(folder.glob("*-*/"), reverse=True):
            stamp = Stamp(*map(int, place.name.split("-")))
            if stamp.step <= after or not record.continues(stamp):
                continue
            if all((place / f"piece-{piece:04d}.pt").exists() for piece in range(count)):
                final = run_dir / f"{RESUMED}{stamp.step:08d}"
                shutil.rmtree(final, ignore_errors=True)
                os.replace(place, final)
                break
    shutil.rmtree(folder, ignore_errors=True)


def read_held(folder: Path, piece: int) -> PieceState:
    """A piece's state from such a folder.

    Raises:
        CapslogError: it cannot be read.
    """
    path = folder / f"piece-{piece:04d}.pt"
    try:
        state: PieceState = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError) as error:
        raise CapslogError(f"{path}: cannot be read ({error}); remove {folder} to use the last checkpoint") from error
    return state
