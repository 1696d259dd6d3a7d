"""What devices do that no dispatcher shows: a table of named quirks, each with its source.

Estimates run on fake CPU tensors (`hollow`). Here stands how the device that they are for differs from that: other
operators, memory that kernels take for themselves, where messages and inputs wait. Each entry of `QUIRKS` is tested by
its name; those of the CPU against its own allocator. Byte counts are functions of shapes alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from varuna_capslog.base.errors import CapslogError

__all__ = ["LIMITS", "QUIRKS", "QUIRKS_VERSION", "Quirk", "Quirks", "quirks_of"]

QUIRKS_VERSION = 4
"""Raised whenever an entry changes a number; a condition of every estimated profile."""

_aten = torch.ops.aten
_CUBLAS_WORKSPACE = 2 * 4096 * 1024 + 8 * 16 * 1024
_CONVOLUTIONS = frozenset({_aten.convolution.default, _aten.convolution_backward.default})
_GEMMS = frozenset({_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default})


@dataclass(frozen=True)
class Quirk:
    """One difference between a device and what the dispatcher of a CPU shows.

    Attributes:
        devices: "cpu", "cuda" or both.
        about: what happens, and how we know.
    """

    name: str
    devices: tuple[str, ...]
    about: str


QUIRKS = {
    quirk.name: quirk
    for quirk in (
        Quirk(
            "caching allocator",
            ("cuda",),
            "Sizes are rounded up to 512 bytes, and a block is given whole if no more than 1 MiB of it would be left "
            "(CUDACachingAllocator, see `allocator`); the CPU's gives what is asked for. What it gave beyond "
            "all requests at the peak counts as saved.",
        ),
        Quirk(
            "fused dropout",
            ("cuda",),
            "Dropout on CUDA is native_dropout, which keeps a bool mask; the CPU's draws and keeps a mask of the "
            "input's own dtype (is_fused_kernel_acceptable, ATen/native/Dropout.cpp).",
        ),
        Quirk(
            "softmax backward product",
            ("cuda",),
            "The backward of softmax first multiplies gradient and output into a tensor of their size "
            "(host_softmax_backward's caller, ATen/native/cuda/SoftMax.cu).",
        ),
        Quirk(
            "fused attention",
            ("cuda",),
            "scaled_dot_product_attention takes the flash kernel for 16-bit inputs without a mask, else the "
            "memory-efficient one, which also drops out; the CPU's falls back to plain matrices when it must drop out.",
        ),
        Quirk(
            "autocast to float32",
            ("cuda",),
            "Autocast on CUDA computes softmax, normalisations and losses in float32; on the CPU they stay in 16 bits "
            "(ATen/autocast_mode.h).",
        ),
        Quirk(
            "cublas workspace",
            ("cuda",),
            "Each thread that multiplies matrices keeps a workspace: one for forward, one for autograd's. 8.125 MiB "
            "each by default, 32 MiB from Hopper on (CUDABlas: getChosenWorkspaceSize).",
        ),
        Quirk(
            "foreach update",
            ("cuda",),
            "AdamW steps all parameters together by default and makes one temporary of their size; on the CPU we ask "
            "for the fused kernel, which makes none (torch/optim/adamw.py).",
        ),
        Quirk(
            "host staging",
            ("cuda",),
            "Messages and, where asked, the inputs kept for recomputation wait in pinned host memory (our "
            "communicator and stage).",
        ),
        Quirk(
            "reduction in another type",
            ("cpu", "cuda"),
            "Sums and norms whose result has another type than their input first copy the input into it; on CUDA not "
            "from 16 bits to float32 (make_reduction, ATen/native/ReduceOpsUtils.h). Our gradient norms are float64.",
        ),
        Quirk(
            "unfit matrices",
            ("cpu", "cuda"),
            "A matrix that lies neither in rows nor in columns, such as an expanded gradient, is copied before it is "
            "multiplied (prepare_matrix_for_cublas; its twin in ATen/native/LinearAlgebra.cpp).",
        ),
        Quirk(
            "onednn convolution",
            ("cpu",),
            "oneDNN convolves in a layout with channels in blocks: input, weights and output have copies in it. "
            "Kernels of one element without stride need none below 16 images. Measured with torch 2.15 (oneDNN 3.13) "
            "on AVX-512.",
        ),
        Quirk(
            "convolution columns",
            ("cpu",),
            "Small convolutions unfold their input into columns (slow_conv2d, ATen/native/ConvolutionMM2d.cpp).",
        ),
        Quirk(
            "promotion of operands",
            ("cpu",),
            "An operand of another type than the common one is copied into that type first; CUDA's kernels convert "
            "as they read (TensorIterator).",
        ),
        Quirk(
            "bfloat16 packing",
            ("cpu",),
            "Products of bfloat16 matrices copy the smaller one, of a batch one at a time, into the layout of their "
            "instructions. Measured with torch 2.15 (oneDNN 3.13) on AVX-512; some weight gradients take 1.4 times "
            "that.",
        ),
    )
}
"""By name. Not modelled: the workspaces of cuDNN's convolutions, which depend on what it finds free and fast."""

