"""Behaviour of devices that torch's dispatcher does not show: a table of named quirks, each with its source.

Estimates run on fake CPU tensors. This table lists the differences of the real device: other operators, temporary
memory of kernels, places where messages and inputs wait. Each entry of `QUIRKS` is tested by its name; entries of the
CPU against its allocator. Byte counts depend on shapes alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.base.gpus import GPUS, Gpu
from varuna_capslog.model.capture.kernels import as_fused
from varuna_capslog.profiling.estimation.allocator import Event, rounded
from varuna_capslog.profiling.estimation.cuda_kernels import CUDA_KERNELS
from varuna_capslog.profiling.estimation.kernels import KERNELS

__all__ = [
    "CUBLASLT_WORKSPACE",
    "CUBLAS_WORKSPACE",
    "CUBLAS_WORKSPACE_HOPPER",
    "LIMITS",
    "QUIRKS",
    "QUIRKS_VERSION",
    "USUAL_GPU",
    "Quirk",
    "Quirks",
]

QUIRKS_VERSION = 20
"""Raised whenever an entry, or the content of an estimate, changes; a condition of every estimated profile."""

_aten = torch.ops.aten
CUBLAS_WORKSPACE = (2 * 4096 + 8 * 16) << 10
"""Bytes for each thread that multiplies matrices; see quirk "cublas workspace"."""
CUBLAS_WORKSPACE_HOPPER = 32 << 20
"""`CUBLAS_WORKSPACE` from Hopper on."""
CUBLASLT_WORKSPACE = 1 << 20
"""Bytes for products with a bias."""
USUAL_GPU = "a4000"
"""The kind assumed for `cuda` without a kind: the GPU of the CAPSlog paper."""
_CONVOLUTIONS = frozenset({_aten.convolution.default, _aten.convolution_backward.default})
_GEMMS = frozenset({_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default})


@dataclass(frozen=True)
class Quirk:
    """Difference between a device and an estimate's operators. devices: "cpu", "cuda" or both. about: with source."""

    devices: tuple[str, ...]
    about: str


