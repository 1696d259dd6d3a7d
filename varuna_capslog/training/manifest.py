"""Reads and checks a checkpoint's manifest and best.json, and checks that a config may continue the checkpoint.

A run's folder may come from anybody. Therefore the structure of the JSON is checked here, before any file that it names
is read; a layer's file must be in the manifest's folder. Imports no torch.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from varuna_capslog.base import fields, files
from varuna_capslog.base.errors import CapslogError, RunFinding, settle
from varuna_capslog.config.settings import Config

__all__ = [
    "FORMAT",
    "REMEDY",
    "REMOVE_BEST",
    "check_continues",
    "check_folder",
    "check_manifest",
    "check_samples",
    "folder_findings",
    "read_best",
    "read_manifest",
    "run_constants",
]

FORMAT = "varuna-capslog/checkpoint/1"
REMEDY = "set resume to the folder of an older checkpoint"
REMOVE_BEST = "remove best.json, and the newest checkpoint is taken"


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of a checkpoint's folder. Raises as `check_manifest`."""
    manifest = files.read_json(folder / "manifest.json")
    check_manifest(folder, manifest)
    checked: dict[str, Any] = manifest
    return checked


def check_manifest(folder: Path, manifest: Any) -> None:
    """Check the content of a checkpoint's manifest, and the sizes of the files that it names.

    Raises CapslogError: not a checkpoint, another format or structure, or missing or truncated files.
    """
    path = folder / "manifest.json"
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise CapslogError(f"{path}: format is not {FORMAT!r}; give a folder written by this program")
    try:
        _check_shape(manifest)
    except CapslogError as error:
        raise CapslogError(f"{path}: {error}; {REMEDY}") from error
    for name, entry in manifest["layers"].items():
        file = folder / entry["file"]
        if not file.is_file() or file.stat().st_size != entry["bytes"]:
            raise CapslogError(f"{file}: missing or cut short (layer {name!r}); {REMEDY}")


def _check_shape(manifest: Mapping[str, Any]) -> None:
    fields.whole(manifest.get("step"), "step")
    for name in ("constants", "data"):  # older versions wrote neither
        fields.mapping(manifest.get(name, {}), name)
    layers = fields.mapping(manifest.get("layers"), "layers")
    for name, entry in layers.items():
        where = f"layers[{name!r}]"
        fields.mapping(entry, where)
        fields.file_name(entry.get("file"), f"{where}.file")
        fields.whole(entry.get("bytes"), f"{where}.bytes")
        fields.text(entry.get("digest"), f"{where}.digest")
    for address, uses in fields.mapping(manifest.get("shared"), "shared").items():
        if not fields.listed(uses, where := f"shared[{address!r}]"):
            raise CapslogError(f"{where} is empty; it must name the layers that share the parameter")
        for use in uses:
            index, name = fields.listed(use, where, length=2)
            fields.text(name, where)
            if fields.whole(index, where) >= len(layers):
                raise CapslogError(f"{where} names layer {index}, but the last layer is {len(layers) - 1}")
    for layer, parts in fields.mapping(manifest.get("splits", {}), "splits").items():
        missing: dict[str, int] = {}
        for part, pieces in fields.mapping(parts, f"splits[{layer!r}]").items():
            for tensor, piece in fields.mapping(pieces, where := f"splits[{layer!r}][{part!r}]").items():
                name, size, held = _size_of(piece, f"{where}[{tensor!r}]")
                missing[name] = missing.get(name, size) - held
        if any(size > 0 for size in missing.values()):
            raise CapslogError(f"splits[{layer!r}] has parts that are smaller together than the whole layer")


def _size_of(piece: Any, where: str) -> tuple[str, int, int]:
    """Name and split size of the whole tensor, and index count of a `TensorPiece` in JSON, whose ranges must rise."""
    name, size, dim, ranges = fields.listed(piece, where, length=4)
    fields.whole(dim, where)
    end = held = 0
    for span in fields.listed(ranges, where):
        first, after = fields.interval(span, where)
        if first < end or after > fields.whole(size, where):
            raise CapslogError(f"{where} has the range [{first}, {after}] of {size}; ranges rise and lie inside")
        end, held = after, held + after - first
    return fields.text(name, where), size if ranges else 0, held


def read_best(checkpoints: Path) -> tuple[float, int] | None:
    """Score (more is better) and step of the best checkpoint; None without one. Raises CapslogError if damaged."""
    path = checkpoints / "best.json"
    if not path.exists():
        return None
    record = files.read_json(path)
    try:
        fields.mapping(record, "what it holds")
        score, step = record.get("value"), fields.whole(record.get("step"), "step")
        if isinstance(score, bool) or not isinstance(score, int | float) or not abs(score) <= sys.float_info.max:
            raise CapslogError("value is no finite number")
    except CapslogError as error:
        raise CapslogError(f"{path}: {error}; {REMOVE_BEST}") from None
    return float(score), step


