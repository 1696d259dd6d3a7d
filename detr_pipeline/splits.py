"""The parts of DETR's transformer layers that are split: heads and columns, or rows of the feature map.

Each layer of `transformer` that can be split calls a function of this module; see
`varuna_capslog.model.splitting.splitter`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.model.splitting.modules import JoinedPositions, SumAndNorm, linear_columns, linear_rows
from varuna_capslog.model.splitting.splitter import Splitter, share_of

if TYPE_CHECKING:
    from detr_pipeline.transformer import Attention, DecoderLayer, EncoderLayer, FeedForwardLayer

__all__ = ["split_decoder", "split_encoder"]

Attend = Callable[..., Tensor]
"""How a layer calls its attention: (attention, what the part reads) to what the attention gives."""


def split_encoder(layer: EncoderLayer, into: Splitter, attend: Attend) -> None:
    """By positions: each part computes some rows of the map, and reads all of them. By tensors: the heads, then the
    columns of the feed-forward.
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
    into.add("norm1", _sum(layer, layer.self_attn.out_proj, layer.norm1), [memory, *attended], [middle])
    fed = _feed_forward(into, layer, middle)
    into.add("norm2", _sum(layer, layer.linear2, layer.norm2), [middle, *fed], into.writes)


def split_decoder(
    layer: DecoderLayer,
    into: Splitter,
    attends: tuple[Attend, Attend],
    begin: nn.Module | None,
    heads: nn.Module | None,
) -> None:
    """The heads of both attentions, then the columns of the feed-forward.

    Args:
        attends: to the queries, to the memory.
        begin: gives the hidden state and the query embedding that the first layer begins with, from the memory.
        heads: predicts from the new hidden state, and appends to what was predicted before.

    Raises:
        CapslogError: a split by positions.
    """
    if into.kind == "sequence":
        raise CapslogError(f"a decoder layer has few positions, its object queries; take tensor-{into.degree} for it")
    before = "hidden"
    if begin is not None:
        before = into.value("begin")
        into.add("begin", begin, ["memory"], [before, "query"])
    first, middle = into.value("first"), into.value("middle")
    own = _attention(into, layer.self_attn, "self_attention", attends[0], [before, "query"])
    into.add("norm1", _OfLast(_sum(layer, layer.self_attn.out_proj, layer.norm1)), [before, *own], [first])
    reads = [first, "memory", "valid", "query"]
    seen = _attention(into, layer.multihead_attn, "attention", attends[1], reads)
    into.add("norm2", _sum(layer, layer.multihead_attn.out_proj, layer.norm2), [first, *seen], [middle])
    fed = _feed_forward(into, layer, middle)
    keep = layer.keep and begin is None
    after = "hidden" if "hidden" in into.writes else into.value("hidden")
    end = _Hidden(_sum(layer, layer.linear2, layer.norm3), keep)
    into.add("norm3", end, [*(["hidden"] if keep else []), middle, *fed], [after])
    if heads is not None:
        predicted = [name for name in into.writes if name not in ("hidden", "query")]
        into.add("heads", heads, [after, *(name for name in predicted if name in into.reads)], predicted)


def _attention(into: Splitter, whole: Attention, name: str, attend: Attend, reads: Sequence[str]) -> list[str]:
    """Adds the shares of an attention; returns what they write."""
    written = [into.value(f"{name}.{part}") for part in range(into.degree)]
    for part, value in enumerate(written):
        into.add(f"{name}.{part}", _AttentionPart(_attention_share(into, whole, part), attend), reads, [value])
    return written


def _attention_share(into: Splitter, whole: Attention, part: int) -> Attention:
    width, size = whole.out_proj.out_features, whole.out_proj.in_features // whole.heads
    first, end = share_of(whole.heads, part, into.degree, "heads")
    rows = [(at + first * size, at + end * size) for at in (0, width, 2 * width)]
    share = into.sharing(whole)
    share.heads = end - first
    share.in_proj_weight = into.cut(whole.in_proj_weight, 0, rows)
    share.in_proj_bias = into.cut(whole.in_proj_bias, 0, rows)
    share.out_proj = linear_columns(into, whole.out_proj, part)
    return share


def _feed_forward(into: Splitter, layer: FeedForwardLayer, reads: str) -> list[str]:
    """Adds the shares of the feed-forward; returns what they write."""
    written = [into.value(f"feed_forward.{part}") for part in range(into.degree)]
    for part, value in enumerate(written):
        share = _FeedForwardPart(
            linear_rows(into, layer.linear1, part), linear_columns(into, layer.linear2, part), layer.dropout.p
        )
        into.add(f"feed_forward.{part}", share, [reads], [value])
    return written


def _sum(layer: FeedForwardLayer, last: nn.Linear, norm: nn.Module) -> SumAndNorm:
    return SumAndNorm(last.bias, nn.Dropout(layer.dropout.p), norm)


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
    """The next hidden states [K, B, Q, C]; `keep`: behind those before, which are read first."""

    def __init__(self, sum_: SumAndNorm, keep: bool) -> None:
        super().__init__()
        self.sum, self.keep = sum_, keep

    def forward(self, *tensors: Tensor) -> Tensor:
        if not self.keep:
            return self.sum(*tensors)[None]
        return torch.cat((tensors[0], self.sum(*tensors[1:])[None]))
