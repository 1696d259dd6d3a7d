"""RT-DETR of transformers as a chain: one layer per block of the backbone, per fusion, and per decoder layer.

These tensors cross the cuts: features [B, C, h, w] of the backbone (`x`, and `c<level>`, which the next level and the
projection read), projected maps (`p`), fused maps (`f`, `g`, `n`), then `memory`, `grid`, `hidden` and `reference` of
`Selection`, and the predictions of every decoder layer, which the loss reads.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from varuna_capslog.base.errors import CapslogError, ConfigError
from varuna_capslog.base.fields import refuse_unknown
from varuna_capslog.config.settings import Section
from varuna_capslog.model.chain import Chain, Layer

__all__ = ["DENOISING", "RtDetrModel", "build_model", "chain_of", "own_names", "transformers_config", "unsigmoid"]

# -- Model section of an RT-DETR config, and its `RTDetrConfig` of transformers; no module is made


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
        ConfigError: a key unknown to transformers, or a value that transformers or the chain does not support.
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


# -- The layers of RT-DETR (Zhao et al., CVPR 2024) whose forward transformers writes inside larger modules.
#
# They wrap transformers' own submodules and compute the same as its `RTDetrModel`, operation by operation. They keep no
# state and no cache, so that they also run on tensors without memory, and at any size.


_ANCHOR_SIZE = 0.05
_ANCHOR_MARGIN = 0.01
_SIGMOID_MARGIN = 1e-5


class Encoder(nn.Module):
    """Transformer layer on the smallest map (AIFI): [B, C, h, w] to [B, C, h, w]. transformers' layer clamps results
    that are not finite; this layer does not, since the engine refuses a step that is not finite.
    """

    def __init__(self, layer: nn.Module, temperature: float) -> None:
        super().__init__()
        self.layer, self.temperature = layer, temperature

    def forward(self, x: Tensor) -> Tensor:
        layer: Any = self.layer
        batch, channels, height, width = x.shape
        tokens = x.flatten(2).transpose(1, 2)
        places = sine_positions(height, width, channels, self.temperature, tokens)
        attended = layer.self_attn_layer_norm(tokens) if layer.normalize_before else tokens
        attended, _ = layer.self_attn(hidden_states=attended, attention_mask=None, position_embeddings=places)
        tokens = tokens + F.dropout(attended, layer.dropout, self.training)
        if not layer.normalize_before:
            tokens = layer.self_attn_layer_norm(tokens)
        # in transformers the second residual sum adds normalised tokens, with either order of the norms
        if layer.normalize_before:
            tokens = layer.final_layer_norm(tokens)
        tokens = tokens + layer.mlp(tokens)
        if not layer.normalize_before:
            tokens = layer.final_layer_norm(tokens)
        return tokens.transpose(1, 2).reshape(batch, channels, height, width).contiguous()


class Fusion(nn.Module):
    """Top-down fusion of a map with one of twice its size; returns the small map after `lateral`, and the fused map."""

    def __init__(self, lateral: nn.Module, block: nn.Module) -> None:
        super().__init__()
        self.lateral, self.block = lateral, block

    def forward(self, small: Tensor, large: Tensor) -> tuple[Tensor, Tensor]:
        small = self.lateral(small)
        return small, self.block(torch.cat([F.interpolate(small, scale_factor=2.0, mode="nearest"), large], dim=1))


class Halving(nn.Module):
    """Bottom-up fusion of a large map, halved, with a small map of that size."""

    def __init__(self, halve: nn.Module, block: nn.Module) -> None:
        super().__init__()
        self.halve, self.block = halve, block

    def forward(self, large: Tensor, small: Tensor) -> Tensor:
        return self.block(torch.cat([self.halve(large), small], dim=1))


class Selection(nn.Module):
    """Layer that flattens all maps into one row of places, predicts at each place, and selects the best as queries.

    Called with the maps [B, C, h, w], each half as large as the map before, and, where the model denoises, with noised
    `labels` [B, D] and `boxes` [B, D, 4] before the sigmoid (`task.Noise`). Their D queries come first. Returns

    - memory [B, L, C]: the places of all maps;
    - grid [B, h, w] of bool: no values, only the size of the largest map, for the decoder;
    - hidden [B, D + Q, C] and reference [B, D + Q, 4]: inputs of the first decoder layer;
    - logits [B, Q, classes] and boxes [B, Q, 4] of the selected places, for the loss.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.project = model.decoder_input_proj
        self.enc_output, self.enc_score_head, self.enc_bbox_head = (
            model.enc_output,
            model.enc_score_head,
            model.enc_bbox_head,
        )
        self.denoising_class_embed = getattr(model, "denoising_class_embed", None)
        self.levels, self.queries = len(model.decoder_input_proj), model.config.num_queries

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        maps = [project(feature_map) for project, feature_map in zip(self.project, tensors[: self.levels], strict=True)]
        memory = torch.cat([feature_map.flatten(2).transpose(1, 2) for feature_map in maps], 1)
        first, usable = anchors([(feature_map.shape[-2], feature_map.shape[-1]) for feature_map in maps], memory)
        places = self.enc_output(usable.to(memory.dtype) * memory)
        scores, corners = self.enc_score_head(places), self.enc_bbox_head(places) + first
        _, best = torch.topk(scores.max(-1).values, self.queries, dim=1)
        reference, logits = _rows(corners, best), _rows(scores, best)
        boxes = reference.sigmoid()
        hidden = _rows(places, best).detach()
        if self.denoising_class_embed is not None:
            labels, noised = tensors[self.levels :]
            hidden = torch.cat([self.denoising_class_embed(labels), hidden], 1)
            reference = torch.cat([noised.to(reference.dtype), reference], 1)
        grid = torch.ones_like(maps[0][:, 0], dtype=torch.bool)
        return memory, grid, hidden, reference.detach().sigmoid(), logits, boxes


