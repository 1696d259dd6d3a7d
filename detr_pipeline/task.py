"""DETR as a `Workload`: model, data, loss, evaluation and drawing of one config. The constructor reads only the config;
the data is opened at its first use.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from detr_pipeline import chain as chains
from detr_pipeline.chain import build_chain
from detr_pipeline.coco_task import PROFILE_BOXES, CocoWorkload, example_target
from detr_pipeline.config import ModelConfig
from detr_pipeline.data import CocoSource, input_specs
from detr_pipeline.loss import set_loss
from varuna_capslog.base.errors import CapslogError, RunFinding, findings_of
from varuna_capslog.config.reading import section
from varuna_capslog.config.settings import Config
from varuna_capslog.model.chain import Chain, TensorSpec
from varuna_capslog.model.state_file import read_state_file
from varuna_capslog.model.workload import DataSource, HostTargets

__all__ = ["DetrWorkload"]

logger = logging.getLogger(__name__)


class DetrWorkload(CocoWorkload):
    """Workload of a DETR. Raises ConfigError for a wrong key or value in the config's `model` or `data` section."""

    def __init__(self, config: Config) -> None:
        self.model = section(ModelConfig, config.model, "model")
        super().__init__(config, self.model.num_classes)
        self.name = "detr"

    def build_chain(self) -> Chain:
        """Return the chain with fresh weights, or with those of `model.weights` where that file has them. Raises
        CapslogError where the file cannot be read, or fits less than half of this model's tensors.
        """
        chain = build_chain(self.model, self.num_classes)
        if self.model.weights is not None:
            chains.load_into(chain, self._fitting(chain, self.model.weights).tensors)
        return chain

    def check(self) -> Iterator[RunFinding]:
        """Check the data, and yield a finding where `model.weights` does not fit the model wholly."""
        yield from findings_of(super().check, self._check_weights)

    def _check_weights(self) -> Iterator[RunFinding]:
        if self.model.weights is not None:
            with torch.device("meta"):
                chain = build_chain(self.model, self.num_classes)
            fit = self._fitting(chain, self.model.weights)
            if fit.skipped:
                yield RunFinding(f"model.weights={self.model.weights}: {fit.summary()}")

    def _fitting(self, chain: Chain, path: Path) -> chains.FittingWeights:
        """Return the tensors of a weights file that fit the chain. Raises CapslogError where less than half fit."""
        fit = chains.fit(chain, read_state_file(path))
        if 2 * len(fit.tensors) < fit.wanted:
            raise CapslogError(
                f"model.weights={path}: {fit.summary()}; give weights of this model or of a {self.model.backbone}, or "
                "take what fits with init_from"
            )
        return fit

    def loss(self, outputs: Mapping[str, Tensor], targets: Any, normalisers: Mapping[str, float]) -> dict[str, Tensor]:
        """Return DETR's set loss; see `detr_pipeline.loss.set_loss`."""
        return set_loss(outputs, targets, normalisers, self.model)

    def input_specs(self, microbatch_size: int, size: Sequence[int]) -> dict[str, TensorSpec]:
        """Return specs of images and their valid sizes."""
        return input_specs(microbatch_size, size)

    def detections_of(
        self, outputs: Mapping[str, Tensor], image: int, size: Tensor, num_classes: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the best class of every query; see `detr_pipeline.evaluation.detections_of_queries`."""
        from detr_pipeline.evaluation import detections_of_queries

        return detections_of_queries(outputs, image, size, num_classes)

    def profile_targets(self, microbatch_size: int) -> tuple[list[HostTargets], dict[str, float]]:
        """Return targets with a few boxes in every image."""
        count = min(PROFILE_BOXES, self.model.queries)
        target = example_target(count, self.num_classes)
        normalisers = {
            "boxes": float(count * microbatch_size),
            "queries": float(self.model.queries * microbatch_size),
        }
        return [HostTargets(target, image_id=image) for image in range(microbatch_size)], normalisers

    def loss_key(self) -> object:
        """Return the facts, besides the outputs, on which the set loss depends: number and classes of the boxes."""
        return DetrWorkload, min(PROFILE_BOXES, self.model.queries), self.num_classes

    def train_data(self) -> DataSource:
        """Return the training split, augmented."""
        untrained = self.model.weights is None and self.config.init_from is None
        if self.model.norm == "frozen" and untrained and os.environ.get("RANK", "0") == "0":
            logger.warning(
                "model.norm=frozen without model.weights or init_from leaves the backbone without normalisation: it "
                "will hardly learn; set model.norm=group and model.freeze=none to train from scratch"
            )
        return CocoSource(self.data, "train", self.config.train.seed, self.model.queries)

    def val_data(self) -> DataSource | None:
        """Return the validation split, or None where the config names none."""
        if not self.data.has_split("val"):
            return None
        return CocoSource(self.data, "val", self.config.train.seed, self.model.queries)

    def own_names(self, chain: Chain) -> Mapping[str, str]:
        """Return the names of Facebook's DETR for the chain's tensors, by address."""
        return chains.reference_names(chain)

    def import_weights(self, path: Path) -> tuple[dict[str, Tensor], list[str]]:
        """Return the weights of a file in Facebook's DETR layout, by address, and the skipped entries with reasons."""
        with torch.device("meta"):
            chain = build_chain(self.model, self.num_classes)
        return chains.from_reference(chain, read_state_file(path))
