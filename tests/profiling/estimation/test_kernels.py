"""Table of the bytes that CPU kernels take beside their results, against the allocator's events of this machine's
kernels.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd.profiler import profile

from tests.sweeps import crossed
from varuna_capslog.engine.probe import _allocations
from varuna_capslog.profiling.estimation.quirks import Quirks

aten = torch.ops.aten
SCRATCH = 8192
"""Bytes per call that the table leaves out, besides a hundredth."""

WIDE = "512" in torch.backends.cpu.get_cpu_capability()
PARTS = 1 << 20
"""Most bytes in which a forward makes columns, as counted: the second cache of a core, where it takes its part."""


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def real_peak(call: Callable[[], Any]) -> tuple[int, Any]:
    """Return the most bytes that a call held at once beyond those held before, and its result."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    call()
    with profile(use_kineto=True, use_cpu=True, profile_memory=True) as watched:
        result = call()
    live = peak = 0
    for _, _, size in _allocations(watched.kineto_results.experimental_event_tree()):
        live += size
        peak = max(peak, live)
    return peak, result


def kernel_bytes(func: Any, arguments: tuple[Any, ...], result: Any) -> int:
    return sum(Quirks("cpu").temporary(func, arguments, {}, result))


def check(func: Any, arguments: tuple[Any, ...], more: int = 0) -> None:
    """Compare the table with the allocator; without AVX-512 it may count 2 % or 16 KiB, and `more` bytes, too many."""
    peak, result = real_peak(lambda: func(*arguments))
    parts = [result] if isinstance(result, torch.Tensor) else [part for part in result if part is not None]
    predicted = sum(part.nbytes for part in parts) + kernel_bytes(func, arguments, result)
    most = max(peak / 100, SCRATCH) if WIDE else max(peak / 50, 2 * SCRATCH) + more
    assert -max(peak / 100, SCRATCH) <= predicted - peak <= most


@pytest.mark.parametrize(
    ("x", "weight", "stride", "padding", "dilation", "groups", "bias"),
    [
        # ResNet's: 3x3, strided 3x3, 1x1, strided 1x1, dilated
        ((2, 64, 40, 40), (64, 64, 3, 3), 1, 1, 1, 1, False),
        ((2, 64, 40, 40), (128, 64, 3, 3), 2, 1, 1, 1, False),
        ((1, 256, 64, 64), (64, 256, 1, 1), 1, 0, 1, 1, False),
        ((16, 64, 16, 16), (256, 64, 1, 1), 1, 0, 1, 1, False),
        ((2, 64, 40, 40), (128, 64, 1, 1), 2, 0, 1, 1, False),
        ((1, 256, 32, 32), (512, 256, 1, 1), 2, 0, 1, 1, False),
        ((1, 1024, 16, 16), (2048, 1024, 1, 1), 2, 0, 1, 1, False),
        ((1, 256, 32, 32), (256, 256, 3, 3), 1, 2, 2, 1, False),
        ((4, 512, 3, 3), (512, 512, 3, 3), 1, 1, 1, 1, False),
        # dilated as far as the image, and farther
        ((2, 64, 12, 12), (96, 64, 3, 3), 1, 8, 8, 1, False),
        ((2, 128, 6, 6), (64, 128, 3, 3), 1, 12, 12, 1, False),
        # small ones, which use im2col
        ((1, 64, 8, 8), (64, 64, 3, 3), 1, 1, 1, 1, False),
        ((1, 7, 33, 31), (9, 7, 3, 3), 1, 1, 1, 1, False),
        # channels that fill no block, depthwise, a bias
        ((2, 20, 40, 40), (36, 20, 3, 3), 1, 1, 1, 1, False),
        ((1, 32, 32, 32), (32, 1, 3, 3), 1, 1, 1, 32, False),
        ((1, 2048, 8, 8), (256, 2048, 1, 1), 1, 0, 1, 1, True),
        ((2, 128, 20, 20), (128, 128, 3, 3), 1, 1, 1, 1, True),
    ],
)
def test_convolutions(x, weight, stride, padding, dilation, groups, bias):
    pixels, kernel = torch.randn(x), torch.randn(weight)
    common = ([stride] * 2, [padding] * 2, [dilation] * 2, False, [0, 0], groups)
    columns = PARTS if padding > 2 else 0
    check(aten.convolution.default, (pixels, kernel, torch.randn(weight[0]) if bias else None, *common), columns)
    gradient = torch.randn_like(aten.convolution(pixels, kernel, None, *common))
    sizes = [weight[0]] if bias else None
    check(aten.convolution_backward.default, (gradient, pixels, kernel, sizes, *common, [True, True, bias]))
    check(aten.convolution_backward.default, (gradient, pixels, kernel, sizes, *common, [False, True, bias]))


