"""Whether a run's folder can take its checkpoints, asked before it begins."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.config.settings import Config
from varuna_capslog.start.prepare import disk_findings

MIB = 2**20


def config(run_dir: Path, **train: Any) -> Config:
    return Config(workload="m:f", run_dir=run_dir, train={"minibatch_size": 2, **train})


@pytest.mark.parametrize(
    ("train", "count"),
    [
        ({"epochs": 1}, 4),  # two are kept, one is the best, and one is written
        ({"epochs": 1, "evaluate_every": None, "checkpoint_keep": 5}, 6),
        ({"max_steps": 9, "checkpoint_every": 5}, 2),
        ({"max_steps": 9}, 1),
        ({"max_steps": 9, "evaluate_every": 2}, 4),
    ],
)
def test_the_disk_must_take_the_checkpoints_that_are_there_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, train: dict[str, Any], count: int
) -> None:
    """A run of 70B parameters ended at its third checkpoint, hours after the start, on a disk that took two."""
    run = config(tmp_path / "new" / "run", **train)
    usage = shutil.disk_usage(tmp_path)
    for free, fits in ((count * MIB, True), (count * MIB - 1, False)):
        monkeypatch.setattr(shutil, "disk_usage", lambda path, free=free: usage._replace(free=free))
        if fits:
            (fact,) = disk_findings(run, MIB)
            assert fact.text.startswith(f"{count} checkpoint(s) of about 1 MiB are there at once")
        else:
            with pytest.raises(CapslogError, match=rf"is to hold {count} checkpoint.s. of about 1 MiB, .*keep"):
                list(disk_findings(run, MIB))
    old = tmp_path / "new" / "run" / "checkpoints" / "step-00000001"
    old.mkdir(parents=True)
    (old / "layer.pt").write_bytes(bytes(10))  # will be replaced
    assert list(disk_findings(run, MIB))


def test_a_folder_that_is_a_file_or_lies_in_one_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    for run_dir in ("file", "file/run", "gone", "gone/run"):
        with pytest.raises(CapslogError, match=r"(file|gone) is no folder; choose another run_dir"):
            list(disk_findings(config(tmp_path / run_dir), None))
    assert list(disk_findings(config(tmp_path / "a" / "b"), None)) == []
