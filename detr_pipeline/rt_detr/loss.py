"""RT-DETR's loss of a microbatch, as its share of the whole minibatch's loss: transformers' parts under its names.

With N boxes in the minibatch, every sum is divided by max(N, 1), those of denoising queries by max(N, 1) times the
number of groups, so the shares of any split into microbatches add up to the loss of the unsplit minibatch. The
workload calls this on the rank of the last layer; it computes in float32 or better, outside autocast.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torchvision.ops import box_convert

from detr_pipeline.loss import Match, assign, check_labels, generalised_iou, ious, positions
from detr_pipeline.rt_detr.source import Groups

__all__ = ["match", "set_loss"]

_LOG_MARGIN = 1e-8


def set_loss(
    outputs: Mapping[str, Tensor],
    targets: Sequence[Mapping[str, Any]],
    normalisers: Mapping[str, float],
    config: Any,
) -> dict[str, Tensor]:
    """Return scalar parts of the loss; `loss` is their sum.

    Args:
        outputs: `logits_<k>` [B, D + Q, classes] and `boxes_<k>` [B, D + Q, 4] (cx, cy, w, h in 0..1) of each decoder
            layer, and `logits_enc`, `boxes_enc` [B, Q, ...] of the selection; D denoising queries come first.
        targets: per image `labels` [n] and `boxes` [n, 4], on the CPU.
        normalisers: of the whole minibatch, as `source.RtDetrSource` gives them.
        config: transformers' `RTDetrConfig`, which has weights and costs.

    Returns:
        `loss`; `loss_vfl`, `loss_bbox`, `loss_giou` of the last decoder layer, weighted; the same with `_aux_<k>` of
        the earlier ones and of the selection (the last number), and with `_dn_<k>` of all decoder layers' denoising.

    Raises:
        CapslogError: a label that the model has no output for.
        StepRefused: a prediction is not finite.
    """
    layers = config.decoder_layers
    groups = Groups(int(normalisers["groups"]), int(normalisers["most"]))
    number = max(normalisers["boxes"], 1.0)
    dtype = torch.promote_types(outputs["logits_0"].dtype, torch.float32)
    with torch.autocast(outputs["logits_0"].device.type, enabled=False):
        check_labels(targets, config.num_labels)
        logits, boxes = (
            torch.stack([outputs[f"{kind}_{index}"] for index in range(layers)]).to(dtype)
            for kind in ("logits", "boxes")
        )
        noised = groups.queries
        # in transformers' order: the last decoder layer, the earlier ones, the selection
        order = [layers - 1, *range(layers - 1)]
        found_logits = torch.cat([logits[order, :, noised:], outputs["logits_enc"][None].to(dtype)])
        found_boxes = torch.cat([boxes[order, :, noised:], outputs["boxes_enc"][None].to(dtype)])
        matches = match(found_logits, found_boxes, targets, config)
        sums = _sums(found_logits, found_boxes, targets, matches, config)
        parts = {
            f"{name}{suffix}": value / number
            for suffix, values in zip(["", *(f"_aux_{index}" for index in range(layers))], sums, strict=True)
            for name, value in values.items()
        }
        if noised:
            positive = [[groups.positive(len(target["labels"])) for target in targets]] * layers
            sums = _sums(logits[:, :, :noised], boxes[:, :, :noised], targets, positive, config)
            parts |= {
                f"{name}_dn_{index}": value / (number * groups.count)
                for index, values in enumerate(sums)
                for name, value in values.items()
            }
        return {"loss": torch.stack(list(parts.values())).sum()} | parts


def _sums(
    logits: Tensor,
    boxes: Tensor,
    targets: Sequence[Mapping[str, Any]],
    matches: Sequence[Sequence[Match]],
    config: Any,
) -> list[dict[str, Tensor]]:
    """Return weighted sums over [K, B, Q, ...] for each of the K layers, which all have the same number of matches."""
    count, device = len(logits), logits.device
    place, labels, aims = positions(targets, matches)
    where, aims = tuple(index.to(device) for index in place), aims.to(device, logits.dtype)
    predicted_boxes = boxes[where]
    overlap, generalised = ious(box_convert(predicted_boxes, "cxcywh", "xyxy"), box_convert(aims, "cxcywh", "xyxy"))
    # varifocal loss: the target score of a match is its box's overlap, of all else 0, weighted by the predicted score
    aim = torch.zeros_like(logits)
    aim[(*where, labels.to(device))] = overlap.detach()
    matched = torch.zeros_like(logits)
    matched[(*where, labels.to(device))] = 1
    score = logits.detach().sigmoid()
    weight = config.focal_loss_alpha * score.pow(config.focal_loss_gamma) * (1 - matched) + aim
    entropy = F.binary_cross_entropy_with_logits(logits, aim, weight, reduction="none")
    sums = {
        "loss_vfl": entropy.view(count, -1).sum(1) * config.weight_loss_vfl,
        "loss_bbox": (predicted_boxes - aims).abs().sum(-1).view(count, -1).sum(1) * config.weight_loss_bbox,
        "loss_giou": (1 - generalised).view(count, -1).sum(1) * config.weight_loss_giou,
    }
    return [{name: value[index] for name, value in sums.items()} for index in range(count)]


def match(logits: Tensor, boxes: Tensor, targets: Sequence[Mapping[str, Any]], config: Any) -> list[list[Match]]:
    """Return matches of every layer and image, from `detr_pipeline.loss.assign` with transformers' focal costs."""
    scores = functools.cache(logits.sigmoid)

    def cost(image: int, labels: Tensor, wanted: Tensor) -> Tensor:
        sure, predicted = scores()[:, image][..., labels], boxes[:, image, :, None]
        alpha, gamma = config.matcher_alpha, config.matcher_gamma
        wrong = (1 - alpha) * sure**gamma * -(1 - sure + _LOG_MARGIN).log()
        right = alpha * (1 - sure) ** gamma * -(sure + _LOG_MARGIN).log()
        overlap = generalised_iou(box_convert(predicted, "cxcywh", "xyxy"), box_convert(wanted, "cxcywh", "xyxy"))
        return (
            config.matcher_bbox_cost * (predicted - wanted).abs().sum(-1)
            + config.matcher_class_cost * (right - wrong)
            - config.matcher_giou_cost * overlap
        )

    return assign(logits, boxes, targets, cost)
