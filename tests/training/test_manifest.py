"""Checkpoints of strangers: the rules for manifests and files, and the checkpoint that is taken where they are broken.

A fuzz of 465 damaged checkpoints ended 70 times in a KeyError or a TypeError ("this is a defect"), and a run did not go
on from the older, whole checkpoint, as it does when the newest is cut short.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from varuna_capslog.base import files
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.config.settings import Config
from varuna_capslog.model.layer import TensorPiece
from varuna_capslog.training.checkpoint import (
    best_checkpoint,
    latest_checkpoint,
    open_checkpoint,
    passed_over,
    write_synced,
)
from varuna_capslog.training.manifest import FORMAT, check_folder, read_best

LAYER = {"parameters": {"w": torch.zeros(2)}, "buffers": {}, "optimizer": {"w": {"step": 1}}}


def written(folder: Path, number: int, layer: Any = LAYER, **changes: Any) -> Path:
    """A checkpoint of one layer; a change whose value is Ellipsis leaves the field out."""
    place = folder / f"step-{number:08d}"
    place.mkdir(parents=True)
    entry = {"file": "layer-0000.pt", **write_synced(place / "layer-0000.pt", layer)}
    manifest = {"format": FORMAT, "step": number, "model": "m", "shared": {}, "constants": {}, "layers": {"a": entry}}
    (place / "manifest.json").write_text(
        json.dumps({key: value for key, value in (manifest | changes).items() if value is not ...})
    )
    return place


def entry(**changes: Any) -> dict[str, Any]:
    fields = {"file": "layer-0000.pt", "bytes": 1, "digest": "0", **changes}
    return {"a": {key: value for key, value in fields.items() if value is not ...}}


PIECE = {"whole": {"part": {"w": ["w", 4, 0, [[0, 4]]]}}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": []}, "layers is a list"),
        ({"layers": {"a": [1, 2]}}, r"layers\['a'\] is a list; it must be an object"),
        ({"layers": entry(bytes=...)}, r"layers\['a'\].bytes is null"),
        ({"layers": entry(bytes="1")}, r"layers\['a'\].bytes is '1'; it must be a whole number"),
        ({"layers": entry(file=...)}, r"layers\['a'\].file is null"),
        ({"layers": entry(digest=None)}, r"layers\['a'\].digest is null"),
        ({"step": [0, 3]}, "step is a list"),
        ({"step": ...}, "step is null"),
        ({"shared": ...}, "shared is null"),
        ({"shared": {"a.w": [[7, "w"]]}}, "names layer 7, but the last layer is 0"),
        ({"shared": {"a.w": [[0]]}}, "has 1 entries; it must have 2"),
        ({"shared": {"a.w": []}}, "is empty"),
        ({"constants": [1]}, "constants is a list"),
        ({"data": 3}, "data is a number"),
        ({"splits": {"whole": {"part": {"w": ["w", 4]}}}}, "has 2 entries; it must have 4"),
        ({"splits": {"whole": {"part": {"w": ["w", 10**12, 0, [[0, 1]]]}}}}, "smaller together than the whole layer"),
        ({"splits": {"whole": {"part": {"w": ["w", 4, 0, [[0, 5]]]}}}}, "ranges rise and lie inside"),
        *(
            ({"layers": entry(file=name)}, "it must be the name of a file in the same folder")
            for name in ("../../outside.pt", "/etc/passwd", "a/b.pt", "..", "a\\b", "a\0b", "x" * 300)
        ),
    ],
)
def test_a_manifest_of_another_shape_is_passed_over(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    """A file name that left the checkpoint was read, too."""
    written(tmp_path, 2)
    written(tmp_path, 4, **changes)
    latest, skipped = latest_checkpoint(tmp_path)
    assert latest is not None
    assert latest.step == 2
    (line,) = passed_over(latest, skipped)
    assert line.startswith(f"passed over a checkpoint: {tmp_path}/step-00000004/manifest.json")
    with pytest.raises(CapslogError, match=message):
        open_checkpoint(tmp_path / "step-00000004")


def test_a_whole_manifest_may_have_all_of_it(tmp_path: Path) -> None:
    written(tmp_path, 2, shared={"a.w": [[0, "w"]]}, splits=PIECE, data={"samples": 3}, cuts=[0], time=1.5)
    assert open_checkpoint(tmp_path / "step-00000002").layer("a")["optimizer"] == {"w": {"step": 1}}


@pytest.mark.parametrize(
    "layer",
    [[], {"parameters": {}}, LAYER | {"buffers": {"b": 3}}, LAYER | {"optimizer": {"w": 3}},
     LAYER | {"optimizer": {"w": {"step": "x"}}}, LAYER | {"scaler": {"scale": 1.0}}],
)  # fmt: skip
def test_a_layer_of_another_shape_is_one_sentence(tmp_path: Path, layer: Any) -> None:
    """The author of a manifest also wrote its digests, so they say nothing of what a file holds."""
    with pytest.raises(CapslogError, match=r"layer-0000.pt: holds no layer's parameters, buffers and moments"):
        open_checkpoint(written(tmp_path, 1, layer)).layer("a")


def test_the_constants_of_a_whole_checkpoint_are_compared(tmp_path: Path) -> None:
    """A manifest without layers was compared with the config, though no run would go on from it."""
    written(tmp_path / "checkpoints", 2, constants={"seed": 7})
    written(tmp_path / "checkpoints", 4, constants={"seed": 8}, layers=[])
    with pytest.raises(CapslogError, match=r"step-00000002 was written with train.seed=7"):
        check_folder(Config(run_dir=tmp_path, workload="m:w"), None)


@pytest.mark.parametrize(
    "record",
    [{"step": None}, {"value": 0.5}, {"step": "2", "value": 1}, [2], {"step": 2}, {"step": 2, "value": True},
     {"step": 2.5, "value": 1}, {"step": 2, "value": [1]}, 7],
)  # fmt: skip
def test_a_best_checkpoint_without_a_step_or_score_is_one_sentence(tmp_path: Path, record: Any) -> None:
    written(tmp_path, 2)
    files.write_json(tmp_path / "best.json", record)
    for read in (read_best, best_checkpoint):
        with pytest.raises(CapslogError, match=r"best\.json: .*; remove best\.json, and the newest"):
            read(tmp_path)


def test_a_best_checkpoint_that_is_not_there_is_named(tmp_path: Path) -> None:
    written(tmp_path, 2)
    files.write_json(tmp_path / "best.json", {"step": 3, "value": 0.5})
    with pytest.raises(CapslogError, match=r"best\.json names step 3, but .*manifest\.json.*remove best\.json"):
        best_checkpoint(tmp_path)


def test_a_pipe_in_a_checkpoint_is_no_file(tmp_path: Path) -> None:
    written(tmp_path, 2)
    for name in ("manifest.json", "layer-0000.pt"):
        place = written(tmp_path, 4)
        (place / name).unlink()
        os.mkfifo(place / name)
        latest, skipped = latest_checkpoint(tmp_path)
        assert latest is not None
        assert (latest.step, len(skipped)) == (2, 1)
        for path in place.iterdir():
            path.unlink()
        place.rmdir()


def test_no_layer_is_written_through_a_link(tmp_path: Path) -> None:
    """The maker of a run's folder can guess the name of the next unfinished checkpoint."""
    (tmp_path / "own").write_text("mine")
    (tmp_path / "layer-0000.pt").symlink_to(tmp_path / "own")
    with pytest.raises(OSError, match=r"layer-0000\.pt is a link"):
        write_synced(tmp_path / "layer-0000.pt", LAYER)
    assert (tmp_path / "own").read_text() == "mine"


def test_parts_that_make_no_whole_layer_are_one_sentence() -> None:
    """A stranger's file need not hold what its manifest says; torch's own errors came to the user."""
    half = TensorPiece("w", 4, 0, ((0, 2),))
    for part, target in ((torch.zeros(3), None), (torch.zeros(2), 0.5), (torch.zeros(2, 3), torch.zeros(4, 2))):
        with pytest.raises(CapslogError, match="'w'"):
            half.put(part, target)
    with pytest.raises(CapslogError, match=r"'w' has shape \[3\], but 4 in dimension 0 is due"):
        half.of(torch.zeros(3))
    assert half.of(torch.arange(4)).tolist() == [0, 1]
