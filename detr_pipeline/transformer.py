"""DETR's transformer layers: attention, encoder layer, decoder layer. Batch first, normalisation after each sum.

`chain` makes one chain layer of each. Parameters are laid out and named as in `torch.nn.MultiheadAttention` and DETR's
own code, so that published weights load. No layer changes its inputs.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from detr_pipeline.position import padding_mask, sine_positions

if TYPE_CHECKING:
    from detr_pipeline.config import ModelConfig

__all__ = ["Attention", "DecoderLayer", "EncoderLayer", "FirstDecoderLayer"]


class Attention(nn.Module):
    """Multi-head attention.

    Args:
        fused: torch's fused kernels. Otherwise the [B * heads, queries, keys] maps are computed one step after the
            other and kept for the backward, as `nn.MultiheadAttention` does when asked for its weights; DETR's memory
            profile rests on that. Both give the same numbers.
    """

    def __init__(self, width: int, heads: int, dropout: float, fused: bool) -> None:
        super().__init__()
        self.heads, self.fused = heads, fused
        self.in_proj_weight = nn.Parameter(torch.empty(3 * width, width))
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * width))
        self.out_proj = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)
        # DETR draws every matrix of the transformer anew, the three stacked projections as one matrix.
        nn.init.xavier_uniform_(self.in_proj_weight)
        nn.init.xavier_uniform_(self.out_proj.weight)
        nn.init.zeros_(self.out_proj.bias)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, padding: Tensor | None = None) -> Tensor:
        """Args: query [B, T, C]; key, value [B, S, C]; padding [B, S] bool, True where a key must not be seen."""
        weights, biases = self.in_proj_weight.chunk(3), self.in_proj_bias.chunk(3)
        q, k, v = (
            F.linear(x, weight, bias).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for x, weight, bias in zip((query, key, value), weights, biases, strict=True)
        )
        mixed = self._fused(q, k, v, padding) if self.fused else self._eager(q, k, v, padding)
        return self.out_proj(mixed.transpose(1, 2).flatten(2))

    def _fused(self, q: Tensor, k: Tensor, v: Tensor, padding: Tensor | None) -> Tensor:
        seen = None if padding is None else ~padding[:, None, None, :]
        rate = self.dropout.p if self.training else 0.0
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, dropout_p=rate)

    def _eager(self, q: Tensor, k: Tensor, v: Tensor, padding: Tensor | None) -> Tensor:
        batch = q.shape[0]
        q, k, v = (x.flatten(0, 1) for x in (q * (1 / math.sqrt(q.shape[-1])), k, v))
        if padding is None:
            maps = torch.bmm(q, k.transpose(1, 2))
        else:
            bias = torch.zeros_like(padding, dtype=q.dtype).masked_fill(padding, -math.inf)
            bias = bias[:, None].expand(-1, self.heads, -1).flatten(0, 1)[:, None]
            maps = torch.baddbmm(bias, q, k.transpose(1, 2))
        # One name for all three: each map is as large as all else together, and must go as soon as the next is there.
        maps = maps.softmax(-1)
        maps = self.dropout(maps)
        return torch.bmm(maps, v).unflatten(0, (batch, -1))


class _FeedForward(nn.Module):
    """What encoder and decoder layers have in common: the two linear maps between normalisations."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.linear1 = nn.Linear(config.hidden_dim, config.feedforward)
        self.linear2 = nn.Linear(config.feedforward, config.hidden_dim)
        self.dropout = nn.Dropout(config.dropout)
        nn.init.xavier_uniform_(self.linear1.weight)
        nn.init.xavier_uniform_(self.linear2.weight)

    def feed_forward(self, x: Tensor) -> Tensor:
        """[B, T, C] to [B, T, C], dropped out twice."""
        return self.dropout(self.linear2(self.dropout(F.relu(self.linear1(x)))))


def _attention(config: ModelConfig) -> Attention:
    return Attention(config.hidden_dim, config.attention_heads, config.dropout, config.attention == "sdpa")


class EncoderLayer(_FeedForward):
    """Called with memory [B, h, w, C] and the valid rows and columns [B, 2]; returns the next memory."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.self_attn = _attention(config)
        self.norm1 = nn.LayerNorm(config.hidden_dim)
        self.norm2 = nn.LayerNorm(config.hidden_dim)

    def forward(self, memory: Tensor, valid: Tensor) -> Tensor:
        _, height, width, channels = memory.shape
        x = memory.flatten(1, 2)
        placed = x + sine_positions(valid, height, width, channels).flatten(1, 2)
        attended = self.self_attn(placed, placed, x, padding_mask(valid, height, width))
        x = self.norm1(x + self.dropout(attended))
        x = self.norm2(x + self.feed_forward(x))
        return x.unflatten(1, (height, width))


class DecoderLayer(_FeedForward):
    """Called with hidden [K, B, Q, C], memory [B, h, w, C], valid [B, 2] and the query embedding [Q, C].

    Hidden holds what the K decoder layers before gave, not normalised; the last entry is the input. Returns it with
    this layer's output appended, or the output alone where no layer needs the earlier ones (`keep` false).
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.keep = config.auxiliary_loss and config.heads == "last"
        self.self_attn = _attention(config)
        self.multihead_attn = _attention(config)
        self.norm1 = nn.LayerNorm(config.hidden_dim)
        self.norm2 = nn.LayerNorm(config.hidden_dim)
        self.norm3 = nn.LayerNorm(config.hidden_dim)

    def forward(self, hidden: Tensor, memory: Tensor, valid: Tensor, query: Tensor) -> Tensor:
        output = self.decode(hidden[-1], memory, valid, query)[None]
        return torch.cat((hidden, output)) if self.keep else output

    def decode(self, x: Tensor, memory: Tensor, valid: Tensor, query: Tensor) -> Tensor:
        """[B, Q, C] to [B, Q, C]."""
        _, height, width, channels = memory.shape
        seen = memory.flatten(1, 2)
        placed = x + query
        x = self.norm1(x + self.dropout(self.self_attn(placed, placed, x)))
        keys = seen + sine_positions(valid, height, width, channels).flatten(1, 2)
        attended = self.multihead_attn(x + query, keys, seen, padding_mask(valid, height, width))
        x = self.norm2(x + self.dropout(attended))
        return self.norm3(x + self.feed_forward(x))


class FirstDecoderLayer(DecoderLayer):
    """Called with memory and valid; returns hidden [1, B, Q, C] and the query embedding [Q, C].

    The embedding enters here and travels with the stream, so that no layer needs a copy of it. Decoding begins with
    zeros.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.query_embed = nn.Embedding(config.queries, config.hidden_dim)

    def forward(self, memory: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        # The view gives this layer's gradient and the stream's their own nodes; the parameter itself never leaves.
        query = self.query_embed.weight.view_as(self.query_embed.weight)
        start = torch.zeros_like(query).expand(memory.shape[0], -1, -1)
        return self.decode(start, memory, valid, query)[None], query
