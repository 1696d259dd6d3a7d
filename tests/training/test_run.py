"""Whole runs: resume to the last bit, checkpoints that survive faults, evaluation on the pipeline."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine import cases
from tests.engine.pool import WorkerPool
from tests.engine.workload import TinyWorkload
from tests.equality import assert_same
from varuna_capslog.base import files
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.training.checkpoint import best_checkpoint, latest_checkpoint, open_checkpoint, prune
from varuna_capslog.training.manifest import check_continues, run_constants
from varuna_capslog.training.run_setup import initialise
from varuna_capslog.training.stored_layers import load_chain

TWO, THREE = (0, 6), (0, 3, 8)


def losses(run_dir: Path) -> dict[int, float]:
    """Loss by step; the last line of a step counts."""
    return {line["step"]: line["loss"] for line in files.read_jsonl(run_dir / "metrics.jsonl")}


def train(pool: WorkerPool, run_dir: Path, cuts: tuple[int, ...] = TWO, **options: Any) -> dict[str, Any]:
    faults = {key: options.pop(key) for key in ("stop_after", "full_disk_at", "starve") if key in options}
    config = cases.run_config(str(run_dir), **options)
    world_size = len(cuts) * config.pipeline.replicas
    arguments = (faults.get("stop_after"), faults.get("full_disk_at"), faults.get("starve"))
    return pool.run(cases.train_run, world_size, config, cuts, *arguments)[0]


@pytest.fixture(scope="module")
def whole(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six steps without interruption."""
    run_dir = tmp_path_factory.mktemp("whole")
    assert train(pool, run_dir)["step"] == 6
    return run_dir


@pytest.mark.parametrize("cuts", [TWO, THREE], ids=["same cuts", "other cuts"])
def test_resume_continues_to_the_last_bit(pool: WorkerPool, whole: Path, tmp_path: Path, cuts: tuple[int, ...]) -> None:
    stopped = train(pool, tmp_path, stop_after=3)
    assert (stopped["step"], stopped["stopped"]) == (3, True)
    resumed = train(pool, tmp_path, cuts)
    assert (resumed["resumed"], resumed["step"], resumed["stopped"]) == (3, 6, False)
    assert losses(tmp_path) == losses(whole)
    expected, continued = (latest_checkpoint(folder / "checkpoints")[0] for folder in (whole, tmp_path))
    assert expected is not None
    assert continued is not None
    for name in expected.manifest["layers"]:
        assert_same(expected.layer(name), continued.layer(name))


BFLOAT16 = {"precision": "bfloat16", "weights": "bfloat16", "moments": "bfloat16"}
TYPES: dict[str, Any] = {
    "float16": {"train": {"precision": "float16"}, "data": {"far": 5}},
    "bfloat16": {"train": BFLOAT16},
}


@pytest.mark.parametrize("types", TYPES)
def test_a_run_of_other_types_resumes_to_the_last_bit(pool: WorkerPool, tmp_path: Path, types: str) -> None:
    assert train(pool, tmp_path / "whole", **TYPES[types])["step"] == 6
    assert train(pool, tmp_path / "parts", stop_after=3, **TYPES[types])["step"] == 3
    assert train(pool, tmp_path / "parts", THREE, **TYPES[types])["resumed"] == 3
    rows = [
        [(line["step"], line["loss"], line["grad_norm"], line.get("loss_scale"), line.get("skipped")) for line in lines]
        for lines in (files.read_jsonl(tmp_path / name / "metrics.jsonl") for name in ("whole", "parts"))
    ]
    assert rows[0] == rows[1]
    assert_same_end(tmp_path / "parts", tmp_path / "whole")
    if types == "float16":
        scale = 65536.0
        for step, _, norm, told, skipped in rows[0]:
            assert (told, norm is None) == (scale, skipped), step
            scale /= 2 if skipped else 1
        # the sample that is far away comes once in three steps, and the first scales are too large for this model
        assert {skipped for *_, skipped in rows[0][:3]} == {True}
        assert False in [skipped for *_, skipped in rows[0][3:]]
        assert True in [skipped for *_, skipped in rows[0][3:]]


def test_two_replicas_write_the_same_losses(pool: WorkerPool, whole: Path, tmp_path: Path) -> None:
    train(pool, tmp_path, pipeline={"replicas": 2})
    assert losses(tmp_path) == losses(whole)


def test_a_changed_constant_is_refused(pool: WorkerPool, whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "run")
    with pytest.raises(RuntimeError, match=r"was written with train\.seed=3, the config says 4"):
        train(pool, tmp_path / "run", train={"seed": 4, "max_steps": 8})


