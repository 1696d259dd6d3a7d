"""DETR's transformer: encoder and decoder layers, and the heads that turn hidden states into predictions.

Batch first, normalisation after each sum. Parameters have the shapes and names of `torch.nn.MultiheadAttention` and
DETR's own code, so that published weights load. Every layer computes padding mask and position encoding anew from two
integers per image and the map's shape, so that neither ever crosses a cut. No layer changes its inputs, or reads a
tensor's values on the host.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from varuna_capslog.model.splitting.splitter import Splitter, share_of
from varuna_capslog.model.splitting.torch_layers import JoinedPositions, SumAndNorm, linear_columns, linear_rows
from varuna_capslog.variants.attention import AttentionCore, EagerAttention, SdpaAttention, merged

if TYPE_CHECKING:
    from detr_pipeline.config import ModelConfig

__all__ = [
    "Attention",
    "DecoderLayer",
    "EncoderLayer",
    "FirstDecoderLayer",
    "Heads",
    "PredictingDecoderLayer",
    "padding_mask",
    "sine_positions",
]


# -- DETR's attention, its padding mask, and its position encoding.


_TEMPERATURE = 10_000
_EPSILON = 1e-6


def padding_mask(valid: Tensor, height: int, width: int) -> Tensor:
    """Return [B, height * width] bool, True where a cell is padding. The upper left cell is never padding: with zeros
    for `valid`, as a profiler sends, attention over no cell would be NaN.
    """
    rows, columns = valid.clamp(min=1).unbind(1)
    outside_rows = torch.arange(height, device=valid.device) >= rows[:, None]
    outside_columns = torch.arange(width, device=valid.device) >= columns[:, None]
    return (outside_rows[:, :, None] | outside_columns[:, None, :]).flatten(1)


def sine_positions(valid: Tensor, height: int, width: int, channels: int) -> Tensor:
    """Return [B, height, width, channels] float32: codes of the row in the first half, of the column in the second.

    Coordinates count from 1 and are scaled to 2 pi at the image's own last row or column, whatever the padding. Padding
    cells get the code of their clamped row and column (in DETR, of 0), which no valid cell reads.
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
        """Return q [B, H, T, D] and k, v [B, H, S, D] from query [B, T, C] and key, value [B, S, C]."""
        weights, biases = self.in_proj_weight.chunk(3), self.in_proj_bias.chunk(3)
        return [
            F.linear(x, weight, bias).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for x, weight, bias in zip((query, key, value), weights, biases, strict=True)
        ]


class Attention(Projections):
    """Multi-head attention, computed as `attention` ("eager" or "sdpa") or a variant says."""

    def __init__(self, width: int, heads: int, dropout: float, attention: str) -> None:
        super().__init__(heads, nn.Parameter(torch.empty(3 * width, width)), nn.Parameter(torch.zeros(3 * width)))
        self.out_proj = nn.Linear(width, width)
        self.core: AttentionCore = _CORES[attention](dropout)
        # DETR initializes every matrix of the transformer this way, the three stacked projections as one matrix.
        nn.init.xavier_uniform_(self.in_proj_weight)
        nn.init.xavier_uniform_(self.out_proj.weight)
        nn.init.zeros_(self.out_proj.bias)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, padding: Tensor | None = None) -> Tensor:
        """Attend from query [B, T, C] to key, value [B, S, C]; padding [B, S] bool is True for hidden keys."""
        q, k, v = self.projected(query, key, value)
        return self.out_proj(self.core(q, k, v, padding).transpose(1, 2).flatten(2))


# -- Splits DETR's transformer layers into parts: by heads and columns ("tensor"), or by positions ("sequence").
#
# By positions, part i of an encoder layer attends from the i-th rows of the map to the whole map. In a decoder layer,
# whose queries are few, part i attends from all queries to the i-th rows, and a last part merges the results by their
# log-sum-exp (`variants.attention.merged`).
#
# Each layer that can be split calls one of these functions; see `varuna_capslog.model.splitting.splitter`.


Attend = Callable[..., Tensor]
"""Function that calls a layer's attention: from (attention, the part's inputs) to the attention's output."""


