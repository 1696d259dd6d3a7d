"""Checkpoints on disk: folders `step-XXXXXXXX` with one file per layer and a manifest of sizes and digests.

A checkpoint is written under a temporary name and renamed when it is complete on disk, so that a crash or a full disk
leaves the previous checkpoint unchanged.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from varuna_capslog.base import files
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.base.processes import OwnedThread, logged
from varuna_capslog.engine.recipe import AVERAGE
from varuna_capslog.model.state_file import load_tensors
from varuna_capslog.training.manifest import REMEDY, REMOVE_BEST, read_best, read_manifest

__all__ = [
    "Checkpoint",
    "entry_of",
    "latest_checkpoint",
    "open_checkpoint",
    "passed_over",
    "prune",
    "publish",
    "read_file",
    "write_synced",
    "write_whole",
]


@dataclass(frozen=True)
class Checkpoint:
    """Complete checkpoint on disk. manifest: content of its manifest.json."""

    path: Path
    manifest: Mapping[str, Any]

    @property
    def step(self) -> int:
        """Step after which it was written."""
        return int(self.manifest["step"])

    def layer(self, name: str, mapped: bool = False) -> dict[str, Any]:
        """State of a layer on the CPU, its digest checked: "parameters", "buffers", "optimizer"; in float16 "scaler".

        mapped: map the tensors from the file into memory. Raises CapslogError where the file is missing or damaged.
        """
        entry = self.manifest["layers"].get(name)
        if entry is None:
            raise CapslogError(
                f"{self.path}: has no layer {name!r}; it was written for another model (its layers: "
                f"{', '.join(list(self.manifest['layers'])[:8])}, ...)"
            )
        file = self.path / entry["file"]
        state = read_file(file, REMEDY, entry["digest"], mapped)
        if not _is_layer(state):
            raise CapslogError(f"{file}: holds no layer's parameters, buffers and moments; {REMEDY}")
        loaded: dict[str, Any] = state
        return loaded

    def weights(self, name: str, mapped: bool = False) -> dict[str, Tensor]:
        """Parameters and buffers of a layer for inference: averages, if the run has any. Arguments as `layer`."""
        state = self.layer(name, mapped)
        averages = {parameter: kept[AVERAGE] for parameter, kept in state["optimizer"].items() if AVERAGE in kept}
        weights: dict[str, Tensor] = state["parameters"] | averages | state["buffers"]
        return weights


def _is_layer(state: Any) -> bool:
    """True where a file's content has the form that `stored_layers.to_checkpoint` writes."""
    kinds = ("parameters", "buffers", "optimizer")
    if not isinstance(state, dict) or not all(isinstance(state.get(kind), dict) for kind in kinds):
        return False
    parameters, buffers, moments = (state[kind] for kind in kinds)
    scaler = state.get("scaler", {"scale": 1.0, "streak": 0})
    if not all(isinstance(of_one, dict) for of_one in (scaler, *moments.values())):
        return False
    names = [name for named in (parameters, buffers, moments, *moments.values()) for name in named]
    kept = [moment for of_one in moments.values() for moment in of_one.values() if moment is not None]
    return (
        all(isinstance(name, str) for name in names)
        and all(isinstance(tensor, Tensor) for tensor in (*parameters.values(), *buffers.values()))
        and all(isinstance(moment, Tensor | int | float) for moment in kept)
        and all(isinstance(scaler.get(key), int | float) for key in ("scale", "streak"))
    )


def read_file(path: Path, advice: str, digest: str | None = None, mapped: bool = False) -> Any:
    """Content of a file of `torch.save`, on the CPU. Raises CapslogError where the file is missing or damaged.

    advice: end of the error's sentence. digest: expected digest of the file. mapped: map the tensors into memory.
    """
    try:
        if digest is not None and files.digest_of(path) != digest:
            raise CapslogError(f"{path}: damaged (its digest differs from the manifest's); {advice}")
    except OSError as error:
        raise CapslogError(f"{path}: cannot be read ({error.strerror or error}); {advice}") from error
    try:
        return load_tensors(path, mapped)
    except (OSError, CapslogError) as error:
        raise CapslogError(f"{path}: cannot be read ({error}); {advice}") from error


