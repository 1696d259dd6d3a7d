"""Attention, positions, and heads inside every decoder layer, with one set of parameters for all of them."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from detr_pipeline.chain import from_reference, load_into, reference_names, to_reference, valid_cells
from detr_pipeline.loss import set_loss
from detr_pipeline.transformer import Attention, padding_mask, sine_positions
from tests.detr.tiny import normalisers_of, reference_mask, targets_of, tiny_chain, tiny_config, two_sizes

LAYERS = 4


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
    mask = reference_mask(sizes, padded, (height, width))
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


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("padded", [False, True])
def test_attention_is_torchs_own(attention: str, padded: bool) -> None:
    torch.manual_seed(0)
    ours = Attention(32, 4, 0.0, attention)
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
    layer = Attention(8, 2, 0.5, attention)
    x = torch.randn(1, 6, 8)
    calm = layer.eval()(x, x, x)
    layer.train()
    many = x.expand(4000, -1, -1)
    noisy = layer(many, many, many)
    assert noisy.std(0).min() > 0.01
    torch.testing.assert_close(noisy.mean(0), calm[0], atol=0.05, rtol=0)


def test_losses_and_gradients_are_those_of_the_first_chain() -> None:
    config = tiny_config()
    last = tiny_chain(decoder_layers=LAYERS)
    decoder_heads = tiny_chain(seed=1, decoder_layers=LAYERS, heads="every_decoder")
    load_into(decoder_heads, from_reference(decoder_heads, to_reference(last))[0])
    targets = targets_of([3, 2])
    results = []
    for chain in (last, decoder_heads):
        parts = set_loss(chain.run(two_sizes()), targets, normalisers_of(targets, 7), config)
        parts["loss"].backward()
        names = reference_names(chain)
        gradients = {names[address]: p.grad for address, p in chain.named_parameters().items()}
        results.append((parts, gradients))
    (parts, gradients), (decoder_parts, decoder_gradients) = results
    torch.testing.assert_close(decoder_parts, parts, atol=1e-6, rtol=1e-5)
    assert set(gradients) == set(decoder_gradients)
    largest = max(float(gradient.abs().max()) for gradient in gradients.values())
    for name, gradient in gradients.items():
        bound = 1e-5 * max(float(gradient.abs().max()), 1e-3 * largest)
        assert (gradient - decoder_gradients[name]).abs().max() <= bound * 10, name


def test_every_decoder_layer_holds_the_same_parameters() -> None:
    chain = tiny_chain(decoder_layers=LAYERS, heads="every_decoder")
    first = [layer.name for layer in chain.layers].index("decoder.0")
    users = tuple(range(first, first + LAYERS))
    assert len(chain) == first + LAYERS
    assert {shared.name for shared in chain.shared} == {
        f"decoder.0.heads.{name}.{kind}"
        for name in ("norm", "class_embed", *(f"bbox_embed.layers.{index}" for index in range(3)))
        for kind in ("weight", "bias")
    }
    assert all(shared.layers == users for shared in chain.shared)
    assert tiny_chain(decoder_layers=LAYERS).shared == ()


def test_it_has_as_many_parameters_as_the_first_chain() -> None:
    last, decoder_heads = (tiny_chain(decoder_layers=LAYERS, heads=heads) for heads in ("last", "every_decoder"))
    counts = [
        sum(parameter.numel() for parameter in chain.named_parameters().values()) for chain in (last, decoder_heads)
    ]
    assert counts[0] == counts[1]
    assert set(reference_names(decoder_heads).values()) == set(reference_names(last).values())
    assert len(decoder_heads.named_tensors()) > len(reference_names(decoder_heads)) - 1


def test_predictions_gather_along_the_way() -> None:
    chain = tiny_chain(decoder_layers=LAYERS, heads="every_decoder")
    values, seen = two_sizes(), []
    for layer in chain.layers:
        values.update(layer(values))
        if layer.name.startswith("decoder."):
            seen.append((len(values["logits"]), len(values["boxes"]), len(values["hidden"])))
    assert seen == [(1, 1, 1), (2, 2, 1), (3, 3, 1), (4, 4, 1)]
    assert chain.crossing(len(chain) - 1) == ("boxes", "hidden", "logits", "memory", "query", "valid")
