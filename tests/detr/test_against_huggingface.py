"""An independent implementation with the same random weights gives the same predictions of all decoder layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from detr_pipeline.chain import build_chain, to_reference
from detr_pipeline.config import ModelConfig
from tests.detr.tiny import shake_frozen_norms
from varuna_capslog.model.chain import Chain

pytest.importorskip("transformers", minversion="5.0")

CLASSES, QUERIES, WIDTH = 6, 9, 64
DEPTHS = {"resnet18": (2, 2, 2, 2), "resnet50": (3, 4, 6, 3)}


def hugging_face_model(backbone: str, dilation: bool, layers: int) -> Any:
    from transformers import DetrConfig, DetrForObjectDetection, ResNetConfig

    basic = backbone == "resnet18"
    resnet = ResNetConfig(
        depths=DEPTHS[backbone],
        hidden_sizes=[64 * 2**i * (1 if basic else 4) for i in range(4)],
        layer_type="basic" if basic else "bottleneck",
        out_features=["stage4"],
    )
    config = DetrConfig(
        use_timm_backbone=False,
        backbone_config=resnet,
        num_labels=CLASSES,
        num_queries=QUERIES,
        d_model=WIDTH,
        encoder_layers=layers,
        decoder_layers=layers,
        encoder_ffn_dim=96,
        decoder_ffn_dim=96,
        attn_implementation="eager",
    )
    model = DetrForObjectDetection(config).eval()
    if dilation:
        # Its ResNet has no dilation, so do by hand the work of torchvision's replace_stride_with_dilation.
        blocks = model.model.backbone.model.encoder.stages[3].layers
        blocks[0].layer[1].convolution.stride = blocks[0].shortcut.convolution.stride = (1, 1)
        for block in blocks[1:]:
            block.layer[1].convolution.dilation = block.layer[1].convolution.padding = (2, 2)
    return model


def renamed(state: dict[str, Tensor], layers: int) -> dict[str, Tensor]:
    """Return Facebook's state dict under Hugging Face's names."""
    new: dict[str, Tensor] = {}
    plain = {
        "input_proj": "model.input_projection",
        "query_embed": "model.query_position_embeddings",
        "class_embed": "class_labels_classifier",
        "transformer.decoder.norm": "model.decoder.layernorm",
        **{f"bbox_embed.layers.{index}": f"bbox_predictor.layers.{index}" for index in range(3)},
    }
    for old, name in plain.items():
        new |= {f"{name}.{kind}": state[f"{old}.{kind}"] for kind in ("weight", "bias") if f"{old}.{kind}" in state}
    for part, attentions, norms in (
        ("encoder", {"self_attn": "self_attn"}, ["self_attn_layer_norm", "final_layer_norm"]),
        (
            "decoder",
            {"self_attn": "self_attn", "multihead_attn": "encoder_attn"},
            ["self_attn_layer_norm", "encoder_attn_layer_norm", "final_layer_norm"],
        ),
    ):
        for index in range(layers):
            old, name = f"transformer.{part}.layers.{index}", f"model.{part}.layers.{index}"
            for kind in ("weight", "bias"):
                for theirs, ours in attentions.items():
                    rows = state[f"{old}.{theirs}.in_proj_{kind}"].chunk(3)
                    for letter, row in zip("qkv", rows, strict=True):
                        new[f"{name}.{ours}.{letter}_proj.{kind}"] = row
                    new[f"{name}.{ours}.o_proj.{kind}"] = state[f"{old}.{theirs}.out_proj.{kind}"]
                for number in (1, 2):
                    new[f"{name}.mlp.fc{number}.{kind}"] = state[f"{old}.linear{number}.{kind}"]
                for number, norm in enumerate(norms, start=1):
                    new[f"{name}.{norm}.{kind}"] = state[f"{old}.norm{number}.{kind}"]
    body = "backbone.0.body."
    for old in (name.removeprefix(body) for name in state if name.startswith(body)):
        *path, kind = old.split(".")
        if path[0] in ("conv1", "bn1"):
            name = "embedder.embedder." + ("convolution" if path[0] == "conv1" else "normalization")
        else:
            name = f"encoder.stages.{int(path[0][-1]) - 1}.layers.{path[1]}."
            if path[2] == "downsample":
                name += "shortcut." + ("convolution" if path[3] == "0" else "normalization")
            else:
                name += f"layer.{int(path[2][-1]) - 1}." + (
                    "convolution" if path[2][:-1] == "conv" else "normalization"
                )
        new[f"model.backbone.model.{name}.{kind}"] = state[body + old]
    return new


def their_predictions(model: Any, images: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return logits and boxes after every decoder layer.

    The model's own auxiliary path feeds normalised states to the next layer, which DETR does not.
    """
    hidden: list[Tensor] = []
    decoder = model.model.decoder
    hooks = [layer.register_forward_hook(lambda *call: hidden.append(call[2])) for layer in decoder.layers]
    result = model(pixel_values=images, pixel_mask=mask)
    for hook in hooks:
        hook.remove()
    normed = decoder.layernorm(torch.stack(hidden))
    logits, boxes = model.class_labels_classifier(normed), model.bbox_predictor(normed).sigmoid()
    torch.testing.assert_close(logits[-1], result.logits)
    torch.testing.assert_close(boxes[-1], result.pred_boxes)
    return logits, boxes