def test_one_number_of_padding_holds_for_all_sides():
    """As `padding="valid"` arrives, of the towers of SigLIP: estimates for a CPU ended in an error."""
    pixels, kernel, outputs = torch.randn(2, 16, 24, 24), torch.randn(32, 16, 4, 4), []
    for padding in ([0], [0, 0]):
        arguments = (pixels, kernel, None, [4, 4], padding, [1, 1], False, [0, 0], 1)
        outputs.append(kernel_bytes(aten.convolution.default, arguments, aten.convolution(*arguments)))
        check(aten.convolution.default, arguments)
    assert outputs[0] == outputs[1]


def test_the_stem_reads_three_channels_as_they_are():
    pixels, kernel = torch.randn(2, 3, 96, 96), torch.randn(64, 3, 7, 7)
    common = ([2, 2], [3, 3], [1, 1], False, [0, 0], 1)
    check(aten.convolution.default, (pixels, kernel, None, *common))
    gradient = torch.randn(2, 64, 48, 48)
    check(aten.convolution_backward.default, (gradient, pixels, kernel, None, *common, [False, True, False]))


@pytest.mark.parametrize(
    ("x", "weight", "stride", "padding", "groups", "bias"),
    [
        # 3x3, strided, patches, a stem, channels and features that fill no block
        ((2, 64, 8, 8), (128, 64, 3, 3), 1, 1, 1, True),
        ((2, 256, 14, 14), (256, 256, 3, 3), 2, 1, 1, False),
        ((2, 96, 14, 14), (192, 96, 2, 2), 2, 0, 1, True),
        ((2, 3, 32, 32), (64, 3, 4, 4), 4, 0, 1, True),
        ((2, 24, 8, 8), (40, 24, 3, 3), 1, 1, 1, True),
        ((2, 64, 8, 8), (8, 64, 3, 3), 1, 1, 1, True),
        # one element: strided, and of many images
        ((2, 64, 8, 8), (64, 64, 1, 1), 2, 0, 1, True),
        ((20, 64, 8, 8), (64, 64, 1, 1), 1, 0, 1, True),
        # groups; depthwise with and without the fast kernel: too large, all padding
        ((2, 64, 8, 8), (64, 16, 3, 3), 1, 1, 4, True),
        ((2, 384, 4, 4), (384, 1, 3, 3), 1, 1, 384, True),
        ((2, 72, 4, 4), (72, 1, 3, 3), 2, 1, 72, False),
        ((2, 384, 2, 2), (384, 1, 3, 3), 1, 1, 384, True),
        ((2, 128, 14, 14), (128, 1, 7, 7), 1, 3, 128, True),
        ((2, 128, 3, 3), (128, 1, 3, 3), 2, 1, 128, True),
    ],
)
def test_convolutions_of_channels_that_lie_last(x, weight, stride, padding, groups, bias):
    last = torch.channels_last
    pixels, kernel = torch.randn(x).to(memory_format=last), torch.randn(weight)
    common = ([stride] * 2, [padding] * 2, [1, 1], False, [0, 0], groups)
    check(aten.convolution.default, (pixels, kernel, torch.randn(weight[0]) if bias else None, *common))
    gradient = torch.randn_like(aten.convolution(pixels, kernel, None, *common))
    assert gradient.is_contiguous(memory_format=last)
    sizes = [weight[0]] if bias else None
    for mask in ([True, True, bias], [False, True, bias], [True, False, False]):
        check(aten.convolution_backward.default, (gradient, pixels, kernel, sizes, *common, mask))
    plain = gradient.contiguous()
    check(aten.convolution_backward.default, (plain, pixels, kernel, sizes, *common, [True, True, bias]))


