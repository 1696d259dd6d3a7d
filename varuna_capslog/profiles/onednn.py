"""Memory that torch's CPU kernels take while they run: oneDNN's copies in layouts of its own, and im2col columns.

`quirks` asks this room; no dispatcher shows such memory. The rules are facts of torch 2.15 on a processor with AVX-512,
read from the allocator's events of single operators; `tests/profiles/test_onednn.py` holds them to the kernels of the
machine it runs on. They name what decides the peak, not every byte: scratch of a few KiB per thread is left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["kernel_bytes"]

_aten = torch.ops.aten
_BLOCK = 16
"""Channels are blocked by so many floats, the width of AVX-512; fewer input channels than that stay as they are."""
_GATHERED = 128
"""Most input channels of a strided 1x1 convolution that its weight gradient gathers at a time."""
_SMALL_BATCH = 16
_SMALL_INPUT = 20480


def kernel_bytes(func: Any, args: Sequence[Any], result: Any, threads: int = 1) -> int:
    """Bytes that a CPU kernel takes beyond its result and gives back, at the moment when both together are most.

    Args:
        func: the operator as the dispatcher shows it, with its arguments and its result.
        threads: of the process; with one, torch takes other kernels for 1x1 convolutions.
    """
    if func is _aten.convolution.default:
        return _convolution(args[0], args[1], result, args[3], args[5], args[6], args[8], threads)
    if func is _aten.convolution_backward.default:
        return _convolution_backward(args, threads)
    if func is _aten.mm.default or func is _aten.bmm.default:
        return _packed(args[0], args[1])
    if func is _aten.addmm.default or func is _aten.baddbmm.default:
        return _packed(args[1], args[2])
    return 0


def _packed(left: Tensor, right: Tensor) -> int:
    """The smaller matrix is copied into the layout of bfloat16 instructions, one of a batch at a time."""
    if left.dtype != torch.bfloat16:
        return 0
    return min(math.prod(side.shape[-2:]) * side.itemsize for side in (left, right))


def _convolution(
    x: Tensor, weight: Tensor, y: Tensor, stride: Any, dilation: Any, transposed: bool, groups: int, threads: int
) -> int:
    if not _by_onednn(x, weight, stride, dilation, groups, threads):
        return 0 if transposed else _columns(x, weight, y)
    if _keeps_layout(x):
        return _blocked(weight, kernel=True)
    # copies of input and weight beside a blocked result, then the blocked result beside the plain one
    copies = _entering(x, groups) + _blocked(weight, kernel=True) + _gathered(weight, y, stride, weight.shape[1])
    blocked = _blocked(y)
    return max(copies + blocked, blocked + y.nbytes) - y.nbytes


def _convolution_backward(args: Sequence[Any], threads: int) -> int:
    grad, x, weight, _, stride, _, dilation, transposed, _, groups, (want_x, want_weight, want_bias) = args
    if not _by_onednn(x, weight, stride, dilation, groups, threads):
        return 0 if transposed else _columns(x, weight, grad)
    kernel = _blocked(weight, kernel=True)
    if _keeps_layout(x):
        return (1 + want_weight) * kernel
    results = want_x * x.nbytes + want_weight * weight.nbytes + want_bias * weight.shape[0] * grad.itemsize
    gradient, entering = _blocked(grad), _blocked(x)
    peak = 0
    if want_x:
        # gradient and weight beside a blocked result, which is then put into the plain layout; where the convolution
        # strides, by way of a third copy
        strided = any(step > 1 for step in stride)
        peak = max(gradient + kernel + entering, entering + x.nbytes + strided * x.nbytes)
    if want_weight:
        before = want_x * x.nbytes
        gathered = _gathered(weight, grad, stride, min(weight.shape[1], _GATHERED))
        peak = max(peak, before + _entering(x, groups) + gradient + kernel + gathered)
        peak = max(peak, before + kernel + weight.nbytes)
    return max(0, peak - results)


def _by_onednn(x: Tensor, weight: Tensor, stride: Any, dilation: Any, groups: int, threads: int) -> bool:
    """torch's choice between oneDNN and its own im2col (aten/src/ATen/native/Convolution.cpp, use_mkldnn)."""
    if x.dtype != torch.float32:
        return True
    kernel = weight.shape[2:]
    plain = all(step == 1 for step in (*stride, *dilation))
    worth = not plain or x.shape[0] >= _SMALL_BATCH or any(side != 1 for side in kernel) or threads > 1
    large = x.shape[0] > 1 or x.numel() > _SMALL_INPUT
    return worth and (groups > 1 or all(side > 3 for side in kernel) or large)


def _columns(x: Tensor, weight: Tensor, y: Tensor) -> int:
    """im2col: for every output pixel the inputs under the kernel; a 1x1 kernel reads its input as it is."""
    if all(side == 1 for side in weight.shape[2:]):
        return 0
    return int(x.shape[0] * math.prod(weight.shape[1:]) * math.prod(y.shape[2:]) * x.itemsize)


def _keeps_layout(x: Tensor) -> bool:
    return x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()


def _gathered(weight: Tensor, y: Tensor, stride: Any, channels: int) -> int:
    """The inputs that a strided 1x1 convolution looks at, put together for one image at a time."""
    if any(side != 1 for side in weight.shape[2:]) or all(step == 1 for step in stride):
        return 0
    return int(channels * math.prod(y.shape[2:]) * y.itemsize)


def _entering(x: Tensor, groups: int) -> int:
    """The blocked copy of an input; one with few channels is read in its own layout."""
    return 0 if x.shape[1] < _BLOCK and groups == 1 else _blocked(x)


def _blocked(tensor: Tensor, kernel: bool = False) -> int:
    """Bytes of images [n, c, h, w] or a kernel [o, i, h, w], channels in whole blocks; too few of a kernel stay."""
    axes = (0, 1) if kernel else (1,)
    sides = [
        -(-size // _BLOCK) * _BLOCK if axis in axes and not (kernel and size < _BLOCK) else size
        for axis, size in enumerate(tensor.shape)
    ]
    return math.prod(sides) * tensor.itemsize
