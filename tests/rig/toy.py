"""Default workload of chaos runs: a few small layers with everything that makes equal bits hard.

It has running statistics, dropout and a parameter that the first and the last layer share; a step takes milliseconds.
With `model.towers` the blocks are two branches. The data are made from the samples' numbers. `data.pause_seconds` and
`model.block_seconds` make steps longer without using a processor; they change no number.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from varuna_capslog.config.reading import section
from varuna_capslog.config.settings import Config, Section
from varuna_capslog.model.chain import Chain, Layer, TensorSpec
from varuna_capslog.model.splitting.splitter import Splitter, share_of
from varuna_capslog.model.splitting.torch_layers import linear_rows
from varuna_capslog.model.workload import DataSource, Minibatch, Workload
from varuna_capslog.start.choices import load_run_config

__all__ = ["CONFIG", "Toy", "toy_config", "workload"]

INPUTS = 12

CONFIG = """\
workload: tests.rig.toy:workload
train:
  epochs: 1000000
  minibatch_size: 16
  microbatch_size: 4
  accumulation_blocks: 2
  lr: 1e-3
  evaluate_every: null
  checkpoint_every: 200
  log_every: 1000
pipeline:
  timeout_seconds: 5
  verify_every: 50
profile:
  source: estimated
device: cpu
"""
"""A config file that trains it."""


class _Model(Section):
    blocks: int = 6
    """Layers between the first and the last."""

    towers: bool = False
    """Half of the blocks are a second tower, with a stem and inputs of its own, and all of them read what this stem
    makes besides; a layer before the last one joins the two."""

    dim: int = 16
    """Width of all of them."""

    dropout: float = 0.1
    """Of each block."""

    block_seconds: float = 0.0
    """That a block's forward pass sleeps: work that more devices share, and that needs no processor."""


class _Data(Section):
    samples: int = 256
    """Of an epoch."""

    pause_seconds: float = 0.0
    """What reading one microbatch takes besides."""


class _Stem(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.project, self.norm = nn.Linear(INPUTS, dim), nn.BatchNorm1d(dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.project(x))


class _ToyBlock(nn.Module):
    def __init__(self, dim: int, dropout: float, seconds: float) -> None:
        super().__init__()
        self.linear, self.norm, self.dropout = nn.Linear(dim, dim), nn.BatchNorm1d(dim), nn.Dropout(dropout)
        self.seconds = seconds

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        if self.seconds:
            time.sleep(self.seconds)
        output = x + self.dropout(F.gelu(self.norm(self.linear(x))))
        return output if context is None else output + 0.5 * context

    def split(self, into: Splitter) -> None:
        """Split the block by columns, each part with the running statistics of its columns."""
        columns = [into.value(f"columns.{part}") for part in range(into.degree)]
        for part, name in enumerate(columns):
            into.add(f"columns.{part}", _Columns(self, into, part), into.reads[:1], [name])
        into.add("join", _JoinedColumns(len(into.reads)), [*into.reads, *columns], into.writes)


class _Columns(nn.Module):
    """A share of the columns that a block adds to its input."""

    def __init__(self, block: _ToyBlock, into: Splitter, part: int) -> None:
        super().__init__()
        columns = share_of(block.linear.out_features, part, into.degree, "columns")
        self.linear = linear_rows(into, block.linear, part)
        self.norm, self.dropout = into.sharing(block.norm), nn.Dropout(block.dropout.p)
        self.norm.num_features = columns[1] - columns[0]
        self.norm.weight, self.norm.bias = (
            into.cut(block.norm.weight, 0, [columns]),
            into.cut(block.norm.bias, 0, [columns]),
        )
        for name in ("running_mean", "running_var"):
            setattr(self.norm, name, into.cut_buffer(getattr(block.norm, name), 0, [columns]))
        self.seconds = block.seconds / into.degree

    def forward(self, x: Tensor) -> Tensor:
        if self.seconds:
            time.sleep(self.seconds)
        return self.dropout(F.gelu(self.norm(self.linear(x))))


class _JoinedColumns(nn.Module):
    """Joins the columns of a block; called with the block's inputs and the columns.

    read: number of tensors that the block reads, with or without a context.
    """

    def __init__(self, read: int) -> None:
        super().__init__()
        self.read = read

    def forward(self, x: Tensor, *tensors: Tensor) -> Tensor:
        output = x + torch.cat(tensors[self.read - 1 :], -1)
        return output if self.read == 1 else output + 0.5 * tensors[0]


class _SideStem(_Stem):
    """Stem of the second tower: returns the tower's state, and the context that all of its blocks read."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        output = super().forward(x)
        return output, output.tanh()


class _Join(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.linear = nn.Linear(2 * dim, dim)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.linear(torch.cat([x, y], -1))


class _Head(nn.Module):
    """Gives the inputs back, with the stem's own weights."""

    def __init__(self, dim: int, stem: _Stem) -> None:
        super().__init__()
        self.scale, self.weight = nn.Parameter(torch.ones(dim)), stem.project.weight

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.scale) @ self.weight


