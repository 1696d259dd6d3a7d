"""Counted work of single kernels in seconds, beside what they took on an H200 (benchmarks/gpu_seconds/h200.json)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from varuna_capslog.profiling.estimation.operators import Work
from varuna_capslog.profiling.estimation.rates import speed_of

aten = torch.ops.aten
HALF, FLOAT, LAST = torch.bfloat16, torch.float32, torch.channels_last
Call = tuple[Any, list[Any], Any]
"""An operator, its arguments and its result."""


def meta(*shape: int, dtype: torch.dtype = HALF, last: bool = False) -> Tensor:
    tensor = torch.empty(*shape, dtype=dtype, device="meta")
    return tensor.contiguous(memory_format=LAST) if last else tensor


def of(func: Any, *args: Any) -> Call:
    return func, list(args), func(*args)


def attention(kernel: str, causal: bool, backward: bool = False, dtype: torch.dtype = HALF, width: int = 128) -> Call:
    """Four samples of 2,048 tokens, 32 heads of 128 or 16 of 64."""
    heads = meta(4, 32 if width == 128 else 16, 2048, width, dtype=dtype)
    func = getattr(aten, f"_scaled_dot_product_{kernel}_attention{'_backward' if backward else ''}").default
    sums = meta(*heads.shape[:3], dtype=FLOAT)
    if not backward:
        options = {"flash": [0.0, causal, False], "efficient": [None, True, 0.0, causal]}
        return func, [heads, heads, heads, *options.get(kernel, [None, True, 0.0, causal, False])], [heads, sums]
    options = {
        "flash": [heads, sums, None, None, 2048, 2048, 0.0, causal],
        "efficient": [None, heads, sums, None, None, 0.0, [True, True, True, False], causal],
    }
    return func, [heads] * 4 + options[kernel], [heads] * 3


def grouped(channels: int, groups: int, mask: list[bool] | None = None) -> Call:
    """64 images whose channels lie last, 3 x 3 windows."""
    side = 14 if channels == 512 else 28
    x = meta(64, channels, side, side, dtype=torch.float16, last=True)
    w = meta(channels, channels // groups, 3, 3, dtype=torch.float16, last=True)
    options = [[1, 1], [1, 1], [1, 1], False, [0, 0], groups]
    if mask is None:
        return aten.convolution.default, [x, w, None, *options], x
    return aten.convolution_backward.default, [x, x, w, None, *options, mask], [x]


def images(dtype: torch.dtype = HALF, last: bool = False) -> Tensor:
    return meta(64, 128, 56, 56, dtype=dtype, last=last)


def rows(dtype: torch.dtype = HALF) -> Tensor:
    return meta(16384, 4096, dtype=dtype)


def ids(number: int) -> Tensor:
    return meta(number, dtype=torch.long)


def pooled() -> Call:
    x = images(last=True)
    out, places = aten.max_pool2d_with_indices.default(x, [3, 3], [2, 2], [1, 1])
    return of(aten.max_pool2d_with_indices_backward.default, out, x, [3, 3], [2, 2], [1, 1], [1, 1], False, places)


MEASURED: dict[str, tuple[Callable[[], Call], float]] = {
    "flash": (lambda: attention("flash", False), 791.6),
    "flash, causal": (lambda: attention("flash", True), 480.3),
    "flash, backward": (lambda: attention("flash", False, True), 2603.0),
    "flash, causal, backward": (lambda: attention("flash", True, True), 1587.0),
    "flash, 64 wide": (lambda: attention("flash", False, width=64), 242.9),
    "memory-efficient": (lambda: attention("efficient", False), 1608.0),
    "memory-efficient, causal, backward": (lambda: attention("efficient", True, True), 2963.0),
    "memory-efficient, float32": (lambda: attention("efficient", False, dtype=FLOAT), 6022.0),
    "cuDNN's attention, causal": (lambda: attention("cudnn", True), 257.5),
    "long product": (lambda: of(aten.bmm.default, meta(32, 2048, 2048), meta(32, 2048, 128)), 77.7),
    "flat product": (lambda: of(aten.bmm.default, meta(128, 1024, 64), meta(128, 64, 1024)), 88.5),
    "RMS norm": (lambda: of(aten.native_layer_norm.default, rows(FLOAT), [4096], meta(4096), None, 1e-5), 180.1),
    "layer norm": (lambda: of(aten.native_layer_norm.default, rows(), [4096], meta(4096), meta(4096), 1e-5), 122.8),
    "layer norm of short rows": (
        lambda: of(aten.native_layer_norm.default, meta(128, 197, 768), [768], meta(768), meta(768), 1e-5),
        61.9,
    ),
    "groups of 24 channels": (lambda: grouped(216, 9), 308.1),
    "groups of 24 channels, gradient": (lambda: grouped(240, 10, [True, False, False]), 317.4),
    "groups of 16 channels": (lambda: grouped(512, 32), 22.1),
    "maxima of windows": (
        lambda: of(aten.max_pool2d_with_indices.default, images(), [3, 3], [2, 2], [1, 1]),
        108.1,
    ),
    "maxima of windows, gradient, last": (pooled, 196.4),
    "nearest": (lambda: of(aten.upsample_nearest2d.default, images(), [112, 112], 2.0, 2.0), 257.1),
    "bilinear": (lambda: of(aten.upsample_bilinear2d.default, images(), [112, 112], False, 2.0, 2.0), 3180.0),
    "bilinear of small images": (
        lambda: of(aten.upsample_bilinear2d.default, meta(8, 1024, 14, 14, dtype=FLOAT), [28, 28], False, 2.0, 2.0),
        2007.0,
    ),
    "bilinear, last": (
        lambda: of(aten.upsample_bilinear2d.default, images(last=True), [112, 112], False, 2.0, 2.0),
        918.4,
    ),
    "sum": (lambda: of(aten.sum.default, rows(FLOAT)), 69.4),
    "sum of rows": (lambda: of(aten.sum.dim_IntList, rows(FLOAT), [-1]), 69.2),
    "sum of short rows": (lambda: of(aten.sum.dim_IntList, images(FLOAT), [-1]), 107.3),
    "sum to 768 places": (lambda: of(aten.sum.dim_IntList, meta(25216, 768, dtype=FLOAT), [0]), 48.1),
    "mean of channels": (lambda: of(aten.mean.dim, images(FLOAT), [2, 3]), 27.6),
    "norm in float64": (
        lambda: (aten.linalg_vector_norm.default, [rows(FLOAT)], meta(1, dtype=torch.float64)),
        414.1,
    ),
    "running sums": (lambda: of(aten.cumsum.default, images(), -1), 2775.0),
    "largest": (lambda: of(aten.topk.default, meta(4096, 32000, dtype=FLOAT), 8), 1567.0),
    "embedding": (lambda: of(aten.embedding.default, meta(32000, 2048, dtype=FLOAT), ids(8192)), 37.0),
    "embedding, gradient": (
        lambda: of(aten.embedding_dense_backward.default, meta(8192, 2048), ids(8192), 32000, -1, False),
        403.7,
    ),
    "index put": (
        lambda: of(
            aten.index_put.default, meta(32000, 2048, dtype=FLOAT), [ids(8192)], meta(8192, 2048, dtype=FLOAT), True
        ),
        242.4,
    ),
    "gather": (
        lambda: of(
            aten.gather.default, meta(8192, 2048, dtype=FLOAT), 1, meta(8192, 2048, dtype=torch.long)
        ),
        108.5,
    ),
    "transposed": (lambda: of(aten.clone.default, meta(4096, 16384).t()), 473.1),
    "transposed, rows kept": (lambda: of(aten.clone.default, meta(197, 128, 768).transpose(0, 1)), 48.8),
    "widened": (lambda: of(aten._to_copy.default, rows()), 191.1),
    "filled": (lambda: of(aten.fill_.Scalar, rows(FLOAT), 1.0), 60.5),
    "masked by another shape": (
        lambda: of(aten.masked_fill.Scalar, meta(8, 16, 1024, 1024), meta(1024, 1024, dtype=torch.bool), 0.0),
        515.9,
    ),
    "batch norm with running statistics": (
        lambda: of(
            aten.native_batch_norm.default, images(FLOAT), *[meta(128, dtype=FLOAT)] * 4, False, 0.1, 1e-5
        ),
        74.8,
    ),
}  # fmt: skip
"""Microseconds."""


@pytest.mark.parametrize("name", MEASURED)
def test_kernels_take_what_they_took_on_an_h200(name: str) -> None:
    """Estimates were wrong by up to a hundred times: bilinear interpolation. None is off by more than a third."""
    make, measured = MEASURED[name]
    func, args, result = make()
    if name == "widened":
        result = rows(FLOAT)
    elif name.startswith("transposed"):
        result = result.contiguous()
    speed, work = speed_of("cuda", "h200"), Work()
    speed.count(work, func, args, {}, result)
    seconds = sum(amount * speed.seconds_of[kind] for kind, amount in work.items())
    assert 0.75 < seconds * 1e6 / measured < 4 / 3
