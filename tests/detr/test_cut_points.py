from __future__ import annotations

from typing import Any

import pytest
import torch

from detr_pipeline.chain import build_chain
from detr_pipeline.config import ModelConfig
from detr_pipeline.weights import reference_names
from tests.detr.tiny import tiny_chain
from varuna_capslog.base.errors import ConfigError
from varuna_capslog.config.reading import section
from varuna_capslog.model.chain import Chain

MODELS = {
    "RN50-E6": {"backbone": "resnet50"},
    "RN101-E6": {"backbone": "resnet101"},
    "RN101-E12": {"backbone": "resnet101", "encoder_layers": 12},
}
# CAPSlog's table (heads_last, paper), its text read literally (all), boundaries inside ResNet stages only (instage).
COUNTS = {
    "heads_last": (24, 41, 47),
    "paper": (24, 41, 47),
    "all": (28, 45, 51),
    "instage": (25, 42, 48),
}


def shape_of(**changes: Any) -> Chain:
    with torch.device("meta"):
        return build_chain(ModelConfig(**changes), 91)


@pytest.mark.parametrize("layout", COUNTS)
@pytest.mark.parametrize("dilation", [False, True])
def test_numbers_of_cut_points(layout: str, dilation: bool) -> None:
    chains = [shape_of(**changes, cut_points=layout, dilation=dilation) for changes in MODELS.values()]
    assert tuple(len(chain) - 1 for chain in chains) == COUNTS[layout]


def test_layers_of_the_paper_layout() -> None:
    names = [layer.name for layer in shape_of(cut_points="paper").layers]
    assert names == [
        "backbone.stem-layer1.2",
        *(f"backbone.layer2.{index}" for index in range(3)),
        "backbone.layer2.3-layer3.0",
        *(f"backbone.layer3.{index}" for index in range(1, 5)),
        "backbone.layer3.5-layer4.0",
        "backbone.layer4.1",
        "layer4.2-projection",
        *(f"encoder.{index}" for index in range(6)),
        *(f"decoder.{index}" for index in range(6)),
        "heads",
    ]


def test_heads_last_has_thirteen_backbone_layers_and_no_head_layer() -> None:
    """CAPSlog's Fig. 8: 13 layers on the first GPU, one encoder on each of the next six, six layers on the last."""
    names = [layer.name for layer in shape_of(cut_points="heads_last").layers]
    assert names[12:14] == ["layer4.2-projection", "encoder.0"]
    assert names[-1] == "decoder.5-heads"
    assert names[2] == "backbone.layer1.2-layer2.0"


def test_a_list_cuts_before_the_named_layers() -> None:
    every = [layer.name for layer in tiny_chain(cut_points="all").layers]
    chain = tiny_chain(cut_points=["backbone.layer2.1", "encoder.0", "decoder.2"])
    assert [layer.name for layer in chain.layers] == [
        "backbone.stem-layer2.0",
        "layer2.1-projection",
        "encoder.0-decoder.1",
        "decoder.2-heads",
    ]
    assert [layer.name for layer in tiny_chain(cut_points=every).layers] == every
    assert len(tiny_chain(cut_points=[])) == 1


def test_an_unknown_name_in_the_list_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"'encodr\.1'.*did you mean 'encoder\.1'"):
        tiny_chain(cut_points=["encodr.1"])
    with pytest.raises(ConfigError, match=r"'projection', which this model has not"):
        tiny_chain(cut_points=["projection"])


@pytest.mark.parametrize("layout", [*COUNTS, ["backbone.layer2.0", "encoder.1"], []])
def test_addresses_say_backbone_where_and_only_where_it_is(layout: Any) -> None:
    """Learning rates are chosen by that word."""
    for address, reference in reference_names(tiny_chain(cut_points=layout)).items():
        assert ("backbone" in address) == reference.startswith("backbone."), address


def test_little_crosses_the_cuts() -> None:
    chain = shape_of(cut_points="all")
    crossing = [chain.crossing(cut) for cut in range(len(chain) + 1)]
    assert crossing[0] == ("images", "sizes")
    assert set(crossing[1:16]) == {("valid", "x")}
    assert set(crossing[16:23]) == {("memory", "valid")}
    assert set(crossing[23:28]) == {("hidden", "memory", "query", "valid")}
    assert crossing[28:] == [("hidden",), ("boxes", "logits")]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"backbon": "resnet18"}, r"model\.backbon is not a known key; did you mean model\.backbone\?"),
        ({"backbone": "vgg"}, r"model\.backbone"),
        ({"backbone": "resnet18", "dilation": True}, r"model\.dilation=true needs bottleneck"),
        ({"attention_heads": 7}, r"model\.attention_heads=7 does not divide model\.hidden_dim=256"),
        ({"heads": "every_decoder", "auxiliary_loss": False}, r"model\.auxiliary_loss=false forbids"),
        ({"cost_class": 0, "cost_boxes": 0, "cost_giou": 0}, r"are all 0"),
        ({"dropout": 1.0}, r"model\.dropout"),
        ({"cut_points": "some"}, r"model\.cut_points"),
    ],
)
def test_wrong_keys_and_values_are_one_sentence(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        section(ModelConfig, values, "model")
