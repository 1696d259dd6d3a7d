"""DETR's set loss of a microbatch, as its share of the whole minibatch's loss, and the costs of its matching.

Every sum is divided by a normaliser of the minibatch that is known before the forward, so the shares of any split into
microbatches add up to the same loss. The workload calls this on the rank of the last layer; it computes in float32 or
better, outside autocast.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torchvision.ops import box_convert

from detr_pipeline.matching import Match, assign, check_labels, generalised_iou, positions

if TYPE_CHECKING:
    from detr_pipeline.config import ModelConfig

__all__ = ["match", "set_loss"]


def set_loss(
    outputs: Mapping[str, Tensor],
    targets: Sequence[Mapping[str, Any]],
    normalisers: Mapping[str, float],
    config: ModelConfig,
    matches: Sequence[Sequence[Match]] | None = None,
) -> dict[str, Tensor]:
    """Return scalar parts of the loss; `loss` is their weighted sum over all decoder layers.

    With N usable boxes in the minibatch: classification is summed cross entropy over N + w * (queries - N), w the
    weight of no-object (what `F.cross_entropy(weight=...)` means by a mean); L1 and 1 - GIoU of matched boxes over
    max(N, 1).

    Args:
        outputs: `logits` [K, B, Q, C + 1] (no-object last) and `boxes` [K, B, Q, 4].
        targets: per image `labels` [n] and `boxes` [n, 4] (cx, cy, w, h in 0..1), on the CPU.
        normalisers: of the whole minibatch: `boxes`, the sum over images of min(boxes, Q); `queries`, images * Q.
        matches: from `match`; None computes them.

    Returns:
        `loss`; `loss_class`, `loss_boxes`, `loss_giou` of the last decoder layer, weighted; the same with `_0`, `_1`,
        ... of the earlier ones; and, not part of the loss, `class_error` (percent of matched queries with a wrong
        class) and `cardinality_error` (mean difference between the numbers of predicted and true objects per image).

    Raises:
        CapslogError: a label that the model has no output for.
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
    """Return the wanted class of every query [K, B, Q]; layer, image and query of every match [3][K * m]; its box
    [K * m, 4].

    Put together on the host and sent to the device once.
    """
    where, labels, wanted = positions(targets, matches)
    classes = torch.full(logits.shape[:-1], logits.shape[-1] - 1, dtype=torch.int64)
    classes[where] = labels
    device = logits.device
    return classes.to(device), tuple(index.to(device) for index in where), wanted.to(device, logits.dtype)


def match(
    logits: Tensor, boxes: Tensor, targets: Sequence[Mapping[str, Any]], config: ModelConfig
) -> list[list[Match]]:
    """Return the matches of every decoder layer and image, from `detr_pipeline.matching.assign`.

    Args:
        logits: [K, B, Q, C + 1].
        boxes: [K, B, Q, 4] as (cx, cy, w, h) in 0..1.
        targets: per image `labels` [n] and `boxes` [n, 4], on the CPU.

    Raises:
        StepRefused: a prediction is not finite.
    """
    dtype = torch.promote_types(logits.dtype, torch.float32)

    @functools.cache
    def prepared() -> tuple[Tensor, Tensor]:
        return logits.to(dtype).softmax(-1), boxes.to(dtype)

    def cost(image: int, labels: Tensor, wanted: Tensor) -> Tensor:
        probabilities, predicted = prepared()
        # the class cost leaves out the constant 1 - ..., which changes no matching
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
