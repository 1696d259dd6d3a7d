"""Runs on a user's data set: the same bits under all cuts, every sample once, equal to a plain loop, refusals."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from tests.engine import cases
from tests.engine.pool import WorkerPool
from tests.own_data import samples
from varuna_capslog.base import files
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.config.settings import Config
from varuna_capslog.own_data.workload import DatasetWorkload
from varuna_capslog.plans.plan import Plan
from varuna_capslog.training.checkpoint import latest_checkpoint
from varuna_capslog.training.feed import Feed

LAYERS = 6
NAME = "tests.own_data.samples:model"


def config(run_dir: Path, data: dict[str, Any] | None = None, **sections: Any) -> Config:
    keys: dict[str, Any] = {
        "dataset": "tests.own_data.samples:Points",
        "arguments": {"noise": 0.1},
        "loss": "tests.own_data.samples:noted_loss",
        "inputs": ["input"],
    }
    return cases.run_config(
        str(run_dir),
        **{
            "workload": "varuna_capslog.own_data:workload",
            "model": {"factory": NAME},
            "data": keys | (data or {}),
            **sections,
        },
    )


def train(pool: WorkerPool, options: Config, cuts: tuple[int, ...], stop_after: int | None = None) -> dict[str, Any]:
    plan = Plan.of_cuts(num_layers=LAYERS, cuts=cuts, model=NAME)
    end: dict[str, Any] = pool.run(cases.train_run, len(cuts) * options.pipeline.replicas, options, plan, stop_after)[0]
    return end


def lines(run_dir: Path) -> list[dict[str, Any]]:
    return [
        {name: line[name] for name in ("step", "loss", "parts", "grad_norm")}
        for line in files.read_jsonl(run_dir / "metrics.jsonl")
    ]


def plain_steps(
    options: Config, model: nn.Module, dataset: samples.Points, loss_of: Callable[[Any], Tensor]
) -> list[float]:
    """Return loss and gradient norm of each of six steps of a plain loop over the run's minibatches, in one list."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-4)
    feed = Feed(DatasetWorkload(options).train_data(), 8, 2, options.train.seed, [])
    order = [[*itertools.chain(*feed.minibatch(step).sample_ids)] for step in range(1, 7)]
    steps: list[float] = []
    for batch in DataLoader(dataset, batch_sampler=order):
        optimizer.zero_grad()
        mean_loss = loss_of(batch)
        mean_loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        steps += [float(mean_loss.detach()), float(norm)]
    return steps