@pytest.mark.parametrize(
    ("before", "now", "message"),
    [
        ({}, {"precision": "float16"}, r"train\.precision=float32, the config says float16"),
        ({}, {"moments": "bfloat16"}, r"train\.moments=float32, the config says bfloat16"),
        ({"precision": "bfloat16"}, BFLOAT16, r"train\.weights=float32, the config says bfloat16"),
        (BFLOAT16, {"precision": "bfloat16"}, r"train\.weights=bfloat16, the config says float32"),
        (
            {"precision": "float16"},
            {"precision": "float16", "loss_scale": 8.0},
            "loss_scale=dynamic, the config says 8",
        ),
    ],
)
def test_other_types_are_refused(tmp_path: Path, before: dict[str, Any], now: dict[str, Any], message: str) -> None:
    original, changed = (cases.run_config(str(tmp_path), train=keys) for keys in (before, now))
    manifest = {"model": "tiny", "constants": run_constants(original)}
    check_continues(original, "tiny", manifest, tmp_path)
    with pytest.raises(CapslogError, match=message):
        check_continues(changed, "tiny", manifest, tmp_path)


def test_a_checkpoint_of_before_there_were_other_types_is_one_of_float32(tmp_path: Path) -> None:
    config = cases.run_config(str(tmp_path), train={"precision": "bfloat16"})
    constants = run_constants(config)
    del constants["weights"], constants["moments"]
    check_continues(config, "tiny", {"model": "tiny", "constants": constants}, tmp_path)
    narrow = cases.run_config(str(tmp_path), train=BFLOAT16)
    with pytest.raises(CapslogError, match=r"train\.weights=float32, the config says bfloat16"):
        check_continues(narrow, "tiny", {"model": "tiny", "constants": constants}, tmp_path)


@pytest.mark.parametrize(
    ("now", "message"),
    [
        ({"number of samples": 72}, "whose number of samples was 64, and now it is 72; .*init_from"),
        ({"category 1": "blue"}, "whose category 1 was 'red', and now it is 'blue'"),
        ({"category 2": "blue"}, "whose category 2 was missing, and now it is 'blue'"),
    ],
)
def test_other_training_data_is_refused(tmp_path: Path, now: dict[str, Any], message: str) -> None:
    """With other samples their order differs, and with renamed categories the weights mean others."""
    config, before = cases.run_config(str(tmp_path)), {"number of samples": 64, "category 1": "red"}
    manifest = {"model": "tiny", "constants": run_constants(config), "data": before}
    check_continues(config, "tiny", manifest, tmp_path, facts=before)
    check_continues(config, "tiny", {**manifest, "data": {}}, tmp_path, facts=before)
    check_continues(config, "tiny", manifest, tmp_path)
    with pytest.raises(CapslogError, match=message):
        check_continues(config, "tiny", manifest, tmp_path, facts=before | now)


def test_checkpoints_keep_the_facts_of_the_data(whole: Path) -> None:
    manifest = open_checkpoint(whole / "checkpoints" / "step-00000006").manifest
    assert manifest["data"] == {"number of samples": 24}


def test_a_run_begins_from_one_of_other_types(pool: WorkerPool, whole: Path, tmp_path: Path) -> None:
    """From float32 to 16 bits and back: the masters are the weights, and only frozen parameters are rounded."""
    still = {"max_steps": 1, "lr": 1e-30}
    for name, source, types in (("low", whole, BFLOAT16), ("wide", tmp_path / "low", {})):
        assert train(pool, tmp_path / name, train=still | types, init_from=str(source))["step"] == 1
    first, low, wide = (
        latest_checkpoint(folder / "checkpoints")[0] for folder in (whole, tmp_path / "low", tmp_path / "wide")
    )
    assert first is not None
    assert low is not None
    assert wide is not None
    for layer in first.manifest["layers"]:
        for name, tensor in first.layer(layer)["parameters"].items():
            narrowed, widened = low.layer(layer)["parameters"][name], wide.layer(layer)["parameters"][name]
            frozen = layer == "stem"
            assert torch.equal(narrowed, tensor.bfloat16() if frozen else tensor), (layer, name)
            assert torch.equal(widened, narrowed.float())


