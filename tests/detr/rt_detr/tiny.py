"""A small RT-DETR, its config, and batches for it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from detr_pipeline.rt_detr.chain import DENOISING
from detr_pipeline.rt_detr.task import Groups, Noise
from varuna_capslog.model.workload import HostTargets

CLASSES, QUERIES = 5, 10
BACKBONE: dict[str, Any] = {
    "embedding_size": 8,
    "hidden_sizes": [8, 12, 16, 24],
    "depths": [1, 2, 1, 1],
    "layer_type": "basic",
}
ARCHITECTURE: dict[str, Any] = {
    "encoder_in_channels": [12, 16, 24],
    "encoder_hidden_dim": 16,
    "d_model": 16,
    "decoder_in_channels": [16, 16, 16],
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "decoder_layers": 3,
    "num_queries": QUERIES,
    "num_denoising": 6,
    "freeze_backbone_batch_norms": False,
}
QUIET: dict[str, float] = {"label_noise_ratio": 0.0, "box_noise_scale": 1e-9}
"""Noise that changes nothing, so that transformers denoises the same boxes without drawing the same numbers."""
MODEL: dict[str, Any] = {"architecture": ARCHITECTURE, "backbone": BACKBONE, "num_classes": CLASSES}


def targets(counts: list[int], seed: int = 0) -> list[dict[str, Any]]:
    """Return the targets of one image for each of `counts`, with that many boxes."""
    generator = torch.Generator().manual_seed(seed)
    return [
        HostTargets(
            labels=torch.randint(0, CLASSES, (count,), generator=generator),
            boxes=0.2 + 0.3 * torch.rand(count, 4, generator=generator),
            image_id=image,
        )
        for image, count in enumerate(counts)
    ]


def inputs(
    of: list[dict[str, Any]], groups: Groups, noise: Noise, size: tuple[int, int] = (64, 96)
) -> dict[str, Tensor]:
    """Return the chain's inputs for images of these targets."""
    generator = torch.Generator().manual_seed(1 + len(of))
    queries = [noise.queries(groups, target, (3, image)) for image, target in enumerate(of)]
    labels, boxes = (torch.stack(rows) for rows in zip(*queries, strict=True))
    of_query = groups.of_query().expand(len(of), -1).contiguous()
    images = torch.randn(len(of), 3, *size, generator=generator)
    return {"images": images} | dict(zip(DENOISING, (labels, boxes, of_query), strict=True))
