"""A COCO folder for RT-DETR: the pictures, boxes and augmentation of `detr_pipeline.data`, and denoising queries.

The workload opens it. It describes every minibatch from the annotation file alone, like `CocoSource`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from detr_pipeline.data import CocoSource, DataConfig, Split
from detr_pipeline.rt_detr.chain import DENOISING
from detr_pipeline.rt_detr.denoising import Groups, Noise
from varuna_capslog.model.chain import TensorSpec
from varuna_capslog.model.workload import Minibatch

__all__ = ["RtDetrSource", "denoising_specs"]

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

    Args:
        wanted: positive denoising queries of an image, about (`num_denoising`); 0: none.
        noise: None where the model does not denoise.
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
