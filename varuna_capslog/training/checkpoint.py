"""Checkpoints on disk: folders `step-XXXXXXXX` with one file per layer and a manifest of sizes and digests.

A checkpoint is written under another name and renamed when everything is on disk: a crash or a full disk leaves the
previous one unchanged.
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
    """Complete checkpoint on disk; `manifest` is its JSON."""

    path: Path
    manifest: Mapping[str, Any]

    @property
    def step(self) -> int:
        """Last optimizer step that it contains."""
        return int(self.manifest["step"])

    def layer(self, name: str, mapped: bool = False) -> dict[str, Any]:
        """{"parameters", "buffers", "optimizer"} of a layer, in float16 "scaler" too, on the CPU, its digest checked.

        mapped: leave the tensors in the file until they are read. Raises CapslogError where it is missing or damaged.
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
        """Parameters and buffers of a layer to compute with: averages where there are any. Arguments as `layer`."""
        state = self.layer(name, mapped)
        averages = {parameter: kept[AVERAGE] for parameter, kept in state["optimizer"].items() if AVERAGE in kept}
        weights: dict[str, Tensor] = state["parameters"] | averages | state["buffers"]
        return weights


def _is_layer(state: Any) -> bool:
    """True where the content of a file has the form of `stored_layers.to_checkpoint`."""
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
    """Content that `torch.save` wrote into a file, on the CPU. Raises CapslogError where it is missing or damaged.

    advice: end of the error's sentence. digest: of the file in the manifest. mapped: leave the tensors in the file
    until they are read.
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
    """Give a complete checkpoint its name; an existing one of that name is moved to `replaced` and then removed."""
    files.sync_folder(partial)
    shutil.rmtree(replaced, ignore_errors=True)
    if final.exists():
        os.replace(final, replaced)
    os.replace(partial, final)
    files.sync_folder(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def write_synced(path: Path, state: Mapping[str, Any]) -> dict[str, Any]:
    """Save with torch and sync; return size and digest for the manifest. Raises OSError, also for a full disk."""
    with open(path, "wb", opener=files.no_link) as file:
        _save(file, state)
        file.flush()
        os.fsync(file.fileno())
    return entry_of(path)


def write_whole(path: Path, state: Mapping[str, Any]) -> None:
    """Save with torch, completely or not at all, for files that several processes may write alike. Raises OSError."""
    with files.whole_file(path) as file:
        _save(file, state)


def _save(file: BinaryIO, state: Mapping[str, Any]) -> None:
    try:
        torch.save(state, file)
    except RuntimeError as error:
        # torch's zip writer reports a failed write as a RuntimeError of its own
        if isinstance(error.__context__, OSError):
            raise error.__context__ from error
        raise OSError(None, str(error).splitlines()[0]) from error


def entry_of(path: Path) -> dict[str, Any]:
    """Size and digest of a file, as a manifest names them."""
    return {"bytes": path.stat().st_size, "digest": files.digest_of(path)}


def open_checkpoint(path: Path) -> Checkpoint:
    """Checkpoint in a folder, its manifest read and the sizes of its files checked. Raises as `check_manifest`."""
    return Checkpoint(path, read_manifest(path))


def latest_checkpoint(folder: Path) -> tuple[Checkpoint | None, list[str]]:
    """Newest complete checkpoint in a run's `checkpoints/` (None if there is none), and problems of newer ones."""
    skipped: list[str] = []
    for path in sorted(folder.glob("step-*"), reverse=True):
        try:
            return open_checkpoint(path), skipped
        except CapslogError as error:
            skipped.append(str(error))
    return None, skipped


def passed_over(checkpoint: Checkpoint | None, skipped: Sequence[str]) -> list[str]:
    """Lines for the user about `latest_checkpoint`, where a run does not continue from the newest checkpoint."""
    lines = [f"passed over a checkpoint: {problem.removesuffix(f'; {REMEDY}')}" for problem in skipped]
    if skipped and checkpoint is None:
        lines.append("no checkpoint is whole: the run begins anew")
    return lines


def best_checkpoint(folder: Path) -> Checkpoint:
    """Checkpoint with the best score, else the newest. Raises CapslogError where there is none, or it is damaged."""
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


def prune(folder: Path, keep: int, spare: Iterable[int] = (), beside: bool = False) -> None:
    """Remove all but the `keep` newest checkpoints and the steps in `spare`, and leftovers of interrupted writes.

    beside: they lose their names now, and a thread frees the disk, which may take a second for large files.
    """
    spared = {f"step-{step:08d}" for step in spare}
    removed = [path for path in sorted(folder.glob("step-*"))[:-keep] if path.name not in spared]
    removed += folder.glob(".partial-*")
    if beside and removed:
        with contextlib.suppress(OSError):
            # should the process end first, the next call finds it among the leftovers
            away = Path(tempfile.mkdtemp(prefix=".partial-removed-", dir=folder))
            for path in removed:
                os.replace(path, away / path.name)
            thread = OwnedThread("old checkpoints", shutil.rmtree, logged, away, True)
            thread.daemon = False  # the process ends when they are gone
            thread.start()
            return
    for path in removed:
        shutil.rmtree(path, ignore_errors=True)
