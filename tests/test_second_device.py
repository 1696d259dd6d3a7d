"""Training on a second device that refuses what CUDA refuses, to the bits of the CPU: tensors lie where they are used.

The first runs on a GPU found losses that compared targets on the CPU with outputs on the device. Each of these tests
fails where anything on the way of a step makes a tensor on the wrong device.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import second_device
from tests.elastic.live import Cradle, Live, check, config_of, describe, final_of, truth_of
from tests.engine import cases, detr
from tests.engine.compare import differences, gradient_error, merged
from tests.engine.layouts import Cuts, rectangle, with_intervals, with_shares
from tests.engine.pool import WorkerPool
from tests.equality import assert_same
from tests.own_data.test_workload import config as config_of_own_data
from tests.rig import toy
from tests.rig.faults import Fault
from tests.sweeps import some
from varuna_capslog import accelerator
from varuna_capslog.base.files import read_jsonl
from varuna_capslog.engine.communicator import Communicator
from varuna_capslog.engine.layout import Layout
from varuna_capslog.engine.offload import HostTier
from varuna_capslog.engine.probe import PeakProbe
from varuna_capslog.engine.recipe import LearningRate, Recipe
from varuna_capslog.model.workload import known_targets
from varuna_capslog.plans.plan import Plan
from varuna_capslog.profiles.record import read_profile

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    """Processes of its own: none is freed of the second device again."""
    workers = WorkerPool()
    yield workers
    workers.close()


def train_apart(communicator: Communicator, *arguments: Any) -> dict[str, Any]:
    second_device.install()
    return cases.train(communicator, *arguments, device=torch.device(second_device.DEVICE))


# the heads of layers 8, 9 and 10 are one: here on two ranks
ONE, THREE = Cuts((0,), (0,)), Cuts((0, 5, 9), (0, 1, 2))
# torch steps several tensors together on a device by default, one by one on a CPU, with other bits
TOGETHER = {"foreach": True}
ADAMW = Recipe(LearningRate(1e-3), arguments=TOGETHER)
AVERAGED = Recipe(LearningRate(1e-2), optimizer="SGD", arguments=TOGETHER | {"momentum": 0.9}, ema=0.9)
CASES: dict[str, tuple[Layout | Cuts, dict[str, Any]]] = {
    "one rank": (ONE, {}),
    "messages, kept": (THREE, {"schedule": "1f1b", "recompute": False}),
    "backwards in halves": (Cuts((0, 3, 6), (0, 1, 2)), {"schedule": "zb-h1", "recompute": False}),
    "inputs and moments on the host": (
        with_intervals(Layout((rectangle(0, 5, 0), rectangle(5, 11, 1)), 2), 2, ("offload", "recompute+offload")),
        {"schedule": "1f1b"},
    ),
    "moments on another replica": (
        with_shares(Layout.pipelines((0, 7), 11, (0, 1), 2, 2), 1, apart=(8, 9, 10)),
        {"schedule": "1f1b", "recompute": True},
    ),
    "averages of weights": (THREE, {"recipe": AVERAGED}),
    "messages, recomputed": (THREE, {"recompute": True}),
    "two replicas": (Cuts((0, 7), (0, 1), 2), {"schedule": "1f1b", "recompute": True}),
}


@pytest.mark.parametrize("name", some(CASES, 5))
def test_a_step_has_the_bits_of_the_cpu(pool: WorkerPool, name: str) -> None:
    layout, options = CASES[name]
    options = {"recipe": ADAMW} | options
    copies = "plain" if "host" in name else None
    arguments = (layout, options, 2, torch.float32, None, copies)
    results = pool.run(train_apart, layout.world_size, *arguments)
    assert not differences(results, pool.run(cases.train, 1, ONE, {"recipe": options["recipe"]}, 2)[0])
    if copies:
        assert max(rank_result["host bytes"][1] for rank_result in results) > 0


def detr_apart(communicator: Communicator, *arguments: Any) -> dict[str, Any]:
    second_device.install()
    return detr.step(communicator, *arguments, device=torch.device(second_device.DEVICE))


@pytest.mark.parametrize("model", some(["variants", "rt-detr", "batch norm"], 2))
def test_a_detector_has_the_gradients_of_the_cpu(pool: WorkerPool, model: str) -> None:
    """Also with attention in chunks, whose dropout is drawn again in the backward, and channels last."""
    if model == "rt-detr":
        pytest.importorskip("transformers", minversion="5.0")
    options = {"recipe": ADAMW, "recompute": True}
    single = pool.run(detr.step, 1, model, ONE, options)[0]
    results = pool.run(detr_apart, 2, model, Cuts((0, 6), (0, 1)), options, single["shapes"])
    losses = {rank_result["loss"] for rank_result in results}
    assert len(losses) == 1
    # on some processors the last bit of RT-DETR's is another one than in a single process
    assert losses.pop() == (pytest.approx(single["loss"], rel=1e-7) if model == "rt-detr" else single["loss"])
    error, worst = gradient_error(merged(results, "gradients"), single["gradients"])
    assert error <= (2e-5 if model == "rt-detr" else 1e-5), f"{worst}: {error:.2e}"


def copies_of_losses(communicator: Communicator) -> list[list[int]]:
    second_device.install()
    device, (workload, _), (batch, _) = (
        torch.device(second_device.DEVICE),
        detr.build("dilated"),
        detr.minibatch("dilated"),
    )
    outputs = {name: torch.rand(3, 2, 6, size, device=device) for name, size in (("logits", 6), ("boxes", 4))}
    copies = []
    for targets, normalisers in ((batch.targets[1], batch.normalisers), workload.profile_targets(2)):
        second_device.copies_to_host.clear()
        parts = workload.loss(outputs, known_targets(targets, device), normalisers)
        assert parts["loss"].device == device
        copies.append([*second_device.copies_to_host])
    return copies


def test_boxes_are_matched_on_the_host_after_one_copy_of_the_costs(pool: WorkerPool) -> None:
    """Targets on the device, as other losses have them, would be copied back image by image.

    A profile's targets stay on the host like a dataset's: on a GPU they once did not, and no DETR could be measured.
    """
    found_or_not, queries = 2 * 3 * 2, 6
    read, made_up = 1 + 2, 2 * queries  # boxes of the two images
    copies = [[found_or_not + 3 * queries * boxes] for boxes in (read, made_up)]
    assert pool.run(copies_of_losses, 1) == [copies]


def run_apart(communicator: Communicator, *arguments: Any) -> dict[str, Any]:
    second_device.install()
    return cases.train_run(communicator, *arguments, device=torch.device(second_device.DEVICE))


def test_a_run_that_is_resumed_has_the_scores_and_weights_of_the_cpu(pool: WorkerPool, tmp_path: Path) -> None:
    """With evaluations and checkpoints between the steps, and the peak of one step."""
    settings = {"optimizer_args": TOGETHER, "evaluate_every": 3, "checkpoint_every": 3}
    cuts = (0, 3, 8)
    config = cases.run_config(str(tmp_path / "cpu"), train=settings)
    expected = pool.run(cases.train_run, len(cuts), config, cuts)[0]
    config = cases.run_config(str(tmp_path / "apart"), train=settings)
    stopped = pool.run(run_apart, len(cuts), config, cuts, 4)[0]
    assert stopped["stopped"]
    resumed = pool.run(run_apart, len(cuts), config, cuts)[0]
    assert (resumed["resumed"], resumed["step"]) == (4, 6)
    assert resumed["scores"] == expected["scores"] != {}
    rows, theirs = (
        {row["step"]: row for row in read_jsonl(tmp_path / folder / "metrics.jsonl")} for folder in ("apart", "cpu")
    )
    assert {step: row["loss"] for step, row in rows.items()} == {step: row["loss"] for step, row in theirs.items()}
    assert_same(final_of(tmp_path / "apart"), final_of(tmp_path / "cpu"))
    assert {row["peak_source"] for row in rows.values() if "peak_source" in row} == {"apart allocator"}


def test_a_data_set_of_somebody_elses_is_trained_on_and_judged(pool: WorkerPool, tmp_path: Path) -> None:
    """Its batches are read on the last stage's rank, and its loss and its metric know nothing of devices."""
    data = {"val": "tests.own_data.samples:Points", "metric": "tests.own_data.samples:shares"}
    plan, train = (
        Plan.of_cuts(num_layers=6, cuts=(0, 3), model="tests.own_data.samples:model"),
        {"optimizer_args": TOGETHER, "evaluate_every": 0},
    )
    ends = {}
    for name, function in (("cpu", cases.train_run), ("apart", run_apart)):
        config = config_of_own_data(tmp_path / name, data | {"val_arguments": {"count": 7}}, train=train)
        ends[name] = pool.run(function, 2, config, plan)[0]
    assert ends["apart"] == ends["cpu"]
    assert ends["apart"]["scores"]
    losses = [[row["loss"] for row in read_jsonl(tmp_path / name / "metrics.jsonl")] for name in ends]
    assert losses[0] == losses[1]