@pytest.mark.skipif(WIDE, reason="where oneDNN makes columns differs with AVX-512")
@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last], ids=["planes", "channels last"])
@pytest.mark.parametrize(
    ("x", "weight", "stride", "padding", "dilation"),
    [
        # kernels larger than the image, dilated ones, and so many columns that they are made in parts
        ((4, 48, 4, 4), (48, 48, 5, 5), 1, 2, 1),
        ((8, 256, 16, 16), (32, 256, 3, 3), 1, 2, 2),
        ((1, 256, 40, 40), (32, 256, 5, 5), 1, 4, 2),
        ((32, 64, 14, 14), (24, 64, 3, 3), 2, 2, 2),
        # strided ones, also where steps do not fit into the image
        ((16, 96, 14, 14), (16, 96, 3, 3), 2, 1, 1),
        ((8, 8, 7, 7), (32, 8, 3, 3), 2, 1, 1),
        ((2, 256, 40, 40), (64, 256, 1, 1), 2, 0, 1),
        # groups that fill blocks, and that do not; depthwise; many groups of one element
        ((4, 32, 16, 16), (64, 8, 3, 3), 1, 1, 1),
        ((4, 16, 32, 32), (64, 4, 3, 3), 2, 1, 1),
        ((2, 48, 8, 8), (24, 12, 7, 7), 1, 3, 1),
        ((4, 96, 8, 8), (96, 1, 7, 7), 1, 3, 1),
        ((8, 48, 28, 28), (256, 12, 1, 1), 1, 0, 1),
    ],
)
def test_convolutions_without_avx512(x, weight, stride, padding, dilation, form):
    pixels, kernel = torch.randn(x).to(memory_format=form), torch.randn(weight)
    common = ([stride] * 2, [padding] * 2, [dilation] * 2, False, [0, 0], x[1] // weight[1])
    check(aten.convolution.default, (pixels, kernel, None, *common), PARTS if dilation > 1 else 0)
    gradient = torch.randn_like(aten.convolution(pixels, kernel, None, *common))
    for mask in ([True, True, False], [False, True, False], [True, False, False]):
        check(aten.convolution_backward.default, (gradient, pixels, kernel, None, *common, mask))


@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last], ids=["planes", "channels last"])
def test_a_small_image_alone_has_columns_of_torch_and_weights_that_lie_as_it_does(form):
    pixels, kernel = torch.randn(1, 128, 8, 8).to(memory_format=form), torch.randn(48, 128, 3, 3)
    common = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    assert torch._C._select_conv_backend(pixels, kernel, None, *common, None).name == "Slow2d"
    check(aten.convolution.default, (pixels, kernel, None, *common))
    gradient = torch.randn_like(aten.convolution(pixels, kernel, None, *common))
    for mask in ([True, True, False], [False, True, False]):
        check(aten.convolution_backward.default, (gradient, pixels, kernel, None, *common, mask))


@pytest.mark.parametrize("last", [True, False])
def test_norms_and_upsampling_copy_what_does_not_lie_as_they_need_it(last):
    form = torch.channels_last if last else torch.contiguous_format
    x, scale = torch.randn(2, 64, 24, 24).to(memory_format=form), torch.ones(64)
    _, mean, deviation = aten.native_batch_norm(x, scale, scale, None, None, True, 0.1, 1e-5)
    for gradient in (torch.randn_like(x), torch.randn(1).expand_as(x)):
        for mask in ([True] * 3, [False, True, True]):
            arguments = (gradient, x, scale, None, None, mean, deviation, True, 1e-5, mask)
            check(aten.native_batch_norm_backward.default, arguments)
    rows = torch.randn(2, 256, 64)
    rows = rows if not last else torch.randn(2, 64, 256).transpose(1, 2)
    _, mean, deviation = aten.native_layer_norm(rows, [64], scale, scale, 1e-5)
    check(aten.native_layer_norm.default, (rows, [64], scale, scale, 1e-5))
    for gradient in (torch.randn(2, 256, 64), torch.randn(2, 64, 256).transpose(1, 2)):
        arguments = (gradient, rows, [64], mean, deviation, scale, scale, [True] * 3)
        check(aten.native_layer_norm_backward.default, arguments)
    part = torch.randn(2, 256, 24, 24).to(memory_format=form)[:, 64:128]
    for gradient in (x, part):
        sizes = ([24, 24], [2, 64, 12, 12])
        check(aten.upsample_bilinear2d_backward.default, (gradient, *sizes, False, None, None))
        check(aten.upsample_nearest2d_backward.default, (gradient, *sizes, None, None))


@pytest.mark.parametrize(
    ("sizes", "dtype"),
    crossed([(512, 512, 16), (1024, 1024, 32), (100, 700, 64), (31, 31, 8)], [torch.float32, torch.float16]),
)
@pytest.mark.parametrize("heads_follow_tokens", [True, False])
def test_flash_attention_takes_parts_of_products(sizes, dtype, heads_follow_tokens):
    queries, keys, width = sizes
    query, key, gradient = (
        torch.randn(2, tokens, 4, width).to(dtype).transpose(1, 2) for tokens in (queries, keys, queries)
    )
    gradient = gradient if heads_follow_tokens else gradient.contiguous()
    flash = aten._scaled_dot_product_flash_attention_for_cpu
    check(flash.default, (query, key, key))
    output, sums = flash(query, key, key, is_causal=queries == keys)
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    check(backward, (gradient, query, key, key, output, sums, 0.0, queries == keys))


