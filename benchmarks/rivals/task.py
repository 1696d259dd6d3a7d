"""Training task of every contender: the model, the data, the order of the samples, and the log that the judge reads.

Residual perceptrons on scikit-learn's handwritten digits, about 600,000 parameters. There is no dropout, and no layer
reads other samples of its minibatch, so that the weights after a step depend only on the samples that were used. Each
block sleeps for every sample of its forward, as if a separate device computed: the time of a step depends on the
number of samples of a worker, not on the number of cores of the machine.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = [
    "BLOCKS",
    "MINIBATCH",
    "SEED",
    "Digits",
    "StepLog",
    "all_layers",
    "evaluate",
    "network",
    "optimizer",
    "order",
    "save",
    "write_digits",
]

BLOCKS, DIM, HIDDEN, PIXELS, CLASSES = 16, 96, 192, 64, 10
MINIBATCH, SEED = 96, 0
LEARNING_RATE, WEIGHT_DECAY = 1e-3, 1e-4


class Stem(nn.Module):
    """Pixels [B, 64] to vectors [B, D]."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.norm = nn.Linear(PIXELS, DIM), nn.LayerNorm(DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.project(x))


class Block(nn.Module):
    """Pre-norm residual perceptron [B, D]; sleeps `seconds` per sample."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(DIM), nn.Linear(DIM, HIDDEN), nn.Linear(HIDDEN, DIM)
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        if self.seconds:
            time.sleep(self.seconds * len(x))
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Head(nn.Module):
    """Vectors [B, D] to the classes' logits [B, 10]."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.classes = nn.LayerNorm(DIM), nn.Linear(DIM, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.classes(self.norm(x))


def all_layers(seconds: float = 0.0) -> list[nn.Module]:
    """Return stem, blocks and head with the same initial weights in every process."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        return [Stem(), *(Block(seconds) for _ in range(BLOCKS)), Head()]


def network(seconds: float = 0.0) -> nn.Sequential:
    """Return the model as one module; each block sleeps `seconds` per sample."""
    return nn.Sequential(*all_layers(seconds))


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer, the same for every contender."""
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)


def write_digits(path: Path) -> None:
    """Write the data to one file, so that no contender spends its start on scikit-learn."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    torch.save({"pixels": torch.from_numpy(digits.data).float() / 16, "classes": torch.from_numpy(digits.target)}, path)


class Digits:
    """All samples, from the file that RIVALS_DATA names: `pixels` [1797, 64] in 0..1 and `classes` [1797]."""

    def __init__(self) -> None:
        saved = torch.load(os.environ["RIVALS_DATA"])
        self.pixels: Tensor = saved["pixels"]
        self.classes: Tensor = saved["classes"]

    def __len__(self) -> int:
        return len(self.pixels)

    def loss(self, model: nn.Module, samples: Sequence[int], total: int | None = None) -> Tensor:
        """Return the sum of the cross entropies of these samples over `total` (default: their number)."""
        chosen = list(samples)
        logits = model(self.pixels[chosen])
        return F.cross_entropy(logits, self.classes[chosen], reduction="sum") / (total or len(chosen))


def save(state: object, path: Path) -> None:
    """Save to a temporary file and rename it, so that no reader sees a partial file."""
    beside = path.with_suffix(f".{os.getpid()}")
    torch.save(state, beside)
    beside.replace(path)


def order(folder: Path) -> list[list[int]]:
    """Return the samples of each step, from step 1 on, as the driver wrote them."""
    steps: list[list[int]] = json.loads((folder / "order.json").read_text())
    return steps


def evaluate(state: Mapping[str, Tensor]) -> float:
    """Return the loss of these weights over all samples."""
    model, data = network(), Digits()
    model.load_state_dict(state)
    with torch.no_grad():
        return float(data.loss(model, range(len(data))))


class StepLog:
    """A worker's log in `<folder>/log/`, which survives it.

    `tried` is written before a worker can know whether the step will be kept, `kept` once the optimizer has changed the
    weights. `attempt` distinguishes two tries of a step; all workers of a try pass the same value.
    """

    def __init__(self, folder: Path, worker: str) -> None:
        path = folder / "log"
        path.mkdir(exist_ok=True)
        name = path / f"{worker}-{os.getpid()}.jsonl"
        self._file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def _write(self, line: Mapping[str, Any]) -> None:
        os.write(self._file, (json.dumps({**line, "time": time.time()}) + "\n").encode())

    def tried(self, step: int, attempt: str, samples: Sequence[int]) -> None:
        """Log that this worker computes gradients of these samples for the step."""
        self._write({"tried": step, "attempt": attempt, "samples": list(samples)})

    def kept(self, step: int, attempt: str) -> None:
        """Log that the weights of this worker hold the step."""
        self._write({"kept": step, "attempt": attempt})
