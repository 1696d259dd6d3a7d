"""Twelve small models of common kinds: each function returns the module and an example of its inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torchvision import models

__all__ = ["MODELS"]

Example = tuple[nn.Module, Mapping[str, Tensor]]


class Language(nn.Module):
    """A decoder-only transformer: embedding, blocks, head."""

    def __init__(self, blocks: int, width: int, heads: int, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
            for _ in range(blocks)
        )
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embedding(x)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def _images(build: Callable[..., nn.Module], batch: int, side: int, **settings: object) -> Example:
    return build(weights=None, num_classes=10, **settings), {"x": torch.zeros(batch, 3, side, side)}


def resnet18() -> Example:
    return _images(models.resnet18, 8, 128)


def resnext50() -> Example:
    return _images(models.resnext50_32x4d, 4, 128)


def vgg11() -> Example:
    return _images(models.vgg11_bn, 4, 128)


def mobilenet() -> Example:
    return _images(models.mobilenet_v3_small, 8, 128)


def efficientnet() -> Example:
    return _images(models.efficientnet_b0, 4, 128)


def squeezenet() -> Example:
    return _images(models.squeezenet1_1, 8, 128)


def regnet() -> Example:
    return _images(models.regnet_y_400mf, 8, 128)


def convnext() -> Example:
    return _images(models.convnext_tiny, 4, 128)


def vit() -> Example:
    module = models.VisionTransformer(64, 8, 4, 4, 192, 768, num_classes=10)
    return module, {"x": torch.zeros(8, 3, 64, 64)}


def mlp() -> Example:
    layers = [part for _ in range(6) for part in (nn.Linear(1024, 1024), nn.GELU(), nn.LayerNorm(1024))]
    return nn.Sequential(*layers, nn.Linear(1024, 10)), {"x": torch.zeros(64, 1024)}


def language() -> Example:
    return Language(4, 256, 4, 4096), {"x": torch.zeros(4, 128, dtype=torch.long)}


def long_language() -> Example:
    return Language(2, 192, 3, 512), {"x": torch.zeros(2, 512, dtype=torch.long)}


MODELS = (
    resnet18, resnext50, vgg11, mobilenet, efficientnet, squeezenet,
    regnet, convnext, vit, mlp, language, long_language,
)  # fmt: skip
