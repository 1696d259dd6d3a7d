"""An ordinary model whose blocks are equal or almost equal: estimates that may be reused, and blocks that must be told
apart.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["model"]


class Block(nn.Module):
    """Attention with a mask, so that it is captured operation by operation, and a residual with dropout."""

    def __init__(self, rate: float, eps: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16, eps=eps)
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.conv, self.rate = nn.Conv2d(2, 2, 3, padding=1), rate

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        query, key, value = self.qkv(self.norm(x)).chunk(3, -1)
        weights = (query @ key.transpose(-1, -2) + mask).softmax(-1)
        x = x + F.dropout(self.out(weights @ value), self.rate, self.training)
        return x + self.conv(x.reshape(-1, 2, 8, 16)).reshape(x.shape)


class Almost(nn.Module):
    """Blocks 0 to 3 are equal; each other block differs from them in one property."""

    def __init__(self) -> None:
        super().__init__()
        rates, epsilons = [0.1] * 11, [1e-5] * 11
        rates[4], rates[5], epsilons[6] = 0.0, 0.2, 1e-6
        self.embed = nn.Embedding(32, 16)
        self.blocks = nn.ModuleList(Block(rate, eps) for rate, eps in zip(rates, epsilons, strict=True))
        self.blocks[7].out.weight = self.blocks[8].out.weight
        self.blocks[9].conv.to(memory_format=torch.channels_last)
        self.blocks[10].qkv.weight.requires_grad_(False)
        self.head = nn.Linear(16, 32, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(x)


def model(on_meta: bool = False) -> tuple[nn.Module, dict[str, Any]]:
    """Return the model with its example inputs: 2 sequences of 16."""
    example = {"tokens": torch.zeros(2, 16, dtype=torch.int64), "mask": torch.zeros(16, 16)}
    if on_meta:
        with torch.device("meta"):
            return Almost(), example
    return Almost(), example
