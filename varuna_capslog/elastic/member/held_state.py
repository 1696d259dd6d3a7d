"""What the members of a run that stops between two checkpoints leave on disk, and the checkpoint that is made of it.

Every member writes the layers that it holds, at each boundary at which it holds them, into the run's `held/`. The
next run looks there first: the newest boundary on the run's past of which every layer is there becomes a checkpoint.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from varuna_capslog.base import files
from varuna_capslog.membership.generation import Generation, Stamp

if TYPE_CHECKING:
    from varuna_capslog.elastic.member.work import LayerState
    from varuna_capslog.model.chain import Chain

__all__ = ["recover", "write_held"]


def write_held(
    run_dir: Path,
    chain: Chain,
    held: Mapping[tuple[int, Stamp], LayerState],
    record: Generation,
    generation: int,
    extra: Mapping[str, Any],
) -> None:
    """Writes what a member holds. Several members may write the same state: equal stamps are equal states.

    Args:
        record: the member's newest; it says which boundaries lie on the run's past.
        generation: as files number it.
        extra: further entries of a checkpoint's manifest.

    Raises:
        CapslogError: the disk is full or cannot be written.
    """
    from varuna_capslog.training import layer_state
    from varuna_capslog.training.checkpoint import write_synced

    folder = run_dir / "held"
    try:
        for (index, stamp), state in sorted(held.items()):
            place = folder / f"{stamp.step:08d}-{stamp.generation:06d}"
            place.mkdir(parents=True, exist_ok=True)
            file = f"layer-{index:04d}.pt"
            if (place / f"{file}.json").exists():
                continue
            fresh = place / f"{file}.{os.getpid()}"
            entry = write_synced(fresh, layer_state.to_checkpoint(state, chain, index))
            os.replace(fresh, place / file)
            files.write_json(place / f"{file}.json", {"file": file, **entry})
    except OSError as error:
        raise files.write_failure(f"{folder}: what this member holds cannot be written", error) from error
    shared = {use.name: [[index, name] for index, name in use.uses] for use in chain.shared}
    names = [layer.name for layer in chain.layers]
    manifest = {"model": chain.name, "shared": shared, "generation": generation, **extra, "layers": names}
    files.write_json(folder / f"record-{record.number:06d}.json", {"record": record.to_json(), "manifest": manifest})


def recover(run_dir: Path) -> Path | None:
    """Makes a checkpoint of what an earlier run left in `held/`, if that is newer than its last one; removes the rest.

    Called by one process before a run starts, be it one whose members may change or not.

    Returns:
        The checkpoint's folder; None where nothing is to be had.
    """
    folder, checkpoints = run_dir / "held", run_dir / "checkpoints"
    records = sorted(folder.glob("record-*.json"))
    if not records:
        return None
    from varuna_capslog.training.checkpoint import FORMAT, latest_checkpoint, sync_folder

    newest = files.read_json(records[-1])
    record, manifest = Generation.from_json(newest["record"], str(records[-1])), newest["manifest"]
    latest, _ = latest_checkpoint(checkpoints)
    for place in sorted(folder.glob("*-*"), reverse=True):
        if not place.is_dir():
            continue
        step, generation = map(int, place.name.split("-"))
        if not record.continues(Stamp(step, generation)) or (latest is not None and step <= latest.step):
            continue
        found = {path.name.removesuffix(".json"): files.read_json(path) for path in place.glob("*.pt.json")}
        wanted = {f"layer-{index:04d}.pt": name for index, name in enumerate(manifest["layers"])}
        if set(found) != set(wanted):
            continue
        entries = {wanted[file]: found[file] for file in wanted}
        content = {**manifest, "format": FORMAT, "step": step, "time": time.time(), "layers": entries}
        files.write_json(place / "manifest.json", content)
        for path in place.glob("*.pt.json"):
            path.unlink()
        sync_folder(place)
        checkpoints.mkdir(parents=True, exist_ok=True)
        final = checkpoints / f"step-{step:08d}"
        os.replace(place, final)
        sync_folder(checkpoints)
        shutil.rmtree(folder, ignore_errors=True)
        return final
    with contextlib.suppress(OSError):
        shutil.rmtree(folder)
    return None
