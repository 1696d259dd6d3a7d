"""Work of operators on a device, computed by hand."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from varuna_capslog.profiling.estimation.lifetimes import Lifetimes
from varuna_capslog.profiling.estimation.operators import Work, work_of

aten = torch.ops.aten
HALF = torch.bfloat16


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def work(func: object, *arguments: object, halves: tuple[torch.dtype, ...] = (torch.float16, HALF)) -> Work:
    return work_of(func, arguments, {}, func(*arguments), halves)  # type: ignore[operator]


def test_products_are_counted_in_tiles_by_type() -> None:
    fits = work(aten.mm.default, meta(64, 32), meta(32, 96))
    assert fits == {
        "product float32": 2 * 64 * 32 * 96,
        "product bytes": 4 * (64 * 32 + 32 * 96 + 64 * 96),
        "launch": 1,
    }
    assert work(aten.mm.default, meta(1, 1), meta(1, 1))["product float32"] == 2 * 16 * 8 * 16
    assert work(aten.mm.default, meta(1, 1), meta(1, 1), halves=())["product float32"] == 2
    narrow = work(aten.bmm.default, meta(12, 100, 64, dtype=HALF), meta(12, 64, 100, dtype=HALF))
    assert narrow["product half even"] == 12 * 2 * 128 * 64 * 128


def test_products_of_experts_by_the_operator_of_transformers() -> None:
    """Every row meets one expert; the backward makes two such products."""
    pytest.importorskip("transformers.integrations.moe")
    rows, experts, ends = meta(64, 32), meta(4, 32, 96), meta(4, dtype=torch.int32)
    operators = torch.ops.transformers
    forward = work(operators.grouped_mm_fallback.default, rows, experts, ends)
    backward = work(operators.grouped_mm_fallback_backward.default, rows, experts, ends, meta(64, 96))
    assert forward["product float32"] == 2 * 64 * 32 * 96
    assert backward["product float32"] == 2 * forward["product float32"]
    few = work(operators.grouped_mm_fallback.default, meta(3, 32), experts, ends)
    assert few["product bytes"] == 4 * (3 * 32 + 3 * 32 * 96 + 3 * 96) + 4 * 4, "three rows read three experts"


def test_a_vocabulary_that_is_no_multiple_of_eight_is_slow() -> None:
    """GPT-2's head of 50,257 tokens takes seven times as long on an H200 as one of 50,304."""
    for tokens, kind in ((50304, "product half"), (30522, "product half even"), (50257, "product half odd")):
        assert kind in work(aten.mm.default, meta(64, 768, dtype=HALF), meta(768, tokens, dtype=HALF))


def test_tf32_counts_only_where_it_is_allowed() -> None:
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        assert "product tf32" in work(aten.mm.default, meta(64, 64), meta(64, 64))
        assert "product tf32 columns" in work(aten.mm.default, meta(64, 64).t(), meta(64, 64))
    finally:
        torch.set_float32_matmul_precision(before)
    assert "product float32" in work(aten.mm.default, meta(64, 64), meta(64, 64))
    # Volta's tensor cores have no bfloat16
    assert "product float32" in work(
        aten.mm.default, meta(64, 64, dtype=HALF), meta(64, 64, dtype=HALF), halves=(torch.float16,)
    )


