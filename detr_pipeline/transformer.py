"""DETR's transformer: encoder and decoder layers, and the heads that turn hidden states into predictions.

`chain` makes one chain layer of each. Batch first, normalisation after each sum. Parameters are laid out and named as
in `torch.nn.MultiheadAttention` and DETR's own code, so that published weights load. Every layer computes padding mask
and position encoding anew from two integers per image and the map's shape, so that neither ever crosses a cut. No
layer changes its inputs, and nothing here looks at a tensor's values on the host.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from detr_pipeline.attention import Attention, padding_mask, sine_positions
from detr_pipeline.splits import split_decoder, split_encoder

if TYPE_CHECKING:
    from detr_pipeline.config import ModelConfig
    from varuna_capslog.model.splitting.splitter import Splitter

__all__ = [
    "DecoderLayer",
    "EncoderLayer",
    "FirstDecoderLayer",
    "Heads",
    "PredictingDecoderLayer",
]


def _attend_map(attention: Attention, memory: Tensor, valid: Tensor, rows: tuple[int, int] | None = None) -> Tensor:
    """Return [B, h, w, C]: attention of a map to itself, from some rows (first, end) of it, or all."""
    _, height, width, channels = memory.shape
    x = memory.flatten(1, 2)
    placed = x + sine_positions(valid, height, width, channels).flatten(1, 2)
    queries = placed if rows is None else placed[:, rows[0] * width : rows[1] * width]
    attended = attention(queries, placed, x, padding_mask(valid, height, width))
    return attended.unflatten(1, (-1, width))


def _attend_queries(attention: Attention, x: Tensor, query: Tensor) -> Tensor:
    """Return [B, Q, C]: attention of the object queries to each other."""
    placed = x + query
    return attention(placed, placed, x)


def _attend_last_queries(attention: Attention, hidden: Tensor, query: Tensor) -> Tensor:
    """Apply `_attend_queries` to the last of the hidden states."""
    return _attend_queries(attention, hidden[-1], query)


def _attend_memory(attention: Attention, x: Tensor, memory: Tensor, valid: Tensor, query: Tensor) -> Tensor:
    """Return [B, Q, C]: attention of the object queries to a map."""
    _, height, width, channels = memory.shape
    seen = memory.flatten(1, 2)
    keys = seen + sine_positions(valid, height, width, channels).flatten(1, 2)
    return attention(x + query, keys, seen, padding_mask(valid, height, width))


class FeedForwardLayer(nn.Module):
    """Base of encoder and decoder layers: the two linear maps between normalisations."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.linear1 = nn.Linear(config.hidden_dim, config.feedforward)
        self.linear2 = nn.Linear(config.feedforward, config.hidden_dim)
        self.dropout = nn.Dropout(config.dropout)
        nn.init.xavier_uniform_(self.linear1.weight)
        nn.init.xavier_uniform_(self.linear2.weight)

    def feed_forward(self, x: Tensor) -> Tensor:
        """Map [..., C] to [..., C], with two dropouts."""
        return self.dropout(self.linear2(self.dropout(F.relu(self.linear1(x)))))


def _attention(config: ModelConfig) -> Attention:
    return Attention(config.hidden_dim, config.attention_heads, config.dropout, config.attention)


class EncoderLayer(FeedForwardLayer):
    """Called with memory [B, h, w, C] and the valid rows and columns [B, 2]; returns the next memory.

    Attributes:
        rows: (n, parts): it computes the n-th share of the rows alone, from all of them; None: all rows.
    """

    rows: tuple[int, int] | None = None

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.self_attn = _attention(config)
        self.norm1 = nn.LayerNorm(config.hidden_dim)
        self.norm2 = nn.LayerNorm(config.hidden_dim)

    def forward(self, memory: Tensor, valid: Tensor) -> Tensor:
        residual, rows = memory, None
        if self.rows is not None:
            part, parts = self.rows
            rows = memory.shape[1] * part // parts, memory.shape[1] * (part + 1) // parts
            residual = memory[:, rows[0] : rows[1]]
        x = self.norm1(residual + self.dropout(_attend_map(self.self_attn, memory, valid, rows)))
        return self.norm2(x + self.feed_forward(x))

    def split(self, into: Splitter) -> None:
        """Its parts; see `splits`."""
        split_encoder(self, into, _attend_map)


