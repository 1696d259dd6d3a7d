"""Chains on which predictions are checked besides DETR: a plain transformer, a ResNet with trainable BatchNorm, and a
decoder-only model that checkpoints its own blocks. Configs name the functions at the end as their workload.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torchvision.models import resnet18

from varuna_capslog.config.settings import Config
from varuna_capslog.model.chain import Chain, Layer, TensorSpec
from varuna_capslog.model.workload import Minibatch, Workload

__all__ = ["decoder", "resnet", "transformer"]

VOCABULARY = 512
CLASSES = 10


class RandomData:
    """Random inputs of one shape, and targets."""

    def __init__(self, workload: Seeded) -> None:
        self._of = workload

    def __len__(self) -> int:
        return 64

    def minibatch(self, groups: Sequence[Sequence[int]], epoch: int) -> Minibatch:
        targets, normalisers = [], {"count": 0.0}
        for group in groups:
            wanted, counted = self._of.profile_targets(len(group))
            targets.append(wanted)
            normalisers["count"] += counted["count"]
        inputs = [self._of.profile_inputs(len(group)) for group in groups]
        return Minibatch(inputs, targets, normalisers, recipes=[list(group) for group in groups])

    def load(self, minibatch: Minibatch, microbatch: int) -> dict[str, Tensor]:
        (spec,) = minibatch.inputs[microbatch].values()
        generator = torch.Generator().manual_seed(minibatch.recipes[microbatch][0])
        if spec.dtype.is_floating_point:
            return {"x": torch.randn(spec.shape, generator=generator)}
        return {"x": torch.randint(VOCABULARY, spec.shape, generator=generator)}


class Seeded(Workload):
    """Base of the three workloads: one input `x`, cross entropy, random data."""

    def __init__(self, config: Config) -> None:
        self.keys = config.model

    def loss(self, outputs: Mapping[str, Tensor], targets: Any, normalisers: Mapping[str, float]) -> dict[str, Tensor]:
        scores = outputs["x"].flatten(0, -2).float()
        return {"loss": F.cross_entropy(scores, targets.flatten(), reduction="sum") / normalisers["count"]}

    def train_data(self) -> RandomData:
        return RandomData(self)


class Attention(nn.Module):
    """Multi-head self-attention: `explicit` keeps the softmax in memory, otherwise torch's fused kernel runs."""

    def __init__(self, dim: int, heads: int, explicit: bool) -> None:
        super().__init__()
        self.heads, self.explicit = heads, explicit
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        query, key, value = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        if self.explicit:
            weights = (query @ key.transpose(-2, -1) / query.shape[-1] ** 0.5).softmax(-1)
            mixed = self.dropout(weights) @ value
        else:
            mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, dim))


class Block(nn.Module):
    def __init__(self, dim: int, heads: int, explicit: bool, recomputes: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = Attention(dim, heads, explicit)
        self.feed = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))
        self.recomputes = recomputes

    def _run(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.feed(self.norm2(x))

    def forward(self, x: Tensor) -> Tensor:
        if self.recomputes and torch.is_grad_enabled():
            return checkpoint(self._run, x, use_reentrant=False)  # type: ignore[no-any-return]
        return self._run(x)


class Tokens(Seeded):
    """Embedding, blocks, head on tokens [B, T]; keys blocks, dim, length."""

    name = "transformer"
    explicit, recomputes = True, False

    def build_chain(self) -> Chain:
        blocks, dim = self.keys.get("blocks", 4), self.keys.get("dim", 256)
        layers = [Layer("embedding", nn.Embedding(VOCABULARY, dim))]
        layers += [Layer(f"block.{i}", Block(dim, 4, self.explicit, self.recomputes)) for i in range(blocks)]
        layers.append(Layer("head", nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, VOCABULARY))))
        return Chain(layers, name=self.name)

    def profile_inputs(self, microbatch_size: int) -> dict[str, TensorSpec]:
        return {"x": TensorSpec((microbatch_size, self.keys.get("length", 128)), torch.int64)}

    def profile_targets(self, microbatch_size: int) -> tuple[Any, dict[str, float]]:
        shape = (microbatch_size, self.keys.get("length", 128))
        return torch.ones(shape, dtype=torch.int64), {"count": float(shape[0] * shape[1])}


class DecoderOnly(Tokens):
    name = "decoder"
    explicit, recomputes = False, True


class ResNet(Seeded):
    """torchvision's ResNet-18 on images [B, 3, side, side], BatchNorm trained; a layer per block."""

    name = "resnet18"

    def build_chain(self) -> Chain:
        net = resnet18(num_classes=CLASSES)
        layers = [Layer("stem", nn.Sequential(net.conv1, net.bn1, net.relu, net.maxpool))]
        for stage in ("layer1", "layer2", "layer3", "layer4"):
            blocks = net.get_submodule(stage)
            layers += [Layer(f"{stage}.{index}", block) for index, block in enumerate(blocks.children())]
        head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), net.fc)
        return Chain([*layers, Layer("head", head)], name=self.name)

    def profile_inputs(self, microbatch_size: int) -> dict[str, TensorSpec]:
        side = self.keys.get("side", 96)
        return {"x": TensorSpec((microbatch_size, 3, side, side))}

    def profile_targets(self, microbatch_size: int) -> tuple[Any, dict[str, float]]:
        return torch.ones(microbatch_size, dtype=torch.int64), {"count": float(microbatch_size)}


def transformer(config: Config) -> Tokens:
    """Return a plain transformer with explicit attention."""
    return Tokens(config)


def decoder(config: Config) -> DecoderOnly:
    """Return a decoder-only transformer whose blocks checkpoint themselves; meant for bfloat16."""
    return DecoderOnly(config)


def resnet(config: Config) -> ResNet:
    """Return a ResNet with trainable BatchNorm."""
    return ResNet(config)