@pytest.fixture(scope="module")
def whole(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two epochs on one stage, with validation."""
    run_dir = tmp_path_factory.mktemp("whole")
    val = {
        "val": "tests.own_data.samples:Points",
        "val_arguments": {"count": 7},
        "metric": "tests.own_data.samples:shares",
    }
    assert train(pool, config(run_dir, val, train={"evaluate_every": 0}), (0,))["step"] == 6
    return run_dir


def test_every_sample_is_there_once_in_every_epoch(whole: Path) -> None:
    counted = [round(4 * line["parts"]["who"]) for line in lines(whole)]
    assert sum(counted[:3]) == sum(counted[3:]) == 2**samples.COUNT - 1
    assert counted[:3] != counted[3:]


def test_another_pipeline_after_half_of_the_run_changes_no_bit(pool: WorkerPool, whole: Path, tmp_path: Path) -> None:
    train(pool, config(tmp_path), (0, 3), stop_after=4)
    resumed = train(pool, config(tmp_path), (0, 1, 5))
    assert (resumed["resumed"], resumed["step"]) == (4, 6)
    assert lines(tmp_path) == lines(whole)


def test_two_replicas_change_no_bit(pool: WorkerPool, whole: Path, tmp_path: Path) -> None:
    train(pool, config(tmp_path, pipeline={"replicas": 2}), (0, 2))
    assert lines(tmp_path) == lines(whole)


def test_the_losses_are_those_of_a_plain_loop_with_a_data_loader(pool: WorkerPool, tmp_path: Path) -> None:
    options = config(tmp_path, {"arguments": {}}, model={"factory": NAME, "arguments": {"dropout": 0.0}})
    train(pool, options, (0, 3))
    torch.manual_seed(options.train.seed)
    model = samples.model(0.0)
    steps = plain_steps(
        options, model, samples.Points(), lambda batch: F.cross_entropy(model(batch["input"]), batch["label"])
    )
    assert [line["loss"] for line in lines(tmp_path)] == pytest.approx(steps[::2], abs=1e-5)


@pytest.mark.parametrize("loss", ["cross_entropy", "chunked_cross_entropy", "tests.own_data.samples:counting_loss"])
def test_labels_that_are_ignored_unevenly_count_for_the_whole_minibatch(
    pool: WorkerPool, tmp_path: Path, loss: str
) -> None:
    """The mean of the microbatches' means was taken: of microbatches with one label as much as of one with all, and a
    microbatch without any ended the run.
    """
    data = {"arguments": {"labelled": 9}, "loss": loss, "val": "tests.own_data.samples:Points"}
    data["val_arguments"] = {"labelled": 5, "count": 8}
    model = {"factory": NAME, "arguments": {"dropout": 0.0}}
    sections = {"model": model, "pipeline": {"replicas": 2}, "train": {"evaluate_every": 0}}
    options = config(tmp_path, data, **sections)
    train(pool, options, (0, 3))
    torch.manual_seed(options.train.seed)
    plain = samples.model(0.0)
    batches = samples.Points(labelled=9)
    expected = plain_steps(
        options, plain, batches, lambda batch: F.cross_entropy(plain(batch["input"]), batch["label"])
    )
    told = [line[name] for line in lines(tmp_path) for name in ("loss", "grad_norm")]
    assert told == pytest.approx(expected, abs=1e-5)
    assert all(line["parts"] == {} for line in lines(tmp_path))
    batch = next(iter(DataLoader(samples.Points(8, labelled=5), batch_size=8)))
    score = files.read_jsonl(tmp_path / "evaluations.jsonl")[-1]["scores"]["val_loss"]
    assert score == pytest.approx(float(F.cross_entropy(plain(batch["input"]), batch["label"]).detach()), abs=1e-4)


@pytest.mark.parametrize("shifted", [False, True], ids=["in place", "shifted"])
def test_labels_that_are_ignored_count_in_a_loss_of_the_model_s_own(
    pool: WorkerPool, tmp_path: Path, shifted: bool
) -> None:
    """Microbatches had the same weight, with one label that counts or with all; one without any ended the run."""
    data = {"dataset": "tests.own_data.samples:Rows", "arguments": {"labelled": 16}, "loss": None, "inputs": None}
    model = {"factory": "tests.own_data.samples:OwnLoss", "arguments": {"shifted": shifted}}
    options = config(tmp_path, data, model=model, pipeline={"replicas": 2})
    chain = DatasetWorkload(options).build_chain()
    plan = Plan.of_cuts(num_layers=len(chain), cuts=(0, 3), model=model["factory"])
    end = pool.run(cases.train_run, 4, options, plan, None)[0]
    assert "error" not in end, end
    torch.manual_seed(options.train.seed)
    plain = samples.OwnLoss(shifted)
    expected = plain_steps(options, plain, samples.Rows(labelled=16), lambda batch: plain(**batch)["loss"])
    told = [line[name] for line in lines(tmp_path) for name in ("loss", "grad_norm")]
    assert told == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("added", [False, True])
def test_a_loss_of_unknown_targets_says_that_microbatches_count_alike(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, added: bool
) -> None:
    data = {"dataset": "tests.own_data.samples:Rows", "arguments": {"labelled": 16}, "loss": None, "inputs": None}
    model = {"factory": "tests.own_data.samples:OwnLoss", "arguments": {"added": added}}
    DatasetWorkload(config(tmp_path, data, model=model)).hand_over()
    assert ("each microbatch counts the same" in caplog.text) is added


def test_a_minibatch_without_any_label_is_refused(pool: WorkerPool, tmp_path: Path) -> None:
    options = config(tmp_path, {"arguments": {"labelled": 0}, "loss": "cross_entropy"})
    assert (
        "step 1: none of its targets counts in the loss; nothing was applied" in train(pool, options, (0, 3))["error"]
    )


def test_the_scores_are_means_over_the_samples_that_fill_microbatches(whole: Path) -> None:
    checkpoint, _ = latest_checkpoint(whole / "checkpoints")
    assert checkpoint is not None
    model = samples.model()
    chain = DatasetWorkload(config(whole)).build_chain()
    for layer in chain.layers:
        layer.module.load_state_dict(checkpoint.weights(layer.name))
    weights = {name.partition(".")[2]: tensor for name, tensor in chain.named_tensors().items()}
    model.load_state_dict({name: weights[name] for name in model.state_dict()})
    batch = next(iter(DataLoader(samples.Points(6), batch_size=6)))
    outputs = model.eval()(batch["input"])
    scores = files.read_jsonl(whole / "evaluations.jsonl")[-1]["scores"]
    assert list(scores) == ["first", "val_loss", "val_who"]
    assert scores["val_loss"] == pytest.approx(float(F.cross_entropy(outputs.detach(), batch["label"])), abs=1e-6)
    assert scores["first"] == pytest.approx(float((outputs.argmax(1) == 0).float().mean()))


@pytest.mark.parametrize("data", [{"arguments": {"broken": 12}}, {"loss": "tests.own_data.samples:nan_loss"}])
def test_a_sample_that_cannot_be_read_or_judged_loses_no_step(
    pool: WorkerPool, tmp_path: Path, data: dict[str, Any]
) -> None:
    options = config(tmp_path, data, train={"max_steps": 2})
    feed = Feed(DatasetWorkload(options).train_data(), 8, 2, options.train.seed, [])
    bad = 2
    assert 12 in [*itertools.chain(*feed.minibatch(bad).sample_ids)], "of this seed"
    error = train(pool, options, (0, 3))["error"]
    if "broken" in data.get("arguments", {}):
        assert (
            f"StepRefused: step {bad}: sample 12 of the data set cannot be read (OSError: point-12.png is cut" in error
        )
    else:
        assert "the loss is not finite" in error
    kept = latest_checkpoint(tmp_path / "checkpoints")[0]
    assert (kept.step if kept else 0) == bad - 1


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        ({"arguments": {"longer": 1}}, r"the samples \[0, 1\] of the data set do not collate .*data.collate"),
        ({"arguments": {"broken": 1}}, r"sample 1 of the data set cannot be read \(OSError: point-1.png"),
        ({"arguments": {"count": 1}}, "has 1 samples, fewer than train.microbatch_size=2"),
        ({"arguments": {"cuont": 1}}, "unexpected keyword argument 'cuont'"),
        ({"loss": "tests.own_data.samples:detached_loss"}, "the loss is a tensor without gradient"),
        ({"loss": "tests.own_data.samples:long_loss"}, r"the loss returned a Tensor of shape \[2\]"),
        ({"loss": "tests.own_data.samples:wrong_loss"}, r"KeyError: 'labels'.*float32\[2, 3\].*number: int64\[2\]"),
        ({"loss": None}, "give a loss: cross_entropy"),
        ({"inputs": ["inptu"]}, "no tensor 'inptu' for the model's input 'x'"),
        ({"dataset": "tests.own_data.samples:stream", "arguments": {}}, "give a map-style dataset"),
    ],
)
def test_what_cannot_be_trained_is_said_before_a_worker_starts(
    tmp_path: Path, data: dict[str, Any], sentence: str
) -> None:
    options = config(tmp_path, data)
    with pytest.raises(CapslogError, match=sentence):
        DatasetWorkload(options).hand_over()


def test_the_number_of_samples_is_a_fact_that_a_run_must_find_again(tmp_path: Path) -> None:
    """It fixes their order: a run went on in silence after eight were added."""
    workload = DatasetWorkload(config(tmp_path))
    assert workload.data_facts() == {"number of samples": len(workload.train_data())}


def test_the_engine_that_must_know_targets_beforehand_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CapslogError, match="engine=varuna takes targets that are known before"):
        DatasetWorkload(config(tmp_path, engine="varuna"))


def test_samples_of_another_size_are_named(tmp_path: Path) -> None:
    source = DatasetWorkload(config(tmp_path, {"arguments": {"longer": 9}})).train_data()
    with pytest.raises(CapslogError, match=r"\[8, 9\] of the data set do not collate"):
        source.load(source.minibatch([[8, 9]], 0), 0)
    with pytest.raises(
        CapslogError, match=r"samples \[9\] give the input 'x' as \[1, 5\].* the first ones gave \[1, 4\]"
    ):
        source.load(source.minibatch([[9]], 0), 0)


def test_random_numbers_are_the_samples_own_and_the_runs_stay(tmp_path: Path) -> None:
    source = DatasetWorkload(
        config(tmp_path, {"collate": "tests.own_data.samples:noisy_collate", "inputs": ["x"]})
    ).train_data()
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()  # noqa: NPY002
    noisy = source.load(source.minibatch([[3, 4], [5, 6]], 1), 1)["x"]
    random.random()
    torch.rand(1)
    again = DatasetWorkload(
        config(tmp_path, {"collate": "tests.own_data.samples:noisy_collate", "inputs": ["x"]})
    ).train_data()
    assert torch.equal(again.load(again.minibatch([[5, 6]], 1), 0)["x"], noisy)
    assert not torch.equal(again.load(again.minibatch([[5, 6]], 2), 0)["x"], noisy)
    random.setstate(before[1])
    torch.set_rng_state(before[0])
    source.load(source.minibatch([[7, 8]], 0), 0)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert (np.random.get_state()[1] == before[2]).all()  # noqa: NPY002


def test_a_loss_gets_the_outputs_as_the_model_names_them(tmp_path: Path) -> None:
    options = config(
        tmp_path,
        {"loss": "tests.own_data.samples:named_loss", "inputs": None},
        model={"factory": "tests.own_data.samples:Named"},
    )
    workload = DatasetWorkload(options)
    workload.hand_over()
    batch, normalisers = workload.profile_targets(2)
    chain = workload.build_chain()
    assert chain.inputs == ("input",)
    parts = workload.loss(chain.run({"input": batch["input"]}), batch, {"microbatches": 4.0})
    assert normalisers == {"microbatches": 1.0}
    assert 0 < float(parts["loss"].detach()) < 1


def test_the_text_of_the_report_is_what_the_trained_model_makes(whole: Path) -> None:
    workload = DatasetWorkload(config(whole, {"sample": "tests.own_data.samples:told"}))
    trained = workload.build_chain()
    with torch.no_grad():
        total = sum(parameter.fill_(0.25).sum() for parameter in trained.named_parameters().values())
    assert workload.sample_text(lambda: trained) == f"training: False, sum {float(total):.4f}"
    assert DatasetWorkload(config(whole)).sample_text(lambda: pytest.fail("nobody asked for a text")) is None
    broken = DatasetWorkload(config(whole, {"sample": "tests.own_data.samples:stream"}))
    with pytest.raises(CapslogError, match=r"data\.sample failed"):
        broken.sample_text(lambda: trained)
