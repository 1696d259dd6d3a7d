"""Layers of decoders in plain torch: blocks and heads as people measured them, and the chains of the plans."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["Block", "Head", "Size", "layer_step", "unfilled"]


@dataclass(frozen=True)
class Size:
    """Sizes of a decoder, or of one tensor-parallel shard of it.

    Attributes:
        llama: RMSNorm, rotary positions, a gate, no biases; else LayerNorm, ReLU and biases, as OPT has.
        shards: divisor of heads, middle and vocabulary; the vocabulary is padded to 128 for each shard.
    """

    width: int
    heads: int
    middle: int
    vocabulary: int
    llama: bool = False
    shards: int = 1

    def shard(self, shards: int) -> Size:
        return replace(self, shards=shards)

    @property
    def head_width(self) -> int:
        return self.width // self.heads

    @property
    def own_vocabulary(self) -> int:
        return -(-self.vocabulary // (128 * self.shards)) * 128

    def norm(self) -> nn.Module:
        return nn.RMSNorm(self.width) if self.llama else nn.LayerNorm(self.width)


class Block(nn.Module):
    """Decoder block on [tokens, samples, width]; its attention keeps the score matrix, masked in place."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.size, biased = size, not size.llama
        width, inner, middle = size.width, size.width // size.shards, size.middle // size.shards
        self.norm1, self.norm2 = size.norm(), size.norm()
        self.qkv = nn.Linear(width, 3 * inner, bias=biased)
        self.out = nn.Linear(inner, width, bias=biased)
        self.up = nn.Linear(width, 2 * middle if size.llama else middle, bias=biased)
        self.down = nn.Linear(middle, width, bias=biased)

    def forward(self, x: Tensor, mask: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.out(self._attend(self.norm1(x), mask, turns))
        up = self.up(self.norm2(x))
        if self.size.llama:
            gate, value = up.chunk(2, -1)
            return x + self.down(F.silu(gate) * value)
        return x + self.down(F.relu(up))

    def _attend(self, x: Tensor, mask: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
        tokens, samples, _ = x.shape
        heads, width = self.size.heads // self.size.shards, self.size.head_width
        query, key, value = self.qkv(x).view(tokens, samples, heads, 3 * width).chunk(3, -1)
        if self.size.llama:
            query, key = _turned(query, *turns), _turned(key, *turns)
        query, key, value = (projection.reshape(tokens, samples * heads, width) for projection in (query, key, value))
        space = torch.empty(samples * heads, tokens, tokens)
        queries, keys = query.transpose(0, 1), key.transpose(0, 1).transpose(1, 2)
        scores = torch.baddbmm(space, queries, keys, beta=0.0, alpha=width**-0.5)
        scores = scores.view(samples, heads, tokens, tokens).masked_fill_(mask, -10000.0)
        weights = torch.softmax(scores, -1).view(samples * heads, tokens, tokens)
        mixed = torch.bmm(weights, value.transpose(0, 1)).view(samples, heads, tokens, width)
        return mixed.permute(2, 0, 1, 3).reshape(tokens, samples, heads * width)


def _turned(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cosine + torch.cat((-second, first), -1) * sine


class Head(nn.Module):
    """Final norm (OPT's; Llama's is a separate layer there), logits, and a cross entropy as in Megatron."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.norm = nn.Identity() if size.llama else size.norm()
        self.weight = nn.Parameter(torch.empty(size.own_vocabulary, size.width))

    def forward(self, x: Tensor, wanted: Tensor) -> Tensor:
        losses: Tensor = _Entropy.apply(F.linear(self.norm(x), self.weight), wanted)
        return losses.sum() / wanted.numel()


class _Entropy(torch.autograd.Function):
    """Cross entropy that keeps the softmax and computes the gradient in place."""

    @staticmethod
    def forward(context: Any, logits: Tensor, wanted: Tensor) -> Tensor:
        logits = logits - logits.max(-1)[0].unsqueeze(-1)
        chosen = logits.view(-1, logits.shape[-1]).gather(1, wanted.view(-1, 1)).view_as(wanted)
        powers = logits.exp()
        total = powers.sum(-1)
        context.save_for_backward(powers.div_(total.unsqueeze(-1)), wanted)
        return total.log() - chosen

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        shares, wanted = context.saved_tensors
        increments = torch.ones_like(wanted, dtype=shares.dtype).view(-1, 1)
        shares.view(-1, shares.shape[-1]).scatter_add_(1, wanted.view(-1, 1), increments)
        return shares.mul_(gradients[0].unsqueeze(-1)), None


def unfilled(make: Callable[[], nn.Module], dtype: torch.dtype = torch.float32) -> nn.Module:
    """Return the module with uninitialized memory for its parameters, which takes no time to build."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            model = make()
    finally:
        torch.set_default_dtype(before)
    return model.to_empty(device="cpu").train()


def layer_step(layer: nn.Module, size: Size, tokens: int, samples: int) -> None:
    """Run forward and backward of a block or head whose input requires a gradient."""
    x = torch.empty(tokens, samples, size.width, requires_grad=True)
    if isinstance(layer, Head):
        layer(x, torch.empty(tokens, samples, dtype=torch.long)).backward()
        return
    turn = torch.empty(tokens, 1, 1, size.head_width)
    result = layer(x, torch.empty(1, 1, tokens, tokens, dtype=torch.bool), (turn, turn))
    result.backward(torch.empty_like(result))
