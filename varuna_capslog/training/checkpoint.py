"""Checkpoints on disk, addressed by layer and parameter name, so that any of them loads under any plan.

A checkpoint is a folder `step-XXXXXXXX` with one file per layer and a manifest of sizes and digests. It is written
beside its place and renamed when everything is on disk: a crash or a full disk leaves the previous one as it was.
"""

from __future__ import annotations

import functools
import hashlib
import os
import pickle
import shutil
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from varuna_capslog.base import files
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.engine.layers import EngineLayer
from varuna_capslog.engine.optimizer import StageOptimizer
from varuna_capslog.engine.recipe import AVERAGE
from varuna_capslog.model.chain import Chain
from varuna_capslog.training.layer_state import LayerState, flatten, install, model_state, plain_number

__all__ = [
    "Checkpoint",
    "digest_of",
    "entry_of",
    "from_checkpoint",
    "latest_checkpoint",
    "load_chain",
    "load_layers",
    "open_checkpoint",
    "prune",
    "publish",
    "read_file",
    "to_checkpoint",
    "write_synced",
    "write_whole",
]

FORMAT = "varuna-capslog/checkpoint/1"


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk; `manifest` is its JSON."""

    path: Path
    manifest: Mapping[str, Any]

    @property
    def step(self) -> int:
        """The last optimizer step that it contains."""
        return int(self.manifest["step"])

    def layer(self, name: str, mapped: bool = False) -> dict[str, Any]:
        """One layer's {"parameters", "buffers", "optimizer"}, on the CPU; its digest is checked.

        Args:
            mapped: leave the tensors in the file until they are read.

        Raises:
            CapslogError: the layer is not there, or its file is damaged.
        """
        entry = self.manifest["layers"].get(name)
        if entry is None:
            raise CapslogError(
                f"{self.path}: has no layer {name!r}; it was written for another model (its layers: "
                f"{', '.join(list(self.manifest['layers'])[:8])}, ...)"
            )
        file = self.path / entry["file"]
        loaded: dict[str, Any] = read_file(file, "resume from an older checkpoint", entry["digest"], mapped)
        return loaded

    def weights(self, name: str, mapped: bool = False) -> dict[str, Tensor]:
        """One layer's parameters and buffers to compute with: parameters that have an average have its value.

        As `layer` otherwise.
        """
        state = self.layer(name, mapped)
        averages = {one: kept[AVERAGE] for one, kept in state["optimizer"].items() if AVERAGE in kept}
        weights: dict[str, Tensor] = state["parameters"] | averages | state["buffers"]
        return weights


def read_file(path: Path, advice: str, digest: str | None = None, mapped: bool = False) -> Any:
    """What `torch.save` wrote into a file, on the CPU.

    Args:
        advice: how the error's sentence ends.
        digest: that the manifest has of the file.
        mapped: leave the tensors in the file until they are read.

    Raises:
        CapslogError: the file is missing or damaged.
    """
    try:
        if digest is not None and digest_of(path) != digest:
            raise CapslogError(f"{path}: damaged (its digest differs from the manifest's); {advice}")
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError, zipfile.BadZipFile) as error:
        raise CapslogError(f"{path}: cannot be read ({error}); {advice}") from error


def publish(partial: Path, final: Path, replaced: Path) -> None:
    """Gives a complete checkpoint its name; one of that name lies under `replaced` meanwhile and is then removed."""
    files.sync_folder(partial)
    shutil.rmtree(replaced, ignore_errors=True)
    if final.exists():
        os.replace(final, replaced)
    os.replace(partial, final)
    files.sync_folder(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def write_synced(path: Path, state: Mapping[str, Any]) -> dict[str, Any]:
    """Saves with torch and syncs; returns size and digest for the manifest. Raises OSError, also for a full disk."""
    with open(path, "wb") as file:
        _save(file, state)
        file.flush()
        os.fsync(file.fileno())
    return entry_of(path)


def write_whole(path: Path, state: Mapping[str, Any]) -> None:
    """Saves with torch, whole or not at all, for files that several processes may write alike. Raises OSError."""
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
    """A file's size and digest, as a manifest names them."""
    return {"bytes": path.stat().st_size, "digest": digest_of(path)}


