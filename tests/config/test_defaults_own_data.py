"""Defaults of a run on the user's own data: none of DETR's values, and a given value always wins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from varuna_capslog.config.defaults import fill_own_train
from varuna_capslog.config.reading import dump_config, load_config
from varuna_capslog.start.choices import OWN_DATA, load_run_config


def filled(train: dict[str, Any], count: int = 1000, val: int | None = None, **more: Any) -> tuple[int, int]:
    """Return the minibatch and microbatch of a run on `count` samples."""
    values: dict[str, Any] = {"train": train, **more}
    fill_own_train(values, {"dataset": count, "val": val}.get, None)
    return values["train"]["minibatch_size"], values["train"]["microbatch_size"]


def test_sizes_that_are_not_given_follow_from_the_data() -> None:
    """A minibatch of at most 32 samples, and the largest microbatch of at most 8 that divides it. With DETR's
    microbatch of one sample a small model spent its time in calls.
    """
    assert filled({}) == (32, 8)
    assert filled({}, count=12) == (12, 6)
    assert filled({}, count=7) == (7, 7)
    assert filled({}, count=31) == (31, 1)
    assert filled({}, val=5) == (32, 4)
    assert filled({"minibatch_size": 20}) == (20, 5)
    assert filled({"microbatch_size": 5}) == (30, 5)
    assert filled({"microbatch_size": 50}) == (50, 50)
    assert filled({"minibatch_size": 6, "microbatch_size": 1}) == (6, 1)
    assert filled({"accumulation_blocks": 8}) == (32, 4)
    assert filled({}, count=31, pipeline={"replicas": 4}) == (28, 7)


def test_sizes_that_are_no_sizes_are_left_to_the_validation() -> None:
    values: dict[str, Any] = {"train": {"minibatch_size": "many"}}
    fill_own_train(values, lambda split: 3, None)
    assert "microbatch_size" not in values["train"]
    values = {"train": []}
    fill_own_train(values, lambda split: 3, None)
    assert values == {"train": []}


SAMPLES = "tests.own_data.samples"


def config(folder: Path, train: str = "", workload: str = OWN_DATA) -> Path:
    path = folder / "own.yaml"
    path.write_text(
        f"workload: {workload}\nmodel: {{factory: '{SAMPLES}:model'}}\n"
        f"data: {{dataset: '{SAMPLES}:Points', arguments: {{count: 24}}, loss: cross_entropy}}\n"
        f"train: {{{train}}}\nrun_dir: {folder / 'run'}\n"
    )
    return path


def test_a_run_on_own_data_has_none_of_detrs_values_and_says_so_in_one_line(tmp_path: Path) -> None:
    """A model on its user's data set was trained with lr 1e-4 and gradients clipped at 0.1, which nobody had set and
    no line reported.
    """
    lines: list[str] = []
    train = load_run_config(config(tmp_path), ["train.lr=0.5"], lines.append).train
    assert (train.optimizer, train.lr, train.clip_norm) == ("adamw", 0.5, 0)
    assert (train.minibatch_size, train.microbatch_size) == (24, 8)
    assert lines == [
        "train: optimizer adamw (default), lr 0.5, clip_norm 0.0 (default), minibatch_size 24 (default), "
        "microbatch_size 8 (default)"
    ]
    detr = load_run_config(config(tmp_path, workload="tests.toy:workload"), (), lines.append).train
    assert (detr.lr, detr.clip_norm, detr.minibatch_size, detr.microbatch_size, len(lines)) == (1e-4, 0.1, 8, 1, 1)


@pytest.mark.parametrize("resume", ["auto", "never", "checkpoint"])
def test_a_run_that_goes_on_keeps_what_its_config_says(tmp_path: Path, resume: str) -> None:
    """A run of an earlier version has a microbatch of 1 and clips at 0.1; other defaults would refuse to resume it."""
    run_dir = tmp_path / "run"
    checkpoint = run_dir / "checkpoints" / "step-3"
    checkpoint.mkdir(parents=True)
    (run_dir / "config.yaml").write_text(dump_config(load_config(config(tmp_path))))
    resume = str(checkpoint) if resume == "checkpoint" else resume
    lines: list[str] = []
    changes = [f"resume={resume}", "train.lr=0.5", *([] if resume in ("auto", "never") else ["run_dir=elsewhere"])]
    train = load_run_config(config(tmp_path), changes, lines.append).train
    expected = (24, 8, 0, 0.5) if resume == "never" else (8, 1, 0.1, 0.5)
    assert (train.minibatch_size, train.microbatch_size, train.clip_norm, train.lr) == expected
    assert ("clip_norm 0.1 (of the run that goes on)" in lines[0]) == (resume != "never")
