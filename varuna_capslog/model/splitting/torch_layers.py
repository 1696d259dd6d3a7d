"""Splits torch's own transformer layers, and two linear maps with an activation between them, by tensor-N."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.model.splitting.captured import ELEMENTWISE, split_captured, splits_captured
from varuna_capslog.model.splitting.splitter import Splitter, share_of
from varuna_capslog.variants.attention import SdpaAttention

__all__ = ["JoinedPositions", "PartsSum", "SumAndNorm", "linear_columns", "linear_rows", "splitting_of"]


# -- Modules that many parts of split layers use.


class PartsSum(nn.Module):
    """Sum of the parts' results, in the order of the parts, and the bias, which the parts leave out."""

    def __init__(self, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.bias = bias

    def forward(self, *parts: Tensor) -> Tensor:
        return _total(parts, self.bias)


class SumAndNorm(nn.Module):
    """norm(x + dropout(sum of the parts + bias)): joins the parts of one operation.

    Called with x and the result of each part, all of one shape; they are added in the order of the parts, on any ranks.

    bias: the operation's bias, which the parts leave out. norm: None: do not normalise the sum.
    """

    def __init__(self, bias: nn.Parameter | None, dropout: nn.Module, norm: nn.Module | None) -> None:
        super().__init__()
        self.bias, self.dropout, self.norm = bias, dropout, norm

    def forward(self, x: Tensor, *parts: Tensor) -> Tensor:
        x = x + self.dropout(_total(parts, self.bias))
        return x if self.norm is None else self.norm(x)


def _total(parts: Sequence[Tensor], bias: Tensor | None) -> Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total if bias is None else total + bias


class JoinedPositions(nn.Module):
    """Concatenation of the parts' positions along one dimension, in the order of the parts."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, *parts: Tensor) -> Tensor:
        return torch.cat(parts, self.dim)


def linear_rows(splitter: Splitter, linear: nn.Linear, part: int) -> nn.Linear:
    """Return a linear map with a part's equal share of the outputs, and with their biases."""
    ranges = [share_of(linear.out_features, part, splitter.degree, "columns")]
    share = nn.Linear(1, 1, bias=False, device="meta")
    share.in_features, share.out_features = linear.in_features, ranges[0][1] - ranges[0][0]
    share.weight = splitter.cut(linear.weight, 0, ranges)
    share.bias = None if linear.bias is None else splitter.cut(linear.bias, 0, ranges)
    return share


def linear_columns(splitter: Splitter, linear: nn.Linear, part: int) -> nn.Linear:
    """Return a linear map with a part's equal share of the inputs, without the bias, which is added once at the end."""
    ranges = [share_of(linear.in_features, part, splitter.degree, "columns")]
    share = nn.Linear(1, 1, bias=False, device="meta")
    share.in_features, share.out_features = ranges[0][1] - ranges[0][0], linear.out_features
    share.weight = splitter.cut(linear.weight, 1, ranges)
    return share


# -- the splits of torch's own layers


def splitting_of(module: nn.Module) -> Callable[[Splitter], None] | None:
    """Return the function that splits a module: its method `split`, or a function of this file; None if neither."""
    own_split: Any = getattr(module, "split", None)
    if own_split is not None:
        return own_split
    while isinstance(module, nn.Sequential) and len(module) == 1:
        (module,) = module
    if isinstance(module, nn.TransformerEncoderLayer):
        return functools.partial(_split_encoder, module)
    if isinstance(module, nn.TransformerDecoderLayer):
        return functools.partial(_split_decoder, module)
    if isinstance(module, nn.Sequential) and len(module) > 1 and _widens(module):
        return functools.partial(_split_pair, module)
    if splits_captured(module):
        return functools.partial(_split_captured, module)
    return None


def _widens(module: nn.Sequential) -> bool:
    """True for a sequence of a linear map, elementwise modules, and a linear map."""
    first, *between, last = module
    linear = type(first) is nn.Linear and type(last) is nn.Linear
    return linear and all(isinstance(inner, ELEMENTWISE) for inner in between)


def _split_captured(module: nn.Module, into: Splitter) -> None:
    _degree(into)
    split_captured(module, into)  # type: ignore[arg-type]


def _split_pair(module: nn.Sequential, into: Splitter) -> None:
    first, *between, last = module
    assert isinstance(first, nn.Linear)
    assert isinstance(last, nn.Linear)
    parts = [into.value(f"columns.{part}") for part in range(_degree(into))]
    for part, name in enumerate(parts):
        rows, columns = linear_rows(into, first, part), linear_columns(into, last, part)
        into.add(f"columns.{part}", nn.Sequential(rows, *map(into.sharing, between), columns), into.reads, [name])
    into.add("sum", PartsSum(last.bias), parts, into.writes)


def _split_encoder(layer: nn.TransformerEncoderLayer, into: Splitter) -> None:
    """Split an encoder layer, called with src, and optionally src_mask and src_key_padding_mask."""
    x, *masks = _read(into, 3, "src, src_mask and src_key_padding_mask")
    middle = into.value("middle")
    _residual(into, layer, (x, middle), _attention(into, layer.self_attn, "attention", [], masks), 1)
    _residual(into, layer, (middle, into.writes[0]), _feed_forward(into, layer), 2)


def _split_decoder(layer: nn.TransformerDecoderLayer, into: Splitter) -> None:
    """Split a decoder layer, called with tgt, memory, and optionally tgt_mask, memory_mask, and both padding masks."""
    x, memory, *masks = _read(into, 6, "tgt, memory, and the masks and then the masks of padding of both")
    first, middle = into.value("first"), into.value("middle")
    own_masks, memory_masks = masks[0::2], masks[1::2]
    _residual(into, layer, (x, first), _attention(into, layer.self_attn, "self_attention", [], own_masks), 1)
    _residual(
        into, layer, (first, middle), _attention(into, layer.multihead_attn, "attention", [memory], memory_masks), 2
    )
    _residual(into, layer, (middle, into.writes[0]), _feed_forward(into, layer), 3)


def _degree(into: Splitter) -> int:
    if into.kind == "sequence":
        raise CapslogError(f"its positions cannot be shared out; take tensor-{into.degree} for it")
    return into.degree


def _read(into: Splitter, most: int, names: str) -> Sequence[str]:
    _degree(into)
    if len(into.reads) > most:
        raise CapslogError(f"it reads {len(into.reads)} tensors, of which only {names} are known; read these alone")
    return into.reads


@dataclass(frozen=True)
class _Operation:
    """Operation in a residual branch, as parts, and the bias that is added once.

    add: adds the parts, which read the tensor of the name given; returns the names of the tensors that they write.
    """

    add: Callable[[str], list[str]]
    bias: nn.Parameter | None


def _residual(into: Splitter, layer: Any, values: tuple[str, str], inner: _Operation, number: int) -> None:
    """Add parts for x + dropout(inner(x)), normalised before the inner operation or after the sum.

    values: names of x and of the result. number: number in the names of the layer's norm and dropout.
    """
    read, after = values
    norm, dropout = getattr(layer, f"norm{number}"), getattr(layer, f"dropout{number}")
    if layer.norm_first:
        read = into.value(f"norm{number}")
        into.add(f"norm{number}", norm, values[:1], [read])
    sum_ = SumAndNorm(inner.bias, nn.Dropout(dropout.p), None if layer.norm_first else norm)
    into.add(f"sum{number}", sum_, [values[0], *inner.add(read)], [after])


def _feed_forward(into: Splitter, layer: Any) -> _Operation:
    x = torch.linspace(-3, 3, 8)
    if not torch.equal(layer.activation(x)[..., :3], layer.activation(x[:3])):
        raise CapslogError(f"its activation {layer.activation} does not work on each entry alone; leave it whole")

    def add(reads: str) -> list[str]:
        written = [into.value(f"feed_forward.{part}") for part in range(into.degree)]
        for part, value in enumerate(written):
            rows, columns = linear_rows(into, layer.linear1, part), linear_columns(into, layer.linear2, part)
            share = nn.Sequential(rows, _Activation(layer.activation), nn.Dropout(layer.dropout.p), columns)
            into.add(f"feed_forward.{part}", share, [reads], [value])
        return written

    return _Operation(add, layer.linear2.bias)


def _attention(
    into: Splitter, attention: nn.MultiheadAttention, name: str, memory: list[str], masks: Sequence[str]
) -> _Operation:
    """Return an attention divided by heads, with keys and values of the input itself or of a memory."""

    def add(reads: str) -> list[str]:
        written = [into.value(f"{name}.{part}") for part in range(into.degree)]
        for part, value in enumerate(written):
            share = _Heads(into, attention, part, bool(memory))
            into.add(f"{name}.{part}", share, [reads, *memory, *masks], [value])
        return written

    return _Operation(add, attention.out_proj.bias)


class _Heads(nn.Module):
    """Share of the heads of an `nn.MultiheadAttention`, without its output bias.

    Called with x, the memory if it attends to one, the mask and the padding mask, if there are any.
    """

    def __init__(self, into: Splitter, attention: nn.MultiheadAttention, part: int, to_memory: bool) -> None:
        super().__init__()
        assert attention.in_proj_weight is not None, "the widths of a transformer layer are all one"
        self.heads, self.to_memory, self.batch_first = attention.num_heads, to_memory, attention.batch_first
        self.own, width = share_of(attention.num_heads, part, into.degree, "heads"), attention.embed_dim
        rows = [
            (at + self.own[0] * attention.head_dim, at + self.own[1] * attention.head_dim)
            for at in range(0, 3 * width, width)
        ]
        self.in_proj_weight = into.cut(attention.in_proj_weight, 0, rows)
        self.in_proj_bias = None if attention.in_proj_bias is None else into.cut(attention.in_proj_bias, 0, rows)
        self.out_proj = linear_columns(into, attention.out_proj, part)
        self.core = SdpaAttention(attention.dropout)

    def forward(self, x: Tensor, *tensors: Tensor) -> Tensor:
        memory, *masks = tensors if self.to_memory else (x, *tensors)
        if not self.batch_first:
            x, memory = x.transpose(0, 1), memory.transpose(0, 1)
        biases = [None] * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        q, k, v = (
            nn.functional.linear(source, weight, bias).unflatten(-1, (self.own[1] - self.own[0], -1)).transpose(1, 2)
            for source, weight, bias in zip((x, memory, memory), self.in_proj_weight.chunk(3), biases, strict=True)
        )
        bias = self._bias(masks, q) if masks else None
        attended = self.core.attend(q, k, v, bias, q.shape[-1] ** -0.5).transpose(1, 2).flatten(2)
        attended = self.out_proj(attended)
        return attended if self.batch_first else attended.transpose(0, 1)

    def _bias(self, masks: Sequence[Tensor], q: Tensor) -> Tensor:
        """Return the bias on the logits of a mask [T, S] or [B * heads, T, S] and, if any, a padding mask [B, S]."""
        mask, *padding = (_added(mask, q.dtype) for mask in masks)
        bias = mask.unflatten(0, (-1, self.heads))[:, slice(*self.own)] if mask.dim() == 3 else mask[None, None]
        return bias + padding[0][:, None, None] if padding else bias


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, float("-inf"))


class _Activation(nn.Module):
    """Elementwise function as a module."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)
