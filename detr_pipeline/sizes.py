"""How large the padded images of training are: sampled from annotation sizes and the augmentation's arithmetic alone.

`task` hands these sizes to the profiler, which plans memory for the largest (`data.largest_padded_size`) and time for
what is usual. No picture is opened.
"""

from __future__ import annotations

import numpy as np

from detr_pipeline.data import DataConfig, Split, image_sizes
from detr_pipeline.transforms import plan, plan_validation

__all__ = ["sampled_padded_sizes"]

_NO_BOXES = np.zeros((0, 4))


def sampled_padded_sizes(
    config: DataConfig, split: Split, microbatch_size: int, minibatch_size: int, count: int, seed: int
) -> list[tuple[int, int]]:
    """The padded (H, W) of a microbatch of each of `count` random minibatches.

    A minibatch holds different images (fewer than `minibatch_size` where the split is smaller), and image i of
    minibatch k is augmented as training with this seed does in epoch k.
    """
    heights, widths = image_sizes(config, split)
    together = minibatch_size if config.pad == "minibatch" else microbatch_size
    rng = np.random.default_rng(seed)
    found = []
    for number in range(count):
        samples = rng.choice(len(heights), min(together, len(heights)), replace=False)
        sizes = [
            _size(config, split, int(widths[sample]), int(heights[sample]), (seed, number, int(sample)))
            for sample in samples
        ]
        found.append((max(h for h, _ in sizes), max(w for _, w in sizes)))
    return found


def _size(config: DataConfig, split: Split, width: int, height: int, key: tuple[int, int, int]) -> tuple[int, int]:
    if split == "val":
        return plan_validation(width, height, _NO_BOXES, config.augment).size
    # boxes draw no random numbers, so that leaving them out changes no size
    return plan(np.random.default_rng(key), width, height, _NO_BOXES, config.augment).size
