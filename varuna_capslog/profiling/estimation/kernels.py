"""Temporary bytes of torch's CPU kernels, without their results, from shapes alone.

`quirks` explains each entry and gives its source. Most of this file is about the layouts in which oneDNN convolves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from varuna_capslog.engine.replicated import norm_in_pieces, piece_of
from varuna_capslog.profiling.estimation.allocator import round_up

__all__ = ["KERNELS"]


# -- Sizes of oneDNN's convolutions on the CPU, with AVX-512 ("wide") and without ("narrow").
#
# Measured with torch 2.15 (oneDNN 3.13) on AVX-512 and torch 2.14 (oneDNN 3.12) without; where sizes are known from
# oneDNN's source, its file is named. `test_kernels` compares them with the allocator.


_WIDE, _NARROW = 16, 8
_PAGE = 4096


def _block_channels() -> int:
    """Return the channels in a block of oneDNN's layout: the float32 numbers of one register of this processor."""
    return _WIDE if "512" in torch.backends.cpu.get_cpu_capability() else _NARROW


class _Side(NamedTuple):
    """Height or width of a convolution. size, made, kernel: elements of image, output and kernel. step: the
    stride. before: the padding. apart: the dilation.
    """

    size: int
    made: int
    kernel: int
    step: int
    before: int
    apart: int

    @property
    def extent(self) -> int:
        """Elements from the first that the kernel reads to the last."""
        return (self.kernel - 1) * self.apart + 1

    @property
    def behind(self) -> int:
        """Padding behind the image."""
        return (self.made - 1) * self.step + self.extent - self.size - self.before

    @property
    def is_outside(self) -> bool:
        """True where the kernel lies in the padding as a whole at some place."""
        return self.extent <= max(self.before, self.behind)

    @property
    def is_small(self) -> bool:
        """True where a fast kernel makes depthwise gradients of weights: few elements, less padding than output."""
        return self.kernel <= 3 and self.made > self.before + max(0, self.behind)


class _ByColumns(NamedTuple):
    """Parts of a convolution that oneDNN makes by products with a matrix of columns."""

    forward: bool = False
    of_input: bool = False
    of_weights: bool = False