LIMITS = {
    "16-bit convolutions on the CPU": "oneDNN keeps copies and sums of 32 bits by rules that are not modelled. Single "
    "kernels take up to 2.7 times the copies of the float32 table, those of one element copies where it has none.",
}
"""By name, what estimates are known to be too low for. A profile that met one says so in its conditions (`limits`), and
planners then promise no bytes."""


@dataclass
class Quirks:
    """The quirks of one kind of device at work; one object per run.

    Attributes:
        caching: whether allocations come from a caching allocator (see `allocator`).
        staged: whether messages and kept inputs wait in host memory.
        foreach: whether the optimizer steps all parameters together.
        lasting_bytes: of workspaces that have been taken and stay.
        limits: names of `LIMITS` that were met.
    """

    device: str
    caching: bool
    staged: bool
    foreach: bool
    lasting_bytes: int = 0
    limits: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._threads: set[bool] = set()
        self._kernels = _KERNELS[self.device]

    def temporary(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> int:
        """Bytes that an operator's kernel takes beside its results and gives back; see `lifetimes.Temporary`."""
        if self.device == "cuda" and func in _GEMMS:
            backward = torch._C._current_autograd_node() is not None
            if backward not in self._threads:
                self._threads.add(backward)
                self.lasting_bytes += _CUBLAS_WORKSPACE
        if self.device == "cpu" and func in _CONVOLUTIONS and args[1].itemsize == 2:
            self.limits.add("16-bit convolutions on the CPU")
        kernel = self._kernels.get(func)
        return 0 if kernel is None else kernel(args, result)

    @contextmanager
    def dispatch(self) -> Iterator[None]:
        """While it is open, operators on CPU tensors take the path that they take on the device."""
        if self.device == "cpu":
            yield
            return
        with torch.library._scoped_library("aten", "IMPL") as library:
            library.impl("dropout", _fused_dropout, "AutogradCPU")
            library.impl("scaled_dot_product_attention", _fused_attention, "AutogradCPU")
            for name in _FLOAT32_UNDER_AUTOCAST:
                library.impl(name, _in_float32(name), "AutocastCPU")
            yield


def quirks_of(device: str) -> Quirks:
    """Fresh quirks of "cpu" or "cuda". Raises CapslogError for others."""
    if device == "cpu":
        return Quirks("cpu", caching=False, staged=False, foreach=False)
    if device == "cuda":
        return Quirks("cuda", caching=True, staged=True, foreach=True)
    raise CapslogError(f"there is no table of quirks for the device {device!r}; choose cpu or cuda")


# -- CUDA: other operators


def _fused_dropout(x: Tensor, p: float, train: bool) -> Tensor:
    if not train or p == 0 or x.numel() == 0:
        return x
    if p == 1:
        return x * 0
    return _aten.native_dropout(x, p, train)[0]


def _fused_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if enable_gqa:
        repeats = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(repeats, -3), value.repeat_interleave(repeats, -3)
    if attn_mask is None and query.dtype in (torch.float16, torch.bfloat16):
        return _aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(~attn_mask, float("-inf"))
        attn_mask = attn_mask.expand(*query.shape[:-1], key.shape[-2])
    wants = any(tensor.requires_grad for tensor in (query, key, value)) and torch.is_grad_enabled()
    return _aten._scaled_dot_product_efficient_attention(
        query, key, value, attn_mask, wants, dropout_p, is_causal, scale=scale
    )[0]


_FLOAT32_UNDER_AUTOCAST = (
    "softmax.int",
    "log_softmax.int",
    "layer_norm",
    "native_layer_norm",
    "group_norm",
    "cross_entropy_loss",
    "nll_loss",
    "mse_loss",
    "smooth_l1_loss",
    "l1_loss",
    "norm.Scalar",
    "cumsum",
    "exp",
    "log",
    "pow.Tensor_Scalar",
    "rsqrt",
    "sum",
    "prod",
)


def _in_float32(name: str) -> Callable[..., Any]:
    packet, _, overload = name.partition(".")
    operator = getattr(getattr(_aten, packet), overload or "default")
    autocast = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)

    def widened(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(autocast):
            return operator(*map(_widen, args), **{key: _widen(value) for key, value in kwargs.items()})

    return widened


def _widen(value: Any) -> Any:
    wide = isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16)
    return value.to(torch.float32) if wide else value


