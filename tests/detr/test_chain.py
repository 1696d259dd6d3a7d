from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from detr_pipeline.backbone import valid_cells
from detr_pipeline.config import ModelConfig
from detr_pipeline.transformer import Attention, padding_mask, sine_positions
from tests.detr.tiny import CLASSES, tiny_chain, two_sizes
from varuna_capslog.model.chain import TensorSpec
from varuna_capslog.model.trace import ShapeTable, autocast_context


@pytest.mark.parametrize("side", [1, 17, 32, 75])
@pytest.mark.parametrize(
    ("changes", "stride"),
    [
        ({}, 16),
        ({"last_layer": "layer4"}, 32),
        ({"backbone": "resnet50", "last_layer": "layer4", "dilation": True}, 16),
        ({"backbone": "resnet50", "last_layer": "layer3", "dilation": True}, 8),
    ],
)
def test_feature_map_is_the_input_over_the_stride_rounded_up(side: int, changes: dict, stride: int) -> None:
    with torch.device("meta"):
        chain = tiny_chain(**changes)
        values = {"images": torch.empty(1, 3, side, 101), "sizes": torch.ones(1, 2, dtype=torch.int64)}
        for layer in chain.layers:
            values.update(layer(values))
            if "memory" in layer.writes:
                break
    assert values["memory"].shape == (1, math.ceil(side / stride), math.ceil(101 / stride), 32)


@pytest.mark.parametrize("changes", [{}, {"backbone": "resnet50", "last_layer": "layer4", "dilation": True}])
def test_stem_counts_valid_cells_of_the_final_map(changes: dict) -> None:
    chain = tiny_chain(**changes, norm="frozen")
    inputs = two_sizes()
    _, valid = chain.layers[0].module(inputs["images"], inputs["sizes"])
    rows, columns = math.ceil(75 / 16), math.ceil(101 / 16)
    assert valid.tolist() == _reference_valid(inputs["sizes"], (75, 101), (rows, columns))


def _reference_mask(sizes: torch.Tensor, padded: tuple[int, int], cells: tuple[int, int]) -> torch.Tensor:
    """DETR's words: a pixel mask, True where padded, resized by nearest neighbour."""
    mask = torch.ones(len(sizes), *padded, dtype=torch.bool)
    for image, (height, width) in zip(mask, sizes.tolist(), strict=True):
        image[:height, :width] = False
    return F.interpolate(mask[None].float(), size=cells).to(torch.bool)[0]


def _reference_valid(sizes: torch.Tensor, padded: tuple[int, int], cells: tuple[int, int]) -> list[list[int]]:
    mask = ~_reference_mask(sizes, padded, cells)
    return [[int(image[:, 0].sum()), int(image[0].sum())] for image in mask]


@settings(max_examples=40, deadline=None)
@given(
    st.tuples(st.integers(1, 400), st.integers(1, 400)),
    st.sampled_from([8, 16, 32]),
    st.lists(st.tuples(st.floats(0.01, 1), st.floats(0.01, 1)), min_size=1, max_size=3),
)
def test_mask_and_positions_as_in_the_reference(
    padded: tuple[int, int], stride: int, shares: list[tuple[float, float]]
) -> None:
    height, width = (math.ceil(side / stride) for side in padded)
    sizes = torch.tensor([[max(1, round(h * padded[0])), max(1, round(w * padded[1]))] for h, w in shares])
    mask = _reference_mask(sizes, padded, (height, width))
    valid = valid_cells(sizes, padded, (height, width))
    assert torch.equal(padding_mask(valid, height, width).view_as(mask), mask)

    # The encoding in the reference's way: cumulative sums over the mask, one exponent per channel.
    inside = ~mask
    down, across = inside.cumsum(1, dtype=torch.float32), inside.cumsum(2, dtype=torch.float32)
    down = down / (down[:, -1:, :] + 1e-6) * 2 * math.pi
    across = across / (across[:, :, -1:] + 1e-6) * 2 * math.pi
    channel = torch.arange(16, dtype=torch.float32)
    divisor = 10000 ** (2 * (channel // 2) / 16)
    codes = []
    for angle in (down, across):
        scaled = angle[..., None] / divisor
        codes.append(torch.where(channel % 2 == 0, scaled.sin(), scaled.cos()))
    torch.testing.assert_close(sine_positions(valid, height, width, 32)[inside], torch.cat(codes, -1)[inside])


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_attention_is_torchs_own(fused: bool, padded: bool) -> None:
    torch.manual_seed(0)
    ours = Attention(32, 4, 0.0, fused)
    theirs = nn.MultiheadAttention(32, 4, batch_first=True)
    nn.init.uniform_(ours.in_proj_bias)
    theirs.load_state_dict(ours.state_dict())
    query, key, value = torch.randn(2, 5, 32), torch.randn(2, 9, 32), torch.randn(2, 9, 32)
    padding = torch.arange(9) >= torch.tensor([[9], [4]]) if padded else None
    expected, _ = theirs(query, key, value, key_padding_mask=padding)
    torch.testing.assert_close(ours(query, key, value, padding), expected)


def test_eager_and_fused_agree_in_outputs_and_gradients() -> None:
    results = []
    for attention in ("eager", "sdpa"):
        chain = tiny_chain(attention=attention)
        outputs = chain.run(two_sizes())
        (outputs["logits"].square().sum() + outputs["boxes"].sum()).backward()
        results.append((outputs, {name: p.grad for name, p in chain.named_parameters().items()}))
    (eager, eager_gradients), (fused, fused_gradients) = results
    torch.testing.assert_close(eager, fused, atol=1e-5, rtol=1e-4)
    for name, gradient in eager_gradients.items():
        scale = gradient.abs().max()
        assert (gradient - fused_gradients[name]).abs().max() <= 1e-4 * scale + 1e-5, name


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_attention_drops_out_and_keeps_the_mean(attention: str) -> None:
    torch.manual_seed(0)
    layer = Attention(8, 2, 0.5, attention == "sdpa")
    x = torch.randn(1, 6, 8)
    calm = layer.eval()(x, x, x)
    layer.train()
    many = x.expand(4000, -1, -1)
    noisy = layer(many, many, many)
    assert noisy.std(0).min() > 0.01
    torch.testing.assert_close(noisy.mean(0), calm[0], atol=0.05, rtol=0)


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
    assert all(torch.equal(results[0], other) for other in results[1:])
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
    limit = 1 / math.sqrt(64)  # torch's default of a Linear
    assert 0.9 * limit < parameters["heads.class_embed.weight"].abs().max() <= limit


def test_equal_layers_are_traced_once() -> None:
    """A new image size must not cost a trace per layer: nothing in a layer may tell its position."""
    from varuna_capslog.model.trace import layer_signature

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
