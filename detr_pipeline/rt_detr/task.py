"""RT-DETR of transformers as a `Workload`: model, data, loss, evaluation and drawing of one config. The constructor
reads only the config; the data is opened at its first use.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.ops import box_convert

from detr_pipeline.coco_task import PROFILE_BOXES, CocoWorkload, example_target
from detr_pipeline.data import CocoSource, DataConfig, Split, open_index
from detr_pipeline.loss import Match, assign, check_labels, generalised_iou, ious, positions
from detr_pipeline.rt_detr import chain as chains
from detr_pipeline.rt_detr.chain import DENOISING, RtDetrModel, transformers_config, unsigmoid
from varuna_capslog.base.errors import ConfigError
from varuna_capslog.config.reading import section
from varuna_capslog.config.settings import Config
from varuna_capslog.model.chain import Chain, TensorSpec
from varuna_capslog.model.state_file import read_state_file
from varuna_capslog.model.workload import DataSource, HostTargets, Minibatch

__all__ = ["Groups", "Noise", "RtDetrSource", "RtDetrWorkload", "best_places", "match", "set_loss"]


# -- Contrastive denoising (DINO, Zhang et al., ICLR 2023, Sec. 3.3): noised boxes as queries ahead of the model's
#    own.
#
# Each group holds every box of an image twice: a positive copy with little noise, whose target is the box, and a
# negative copy with more noise, whose target is no object. The data source makes the noised boxes as inputs of the
# chain, since it knows the boxes before the step; the noise of a sample depends on seed, epoch and sample alone. The
# model never receives targets.


@dataclass(frozen=True)
class Groups:
    """Layout of the denoising queries of every image of a minibatch.

    count: number of groups. most: largest number of boxes in an image; images with fewer boxes have empty places, whose
    target is no object. In each group positive copies come first.
    """

    count: int
    most: int

    @staticmethod
    def of(most: int, wanted: int) -> Groups:
        """Return as many groups as fit into `wanted` positive queries, at least one group; no group without a box."""
        return Groups(max(1, wanted // most) if most and wanted else 0, most)

    @property
    def queries(self) -> int:
        """Number of denoising queries of an image."""
        return 2 * self.most * self.count

    def of_query(self) -> Tensor:
        """Return [D] int64, the group of each query."""
        return torch.arange(self.count).repeat_interleave(2 * self.most)

    def positive(self, boxes: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the positive queries of an image with `boxes` boxes, and the target box of each query."""
        queries = tuple(2 * self.most * group + box for group in range(self.count) for box in range(boxes))
        return queries, tuple(range(boxes)) * self.count