def test_a_full_disk_leaves_the_previous_checkpoint(pool: WorkerPool, tmp_path: Path) -> None:
    result = train(pool, tmp_path, train={"checkpoint_every": 2}, full_disk_at=4)
    assert "checkpoint of step 4 could not be written" in result["error"]
    assert "rank 1: No space left on device" in result["error"]
    latest, skipped = latest_checkpoint(tmp_path / "checkpoints")
    assert latest is not None
    assert (latest.step, skipped) == (2, [])
    assert not list((tmp_path / "checkpoints").glob(".partial-*"))
    assert train(pool, tmp_path)["resumed"] == 2


@pytest.mark.parametrize("operation", ["500 1", "500 30", "500 61"], ids=["before", "in the middle", "at the end"])
def test_an_update_that_finds_no_memory_ends_the_run_and_is_in_no_checkpoint(
    pool: WorkerPool, tmp_path: Path, operation: str
) -> None:
    """A rank has changed some of its parameters, the other rank all; the same command resumes before that step."""
    settings: dict[str, Any] = {"optimizer": "rmsprop", "optimizer_args": {"momentum": 0.9}, "checkpoint_every": 2}
    settings["checkpoint_background"] = False  # that of step 2 has its name before step 4 fails
    with pytest.raises(RuntimeError, match="you tried to allocate 500 bytes"):
        train(pool, tmp_path / "run", train=settings, starve=(4, operation))
    assert max(losses(tmp_path / "run")) <= 4
    resumed = train(pool, tmp_path / "run", train=settings)
    assert (resumed["resumed"], resumed["step"]) == (2, 6)
    train(pool, tmp_path / "undisturbed", train=settings)
    assert losses(tmp_path / "run") == losses(tmp_path / "undisturbed")
    interrupted, undisturbed = (
        latest_checkpoint(tmp_path / name / "checkpoints")[0] for name in ("run", "undisturbed")
    )
    assert interrupted is not None
    assert undisturbed is not None
    for name in interrupted.manifest["layers"]:
        assert_same(interrupted.layer(name), undisturbed.layer(name))


def test_a_checkpoint_cut_short_is_passed_over(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole / "checkpoints", tmp_path / "checkpoints")
    newest = tmp_path / "checkpoints" / "step-00000006"
    older = tmp_path / "checkpoints" / "step-00000005"
    shutil.copytree(newest, older)
    with open(newest / "layer-0003.pt", "r+b") as file:
        file.truncate(100)
    latest, skipped = latest_checkpoint(tmp_path / "checkpoints")
    assert latest is not None
    assert latest.path == older
    assert "layer-0003.pt: missing or cut short" in skipped[0]


def test_a_flipped_bit_is_noticed(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole / "checkpoints" / "step-00000006", tmp_path / "copy")
    file = tmp_path / "copy" / "layer-0005.pt"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(CapslogError, match=r"layer-0005.pt: damaged"):
        open_checkpoint(tmp_path / "copy").layer("encoder.0")


@pytest.mark.parametrize("in_thread", [False, True])
def test_prune_keeps_the_newest_and_the_best(tmp_path: Path, in_thread: bool) -> None:
    for step in (1, 2, 3, 4, 5):
        (tmp_path / f"step-{step:08d}").mkdir()
    (tmp_path / ".partial-step-00000006-g0").mkdir()
    prune(tmp_path, keep=2, spare=[1], in_thread=in_thread)
    for thread in threading.enumerate():
        if thread.name == "old checkpoints":
            thread.join(30)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000004", "step-00000005"]


def test_a_refused_step_saves_the_boundary_before_it(pool: WorkerPool, tmp_path: Path) -> None:
    config = {"data": {"samples": 24, "poison": 5}}
    error = train(pool, tmp_path, **config)["error"]
    assert error.startswith("StepRefused: step ")
    assert "samples [" in error
    step = int(error.split("step ")[1].split(":")[0])
    latest, _ = latest_checkpoint(tmp_path / "checkpoints")
    assert (latest.step if latest else 0) == step - 1


def test_evaluation_on_the_pipeline_is_the_plain_models(pool: WorkerPool, tmp_path: Path) -> None:
    result = train(pool, tmp_path, THREE, train={"evaluate_every": 3, "max_steps": 4}, pipeline={"replicas": 2})
    assert result["scores"]["samples"] == list(range(7))
    chain = TinyWorkload(cases.run_config(str(tmp_path))).build_chain()
    load_chain(open_checkpoint(tmp_path / "checkpoints" / "step-00000004"), chain)
    for layer in chain.layers:
        layer.module.eval()
    workload = TinyWorkload(cases.run_config(str(tmp_path)))
    data, means = workload.val_data(), []
    minibatch = data.minibatch([[0, 1], [2, 3], [4, 5], [6]], 0)
    for microbatch in range(4):
        outputs = chain.run(data.load(minibatch, microbatch))["outputs"]
        means += outputs[-1].mean(dim=(1, 2)).tolist()
    assert result["scores"]["mean"] == pytest.approx(sum(means) / 7, rel=1e-6)
    evaluations = files.read_jsonl(tmp_path / "evaluations.jsonl")
    assert [line["step"] for line in evaluations] == [3, 4]
    best = max(evaluations, key=lambda line: line["scores"]["mean"])
    assert best_checkpoint(tmp_path / "checkpoints").step == best["step"]