def split_encoder(layer: EncoderLayer, into: Splitter, attend: Attend) -> None:
    """Split an encoder layer. By positions: each part computes some rows of the map, and reads all rows. By tensors:
    the heads, then the columns of the feed-forward.
    """
    if into.kind == "sequence":
        rows = [into.value(f"rows.{part}") for part in range(into.degree)]
        for part, name in enumerate(rows):
            share = into.sharing(layer)
            share.rows = (part, into.degree)
            into.add(f"rows.{part}", share, into.reads, [name])
        into.add("join", JoinedPositions(1), rows, into.writes)
        return
    memory, middle = into.reads[0], into.value("middle")
    attended = _split_attention(into, layer.self_attn, "attention", attend, into.reads)
    into.add("norm1", _sum(layer, layer.self_attn.out_proj.bias, layer.norm1), [memory, *attended], [middle])
    fed = _feed_forward(into, layer, middle)
    into.add("norm2", _sum(layer, layer.linear2.bias, layer.norm2), [middle, *fed], into.writes)


def split_decoder(
    layer: DecoderLayer,
    into: Splitter,
    attends: tuple[Attend, Attend],
    begin: nn.Module | None,
    heads: nn.Module | None,
) -> None:
    """Split a decoder layer. By positions: the keys of the attention to the memory; the object queries are few, so
    operations on them alone stay whole. By tensors: the heads of both attentions, then the columns of the feed-forward.

    Args:
        attends: the attention to the queries, and to the memory.
        begin: returns the first layer's hidden state and query embedding, from the memory.
        heads: predicts from the new hidden state, and appends to the earlier predictions.
    """
    by_heads = into.kind == "tensor"
    before = "hidden"
    if begin is not None:
        before = into.value("begin")
        into.add("begin", begin, ["memory"], [before, "query"])
    first, middle = into.value("first"), into.value("middle")
    if by_heads:
        attended = _split_attention(into, layer.self_attn, "self_attention", attends[0], [before, "query"])
    else:
        attended = [into.value("self_attention")]
        into.add(
            "self_attention", _AttentionPart(into.sharing(layer.self_attn), attends[0]), [before, "query"], attended
        )
    bias = layer.self_attn.out_proj.bias if by_heads else None
    into.add("norm1", _OfLast(_sum(layer, bias, layer.norm1)), [before, *attended], [first])
    reads = [first, "memory", "valid", "query"]
    if by_heads:
        from_memory = _split_attention(into, layer.multihead_attn, "attention", attends[1], reads)
        into.add("norm2", _sum(layer, layer.multihead_attn.out_proj.bias, layer.norm2), [first, *from_memory], [middle])
        fed = _feed_forward(into, layer, middle)
    else:
        merge = _Merge(into.sharing(layer.multihead_attn.out_proj), _sum(layer, None, layer.norm2))
        into.add("norm2", merge, [first, *_attention_to_rows(into, layer.multihead_attn, reads)], [middle])
        fed = [into.value("feed_forward")]
        share = _FeedForwardPart(into.sharing(layer.linear1), into.sharing(layer.linear2), layer.dropout.p)
        into.add("feed_forward", share, [middle], fed)
    keep = layer.keep and begin is None
    after = "hidden" if "hidden" in into.writes else into.value("hidden")
    end = _Hidden(_sum(layer, layer.linear2.bias if by_heads else None, layer.norm3), keep)
    into.add("norm3", end, [*(["hidden"] if keep else []), middle, *fed], [after])
    if heads is not None:
        predicted = [name for name in into.writes if name not in ("hidden", "query")]
        into.add("heads", heads, [after, *(name for name in predicted if name in into.reads)], predicted)


def _attention_to_rows(into: Splitter, attention: Attention, reads: Sequence[str]) -> list[str]:
    """Add parts, each of which attends to some rows of the memory; return the names that they write, outputs first."""
    outs, log_sums = (
        [into.value(f"{name}.{part}") for part in range(into.degree)] for name in ("attention", "log_sum_exp")
    )
    for part, name in enumerate(outs):
        module = _AttentionToRows(attention, (part, into.degree))
        into.add(f"attention.{part}", module, reads, [name, log_sums[part]])
    return [*outs, *log_sums]


def _split_attention(
    into: Splitter, attention: Attention, name: str, attend: Attend, reads: Sequence[str]
) -> list[str]:
    """Add the shares of an attention; return the names that they write."""
    written = [into.value(f"{name}.{part}") for part in range(into.degree)]
    for part, value in enumerate(written):
        into.add(f"{name}.{part}", _AttentionPart(_attention_share(into, attention, part), attend), reads, [value])
    return written


def _attention_share(into: Splitter, attention: Attention, part: int) -> Attention:
    width, size = attention.out_proj.out_features, attention.out_proj.in_features // attention.heads
    first, end = share_of(attention.heads, part, into.degree, "heads")
    rows = [(at + first * size, at + end * size) for at in (0, width, 2 * width)]
    share = into.sharing(attention)
    share.heads = end - first
    share.in_proj_weight = into.cut(attention.in_proj_weight, 0, rows)
    share.in_proj_bias = into.cut(attention.in_proj_bias, 0, rows)
    share.out_proj = linear_columns(into, attention.out_proj, part)
    return share


