"""Which cells of a padded feature map belong to the image, and where each of them is.

Every transformer layer rebuilds padding mask and position encoding from two integers per image and the map's shape, so
that neither ever crosses a cut. Nothing here looks at a tensor's values on the host.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["padding_mask", "sine_positions", "valid_cells"]

_TEMPERATURE = 10_000
_EPSILON = 1e-6


def valid_cells(sizes: Tensor, padded: tuple[int, int], cells: tuple[int, int]) -> Tensor:
    """How many rows and columns of the feature map belong to each image.

    DETR resizes the pixel mask to the map by nearest neighbour; images lie in the upper left corner, so counting the
    sampled rows and columns inside the image says the same.

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


def padding_mask(valid: Tensor, height: int, width: int) -> Tensor:
    """[B, height * width] bool, True where a cell is padding.

    The upper left cell is never padding: attention over nothing would be NaN where a profiler sends zeros for `valid`.
    """
    rows, columns = valid.clamp(min=1).unbind(1)
    outside_rows = torch.arange(height, device=valid.device) >= rows[:, None]
    outside_columns = torch.arange(width, device=valid.device) >= columns[:, None]
    return (outside_rows[:, :, None] | outside_columns[:, None, :]).flatten(1)


def sine_positions(valid: Tensor, height: int, width: int, channels: int) -> Tensor:
    """[B, height, width, channels] float32: sines and cosines of the row in the first half, of the column in the
    second.

    Coordinates count from 1 and are scaled to 2 pi at the image's own last row or column, whatever the padding.
    Padding cells get the code of their clamped row and column (DETR: of 0); no valid cell reads theirs.
    """
    rows, columns = valid.clamp(min=1).unbind(1)
    parts = (
        _codes(rows, height, channels // 2)[:, :, None].expand(-1, -1, width, -1),
        _codes(columns, width, channels // 2)[:, None].expand(-1, height, -1, -1),
    )
    return torch.cat(parts, dim=-1)


def _codes(counts: Tensor, length: int, channels: int) -> Tensor:
    """[B, length, channels]: sine on even channels, cosine on odd ones, wavelengths from 2 pi to 10000 * 2 pi."""
    steps = torch.arange(1, length + 1, device=counts.device)
    angles = torch.minimum(steps, counts[:, None]).float() / (counts[:, None] + _EPSILON) * (2 * math.pi)
    exponents = torch.arange(0, channels, 2, dtype=torch.float32, device=counts.device) / channels
    scaled = angles[:, :, None] / _TEMPERATURE**exponents
    return torch.stack((scaled.sin(), scaled.cos()), dim=-1).flatten(2)