class DecoderLayer(FeedForwardLayer):
    """Called with hidden [K, B, Q, C], memory [B, h, w, C], valid [B, 2] and the query embedding [Q, C].

    Hidden holds the outputs of the K decoder layers before, not normalised; the last entry is the input. Returns hidden
    with this layer's output appended, or the output alone where no layer needs the earlier ones (`keep` false).
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
        """Decode [B, Q, C] to [B, Q, C]."""
        x = self.norm1(x + self.dropout(_attend_queries(self.self_attn, x, query)))
        x = self.norm2(x + self.dropout(_attend_memory(self.multihead_attn, x, memory, valid, query)))
        return self.norm3(x + self.feed_forward(x))

    def split(self, into: Splitter) -> None:
        """Its parts; see `splits`."""
        split_decoder(self, into, (_attend_last_queries, _attend_memory), *self._around())

    def _around(self) -> tuple[nn.Module | None, nn.Module | None]:
        """Return the modules that a split layer runs before and behind the decoding itself."""
        return None, None


class _BoxHead(nn.Module):
    """Three linear maps with ReLU between them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, 4)])

    def forward(self, x: Tensor) -> Tensor:
        first, second, last = self.layers
        return last(F.relu(second(F.relu(first(x)))))


class Heads(nn.Module):
    """Decoder norm, then class scores and boxes.

    Called with hidden [..., width]; returns logits [..., C + 1], no-object last, and boxes [..., 4] as (cx, cy, w, h)
    in 0..1 of the unpadded image.
    """

    def __init__(self, config: ModelConfig, num_classes: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.hidden_dim)
        self.class_embed = nn.Linear(config.hidden_dim, num_classes + 1)
        self.bbox_embed = _BoxHead(config.hidden_dim)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        normed = self.norm(hidden)
        # bfloat16 has 8 bits: a sigmoid rounded to it would place a box to 1/256 of the image at best.
        return self.class_embed(normed), self.bbox_embed(normed).to(hidden.dtype).sigmoid()


def _with_predictions(heads: Heads, hidden: Tensor, logits: Tensor, boxes: Tensor) -> tuple[Tensor, Tensor]:
    """Return logits and boxes with the heads' predictions for hidden appended."""
    more_logits, more_boxes = heads(hidden)
    return torch.cat((logits, more_logits)), torch.cat((boxes, more_boxes))


class PredictingDecoderLayer(DecoderLayer):
    """A `DecoderLayer` that appends its predictions to the earlier ones; returns hidden, logits, boxes.

    Args:
        heads: one object for all decoder layers, which thus share its parameters.
        last: no layer reads the hidden state; returns logits, boxes.
    """

    def __init__(self, config: ModelConfig, heads: Heads, last: bool) -> None:
        super().__init__(config)
        self.heads, self.last = heads, last

    def forward(  # type: ignore[override]
        self, hidden: Tensor, memory: Tensor, valid: Tensor, query: Tensor, logits: Tensor, boxes: Tensor
    ) -> tuple[Tensor, ...]:
        hidden = super().forward(hidden, memory, valid, query)
        predictions = _with_predictions(self.heads, hidden, logits, boxes)
        return predictions if self.last else (hidden, *predictions)

    def _around(self) -> tuple[nn.Module | None, nn.Module | None]:
        return None, _Predicting(self.heads)


class FirstDecoderLayer(DecoderLayer):
    """Called with memory and valid; returns hidden [1, B, Q, C] and the query embedding [Q, C].

    The embedding enters here and travels with the stream, so that no layer needs a copy of it. Decoding begins with
    zeros. With `heads`, logits [1, B, Q, C + 1] and boxes [1, B, Q, 4] are returned too.
    """

    def __init__(self, config: ModelConfig, heads: Heads | None = None) -> None:
        super().__init__(config)
        self.query_embed = nn.Embedding(config.queries, config.hidden_dim)
        self.heads = heads

    def forward(self, memory: Tensor, valid: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        # The view gives this layer's gradient and the stream's their own nodes; the parameter itself never leaves.
        query = self.query_embed.weight.view_as(self.query_embed.weight)
        start = torch.zeros_like(query).expand(memory.shape[0], -1, -1)
        hidden = self.decode(start, memory, valid, query)[None]
        return (hidden, query) if self.heads is None else (hidden, query, *self.heads(hidden))

    def _around(self) -> tuple[nn.Module | None, nn.Module | None]:
        return _Beginning(self.query_embed), self.heads


class _Beginning(nn.Module):
    """Called with memory; returns zeros [1, B, Q, C] and the query embedding [Q, C]."""

    def __init__(self, query_embed: nn.Embedding) -> None:
        super().__init__()
        self.query_embed = query_embed

    def forward(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        weight = self.query_embed.weight
        return weight.new_zeros(1, memory.shape[0], *weight.shape), weight.view_as(weight)


class _Predicting(nn.Module):
    """Called with hidden and the predictions so far; returns these with its own appended."""

    def __init__(self, heads: Heads) -> None:
        super().__init__()
        self.heads = heads

    def forward(self, hidden: Tensor, logits: Tensor, boxes: Tensor) -> tuple[Tensor, Tensor]:
        return _with_predictions(self.heads, hidden, logits, boxes)