# -- what kernels take


def _product(args: Sequence[Any], result: Any) -> int:
    return int(result.untyped_storage().nbytes())


def _converted(args: Sequence[Any], result: Tensor) -> int:
    x = args[0]
    return 0 if x.dtype == result.dtype else int(x.numel() * result.itemsize)


def _converted_on_cuda(args: Sequence[Any], result: Tensor) -> int:
    small = args[0].dtype in (torch.float16, torch.bfloat16) and result.dtype == torch.float32
    return 0 if small else _converted(args, result)


def _unfit(left: Tensor, right: Tensor) -> int:
    return sum(side.numel() * side.itemsize for side in (left, right) if not _fits(side))


def _fits(matrix: Tensor) -> bool:
    rows, columns = matrix.shape
    down, across = matrix.stride()
    return (across == 1 and down >= max(1, columns)) or (down == 1 and across >= max(1, rows))


def _packed(left: Tensor, right: Tensor) -> int:
    if left.dtype != torch.bfloat16:
        return 0
    smaller = min(math.prod(side.shape[-2:]) * side.itemsize for side in (left, right))
    return smaller + (_PANEL if left.is_contiguous() else _TRANSPOSED_PANEL)


def _packed_batch(left: Tensor, right: Tensor) -> int:
    if left.dtype != torch.bfloat16:
        return 0
    # those that lie neither in rows nor in columns are copied whole
    spread = (side for side in (left, right) if not (side.is_contiguous() or side.mT.is_contiguous()))
    return _packed(left, right) + sum(side.numel() * side.itemsize for side in spread)


_PANEL, _TRANSPOSED_PANEL = 5 << 10, 104 << 10
"""Room for a few rows; for more of them where the left matrix lies on its side, as in gradients of weights."""


def _promoted(args: Sequence[Any], result: Tensor) -> int:
    tensors = [value for value in args if isinstance(value, Tensor) and value.dim()]
    if len(tensors) < 2 or tensors[0].dtype == tensors[1].dtype:
        return 0
    common = torch.promote_types(tensors[0].dtype, tensors[1].dtype)
    return sum(tensor.numel() * common.itemsize for tensor in tensors if tensor.dtype != common)


def _block() -> int:
    return 16 if "512" in torch.backends.cpu.get_cpu_capability() else 8