@torch.no_grad()
def our_chain(backbone: str, dilation: bool, layers: int, **changes: Any) -> Chain:
    torch.manual_seed(0)
    config = ModelConfig(
        backbone=backbone,
        dilation=dilation,
        encoder_layers=layers,
        decoder_layers=layers,
        hidden_dim=WIDTH,
        feedforward=96,
        queries=QUERIES,
        **changes,
    )
    chain = build_chain(config, CLASSES)
    shake_frozen_norms(chain)
    for address, parameter in chain.named_parameters().items():
        # Zero biases would hide a missing one, even that attention ignores positions and masks.
        if "norm" in address and address.endswith("weight"):
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
        elif parameter.dim() == 1:
            torch.nn.init.uniform_(parameter, -0.2, 0.2)
        elif "in_proj" in address:
            parameter.mul_(3)
    for layer in chain.layers:
        layer.module.eval()
    return chain


@pytest.mark.parametrize(
    ("backbone", "dilation", "changes"),
    [
        ("resnet18", False, {"attention": "sdpa", "heads": "every_decoder"}),
        ("resnet50", False, {"attention": "eager", "cut_points": "heads_last"}),
        ("resnet50", True, {"attention": "sdpa", "cut_points": "paper"}),
    ],
)
@torch.no_grad()
def test_predictions_agree(backbone: str, dilation: bool, changes: dict[str, Any]) -> None:
    layers = 3
    chain = our_chain(backbone, dilation, layers, **changes)
    model = hugging_face_model(backbone, dilation, layers)
    missing, unexpected = model.load_state_dict(renamed(to_reference(chain), layers), strict=False)
    assert unexpected == []
    assert missing == []
    images, mask = torch.zeros(2, 3, 130, 171), torch.zeros(2, 130, 171, dtype=torch.int64)
    sizes = torch.tensor([[130, 97], [70, 171]])
    for image, valid, (height, width) in zip(images, mask, sizes.tolist(), strict=True):
        image[:, :height, :width] = torch.randn(3, height, width)
        valid[:height, :width] = 1
    logits, boxes = their_predictions(model, images, mask)
    outputs = chain.run({"images": images, "sizes": sizes})
    assert logits.std() > 0.1
    assert (logits[:, 0] - logits[:, 1]).abs().max() > 0.01
    torch.testing.assert_close(outputs["logits"], logits, atol=1e-5, rtol=0)
    torch.testing.assert_close(outputs["boxes"], boxes, atol=1e-5, rtol=0)
