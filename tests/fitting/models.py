"""Two tiny modules with the features that make recomputation hard: dropout, batch norm, skips, in-place operations."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.BatchNorm1d(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, width] -> the same."""
        return x + self.drop(self.down(nn.functional.gelu(self.up(self.norm(x)))))


class Skips(nn.Module):
    """Ids in, a dict with a None out; one tensor is read by the first and the last block, and a weight is shared."""

    def __init__(self, depth: int = 3, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 20, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, scale: float = 1.0) -> dict[str, Any]:
        """[batch] -> logits [batch, 20]."""
        first = x = self.embed(ids)
        for block in self.blocks:
            x = nn.functional.dropout(block(x), 0.1, self.training)
        return {"logits": self.head(x + first) * scale, "states": None}


def skips() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(5)
    return Skips(), torch.randint(0, 20, (256,))


def skips_loss(outputs: dict[str, Tensor]) -> Tensor:
    return outputs["logits"].square().mean()


def images() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(6)
    parts: list[nn.Module] = []
    for before, after in ((3, 16), (16, 16)):
        norm = nn.BatchNorm2d(after)
        parts += [nn.Conv2d(before, after, 3, padding=1), norm, nn.ReLU(inplace=True), nn.Dropout(0.3)]
    return nn.Sequential(*parts, nn.Flatten(), nn.Linear(16 * 256, 4)), torch.randn(4, 3, 16, 16)


def images_loss(outputs: Tensor) -> Tensor:
    return outputs.logsumexp(1).sum()