def _up(count: int, step: int) -> int:
    return -(-count // step) * step


@dataclass(frozen=True)
class _Convolution:
    """Sizes of one convolution in bytes: plain, as oneDNN takes them, and padded to whole blocks of channels."""

    x: int
    w: int
    y: int
    x_taken: int
    w_taken: int
    y_taken: int
    x_padded: int
    w_padded: int
    columns: int
    sampled: int
    sampled_part: int
    scratch: int
    pointwise: bool
    strided: bool
    grouped: bool
    dilated: bool
    aligned: bool
    narrow: bool

    @classmethod
    def of(
        cls,
        x: Tensor,
        w: Tensor,
        spatial: Sequence[int],
        stride: Sequence[int],
        dilation: Sequence[int],
        groups: int,
    ) -> _Convolution:
        block, size = _block(), x.itemsize
        batch, channels, features = x.shape[0], x.shape[1], w.shape[0]
        cells_in, cells_out, window = math.prod(x.shape[2:]), math.prod(spatial), math.prod(w.shape[2:])
        strided, pointwise = any(step != 1 for step in stride), window == 1
        # where the stride divides the input, a kernel of one element first gathers what it will read
        divides = all(a == b * c for a, b, c in zip(x.shape[2:], spatial, stride, strict=True))
        gathers = pointwise and strided and divides
        x_bytes, y_bytes, w_bytes = (part * size for part in (x.numel(), batch * features * cells_out, w.numel()))
        x_padded = batch * _up(channels, block) * cells_in * size
        y_padded = batch * _up(features, block) * cells_out * size
        w_padded = w_bytes if groups > 1 else _up(channels, block) * _up(features, block) * window * size
        # pictures of three channels are read as they lie; a few channels are copied without padding
        narrow = channels < block and not pointwise
        return cls(
            x=x_bytes,
            w=w_bytes,
            y=y_bytes,
            x_taken=(0 if channels < 4 else x_bytes) if narrow else x_padded,
            w_taken=channels * _up(features, block) * window * size if narrow and groups == 1 else w_padded,
            y_taken=y_padded,
            x_padded=x_padded,
            w_padded=w_padded,
            columns=0 if pointwise and not strided else channels * window * cells_out * size,
            sampled=_up(channels, block) * cells_out * size + 128 if gathers else 0,
            sampled_part=min(_up(channels, block), 128) * cells_out * size + 128 if gathers else 0,
            scratch=y_padded // batch * (spatial[-1] + w.shape[-1]) // spatial[-1] + _SCRATCH if strided else 0,
            pointwise=pointwise,
            strided=strided,
            grouped=groups > 1,
            dilated=any(step != 1 for step in dilation),
            aligned=channels % block == 0 and features % block == 0,
            narrow=channels < block,
        )


_SCRATCH = 40 << 10
_SMALL_BATCH = 16
"""From so many images on oneDNN does kernels of one element too; below it does so only where there are several threads,
and workers have one (use_mkldnn, ATen/native/Convolution.cpp)."""


def _forward(args: Sequence[Any], result: Tensor) -> int:
    """Copies of input and weights are there while the blocked output is made; it is there while the plain one is."""
    x, w, _, stride, padding, dilation, transposed, output_padding, groups = args[:9]
    backend = _backend(x, w, stride, padding, dilation, transposed, output_padding, groups)
    if backend is None or transposed or x.dim() != 4:
        return 0
    c = _Convolution.of(x, w, result.shape[2:], stride, dilation, groups)
    if backend == "columns":
        return c.columns // groups + (c.y if c.grouped else 0)
    if c.pointwise and not c.strided and x.shape[0] < _SMALL_BATCH:
        return 0
    if not x.is_contiguous():
        return c.w_taken
    return max(0, c.sampled + c.x_taken + c.w_taken + c.y_taken - c.y, c.sampled + c.y_taken)


def _backward(args: Sequence[Any], result: Sequence[Tensor | None]) -> int:
    """First the gradient of the input, from copies of weights and gradient; then that of the weights, from copies of
    input and gradient.
    """
    gradient, x, w, _, stride, padding, dilation, transposed, output_padding, groups, mask = args[:11]
    backend = _backend(x, w, stride, padding, dilation, transposed, output_padding, groups)
    if backend is None or transposed or x.dim() != 4:
        return 0
    c = _Convolution.of(x, w, gradient.shape[2:], stride, dilation, groups)
    if backend == "columns":
        parts = (c.x if mask[0] else 0) + (c.w if mask[1] else 0)
        return c.columns // groups + (parts if c.grouped else 0)
    if c.pointwise and not c.strided and x.shape[0] < _SMALL_BATCH:
        return 0
    if not x.is_contiguous():
        return c.w_taken
    x_out, w_out = (c.x if mask[0] else 0), (c.w if mask[1] else 0)
    most = 0
    if mask[0]:
        most = c.y_taken + c.w_padded + c.x_padded + c.scratch
        if c.strided and not c.grouped:
            most = max(most, 3 * c.x)
    if mask[1]:
        if c.aligned or c.x_taken == 0:
            most = max(most, x_out + c.x_taken + c.y_taken + c.w_taken + c.sampled_part)
        else:
            most = max(most, x_out + c.x_padded + c.y_taken + c.w_padded + c.sampled_part)
            if c.dilated and c.narrow:
                most = max(most, x_out + c.columns + 6 * c.w)
        most = max(most, x_out + c.w_taken + c.w)
    return max(0, most - x_out - w_out)


def _backend(
    x: Tensor,
    w: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> str | None:
    """Which of the two ways to convolve torch takes here, if one of them."""
    name = torch._C._select_conv_backend(
        x, w, None, stride, padding, dilation, transposed, output_padding, groups, None
    ).name
    return {"Mkldnn": "blocked", "MkldnnEmpty": None, "Slow2d": "columns", "SlowDilated2d": "columns"}.get(name)


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

_Kernel = Callable[[Sequence[Any], Any], int]

_KERNELS: dict[str, dict[Any, _Kernel]] = {
    "cuda": {
        _aten._softmax_backward_data.default: _product,
        _aten.mm.default: lambda args, result: _unfit(args[0], args[1]),
        _aten.addmm.default: lambda args, result: _unfit(args[1], args[2]),
        **dict.fromkeys(_REDUCTIONS, _converted_on_cuda),
    },
    "cpu": {
        **dict.fromkeys(_REDUCTIONS, _converted),
        **dict.fromkeys(_ELEMENTWISE, _promoted),
        _aten.convolution.default: _forward,
        _aten.convolution_backward.default: _backward,
        _aten.mm.default: lambda args, result: _packed(args[0], args[1]) + _unfit(args[0], args[1]),
        _aten.bmm.default: lambda args, result: _packed_batch(args[0], args[1]),
        _aten.addmm.default: lambda args, result: _packed(args[1], args[2]) + _unfit(args[1], args[2]),
        _aten.baddbmm.default: lambda args, result: _packed_batch(args[1], args[2]),
    },
}
