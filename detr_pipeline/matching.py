"""Which prediction answers for which box: the assignment of least cost, per image and decoder layer (scipy).

`loss` calls this room; its result is data that tests may keep and pass in again. Costs are float32 or better, never
under autocast, and come to the host in one copy for all decoder layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from varuna_capslog.base.errors import StepRefused

if TYPE_CHECKING:
    from detr_pipeline.config import ModelConfig

__all__ = ["Match", "corners", "generalised_iou", "match"]

Match = tuple[tuple[int, ...], tuple[int, ...]]
"""Queries, ascending, and the box that each of them got."""


def corners(boxes: Tensor) -> Tensor:
    """(cx, cy, w, h) to (x1, y1, x2, y2), in the last dimension."""
    centre, size = boxes[..., :2], boxes[..., 2:]
    return torch.cat((centre - size / 2, centre + size / 2), dim=-1)


def generalised_iou(a: Tensor, b: Tensor) -> Tensor:
    """Generalised IoU (Rezatofighi et al., CVPR 2019) of corner boxes [..., 4] that broadcast; [...] in -1..1.

    IoU minus the part of the enclosing box that the union leaves empty. Without an epsilon, as DETR has it: two boxes
    of no area give NaN, but no target has none.
    """
    area_a = (a[..., 2] - a[..., 0]) * (a[..., 3] - a[..., 1])
    area_b = (b[..., 2] - b[..., 0]) * (b[..., 3] - b[..., 1])
    overlap = (torch.minimum(a[..., 2:], b[..., 2:]) - torch.maximum(a[..., :2], b[..., :2])).clamp(min=0).prod(-1)
    union = area_a + area_b - overlap
    hull = (torch.maximum(a[..., 2:], b[..., 2:]) - torch.minimum(a[..., :2], b[..., :2])).clamp(min=0).prod(-1)
    return overlap / union - (hull - union) / hull


@torch.no_grad()
def match(
    logits: Tensor, boxes: Tensor, targets: Sequence[Mapping[str, Any]], config: ModelConfig
) -> list[list[Match]]:
    """Matches of every decoder layer (outer list) and image (inner list).

    An image with n boxes gives min(n, Q) pairs; with none, two empty tuples. Equal costs give equal matches.

    Args:
        logits: [K, B, Q, C + 1].
        boxes: [K, B, Q, 4] as (cx, cy, w, h) in 0..1.
        targets: per image `labels` [n] and `boxes` [n, 4], on the CPU.

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
    probabilities, predicted = logits.to(dtype).softmax(-1), boxes.to(dtype)
    costs = []
    for image, target in enumerate(targets):
        labels = target["labels"].to(logits.device)
        wanted = target["boxes"].to(logits.device, dtype)
        # Costs of [K, Q, n] pairs; the class cost leaves out the constant 1 - ..., which changes no matching.
        distance = (predicted[:, image, :, None] - wanted).abs().sum(-1)
        overlap = generalised_iou(corners(predicted[:, image, :, None]), corners(wanted))
        costs.append(
            config.cost_boxes * distance
            - config.cost_class * probabilities[:, image][..., labels]
            - config.cost_giou * overlap
        )
    sound = torch.stack([logits.isfinite().flatten(2).all(-1), boxes.isfinite().flatten(2).all(-1)])
    flat = torch.cat([sound.flatten().to(dtype), *(cost.flatten() for cost in costs)]).cpu()
    _refuse_unsound(flat[: sound.numel()].view(sound.shape), targets)
    tables = flat[sound.numel() :].split([num_layers * num_queries * count for count in counts])
    blocks = [table.view(num_layers, num_queries, -1).numpy() for table in tables]
    return [[_assign(block[layer]) for block in blocks] for layer in range(num_layers)]


def _assign(cost: Any) -> Match:
    queries, found = linear_sum_assignment(cost)
    return tuple(queries.tolist()), tuple(found.tolist())


def _refuse_unsound(sound: Tensor, targets: Sequence[Mapping[str, Any]]) -> None:
    """Args: sound [2, K, B], 0 where logits (first) or boxes (second) hold a value that is not finite."""
    if bool(sound.all()):
        return
    what, layer, image = (sound == 0).nonzero()[0].tolist()
    name = targets[image].get("image_id", image)
    raise StepRefused(
        f"the predicted {('logits', 'boxes')[what]} of decoder layer {layer} for image {name} are not finite: the "
        "run has diverged; lower train.lr, or resume from an earlier checkpoint"
    )