QUIRKS = {
    "caching allocator": Quirk(
        ("cuda",),
        "Sizes are rounded up to 512 bytes, and a block is given whole if no more than 1 MiB of it would be left "
        "(CUDACachingAllocator, see `allocator`); the CPU's gives what is asked for. What it gave beyond "
        "all requests at the peak counts as saved.",
    ),
    "fused dropout": Quirk(
        ("cuda",),
        "Dropout on CUDA is native_dropout, which keeps a bool mask; the CPU's draws and keeps a mask of the "
        "input's own dtype (is_fused_kernel_acceptable, ATen/native/Dropout.cpp).",
    ),
    "fused rms norm": Quirk(
        ("cuda",),
        "rms_norm on CUDA is one kernel that keeps its input and a number of each row; the CPU's is made of eight "
        "operators, which keep the input in float32, too (rms_norm_symint, ATen/native/layer_norm.cpp). Counted as a "
        "layer norm, which keeps two numbers of each row.",
    ),
    "softmax backward product": Quirk(
        ("cuda",),
        "The backward of softmax first multiplies gradient and output into a tensor of their size "
        "(host_softmax_backward's caller, ATen/native/cuda/SoftMax.cu).",
    ),
    "fused attention": Quirk(
        ("cuda",),
        "scaled_dot_product_attention takes the flash kernel for 16-bit inputs without a mask, else the "
        "memory-efficient one, which also drops out, and plain matrices where neither is allowed; the CPU's falls back "
        "to these when it must drop out. Hopper and the data centre's Blackwell prefer cuDNN's kernel for 16-bit "
        "inputs, which takes masks (check_prefer_cudnn_attention, sdp_utils.cpp; seen on an H200). These two share "
        "keys and values among heads, which the memory-efficient one does not (check_batch_size_and_num_heads_dense).",
    ),
    "attention workspace": Quirk(
        ("cuda",),
        "Backwards of fused attention sum the gradient of the queries in float32 beside the row sums of the softmax; "
        "flash attention's copies two tensors (read off the allocator of an H200, torch 2.11).",
    ),
    "reduction buffer": Quirk(
        ("cuda",),
        "A sum whose outputs are few shares each out over blocks, which stage their sums in memory; where the outputs "
        "lie along the fastest dimension, as those of a bias do, the buffer is a block's width times as large as what "
        "is staged, up to several times the input (global_memory_size, ATen/native/cuda/Reduce.cuh; equal to the byte "
        "on an H200).",
    ),
    "embedding backward": Quirk(
        ("cuda",),
        "From 3,073 tokens on, the gradient of an embedding sorts them and sums parts of equal ones in float32 "
        "(EmbeddingBackwardKernel.cu).",
    ),
    "convolution workspace": Quirk(
        ("cuda",),
        "Matrix units convolve with the channels last: cuDNN copies images, result and weights into that order, and "
        "gradients of weights are summed in parts (read off the allocator of an H200 with cuDNN 9.19, where three of "
        "four kernels met it to the byte; which kernel another GPU or version takes is not known).",
    ),
    "autocast to float32": Quirk(
        ("cuda",),
        "Autocast on CUDA computes softmax, normalisations and losses in float32; on the CPU they stay in 16 bits "
        "(ATen/autocast_mode.h).",
    ),
    "cublas workspace": Quirk(
        ("cuda",),
        "Each thread that multiplies matrices keeps a workspace: one for forward, one for autograd's. 8.125 MiB "
        "each by default, 32 MiB from Hopper on (parseChosenWorkspaceSize, ATen/cuda/CublasHandlePool.cpp). A GPU "
        "whose kind is not named counts the former; the headroom has the difference. Products with a bias take 1 MiB "
        "more for cuBLASLt (seen on an H200, torch 2.11).",
    ),
    "foreach update": Quirk(
        ("cuda",),
        "AdamW steps all parameters together by default and makes one temporary of their size; on the CPU we ask "
        "for the fused kernel, which makes none (torch/optim/adamw.py).",
    ),
    "host staging": Quirk(
        ("cuda",),
        "Messages and, where asked, the inputs kept for recomputation wait in pinned host memory (our "
        "communicator and stage).",
    ),
    "reduction in another type": Quirk(
        ("cpu", "cuda"),
        "Sums and norms whose result has another type than their input first copy the input into it; on CUDA not "
        "from 16 bits to float32 (make_reduction, ATen/native/ReduceOpsUtils.h). Our gradient norms are float64.",
    ),
    "unfit matrices": Quirk(
        ("cpu", "cuda"),
        "A matrix that lies neither in rows nor in columns, such as an expanded gradient, is copied before it is "
        "multiplied (prepare_matrix_for_cublas; its twin in ATen/native/LinearAlgebra.cpp).",
    ),
    "onednn convolution": Quirk(
        ("cpu",),
        "oneDNN convolves in a layout with channels in blocks: input, weights and output have copies in it. "
        "Kernels of one element without stride need none below 16 images. Where channels lie last only weights are "
        "copied (see `kernels`), and depthwise kernels of more than 3x3 make 256 sums of their gradient, 64 without "
        "AVX-512. Measured with torch 2.15 (oneDNN 3.13) on AVX-512 and torch 2.14 (oneDNN 3.12) without.",
    ),
    "copies of norms": Quirk(
        ("cpu",),
        "Layer norm copies what is not contiguous; the backwards of batch norm make the gradient of the input twice "
        "where input and gradient lie alike, and those of upsampling copy a gradient that is a part of another tensor "
        "(measured with torch 2.15; native_layer_norm and UpSample kernels of ATen/native).",
    ),
    "parts of attention": Quirk(
        ("cpu",),
        "Flash attention multiplies parts of queries and keys in buffers of each thread, and copies a gradient whose "
        "heads do not follow tokens in memory (ATen/native/cpu/FlashAttentionKernel.cpp; one thread is counted).",
    ),
    "convolution columns": Quirk(
        ("cpu",),
        "Small convolutions unfold their input into columns (slow_conv2d, ATen/native/ConvolutionMM2d.cpp).",
    ),
    "promotion of operands": Quirk(
        ("cpu",),
        "An operand of another type than the common one is copied into that type first; CUDA's kernels convert "
        "as they read (TensorIterator).",
    ),
    "bfloat16 packing": Quirk(
        ("cpu",),
        "Products of bfloat16 matrices copy the smaller one, of a batch one at a time, into the layout of their "
        "instructions. Measured with torch 2.15 (oneDNN 3.13) on AVX-512 with AMX tiles; some weight gradients "
        "take 1.4 times that. Without AMX, oneDNN copies panels of another size instead: see `LIMITS`. Without AVX-512 "
        "torch's own kernels multiply, and copy nothing.",
    ),
}
"""By name."""

