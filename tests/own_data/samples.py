"""A user's module: a model, data sets and functions that configs of the tests name."""

from __future__ import annotations

import random
import time
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

COUNT = 24


class Points(Dataset[dict[str, Tensor]]):
    """A point for each number, its class, and its number."""

    def __init__(
        self,
        count: int = COUNT,
        noise: float = 0.0,
        broken: int | None = None,
        longer: int | None = None,
        slow: int | None = None,
        labelled: int | None = None,
    ) -> None:
        self.count, self.noise, self.broken, self.longer, self.slow = count, noise, broken, longer, slow
        self.labelled = count if labelled is None else labelled

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if index == self.broken:
            raise OSError(f"point-{index}.png is cut short")
        if index == self.slow:
            time.sleep(30)
        size = 5 if index == self.longer else 4
        x = torch.arange(size) * (index + 1) / 40
        x += self.noise * (torch.rand(size) + random.random() + float(np.random.rand()))  # noqa: NPY002
        label = index % 3 if index < self.labelled else -100
        return {"input": x, "label": torch.tensor(label), "number": torch.tensor(index)}


def model(dropout: float = 0.1) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


class Named(nn.Module):
    """Returns its outputs by name, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 3)])

    def forward(self, input: Tensor) -> dict[str, Tensor]:
        hidden = torch.tanh(self.blocks[0](input))
        return {"logits": self.blocks[1](hidden), "hidden": hidden}


class OwnLoss(nn.Module):
    """Computes its loss itself. shifted: each row of labels is compared one place later, as in decoders."""

    def __init__(self, shifted: bool = False, added: bool = False) -> None:
        super().__init__()
        self.blocks, self.shifted, self.added = model(0.0), shifted, added

    def forward(self, input: Tensor, label: Tensor) -> dict[str, Tensor]:
        scores = self.blocks(input)
        if self.shifted:
            label = F.pad(label, (0, 1), value=-100)[..., 1:]
        loss = F.cross_entropy(scores.flatten(0, -2), label.flatten().to(scores.device))
        return {"loss": loss + scores.square().mean() if self.added else loss, "scores": scores}


class Rows(Points):
    """Rows of five points, of which some in the first rows are labelled."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        label = torch.randint(3, (5,), generator=generator)
        label[torch.randint(6, (), generator=generator) if index < self.labelled else 0 :] = -100
        return {"input": torch.randn(5, 4, generator=generator), "label": label}


def noted_loss(outputs: Tensor, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The loss, and as another part the sum of 2 ** number over the samples, which tells which samples were there."""
    return {"loss": F.cross_entropy(outputs, batch["label"]), "who": (2 ** batch["number"]).sum().float()}


def counting_loss(outputs: Tensor, batch: dict[str, Tensor]) -> dict[str, Any]:
    return {"loss": F.cross_entropy(outputs, batch["label"]), "count": (batch["label"] >= 0).sum()}


def named_loss(outputs: Any, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(outputs.logits, batch["label"]) + 0 * outputs["hidden"].sum()


def detached_loss(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(outputs, batch["label"]).detach()


def long_loss(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(outputs, batch["label"], reduction="none")


def wrong_loss(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(outputs, batch["labels"])


def nan_loss(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(outputs, batch["label"]) / (torch.nan if 12 in batch["number"] else 1.0)


def noisy_collate(samples: list[dict[str, Tensor]]) -> Tensor:
    return torch.stack([sample["input"] for sample in samples]) + torch.rand(1)


def stream() -> Any:
    return iter(range(3))


def told(model: nn.Module) -> str:
    return f"training: {model.training}, sum {sum(float(weight.detach().sum()) for weight in model.parameters()):.4f}"


def shares(outputs: Tensor, batch: dict[str, Tensor]) -> dict[str, float]:
    return {"first": float((outputs.argmax(1) == 0).float().mean())}