def publish(partial: Path, final: Path, replaced: Path) -> None:
    """Rename a complete checkpoint to `final`; an existing one of that name is moved to `replaced` and then removed."""
    files.sync_folder(partial)
    shutil.rmtree(replaced, ignore_errors=True)
    if final.exists():
        os.replace(final, replaced)
    os.replace(partial, final)
    files.sync_folder(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def write_synced(path: Path, state: Mapping[str, Any]) -> dict[str, Any]:
    """Save and sync a file; return its size and digest for the manifest. Raises OSError, also for a full disk."""
    with open(path, "wb", opener=files.no_link) as file:
        _save(file, state)
        file.flush()
        os.fsync(file.fileno())
    return entry_of(path)


def write_whole(path: Path, state: Mapping[str, Any]) -> None:
    """Save a file atomically, since several processes may write the same content at once. Raises OSError."""
    with files.whole_file(path) as file:
        _save(file, state)


def _save(file: BinaryIO, state: Mapping[str, Any]) -> None:
    try:
        torch.save(state, file)
    except RuntimeError as error:
        # torch's zip writer reports a failed write as a RuntimeError
        if isinstance(error.__context__, OSError):
            raise error.__context__ from error
        raise OSError(None, str(error).splitlines()[0]) from error


def entry_of(path: Path) -> dict[str, Any]:
    """Entry of a file in a manifest: its size and digest."""
    return {"bytes": path.stat().st_size, "digest": files.digest_of(path)}


def open_checkpoint(path: Path) -> Checkpoint:
    """Read the manifest of a checkpoint's folder and check the sizes of its files. Raises as `check_manifest`."""
    return Checkpoint(path, read_manifest(path))


def latest_checkpoint(folder: Path) -> tuple[Checkpoint | None, list[str]]:
    """Newest complete checkpoint in a run's `checkpoints/`, or None; and the errors of newer, damaged checkpoints."""
    skipped: list[str] = []
    for path in sorted(folder.glob("step-*"), reverse=True):
        try:
            return open_checkpoint(path), skipped
        except CapslogError as error:
            skipped.append(str(error))
    return None, skipped


def passed_over(checkpoint: Checkpoint | None, skipped: Sequence[str]) -> list[str]:
    """Lines for the user about damaged checkpoints that `latest_checkpoint` skipped."""
    lines = [f"passed over a checkpoint: {problem.removesuffix(f'; {REMEDY}')}" for problem in skipped]
    if skipped and checkpoint is None:
        lines.append("no checkpoint is whole: the run begins anew")
    return lines


def best_checkpoint(folder: Path) -> Checkpoint:
    """Checkpoint with the best score; without scores, the newest. Raises CapslogError if it is missing or damaged."""
    best = read_best(folder)
    if best is not None:
        try:
            return open_checkpoint(folder / f"step-{best[1]:08d}")
        except CapslogError as error:
            problem = str(error).removesuffix(f"; {REMEDY}")
            raise CapslogError(f"best.json names step {best[1]}, but {problem}; {REMOVE_BEST}") from error
    latest, skipped = latest_checkpoint(folder)
    if latest is None:
        raise CapslogError("; ".join(skipped) or f"{folder} holds no checkpoint yet; train first")
    return latest


def prune(folder: Path, keep: int, spare: Iterable[int] = (), in_thread: bool = False) -> None:
    """Remove old checkpoints, except the `keep` newest and the steps in `spare`, and leftovers of interrupted writes.

    in_thread: rename them now, and delete them in a thread, which for large files may take a second.
    """
    spared = {f"step-{step:08d}" for step in spare}
    removed = [path for path in sorted(folder.glob("step-*"))[:-keep] if path.name not in spared]
    removed += folder.glob(".partial-*")
    if in_thread and removed:
        with contextlib.suppress(OSError):
            # if the process ends first, the next call removes this folder as a leftover
            removed_folder = Path(tempfile.mkdtemp(prefix=".partial-removed-", dir=folder))
            for path in removed:
                os.replace(path, removed_folder / path.name)
            thread = OwnedThread("old checkpoints", shutil.rmtree, logged, removed_folder, True)
            thread.daemon = False  # the process does not exit before they are deleted
            thread.start()
            return
    for path in removed:
        shutil.rmtree(path, ignore_errors=True)
