"""RT-DETR of transformers as a chain: one layer per block of the backbone, per fusion, and per decoder layer.

The workload builds its model here. These tensors cross the cuts: features [B, C, h, w] of the backbone (`x`, and
`c<level>`, which the next level and the encoder read), projected (`p`), mixed (`f`, `n`), then `memory`, `grid`,
`hidden` and `reference` of `layers.Selection`, and the predictions of every decoder layer on their way to the loss.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from detr_pipeline.rt_detr.config import RtDetrModel, transformers_config
from detr_pipeline.rt_detr.layers import Decoder, Encoder, Fusion, Halving, Selection
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.model.chain import Chain, Layer

__all__ = ["DENOISING", "build_model", "chain_of", "own_names"]

DENOISING = ("dn_labels", "dn_boxes", "dn_groups")
"""Inputs beside `images` where the model denoises; see `denoising.Noise`."""


def build_model(section: RtDetrModel, num_classes: int) -> Any:
    """Build transformers' `RTDetrForObjectDetection` of a model section; fresh weights come from torch's random state.

    Fresh scales of batch norms are 1, as in RT-DETR's original code; transformers draws them near 0, because it expects
    loaded weights.

    Raises:
        ConfigError, CapslogError: as `transformers_config`; weights that cannot be read.
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
    """Return transformers' name of every address of `chain`, which is `model`'s or has the same layers."""
    # the same object is met under other names where the model has modules twice
    names = {id(value): name for name, value in reversed([*model.named_parameters(), *model.named_buffers()])}
    same = chain_of(model)
    return {address: names[id(value)] for address, value in same.named_tensors().items() if address in _all(chain)}


def _all(chain: Chain) -> set[str]:
    return set(chain.named_tensors())


def _backbone(inner: Any, levels: int) -> list[Layer]:
    """Return stem and blocks; the last block of each used stage writes the map of its level, which is projected."""
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
    """Return the AIFI layers of their levels, then those that mix the maps from smallest to largest and back."""
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
