"""States that members leave on disk when a run stops between two checkpoints, and their use by the next run.

Every member writes the layers that it holds, at each boundary, into the run's `held/`: one folder per boundary, one
file per layer, and the newest record of the membership. The next run looks there first: it takes the newest boundary of
the run's past with every layer, and removes the rest. Our engine makes a checkpoint of it (`write_held`, `recover`);
the Varuna plugin keeps its own files (`write_boundaries`, `take_newest`).
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
from varuna_capslog.training.stored_layers import manifest_of_layers, to_checkpoint

__all__ = ["recover", "take_newest", "write_boundaries", "write_held"]

_log = logging.getLogger(__name__)
_REMEDY = "remove the folder held/, and the run goes on from its last checkpoint"

HeldStates = Mapping[tuple[int, Stamp], LayerState]
"""The states that a member holds, by layer and boundary."""


def write_boundaries(
    run_dir: Path,
    held: HeldStates,
    record: Generation,
    about: Mapping[str, Any],
    write: Callable[[Path, int, LayerState], None],
) -> None:
    """Write the states that a member holds. Several members may write the same one: equal stamps are equal states.

    Args:
        record: the member's newest; it says which boundaries lie on the run's past.
        about: further data for the next run, as JSON.
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
    """Take the newest whole boundary in `held/` that lies on the run's past and after step `after`; remove the rest.

    take: called with a boundary's folder, its step and the data written `about` the run, the newest first; moves
    the folder away and returns its new place, or None where a layer is missing.
    """
    folder, taken = run_dir / "held", None
    files.refuse_link(folder)
    records = sorted(folder.glob("record-*.json"))
    if records:
        record, about = _read_record(records[-1])
        for place in sorted(folder.iterdir(), reverse=True):
            stamp = Stamp.of_name(place.name)
            if stamp is None or place.is_symlink() or not place.is_dir():
                continue  # nothing that a member wrote
            if stamp.step > after and record.continues(stamp):
                taken = take(place, stamp.step, about)
                if taken is not None:
                    break
    shutil.rmtree(folder, ignore_errors=True)
    return taken


def _read_record(path: Path) -> tuple[Generation, dict[str, Any]]:
    """Newest record of the membership, and the other data of its file."""
    about = files.read_json(path)
    try:
        return Generation.from_json(fields.mapping(about, "what it holds").get("record"), "record"), about
    except CapslogError as error:
        raise CapslogError(f"{path}: {error}; {_REMEDY}") from error


def write_held(
    run_dir: Path, chain: Chain, held: HeldStates, record: Generation, generation: int, extra: Mapping[str, Any]
) -> None:
    """Write a member's states of our engine as checkpoint files (`write_boundaries`). extra: for the manifest."""

    def write(place: Path, index: int, state: LayerState) -> None:
        file = f"layer-{index:04d}.pt"
        if not (place / f"{file}.json").exists():
            write_whole(place / file, to_checkpoint(state, chain, index))
            files.write_json(place / f"{file}.json", {"file": file, **entry_of(place / file)})

    names = [layer.name for layer in chain.layers]
    manifest = {"model": chain.name, **manifest_of_layers(chain), "generation": generation, **extra, "layers": names}
    write_boundaries(run_dir, held, record, {"manifest": manifest}, write)


def recover(run_dir: Path) -> Path | None:
    """Make a checkpoint of the states in `held/` where they are newer than the last one, and remove the rest. Called by
    one process before any run starts, elastic or not. Returns the checkpoint's folder; None where none was made.
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
    """Manifest's entry of a layer's file, as `write_held` wrote it."""
    return {**fields.mapping(files.read_json(place / f"{file}.json"), file), "file": file}


def _layers_of(about: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Manifest beside a record, and the name of each layer by its file."""
    try:
        manifest = fields.mapping(about.get("manifest"), "manifest")
        layers = [fields.text(name, "layers") for name in fields.listed(manifest.get("layers"), "layers")]
    except CapslogError as error:
        raise CapslogError(f"the newest record in held/: {error}; {_REMEDY}") from error
    return manifest, {f"layer-{index:04d}.pt": name for index, name in enumerate(layers)}
