from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torchvision.models import resnet18

from detr_pipeline.chain import (
    build_chain,
    from_reference,
    load_into,
    reference_names,
    to_reference,
)
from detr_pipeline.config import ModelConfig
from tests.detr.tiny import shake_frozen_norms, tiny_chain, two_sizes
from tests.sweeps import crossed
from varuna_capslog.model.state_file import read_state_file


def shapes_of(**changes: Any) -> dict[str, list[int]]:
    with torch.device("meta"):
        chain = build_chain(ModelConfig(**changes), 91)
    state = chain.named_tensors()
    return {name: list(state[address].shape) for address, name in reference_names(chain).items()}


@pytest.mark.parametrize(
    ("backbone", "tensors", "elements"), [("resnet50", 458, 41_631_008), ("resnet101", 713, 60_675_360)]
)
@pytest.mark.parametrize("layout", [{}, {"cut_points": "paper"}, {"cut_points": []}, {"heads": "every_decoder"}])
def test_layout_has_as_many_tensors_as_the_published_files(
    backbone: str, tensors: int, elements: int, layout: dict[str, Any]
) -> None:
    shapes = shapes_of(backbone=backbone, **layout)
    assert len(shapes) == tensors
    assert sum(torch.Size(shape).numel() for shape in shapes.values()) == elements


def test_names_and_shapes_of_the_published_r50_file() -> None:
    expected: dict[str, list[int]] = {}
    for part, attentions, norms in (("encoder", ["self_attn"], 2), ("decoder", ["self_attn", "multihead_attn"], 3)):
        for index in range(6):
            layer = f"transformer.{part}.layers.{index}"
            for attention in attentions:
                expected |= {
                    f"{layer}.{attention}.in_proj_weight": [768, 256],
                    f"{layer}.{attention}.in_proj_bias": [768],
                }
                expected |= {
                    f"{layer}.{attention}.out_proj.weight": [256, 256],
                    f"{layer}.{attention}.out_proj.bias": [256],
                }
            expected |= {f"{layer}.linear1.weight": [2048, 256], f"{layer}.linear1.bias": [2048]}
            expected |= {f"{layer}.linear2.weight": [256, 2048], f"{layer}.linear2.bias": [256]}
            for norm in range(1, norms + 1):
                expected |= {f"{layer}.norm{norm}.weight": [256], f"{layer}.norm{norm}.bias": [256]}
    expected |= {"transformer.decoder.norm.weight": [256], "transformer.decoder.norm.bias": [256]}
    expected |= {"class_embed.weight": [92, 256], "class_embed.bias": [92], "query_embed.weight": [100, 256]}
    for index, outputs in enumerate((256, 256, 4)):
        expected |= {f"bbox_embed.layers.{index}.weight": [outputs, 256], f"bbox_embed.layers.{index}.bias": [outputs]}
    expected |= {"input_proj.weight": [256, 2048, 1, 1], "input_proj.bias": [256]}
    body = "backbone.0.body."
    expected[body + "conv1.weight"] = [64, 3, 7, 7]

    def norm_of(name: str, channels: int) -> None:
        for entry in ("weight", "bias", "running_mean", "running_var"):
            expected[f"{body}{name}.{entry}"] = [channels]

    norm_of("bn1", 64)
    before = 64
    for stage, blocks in enumerate((3, 4, 6, 3), start=1):
        width = 32 * 2**stage
        for block in range(blocks):
            name = f"layer{stage}.{block}"
            kernels = ([width, before, 1, 1], [width, width, 3, 3], [4 * width, width, 1, 1])
            for index, kernel in enumerate(kernels, start=1):
                expected[f"{body}{name}.conv{index}.weight"] = kernel
                norm_of(f"{name}.bn{index}", kernel[0])
            if block == 0:
                expected[f"{body}{name}.downsample.0.weight"] = [4 * width, before, 1, 1]
                norm_of(f"{name}.downsample.1", 4 * width)
            before = 4 * width
    assert shapes_of() == expected


@pytest.mark.parametrize(
    ("norm", "changes"), crossed(["frozen", "batch", "group"], [{"cut_points": "paper"}, {"heads": "every_decoder"}])
)
def test_a_file_gives_another_chain_the_same_outputs(tmp_path: Path, norm: str, changes: dict[str, Any]) -> None:
    source, target = tiny_chain(seed=0, norm=norm), tiny_chain(seed=1, norm=norm, **changes)
    shake_frozen_norms(source)
    torch.save({"model": to_reference(source)}, tmp_path / "weights.pth")
    tensors, skipped = from_reference(target, read_state_file(tmp_path / "weights.pth"))
    assert skipped == []
    load_into(target, tensors)
    for chain in (source, target):
        for layer in chain.layers:
            layer.module.eval()
    expected, outputs = source.run(two_sizes()), target.run(two_sizes())
    torch.testing.assert_close(outputs, expected, atol=1e-5, rtol=1e-5)


def test_both_directions_undo_each_other() -> None:
    chain = tiny_chain(norm="frozen")
    reference = to_reference(chain)
    tensors, skipped = from_reference(chain, reference)
    assert skipped == []
    assert {address: tensor.data_ptr() for address, tensor in tensors.items()} == {
        address: tensor.data_ptr() for address, tensor in chain.named_tensors().items()
    }


def test_panoptic_files_lose_their_prefix_and_mask_heads() -> None:
    chain = tiny_chain(norm="frozen")
    state = {f"detr.{name}": tensor for name, tensor in to_reference(chain).items()}
    state["mask_head.lay1.weight"] = torch.zeros(3)
    tensors, skipped = from_reference(chain, state)
    assert set(tensors) == set(chain.named_tensors())
    assert skipped == ["mask_head.lay1.weight: no place in the model"]


def test_heads_for_other_classes_are_skipped_and_listed() -> None:
    torch.manual_seed(0)
    config = ModelConfig(backbone="resnet18", hidden_dim=32, feedforward=32, encoder_layers=1, decoder_layers=1)
    with torch.device("meta"):
        chain = build_chain(config, 3)
    tensors, skipped = from_reference(chain, to_reference(build_chain(config, 91)))
    assert skipped == [
        "class_embed.weight: [92, 32] in the file, [4, 32] in the model",
        "class_embed.bias: [92] in the file, [4] in the model",
    ]
    assert set(chain.named_tensors()) - set(tensors) == {"heads.class_embed.weight", "heads.class_embed.bias"}


def test_a_torchvision_backbone_fills_the_backbone() -> None:
    torch.manual_seed(5)
    network = resnet18()
    chain = tiny_chain(norm="frozen", last_layer="layer4")
    tensors, skipped = from_reference(chain, network.state_dict())
    assert skipped == []
    load_into(chain, tensors)
    state, names = chain.named_tensors(), reference_names(chain)
    filled = {names[address].removeprefix("backbone.0.body."): state[address] for address in tensors}
    expected = {n: t for n, t in network.state_dict().items() if not n.startswith("fc.") and "num_batches" not in n}
    assert set(filled) == set(expected)
    assert all(torch.equal(filled[name], expected[name]) for name in expected)


def test_entries_the_file_lacks_are_listed() -> None:
    chain = tiny_chain(norm="frozen")
    state = to_reference(chain)
    del state["query_embed.weight"]
    assert from_reference(chain, state)[1] == ["query_embed.weight: not in the file"]