def bytes_that_count(communicator: Communicator) -> dict[str, int]:
    """Return the allocated bytes while 4,000 bytes lie on the device, and once in the host tier, with the peak."""
    second_device.install()
    gc.collect()  # what earlier tests have left on the device in this process
    device, byte_counts = torch.device(second_device.DEVICE), {}
    before = accelerator.allocated_bytes(device)
    tensor, tier = torch.ones(1000, device=device), HostTier(device)
    with PeakProbe(device) as probe:
        byte_counts["whole"] = accelerator.allocated_bytes(device) - before
        region, wait = tier.offload(tensor, overlap=True)
        wait()
        del tensor
        byte_counts["away"] = accelerator.allocated_bytes(device) - before
        torch.ones(1 << 20)  # beside the device
        back, wait = tier.load_back(region, overlap=True)
        wait()
        twice = back.view(torch.float32) * 2
    tier.finish()
    assert tier._thread is None, "copies of an accelerator run on a stream"
    assert twice.cpu().equal(torch.full((1000,), 2.0))
    return byte_counts | {"peak": probe.peak_bytes - before}


def test_only_the_memory_of_the_device_counts(pool: WorkerPool) -> None:
    assert pool.run(bytes_that_count, 1) == [{"whole": 4000, "away": 0, "peak": 8000}]


