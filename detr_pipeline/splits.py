"""The parts of DETR's transformer layers that are split: heads and columns, or positions.

By positions, part i of an encoder layer attends from the i-th rows of the map to all of it. In a decoder layer, whose
queries are few, it attends from all queries to the i-th rows, and a last part merges the parts' results by their
log-sum-exp (`variants.attention.merged`).

Each layer of `transformer` that can be split calls a function of this module; see
`varuna_capslog.model.splitting.splitter`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from detr_pipeline.attention import Projections, padding_mask, sine_positions
from varuna_capslog.model.splitting.modules import JoinedPositions, SumAndNorm, linear_columns, linear_rows
from varuna_capslog.model.splitting.splitter import Splitter, share_of
from varuna_capslog.variants.attention import merged

if TYPE_CHECKING:
    from detr_pipeline.attention import Attention
    from detr_pipeline.transformer import DecoderLayer, EncoderLayer, FeedForwardLayer

__all__ = ["split_decoder", "split_encoder"]

Attend = Callable[..., Tensor]
"""Calls a layer's attention: (attention, the part's inputs) to the attention's output."""


def split_encoder(layer: EncoderLayer, into: Splitter, attend: Attend) -> None:
    """Split an encoder layer. By positions: each part computes some rows of the map, and reads all of them. By tensors:
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
    attended = _attention(into, layer.self_attn, "attention", attend, into.reads)
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
        attends: to the queries, to the memory.
        begin: gives the hidden state and the query embedding that the first layer begins with, from the memory.
        heads: predicts from the new hidden state, and appends to the earlier predictions.
    """
    by_heads = into.kind == "tensor"
    before = "hidden"
    if begin is not None:
        before = into.value("begin")
        into.add("begin", begin, ["memory"], [before, "query"])
    first, middle = into.value("first"), into.value("middle")
    if by_heads:
        attended = _attention(into, layer.self_attn, "self_attention", attends[0], [before, "query"])
    else:
        attended = [into.value("self_attention")]
        into.add(
            "self_attention", _AttentionPart(into.sharing(layer.self_attn), attends[0]), [before, "query"], attended
        )
    bias = layer.self_attn.out_proj.bias if by_heads else None
    into.add("norm1", _OfLast(_sum(layer, bias, layer.norm1)), [before, *attended], [first])
    reads = [first, "memory", "valid", "query"]
    if by_heads:
        seen = _attention(into, layer.multihead_attn, "attention", attends[1], reads)
        into.add("norm2", _sum(layer, layer.multihead_attn.out_proj.bias, layer.norm2), [first, *seen], [middle])
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
    """Add the parts that attend to some rows of the memory each; return the names that they write, outputs first."""
    outs, seen = (
        [into.value(f"{name}.{part}") for part in range(into.degree)] for name in ("attention", "log_sum_exp")
    )
    for part, name in enumerate(outs):
        module = _AttentionToRows(attention, (part, into.degree))
        into.add(f"attention.{part}", module, reads, [name, seen[part]])
    return [*outs, *seen]


def _attention(into: Splitter, attention: Attention, name: str, attend: Attend, reads: Sequence[str]) -> list[str]:
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
    """Attention of all queries to some rows of the memory: [B, H, Q, D] and the log-sum-exp [B, H, Q].

    share: (n, parts): the n-th share of the rows.
    """

    def __init__(self, attention: Attention, share: tuple[int, int]) -> None:
        super().__init__(attention.heads, attention.in_proj_weight, attention.in_proj_bias)
        self.core, self.share = copy.deepcopy(attention.core), share

    def forward(self, x: Tensor, memory: Tensor, valid: Tensor, query: Tensor) -> tuple[Tensor, Tensor]:
        _, height, width, channels = memory.shape
        part, parts = self.share
        first, end = height * part // parts, height * (part + 1) // parts
        seen = memory[:, first:end].flatten(1, 2)
        keys = seen + sine_positions(valid, height, width, channels)[:, first:end].flatten(1, 2)
        hidden = padding_mask(valid, height, width)[:, first * width : end * width]
        q, k, v = self.projected(x + query, keys, seen)
        return self.core.of_block(q, k, v, hidden)


class _Merge(nn.Module):
    """Merges the parts' results: called with x, the results and their log-sum-exp; then as `SumAndNorm`."""

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
    """Takes the last entry of the hidden states."""

    def __init__(self, sum_: SumAndNorm) -> None:
        super().__init__()
        self.sum = sum_

    def forward(self, hidden: Tensor, *parts: Tensor) -> Tensor:
        return self.sum(hidden[-1], *parts)


class _Hidden(nn.Module):
    """Returns the next hidden states [K, B, Q, C]; `keep`: appended to the earlier ones, which are read first."""

    def __init__(self, sum_: SumAndNorm, keep: bool) -> None:
        super().__init__()
        self.sum, self.keep = sum_, keep

    def forward(self, *tensors: Tensor) -> Tensor:
        if not self.keep:
            return self.sum(*tensors)[None]
        return torch.cat((tensors[0], self.sum(*tensors[1:])[None]))
