"""The checkpoint from which an elastic run on Varuna resumes; without Varuna."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from varuna_capslog.base import files
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.membership.generation import Generation, Stamp
from varuna_capslog.varuna_plugin import checkpoint


def test_what_members_left_is_found_again_and_the_rest_goes(tmp_path: Path) -> None:
    """The run resumes from the newest boundary that is complete and belongs to its history."""
    assert checkpoint.begin_with(tmp_path) == (0, None)
    state = {"parameters/w": torch.ones(2)}
    record = Generation(3, ("b",), lineage=((2, Stamp(7, 1)),))
    assert record.continues(Stamp(7, 1))
    assert not record.continues(Stamp(9, 1)), "an abandoned boundary"
    held = {(piece, stamp): state for stamp in (Stamp(6, 1), Stamp(7, 1), Stamp(9, 1)) for piece in range(2)}
    del held[(1, Stamp(7, 1))]
    checkpoint.write_held(tmp_path, held, record, num_pieces=2)
    step, path = checkpoint.begin_with(tmp_path)
    assert step == 6
    assert not (tmp_path / "held").exists()
    assert path is not None
    assert torch.equal(checkpoint.read_held(path, 1)["parameters/w"], torch.ones(2))
    assert checkpoint.begin_with(tmp_path) == (step, path), "a run that ended before its next checkpoint"
    manifest = tmp_path / "checkpoints" / "varuna_ckpt_8"
    manifest.mkdir(parents=True)
    files.write_json(manifest / "capslog-manifest.json", {})
    assert checkpoint.begin_with(tmp_path) == (8, manifest)
    assert not list(tmp_path.glob("resumed-*"))


def test_folders_that_nobody_wrote_are_passed_over(tmp_path: Path) -> None:
    """Regression: a name without a number was a ValueError at every start of the run."""
    for name in ("resumed-x", "resumed-\u00b2", "checkpoints/varuna_ckpt_last"):
        (tmp_path / name).mkdir(parents=True)
    files.write_json(tmp_path / "checkpoints" / "varuna_ckpt_last" / "capslog-manifest.json", {})
    assert checkpoint.begin_with(tmp_path) == (0, None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_pieces": None}, "num_pieces is null"),
        ({"num_pieces": 10**12}, "num_pieces is 1000000000000, more than"),
        ({"parameters": []}, "parameters is a list"),
        ({"buffers": {"b": "0"}}, r"buffers\['b'\] is '0'"),
        ({"files": {"opt-fp32-params-0": 3}}, r"files\['opt-fp32-params-0'\] is a number"),
        ({"format": "other"}, "format is not"),
    ],
)
def test_a_manifest_of_another_shape_is_one_sentence(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    manifest = {"format": checkpoint.FORMAT, "num_pieces": 1, "parameters": {"w": 0}, "buffers": {}, "files": {}}
    (tmp_path / "opt-fp32-params-x").write_text("")
    files.write_json(tmp_path / checkpoint.MANIFEST, {**manifest, "stage_to_rank_map": {}, "cuts": [0], **changes})
    with pytest.raises(CapslogError, match=message):
        checkpoint.Reader(tmp_path, check=True)