# -- The settings that must not change between a checkpoint and the run that continues it, and the error for each.
#
# Checked before a run writes to its folder, so that a refused command leaves the folder unchanged, and by every rank
# before it loads the checkpoint.


def run_constants(config: Config, grains: Sequence[int] = ()) -> dict[str, Any]:
    """Return the settings of `train` on which the losses depend, and the grains (`plans.parts.grains_of`)."""
    train = config.train
    return {
        **({"grains": list(grains)} if grains else {}),
        "seed": train.seed,
        "minibatch_size": train.minibatch_size,
        "microbatch_size": train.microbatch_size,
        "accumulation_blocks": config.num_blocks,
        "precision": train.precision,
        "weights": train.weights,
        "moments": train.moments,
        **({"loss_scale": train.loss_scale} if train.precision == "float16" else {}),
    }


def check_continues(
    config: Config,
    model: str | None,
    manifest: Mapping[str, Any],
    path: Path,
    grains: Sequence[int] = (),
    facts: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Raise CapslogError if a run of `config` cannot continue the checkpoint at `path`; see `_differences`."""
    settle(map(RunFinding.of_error, _differences(config, model, manifest, path, grains, facts)))


def _differences(
    config: Config,
    model: str | None,
    manifest: Mapping[str, Any],
    path: Path,
    grains: Sequence[int],
    facts: Mapping[str, Any],
) -> Iterator[CapslogError]:
    """Yield the errors that keep a run of `config` from continuing the checkpoint at `path`.

    Args:
        model: the chain's name; None: unknown.
        grains: of the plan's layers; see `plans.parts.grains_of`.
        facts: about the training data, see `Workload.data_facts`; empty: unknown.
    """
    if model is not None and manifest.get("model") != model:
        yield CapslogError(
            f"{path} was written for the model {manifest.get('model')!r}, the config builds {model!r}; choose another "
            "run_dir, or begin from it with init_from"
        )
        return  # further differences would only follow from the other model
    earlier = {"weights": "float32", "moments": "float32"}  # older versions had no other values and wrote none
    before = earlier | manifest.get("constants", {})
    if before.get("grains", []) != list(grains):
        yield CapslogError(
            f"{path} was written with the grains {before.get('grains') or 1} of its layers, the plan has "
            f"{list(grains) or 1}; losses would not continue: run a plan of the same grains, or begin a new run with "
            "init_from"
        )
    for name, value in run_constants(config).items():
        if name in before and before[name] != value:
            yield CapslogError(
                f"{path} was written with train.{name}={before[name]}, the config says {value}; losses would not "
                "continue: set it back, or begin a new run with init_from"
            )
    then = manifest.get("data", {})  # older versions wrote none
    for name in then | facts if then and facts else ():
        if then.get(name) != facts.get(name):
            yield CapslogError(
                f"{path} was written with training data whose {name} was {_said(then, name)}, and now it is "
                f"{_said(facts, name)}; losses would not continue: set the data back, or begin a new run with init_from"
            )


def _said(facts: Mapping[str, Any], name: str) -> str:
    return repr(facts[name]) if name in facts else "missing"


def check_samples(samples: int, minibatch_size: int) -> None:
    """Raise CapslogError for training data of less than one minibatch."""
    if samples < minibatch_size:
        raise CapslogError(
            f"the training data has {samples} samples, fewer than train.minibatch_size={minibatch_size}; lower it"
        )


def check_folder(
    config: Config,
    model: str | None,
    grains: Sequence[int] = (),
    facts: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Raise CapslogError if `folder_findings` yields any."""
    settle(folder_findings(config, model, grains, facts))


def folder_findings(
    config: Config, model: str | None, grains: Sequence[int], facts: Mapping[str, Any]
) -> Iterator[RunFinding]:
    """Yield (for "never", raise) conflicts of `config.resume` with `run_dir/checkpoints`; skip damaged checkpoints."""
    folder = config.run_dir / "checkpoints"
    folders = sorted(folder.glob("step-*"), reverse=True)
    if config.resume == "never":
        if folders:
            # a later resume would mix their steps with those of this run, and prune both
            raise CapslogError(
                f"resume=never, but {folder} holds the checkpoints of an earlier run; choose another run_dir, or "
                "remove them"
            )
        return
    for path in folders if config.resume == "auto" else [Path(config.resume)]:
        try:
            manifest = read_manifest(path)
        except CapslogError:
            continue
        yield from map(RunFinding.of_error, _differences(config, model, manifest, path, grains, facts))
        return
