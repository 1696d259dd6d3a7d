"""A small model for the live benchmarks: residual perceptrons with dropout on scikit-learn's handwritten digits.

Its chain has the features that make bitwise equality hard: dropout, running statistics, and a parameter shared by first
and last layer. `model: {blocks, dim, hidden, dropout}`; the default of 8 blocks has about 300,000 parameters. Each
block's forward also sleeps for `model.block_seconds`, as if another device computed.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

from varuna_capslog.config.settings import Config
from varuna_capslog.model.chain import Chain, Layer, TensorSpec
from varuna_capslog.model.workload import DataSource, Minibatch, Workload

__all__ = ["workload"]

PIXELS, CLASSES = 64, 10


class Stem(nn.Module):
    """Pixels [B, 64] to vectors [B, D]."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.project, self.norm = nn.Linear(PIXELS, dim), nn.BatchNorm1d(dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.project(x))


class Block(nn.Module):
    """Pre-norm residual perceptron [B, D] with dropout."""

    def __init__(self, dim: int, hidden: int, dropout: float, seconds: float) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(dim), nn.Linear(dim, hidden), nn.Linear(hidden, dim)
        self.dropout, self.seconds = nn.Dropout(dropout), seconds

    def forward(self, x: Tensor) -> Tensor:
        if self.seconds:
            time.sleep(self.seconds)
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


class Head(nn.Module):
    """Vectors [B, D] to classes and to the pixels again, the latter with the stem's own weights."""

    def __init__(self, dim: int, stem: Stem) -> None:
        super().__init__()
        self.norm, self.classes, self.pixels = nn.LayerNorm(dim), nn.Linear(dim, CLASSES), stem.project.weight

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.norm(x)
        return self.classes(x), x @ self.pixels


class Digits:
    """Training data: every sample is one row, loading is a look-up."""

    def __init__(self) -> None:
        digits = load_digits()
        self.pixels = torch.from_numpy(digits.data).float() / 16
        self.classes = torch.from_numpy(digits.target)

    def __len__(self) -> int:
        return len(self.pixels)

    def minibatch(self, groups: Sequence[Sequence[int]], epoch: int) -> Minibatch:
        return Minibatch(
            [{"x": TensorSpec((len(group), PIXELS))} for group in groups],
            [(self.classes[list(group)], self.pixels[list(group)]) for group in groups],
            {"samples": float(sum(len(group) for group in groups))},
            [list(group) for group in groups],
            [list(group) for group in groups],
        )

    def load(self, minibatch: Minibatch, microbatch: int) -> dict[str, Tensor]:
        return {"x": self.pixels[minibatch.recipes[microbatch]]}


class Small(Workload):
    name = "small"

    def __init__(self, config: Config) -> None:
        sizes = {"blocks": 8, "dim": 96, "hidden": 192, "dropout": 0.1, "block_seconds": 0.0, **config.model}
        self.blocks, self.dim, self.hidden = int(sizes["blocks"]), int(sizes["dim"]), int(sizes["hidden"])
        self.dropout, self.seconds = float(sizes["dropout"]), float(sizes["block_seconds"])

    def build_chain(self) -> Chain:
        stem = Stem(self.dim)
        sizes = (self.dim, self.hidden, self.dropout, self.seconds)
        blocks = [Layer(f"block.{k}", Block(*sizes)) for k in range(self.blocks)]
        head = Layer("head", Head(self.dim, stem), writes=("classes", "pixels"))
        return Chain([Layer("stem", stem), *blocks, head], outputs=("classes", "pixels"), name=self.name)

    def loss(self, outputs: Mapping[str, Tensor], targets: Any, normalisers: Mapping[str, float]) -> dict[str, Tensor]:
        classes, pixels = targets
        entropy = F.cross_entropy(outputs["classes"], classes, reduction="sum") / normalisers["samples"]
        rebuilt = F.mse_loss(outputs["pixels"], pixels, reduction="sum") / (PIXELS * normalisers["samples"])
        return {"loss": entropy + 0.1 * rebuilt, "entropy": entropy.detach(), "rebuilt": rebuilt.detach()}

    def profile_inputs(self, microbatch_size: int) -> dict[str, TensorSpec]:
        return {"x": TensorSpec((microbatch_size, PIXELS))}

    def profile_targets(self, microbatch_size: int) -> tuple[Any, dict[str, float]]:
        classes = torch.zeros(microbatch_size, dtype=torch.long)
        return (classes, torch.zeros(microbatch_size, PIXELS)), {"samples": float(microbatch_size)}

    def train_data(self) -> DataSource:
        return Digits()


def workload(config: Config) -> Workload:
    """Return the workload that a config names."""
    return Small(config)