def test_products_of_float32_pack_nothing():
    check(aten.mm.default, (torch.randn(1024, 256), torch.randn(256, 768)))


@pytest.mark.skipif(
    not torch.cpu._is_amx_tile_supported(), reason="the table's bfloat16 packing holds for processors with AMX tiles"
)
@pytest.mark.parametrize(
    ("func", "shapes", "dtype"),
    [
        (aten.mm.default, [(1024, 256), (256, 768)], torch.bfloat16),
        (aten.mm.default, [(1024, 1024), (1024, 256)], torch.bfloat16),
        (aten.addmm.default, [(256,), (1024, 256), (256, 256)], torch.bfloat16),
        (aten.bmm.default, [(8, 256, 64), (8, 64, 256)], torch.bfloat16),
    ],
)
def test_products_of_bfloat16_pack_one_matrix(func, shapes, dtype):
    check(func, tuple(torch.randn(shape).to(dtype) for shape in shapes))


def test_products_of_bfloat16_pack_nothing_where_onednn_does_not_multiply_them(monkeypatch):
    arguments = (torch.randn(1024, 256).bfloat16(), torch.randn(256, 768).bfloat16())
    result = aten.mm.default(*arguments)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)
    assert kernel_bytes(aten.mm.default, arguments, result) == arguments[1].nbytes + 5 * 1024
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    assert kernel_bytes(aten.mm.default, arguments, result) == 0
    quirks = Quirks("cpu", amx=False, bfloat16=False)
    quirks.temporary(aten.mm.default, arguments, {}, result)
    assert not quirks.limits


@pytest.mark.skipif(torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="oneDNN multiplies them here")
@pytest.mark.parametrize("turned", [False, True])
def test_torchs_own_products_of_16_bits_take_nothing(turned):
    for dtype in (torch.bfloat16, torch.float16):
        first, second = torch.randn(8, 256, 64).to(dtype), torch.randn(8, 64, 256).to(dtype)
        first = first.mT.contiguous().mT if turned else first
        for func, arguments in ((aten.bmm.default, (first, second)), (aten.mm.default, (first[0], second[0]))):
            assert real_peak(lambda f=func, a=arguments: f(*a))[0] == func(*arguments).nbytes
            assert kernel_bytes(func, arguments, func(*arguments)) == 0


@pytest.mark.skipif(
    torch.cpu._is_amx_tile_supported() or not torch.ops.mkldnn._is_mkldnn_bf16_supported(),
    reason="the table holds with AMX tiles, and where torch's own kernels multiply",
)
def test_products_of_bfloat16_without_amx_are_still_beyond_the_table():
    """`LIMITS` names them because of this. If this test fails, the table covers them and may promise their bytes."""
    arguments = (torch.randn(4096, 4096).bfloat16(), torch.randn(4096, 64).bfloat16())
    peak, result = real_peak(lambda: aten.mm.default(*arguments))
    assert peak > 1.1 * (result.nbytes + kernel_bytes(aten.mm.default, arguments, result))


@pytest.mark.parametrize("amx", [True, False])
def test_only_products_of_bfloat16_without_amx_are_a_limit(amx):
    limits = []
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        quirks = Quirks("cpu", amx=amx, bfloat16=True)
        matrix, factor = torch.randn(8, 8).to(dtype), torch.randn(8, 8).to(dtype)
        for func, arguments in ((aten.mm.default, (matrix, factor)), (aten.addmm.default, (matrix, matrix, factor))):
            quirks.temporary(func, arguments, {}, matrix)
        limits.append(quirks.limits)
    assert limits == [set() if amx else {"bfloat16 products on a CPU without AMX"}, set(), set()]


@pytest.mark.skipif(not WIDE, reason="without AVX-512 torch's own kernels convolve bfloat16")
def test_convolutions_of_bfloat16_are_still_beyond_the_table():
    """`LIMITS` names them because of this. If this test fails, the table covers them and may promise their bytes."""
    pixels, kernel = torch.randn(1, 256, 64, 64).bfloat16(), torch.randn(64, 256, 1, 1).bfloat16()
    arguments = (pixels, kernel, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    peak, result = real_peak(lambda: aten.convolution.default(*arguments))
    quirks = Quirks("cpu")
    assert peak > 2 * (result.nbytes + sum(quirks.temporary(aten.convolution.default, arguments, {}, result)))
    assert quirks.limits == {"16-bit convolutions on the CPU"}


def test_other_operators_take_nothing():
    x = torch.randn(4, 4)
    assert kernel_bytes(aten.relu.default, (x,), x) == 0
