"""COCO folder for RT-DETR: the pictures, boxes and augmentation of `detr_pipeline.data`, and denoising queries. It
describes every minibatch from the annotation file alone, like `CocoSource`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchvision.ops import box_convert

from detr_pipeline.data import CocoSource, DataConfig, Split
from detr_pipeline.rt_detr.chain import DENOISING
from varuna_capslog.model.chain import TensorSpec
from varuna_capslog.model.workload import Minibatch

__all__ = ["Groups", "Noise", "RtDetrSource", "denoising_specs"]


# -- Contrastive denoising (DINO, Zhang et al., ICLR 2023, Sec. 3.3): noised boxes as queries ahead of the model's
#    own.
#
# Each group holds every box of an image twice: a positive copy with little noise, whose target is the box, and a
# negative one with more noise, whose target is no object. The data source makes them as inputs of the chain, since it
# knows the boxes before the step; the noise of a sample depends on seed, epoch and sample alone. The model never sees
# targets.


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

        target: `labels` [n] and `boxes` [n, 4], with n at most `groups.most`. Equal seeds give equal queries.
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


# -- A COCO folder for RT-DETR


_STREAM = 1
"""Separates these random numbers from the augmentation's, which have the same seed, epoch and sample."""


@dataclass(frozen=True)
class _Recipe:
    pictures: list[Any]
    groups: Groups
    epoch: int


def denoising_specs(images: int, queries: int) -> dict[str, TensorSpec]:
    """Return specs of a microbatch with that many denoising queries in every image."""
    shape = (images, queries)
    labels, boxes, groups = TensorSpec(shape, torch.int64), TensorSpec((*shape, 4)), TensorSpec(shape, torch.int64)
    return dict(zip(DENOISING, (labels, boxes, groups), strict=True))


class RtDetrSource:
    """A split as a `DataSource`.

    Inputs of a microbatch of B images: `images` [B, 3, H, W] and, where the model denoises, with the D queries of the
    minibatch's `Groups` (none for validation): `dn_labels` [B, D], `dn_boxes` [B, D, 4], `dn_groups` [B, D]. Targets
    are those of `CocoSource`. Normalisers: `boxes`, their number in the minibatch, `groups` and `most` of `Groups`.

    wanted: positive denoising queries of an image, about (`num_denoising`); 0: none. noise: None without denoising.
    """

    def __init__(self, config: DataConfig, split: Split, seed: int, wanted: int, noise: Noise | None) -> None:
        self.pictures = CocoSource(config, split, seed, num_queries=1)
        self._noise, self._wanted, self._seed = noise, wanted if split == "train" else 0, seed

    def __len__(self) -> int:
        return len(self.pictures)

    def minibatch(self, groups: Sequence[Sequence[int]], epoch: int) -> Minibatch:
        """Describe a minibatch like `CocoSource.minibatch`, with denoising queries."""
        minibatch = self.pictures.minibatch(groups, epoch)
        counts = [len(target["labels"]) for group in minibatch.targets for target in group]
        laid = Groups.of(max(counts), self._wanted)
        inputs = []
        for specs in minibatch.inputs:
            images = specs["images"]
            more = {} if self._noise is None else denoising_specs(images.shape[0], laid.queries)
            inputs.append({"images": images} | more)
        normalisers = {"boxes": float(sum(counts)), "groups": float(laid.count), "most": float(laid.most)}
        recipes = [_Recipe(pairs, laid, epoch) for pairs in minibatch.recipes]
        return replace(minibatch, inputs=inputs, normalisers=normalisers, recipes=recipes)

    def load(self, minibatch: Minibatch, microbatch: int) -> dict[str, Tensor]:
        """Decode a microbatch like `CocoSource.load`, and make its denoising queries."""
        recipe: _Recipe = minibatch.recipes[microbatch]
        alone = Minibatch([minibatch.inputs[microbatch]], [None], recipes=[recipe.pictures])
        inputs = {"images": self.pictures.load(alone, 0)["images"]}
        if self._noise is None:
            return inputs
        noised = [
            self._noise.queries(recipe.groups, target, (self._seed, recipe.epoch, sample, _STREAM))
            for (sample, _), target in zip(recipe.pictures, minibatch.targets[microbatch], strict=True)
        ]
        labels, boxes = (torch.stack(rows) for rows in zip(*noised, strict=True))
        groups = recipe.groups.of_query().expand(len(noised), -1).contiguous()
        return inputs | dict(zip(DENOISING, (labels, boxes, groups), strict=True))
