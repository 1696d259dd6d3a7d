"""What the members of a run that stops between two checkpoints leave on disk, and how the next run goes on from it.

Every member writes the layers that it holds, at each boundary at which it holds them, into the run's `held/`: one
folder per boundary, one file per layer, and the newest record of the membership. The next run looks there first: the
newest boundary on the run's past of which every layer is there is taken, the rest is removed. Our engine makes a
checkpoint of it (`write_held`, `recover`); the Varuna plugin keeps its own files (`write_boundaries`, `take_newest`).
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from varuna_capslog.base import fields, files
from varuna_capslog.base.clock import wall_seconds
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.membership.generation import Generation, Stamp
from varuna_capslog.model.chain import Chain
from varuna_capslog.training.checkpoint import entry_of, latest_checkpoint, publish, write_whole
from varuna_capslog.training.layer_state import LayerState
from varuna_capslog.training.manifest import FORMAT, check_manifest
from varuna_capslog.training.resplit import manifest_of_layers
from varuna_capslog.training.stored_layers import to_checkpoint

__all__ = ["recover", "take_newest", "write_boundaries", "write_held"]

_log = logging.getLogger(__name__)
_REMEDY = "remove the folder held/, and the run goes on from its last checkpoint"

HeldStates = Mapping[tuple[int, Stamp], LayerState]
"""What a member holds: the state of a layer, by its index and the boundary."""


def write_boundaries(
    run_dir: Path,
    held: HeldStates,
    record: Generation,
    about: Mapping[str, Any],
    write: Callable[[Path, int, LayerState], None],
) -> None:
    """Writes what a member holds. Several members may write the same state: equal stamps are equal states.

    Args:
        record: the member's newest; it says which boundaries lie on the run's past.
        about: what the next run must know besides, as JSON.
        write: puts one layer into the folder of its boundary, unless it is there. Raises OSError.

    Raises:
        CapslogError: the disk is full or cannot be written.
    """
    folder = run_dir / "held"
    try:
        for (index, stamp), state in sorted(held.items()):
            place = folder / f"{stamp.step:08d}-{stamp.generation:06d}"
            place.mkdir(parents=True, exist_ok=True)
            write(place, index, state)
    except OSError as error:
        raise files.write_failure(f"{folder}: what this member holds cannot be written", error) from error
    files.write_json(folder / f"record-{record.number:06d}.json", {"record": record.to_json(), **about})


def take_newest(run_dir: Path, after: int, take: Callable[[Path, int, Mapping[str, Any]], Path | None]) -> Path | None:
    """Takes the newest whole boundary in `held/` that lies on the run's past and after a step; removes the rest.

    Args:
        after: the step; boundaries up to it are of no use.
        take: called with a boundary's folder, its step and what was written `about` the run, the newest first; moves
            the folder away and gives its new place, or None where a layer is missing.
    """
    folder, found = run_dir / "held", None
    files.refuse_link(folder)
    records = sorted(folder.glob("record-*.json"))
    if records:
        record, about = _read_record(records[-1])
        for place in sorted(folder.iterdir(), reverse=True):
            stamp = Stamp.of_name(place.name)
            if stamp is None or place.is_symlink() or not place.is_dir():
                continue  # nothing that a member wrote
            if stamp.step > after and record.continues(stamp):
                found = take(place, stamp.step, about)
                if found is not None:
                    break
    shutil.rmtree(folder, ignore_errors=True)
    return found


def _read_record(path: Path) -> tuple[Generation, dict[str, Any]]:
    """The newest record of the membership, and what lies beside it in its file."""
    about = files.read_json(path)
    try:
        return Generation.from_json(fields.mapping(about, "what it holds").get("record"), "record"), about
    except CapslogError as error:
        raise CapslogError(f"{path}: {error}; {_REMEDY}") from error


def write_held(
    run_dir: Path, chain: Chain, held: HeldStates, record: Generation, generation: int, extra: Mapping[str, Any]
) -> None:
    """Writes what a member of our engine holds, as files of a checkpoint; see `write_boundaries`.

    Args:
        generation: as files number it.
        extra: further entries of a checkpoint's manifest.
    """

    def write(place: Path, index: int, state: LayerState) -> None:
        file = f"layer-{index:04d}.pt"
        if not (place / f"{file}.json").exists():
            write_whole(place / file, to_checkpoint(state, chain, index))
            files.write_json(place / f"{file}.json", {"file": file, **entry_of(place / file)})

    names = [layer.name for layer in chain.layers]
    manifest = {"model": chain.name, **manifest_of_layers(chain), "generation": generation, **extra, "layers": names}
    write_boundaries(run_dir, held, record, {"manifest": manifest}, write)


def recover(run_dir: Path) -> Path | None:
    """Makes a checkpoint of what an earlier run left in `held/`, if that is newer than its last one; removes the rest.

    Called by one process before a run starts, be it one whose members may change or not.

    Returns:
        The checkpoint's folder; None where nothing is to be had.
    """
    checkpoints = run_dir / "checkpoints"

    def take(place: Path, step: int, about: Mapping[str, Any]) -> Path | None:
        manifest, names = _layers_of(about)
        if {path.name.removesuffix(".json") for path in place.glob("*.pt.json")} != set(names):
            return None
        try:
            entries = {name: _entry(place, file) for file, name in names.items()}
            content = {**manifest, "format": FORMAT, "step": step, "time": wall_seconds(), "layers": entries}
            check_manifest(place, content)
        except CapslogError as error:
            _log.warning("passed over what was held after step %d: %s", step, error)
            return None
        files.write_json(place / "manifest.json", content)
        for path in place.glob("*.pt.json"):
            path.unlink()
        checkpoints.mkdir(parents=True, exist_ok=True)
        final = checkpoints / f"step-{step:08d}"
        publish(place, final, checkpoints / f".partial-replaced-{step:08d}")
        return final

    latest, _ = latest_checkpoint(checkpoints)
    return take_newest(run_dir, -1 if latest is None else latest.step, take)


def _entry(place: Path, file: str) -> dict[str, Any]:
    """Of a layer's file in a manifest, as `write_held` wrote it."""
    return {**fields.mapping(files.read_json(place / f"{file}.json"), file), "file": file}


def _layers_of(about: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """The manifest beside a record, and the name of each layer by the file that holds it."""
    try:
        manifest = fields.mapping(about.get("manifest"), "manifest")
        layers = [fields.text(name, "layers") for name in fields.listed(manifest.get("layers"), "layers")]
    except CapslogError as error:
        raise CapslogError(f"the newest record in held/: {error}; {_REMEDY}") from error
    return manifest, {f"layer-{index:04d}.pt": name for index, name in enumerate(layers)}
