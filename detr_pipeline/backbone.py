"""A torchvision ResNet as a list of units: stem, residual blocks, projection to the transformer's width.

`chain` arranges the units into layers. Weights never come from the network; `weights` reads them from a file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models import resnet
from torchvision.ops import FrozenBatchNorm2d

from varuna_capslog.model.chain import Layer

if TYPE_CHECKING:
    from detr_pipeline.config import ModelConfig

__all__ = ["Projection", "Stem", "backbone_units", "valid_cells"]

_NORM_LAYERS: Mapping[str, Callable[[int], nn.Module]] = {
    "frozen": FrozenBatchNorm2d,
    "batch": nn.BatchNorm2d,
    "group": partial(nn.GroupNorm, 32),
}


def valid_cells(sizes: Tensor, padded: tuple[int, int], cells: tuple[int, int]) -> Tensor:
    """Return the number of rows and columns of the feature map that belong to each image.

    DETR resizes the pixel mask to the map by nearest neighbour; images lie in the upper left corner, so counting the
    sampled rows and columns inside the image gives the same result.

    Args:
        sizes: [B, 2] int64, valid (h, w) of each image in pixels.
        padded: (H, W) of the padded images.
        cells: (h, w) of the feature map.

    Returns:
        [B, 2] int64.
    """
    counts = []
    for axis in (0, 1):
        pixels = torch.arange(padded[axis], dtype=torch.float32, device=sizes.device)
        sampled = F.interpolate(pixels[None, None], size=cells[axis], mode="nearest")[0]
        counts.append((sampled < sizes[:, axis, None]).sum(1))
    return torch.stack(counts, 1)


class Stem(nn.Module):
    """The network up to the first residual block, and the end of each image on the final feature map.

    Called with images [B, 3, H, W] and their valid sizes [B, 2]; returns features [B, C, ceil(H/4), ceil(W/4)] and the
    valid rows and columns [B, 2] of the map that the backbone will end with.
    """

    def __init__(self, network: resnet.ResNet, halvings: int) -> None:
        super().__init__()
        self.conv1, self.bn1, self.relu, self.maxpool = network.conv1, network.bn1, network.relu, network.maxpool
        self.block = network.layer1[0]
        self.halvings = halvings

    def forward(self, images: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
        padded = height, width = images.shape[-2], images.shape[-1]
        for _ in range(self.halvings):
            height, width = (height + 1) // 2, (width + 1) // 2  # every strided layer rounds up
        valid = valid_cells(sizes, padded, (height, width))
        return self.block(self.maxpool(self.relu(self.bn1(self.conv1(images))))), valid


class Projection(nn.Conv2d):
    """1x1 convolution to the transformer's width; [B, C, h, w] becomes memory [B, h, w, hidden].

    Memory has the weights' dtype also under autocast, so that the transformer sums its residuals in full precision.
    """

    def __init__(self, channels: int, hidden_dim: int) -> None:
        super().__init__(channels, hidden_dim, kernel_size=1)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).permute(0, 2, 3, 1).to(self.weight.dtype, memory_format=torch.contiguous_format)


def backbone_units(config: ModelConfig) -> list[Layer]:
    """Return `backbone.stem` (with the first block), the other blocks `backbone.<stage>.<index>`, and `projection`."""
    stages = ["layer1", "layer2", "layer3", "layer4"][: int(config.last_layer[-1])]
    dilated = [config.dilation and stage == config.last_layer for stage in ("layer2", "layer3", "layer4")]
    network: resnet.ResNet = getattr(resnet, config.backbone)(
        weights=None, norm_layer=_NORM_LAYERS[config.norm], replace_stride_with_dilation=dilated
    )
    if config.freeze == "stem+layer1":
        for part in (network.conv1, network.bn1, network.layer1):
            part.requires_grad_(False)
    # conv1 and the pooling halve once each, and so does every later stage that is not dilated.
    stem = Stem(network, halvings=len(stages) + 1 - config.dilation)
    units = [Layer("backbone.stem", stem, ("images", "sizes"), ("x", "valid"))]
    for stage in stages:
        for index, block in enumerate(getattr(network, stage)):
            if (stage, index) != ("layer1", 0):
                units.append(Layer(f"backbone.{stage}.{index}", block))
    channels = 2 ** (5 + len(stages)) * type(network.layer1[0]).expansion
    units.append(Layer("projection", Projection(channels, config.hidden_dim), ("x",), ("memory",)))
    return units
