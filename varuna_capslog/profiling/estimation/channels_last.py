"""Bytes that oneDNN's convolutions take on the CPU where the channels of an image lie together (channels last).

`kernels` calls it. Such images are read as they lie; what is copied are weights, in blocks of channels and features.
The sizes were measured with torch 2.15 (oneDNN 3.13) on AVX-512; `test_kernels` holds them to the allocator.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from varuna_capslog.profiling.estimation.allocator import round_up

__all__ = ["backward_bytes", "forward_bytes"]

_BLOCK = 16
_PAGE = 4096
_FORWARD_SCRATCH, _BACKWARD_SCRATCH = 2 * _PAGE + 24, 2 * _PAGE + 152
_THREADS = 256
"""Sums of the gradient of the weights that the slow depthwise kernel makes, whatever the number of threads."""


def forward_bytes(x: Tensor, w: Tensor, bias: Tensor | None) -> int:
    """Return bytes of weights, as they lie and in blocks, a copy of the bias, and scratch; blocks alone for kernels of
    one element."""
    groups, features = x.shape[1] // w.shape[1], w.shape[0]
    held = 0 if bias is None else features * x.itemsize
    if _depthwise(w, groups):
        return _blocked(w, groups) + held
    if groups > 1:
        return 2 * _bytes(w) + held
    # small blocks of features are joined where there are many
    whole_features = _BLOCK if features <= _BLOCK else round_up(features, 2 * _BLOCK)
    blocks = _bytes(w) // features * whole_features
    return blocks + held + _FORWARD_SCRATCH + (0 if _pointwise(w) else _bytes(w))


def backward_bytes(gradient: Tensor, x: Tensor, w: Tensor, geometry: Sequence[Any], mask: Sequence[bool]) -> int:
    """Return bytes of a backward: first the gradient of the input, from weights in blocks; then that of the weights,
    summed in blocks.

    Args:
        geometry: stride, padding and dilation.
        mask: True for the gradients that are made: of input, weights, bias.
    """
    groups, features = x.shape[1] // w.shape[1], w.shape[0]
    plain, blocks = _bytes(w), _blocked(w, groups)
    results = (plain if mask[1] else 0) + (features * x.itemsize if mask[2] else 0)
    of_input = of_weights = 0
    if mask[0]:
        if _depthwise(w, groups):
            of_input = blocks
        elif groups > 1:
            of_input = 2 * plain
        else:
            channels = w.shape[1] if w.shape[1] % _BLOCK == 0 else round_up(w.shape[1], _BLOCK)
            of_input = plain // w.shape[1] * channels + (0 if _pointwise(w) else plain)
            strided = any(step != 1 for step in geometry[0])
            of_input += (5 + math.ceil(features / _BLOCK)) * _PAGE + 24 if strided else _BACKWARD_SCRATCH
    if mask[1]:
        if not _depthwise(w, groups):
            of_weights = blocks + (1 if _pointwise(w) else 2) * plain
        elif _fast(gradient, x, w, geometry):
            of_weights = blocks + plain
        else:
            of_weights = (_THREADS + 1) * plain
        of_weights += features * x.itemsize if mask[2] else 0
    copied = 0 if gradient.is_contiguous(memory_format=torch.channels_last) else _bytes(gradient)
    # the gradient of the input is there from the beginning, the others once it is made
    return copied + max(0, of_input - results, of_weights)


def _fast(gradient: Tensor, x: Tensor, w: Tensor, geometry: Sequence[Any]) -> bool:
    """Return True where the fast depthwise kernel for weight gradients applies: small, with outputs not all padding."""
    stride, padding, dilation = geometry
    for size, made, kernel, step, before, apart in zip(
        x.shape[2:], gradient.shape[2:], w.shape[2:], stride, padding, dilation, strict=True
    ):
        after = max(0, (made - 1) * step + (kernel - 1) * apart + 1 - size - before)
        if kernel > 3 or made <= before + after:
            return False
    return True


def _blocked(w: Tensor, groups: int) -> int:
    """Return bytes of weights in whole blocks; fewer channels than a block stay as they are."""
    features, channels, *window = w.shape
    cells = math.prod(window) * w.itemsize
    if _depthwise(w, groups):
        return round_up(features, _BLOCK) * cells
    if groups > 1:
        return groups * round_up(channels, _BLOCK) * round_up(features // groups, _BLOCK) * cells
    return (channels if channels < _BLOCK else round_up(channels, _BLOCK)) * round_up(features, _BLOCK) * cells


def _depthwise(w: Tensor, groups: int) -> bool:
    return groups > 1 and w.shape[0] == groups and w.shape[1] == 1


def _pointwise(w: Tensor) -> bool:
    return math.prod(w.shape[2:]) == 1


def _bytes(tensor: Tensor) -> int:
    return int(tensor.numel() * tensor.itemsize)
