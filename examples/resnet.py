"""A torchvision ResNet, planned without touching its code:

capslog plan --model examples.resnet:resnet50 --input "x=float32[4,3,224,224]" --devices 4
"""

from __future__ import annotations

import torchvision
from torch import nn

__all__ = ["resnet18", "resnet50"]


def resnet18() -> nn.Module:
    """For small images, such as --input "x=float32[4,3,64,64]"."""
    return torchvision.models.resnet18(num_classes=10)


def resnet50() -> nn.Module:
    """ResNet-50 as published, with random weights."""
    return torchvision.models.resnet50()