def convolution(channels: int, groups: int, window: int = 3) -> tuple[Work, Work]:
    """Return the work of forward and backward for 8 images of 16 x 16."""
    x, w = meta(8, channels, 16, 16), meta(channels, channels // groups, window, window)
    options = [1, 1], [window // 2] * 2, [1, 1], False, [0, 0], groups
    y = aten.convolution.default(x, w, None, *options)
    forward = work(aten.convolution.default, x, w, None, *options, halves=())
    backward = work(aten.convolution_backward.default, y, x, w, None, *options, [True, True, False], halves=())
    return forward, backward


@pytest.mark.parametrize("groups", [1, 4, 32])
def test_a_grouped_backward_is_twice_its_forward(groups: int) -> None:
    """torch's own counter multiplies the gradient of the weights by the groups: ConvNeXt took five times too long."""
    forward, backward = convolution(64, groups)
    assert backward["convolution float32"] == 2 * forward["convolution float32"]
    assert forward["convolution float32"] == 2 * 8 * 64 * 16 * 16 * (64 // groups) * 9
    if groups > 1:
        layer = torch.nn.Conv2d(64, 64, 3, padding=1, groups=groups)
        with FlopCounterMode(display=False) as counted:
            layer(torch.ones(1, 64, 16, 16, requires_grad=True)).sum().backward()
        assert counted.get_total_flops() > 2 * 3 * 64 * 16 * 16 * (64 // groups) * 9  # or torch was mended


def test_depthwise_convolutions_are_their_own_class() -> None:
    forward, backward = convolution(64, 64, 7)
    assert forward["depthwise"] == 2 * 8 * 64 * 256 * 49
    assert backward["depthwise"] == 3 * forward["depthwise"]  # once for the input, twice as long for the weights
    half = aten.convolution.default, meta(8, 64, 16, 16, dtype=torch.float16), meta(64, 1, 3, 3, dtype=torch.float16)
    assert "depthwise cudnn" in work(*half, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 64)


def test_images_are_converted_unless_their_channels_lie_last() -> None:
    options = [1, 1], [1, 1], [1, 1], False, [0, 0], 1
    x, w = meta(8, 64, 16, 16), meta(64, 64, 3, 3)
    assert work(aten.convolution.default, x, w, None, *options)["conversion bytes"] == 2 * 4 * x.numel()
    lying = [tensor.contiguous(memory_format=torch.channels_last) for tensor in (x, w)]
    assert "conversion bytes" not in work(aten.convolution.default, *lying, None, *options)


def test_memory_operators_count_what_they_move_and_their_elements() -> None:
    x = meta(64, 100)
    assert work(aten.add.Tensor, x, x) == {"bytes": 3 * 25600, "launch": 1}
    assert work(aten.add.Tensor, x, meta(100)) == {"bytes": 2 * 25600 + 400, "broadcast": 6400, "launch": 1}
    assert work(aten.clone.default, x.t())["bytes"] == 2 * 25600
    assert work(aten.cat.default, [x, x])["bytes"] == 4 * 25600
    assert work(aten.relu_.default, x) == {"bytes": 2 * 25600, "launch": 1}
    assert work(aten.t.default, x) == {} == work(aten.empty_like.default, x)
    assert work(aten._unsafe_view.default, x, [6400]) == {}
    assert work(aten.zeros_like.default, x) == {"bytes": 25600, "launch": 1} == work(aten.fill_.Scalar, x, 1.0)
    assert work(aten.copy_.default, x, x)["bytes"] == 2 * 25600
    # exchanging moments takes a row's threads as long as 2,000 elements, a sum of squares 300
    assert work(aten.native_layer_norm.default, x, [100], x[0], x[0], 1e-5)["norm"] == 64 * 2100
    assert work(aten.native_layer_norm.default, x, [100], x[0], None, 1e-5)["norm"] == 64 * 400
    assert work(aten._softmax.default, x, -1, False)["softmax"] == 6400
    assert work(aten.embedding.default, x, torch.zeros(7, dtype=torch.long, device="meta"))["bytes"] == 2 * 2800


@pytest.mark.parametrize("name", ["normal_", "log_normal_", "renorm"])
def test_operators_with_norm_in_their_names_are_not_all_norms(name: str) -> None:
    """A model that draws from a normal distribution had no plan: "tuple index out of range"."""
    x, numbers = meta(64, 100), (2.0, 0, 1.0) if name == "renorm" else ()
    assert work(getattr(aten, name).default, x, *numbers) == {"bytes": 2 * 25600, "launch": 1}


def test_an_update_moves_what_its_lists_hold() -> None:
    parameters = [torch.nn.Parameter(torch.ones(1000)) for _ in range(3)]
    for parameter in parameters:
        parameter.grad = torch.ones(1000)
    optimizer = torch.optim.AdamW(parameters, fused=True)
    optimizer.step()
    seen: Work = {}
    with Lifetimes() as lifetimes:
        lifetimes.observer = lambda func, args, kwargs, result: seen.update(
            work_of(func, args, kwargs, result) if "fused" in func.overloadpacket.__name__ else {}
        )
        optimizer.step()
    # parameters and two moments are read and written, gradients read
    assert seen["bytes"] == pytest.approx(7 * 3 * 4000, rel=0.2)
    assert seen["launch"] == 1
    many = [meta(10)] * 300
    assert work_of(aten._foreach_add_.List, [many, many], {}, None)["launch"] == 8  # 900 places, 128 of a launch


def test_attention_counts_half_of_a_causal_matrix_in_blocks() -> None:
    """The blocks on the diagonal, which are masked, count one and a half times."""
    flash = aten._scaled_dot_product_flash_attention.default
    for tokens, part in ((100, 1.0), (256, 1.0), (1024, 5 / 8), (8192, 33 / 64)):
        query, blocks = meta(2, 4, tokens, 64, dtype=HALF), -(-tokens // 128)
        full = work(flash, query, query, query, 0.0, False)
        causal = work(flash, query, query, query, 0.0, True)
        assert full["attention flash"] == 4 * 64 * full["scores"] == 4 * 64 * 2 * 4 * (128 * blocks) ** 2
        assert causal["attention flash"] == part * full["attention flash"]
    narrow = work(flash, *[meta(2, 4, 100, 32, dtype=HALF)] * 3, 0.0, False)
    assert narrow["attention flash"] == 4 * 2 * 4 * 64 * 128 * 128
    efficient = aten._scaled_dot_product_efficient_attention.default
    for keeps in (False, True):  # whether the sums for the backward are computed, which is another argument
        assert (
            work(efficient, query, query, query, None, keeps, 0.0, True)["attention efficient"]
            == part * (work(efficient, query, query, query, None, keeps, 0.0, False)["attention efficient"])
        )


def test_a_likelihood_reads_one_number_of_each_row_and_writes_whole_gradients() -> None:
    logits, target = meta(512, 50257), meta(512, dtype=torch.int64)
    forward = work(aten.nll_loss_forward.default, logits, target, None, 1, -100)
    assert forward["bytes"] <= 512 * 12 + 8
    scalar = torch.empty((), device="meta")
    backward = (aten.nll_loss_backward.default, scalar, logits, target, None, 1, -100, scalar)
    assert work(*backward)["bytes"] == pytest.approx(4 * 512 * 50257, rel=1e-3)