class Decoder(nn.Module):
    """Decoder layer with its heads. Called with hidden, reference, memory and grid (see `Selection`) and, where the
    model denoises, with `groups` [B, D], the group of each denoising query; returns hidden and reference, unless it is
    the last layer, and logits [B, D + Q, classes] and boxes [B, D + Q, 4].
    """

    def __init__(self, decoder: Any, index: int, levels: int) -> None:
        super().__init__()
        self.layer = decoder.layers[index]
        self.query_pos_head = decoder.query_pos_head  # one for all decoder layers
        self.class_embed, self.bbox_embed = decoder.class_embed[index], decoder.bbox_embed[index]
        self.levels, self.last = levels, index == len(decoder.layers) - 1

    def forward(
        self, hidden: Tensor, reference: Tensor, memory: Tensor, grid: Tensor, groups: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        _, height, width = grid.shape
        hidden = self.layer(
            hidden,
            object_queries_position_embeddings=self.query_pos_head(reference),
            reference_points=reference.unsqueeze(2),
            spatial_shapes_list=[(height >> level, width >> level) for level in range(self.levels)],
            encoder_hidden_states=memory,
            encoder_attention_mask=_apart(groups, hidden),
        )
        boxes = (self.bbox_embed(hidden) + unsigmoid(reference)).sigmoid()
        predictions = self.class_embed(hidden), boxes
        return predictions if self.last else (hidden, boxes.detach(), *predictions)


def sine_positions(height: int, width: int, channels: int, temperature: float, like: Tensor) -> Tensor:
    """Return position codes [1, height * width, channels] of dtype and device of `like`, computed in float64: sine and
    cosine of the row, then of the column.
    """
    count = channels // 4
    exact = {"dtype": torch.float64, "device": like.device}
    omega = 1.0 / temperature ** (torch.arange(count, **exact) / count)  # type: ignore[call-overload]
    rows, columns = torch.meshgrid(
        torch.arange(height, **exact),  # type: ignore[call-overload]
        torch.arange(width, **exact),  # type: ignore[call-overload]
        indexing="ij",
    )
    down, right = rows.flatten().outer(omega), columns.flatten().outer(omega)
    return torch.cat([down.sin(), down.cos(), right.sin(), right.cos()], dim=1).to(like.dtype)[None]


def anchors(sizes: list[tuple[int, int]], like: Tensor) -> tuple[Tensor, Tensor]:
    """Return an initial box at every place of maps of these (h, w), before the sigmoid: [1, L, 4], dtype of `like`.

    A box's side is a twentieth of the picture on the first map, and twice as much on each next map. The second result,
    [1, L, 1], is False where a box is too near the border to be used.
    """
    boxes_of_maps = []
    for level, (height, width) in enumerate(sizes):
        rows, columns = torch.meshgrid(
            torch.arange(height, device=like.device).to(like.dtype),
            torch.arange(width, device=like.device).to(like.dtype),
            indexing="ij",
        )
        centres = torch.stack([(columns + 0.5) / width, (rows + 0.5) / height], -1)
        sides = torch.full_like(centres, _ANCHOR_SIZE * 2.0**level)
        boxes_of_maps.append(torch.cat([centres, sides], -1).view(1, height * width, 4))
    boxes = torch.cat(boxes_of_maps, 1)
    usable = ((boxes > _ANCHOR_MARGIN) & (boxes < 1 - _ANCHOR_MARGIN)).all(-1, keepdim=True)
    largest = torch.full((), torch.finfo(like.dtype).max, dtype=like.dtype, device=like.device)
    return torch.where(usable, torch.log(boxes / (1 - boxes)), largest), usable


def _rows(values: Tensor, chosen: Tensor) -> Tensor:
    """Gather rows: values [B, L, n] at places [B, Q] to [B, Q, n]."""
    return values.gather(1, chosen.unsqueeze(-1).expand(-1, -1, values.shape[-1]))


def unsigmoid(x: Tensor) -> Tensor:
    """Return the logits of probabilities, finite also at 0 and 1."""
    x = x.clamp(min=0, max=1)
    return torch.log(x.clamp(min=_SIGMOID_MARGIN) / (1 - x).clamp(min=_SIGMOID_MARGIN))


def _apart(groups: Tensor | None, hidden: Tensor) -> Tensor | None:
    """Return the attention bias [T, T] that hides denoising queries of other groups; None without denoising."""
    if groups is None or groups.shape[1] == 0:
        return None
    matched = groups.new_full((hidden.shape[1] - groups.shape[1],), -1)
    of_query = torch.cat([groups[0], matched])
    hides = (of_query[:, None] != of_query) & (of_query >= 0)
    return hidden.new_zeros(hides.shape).masked_fill(hides, float("-inf"))


# -- RT-DETR of transformers as a chain


DENOISING = ("dn_labels", "dn_boxes", "dn_groups")
"""Inputs besides `images` where the model denoises; see `task.Noise`."""


def build_model(section: RtDetrModel, num_classes: int) -> Any:
    """Return transformers' `RTDetrForObjectDetection` of a model section; fresh weights come from torch's random state.

    Fresh scales of batch norms are 1, as in RT-DETR's original code; transformers draws scales near 0, because it
    expects loaded weights. Raises as `transformers_config`, and CapslogError for weights that cannot be read.
    """
    from transformers import RTDetrForObjectDetection

    config = transformers_config(section, num_classes)
    if section.folder is not None:
        try:
            return RTDetrForObjectDetection.from_pretrained(
                section.folder, config=config, local_files_only=True, ignore_mismatched_sizes=True, dtype=torch.float32
            )
        except (OSError, ValueError, RuntimeError) as error:
            raise CapslogError(
                f"the weights in model.folder={section.folder} cannot be read: {' '.join(str(error).split())}"
            ) from error
    model = RTDetrForObjectDetection(config)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.ones_(module.weight)
    return model


def chain_of(model: Any) -> Chain:
    """Return the chain of an `RTDetrForObjectDetection`; the layers hold the model's own submodules."""
    inner = model.model
    levels = len(model.config.encoder_in_channels)
    layers = _backbone(inner, levels) + _encoder(inner, levels)
    denoises = model.config.num_denoising > 0
    maps = tuple(f"n{level}" for level in range(levels))
    hidden = ("memory", "grid", "hidden", "reference", "logits_enc", "boxes_enc")
    layers.append(Layer("selection", Selection(inner), maps + (DENOISING[:2] if denoises else ()), hidden))
    reads = ("hidden", "reference", "memory", "grid") + (DENOISING[2:] if denoises else ())
    count = len(inner.decoder.layers)
    for index in range(count):
        predictions = (f"logits_{index}", f"boxes_{index}")
        writes = predictions if index == count - 1 else ("hidden", "reference", *predictions)
        layers.append(Layer(f"decoder.{index}", Decoder(inner.decoder, index, levels), reads, writes))
    outputs = [f"{kind}_{of}" for of in (*range(count), "enc") for kind in ("logits", "boxes")]
    return Chain(layers, ("images", *(DENOISING if denoises else ())), outputs, "rt-detr")


def own_names(model: Any, chain: Chain) -> dict[str, str]:
    """Return address -> transformers' name, for `chain`, which has the layers of `model`'s chain."""
    # a tensor has several names where the model holds a module twice: the first name counts
    names = {id(value): name for name, value in reversed([*model.named_parameters(), *model.named_buffers()])}
    same, addresses = chain_of(model), set(chain.named_tensors())
    return {address: names[id(value)] for address, value in same.named_tensors().items() if address in addresses}


def _backbone(inner: Any, levels: int) -> list[Layer]:
    """Return stem, blocks and projections; the last block of each used stage writes the map of its level."""
    body = inner.backbone.model
    layers = [Layer("backbone.stem", body.embedder, ("images",), ("x",))]
    used = {number: level for level, number in enumerate(body.config.out_indices)}
    before = "x"
    for number, stage in enumerate(body.encoder.stages, start=1):
        for index, block in enumerate(stage.layers):
            ends = index == len(stage.layers) - 1 and number in used
            after = f"c{used[number]}" if ends else "x"
            layers.append(Layer(f"backbone.stage{number}.{index}", block, (before,), (after,)))
            before = after
        if number in used:
            level = used[number]
            layers.append(Layer(f"project.{level}", inner.encoder_input_proj[level], (before,), (f"p{level}",)))
    assert len(used) == levels
    return layers


def _encoder(inner: Any, levels: int) -> list[Layer]:
    """Return the AIFI layers, then the layers that fuse the maps from smallest to largest, then back."""
    encoder, layers = inner.encoder, []
    for aifi, level in zip(encoder.aifi, encoder.encode_proj_layers, strict=True):
        name = (f"p{level}",)
        for index, layer in enumerate(aifi.layers):
            module = Encoder(layer, encoder.positional_encoding_temperature)
            layers.append(Layer(f"encoder.{level}.{index}", module, name, name))
    top = f"p{levels - 1}"
    for index, (lateral, block) in enumerate(zip(encoder.lateral_convs, encoder.fpn_blocks, strict=True)):
        level = levels - 2 - index
        fused = f"n{level}" if level == 0 else f"g{level}"
        writes = (f"f{level + 1}", fused)
        layers.append(Layer(f"down.{level}", Fusion(lateral, block), (top, f"p{level}"), writes))
        top = fused
    for index, (halve, block) in enumerate(zip(encoder.downsample_convs, encoder.pan_blocks, strict=True)):
        reads = (f"n{index}", f"f{index + 1}")
        layers.append(Layer(f"up.{index + 1}", Halving(halve, block), reads, (f"n{index + 1}",)))
    return layers