def digest_of(path: Path) -> str:
    """SHA-256 of a file."""
    with open(path, "rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def open_checkpoint(path: Path) -> Checkpoint:
    """A checkpoint folder, with its manifest read and the sizes of its files checked.

    Raises:
        CapslogError: not a checkpoint, another format, or files missing or cut short.
    """
    manifest = files.read_json(path / "manifest.json")
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise CapslogError(f"{path}/manifest.json: format is not {FORMAT!r}; give a folder written by this program")
    for name, entry in manifest["layers"].items():
        file = path / entry["file"]
        if not file.is_file() or file.stat().st_size != entry["bytes"]:
            raise CapslogError(f"{file}: missing or cut short (layer {name!r}); resume from an older checkpoint")
    return Checkpoint(path, manifest)


def latest_checkpoint(folder: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest complete checkpoint in a run's `checkpoints/` (None if there is none), and what was passed over."""
    skipped: list[str] = []
    for path in sorted(folder.glob("step-*"), reverse=True):
        try:
            return open_checkpoint(path), skipped
        except CapslogError as error:
            skipped.append(str(error))
    return None, skipped


def best_checkpoint(folder: Path) -> Checkpoint:
    """The checkpoint with the best score in a run's `checkpoints/`, or the newest if the run was never evaluated.

    Raises:
        CapslogError: there is none.
    """
    best = folder / "best.json"
    if best.is_file():
        return open_checkpoint(folder / f"step-{files.read_json(best)['step']:08d}")
    latest, skipped = latest_checkpoint(folder)
    if latest is None:
        raise CapslogError("; ".join(skipped) or f"{folder} holds no checkpoint yet; train first")
    return latest


def prune(folder: Path, keep: int, spare: Iterable[int] = ()) -> None:
    """Removes all but the `keep` newest checkpoints and the steps in `spare`, and leftovers of broken-off writes."""
    spared = {f"step-{step:08d}" for step in spare}
    for path in sorted(folder.glob("step-*"))[:-keep]:
        if path.name not in spared:
            shutil.rmtree(path, ignore_errors=True)
    for path in folder.glob(".partial-*"):
        shutil.rmtree(path, ignore_errors=True)


# -- layers -----------------------------------------------------------------------------------------------------------


def from_checkpoint(checkpoint: Checkpoint, chain: Chain, index: int) -> LayerState:
    """A layer's state from disk, on the CPU; shared parameters come from their first layer's file.

    Raises:
        CapslogError: the checkpoint is damaged or of another model.
    """

    def mismatch(address: str, value: Tensor | None, wanted: Tensor) -> CapslogError:
        found = "nothing" if value is None else f"shape {list(value.shape)}"
        return CapslogError(
            f"{checkpoint.path}: {address!r} has shape {list(wanted.shape)} in the model, {found} there; it was "
            "written for another model"
        )

    name, shared = chain.layers[index].name, chain.shared_names(index)
    return _state_of(checkpoint, name, model_state(chain, index), shared, mismatch)


def _state_of(
    checkpoint: Checkpoint,
    layer: str,
    targets: Mapping[str, Tensor],
    shared: Mapping[str, str],
    mismatch: Callable[[str, Tensor | None, Tensor], CapslogError],
) -> LayerState:
    """What a checkpoint has for a layer.

    Args:
        targets: a state of the layer, whose parameters and buffers are looked up.
        shared: name inside the layer -> address, of its shared parameters.
        mismatch: the error for (address, its value or None, the tensor that it should fill).
    """
    read: dict[str, dict[str, Any]] = {}

    def part(owner: str, kind: str) -> Mapping[str, Any]:
        if owner not in read:
            read[owner] = checkpoint.layer(owner)
        found: Mapping[str, Any] = read[owner][kind]
        return found

    state: LayerState = {}
    for key, tensor in targets.items():
        kind, name = key.split("/", 1)
        address, owner, inner = f"{layer}.{name}", layer, name
        if kind == "parameters":
            address = shared.get(name, address)
            owner, inner = _split_address(address, layer, name, checkpoint)
        value = part(owner, kind).get(inner)
        if value is None or value.shape != tensor.shape:
            raise mismatch(address, value, tensor)
        state[key] = value
        if kind == "parameters":
            state |= flatten({}, {}, {name: part(owner, "optimizer").get(inner, {})})
    return state


def _split_address(address: str, layer: str, name: str, checkpoint: Checkpoint) -> tuple[str, str]:
    """The layer in whose file a checkpoint keeps a parameter, and its name there.

    Args:
        address: of the parameter.
        layer, name: a layer that uses it, and its name there.

    Raises:
        CapslogError: it is not shared there.
    """
    if address == f"{layer}.{name}":
        return layer, name
    uses = checkpoint.manifest["shared"].get(address)
    if uses is None:
        raise CapslogError(
            f"{checkpoint.path}: parameter {address!r} is not shared there; it was written for another model"
        )
    first, inner = uses[0]
    return list(checkpoint.manifest["layers"])[first], inner


def to_checkpoint(state: Mapping[str, Tensor], chain: Chain, index: int, copy: bool = False) -> dict[str, Any]:
    """What a checkpoint's file of this layer holds: {"parameters", "buffers", "optimizer"}, on the CPU.

    Args:
        copy: of tensors on the CPU too, which are otherwise those of `state`.
    """

    def host(tensor: Tensor) -> Tensor:
        return tensor.detach().to("cpu", copy=copy)

    layer, shared = chain.layers[index], chain.shared_names(index)
    parameters: dict[str, Tensor] = {}
    buffers: dict[str, Tensor] = {}
    moments: dict[str, dict[str, Any]] = {}
    for key, tensor in state.items():
        kind, name = key.split("/", 1)
        if kind == "buffers":
            buffers[name] = host(tensor)
            continue
        name, _, moment = name.partition("/")
        if shared.get(name, f"{layer.name}.{name}") != f"{layer.name}.{name}":
            continue  # it belongs to an earlier layer
        if kind == "parameters":
            parameters[name] = host(tensor)
        else:
            kept = moments.setdefault(name, {})
            kept[moment] = host(tensor) if kind == "optimizer" else plain_number(tensor)
    return {"parameters": parameters, "buffers": buffers, "optimizer": moments}


def load_layers(checkpoint: Checkpoint, layers: Sequence[EngineLayer], optimizer: StageOptimizer) -> None:
    """Loads these layers' parameters, buffers and moments.

    Raises:
        CapslogError: a layer or parameter is missing or has another shape (both are named).
    """

    mismatch = functools.partial(_mismatch, checkpoint.path)
    for layer in layers:
        targets = flatten(layer.parameters, layer.buffers, {})
        install(layer, optimizer, _state_of(checkpoint, layer.name, targets, layer.shared, mismatch))


def load_chain(checkpoint: Checkpoint, chain: Chain) -> None:
    """Loads a whole chain's weights, see `Checkpoint.weights`, on one device (prediction, export)."""
    chain.fill()
    for layer in chain.layers:
        weights = checkpoint.weights(layer.name)
        targets: dict[str, Tensor] = dict(layer.module.named_parameters()) | dict(layer.module.named_buffers())
        for name, value in weights.items():
            if name not in targets:
                raise CapslogError(f"{checkpoint.path}: the model's layer {layer.name!r} has no parameter {name!r}")
            if value.shape != targets[name].shape:
                raise _mismatch(checkpoint.path, f"{layer.name}.{name}", value, targets[name])
            with torch.no_grad():
                targets[name].copy_(value)


def _mismatch(where: Path, address: str, value: Tensor | None, target: Tensor) -> CapslogError:
    if value is None:
        return CapslogError(f"{where}: has no {address!r}; it was written for another model")
    return CapslogError(
        f"{where}: {address!r} has shape {list(value.shape)}, the model wants {list(target.shape)}; use init_from "
        "with init_skip to leave it out"
    )
