"""Captured models whose stages take several microbatches in one call; the capture is kept and loaded by the workers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.engine import cases
from tests.engine.pool import WorkerPool
from varuna_capslog import cli
from varuna_capslog.base import files
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.config.reading import Config, load_config, section
from varuna_capslog.plans.plan import read_plan
from varuna_capslog.profiles.conditions import ONE_MICROBATCH
from varuna_capslog.profiles.record import read_profile
from varuna_capslog.start.choices import OWN_DATA, with_given_plan
from varuna_capslog.start.prepare import prepare_run
from varuna_capslog.training.checkpoint import open_checkpoint

HERE = "tests.engine.test_grains_captured"
COUNT = 4


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.attend, self.out, self.mix = nn.Linear(width, 3 * width), nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        parts = self.attend(self.norms[0](x)).view(batch, tokens, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.mix(self.norms[1](x)).tanh()


class Decoder(nn.Module):
    """A small transformer of plain modules: four blocks between an embedding with positions and a head."""

    def __init__(self, loses: bool, extra: str) -> None:
        super().__init__()
        self.loses, self.extra = loses, extra
        self.embed, self.places = nn.Embedding(13, 8), nn.Embedding(5, 8)
        self.blocks = nn.ModuleList(Block(8) for _ in range(4))
        self.norm = nn.BatchNorm1d(5) if extra == "batch norm" else nn.LayerNorm(8)
        self.head = nn.Linear(8, 13)

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Any:
        x = self.embed(ids) + self.places(torch.arange(ids.shape[1]))
        if self.extra == "fixed":
            x = x.view(2, 5, 8)
        for block in self.blocks:
            x = block(x)
        scores = self.head(self.norm(x))
        if not self.loses:
            return scores
        assert labels is not None
        return {"loss": nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten()), "scores": scores}


def decoder(loses: bool = False, extra: str = "") -> nn.Module:
    return Decoder(loses, extra)


class Texts(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 2 * COUNT

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        ids = torch.arange(index, index + 5)
        return ids % 13, ids * 2 % 13


def mean_loss(scores: Tensor, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(scores.flatten(0, 1), batch[1].flatten())


def settings(
    folder: Path, stages: list[dict[str, Any]], size: int = 2, data: dict[str, Any] | None = None, **arguments: Any
) -> Config:
    """Return the config of a run of 2 steps of 4 microbatches, by a plan of these stages."""
    units = {"per_step": COUNT, "blocks": 1}
    kinds = {"format": "varuna-capslog/plan/2", "schedule": "1f1b", "num_layers": 6}
    files.write_json(folder / "given.json", {**kinds, "units": units, "stages": stages, "routes": "relay"})
    names = ["ids", "labels"] if arguments.get("loses") else ["ids"]
    inputs = [f"{name}=int64[{size},5]:13" for name in names]
    train = {"minibatch_size": COUNT * size, "microbatch_size": size, "max_steps": 2, "evaluate_every": None}
    values = {
        "workload": "varuna_capslog.model.model_workload:workload",
        "model": {"factory": f"{HERE}:decoder", "arguments": arguments, "inputs": inputs, "samples": 4 * COUNT * size},
        "train": train | {"optimizer": "sgd", "lr": 0.1, "weight_decay": 0.0},
        "pipeline": {"plan": str(folder / "given.json"), "recompute": False},
        "run_dir": str(folder / "run"),
        "device": "cpu",
    }
    if data is not None:
        values |= {"workload": OWN_DATA, "data": data, "model": {"factory": f"{HERE}:decoder"}}
    return with_given_plan(section(Config, values, ""))


def stages_of(ranks: list[int], grains: list[int], spans: list[list[int]]) -> list[dict[str, Any]]:
    places = zip(spans, ranks, grains, strict=True)
    return [{"layers": [span], "ranks": [rank], "grain": grain, "memory": []} for span, rank, grain in places]


SPANS = [[0, 2], [2, 4], [4, 6]]


def trained(
    pool: WorkerPool, folder: Path, stages: list[dict[str, Any]], captured_in: Path | None = None, **options: Any
) -> dict[str, Any]:
    """Return the losses of both steps and all weights behind them, of a run as the workers make it. captured_in: folder
    of a run whose capture this one finds.
    """
    folder.mkdir()
    if captured_in is not None:
        shutil.copytree(captured_in / "run" / "captured", folder / "run" / "captured")
    prepare_run(settings(folder, stages, **options), show=False)
    captured = {file.name: file.stat().st_mtime_ns for file in (folder / "run" / "captured").glob("*.pt")}
    assert captured
    plan, config = read_plan(folder / "run" / "plan-0.json"), load_config(folder / "run" / "config.yaml")
    ends = pool.run(cases.train_run, plan.num_ranks, config, plan)
    assert [end.get("step") for end in ends] == [2] * plan.num_ranks, ends
    assert captured == {file.name: file.stat().st_mtime_ns for file in (folder / "run" / "captured").glob("*.pt")}
    checkpoint = open_checkpoint(folder / "run" / "checkpoints" / "step-00000002")
    weights = {f"{name}.{key}": tensor for name in checkpoint.manifest["layers"]
               for key, tensor in checkpoint.weights(name).items()}  # fmt: skip
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    return {"losses": [json.loads(line)["loss"] for line in lines], **weights}


@pytest.mark.parametrize(
    ("ranks", "grains", "options"),
    [
        ([0, 1, 2], [2, 4, 1], {"loses": True}),
        ([0, 1, 0], [4, 2, 1], {"size": 1}),
        ([0, 1, 1], [1, 2, 4], {"data": {"dataset": f"{HERE}:Texts", "loss": f"{HERE}:mean_loss"}}),
    ],
)
def test_stages_of_a_captured_model_take_several_microbatches(
    pool: WorkerPool, tmp_path: Path, ranks: list[int], grains: list[int], options: dict[str, Any]
) -> None:
    """As one rank does with a stage for each layer; with one microbatch per call all but rounding is the same."""
    ours = trained(pool, tmp_path / "ours", stages_of(ranks, grains, SPANS), **options)
    of_layers = [[layer, layer + 1] for layer in range(6)]
    twice = [grain for grain in grains for _ in range(2)]
    alone = trained(pool, tmp_path / "alone", stages_of([0] * 6, twice, of_layers), tmp_path / "ours", **options)
    plain = trained(pool, tmp_path / "plain", stages_of([0, 1, 1], [1, 1, 1], SPANS), **options)
    assert ours.keys() == alone.keys() == plain.keys()
    assert len(ours) == 1 + len(list(decoder().parameters()))
    assert ours.pop("losses") == (losses := alone.pop("losses"))
    assert losses == pytest.approx(plain.pop("losses"), rel=1e-6)
    assert losses[0] != losses[1]
    for name, tensor in ours.items():
        assert torch.equal(tensor, alone[name]), name
        torch.testing.assert_close(tensor, plain[name], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("grains", "options", "reason"),
    [
        ([1, 2, 1], {"extra": "fixed"}, r"to run in calls of 2 microbatches .* but size 0 of the input 'ids' cannot "
         r"change: the model's code.* fixes it to 2; choose grain 1 for every stage, or let the model's code"),
        ([1, 1, 2], {"extra": "batch norm"}, r"stages\[2\].grain is 2, but layer '.*' has a BatchNorm1d, whose"),
        ([1, 1, 2], {"loses": True}, r"'loss' \(written by layer 'norm'\) has no dimension of samples, so that it is "
         "another one for 2 microbatches together than for each; choose grain 1"),
    ],
)  # fmt: skip
def test_what_a_larger_call_would_change_is_refused_before_the_workers(
    tmp_path: Path, grains: list[int], options: dict[str, Any], reason: str
) -> None:
    config = settings(tmp_path, stages_of([0, 1, 2], grains, SPANS), **options)
    with pytest.raises(CapslogError, match=reason) as error:
        prepare_run(config, show=False)
    assert "\n" not in str(error.value)


@pytest.mark.timeout(300)
def test_train_runs_the_larger_calls_that_graphpipe_chooses(tmp_path: Path, forked_servers: None) -> None:
    """The loss of the model's own stays in a stage of one microbatch per call; a batch norm would, too."""
    inputs = [f"{name}=int64[2,5]:13" for name in ("ids", "labels")]
    model = {"factory": f"{HERE}:decoder", "arguments": {"loses": True}, "inputs": inputs, "samples": 16}
    train = {"minibatch_size": 16, "microbatch_size": 2, "max_steps": 2, "evaluate_every": None}
    pipeline = {"planner": "graphpipe", "devices": 3, "recompute": False}
    values = {
        "workload": "varuna_capslog.model.model_workload:workload",
        "model": model,
        "train": train | {"accumulation_blocks": 1},
        "pipeline": pipeline,
        "profile": {"source": "estimated", "grains": [2, 4]},
        "run_dir": str(tmp_path / "run"),
        "device": "cpu",
    }
    files.write_text(tmp_path / "config.yaml", json.dumps(values))
    assert cli._run(["train", str(tmp_path / "config.yaml")]) == 0
    plan = read_plan(tmp_path / "run" / "plan-0.json")
    assert plan.stages[-1].grain == 1
    assert max(stage.grain for stage in plan.stages) > 1
    profile = read_profile(tmp_path / "run" / "profile.json")
    assert list(profile.call_seconds) == [1, 2, 4]
    assert profile.conditions[ONE_MICROBATCH] == [5]
    logs = "".join(path.read_text() for path in (tmp_path / "run" / "workers").glob("*.log"))
    assert "captured here" not in logs
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]