_LOW_CONVOLUTIONS = "16-bit convolutions on the CPU"
_LOW_PRODUCTS = "bfloat16 products on a CPU without AMX"
_HALF_PRODUCTS = "float16 products by oneDNN on the CPU"

LIMITS = {
    _LOW_CONVOLUTIONS: "oneDNN keeps copies and sums of 32 bits by rules that are not modelled. Single "
    "kernels take up to 2.7 times the copies of the float32 table, those of one element copies where it has none.",
    _LOW_PRODUCTS: "oneDNN copies panels whose sizes are not modelled. Small products and those with a narrow matrix "
    "take up to 4 times the bytes of the table and 0.2 MiB more (AVX-512 BF16); large ones take less.",
    _HALF_PRODUCTS: "What oneDNN copies where the CPU has float16 instructions was never measured. Without these "
    "torch's own kernels multiply, and copy nothing.",
}
"""Name -> explanation, for cases in which estimates are known to be too low. A profile with such a case has its name in
the condition "limits", and planners then promise no bytes."""


@dataclass
class Quirks:
    """Quirks of one kind of device during a run; one object per run.

    device: "cpu" or "cuda"; CapslogError for others. gpu: kind of GPU (`base.gpus`); "" for no particular kind.
    amx: True where the CPU multiplies bfloat16 matrices in AMX tiles.
    bfloat16, half: True where oneDNN multiplies bfloat16, float16 matrices on the CPU; torch's kernels copy nothing.
    lasting: bytes of each workspace that was allocated and stays. limits: names in `LIMITS` that apply to the run.
    """

    device: str
    gpu: str = ""
    amx: bool = field(default_factory=torch.cpu._is_amx_tile_supported)
    bfloat16: bool = field(default_factory=torch.ops.mkldnn._is_mkldnn_bf16_supported)
    half: bool = field(default_factory=torch.ops.mkldnn._is_mkldnn_fp16_supported)
    lasting: list[int] = field(default_factory=list)
    limits: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        if self.device not in ("cpu", "cuda"):
            raise CapslogError(
                f"estimates know cpu, cuda and cuda:KIND, but the device is {self.device}; measure there instead "
                "(profile.source=measured, --measure), or plan for one that they know (profile.device, --device)"
            )
        self._threads: set[bool] = set()
        self._adds_bias = False

    @property
    def kind(self) -> Gpu:
        """GPU whose workspaces are counted."""
        return GPUS[self.gpu or USUAL_GPU]

    def taken_before(self) -> list[Event]:
        """Return the workspaces so far, as events that come before a step's events (`allocator.replay`)."""
        return [(-place, size) for place, size in enumerate(self.lasting)]

    @property
    def block_bytes(self) -> int:
        """Granularity to which the allocator rounds requests up."""
        return rounded(1) if self.has("caching allocator") else 1

    def has(self, name: str) -> bool:
        """True where an entry of `QUIRKS` applies to this device."""
        return self.device in QUIRKS[name].devices

    def temporary(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Sequence[int]:
        """Return the bytes of the temporary blocks of an operator's kernel; see `lifetimes.Temporary`."""
        if self.device == "cuda":
            on_cuda = CUDA_KERNELS.get(func)
            if on_cuda is None:
                return ()
            if func in _GEMMS:
                self._count_cublas(func, args)
            return on_cuda(args, result, self.kind)
        if func in _CONVOLUTIONS and args[1].itemsize == 2:
            self.limits.add(_LOW_CONVOLUTIONS)
        if self.bfloat16 and not self.amx and func in _GEMMS and args[1].dtype == torch.bfloat16:
            self.limits.add(_LOW_PRODUCTS)
        if self.half and func in _GEMMS and args[1].dtype == torch.float16:
            self.limits.add(_HALF_PRODUCTS)
        on_cpu = KERNELS.get(func)
        return () if on_cpu is None else (on_cpu(args, result),)

    def _count_cublas(self, func: Any, args: Sequence[Any]) -> None:
        """Add the lasting workspaces that a thread's first product, and the first product with a bias, allocate."""
        backward = torch._C._current_autograd_node() is not None
        if backward not in self._threads:
            self._threads.add(backward)
            larger = bool(self.gpu) and self.kind.hopper_or_later
            self.lasting.append(CUBLAS_WORKSPACE_HOPPER if larger else CUBLAS_WORKSPACE)
        if func is _aten.addmm.default and args[0].dim() == 1 and not self._adds_bias:
            self._adds_bias = True
            self.lasting.append(CUBLASLT_WORKSPACE)

    @contextmanager
    def dispatch(self) -> Iterator[None]:
        """Make operators on CPU tensors inside the block call the operators that the device calls."""
        if self.device == "cpu":
            yield
            return
        with torch.library._scoped_library("aten", "IMPL") as library, as_fused():
            library.impl("dropout", _fused_dropout, "AutogradCPU")
            library.impl("rms_norm", _fused_rms_norm, "AutogradCPU")
            library.impl("scaled_dot_product_attention", _fused_attention(self.kind.prefers_cudnn), "AutogradCPU")
            for name in _FLOAT32_UNDER_AUTOCAST:
                library.impl(name, _in_float32(name), "AutocastCPU")
            yield


# -- CUDA: other operators


def _fused_dropout(x: Tensor, p: float, train: bool) -> Tensor:
    if not train or p == 0 or x.numel() == 0:
        return x
    if p == 1:
        return x * 0
    return _aten.native_dropout(x, p, train)[0]


def _fused_rms_norm(x: Tensor, shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    return _aten.native_layer_norm(x, shape, weight, None, torch.finfo(x.dtype).eps if eps is None else eps)[0]


def _fused_attention(prefers_cudnn: bool) -> Callable[..., Tensor]:
    """Return `scaled_dot_product_attention` with the fused kernel that the device uses."""

    def attention(
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
        repeats = query.shape[-3] // key.shape[-3] if enable_gqa else 1
        allowed = torch.backends.cuda  # by `torch.nn.attention.sdpa_kernel`
        half = query.dtype in (torch.float16, torch.bfloat16)
        wants = any(tensor.requires_grad for tensor in (query, key, value)) and torch.is_grad_enabled()
        fused = query.dim() == 4  # no fused kernel takes other tensors (check_tensor_shapes, sdp_utils_cpp.h)
        if fused and prefers_cudnn and half and allowed.cudnn_sdp_enabled() and _cudnn_attends(query, key):
            return _aten._scaled_dot_product_cudnn_attention(
                query, key, value, attn_mask, wants, dropout_p, is_causal, False, scale=scale
            )[0]
        even = query.shape[-1] == value.shape[-1]  # else no flash kernel (check_head_dim_size_flash)
        if fused and even and allowed.flash_sdp_enabled() and attn_mask is None and half:
            return _aten._scaled_dot_product_flash_attention(
                query, key, value, dropout_p, is_causal, False, scale=scale
            )[0]
        if repeats > 1:
            key, value = key.repeat_interleave(repeats, -3), value.repeat_interleave(repeats, -3)
        if not fused or repeats > 1 or not allowed.mem_efficient_sdp_enabled():
            return _aten._scaled_dot_product_attention_math(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale
            )[0]
        if attn_mask is not None:
            if attn_mask.dtype == torch.bool:
                attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(~attn_mask, float("-inf"))
            attn_mask = attn_mask.expand(*query.shape[:-1], key.shape[-2])
        return _aten._scaled_dot_product_efficient_attention(
            query, key, value, attn_mask, wants, dropout_p, is_causal, scale=scale
        )[0]

    return attention


def _cudnn_attends(query: Tensor, key: Tensor) -> bool:
    """True for heads of up to 128 numbers, a multiple of 8, and several queries and keys (cuDNN)."""
    return query.shape[-1] <= 128 and query.shape[-1] % 8 == 0 and min(query.shape[-2], key.shape[-2]) > 1


_FLOAT32_UNDER_AUTOCAST = (
    "softmax.int",
    "log_softmax.int",
    "layer_norm",
    "native_layer_norm",
    "rms_norm",
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