class _Convolution:
    """Sizes of one convolution in bytes: plain, in the layout for oneDNN (taken), and padded to blocks of channels."""

    def __init__(self, x: Tensor, w: Tensor, spatial: Sequence[int], options: Sequence[Any]) -> None:
        """Compute the sizes; spatial: shape of the output; options: as in `_backend`."""
        groups = options[-1]
        block, size = _block_channels(), x.itemsize
        batch, channels, features = x.shape[0], x.shape[1], w.shape[0]
        cells_in, cells_out, window = math.prod(x.shape[2:]), math.prod(spatial), math.prod(w.shape[2:])
        whole_channels, whole_features = round_up(channels, block), round_up(features, block)
        self.image, self.weights = x, w
        self.cells, self.block, self.groups = cells_out, block, groups
        # padding="valid" arrives as one number for all sides
        of_sides = [list(option) * (1 if len(option) > 1 else len(spatial)) for option in options[:3]]
        self.sides = sides = [
            _Side(*numbers) for numbers in zip(x.shape[2:], spatial, w.shape[2:], *of_sides, strict=True)
        ]
        self.aligned = channels % block == 0 and features % block == 0
        self.narrow = channels < block
        self.x, self.w, self.y = (part * size for part in (x.numel(), w.numel(), batch * features * cells_out))
        self.x_padded = self.x_taken = batch * whole_channels * cells_in * size
        self.y_taken = batch * whole_features * cells_out * size
        self.w_padded = self.w if groups > 1 else whole_channels * whole_features * window * size
        self.w_taken = self.w_padded
        if self.narrow and not self.pointwise:
            # images of up to three channels are not copied; images of few channels are copied without padding
            self.x_taken = 0 if channels < 4 else self.x
            if groups == 1:
                self.w_taken = channels * whole_features * window * size
        self.columns = 0 if self.pointwise and not self.strided else channels * window * cells_out * size
        # where the stride divides the input, a kernel of one element first gathers the elements that it reads
        divides = all(side.size == side.made * side.step for side in sides)
        self.sampled = self.sampled_part = self.scratch = 0
        if self.pointwise and self.strided and divides:
            self.sampled = whole_channels * cells_out * size + 128
            self.sampled_part = min(whole_channels, 8 * block) * cells_out * size + 128
        if self.strided and block == _WIDE:
            self.scratch = self.y_taken // batch * (spatial[-1] + w.shape[-1]) // spatial[-1] + _SCRATCH
        elif self.strided and not self.depthwise:
            # one gradient with as many more rows and columns as the kernel reaches, and more where steps do not fit
            image = math.prod(side.made + (side.kernel - 1) // side.step for side in sides) * features * size
            uneven = any(side.size % side.step for side in sides)
            self.scratch = round_up(image, 4 * _PAGE) + (10 if uneven else 5) * _PAGE + 24

    @property
    def pointwise(self) -> bool:
        """True for a kernel of one element."""
        return all(side.kernel == 1 for side in self.sides)

    @property
    def strided(self) -> bool:
        """True where any step is larger than 1."""
        return any(side.step != 1 for side in self.sides)

    @property
    def dilated(self) -> bool:
        """True where the kernel's elements lie apart."""
        return any(side.apart != 1 for side in self.sides)

    @property
    def depthwise(self) -> bool:
        """True where each channel is a group, with one feature."""
        return self.groups > 1 and self.weights.shape[:2] == (self.groups, 1)

    @property
    def lies_last(self) -> bool:
        """True where the channels of the image lie together."""
        return not self.image.is_contiguous()

    @cached_property
    def by_columns(self) -> _ByColumns:
        """Parts of this convolution that oneDNN makes from columns."""
        sides = self.sides
        if self.pointwise and self.groups == 1:
            return _ByColumns()
        if self.block == _WIDE:  # dilated kernels that lie mostly in the padding
            spread = self.dilated and self.groups == 1
            beyond_input = spread and any(side.size < side.before for side in sides)
            beyond_output = spread and any(side.made <= 2 * side.before for side in sides)
            return _ByColumns(beyond_input, beyond_input, beyond_output)
        # without AVX-512: init_conf in oneDNN's jit_avx2_conv_kernel_f32.cpp and jit_uni_dw_conv_kernel_utils.hpp
        height, width = sides
        exceeds = height.kernel > height.size
        if self.depthwise:
            return _ByColumns(of_weights=exceeds if self.lies_last else not all(side.is_small for side in sides))
        channels, features = self.weights.shape[1], self.weights.shape[0] // self.groups
        if self.groups > 1 and not self.lies_last and (channels % _NARROW or features % _NARROW):
            return _ByColumns(True, not self.strided, True)
        outside = any(side.is_outside for side in sides)
        forward = outside or width.before > min(3, width.made)
        forward = forward or (width.kernel > 7 and self.strided and any(side.before for side in sides))
        of_weights = outside or self.dilated or exceeds or width.kernel >= 14 or (self.groups > 1 and channels == 3)
        return _ByColumns(forward, outside or (self.dilated and self.strided), of_weights)

    @property
    def room(self) -> int:
        """Most bytes of scratch for a backward (scratchpad_limit in oneDNN's gemm_convolution_utils.cpp)."""
        return min(_MOST_SCRATCH, 15 * (self.x + self.w + self.y))

    def copied(self, parts: int, whole: int) -> int:
        """Return the bytes of torch's own kernel beside the columns: for several groups `parts` where those of a group
        do not lie in one piece, else `whole`; for one group the weights, where they do not lie as the image does.
        """
        if self.groups == 1:
            return self.w if self.lies_last and not self.pointwise else 0
        return parts if self.lies_last or self.image.shape[0] > 1 else whole

    def columns_at_once(self, beside: int, share: float) -> int:
        """Return the bytes of the columns that a backward makes at a time: all, or `share` of those for which there is
        room. beside: bytes of other scratch.
        """
        room, columns = self.room - beside, self.columns // self.groups
        if columns <= room:
            return columns
        column = columns // self.cells
        return column * max(self.block, int(room // column * share))

    def whole_features(self) -> int:
        """Return the features of a group in whole blocks, as of the weights of a forward."""
        features = self.weights.shape[0] // self.groups
        if self.block == _NARROW:
            return _in_registers(features)
        return _WIDE if features <= _WIDE else round_up(features, 2 * _WIDE)

    def whole_channels(self) -> int:
        """Return the channels of a group in whole blocks, as of the weights for the gradient of the input."""
        channels = self.weights.shape[1]
        return round_up(channels, _WIDE) if self.block == _WIDE else _in_registers(channels)

    def blocked(self) -> int:
        """Return bytes of weights in whole blocks; fewer channels than a block are not padded."""
        block, groups = self.block, self.groups
        features, channels, *window = self.weights.shape
        cells = math.prod(window) * self.weights.itemsize
        if self.depthwise:
            return round_up(features, block) * cells
        if groups > 1:
            return groups * round_up(channels, block) * round_up(features // groups, block) * cells
        return (channels if channels < block else round_up(channels, block)) * round_up(features, block) * cells


def _in_registers(count: int) -> int:
    """Return channels or features in whole blocks without AVX-512."""
    if count <= 2 * _NARROW:
        return round_up(count, _NARROW)
    # of three or four registers; where they differ little a score decides, and the larger number is counted
    fewer, more = sorted(round_up(count, number * _NARROW) for number in (3, 4))
    return more if 8 * more <= 9 * fewer else fewer


_SCRATCH = 40 << 10
_MOST_SCRATCH = 1 << 30
_INPUT_SHARE, _WEIGHTS_SHARE = 0.1, 0.05
_CACHE = 1 << 20
"""Bytes of a core's second cache, as assumed: a forward makes its columns in parts that lie there."""
_SMALL_BATCH = 16
"""Number of images from which on oneDNN also computes kernels of one element; with fewer images it does so only with
several threads, and workers have one thread (use_mkldnn, ATen/native/Convolution.cpp)."""


def _bytes(tensor: Tensor) -> int:
    return int(tensor.numel() * tensor.itemsize)


# -- Bytes that oneDNN's convolutions take on the CPU where the channels of an image lie together (channels last).
#
# Such images are not copied; weights are, in blocks of channels and features.


_FORWARD_SCRATCH, _BACKWARD_SCRATCH = 2 * _PAGE + 24, 2 * _PAGE + 152


def forward_bytes(c: _Convolution, bias: Tensor | None) -> int:
    """Return bytes of weights, plain (not for kernels of one element) and blocked, of a bias copy, and of scratch."""
    held = 0 if bias is None else _bytes(bias)
    if c.depthwise:
        return c.blocked() + held
    if c.groups > 1 and c.block == _WIDE:
        return 2 * c.w + held
    blocks = c.w // (c.weights.shape[0] // c.groups) * c.whole_features()
    return blocks + held + _FORWARD_SCRATCH + (0 if c.pointwise else c.w)


def backward_bytes(c: _Convolution, gradient: Tensor, mask: Sequence[bool]) -> int:
    """Return bytes of a backward: first the gradient of the input, from weights in blocks; then the gradient of the
    weights, summed in blocks. mask: True for the gradients that are made: of input, weights, bias.
    """
    groups, features, channels = c.groups, *c.weights.shape[:2]
    plain, blocks = c.w, c.blocked()
    of_bias = features * c.weights.itemsize if mask[2] else 0
    results = (plain if mask[1] else 0) + of_bias
    of_input = of_weights = 0
    if mask[0]:
        if c.depthwise:
            of_input = blocks
        elif groups > 1 and c.block == _WIDE:
            of_input = 2 * plain
        else:
            of_input = plain // channels * c.whole_channels() + (0 if c.pointwise else plain)
            if not c.strided:
                of_input += _BACKWARD_SCRATCH
            elif c.block == _WIDE:
                of_input += (5 + math.ceil(features / _WIDE)) * _PAGE + 24
            else:
                of_input += c.columns // groups if c.by_columns.of_input else c.scratch
    if mask[1]:
        by_columns = 4 * plain + (c.columns + c.x // c.image.shape[0]) // groups
        if c.block == _NARROW and c.by_columns.of_weights and by_columns <= c.room:
            of_weights = plain + by_columns
        elif c.depthwise:
            of_weights = blocks + plain if all(side.is_small for side in c.sides) else (c.block**2 + 1) * plain
        else:
            of_weights = blocks + (1 if c.pointwise else 2) * plain
            if c.block == _NARROW:
                of_weights = max(of_weights, blocks + c.sampled - plain)
        of_weights += of_bias
    copied = 0 if gradient.is_contiguous(memory_format=torch.channels_last) else _bytes(gradient)
    # the result for the input's gradient exists from the beginning, the other results once that gradient is computed
    return copied + max(0, of_input - results, of_weights)


# -- all other kernels of torch on a CPU


_aten = torch.ops.aten


def _converted(args: Sequence[Any], result: Tensor) -> int:
    x = args[0]
    return 0 if x.dtype == result.dtype else int(x.numel() * result.itemsize)


def _normed_in_pieces(args: Sequence[Any], result: Tensor) -> int:
    """Return bytes of the norms of all pieces, with the copy of the last whole piece or the stacked norms."""
    x, size = args[0], result.itemsize
    whole, remainder = divmod(x.numel(), piece_of("cpu"))
    copied = 0 if x.dtype == result.dtype else piece_of("cpu") * size
    return max(whole * size + copied, 2 * (whole + bool(remainder)) * size + size) - size


def _unfit(first: Tensor, second: Tensor) -> int:
    return sum(side.numel() * side.itemsize for side in (first, second) if not _fits(side))


def _fits(matrix: Tensor) -> bool:
    rows, columns = matrix.shape
    down, across = matrix.stride()
    return (across == 1 and down >= max(1, columns)) or (down == 1 and across >= max(1, rows))


def _packed(first: Tensor, second: Tensor) -> int:
    if first.dtype != torch.bfloat16 or not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return 0
    smaller = min(math.prod(side.shape[-2:]) * side.itemsize for side in (first, second))
    return smaller + (_PANEL if first.is_contiguous() else _TRANSPOSED_PANEL)


def _packed_batch(first: Tensor, second: Tensor) -> int:
    if first.dtype != torch.bfloat16:
        return 0
    # matrices stored neither by rows nor by columns are copied whole
    spread = (side for side in (first, second) if not (side.is_contiguous() or side.mT.is_contiguous()))
    return _packed(first, second) + sum(side.numel() * side.itemsize for side in spread)


_PANEL, _TRANSPOSED_PANEL = 5 << 10, 104 << 10
"""Bytes for a few rows; for more rows where the first matrix is transposed, as in gradients of weights."""


def _promoted(args: Sequence[Any], result: Tensor) -> int:
    tensors = [value for value in args if isinstance(value, Tensor) and value.dim()]
    if len(tensors) < 2 or tensors[0].dtype == tensors[1].dtype:
        return 0
    common = torch.promote_types(tensors[0].dtype, tensors[1].dtype)
    return sum(tensor.numel() * common.itemsize for tensor in tensors if tensor.dtype != common)


def _forward(args: Sequence[Any], result: Tensor) -> int:
    """Return bytes of a forward: copies of input and weights, and the blocked output until the plain output is made."""
    x, w, _, *options = args[:9]
    backend = _backend(x, w, options)
    if backend is None:
        return 0
    c = _Convolution(x, w, result.shape[2:], options)
    if backend == "columns":
        return c.columns // c.groups + c.copied(max(c.y, c.x // c.groups), c.y)
    if c.lies_last:
        return forward_bytes(c, args[2])
    if c.by_columns.forward:
        return max(min(c.columns // c.groups, _CACHE), c.y)
    return max(0, c.sampled + c.x_taken + c.w_taken + c.y_taken - c.y, c.sampled + c.y_taken)


def _backward(args: Sequence[Any], result: Sequence[Tensor | None]) -> int:
    """Return bytes of a backward: the gradient of the input, then that of the weights, each from two copies."""
    gradient, x, w, _, *options, mask = args[:11]
    backend = _backend(x, w, options)
    if backend is None:
        return 0
    c = _Convolution(x, w, gradient.shape[2:], options)
    x_out, w_out = (c.x if mask[0] else 0), (c.w if mask[1] else 0)
    if backend == "columns":
        return c.columns // c.groups + c.copied(max(x_out + w_out, (c.x + c.y) // c.groups), x_out + w_out)
    if c.lies_last:
        return backward_bytes(c, gradient, mask)
    peak = 0
    if mask[0]:
        peak = max(c.y_taken + c.w_padded + c.x_padded + c.scratch, c.x_padded + c.x)
        if c.by_columns.of_input:
            peak = x_out + max(c.columns_at_once(0, _INPUT_SHARE), c.x)
        elif c.strided and (c.groups == 1 or (c.block == _NARROW and not c.depthwise)):
            peak = max(peak, 3 * c.x)
    if mask[1]:
        if c.by_columns.of_weights:
            sums = 4 * c.w  # four bytes are taken for every byte of them
            peak = max(peak, x_out + c.w + sums + c.columns_at_once(sums, _WEIGHTS_SHARE))
        elif c.aligned or c.x_taken == 0:
            peak = max(peak, x_out + c.x_taken + c.y_taken + c.w_taken + c.sampled_part)
        else:
            peak = max(peak, x_out + c.x_padded + c.y_taken + c.w_padded + c.sampled_part)
            if c.dilated and c.narrow:
                peak = max(peak, x_out + c.columns + 6 * c.w)
        peak = max(peak, x_out + c.w_taken + c.w)
    return max(0, peak - x_out - w_out)


def _backend(x: Tensor, w: Tensor, options: Sequence[Any]) -> str | None:
    """Return the backend, "blocked" or "columns", that torch uses for a convolution of images; None for other backends.

    options: stride, padding, dilation, transposed or not, padding of the output, groups.
    """
    stride, transposed = options[0], options[3]
    if transposed or x.dim() != 4:
        return None
    name = torch._C._select_conv_backend(x, w, None, *options, None).name
    if name == "Mkldnn":
        plain = math.prod(w.shape[2:]) == 1 and all(step == 1 for step in stride)
        return None if plain and x.shape[0] < _SMALL_BATCH else "blocked"
    return "columns" if name in ("Slow2d", "SlowDilated2d") else None


def _normalised(args: Sequence[Any], result: Sequence[Tensor]) -> int:
    """Return bytes of layer norm, which copies an input that is not contiguous."""
    return _spread(args[0])


def _normalised_backward(args: Sequence[Any], result: Sequence[Tensor | None]) -> int:
    """Return bytes of layer norm's backward: such copies of input and gradient, and the sums for two parameters."""
    x = args[1]
    return _spread(args[0]) + _spread(x) + 2 * math.prod(args[2]) * x.itemsize


def _batch_normalised_backward(args: Sequence[Any], result: Sequence[Tensor | None]) -> int:
    """Return bytes of batch norm's backward: the input's gradient again, if input and gradient have equal layouts."""
    gradient, x, mask = args[0], args[1], args[9]
    alike = any(
        gradient.is_contiguous(memory_format=form) and x.is_contiguous(memory_format=form)
        for form in (torch.contiguous_format, torch.channels_last)
        if form == torch.contiguous_format or x.dim() == 4
    )
    return x.numel() * x.itemsize if mask[0] and alike else 0


def _upsampled_backward(args: Sequence[Any], result: Tensor) -> int:
    """Return bytes of upsampling's backward, which copies a gradient that is a part of another tensor, and with
    channels last the result."""
    gradient = args[0]
    copied = 0 if gradient.is_contiguous(memory_format=torch.channels_last) else _spread(gradient)
    return copied + (result.numel() * result.itemsize if copied and gradient.stride(1) == 1 else 0)


def _attended(args: Sequence[Any], result: Sequence[Tensor]) -> int:
    """Return bytes of flash attention for one thread: products of a part of queries and keys, their maxima and sums,
    and a part of the result in float32; with 16 bits the products once more.
    """
    query = args[0]
    pairs, part = _flash_parts(query, args[1])
    return 4 * (pairs + part * (2 + query.shape[-1])) + (2 * pairs if query.itemsize == 2 else 0)


def _attended_backward(args: Sequence[Any], result: Sequence[Tensor | None]) -> int:
    """Return bytes of flash attention's backward: products and their gradients, a sum for each query, and a gradient
    that it copies unless heads follow tokens in memory. oneDNN's bytes for products of bfloat16 are left out.
    """
    gradient, query = args[:2]
    pairs, part = _flash_parts(query, args[2])
    return 2 * pairs * (4 + (2 if query.itemsize == 2 else 0)) + 4 * part + _spread(gradient.transpose(1, 2))


def _flash_parts(query: Tensor, key: Tensor) -> tuple[int, int]:
    """Return the number of products of queries and keys that a thread makes at a time, and of their queries."""
    queries, keys = query.shape[-2], key.shape[-2]
    part = min(queries, 256 if queries >= 768 else 64 if queries >= 192 else 32)
    return part * min(512, keys), part


def _spread(tensor: Tensor) -> int:
    return 0 if tensor.is_contiguous() else int(tensor.numel() * tensor.itemsize)


_ELEMENTWISE = tuple(
    getattr(_aten, name + place).Tensor
    for name in ("add", "sub", "mul", "div", "eq", "ne", "lt", "le", "gt", "ge")
    for place in ("", "_")
) + (_aten.maximum.default, _aten.minimum.default)
_REDUCTIONS = (
    _aten.linalg_vector_norm.default,
    _aten.sum.default,
    _aten.sum.dim_IntList,
    _aten.mean.default,
    _aten.mean.dim,
)

Kernel = Callable[[Sequence[Any], Any], int]
"""An operator's arguments and result -> bytes."""

KERNELS: dict[Any, Kernel] = {
    **dict.fromkeys(_REDUCTIONS, _converted),
    **dict.fromkeys(_ELEMENTWISE, _promoted),
    norm_in_pieces._opoverload: _normed_in_pieces,
    _aten.convolution.default: _forward,
    _aten.convolution_backward.default: _backward,
    _aten.native_layer_norm.default: _normalised,
    _aten.native_layer_norm_backward.default: _normalised_backward,
    _aten.native_batch_norm_backward.default: _batch_normalised_backward,
    _aten._scaled_dot_product_flash_attention_for_cpu.default: _attended,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _attended_backward,
    _aten.upsample_bilinear2d_backward.default: _upsampled_backward,
    _aten.upsample_nearest2d_backward.default: _upsampled_backward,
    _aten.mm.default: lambda args, result: _packed(args[0], args[1]) + _unfit(args[0], args[1]),
    _aten.bmm.default: lambda args, result: _packed_batch(args[0], args[1]),
    _aten.addmm.default: lambda args, result: _packed(args[1], args[2]) + _unfit(args[1], args[2]),
    _aten.baddbmm.default: lambda args, result: _packed_batch(args[1], args[2]),
}
"""Operator -> its kernel; other operators take no bytes."""