@pytest.fixture(scope="module")
def cradle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cradle]:
    cradle = Cradle(tmp_path_factory.mktemp("cradle"), ["tests.installed_second_device"])
    yield cradle
    cradle.close()


def test_layers_move_between_members_as_on_the_cpu(cradle: Cradle, tmp_path: Path) -> None:
    """Copies follow the steps of their owners; one member leaves, and one joins and takes over layers."""
    settings = {"optimizer_args": TOGETHER}
    truth = truth_of(tmp_path / "truth", train=settings)
    config = config_of(tmp_path / "run", 3, train=settings, device=second_device.NAME)
    live = Live(cradle, config, faults=[Fault("m0", "compute", "wait", 4, "four")])
    live.when("four")
    live.leave("m0")
    live.until_asked(live.join())
    live.go("four")
    outcome = live.finish()
    assert outcome.status == {"m0": 0, "m1": 0, "m2": 0, "m3": 0}, describe(outcome)
    assert "morph" in outcome.kinds()
    check(outcome, truth)
    assert {row["peak_source"] for row in outcome.rows if "peak_source" in row} == {"apart allocator"}


BACKEND = """
[torch.backends]
apart = tests.second_device:install
"""


def test_a_command_measures_and_trains_on_the_accelerator_that_is_there(tmp_path: Path) -> None:
    """Torch loads the device like any installed backend; `auto` selects it in every process."""
    package = tmp_path / "site" / "apart-1.0.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: apart\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text(BACKEND)
    (tmp_path / "toy.yaml").write_text(toy.CONFIG)
    path = os.pathsep.join([str(package.parent), str(ROOT), os.environ.get("PYTHONPATH", "")])
    variables = {"PYTHONPATH": path, "XDG_CACHE_HOME": str(tmp_path)}
    settings = ["device=auto", "run_dir=run", "train.max_steps=2", "profile.source=measured"]
    done = subprocess.run(
        [sys.executable, "-m", "varuna_capslog.cli", "train", "toy.yaml", *settings],
        cwd=tmp_path,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    profile = read_profile(tmp_path / "run" / "profile.json")
    told = [profile.conditions[key] for key in ("device", "device_name", "peak_source")]
    assert told == ["apart", "a second device on the CPU", "apart allocator"]
    # this device has no libraries that keep workspaces
    assert {row.action_bytes and row.action_bytes.lasting_bytes for row in profile.observations} == {0}
    peaks = {row["step"]: row.get("peak_source") for row in read_jsonl(tmp_path / "run" / "metrics.jsonl")}
    assert peaks == {1: None, 2: "apart allocator"}
