"""Checks a checkpoint's manifest and a run's best.json before anything that they name is read.

A run's folder may come from anybody: the shape of the JSON is checked once here, and a layer's file lies beside its
manifest. Imports no torch.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from varuna_capslog.base import fields, files
from varuna_capslog.base.errors import CapslogError

__all__ = ["FORMAT", "REMEDY", "REMOVE_BEST", "check_manifest", "read_best", "read_manifest"]

FORMAT = "varuna-capslog/checkpoint/1"
REMEDY = "set resume to the folder of an older checkpoint"
REMOVE_BEST = "remove best.json, and the newest checkpoint is taken"


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of a checkpoint's folder, checked by `check_manifest`. Raises as that does."""
    manifest = files.read_json(folder / "manifest.json")
    check_manifest(folder, manifest)
    checked: dict[str, Any] = manifest
    return checked


def check_manifest(folder: Path, manifest: Any) -> None:
    """Check the content of a checkpoint's manifest, and the sizes of the files that it names.

    Raises CapslogError: not a checkpoint, another format or shape, or files missing or cut short.
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
    for name in ("constants", "data"):  # versions that knew neither wrote none
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
    """Name, size and number of held indices of a `model.splitting.pieces.TensorPiece` as JSON; its ranges must rise."""
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
    """Score (more is better) and step of the best checkpoint, if any. Raises CapslogError for a damaged file."""
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