class _Numbers:
    def __init__(self, data: _Data, inputs: Sequence[str]) -> None:
        self._data, self._inputs = data, inputs

    def __len__(self) -> int:
        return self._data.samples

    def minibatch(self, groups: Sequence[Sequence[int]], epoch: int) -> Minibatch:
        return Minibatch(
            [{name: TensorSpec((len(group), INPUTS)) for name in self._inputs} for group in groups],
            [_rows(group).roll(1, 1) for group in groups],
            {"samples": float(sum(len(group) for group in groups))},
            [list(group) for group in groups],
            [list(group) for group in groups],
        )

    def load(self, minibatch: Minibatch, microbatch: int) -> dict[str, Tensor]:
        if self._data.pause_seconds:
            time.sleep(self._data.pause_seconds)
        rows = _rows(minibatch.recipes[microbatch])
        return {name: rows.roll(2 * place, 1) for place, name in enumerate(self._inputs)}


def _rows(samples: Sequence[int]) -> Tensor:
    place = torch.arange(1, INPUTS + 1, dtype=torch.float32)
    return torch.sin(torch.tensor(samples, dtype=torch.float32)[:, None] * place)


class Toy(Workload):
    """See the module."""

    name = "toy"

    def __init__(self, config: Config) -> None:
        self.model = section(_Model, config.model, "model")
        self.data = section(_Data, config.data, "data")

        self.inputs = ("x", "y") if self.model.towers else ("x",)

    def build_chain(self) -> Chain:
        model, stem = self.model, _Stem(self.model.dim)
        second = model.blocks // 2 if model.towers else 0
        layers = [Layer("stem", stem), *(Layer(f"block.{k}", self._block()) for k in range(model.blocks - second))]
        if model.towers:
            layers.append(Layer("side.stem", _SideStem(model.dim), ("y",), ("y", "context")))
            layers += [Layer(f"side.{k}", self._block(), ("y", "context"), ("y",)) for k in range(second)]
            layers.append(Layer("join", _Join(model.dim), ("x", "y"), ("x",)))
        return Chain([*layers, Layer("head", _Head(model.dim, stem))], self.inputs, name=self.name)

    def _block(self) -> _ToyBlock:
        return _ToyBlock(self.model.dim, self.model.dropout, self.model.block_seconds)

    def loss(self, outputs: Mapping[str, Tensor], targets: Any, normalisers: Mapping[str, float]) -> dict[str, Tensor]:
        (prediction,) = outputs.values()
        return {"loss": F.mse_loss(prediction, targets, reduction="sum") / (INPUTS * normalisers["samples"])}

    def profile_inputs(self, microbatch_size: int) -> dict[str, TensorSpec]:
        return {name: TensorSpec((microbatch_size, INPUTS)) for name in self.inputs}

    def profile_targets(self, microbatch_size: int) -> tuple[Any, dict[str, float]]:
        return torch.zeros(microbatch_size, INPUTS), {"samples": float(microbatch_size)}

    def train_data(self) -> DataSource:
        return _Numbers(self.data, self.inputs)


def workload(config: Config) -> Toy:
    """Entry for a config's `workload`."""
    return Toy(config)


def toy_config(run_dir: Path, overrides: list[str]) -> Config:
    """The config of this training for a run in `run_dir`; the file itself is written there."""
    run_dir.mkdir(parents=True, exist_ok=True)
    path = run_dir / "toy.yaml"
    path.write_text(CONFIG, encoding="utf-8")
    return load_run_config(path, [f"run_dir={run_dir}", *overrides])
