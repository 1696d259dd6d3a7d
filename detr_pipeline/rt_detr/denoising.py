"""Contrastive denoising (DINO, Zhang et al., ICLR 2023, Sec. 3.3): noised boxes as queries ahead of the model's own.

Each group holds every box of an image twice: a positive copy with little noise, whose target is the box, and a negative
one with more noise, whose target is no object. The data source makes them as inputs of the chain, since it knows the
boxes before the step; the noise of a sample depends on seed, epoch and sample alone. The model never sees targets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchvision.ops import box_convert

__all__ = ["Groups", "Noise"]

_SIGMOID_MARGIN = 1e-5


@dataclass(frozen=True)
class Groups:
    """Layout of the denoising queries of every image of a minibatch.

    count: groups. most: boxes of the image with the most; images with fewer have empty places, whose target is no
    object. In each group positive copies come first.
    """

    count: int
    most: int

    @staticmethod
    def of(most: int, wanted: int) -> Groups:
        """Return as many groups as fit into `wanted` positive queries, at least one; none where there is no box."""
        return Groups(max(1, wanted // most) if most and wanted else 0, most)

    @property
    def queries(self) -> int:
        """Number of denoising queries of an image."""
        return 2 * self.most * self.count

    def of_query(self) -> Tensor:
        """Return [D] int64, the group of each query."""
        return torch.arange(self.count).repeat_interleave(2 * self.most)

    def positive(self, boxes: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the positive queries of an image with that many boxes, and the target box of each."""
        queries = tuple(2 * self.most * group + box for group in range(self.count) for box in range(boxes))
        return queries, tuple(range(boxes)) * self.count


@dataclass(frozen=True)
class Noise:
    """Noise of labels and boxes: transformers' `num_labels`, `label_noise_ratio` and `box_noise_scale`.

    A box's corners move by at most half its size times `box_scale`, those of negative copies by half to all of it; half
    of `label_ratio` of the labels are drawn again.
    """

    classes: int
    label_ratio: float
    box_scale: float

    def queries(self, groups: Groups, target: Mapping[str, Any], seed: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return labels [D] int64 (empty places: `classes`) and boxes [D, 4] before the sigmoid, float32, of an image.

        Args:
            target: `labels` [n] and `boxes` [n, 4], with n at most `groups.most`.
            seed: of the noise; equal seeds give equal queries.
        """
        count = len(target["labels"])
        labels = torch.full((groups.most,), self.classes, dtype=torch.int64)
        boxes = torch.zeros(groups.most, 4)
        labels[:count], boxes[:count] = target["labels"], target["boxes"]
        labels, boxes = labels.repeat(2 * groups.count), boxes.repeat(2 * groups.count, 1)
        rng = np.random.default_rng(list(seed))
        anew = torch.from_numpy(rng.random(groups.queries) < self.label_ratio * 0.5) & (labels < self.classes)
        labels = torch.where(anew, torch.from_numpy(rng.integers(0, self.classes, groups.queries)), labels)
        step = torch.from_numpy(rng.random((groups.queries, 4), dtype=np.float32))
        negative = torch.arange(groups.queries) // max(groups.most, 1) % 2 == 1
        step = step + negative[:, None]
        sign = torch.from_numpy(rng.integers(0, 2, (groups.queries, 4))) * 2.0 - 1.0
        reach = (boxes[:, 2:] * 0.5).repeat(1, 2) * self.box_scale
        corners = (box_convert(boxes, "cxcywh", "xyxy") + step * sign * reach).clamp(0, 1)
        noised = box_convert(corners, "xyxy", "cxcywh").clamp(0, 1)
        return labels, torch.log(noised.clamp(min=_SIGMOID_MARGIN) / (1 - noised).clamp(min=_SIGMOID_MARGIN))
