"""RT-DETR of transformers as a `Workload`: ties model, data, loss, evaluation and drawing to one config.

Commands and workers get it from `detr_pipeline.rt_detr.workload(config)`. Building it reads the config only; the data
is opened when it is asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from detr_pipeline.coco_task import PROFILE_BOXES, CocoWorkload, example_target
from detr_pipeline.data import open_index
from detr_pipeline.rt_detr import chain as chains
from detr_pipeline.rt_detr.config import RtDetrModel, transformers_config
from detr_pipeline.rt_detr.loss import set_loss
from detr_pipeline.rt_detr.source import Groups, Noise, RtDetrSource, denoising_specs
from varuna_capslog.base.errors import ConfigError
from varuna_capslog.config.reading import section
from varuna_capslog.config.settings import Config
from varuna_capslog.model.chain import Chain, TensorSpec
from varuna_capslog.model.state_file import read_state_file
from varuna_capslog.model.workload import DataSource, HostTargets

__all__ = ["RtDetrWorkload", "best_places"]

_STRIDE = 32
"""Each map is half as large as the one before, the smallest a 32nd of the picture."""


class RtDetrWorkload(CocoWorkload):
    """Workload of an RT-DETR.

    Args:
        config: the resolved config; its `model` and `data` sections are checked here.

    Raises:
        ConfigError: a wrong key or value in either.
    """

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
        """transformers' `RTDetrForObjectDetection`, with fresh weights or those of `model.folder`."""
        model: nn.Module = chains.build_model(self.model, self.num_classes)
        return model

    def build_chain(self) -> Chain:
        """Return a chain of `build_model`."""
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
        """RT-DETR's set loss; see `detr_pipeline.rt_detr.loss.set_loss`."""
        return set_loss(outputs, targets, normalisers, self.architecture)

    def input_specs(self, microbatch_size: int, size: Sequence[int]) -> dict[str, TensorSpec]:
        """Images, and where the model denoises its largest number of queries."""
        images = {"images": TensorSpec((microbatch_size, 3, *size))}
        wanted = self.architecture.num_denoising
        if not wanted:
            return images
        most = 1
        if self.config.profile.image_size is None and not self.data.uses_digits:
            index = open_index(self.data, "train")
            most = max(len(index.targets(sample)[1]) for sample in range(len(index)))
        return images | denoising_specs(microbatch_size, 2 * max(wanted, most))

    def profile_targets(self, microbatch_size: int) -> tuple[list[HostTargets], dict[str, float]]:
        """A few boxes in every image, as many as share out the denoising queries of `profile_inputs` evenly."""
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
        """The set loss depends on the outputs, on the boxes looked for in them, and on the denoising queries."""
        return RtDetrWorkload, self.num_classes, self.architecture.num_denoising

    def train_data(self) -> DataSource:
        """The training split, augmented, with denoising queries."""
        return self._source("train")

    def val_data(self) -> DataSource | None:
        """The validation split, or None where the config names none."""
        return self._source("val") if self.data.has_split("val") else None

    def seen(
        self, outputs: Mapping[str, Tensor], image: int, size: Tensor, num_classes: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The best pairs of query and class; see `best_places`."""
        last = self.architecture.decoder_layers - 1
        return best_places(outputs[f"logits_{last}"][image], outputs[f"boxes_{last}"][image], size, num_classes)

    def evaluated(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """The picture, and no denoising queries."""
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
        boxes: [Q, 4] as (cx, cy, w, h), fractions of the image.
        size: [2] (h, w) of the image.
        num_classes: classes that the data has; the model never names others.

    Raises:
        CapslogError: the model has fewer.
    """
    from detr_pipeline.evaluation import corners_of, refuse_too_few

    refuse_too_few(logits.shape[-1], num_classes)
    probabilities = logits.detach().float().cpu()[:, :num_classes].sigmoid()
    scores, places = probabilities.flatten().topk(len(logits))
    return scores, places % num_classes, corners_of(boxes.detach().cpu()[places // num_classes], size)
