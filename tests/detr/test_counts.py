from __future__ import annotations

from typing import Any

import pytest
import torch

from detr_pipeline.chain import build_chain
from detr_pipeline.config import ModelConfig


@pytest.mark.parametrize(
    ("changes", "total"),
    [
        ({"backbone": "resnet50"}, 41_524_768),
        ({"backbone": "resnet101"}, 60_464_672),
        ({"backbone": "resnet101", "encoder_layers": 12}, 68_355_104),
    ],
)
@pytest.mark.parametrize("more", [{}, {"dilation": True}, {"heads": "every_decoder"}, {"cut_points": "paper"}])
def test_parameters_with_92_class_outputs(changes: dict[str, Any], more: dict[str, Any], total: int) -> None:
    """41M, 60M and 68M in CAPSlog's table; exact numbers counted on the published code's model."""
    with torch.device("meta"):
        chain = build_chain(ModelConfig(**changes, **more), 91)
    assert chain.num_parameters() == total


def test_parameters_of_the_parts() -> None:
    with torch.device("meta"):
        chain = build_chain(ModelConfig(), 91)
    assert chain.num_parameters(trainable_only=True) == 41_302_368
    counts: dict[str, int] = {}
    for address, parameter in chain.named_parameters().items():
        part = "backbone" if "backbone" in address else address
        for name in ("projection", "query_embed", "class_embed", "bbox_embed", "norm.", "encoder", "decoder"):
            if part == address and (f".{name}" in address or address.startswith(name)):
                part = name
        counts[part] = counts.get(part, 0) + parameter.numel()
    assert counts == {
        "backbone": 23_454_912,
        "projection": 524_544,
        "encoder": 7_890_432,
        "query_embed": 25_600,
        "decoder": 9_473_024 - 512,
        "norm.": 512,
        "class_embed": 23_644,
        "bbox_embed": 132_612,
    }
