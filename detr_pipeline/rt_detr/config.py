"""Model section of an RT-DETR config, and the `RTDetrConfig` of transformers that it stands for; no module is built."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, model_validator

from varuna_capslog.base.errors import CapslogError, ConfigError
from varuna_capslog.base.fields import refuse_unknown
from varuna_capslog.config.settings import Section

__all__ = ["RtDetrModel", "transformers_config"]

# Keys that the chain does not implement, with the only value that it supports.
_FIXED: dict[str, Any] = {
    "use_focal_loss": True,
    "auxiliary_loss": True,
    "learn_initial_query": False,
    "anchor_image_size": None,
    "eval_size": None,
}


class RtDetrModel(Section):
    """Keys under `model.`."""

    architecture: dict[str, Any] = Field(default_factory=dict)
    """Keys of transformers' `RTDetrConfig`, such as `d_model`, `num_queries`, `num_denoising` or
    `freeze_backbone_batch_norms`; those left out have its defaults (RT-DETR with a ResNet-50)."""

    backbone: dict[str, Any] = Field(default_factory=dict)
    """Keys of transformers' `RTDetrResNetConfig`, such as `depths`, `hidden_sizes` and `layer_type`."""

    folder: Path | None = None
    """A folder as transformers saves a model: architecture and weights come from there. Weights for other classes are
    left out. Null: fresh weights."""

    num_classes: Annotated[int, Field(gt=0)] | None = None
    """Classes told apart; null takes the number from the data file."""

    @model_validator(mode="after")
    def _agree(self) -> RtDetrModel:
        if self.folder is not None and (self.architecture or self.backbone):
            raise ValueError(
                f"model.folder={self.folder} says the architecture, and so do model.architecture or model.backbone; "
                "remove them, or the folder"
            )
        return self


def transformers_config(model: RtDetrModel, num_classes: int) -> Any:
    """Return transformers' `RTDetrConfig` of a model section.

    Raises:
        ConfigError: a key unknown to transformers, or a value that it refuses or the chain does not compute.
        CapslogError: `model.folder` holds no RT-DETR.
    """
    from transformers import RTDetrConfig, RTDetrResNetConfig

    if model.folder is not None:
        return _from_folder(model.folder, num_classes)
    _refuse_unknown_keys(model.architecture, RTDetrConfig, "model.architecture", {"backbone_config", "num_labels"})
    _refuse_unknown_keys(model.backbone, RTDetrResNetConfig, "model.backbone", set())
    try:
        backbone = RTDetrResNetConfig(**{"out_indices": [2, 3, 4]} | model.backbone)
        arguments: dict[str, Any] = {"backbone_config": backbone, "num_labels": num_classes} | model.architecture
        config = RTDetrConfig(**arguments)
    except Exception as error:  # transformers' own checks raise errors of several libraries
        raise ConfigError(
            f"model.architecture and model.backbone are refused by transformers: {' '.join(str(error).split())}"
        ) from error
    _refuse_what_is_not_computed(config, "model.architecture.")
    return config


def _from_folder(folder: Path, num_classes: int) -> Any:
    from transformers import AutoConfig, RTDetrConfig, RTDetrResNetConfig

    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise CapslogError(
            f"model.folder={folder} cannot be read as a model of transformers: {' '.join(str(error).split())}"
        ) from error
    if type(config) is not RTDetrConfig or not isinstance(config.backbone_config, RTDetrResNetConfig):
        raise CapslogError(
            f"model.folder={folder} holds a {config.model_type}, not an RT-DETR with a ResNet of transformers; name "
            "another folder, or train that model as docs/own-data.md says"
        )
    config.num_labels = num_classes
    _refuse_what_is_not_computed(config, f"{folder}: ")
    return config


def _refuse_unknown_keys(section: Mapping[str, Any], config_class: type, where: str, ours: set[str]) -> None:
    names = {field.name for field in dataclasses.fields(config_class) if not field.name.startswith("_")} - ours
    names |= {"out_indices"} if where == "model.backbone" else set()
    try:
        refuse_unknown(section, sorted(names), f"key of {where}")
    except CapslogError as error:
        raise ConfigError(str(error)) from None


def _refuse_what_is_not_computed(config: Any, where: str) -> None:
    for name, only in _FIXED.items():
        value = getattr(config, name)
        if value != only:
            raise ConfigError(f"{where}{name} is {value!r}, which is not supported here; it must be {only!r}")
    levels = len(config.encoder_in_channels)
    if config.num_feature_levels != levels or len(config.decoder_in_channels) != levels:
        raise ConfigError(
            f"{where}num_feature_levels is {config.num_feature_levels} and decoder_in_channels has "
            f"{len(config.decoder_in_channels)} entries, but encoder_in_channels has {levels}; give as many of each"
        )
    made = [config.backbone_config.hidden_sizes[index - 1] for index in config.backbone_config.out_indices]
    if list(config.encoder_in_channels) != made:
        raise ConfigError(
            f"{where}encoder_in_channels is {list(config.encoder_in_channels)}, but the backbone gives maps of {made} "
            "channels; set it to these"
        )