def _feed_forward(into: Splitter, layer: FeedForwardLayer, reads: str) -> list[str]:
    """Add the shares of the feed-forward; return the names that they write."""
    written = [into.value(f"feed_forward.{part}") for part in range(into.degree)]
    for part, value in enumerate(written):
        share = _FeedForwardPart(
            linear_rows(into, layer.linear1, part), linear_columns(into, layer.linear2, part), layer.dropout.p
        )
        into.add(f"feed_forward.{part}", share, [reads], [value])
    return written


def _sum(layer: FeedForwardLayer, bias: nn.Parameter | None, norm: nn.Module) -> SumAndNorm:
    return SumAndNorm(bias, nn.Dropout(layer.dropout.p), norm)


class _AttentionToRows(Projections):
    """Attention of all queries to a share (n, parts) of the memory's rows: [B, H, Q, D], and log-sum-exp [B, H, Q]."""

    def __init__(self, attention: Attention, share: tuple[int, int]) -> None:
        super().__init__(attention.heads, attention.in_proj_weight, attention.in_proj_bias)
        self.core, self.share = copy.deepcopy(attention.core), share

    def forward(self, x: Tensor, memory: Tensor, valid: Tensor, query: Tensor) -> tuple[Tensor, Tensor]:
        _, height, width, channels = memory.shape
        part, parts = self.share
        first, end = height * part // parts, height * (part + 1) // parts
        values = memory[:, first:end].flatten(1, 2)
        keys = values + sine_positions(valid, height, width, channels)[:, first:end].flatten(1, 2)
        hidden = padding_mask(valid, height, width)[:, first * width : end * width]
        q, k, v = self.projected(x + query, keys, values)
        return self.core.of_block(q, k, v, hidden)


class _Merge(nn.Module):
    """Module that merges the parts, then computes `SumAndNorm`. Called with x, the parts' results and log-sum-exps."""

    def __init__(self, out_proj: nn.Linear, sum_: SumAndNorm) -> None:
        super().__init__()
        self.out_proj, self.sum = out_proj, sum_

    def forward(self, x: Tensor, *tensors: Tensor) -> Tensor:
        parts = len(tensors) // 2
        return self.sum(x, self.out_proj(merged(tensors[:parts], tensors[parts:]).transpose(1, 2).flatten(2)))


class _AttentionPart(nn.Module):
    def __init__(self, attention: Attention, attend: Attend) -> None:
        super().__init__()
        self.attention, self.attend = attention, attend

    def forward(self, *tensors: Tensor) -> Tensor:
        return self.attend(self.attention, *tensors)


class _FeedForwardPart(nn.Module):
    def __init__(self, linear1: nn.Linear, linear2: nn.Linear, rate: float) -> None:
        super().__init__()
        self.linear1, self.linear2, self.dropout = linear1, linear2, nn.Dropout(rate)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear2(self.dropout(F.relu(self.linear1(x))))


class _OfLast(nn.Module):
    def __init__(self, sum_: SumAndNorm) -> None:
        super().__init__()
        self.sum = sum_

    def forward(self, hidden: Tensor, *parts: Tensor) -> Tensor:
        return self.sum(hidden[-1], *parts)


class _Hidden(nn.Module):
    """Next hidden states [K, B, Q, C]. keep: True: appended to the earlier hidden states, the first input."""

    def __init__(self, sum_: SumAndNorm, keep: bool) -> None:
        super().__init__()
        self.sum, self.keep = sum_, keep

    def forward(self, *tensors: Tensor) -> Tensor:
        if not self.keep:
            return self.sum(*tensors)[None]
        return torch.cat((tensors[0], self.sum(*tensors[1:])[None]))


# -- DETR's transformer


def _attend_map(attention: Attention, memory: Tensor, valid: Tensor, rows: tuple[int, int] | None = None) -> Tensor:
    """Return [B, h, w, C]: attention of a map to itself, from its rows [first, end), or from all rows."""
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
    return _attend_queries(attention, hidden[-1], query)


def _attend_memory(attention: Attention, x: Tensor, memory: Tensor, valid: Tensor, query: Tensor) -> Tensor:
    """Return [B, Q, C]: attention of the object queries to a map."""
    _, height, width, channels = memory.shape
    values = memory.flatten(1, 2)
    keys = values + sine_positions(valid, height, width, channels).flatten(1, 2)
    return attention(x + query, keys, values, padding_mask(valid, height, width))


