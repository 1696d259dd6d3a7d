"""DETR's attention, its padding mask, and its position encoding.

Parameters are laid out and named as in `torch.nn.MultiheadAttention`, so that published weights load.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from varuna_capslog.variants.attention import AttentionCore, EagerAttention, SdpaAttention

__all__ = ["Attention", "Projections", "padding_mask", "sine_positions"]

_TEMPERATURE = 10_000
_EPSILON = 1e-6


def padding_mask(valid: Tensor, height: int, width: int) -> Tensor:
    """Return [B, height * width] bool, True where a cell is padding.

    The upper left cell is never padding: attention over nothing would be NaN where a profiler sends zeros for `valid`.
    """
    rows, columns = valid.clamp(min=1).unbind(1)
    outside_rows = torch.arange(height, device=valid.device) >= rows[:, None]
    outside_columns = torch.arange(width, device=valid.device) >= columns[:, None]
    return (outside_rows[:, :, None] | outside_columns[:, None, :]).flatten(1)


def sine_positions(valid: Tensor, height: int, width: int, channels: int) -> Tensor:
    """Return [B, height, width, channels] float32: sines and cosines of the row in the first half, of the column in
    the second.

    Coordinates count from 1 and are scaled to 2 pi at the image's own last row or column, whatever the padding.
    Padding cells get the code of their clamped row and column (DETR: of 0); no valid cell reads theirs.
    """
    rows, columns = valid.clamp(min=1).unbind(1)
    parts = (
        _codes(rows, height, channels // 2)[:, :, None].expand(-1, -1, width, -1),
        _codes(columns, width, channels // 2)[:, None].expand(-1, height, -1, -1),
    )
    return torch.cat(parts, dim=-1)


def _codes(counts: Tensor, length: int, channels: int) -> Tensor:
    """Return [B, length, channels]: sine on even channels, cosine on odd ones, wavelengths 2 pi to 10000 * 2 pi."""
    steps = torch.arange(1, length + 1, device=counts.device)
    angles = torch.minimum(steps, counts[:, None]).float() / (counts[:, None] + _EPSILON) * (2 * math.pi)
    exponents = torch.arange(0, channels, 2, dtype=torch.float32, device=counts.device) / channels
    scaled = angles[:, :, None] / _TEMPERATURE**exponents
    return torch.stack((scaled.sin(), scaled.cos()), dim=-1).flatten(2)


_CORES = {"eager": EagerAttention, "sdpa": SdpaAttention}


class Projections(nn.Module):
    """Linear projections to queries, keys and values for all heads of an attention."""

    def __init__(self, heads: int, weight: nn.Parameter, bias: nn.Parameter) -> None:
        super().__init__()
        self.heads = heads
        self.in_proj_weight, self.in_proj_bias = weight, bias

    def projected(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        """Return [B, H, T, D] and twice [B, H, S, D] from query [B, T, C] and key, value [B, S, C]."""
        weights, biases = self.in_proj_weight.chunk(3), self.in_proj_bias.chunk(3)
        return [
            F.linear(x, weight, bias).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for x, weight, bias in zip((query, key, value), weights, biases, strict=True)
        ]


class Attention(Projections):
    """Multi-head attention.

    Args:
        attention: as `model.attention`. The paper's memory profile rests on eager; a config's `variants` may choose
            another way.
    """

    def __init__(self, width: int, heads: int, dropout: float, attention: str) -> None:
        super().__init__(heads, nn.Parameter(torch.empty(3 * width, width)), nn.Parameter(torch.zeros(3 * width)))
        self.out_proj = nn.Linear(width, width)
        self.core: AttentionCore = _CORES[attention](dropout)
        # DETR draws every matrix of the transformer anew, the three stacked projections as one matrix.
        nn.init.xavier_uniform_(self.in_proj_weight)
        nn.init.xavier_uniform_(self.out_proj.weight)
        nn.init.zeros_(self.out_proj.bias)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, padding: Tensor | None = None) -> Tensor:
        """Args: query [B, T, C]; key, value [B, S, C]; padding [B, S] bool, True where a key must not be seen."""
        q, k, v = self.projected(query, key, value)
        return self.out_proj(self.core(q, k, v, padding).transpose(1, 2).flatten(2))
