"""DETR as a `Workload`: ties model, data, loss, evaluation and drawing to one config.

Commands and workers get it from `detr_pipeline.workload(config)`. Building it reads the config only; the data
is opened when it is asked for.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from detr_pipeline import weights
from detr_pipeline.chain import build_chain
from detr_pipeline.config import ModelConfig
from detr_pipeline.data import (
    CocoSource,
    DataConfig,
    class_names,
    input_specs,
    largest_padded_size,
    open_index,
    prepare_image,
    sampled_padded_sizes,
)
from detr_pipeline.loss import set_loss
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.config.reading import section
from varuna_capslog.config.settings import Config
from varuna_capslog.model.chain import Chain, TensorSpec
from varuna_capslog.model.state_file import read_state_file
from varuna_capslog.model.workload import DataSource, Evaluator, Workload

__all__ = ["DetrWorkload"]

logger = logging.getLogger(__name__)

_PROFILE_BOXES = 8
_SHOWN_SKIPS = 5
_DRAWN_SCORE = 0.5


class DetrWorkload(Workload):
    """One DETR run.

    Args:
        config: the resolved config; its `model` and `data` sections are checked here.

    Raises:
        varuna_capslog.base.errors.ConfigError: a wrong key or value in either.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.model = section(ModelConfig, config.model, "model")
        self.data = section(DataConfig, config.data, "data")
        self.name = "detr"

    @cached_property
    def num_classes(self) -> int:
        """Classes without no-object; read from the data file where `model.num_classes` is not set."""
        return self.model.num_classes or len(class_names(self.data)[0])

    def build_chain(self) -> Chain:
        """Fresh weights, then those of `model.weights` where that is set.

        Raises:
            CapslogError: the weights file cannot be used, or fits nothing of this model.
        """
        chain = build_chain(self.model, self.num_classes)
        if self.model.weights is not None:
            found, skipped = weights.from_reference(chain, read_state_file(self.model.weights))
            if not found:
                raise CapslogError(
                    f"model.weights={self.model.weights} fits no part of this model ({skipped[0]}); "
                    f"give weights of a {self.model.backbone}"
                )
            weights.load_into(chain, found)
            if skipped:
                shown = "; ".join(skipped[:_SHOWN_SKIPS])
                logger.info("%s: %d entries skipped: %s", self.model.weights, len(skipped), shown)
        return chain

    def loss(self, outputs: Mapping[str, Tensor], targets: Any, normalisers: Mapping[str, float]) -> dict[str, Tensor]:
        """DETR's set loss; see `detr_pipeline.loss.set_loss`."""
        return set_loss(outputs, targets, normalisers, self.model)

    def profile_inputs(self, microbatch_size: int) -> dict[str, TensorSpec]:
        """Images of `profile.image_size`, else of the largest padded size that training can meet."""
        size = self.config.profile.image_size or largest_padded_size(
            self.data, "train", microbatch_size, self.config.train.minibatch_size
        )
        return input_specs(microbatch_size, size)

    def sampled_inputs(self, microbatch_size: int, count: int, seed: int = 0) -> list[dict[str, TensorSpec]]:
        """Images of the padded sizes of random training minibatches; `profile.image_size` alone where that is set."""
        if self.config.profile.image_size is not None:
            return [self.profile_inputs(microbatch_size)]
        minibatch_size = self.config.train.minibatch_size
        sizes = sampled_padded_sizes(self.data, "train", microbatch_size, minibatch_size, count, seed)
        return [input_specs(microbatch_size, size) for size in sizes]

    def profile_targets(self, microbatch_size: int) -> tuple[list[dict[str, Any]], dict[str, float]]:
        """A few boxes in every image."""
        count = min(_PROFILE_BOXES, self.model.queries)
        target = {
            "labels": torch.arange(count) % self.num_classes,
            "boxes": torch.linspace(0.2, 0.6, count * 4).view(count, 4),
        }
        normalisers = {
            "boxes": float(count * microbatch_size),
            "queries": float(self.model.queries * microbatch_size),
        }
        return [dict(target, image_id=image) for image in range(microbatch_size)], normalisers

    def loss_key(self) -> object:
        """The set loss depends on the outputs, and on how many boxes of which classes are looked for in them."""
        return DetrWorkload, min(_PROFILE_BOXES, self.model.queries), self.num_classes

    def train_data(self) -> DataSource:
        """The training split, augmented."""
        untrained = self.model.weights is None and self.config.init_from is None
        if self.model.norm == "frozen" and untrained and os.environ.get("RANK", "0") == "0":
            logger.warning(
                "model.norm=frozen without model.weights or init_from leaves the backbone without normalisation: it "
                "will hardly learn; set model.norm=group and model.freeze=none to train from scratch"
            )
        return CocoSource(self.data, "train", self.config.train.seed, self.model.queries)

    def val_data(self) -> DataSource | None:
        """The validation split, or None where the config names none."""
        if not self.data.has_split("val"):
            return None
        return CocoSource(self.data, "val", self.config.train.seed, self.model.queries)

    def evaluator(self) -> Evaluator | None:
        """COCO's twelve numbers and the AP of every class, with all detections in the run's `detections.json`."""
        if not self.data.has_split("val"):
            return None
        from detr_pipeline.evaluation import CocoEvaluator

        index = open_index(self.data, "val")
        return CocoEvaluator(index, class_names(self.data)[0], self.config.run_dir / "detections.json")

    def sample_files(self, count: int) -> list[Path]:
        """The first pictures of the validation split."""
        if not self.data.has_split("val"):
            return []
        folder = self.data.files("val")[1]
        return [folder / name for name in open_index(self.data, "val").file_names[:count]]

    def own_names(self, chain: Chain) -> Mapping[str, str]:
        """Those of Facebook's DETR."""
        return weights.reference_names(chain)

    def import_weights(self, path: Path) -> tuple[dict[str, Tensor], list[str]]:
        """Weights of a file in Facebook's DETR layout by address, and what was skipped and why."""
        with torch.device("meta"):
            chain = build_chain(self.model, self.num_classes)
        return weights.from_reference(chain, read_state_file(path))

    @torch.no_grad()
    def predict(self, chain: Chain, images: Sequence[Path], out: Path) -> list[Path]:
        """Draws what a trained chain sees on every picture, as `<out>/<name>.png`.

        Raises:
            CapslogError: a picture is missing or cannot be decoded.
        """
        from detr_pipeline.drawing import draw_detections, save_picture
        from detr_pipeline.evaluation import best_classes

        names = class_names(self.data)[1]
        device = next(iter(chain.named_parameters().values())).device
        for layer in chain.layers:
            layer.module.eval()
        written = []
        for path in images:
            inputs, picture = prepare_image(path, self.data)
            outputs = chain.run({name: tensor.to(device) for name, tensor in inputs.items()})
            size = torch.tensor([picture.height, picture.width])
            scores, classes, boxes = best_classes(outputs["logits"][-1, 0], outputs["boxes"][-1, 0], size)
            drawn = draw_detections(picture, scores, classes, boxes, names, _DRAWN_SCORE)
            written.append(save_picture(drawn, out / f"{Path(path).stem}.png"))
        return written
