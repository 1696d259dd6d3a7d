"""Matching of queries to boxes: the assignment of least cost per image and decoder layer, and the overlap of boxes.

The set losses of DETR and RT-DETR call this on the rank of the last layer. Costs are copied to the host at once for all
decoder layers, where scipy assigns; the callers define the costs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from varuna_capslog.base.errors import CapslogError, StepRefused

__all__ = ["Match", "assign", "check_labels", "generalised_iou", "ious", "positions"]

Match = tuple[tuple[int, ...], tuple[int, ...]]
"""Queries, ascending, and the box that each of them got."""


def check_labels(targets: Sequence[Mapping[str, Any]], num_classes: int) -> None:
    """Raise CapslogError for a label that the model has no output for."""
    for target in targets:
        largest = max(target["labels"].tolist(), default=-1)
        if largest >= num_classes:
            raise CapslogError(
                f"image {target.get('image_id', '?')} has a box of class {largest}, but the model tells {num_classes} "
                f"classes apart (0..{num_classes - 1}); set model.num_classes to null or to at least {largest + 1}"
            )


def ious(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return IoU and generalised IoU (Rezatofighi et al., CVPR 2019), each [...], of corner boxes [..., 4] that
    broadcast.

    The generalised IoU is in -1..1: IoU minus the part of the enclosing box that the union leaves empty. There is no
    epsilon, as in DETR: two boxes of no area give NaN, but every target has an area.
    """
    area_a = (a[..., 2] - a[..., 0]) * (a[..., 3] - a[..., 1])
    area_b = (b[..., 2] - b[..., 0]) * (b[..., 3] - b[..., 1])
    overlap = (torch.minimum(a[..., 2:], b[..., 2:]) - torch.maximum(a[..., :2], b[..., :2])).clamp(min=0).prod(-1)
    union = area_a + area_b - overlap
    hull = (torch.maximum(a[..., 2:], b[..., 2:]) - torch.minimum(a[..., :2], b[..., :2])).clamp(min=0).prod(-1)
    iou = overlap / union
    return iou, iou - (hull - union) / hull


def generalised_iou(a: Tensor, b: Tensor) -> Tensor:
    """Return the second result of `ious`."""
    return ious(a, b)[1]


@torch.no_grad()
def assign(
    logits: Tensor,
    boxes: Tensor,
    targets: Sequence[Mapping[str, Any]],
    cost: Callable[[int, Tensor, Tensor], Tensor],
) -> list[list[Match]]:
    """Return the matches of every decoder layer (outer list) and image (inner list).

    An image with n boxes gives min(n, Q) pairs; with none, two empty tuples. Equal costs give equal matches.

    Args:
        logits, boxes: [K, B, Q, ...], the predictions; they must be finite.
        targets: per image `labels` [n] and `boxes` [n, 4], on the CPU.
        cost: gives [K, Q, n] from an image's number, its labels [n] and its boxes [n, 4] on the device. Called without
            gradients, and not at all where a profiler computes with shapes only.

    Raises:
        StepRefused: a prediction is not finite; the message names output, decoder layer and image.
    """
    counts = [len(target["labels"]) for target in targets]
    num_layers, _, num_queries, _ = logits.shape
    if isinstance(logits, FakeTensor):
        # A profiler that computes with shapes only: every matching costs the same.
        some = [tuple(range(min(count, num_queries))) for count in counts]
        return [[(pairs, pairs) for pairs in some] for _ in range(num_layers)]
    dtype = torch.promote_types(logits.dtype, torch.float32)
    costs = [
        cost(image, target["labels"].to(logits.device), target["boxes"].to(logits.device, dtype))
        for image, target in enumerate(targets)
    ]
    sound = torch.stack([logits.isfinite().flatten(2).all(-1), boxes.isfinite().flatten(2).all(-1)])
    flat = torch.cat([sound.flatten().to(dtype), *(cost.flatten() for cost in costs)]).cpu()
    _refuse_unsound(flat[: sound.numel()].view(sound.shape), targets)
    tables = flat[sound.numel() :].split([num_layers * num_queries * count for count in counts])
    blocks = [table.view(num_layers, num_queries, -1).numpy() for table in tables]
    pairs = [[linear_sum_assignment(block[layer]) for block in blocks] for layer in range(num_layers)]
    return [
        [(tuple(queries.tolist()), tuple(box_numbers.tolist())) for queries, box_numbers in images] for images in pairs
    ]


def positions(
    targets: Sequence[Mapping[str, Any]], matches: Sequence[Sequence[Match]]
) -> tuple[tuple[Tensor, ...], Tensor, Tensor]:
    """Return layer, image and query of every match [3][K * m]; its label [K * m]; its box [K * m, 4]; all built on the
    host.
    """
    rows, labels, wanted = [], [], []
    for layer, images in enumerate(matches):
        for image, (chosen, box_numbers) in enumerate(images):
            rows += [(layer, image, query) for query in chosen]
            labels.append(targets[image]["labels"][list(box_numbers)])
            wanted.append(targets[image]["boxes"][list(box_numbers)])
    where = torch.tensor(rows, dtype=torch.int64).reshape(-1, 3).unbind(1)
    return where, torch.cat(labels), torch.cat(wanted)


def _refuse_unsound(sound: Tensor, targets: Sequence[Mapping[str, Any]]) -> None:
    """Args: sound [2, K, B], 0 where logits (first) or boxes (second) hold a value that is not finite."""
    if bool(sound.all()):
        return
    output, layer, image = (sound == 0).nonzero()[0].tolist()
    name = targets[image].get("image_id", image)
    raise StepRefused(
        f"the predicted {('logits', 'boxes')[output]} of decoder layer {layer} for image {name} are not finite: the "
        "run has diverged; lower train.lr, or resume from an earlier checkpoint"
    )