def test_init_from_takes_weights_and_skips_what_it_is_told(whole: Path, tmp_path: Path) -> None:
    config = cases.run_config(str(tmp_path), train={"seed": 99})
    workload = TinyWorkload(config)
    fresh, chain = workload.build_chain().named_parameters(), workload.build_chain()
    skipped = initialise(chain, workload, whole, ["encoder.0"])
    trained = open_checkpoint(whole / "checkpoints" / "step-00000006")
    parameters = chain.named_parameters()
    assert torch.equal(parameters["conv1.conv.weight"], trained.layer("conv1")["parameters"]["conv.weight"])
    assert torch.equal(parameters["encoder.0.query.weight"], fresh["encoder.0.query.weight"])
    assert "encoder.0.query.weight: skipped by init_skip" in skipped
    with pytest.raises(CapslogError, match="does not exist"):
        initialise(chain, workload, tmp_path / "nowhere", [])


def test_peaks_are_recorded_for_every_stage(whole: Path) -> None:
    measured = [line for line in files.read_jsonl(whole / "metrics.jsonl") if "peak_bytes" in line]
    assert [line["step"] for line in measured] == [2]
    assert len(measured[0]["peak_bytes"]) == 2
    assert min(measured[0]["peak_bytes"]) > 0
    assert measured[0]["peak_source"] == "cpu allocator events"
    assert measured[0]["peak_input"] == {"x": [2, 3, 8, 8], "sizes": [2, 2]}


BY_HAND, FACTORIES = {"chain": "factory_chain_by_hand"}, {"chain": "factory_chain"}


@pytest.fixture(scope="module")
def by_hand(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six steps and an evaluation on one rank, whose layers are built one after the other in this process."""
    run_dir = tmp_path_factory.mktemp("by-hand")
    assert train(pool, run_dir, (0,), model=BY_HAND, train={"evaluate_every": 6})["step"] == 6
    return run_dir


def assert_same_end(first_run: Path, second_run: Path) -> None:
    actual, expected = (open_checkpoint(folder / "checkpoints" / "step-00000006") for folder in (first_run, second_run))
    for name in expected.manifest["layers"]:
        assert_same(actual.layer(name), expected.layer(name))
    assert actual.manifest["shared"] == expected.manifest["shared"]


def test_a_run_of_factories_is_stopped_resumed_and_evaluated(pool: WorkerPool, by_hand: Path, tmp_path: Path) -> None:
    assert train(pool, tmp_path, THREE, model=FACTORIES, stop_after=3)["step"] == 3
    end = train(pool, tmp_path, (0, 9), model=FACTORIES, train={"evaluate_every": 6})
    assert (end["resumed"], end["step"]) == (3, 6)
    assert_same_end(tmp_path, by_hand)
    scores = [files.read_jsonl(folder / "evaluations.jsonl")[-1]["scores"] for folder in (tmp_path, by_hand)]
    assert scores[0] == scores[1]
    chain = TinyWorkload(cases.run_config(str(tmp_path), model=FACTORIES)).build_chain()
    load_chain(open_checkpoint(tmp_path / "checkpoints" / "step-00000006"), chain)
    assert not any(parameter.is_meta for parameter in chain.named_parameters().values())


def test_layers_of_factories_begin_from_a_checkpoint(pool: WorkerPool, by_hand: Path, tmp_path: Path) -> None:
    """The checkpoint is not one that their chain wrote; layers that are skipped keep the factory's weights."""
    settings = {"init_from": str(by_hand), "init_skip": ["encoder.0", "head.2"], "train": {"seed": 12}}
    for name, cuts, model in (("one", (0,), BY_HAND), ("three", (0, 6, 9), FACTORIES)):
        assert train(pool, tmp_path / name, cuts, model=model, **settings)["step"] == 6
    assert_same_end(tmp_path / "three", tmp_path / "one")
    assert losses(tmp_path / "three") == losses(tmp_path / "one")
    assert losses(tmp_path / "one") != losses(by_hand)
