"""DETR's set loss of a microbatch, as the microbatch's share of the minibatch's loss, and the costs of the matching.

Every sum is divided by a normaliser of the minibatch that is known before the forward, so the shares of any split into
microbatches add up to the same loss. The loss is computed in float32 or better, outside autocast.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F
from torchvision.ops import box_convert

from varuna_capslog.base.errors import CapslogError, StepRefused

if TYPE_CHECKING:
    from detr_pipeline.config import ModelConfig

__all__ = ["Match", "assign", "check_labels", "generalised_iou", "ious", "match", "positions", "set_loss"]


# -- Matching of queries to boxes: the assignment of least cost per image and decoder layer, and the overlap of
#    boxes.
#
# The set losses of DETR and RT-DETR call `assign` on the rank of the last layer, with their own costs. The costs of all
# decoder layers are copied to the host at once, where scipy assigns.


Match = tuple[tuple[int, ...], tuple[int, ...]]
"""Numbers of the matched queries, ascending, and of the box that each query got."""


def check_labels(targets: Sequence[Mapping[str, Any]], num_classes: int) -> None:
    """Raise CapslogError for a label for which the model has no output."""
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
    """Return the matches of every decoder layer (outer list) and image (inner list). An image with n boxes gives
    min(n, Q) pairs; an image without boxes, two empty tuples. Equal costs give equal matches.

    Args:
        logits, boxes: [K, B, Q, ...], the predictions; they must be finite.
        targets: per image `labels` [n] and `boxes` [n, 4], on the CPU.
        cost: returns [K, Q, n] from an image's number, its labels [n] and its boxes [n, 4] on the device. Called
            without gradients, and not at all on fake tensors.

    Raises:
        StepRefused: a prediction is not finite; the message names output, decoder layer and image.
    """
    counts = [len(target["labels"]) for target in targets]
    num_layers, _, num_queries, _ = logits.shape
    if isinstance(logits, FakeTensor):
        # fake tensors have no costs, and a profile is the same for every matching
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
    """Return layer, image and query of every match [3][K * m]; its label [K * m]; its box [K * m, 4]; on the host."""
    rows, labels, wanted = [], [], []
    for layer, images in enumerate(matches):
        for image, (chosen, box_numbers) in enumerate(images):
            rows += [(layer, image, query) for query in chosen]
            labels.append(targets[image]["labels"][list(box_numbers)])
            wanted.append(targets[image]["boxes"][list(box_numbers)])
    where = torch.tensor(rows, dtype=torch.int64).reshape(-1, 3).unbind(1)
    return where, torch.cat(labels), torch.cat(wanted)


def _refuse_unsound(sound: Tensor, targets: Sequence[Mapping[str, Any]]) -> None:
    """Raise StepRefused where `sound` [2, K, B] is 0: logits (first) or boxes (second) are not all finite."""
    if bool(sound.all()):
        return
    output, layer, image = (sound == 0).nonzero()[0].tolist()
    name = targets[image].get("image_id", image)
    raise StepRefused(
        f"the predicted {('logits', 'boxes')[output]} of decoder layer {layer} for image {name} are not finite: the "
        "run has diverged; lower train.lr, or resume from an earlier checkpoint"
    )


# -- DETR's set loss of a microbatch


def set_loss(
    outputs: Mapping[str, Tensor],
    targets: Sequence[Mapping[str, Any]],
    normalisers: Mapping[str, float],
    config: ModelConfig,
    matches: Sequence[Sequence[Match]] | None = None,
) -> dict[str, Tensor]:
    """Return scalar parts of the loss; `loss` is their weighted sum over all decoder layers.

    With N usable boxes in the minibatch, the sum of cross entropies is divided by N + w * (queries - N), where w is the
    weight of no-object (the mean of `F.cross_entropy(weight=...)`), and the sums of L1 and 1 - GIoU of matched boxes by
    max(N, 1).

    Args:
        outputs: `logits` [K, B, Q, C + 1] (no-object last) and `boxes` [K, B, Q, 4].
        targets: per image `labels` [n] and `boxes` [n, 4] (cx, cy, w, h in 0..1), on the CPU.
        normalisers: those of the whole minibatch: `boxes`, the sum over images of min(boxes, Q); `queries`, images * Q.
        matches: result of `match`; None: call it.

    Returns:
        `loss`; the weighted `loss_class`, `loss_boxes`, `loss_giou` of the last decoder layer, and with `_0`, `_1`, ...
        those of earlier layers; and, not part of the loss, `class_error` (percent of matched queries with a wrong
        class) and `cardinality_error` (mean difference between the numbers of predicted and true objects per image).

    Raises:
        CapslogError: a label for which the model has no output.
        StepRefused: a prediction is not finite.
    """
    logits, boxes = outputs["logits"], outputs["boxes"]
    with torch.autocast(logits.device.type, enabled=False):
        dtype = torch.promote_types(logits.dtype, torch.float32)
        check_labels(targets, logits.shape[-1] - 1)
        if matches is None:
            matches = match(logits, boxes, targets, config)
        return _parts(logits.to(dtype), boxes.to(dtype), targets, normalisers, config, matches)


def _parts(
    logits: Tensor,
    boxes: Tensor,
    targets: Sequence[Mapping[str, Any]],
    normalisers: Mapping[str, float],
    config: ModelConfig,
    matches: Sequence[Sequence[Match]],
) -> dict[str, Tensor]:
    num_layers, _, num_queries, num_outputs = logits.shape
    usable, queries = normalisers["boxes"], normalisers["queries"]
    classes, where, wanted = _assignments(logits, targets, matches)
    weight = logits.new_ones(num_outputs)
    weight[-1] = config.no_object
    entropy = F.cross_entropy(logits.flatten(0, 2), classes.flatten(), weight, reduction="none")
    # Every decoder layer has the same number of matched boxes, so [K * m] splits into [K, m].
    predicted_boxes = boxes[where]
    distance = (predicted_boxes - wanted).abs().sum(-1)
    overlap = generalised_iou(box_convert(predicted_boxes, "cxcywh", "xyxy"), box_convert(wanted, "cxcywh", "xyxy"))
    box_scale = 1 / max(usable, 1.0)
    sums = {
        "loss_class": entropy.view(num_layers, -1).sum(1)
        * (config.loss_class / (usable + config.no_object * (queries - usable))),
        "loss_boxes": distance.view(num_layers, -1).sum(1) * (config.loss_boxes * box_scale),
        "loss_giou": (1 - overlap).view(num_layers, -1).sum(1) * (config.loss_giou * box_scale),
    }
    parts = {"loss": torch.stack(list(sums.values())).sum()}
    parts |= {name: value[-1] for name, value in sums.items()}
    for layer in range(num_layers - 1):
        parts |= {f"{name}_{layer}": value[layer] for name, value in sums.items()}
    with torch.no_grad():
        predicted, true = logits[-1].argmax(-1), classes[-1]
        wrong = ((predicted != true) & (true != num_outputs - 1)).sum()
        counts = torch.tensor([len(target["labels"]) for target in targets], device=logits.device)
        miscounted = ((predicted != num_outputs - 1).sum(1) - counts).abs().sum()
        parts["class_error"] = wrong.to(logits.dtype) * (100 * box_scale)
        parts["cardinality_error"] = miscounted.to(logits.dtype) * (num_queries / queries)
    return parts


def _assignments(
    logits: Tensor, targets: Sequence[Mapping[str, Any]], matches: Sequence[Sequence[Match]]
) -> tuple[Tensor, tuple[Tensor, ...], Tensor]:
    """Return every query's class [K, B, Q] and every match's place [3][K * m] (layer, image, query) and box [K * m, 4].
    The tensors are made on the host and copied to the device once.
    """
    where, labels, wanted = positions(targets, matches)
    classes = torch.full(logits.shape[:-1], logits.shape[-1] - 1, dtype=torch.int64)
    classes[where] = labels
    device = logits.device
    return classes.to(device), tuple(index.to(device) for index in where), wanted.to(device, logits.dtype)


def match(
    logits: Tensor, boxes: Tensor, targets: Sequence[Mapping[str, Any]], config: ModelConfig
) -> list[list[Match]]:
    """Return the matches of every decoder layer and image, from `assign` with DETR's costs. Raises as `assign`.

    Args:
        logits: [K, B, Q, C + 1]. boxes: [K, B, Q, 4] as (cx, cy, w, h) in 0..1.
        targets: per image `labels` [n] and `boxes` [n, 4], on the CPU.
    """
    dtype = torch.promote_types(logits.dtype, torch.float32)

    @functools.cache
    def prepared() -> tuple[Tensor, Tensor]:
        return logits.to(dtype).softmax(-1), boxes.to(dtype)

    def cost(image: int, labels: Tensor, wanted: Tensor) -> Tensor:
        probabilities, predicted = prepared()
        # the class cost is 1 - the probability; the constant 1 changes no matching
        distance = (predicted[:, image, :, None] - wanted).abs().sum(-1)
        overlap = generalised_iou(
            box_convert(predicted[:, image, :, None], "cxcywh", "xyxy"), box_convert(wanted, "cxcywh", "xyxy")
        )
        return (
            config.cost_boxes * distance
            - config.cost_class * probabilities[:, image][..., labels]
            - config.cost_giou * overlap
        )

    return assign(logits, boxes, targets, cost)
