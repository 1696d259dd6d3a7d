"""Small DETRs and inputs for the tests of the model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torchvision.ops import FrozenBatchNorm2d

from detr_pipeline.chain import build_chain
from detr_pipeline.config import ModelConfig
from varuna_capslog.model.chain import Chain

CLASSES = 5


def tiny_config(**changes: Any) -> ModelConfig:
    values: dict[str, Any] = {
        "backbone": "resnet18",
        "last_layer": "layer3",
        "norm": "group",
        "freeze": "none",
        "hidden_dim": 32,
        "attention_heads": 4,
        "feedforward": 48,
        "encoder_layers": 2,
        "decoder_layers": 3,
        "queries": 7,
        "dropout": 0.0,
    }
    return ModelConfig(**(values | changes))


def tiny_chain(seed: int = 0, **changes: Any) -> Chain:
    torch.manual_seed(seed)
    return build_chain(tiny_config(**changes), CLASSES)


def two_sizes(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Return two images of different size, padded with zeros to 75 x 101."""
    torch.manual_seed(1)
    images = torch.zeros(2, 3, 75, 101, dtype=dtype)
    sizes = torch.tensor([[75, 60], [48, 101]])
    for image, (height, width) in zip(images, sizes.tolist(), strict=True):
        image[:, :height, :width] = torch.randn(3, height, width, dtype=dtype)
    return {"images": images, "sizes": sizes}


def targets_of(counts: list[int], seed: int = 2) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        {
            "labels": torch.randint(CLASSES, (count,), generator=generator),
            "boxes": torch.rand(count, 4, generator=generator) * 0.4 + 0.2,
            "image_id": 100 + image,
        }
        for image, count in enumerate(counts)
    ]


def normalisers_of(targets: list[dict[str, Any]], queries: int) -> dict[str, float]:
    usable = sum(min(len(target["labels"]), queries) for target in targets)
    return {"boxes": float(usable), "queries": float(queries * len(targets))}


def outputs_of(
    batch: int, queries: int = 7, layers: int = 3, seed: int = 3, dtype: Any = torch.float32
) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "logits": torch.randn(layers, batch, queries, CLASSES + 1, generator=generator).to(dtype).requires_grad_(),
        "boxes": torch.randn(layers, batch, queries, 4, generator=generator).to(dtype).sigmoid().requires_grad_(),
    }


def shake_frozen_norms(chain: Chain) -> None:
    """Set FrozenBatchNorm's statistics so that it is no identity; small, so that the output of 16 blocks stays
    bounded.
    """
    for layer in chain.layers:
        for module in layer.module.modules():
            if isinstance(module, FrozenBatchNorm2d):
                module.weight.uniform_(0.3, 0.7)
                module.bias.uniform_(-0.2, 0.2)
                module.running_mean.uniform_(-0.2, 0.2)
                module.running_var.uniform_(0.5, 1.5)


def reference_mask(sizes: torch.Tensor, padded: tuple[int, int], cells: tuple[int, int]) -> torch.Tensor:
    """Return DETR's pixel mask, True where padded, resized by nearest neighbour."""
    mask = torch.ones(len(sizes), *padded, dtype=torch.bool)
    for image, (height, width) in zip(mask, sizes.tolist(), strict=True):
        image[:height, :width] = False
    return F.interpolate(mask[None].float(), size=cells).to(torch.bool)[0]
