"""Attention of projected queries, keys and values: eager, by torch's fused kernels, or a chunk of queries at a time.

A layer that holds one of these modules can be computed in each of the three ways; `registry` puts one in place of
another. None of them has parameters, so weights and checkpoints are the same under all of them. Where attention drops
out, other entries are dropped under each: the three are equal up to rounding only without dropout.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["AttentionCore", "ChunkedAttention", "EagerAttention", "SdpaAttention", "put_in"]

QUERIES = 256
"""Queries of one chunk: maps of [256, keys] are small beside the layer's other tensors, and fill a device."""
_HALVES = (torch.bfloat16, torch.float16)


class AttentionCore(nn.Module):
    """softmax(q k^T / sqrt(D)) v for every head.

    Args:
        rate: probability with which an entry of the attention map is dropped in training.
    """

    def __init__(self, rate: float = 0.0) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, q: Tensor, k: Tensor, v: Tensor, padding: Tensor | None = None) -> Tensor:
        """Args: q [B, H, T, D]; k, v [B, H, S, D]; padding [B, S] bool, True where a key must not be seen.

        Returns [B, H, T, D].
        """
        raise NotImplementedError


class EagerAttention(AttentionCore):
    """The [B * H, T, S] maps are computed one step after the other and kept for the backward.

    So does `nn.MultiheadAttention` when asked for its weights.
    """

    def forward(self, q: Tensor, k: Tensor, v: Tensor, padding: Tensor | None = None) -> Tensor:
        """See `AttentionCore`."""
        batch, heads = q.shape[:2]
        q, k, v = (x.flatten(0, 1) for x in (q * (1 / math.sqrt(q.shape[-1])), k, v))
        if padding is None:
            maps = torch.bmm(q, k.transpose(1, 2))
        else:
            maps = torch.baddbmm(_bias(padding, heads, q.dtype), q, k.transpose(1, 2))
        # One name for all three: each map is as large as all else together, and must go as soon as the next is there.
        maps = maps.softmax(-1)
        maps = F.dropout(maps, self.rate, self.training)
        return torch.bmm(maps, v).unflatten(0, (batch, -1))


class SdpaAttention(AttentionCore):
    """`torch.nn.functional.scaled_dot_product_attention`, whose kernels keep no map."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, padding: Tensor | None = None) -> Tensor:
        """See `AttentionCore`."""
        seen = None if padding is None else ~padding[:, None, None, :]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, dropout_p=self.rate if self.training else 0.0)


class ChunkedAttention(AttentionCore):
    """The maps of `queries` queries at a time. The backward computes each again, so that none is kept.

    A row of the map depends on one query alone: every output is the one of `EagerAttention`. The gradients of keys and
    values are sums over the chunks, first chunk first. The same idea, with the keys in chunks too: Rabe and Staats,
    "Self-attention Does Not Need O(n^2) Memory" (2021).
    """

    def __init__(self, rate: float = 0.0, queries: int = QUERIES) -> None:
        super().__init__(rate)
        self.queries = queries

    def forward(self, q: Tensor, k: Tensor, v: Tensor, padding: Tensor | None = None) -> Tensor:
        """See `AttentionCore`."""
        batch, heads = q.shape[:2]
        q, k, v = (x.flatten(0, 1) for x in (q * (1 / math.sqrt(q.shape[-1])), k, v))
        bias = None if padding is None else _bias(padding, heads, q.dtype)
        rate = self.rate if self.training else 0.0
        return _InChunks.apply(q, k, v, bias, rate, self.queries).unflatten(0, (batch, -1))


class _InChunks(torch.autograd.Function):
    """Chunked attention of scaled queries q [N, T, D], keys and values [N, S, D] and what is added to each row."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, rate: float, queries: int) -> Tensor:
        ctx.save_for_backward(q, k, v, bias)
        ctx.rate, ctx.queries, ctx.random = rate, queries, _random_state(q) if rate else None
        found = q.new_empty(*q.shape[:2], v.shape[-1])
        with torch.autocast(q.device.type, enabled=False):
            for part, out in zip(q.split(queries, 1), found.split(queries, 1), strict=True):
                maps = _maps(part, k, bias)
                if rate:
                    maps *= _kept(maps, rate)
                out.copy_(torch.bmm(maps.to(v.dtype), v))
        return found

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, bias = ctx.saved_tensors
        wide = torch.float32 if q.dtype in _HALVES else q.dtype
        of_q, of_k, of_v = torch.empty_like(q), torch.zeros_like(k, dtype=wide), torch.zeros_like(v, dtype=wide)
        devices = [q.device] if q.is_cuda else []
        with torch.autocast(q.device.type, enabled=False), torch.random.fork_rng(devices, enabled=ctx.rate > 0):
            if ctx.rate:
                _set_random_state(q, ctx.random)
            parts = (tensor.split(ctx.queries, 1) for tensor in (q, gradient, of_q))
            for part, upper, out in zip(*parts, strict=True):
                maps = _maps(part, k, bias)
                of_maps = torch.bmm(upper, v.transpose(1, 2)).to(maps.dtype)
                dropped = maps
                if ctx.rate:
                    kept = _kept(maps, ctx.rate)
                    of_maps *= kept
                    dropped = maps * kept
                of_v += torch.bmm(dropped.to(v.dtype).transpose(1, 2), upper)
                # the softmax's own backward: maps * (of_maps - the row's sum of of_maps * maps)
                of_maps -= (of_maps * maps).sum(-1, keepdim=True)
                of_maps = of_maps.mul_(maps).to(k.dtype)
                out.copy_(torch.bmm(of_maps, k))
                of_k += torch.bmm(of_maps.transpose(1, 2), part)
        return of_q, of_k.to(k.dtype), of_v.to(v.dtype), None, None, None


def _bias(padding: Tensor, heads: int, dtype: torch.dtype) -> Tensor:
    """[B * heads, 1, S]: minus infinity where a key must not be seen, else 0."""
    bias = torch.zeros_like(padding, dtype=dtype).masked_fill(padding, -math.inf)
    return bias[:, None].expand(-1, heads, -1).flatten(0, 1)[:, None]


def _maps(part: Tensor, k: Tensor, bias: Tensor | None) -> Tensor:
    """[N, queries, S], float32 for halves."""
    maps = torch.bmm(part, k.transpose(1, 2)) if bias is None else torch.baddbmm(bias, part, k.transpose(1, 2))
    return maps.softmax(-1, torch.float32 if part.dtype in _HALVES else part.dtype)


def _kept(maps: Tensor, rate: float) -> Tensor:
    """Factors of the entries: 0 for those that are dropped."""
    return torch.empty_like(maps).bernoulli_(1 - rate).div_(max(1 - rate, torch.finfo(maps.dtype).tiny))


def _random_state(q: Tensor) -> Tensor:
    return torch.cuda.get_rng_state(q.device) if q.is_cuda else torch.get_rng_state()


def _set_random_state(q: Tensor, state: Tensor) -> None:
    if q.is_cuda:
        torch.cuda.set_rng_state(state, q.device)
    else:
        torch.set_rng_state(state)


def put_in(layer: nn.Module, kind: type[AttentionCore]) -> int | None:
    """Computes all attention inside a layer in this way.

    Returns how many modules it replaced, None if there are none.
    """
    found = [
        (module, name, child)
        for module in layer.modules()
        for name, child in module.named_children()
        if isinstance(child, AttentionCore)
    ]
    others = [one for one in found if type(one[2]) is not kind]
    for module, name, child in others:
        setattr(module, name, kind(child.rate).train(child.training))
    return len(others) if found else None