class FeedForwardLayer(nn.Module):
    """Base of encoder and decoder layers: the two linear layers between normalisations."""

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
    """Layer from memory [B, h, w, C] and the valid rows and columns [B, 2] to the next memory. rows: (n, parts):
    compute only the n-th share of the rows, from all rows; None: all.
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
        """Split the layer; see `split_encoder`."""
        split_encoder(self, into, _attend_map)


class DecoderLayer(FeedForwardLayer):
    """Layer called with hidden [K, B, Q, C], memory [B, h, w, C], valid [B, 2] and the query embedding [Q, C].

    Hidden holds the outputs of the K earlier decoder layers, not normalised; the last of them is the input. Returns
    hidden with this layer's output appended, or the output alone where no layer needs earlier outputs (`keep` False).
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
        """Split the layer; see `split_decoder`."""
        split_decoder(self, into, (_attend_last_queries, _attend_memory), *self._around())

    def _around(self) -> tuple[nn.Module | None, nn.Module | None]:
        """Return the modules that a split layer runs before and after the decoding."""
        return None, None


class _BoxHead(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, 4)])

    def forward(self, x: Tensor) -> Tensor:
        first, second, last = self.layers
        return last(F.relu(second(F.relu(first(x)))))


class Heads(nn.Module):
    """Decoder norm, then class scores and boxes: hidden [..., width] to logits [..., C + 1], no-object last, and boxes
    [..., 4] as (cx, cy, w, h) in 0..1 of the unpadded image.
    """

    def __init__(self, config: ModelConfig, num_classes: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.hidden_dim)
        self.class_embed = nn.Linear(config.hidden_dim, num_classes + 1)
        self.bbox_embed = _BoxHead(config.hidden_dim)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        normed = self.norm(hidden)
        # bfloat16 has 8 bits: after a sigmoid in bfloat16, boxes would be exact to 1/256 of the image at best.
        return self.class_embed(normed), self.bbox_embed(normed).to(hidden.dtype).sigmoid()


def _with_predictions(heads: Heads, hidden: Tensor, logits: Tensor, boxes: Tensor) -> tuple[Tensor, Tensor]:
    more_logits, more_boxes = heads(hidden)
    return torch.cat((logits, more_logits)), torch.cat((boxes, more_boxes))


class PredictingDecoderLayer(DecoderLayer):
    """`DecoderLayer` that appends its predictions to the earlier ones; returns hidden, logits, boxes.

    Args:
        heads: one object for all decoder layers, which thus share its parameters.
        last: True: no layer reads the hidden state; returns logits, boxes.
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
    """Layer called with memory and valid; returns hidden [1, B, Q, C] and the query embedding [Q, C].

    Only this layer holds the embedding; the others receive it as an input, so they need no copy. Decoding begins with
    zeros. With `heads`, logits [1, B, Q, C + 1] and boxes [1, B, Q, 4] are returned, too.
    """

    def __init__(self, config: ModelConfig, heads: Heads | None = None) -> None:
        super().__init__(config)
        self.query_embed = nn.Embedding(config.queries, config.hidden_dim)
        self.heads = heads

    def forward(self, memory: Tensor, valid: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        # A view, so that the parameter itself never leaves the layer: the gradients of both uses have their own nodes.
        query = self.query_embed.weight.view_as(self.query_embed.weight)
        start = torch.zeros_like(query).expand(memory.shape[0], -1, -1)
        hidden = self.decode(start, memory, valid, query)[None]
        return (hidden, query) if self.heads is None else (hidden, query, *self.heads(hidden))

    def _around(self) -> tuple[nn.Module | None, nn.Module | None]:
        return _Beginning(self.query_embed), self.heads


class _Beginning(nn.Module):
    """Module called with memory; returns zeros [1, B, Q, C] and the query embedding [Q, C]."""

    def __init__(self, query_embed: nn.Embedding) -> None:
        super().__init__()
        self.query_embed = query_embed

    def forward(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        weight = self.query_embed.weight
        return weight.new_zeros(1, memory.shape[0], *weight.shape), weight.view_as(weight)


class _Predicting(nn.Module):
    """Module called with hidden and the earlier predictions; returns these with new predictions appended."""

    def __init__(self, heads: Heads) -> None:
        super().__init__()
        self.heads = heads

    def forward(self, hidden: Tensor, logits: Tensor, boxes: Tensor) -> tuple[Tensor, Tensor]:
        return _with_predictions(self.heads, hidden, logits, boxes)
