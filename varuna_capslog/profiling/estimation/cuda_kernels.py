"""Temporary bytes of CUDA kernels, without their results, from shapes, dtypes and the kind of GPU alone.

`quirks` explains each entry. Buffers of reductions and of embeddings follow torch's source; buffers of attention and
convolutions were read off the allocator of an H200 (torch 2.11, cuDNN 9.19) and are assumed for other kinds of GPU.
`tests/profiling/estimation/test_cuda_kernels.py` compares each buffer with the reading.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from varuna_capslog.base.gpus import Gpu
from varuna_capslog.engine.replicated import norm_in_pieces, piece_of
from varuna_capslog.profiling.estimation.allocator import round_up, rounded

__all__ = ["CUDA_KERNELS", "reduction_blocks"]

_aten = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)

Blocks = tuple[int, ...]
CudaKernel = Callable[[Sequence[Any], Any, Gpu], Blocks]
"""An operator's arguments, its result and the kind of GPU -> the blocks that it holds at once, in bytes."""


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.itemsize


# -- products and softmax


def _unfit(first: Tensor, second: Tensor) -> Blocks:
    """Return copies of matrices that are stored neither by rows nor by columns."""
    return tuple(_size(side) for side in (first, second) if not _fits(side))


def _fits(matrix: Tensor) -> bool:
    rows, columns = matrix.shape[-2:]
    down, across = matrix.stride()[-2:]
    return (across == 1 and down >= max(1, columns)) or (down == 1 and across >= max(1, rows))


def _product_of_softmax(args: Sequence[Any], result: Any, gpu: Gpu) -> Blocks:
    return (int(result.untyped_storage().nbytes()),)


# -- reductions: setReduceConfig and global_memory_size, ATen/native/cuda/Reduce.cuh

_WARP, _MOST_THREADS, _VECTOR = 32, 512, 4
_LEAST_VALUES, _MOST_VALUES = 16, 256


