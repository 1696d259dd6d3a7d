"""Checkpoints load completely under any cut list; damaged or incomplete ones are refused by all ranks."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from tests.engine.pool import WorkerPool
from tests.varuna_plugin import checkpoints
from tests.varuna_plugin.cases import Case, oracle, worst

WRITTEN = Case([0, 4, 5], steps=2, optimizer="adam")


@pytest.fixture(scope="module")
def folder(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("store")
    results = pool.run(checkpoints.train_and_save, 3, WRITTEN, path, 2)
    assert sorted(os.listdir(path)) == ["varuna_ckpt_2"]
    for piece in range(6):
        for kind in ("opt-fp32-params", "opt-state", "capslog-extra"):
            assert f"{kind}-{piece}" in results[0]["files"]
    return path


@pytest.mark.parametrize("cuts", [[0, 4, 5], [0, 1], [0, 2, 3, 5], [0]])
def test_training_goes_on_under_other_cuts(pool: WorkerPool, folder: Path, cuts: list[int]) -> None:
    """The step after loading depends on parameters, moments, learning rate, running statistics and a tie over three
    stages.
    """
    case = Case(cuts, optimizer="adam")
    outcomes = pool.run(checkpoints.load_and_train, case.ranks, case, folder, 2)
    assert not any(isinstance(outcome, str) for outcome in outcomes), outcomes
    expected = oracle(Case([0], steps=3, optimizer="adam", rates={2: 0.05}))
    expected.losses, expected.norms = expected.losses[2:], expected.norms[2:]
    differences = worst(outcomes, expected)
    assert all(value <= 1e-5 for value in differences.values()), differences
    assert set().union(*(outcome.parameters for outcome in outcomes)) == set(expected.parameters)


def test_random_numbers_go_on_under_the_same_layout(pool: WorkerPool, tmp_path: Path) -> None:
    before = pool.run(checkpoints.train_and_save, 3, WRITTEN, tmp_path, 1)
    after = pool.run(checkpoints.random_state_after_load, 3, WRITTEN, tmp_path, 1)
    assert all(torch.equal(saved["random"], loaded) for saved, loaded in zip(before, after, strict=True))


def test_a_damaged_file_is_refused_by_every_rank(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(checkpoints.train_and_save, 2, Case([0, 4]), tmp_path, 1)
    file = tmp_path / "varuna_ckpt_1" / "opt-state-2"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(bytes(content))
    problems = pool.run(checkpoints.load_and_train, 2, Case([0, 4]), tmp_path, 1)
    assert all(isinstance(text, str) and "opt-state-2: damaged" in text for text in problems), problems


def test_a_missing_piece_is_refused(pool: WorkerPool, tmp_path: Path) -> None:
    # Varuna compares the count with the names of the asking rank and takes it
    pool.run(checkpoints.train_and_save, 2, Case([0, 4]), tmp_path, 1)
    (tmp_path / "varuna_ckpt_1" / "opt-fp32-params-1").unlink()
    problems = pool.run(checkpoints.load_and_train, 2, Case([0, 4]), tmp_path, 1)
    assert all(isinstance(text, str) and "not all of 0 to 5" in text for text in problems), problems


def test_a_full_disk_leaves_the_older_one(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(checkpoints.train_and_save, 2, Case([0, 4]), tmp_path, 1)
    before = {path.name: path.read_bytes() for path in (tmp_path / "varuna_ckpt_1").glob("opt-*")}
    problems = pool.run(checkpoints.break_while_writing, 2, Case([0, 4]), tmp_path)
    assert all("rank 1: No space left on device" in text for text in problems), problems
    assert os.listdir(tmp_path) == ["varuna_ckpt_1"]
    assert {path.name: path.read_bytes() for path in (tmp_path / "varuna_ckpt_1").glob("opt-*")} == before


@pytest.mark.parametrize("cuts", [[0, 2], [0, 1], [0, 1, 3]])
def test_files_that_varuna_itself_wrote_load(pool: WorkerPool, tmp_path: Path, cuts: list[int]) -> None:
    written: dict[str, dict] = {"parameters": {}, "moments": {}}  # type: ignore[type-arg]
    for theirs in pool.run(checkpoints.write_as_varuna, 2, tmp_path, cuts == [0, 1]):
        written["parameters"] |= theirs["parameters"]
        written["moments"] |= theirs["moments"]
    assert len(written["parameters"]) == 8
    names: set[str] = set()
    for ours in pool.run(checkpoints.load_as_plugin, len(cuts), tmp_path, cuts):
        assert ours["lr"] == 0.02
        for name, value in ours["parameters"].items():
            names.add(name)
            assert torch.equal(value, written["parameters"][name])
            for key, moment in ours["moments"][name].items():
                assert torch.equal(moment, written["moments"][name][key])
    assert names == set(written["parameters"])


def test_varunas_own_functions_read_ours(pool: WorkerPool, tmp_path: Path) -> None:
    written = pool.run(checkpoints.save_one_tensor, 2, tmp_path)
    for ours, theirs in zip(written, pool.run(checkpoints.load_as_varuna, 2, tmp_path, 1), strict=True):
        assert theirs["state"].keys() == ours.keys()
        assert all(torch.equal(theirs["state"][name], value) for name, value in ours.items())
        # its check expects one more than the number of parameters, for a name that it made up
        assert theirs["written"] >= 9
