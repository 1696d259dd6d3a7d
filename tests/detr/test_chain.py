"""The chain of DETR: its layers and cut points, parameters and gradients, and the tensors that cross the cuts."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from detr_pipeline.chain import build_chain, reference_names
from detr_pipeline.config import ModelConfig
from detr_pipeline.transformer import padding_mask
from tests.detr.tiny import CLASSES, tiny_chain, two_sizes
from tests.sweeps import crossed
from varuna_capslog.base.errors import ConfigError
from varuna_capslog.config.reading import section
from varuna_capslog.model.chain import Chain, TensorSpec
from varuna_capslog.model.trace import ShapeTable, autocast_context

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


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("norm", "heads", "attention"),
    [("group", "last", "eager"), ("batch", "every_decoder", "sdpa"), ("frozen", "last", "sdpa")],
)
def test_fake_tensors_tell_what_crosses_and_layers_keep_their_inputs(
    precision: str, norm: str, heads: str, attention: str
) -> None:
    chain = tiny_chain(norm=norm, heads=heads, attention=attention, freeze="stem+layer1", dropout=0.1)
    values = two_sizes()
    table = ShapeTable(chain, "cpu", precision).boundaries({name: TensorSpec.of(v) for name, v in values.items()})
    for index, layer in enumerate(chain.layers):
        before = {name: values[name].detach().clone() for name in layer.reads}
        with autocast_context("cpu", precision):
            written = layer(values)
        for name, tensor in before.items():
            assert torch.equal(values[name], tensor), f"{layer.name} changed {name}"
        values.update(written)
        real = {name: TensorSpec.of(values[name]) for name in chain.crossing(index + 1)}
        assert table[index + 1] == real, layer.name


def test_bfloat16_keeps_residuals_and_boxes_in_float32() -> None:
    chain = tiny_chain()
    values = two_sizes()
    with torch.autocast("cpu", torch.bfloat16):
        for layer in chain.layers:
            values.update(layer(values))
    assert {values[name].dtype for name in ("memory", "hidden", "boxes")} == {torch.float32}


def test_frozen_prefix_gives_no_gradient() -> None:
    for norm in ("group", "batch", "frozen"):
        chain = tiny_chain(norm=norm, freeze="stem+layer1")
        values = two_sizes()
        for layer in chain.layers:
            values.update(layer(values))
            frozen = layer.name in ("backbone.stem", "backbone.layer1.1")
            written = [values[name] for name in layer.writes if values[name].is_floating_point()]
            assert all(tensor.requires_grad != frozen for tensor in written), layer.name
            assert any(p.requires_grad for p in layer.module.parameters()) != frozen, layer.name


@pytest.mark.parametrize("heads", ["last", "every_decoder"])
def test_every_parameter_gets_a_gradient(heads: str) -> None:
    chain = tiny_chain(heads=heads)
    outputs = chain.run(two_sizes())
    (outputs["logits"].square().sum() + outputs["boxes"].square().sum()).backward()
    parameters = chain.named_parameters()
    assert [name for name, p in parameters.items() if p.grad is None] == []
    without = {name for name, p in parameters.items() if not p.grad.any()}
    # Decoding begins with zeros: while biases are zero, the first self-attention mixes nothing.
    assert without == {
        f"decoder.0.{name}" for name in ("self_attn.in_proj_weight", "self_attn.out_proj.weight", "norm1.weight")
    }
    assert chain.named_parameters()["decoder.0.query_embed.weight"].grad.abs().min() > 0


def test_padding_cells_never_reach_the_outputs() -> None:
    chain = tiny_chain()
    values = two_sizes()
    tails = []
    for noise in (0.0, 10.0):
        current = dict(values)
        for layer in chain.layers:
            current.update(layer(current))
            if "projection" in layer.name:
                mask = padding_mask(current["valid"], *current["memory"].shape[1:3]).view(current["memory"].shape[:3])
                assert mask.any()
                current["memory"] = current["memory"] + noise * mask[..., None]
        tails.append((current["logits"], current["boxes"]))
    torch.testing.assert_close(tails[0], tails[1], atol=1e-5, rtol=1e-5)


def test_an_image_does_not_depend_on_its_neighbour() -> None:
    chain = tiny_chain()
    both = two_sizes()
    together = chain.run(both)
    for image in (0, 1):
        alone = chain.run({name: tensor[image : image + 1] for name, tensor in both.items()})
        torch.testing.assert_close(alone["logits"][:, 0], together["logits"][:, image], atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(alone["boxes"][:, 0], together["boxes"][:, image], atol=1e-5, rtol=1e-4)


def test_without_auxiliary_loss_only_the_last_prediction_is_left() -> None:
    full, short = tiny_chain().run(two_sizes()), tiny_chain(auxiliary_loss=False).run(two_sizes())
    assert full["logits"].shape == (3, 2, 7, CLASSES + 1)
    assert short["boxes"].shape == (1, 2, 7, 4)
    torch.testing.assert_close(short["logits"][0], full["logits"][-1], rtol=0, atol=0)


@pytest.mark.parametrize("heads", ["last", "every_decoder"])
def test_one_decoder_layer_is_enough(heads: str) -> None:
    outputs = tiny_chain(decoder_layers=1, heads=heads).run(two_sizes())
    assert outputs["logits"].shape == (1, 2, 7, CLASSES + 1)


def test_zero_sizes_of_a_profiler_stay_finite() -> None:
    inputs = two_sizes() | {"sizes": torch.zeros(2, 2, dtype=torch.int64)}
    assert all(tensor.isfinite().all() for tensor in tiny_chain().run(inputs).values())


def test_equal_seeds_give_equal_weights_however_the_model_is_cut() -> None:
    results = [
        tiny_chain(cut_points=cuts).run(two_sizes())["boxes"]
        for cuts in ("all", "paper", "instage", "heads_last", [], ["encoder.1", "decoder.1"])
    ]
    assert all(torch.equal(results[0], boxes) for boxes in results[1:])
    assert not torch.equal(results[0], tiny_chain(seed=1).run(two_sizes())["boxes"])


def test_initial_weights_follow_the_reference() -> None:
    chain = tiny_chain(hidden_dim=64, feedforward=256, queries=100)
    parameters = chain.named_parameters()
    for name, p in parameters.items():
        matrix = p.dim() == 2 and name.startswith(("encoder", "decoder")) and "query" not in name
        if matrix:
            bound = math.sqrt(6 / (p.shape[0] + p.shape[1]))
            assert 0.95 * bound < p.abs().max() <= bound, name
        if name.endswith(("in_proj_bias", "out_proj.bias")):
            assert not p.any(), name
    assert abs(parameters["decoder.0.query_embed.weight"].std() - 1) < 0.05
    limit = 1 / math.sqrt(64)  # torch's default for a Linear
    assert 0.9 * limit < parameters["heads.class_embed.weight"].abs().max() <= limit


def test_equal_layers_are_traced_once() -> None:
    """A new image size must not cost a trace per layer: nothing in a layer may tell its position."""
    from varuna_capslog.model.signature import layer_signature

    chain = tiny_chain(encoder_layers=4, decoder_layers=4)
    signatures = {layer.name: layer_signature(layer) for layer in chain.layers}
    assert len({signatures[f"encoder.{i}"] for i in range(4)}) == 1
    assert len({signatures[f"decoder.{i}"] for i in range(1, 4)}) == 1


def test_defaults_are_the_references() -> None:
    config = ModelConfig()
    assert (config.backbone, config.norm, config.freeze, config.queries) == ("resnet50", "frozen", "stem+layer1", 100)
    assert (config.hidden_dim, config.attention_heads, config.feedforward, config.dropout) == (256, 8, 2048, 0.1)
    assert (config.cost_class, config.cost_boxes, config.cost_giou) == (1, 5, 2)
    assert (config.loss_class, config.loss_boxes, config.loss_giou, config.no_object) == (1, 5, 2, 0.1)


def shape_of(**changes: Any) -> Chain:
    with torch.device("meta"):
        return build_chain(ModelConfig(**changes), 91)


@pytest.mark.parametrize(("layout", "dilation"), crossed(list(COUNTS), [False, True]))
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
    names = [layer.name for layer in tiny_chain(cut_points="all").layers]
    chain = tiny_chain(cut_points=["backbone.layer2.1", "encoder.0", "decoder.2"])
    assert [layer.name for layer in chain.layers] == [
        "backbone.stem-layer2.0",
        "layer2.1-projection",
        "encoder.0-decoder.1",
        "decoder.2-heads",
    ]
    assert [layer.name for layer in tiny_chain(cut_points=names).layers] == names
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


@pytest.mark.parametrize(
    ("changes", "total"),
    [
        ({"backbone": "resnet50"}, 41_524_768),
        ({"backbone": "resnet101"}, 60_464_672),
        ({"backbone": "resnet101", "encoder_layers": 12}, 68_355_104),
    ],
)
@pytest.mark.parametrize("more", [{}, {"dilation": True}, {"heads": "every_decoder"}, {"cut_points": "paper"}])
def test_parameters_with_92_class_outputs(changes: dict[str, Any], more: dict[str, Any], total: int) -> None:
    """41M, 60M and 68M in CAPSlog's table; exact numbers counted on the published code's model."""
    with torch.device("meta"):
        chain = build_chain(ModelConfig(**changes, **more), 91)
    assert sum(parameter.numel() for parameter in chain.named_parameters().values()) == total


def test_parameters_of_the_parts() -> None:
    with torch.device("meta"):
        chain = build_chain(ModelConfig(), 91)
    trained = [parameter for parameter in chain.named_parameters().values() if parameter.requires_grad]
    assert sum(parameter.numel() for parameter in trained) == 41_302_368
    counts: dict[str, int] = {}
    for address, parameter in chain.named_parameters().items():
        part = "backbone" if "backbone" in address else address
        for name in ("projection", "query_embed", "class_embed", "bbox_embed", "norm.", "encoder", "decoder"):
            if part == address and (f".{name}" in address or address.startswith(name)):
                part = name
        counts[part] = counts.get(part, 0) + parameter.numel()
    assert counts == {
        "backbone": 23_454_912,
        "projection": 524_544,
        "encoder": 7_890_432,
        "query_embed": 25_600,
        "decoder": 9_473_024 - 512,
        "norm.": 512,
        "class_embed": 23_644,
        "bbox_embed": 132_612,
    }