@dataclass
class _Reduction:
    """Split of a reduction in a kernel; a step grows where inputs or outputs are split over threads or blocks."""

    outputs: int
    inputs: int
    step_input: int = 1
    step_output: int = 1

    @property
    def values_per_thread(self) -> int:
        return -(-self.inputs // self.step_input)


def reduction_blocks(x: Tensor, dims: Sequence[int], gpu: Gpu, accumulator: int = 4) -> Blocks:
    """Return bytes of staging buffer and semaphores of a sum over `dims` if several blocks share an output; else ().
    Where outputs lie along the fastest dimension, torch requests a block's width times as much as it uses.
    `accumulator`: bytes of the dtype of the sum.
    """
    reduced = {dim % x.dim() for dim in dims} if x.dim() else set()
    inputs = math.prod(x.shape[dim] for dim in reduced)
    outputs = x.numel() // max(1, inputs)
    if x.numel() == 0 or inputs <= 1:
        return ()
    sizes = [(x.stride(dim), dim) for dim in range(x.dim()) if x.shape[dim] > 1]
    step, fastest = min(sizes)
    along = outputs == 1 or fastest in reduced
    width, height, vector = (inputs, outputs, 1) if along else (outputs, inputs, 1)
    if step == 1 and along and len(sizes) == len(reduced & {dim for _, dim in sizes}) and width > 128:
        width //= _VECTOR
    elif step == 1 and not along:
        others = [size for size, dim in sizes if dim != fastest]
        vector = next(v for v in (4, 2, 1) if all(value % v == 0 for value in (x.shape[fastest], *others)))
        width //= vector
    across, down = _block(width, height, _MOST_THREADS // vector)
    shape = _Reduction(outputs, inputs)
    if along:
        shape.step_input *= across
    else:
        shape.step_output *= across
    if splits := shape.values_per_thread >= min(down * 16, _MOST_VALUES):
        shape.step_input *= down
    else:
        shape.step_output *= down
    blocks = -(-(outputs // vector) // shape.step_output)
    target = gpu.processors * (gpu.threads_per_processor // (across * down))
    values = shape.values_per_thread
    if not (splits and values >= _MOST_VALUES and blocks <= target):
        return ()
    shared = max(min(-(-target // blocks), -(-values // _LEAST_VALUES)), -(-values // _MOST_VALUES))
    if shared <= 1:
        return ()
    return accumulator * outputs * shared * (1 if along else across * vector), 4 * blocks


def _block(width: int, height: int, threads: int) -> tuple[int, int]:
    """Return threads of a block along both dimensions (ReduceConfig.set_block_dimension)."""
    wide, high = (min(threads, 1 << (size.bit_length() - 1)) for size in (width or 1, height or 1))
    across = min(wide, _WARP)
    down = min(high, threads // across)
    return min(wide, threads // down), down


def _reduced(args: Sequence[Any], result: Tensor, gpu: Gpu) -> Blocks:
    x = args[0]
    dims = args[1] if len(args) > 1 and isinstance(args[1], (list, tuple)) and args[1] else range(x.dim())
    staged = reduction_blocks(x, dims, gpu, max(4, result.itemsize))
    if x.dtype == result.dtype or (x.dtype in _HALF and result.dtype == torch.float32):
        return staged
    return (x.numel() * result.itemsize, *staged)


def _normed(args: Sequence[Any], result: Tensor, gpu: Gpu) -> Blocks:
    """Return the blocks of linalg_vector_norm, whose argument for the dimensions comes after the order."""
    x = args[0]
    dims = args[2] if len(args) > 2 and args[2] else range(x.dim())
    return _reduced((x, list(dims)), result, gpu)


def _normed_in_pieces(args: Sequence[Any], result: Tensor, gpu: Gpu) -> Blocks:
    """Return the blocks of one piece, and the bytes of the norms of all pieces."""
    x, size = args[0], piece_of("cuda")
    return *_normed((x[:size],), result, gpu), -(-x.numel() // size) * rounded(1)


def _variance(args: Sequence[Any], result: Any, gpu: Gpu) -> Blocks:
    dims = args[1] if len(args) > 1 and args[1] else range(args[0].dim())
    return reduction_blocks(args[0], dims, gpu, 16)


# -- embeddings

_FEW_INDICES = 3072
_ROWS_OF_A_PART = 10


def _embedding_backward(args: Sequence[Any], result: Tensor, gpu: Gpu) -> Blocks:
    """Return sorted indices, and sums of parts of equal indices (ATen/native/cuda/EmbeddingBackwardKernel.cu)."""
    gradient, indices = args[0], args[1]
    count = indices.numel()
    if count <= _FEW_INDICES:
        return ()
    parts = count // _ROWS_OF_A_PART + min(count, result.shape[0])
    return parts * result.shape[1] * max(4, gradient.itemsize), *(6 * (8 * count,))


# -- attention


def _flash_backward(args: Sequence[Any], result: Any, gpu: Gpu) -> Blocks:
    """Return a float32 gradient of the queries, the row sums of the softmax, and two copies; where heads share keys and
    values, also the gradients of keys and values for each head (mha_bwd, flash_api.cpp).
    """
    query, key = args[1], args[2]
    rows = math.prod(query.shape[:2]) * round_up(query.shape[2], 128)
    of_heads = 2 * (_size(query),) if key.shape[1] < query.shape[1] else ()
    return 4 * rows * round_up(query.shape[3], 32), 4 * rows, _size(query), _size(query), *of_heads


def _efficient_backward(args: Sequence[Any], result: Any, gpu: Gpu) -> Blocks:
    query = args[1]
    rows = math.prod(query.shape[:2]) * round_up(query.shape[2], 128)
    sums = (4 * rows,) if query.dtype in _HALF else (4 * rows, 4 * rows)
    return 4 * rows * round_up(query.shape[3], 64), *sums


def _cudnn_backward(args: Sequence[Any], result: Any, gpu: Gpu) -> Blocks:
    query = args[1]
    return (4 * query.numel() + 4 * math.prod(query.shape[:3]),)


# -- convolutions

_ALIGNED = {4: 4, 2: 8}
"""Channels that matrix units take at once, by bytes of an element."""
_FEW_PIXELS = 1024
_LARGE_SUMS = 2 << 20
_PIXELS_OF_A_PART = 6


def _convolved(args: Sequence[Any], result: Tensor, gpu: Gpu) -> Blocks:
    return (_workspace(args[0], args[1], result, args[3:9]),)


def _convolved_backward(args: Sequence[Any], result: Any, gpu: Gpu) -> Blocks:
    """Return the largest of three successive needs: for the gradients of input, weights and bias."""
    gradient, x, w, mask = args[0], args[1], args[2], args[10]
    of_input = _workspace(x, w, gradient, args[4:10]) if mask[0] else 0
    of_weights = _workspace(x, w, gradient, args[4:10], of_weights=True) if mask[1] else 0
    of_bias = reduction_blocks(gradient, [0, *range(2, gradient.dim())], gpu) if mask[2] else ()
    return max((max(of_input, of_weights),), of_bias, key=sum)


def _workspace(x: Tensor, w: Tensor, y: Tensor, options: Sequence[Any], of_weights: bool = False) -> int:
    """Return bytes for cuDNN's convolution of images: copies in channels last, and partial sums of weight gradients.

    No copies are needed for images in channels last, if a pixel's channels fill 16 bytes; for kernels of one element
    without stride, which are products; and for kernels of one channel, which are torch's.

    options: stride, padding, dilation, transposed or not, padding of the output, groups.
    """
    stride, groups = options[0], options[5]
    if x.dim() != 4 or x.itemsize not in _ALIGNED:
        return 0
    last = x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
    pixels, window = math.prod(y.shape[2:]), math.prod(w.shape[2:])
    if groups > 1 and w.shape[1] == 1:
        spread = of_weights and last and x.itemsize == 4 and window > 25 and pixels > 196
        return 4 * w.numel() * x.shape[0] * pixels // _PIXELS_OF_A_PART if spread else 0
    parts = _parts_bytes(w, x.itemsize) if of_weights else 0
    if window == 1 and groups == 1 and all(step == 1 for step in stride):
        return parts if last or x.shape[0] == 1 else _of_product(x, w, y, pixels, of_weights, parts)
    copies, filled = 0, _ALIGNED[x.itemsize]
    for tensor in (x, y, w):
        channels = tensor.shape[1]
        whole_channels = round_up(channels, filled)
        if not last or whole_channels != channels:
            copies += _size(tensor) // channels * whole_channels
    return copies + parts


def _of_product(x: Tensor, w: Tensor, y: Tensor, pixels: int, of_weights: bool, parts: int) -> int:
    """Return bytes of one-element kernels on several images with the channels first; few pixels use other products.

    Gradients of small weights are summed image by image. Gradients of large weights, and of images that do not fill 16
    bytes, need copies with the channels last, as does the forward with 16 bits and an odd number of pixels.
    """
    odd_halves = x.itemsize == 2 and pixels % 2 == 1
    if not of_weights:
        return _size(x) + _size(y) if odd_halves else 0
    if pixels >= _FEW_PIXELS:
        return parts
    fills = odd_halves or pixels % _ALIGNED[x.itemsize] == 0
    sums = 4 * w.numel()
    return sums * x.shape[0] if fills and sums < _LARGE_SUMS else _size(x) + _size(y)


def _parts_bytes(w: Tensor, itemsize: int) -> int:
    """Return bytes of partial sums of a weight gradient: about a dozen, up to a limit; none of large 16-bit weights."""
    sum_bytes = 4 * w.numel()
    if itemsize == 4:
        return min(14 * sum_bytes, 8 << 20)
    return min(13 * sum_bytes, 9 << 18) if sum_bytes <= 1 << 20 else 0


_ITEMS_OF_REDUCTIONS = dict.fromkeys(
    (_aten.sum.default, _aten.sum.dim_IntList, _aten.mean.default, _aten.mean.dim), _reduced
)

CUDA_KERNELS: dict[Any, CudaKernel] = {
    _aten._softmax_backward_data.default: _product_of_softmax,
    _aten.mm.default: lambda args, result, gpu: _unfit(args[0], args[1]),
    _aten.addmm.default: lambda args, result, gpu: _unfit(args[1], args[2]),
    _aten.bmm.default: lambda args, result, gpu: _unfit(args[0], args[1]),
    _aten.baddbmm.default: lambda args, result, gpu: _unfit(args[1], args[2]),
    **_ITEMS_OF_REDUCTIONS,
    _aten.linalg_vector_norm.default: _normed,
    norm_in_pieces._opoverload: _normed_in_pieces,
    _aten.var.correction: _variance,
    _aten.embedding_dense_backward.default: _embedding_backward,
    _aten._scaled_dot_product_flash_attention_backward.default: _flash_backward,
    _aten._scaled_dot_product_efficient_attention_backward.default: _efficient_backward,
    _aten._scaled_dot_product_cudnn_attention_backward.default: _cudnn_backward,
    _aten.convolution.default: _convolved,
    _aten.convolution_backward.default: _convolved_backward,
}
"""Operator -> its kernel; other operators take no bytes."""