@dataclass(frozen=True)
class Noise:
    """Noise of labels and boxes: transformers' `num_labels`, `label_noise_ratio` and `box_noise_scale`.

    Corners of positive copies move by at most half the box's size times `box_scale`, those of negative copies by half
    its size to its whole size, times `box_scale`. Half of `label_ratio` of the labels are drawn again.
    """

    classes: int
    label_ratio: float
    box_scale: float

    def queries(self, groups: Groups, target: Mapping[str, Any], seed: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return an image's labels [D] int64 (empty places: `classes`) and boxes [D, 4] before the sigmoid, float32.

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
        return labels, unsigmoid(noised)


# -- COCO folder for RT-DETR: the pictures, boxes and augmentation of `detr_pipeline.data`, and denoising queries.
#    Every minibatch is described from the annotation file alone, as in `CocoSource`.


_STREAM = 1
"""Seed that separates the noise from the augmentation, whose seeds are the same run seed, epoch and sample."""


@dataclass(frozen=True)
class _Recipe:
    pictures: list[Any]
    groups: Groups
    epoch: int


def denoising_specs(images: int, queries: int) -> dict[str, TensorSpec]:
    """Return specs of a microbatch of `images` images with `queries` denoising queries each."""
    shape = (images, queries)
    labels, boxes, groups = TensorSpec(shape, torch.int64), TensorSpec((*shape, 4)), TensorSpec(shape, torch.int64)
    return dict(zip(DENOISING, (labels, boxes, groups), strict=True))


class RtDetrSource:
    """A split as a `DataSource`.

    Inputs of a microbatch of B images: `images` [B, 3, H, W] and, where the model denoises, the D queries of the
    minibatch's `Groups` (D is 0 for validation): `dn_labels` [B, D], `dn_boxes` [B, D, 4], `dn_groups` [B, D]. Targets
    are those of `CocoSource`. Normalisers: `boxes` (their number in the minibatch), `groups` and `most` of `Groups`.

    wanted: approximate number of positive denoising queries of an image (`num_denoising`). noise: None: no denoising.
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
            queries = {} if self._noise is None else denoising_specs(images.shape[0], laid.queries)
            inputs.append({"images": images} | queries)
        normalisers = {"boxes": float(sum(counts)), "groups": float(laid.count), "most": float(laid.most)}
        recipes = [_Recipe(pairs, laid, epoch) for pairs in minibatch.recipes]
        return replace(minibatch, inputs=inputs, normalisers=normalisers, recipes=recipes)

    def load(self, minibatch: Minibatch, microbatch: int) -> dict[str, Tensor]:
        """Decode a microbatch like `CocoSource.load`, and make its denoising queries."""
        recipe: _Recipe = minibatch.recipes[microbatch]
        single = Minibatch([minibatch.inputs[microbatch]], [None], recipes=[recipe.pictures])
        inputs = {"images": self.pictures.load(single, 0)["images"]}
        if self._noise is None:
            return inputs
        noised = [
            self._noise.queries(recipe.groups, target, (self._seed, recipe.epoch, sample, _STREAM))
            for (sample, _), target in zip(recipe.pictures, minibatch.targets[microbatch], strict=True)
        ]
        labels, boxes = (torch.stack(rows) for rows in zip(*noised, strict=True))
        groups = recipe.groups.of_query().expand(len(noised), -1).contiguous()
        return inputs | dict(zip(DENOISING, (labels, boxes, groups), strict=True))


# -- RT-DETR's loss of a microbatch, as its share of the minibatch's loss. Its parts have the names of transformers.
#
# With N boxes in the minibatch, every sum is divided by max(N, 1), and sums of denoising queries also by the number of
# groups, so the shares of any split into microbatches add up to the loss of the unsplit minibatch. The workload calls
# `set_loss` on the rank of the last layer; the loss is computed in float32 or better, outside autocast.


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
        normalisers: those of the whole minibatch, from `RtDetrSource`.
        config: transformers' `RTDetrConfig`, which has weights and costs.

    Returns:
        `loss`; the weighted `loss_vfl`, `loss_bbox`, `loss_giou` of the last decoder layer; with `_aux_<k>` those of
        earlier layers, then of the selection (last k); with `_dn_<k>` those of every decoder layer's denoising queries.

    Raises:
        CapslogError: a label for which the model has no output.
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
        # in transformers' order: the last decoder layer, the earlier layers, the selection
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
    """Return the weighted sums of each of the K layers of [K, B, Q, ...], which have equal numbers of matches."""
    count, device = len(logits), logits.device
    place, labels, aims = positions(targets, matches)
    where, aims = tuple(index.to(device) for index in place), aims.to(device, logits.dtype)
    predicted_boxes = boxes[where]
    overlap, generalised = ious(box_convert(predicted_boxes, "cxcywh", "xyxy"), box_convert(aims, "cxcywh", "xyxy"))
    # varifocal loss: the target score is the box's overlap for a match, else 0, weighted by the predicted score
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


# -- RT-DETR of transformers as a `Workload`


_STRIDE = 32
"""Picture sides are divided by it on the smallest map; each map is half as large as the map before."""


class RtDetrWorkload(CocoWorkload):
    """Workload of an RT-DETR. Raises ConfigError for a wrong key or value in the config's `model` or `data` section."""

    def __init__(self, config: Config) -> None:
        self.model = section(RtDetrModel, config.model, "model")
        super().__init__(config, self.model.num_classes)
        self.name = "rt-detr"
        size = self.data.augment.stretch
        if size is None or size[0] % _STRIDE or size[1] % _STRIDE:
            raise ConfigError(
                f"data.augment.stretch is {None if size is None else list(size)}, but RT-DETR knows no padding, and "
                f"each side must be a multiple of {_STRIDE}; set it, such as [640, 640]"
            )

    @cached_property
    def architecture(self) -> Any:
        """transformers' `RTDetrConfig` of this run."""
        return transformers_config(self.model, self.num_classes)

    def build_model(self) -> nn.Module:
        """Return transformers' `RTDetrForObjectDetection`, with fresh weights or those of `model.folder`."""
        model: nn.Module = chains.build_model(self.model, self.num_classes)
        return model

    def build_chain(self) -> Chain:
        """Return the chain of `build_model`'s model."""
        return chains.chain_of(self.build_model())

    def own_names(self, chain: Chain) -> Mapping[str, str]:
        """Return transformers' names of the chain's tensors, by address."""
        return chains.own_names(self.build_model(), chain)

    def import_weights(self, path: Path) -> tuple[dict[str, Tensor], list[str]]:
        """Return weights of a file with transformers' names, by address, and the names that have no place here."""
        state = read_state_file(path)
        names = self.own_names(self.build_chain())
        weights = {address: state[name] for address, name in names.items() if name in state}
        return weights, sorted(set(state) - set(names.values()))

    def loss(self, outputs: Mapping[str, Tensor], targets: Any, normalisers: Mapping[str, float]) -> dict[str, Tensor]:
        """Return RT-DETR's set loss; see `detr_pipeline.rt_detr.task.set_loss`."""
        return set_loss(outputs, targets, normalisers, self.architecture)

    def input_specs(self, microbatch_size: int, size: Sequence[int]) -> dict[str, TensorSpec]:
        """Return specs of images and, where the model denoises, of the largest number of denoising queries."""
        images = {"images": TensorSpec((microbatch_size, 3, *size))}
        wanted = self.architecture.num_denoising
        if not wanted:
            return images
        most_boxes = 1
        if self.config.profile.image_size is None and not self.data.uses_digits:
            index = open_index(self.data, "train")
            most_boxes = max(len(index.targets(sample)[1]) for sample in range(len(index)))
        return images | denoising_specs(microbatch_size, 2 * max(wanted, most_boxes))

    def profile_targets(self, microbatch_size: int) -> tuple[list[HostTargets], dict[str, float]]:
        """Return targets with a few boxes in every image; their number divides that of positive denoising queries."""
        count = min(PROFILE_BOXES, self.architecture.num_queries)
        groups = Groups(0, 0)
        if self._denoises:
            positive = self.profile_inputs(microbatch_size)[chains.DENOISING[0]].shape[1] // 2
            count = max(number for number in range(1, count + 1) if positive % number == 0)
            groups = Groups(positive // count, count)
        target = example_target(count, self.num_classes)
        boxes = float(count * microbatch_size)
        normalisers = {"boxes": boxes, "groups": float(groups.count), "most": float(groups.most)}
        return [HostTargets(target, image_id=image) for image in range(microbatch_size)], normalisers

    def loss_key(self) -> object:
        """Return the facts, besides the outputs, on which the set loss depends: classes and denoising queries."""
        return RtDetrWorkload, self.num_classes, self.architecture.num_denoising

    def train_data(self) -> DataSource:
        """Return the training split, augmented, with denoising queries."""
        return self._source("train")

    def val_data(self) -> DataSource | None:
        """Return the validation split, or None where the config names none."""
        return self._source("val") if self.data.has_split("val") else None

    def detections_of(
        self, outputs: Mapping[str, Tensor], image: int, size: Tensor, num_classes: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the best pairs of query and class; see `best_places`."""
        last = self.architecture.decoder_layers - 1
        return best_places(outputs[f"logits_{last}"][image], outputs[f"boxes_{last}"][image], size, num_classes)

    def inference_inputs(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the picture, and empty denoising inputs where the model denoises."""
        images = {"images": inputs["images"]}
        if not self._denoises:
            return images
        return images | {name: spec.zeros() for name, spec in denoising_specs(len(inputs["images"]), 0).items()}

    @property
    def _denoises(self) -> bool:
        return bool(self.architecture.num_denoising)

    def _source(self, split: Any) -> RtDetrSource:
        settings = self.architecture
        noise = Noise(self.num_classes, settings.label_noise_ratio, settings.box_noise_scale)
        seed, wanted = self.config.train.seed, settings.num_denoising
        return RtDetrSource(self.data, split, seed, wanted, noise if wanted else None)


def best_places(logits: Tensor, boxes: Tensor, size: Tensor, num_classes: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the Q best pairs of query and class, best first: scores [Q], classes [Q], corners in pixels [Q, 4],
    float32 on the CPU. A query may come several times, as different classes.

    Args:
        logits: [Q, C], one sigmoid for each class.
        boxes: [Q, 4] as (cx, cy, w, h), fractions of the image. size: [2] (h, w) of the image.
        num_classes: number of the data's classes; further outputs are ignored. Raises CapslogError if C is less.
    """
    from detr_pipeline.evaluation import corners_of, refuse_too_few

    refuse_too_few(logits.shape[-1], num_classes)
    probabilities = logits.detach().float().cpu()[:, :num_classes].sigmoid()
    scores, places = probabilities.flatten().topk(len(logits))
    return scores, places % num_classes, corners_of(boxes.detach().cpu()[places // num_classes], size)
