"""The backbone: the size of the feature map, and its cells that belong to the image."""

from __future__ import annotations

import math

import pytest
import torch

from tests.detr.tiny import reference_mask, tiny_chain, two_sizes


@pytest.mark.parametrize("side", [1, 17, 32, 75])
@pytest.mark.parametrize(
    ("changes", "stride"),
    [
        ({}, 16),
        ({"last_layer": "layer4"}, 32),
        ({"backbone": "resnet50", "last_layer": "layer4", "dilation": True}, 16),
        ({"backbone": "resnet50", "last_layer": "layer3", "dilation": True}, 8),
    ],
)
def test_feature_map_is_the_input_over_the_stride_rounded_up(side: int, changes: dict, stride: int) -> None:
    with torch.device("meta"):
        chain = tiny_chain(**changes)
        values = {"images": torch.empty(1, 3, side, 101), "sizes": torch.ones(1, 2, dtype=torch.int64)}
        for layer in chain.layers:
            values.update(layer(values))
            if "memory" in layer.writes:
                break
    assert values["memory"].shape == (1, math.ceil(side / stride), math.ceil(101 / stride), 32)


@pytest.mark.parametrize("changes", [{}, {"backbone": "resnet50", "last_layer": "layer4", "dilation": True}])
def test_stem_counts_valid_cells_of_the_final_map(changes: dict) -> None:
    chain = tiny_chain(**changes, norm="frozen")
    inputs = two_sizes()
    _, valid = chain.layers[0].module(inputs["images"], inputs["sizes"])
    rows, columns = math.ceil(75 / 16), math.ceil(101 / 16)
    assert valid.tolist() == reference_valid(inputs["sizes"], (75, 101), (rows, columns))


def reference_valid(sizes: torch.Tensor, padded: tuple[int, int], cells: tuple[int, int]) -> list[list[int]]:
    mask = ~reference_mask(sizes, padded, cells)
    return [[int(image[:, 0].sum()), int(image[0].sum())] for image in mask]
