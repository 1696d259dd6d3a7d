"""The work of an operator on a device: amounts by class, from its arguments and its result alone.

A class is a set of kernels with the same limit: FLOPs of matrix units by dtype, bytes that memory moves, elements that
processors handle one by one. Amounts are those that kernels compute: matrices in whole tiles, a grouped convolution in
groups as wide as a tile. torch's registry of FLOPs counts the weight gradient of a grouped convolution `groups` times,
so convolutions are counted here.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from varuna_capslog.model.chain import is_dense
from varuna_capslog.profiling.estimation.allocator import round_up

__all__ = ["Work", "tensors_in", "work_of"]

Work = dict[str, float]
"""Class of `rates.CLASSES` -> FLOPs, bytes, elements or launches."""

Halves = tuple[torch.dtype, ...]
_HALF: Halves = (torch.float16, torch.bfloat16)

_FREE = frozenset(
    {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "as_strided_", "resize_", "_unsafe_view",
     "_record_function_enter_new", "_record_function_exit"}
)  # fmt: skip
"""Operators without a kernel although no schema says so: allocations, views that autograd treats as results, marks."""
_SHIFTED = frozenset({"slice_backward", "select_backward", "constant_pad_nd", "roll", "flip"})
"""Copies that compute the source index of every element."""
_COPIES = _SHIFTED | {
    "_to_copy", "clone", "copy_", "cat", "stack", "im2col", "col2im", "reflection_pad2d", "reflection_pad2d_backward"
}  # fmt: skip
_WRITES = frozenset(
    {"fill_", "zero_", "copy_", "zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full"}
)
"""Operators that do not read their first tensor."""
_COMPUTED = frozenset({"masked_fill", "masked_fill_", "native_dropout", "bernoulli_"})
"""Elementwise, with a mask or a random number for each element."""
_GATHERS = frozenset({"index", "embedding", "gather", "index_select"})
_SCATTERS = frozenset(
    {"index_put", "index_put_", "scatter", "scatter_add", "scatter_add_", "index_add", "index_add_",
     "embedding_dense_backward"}
)  # fmt: skip
_REDUCTIONS = frozenset(
    {"sum", "mean", "max", "amax", "amin", "min", "var", "std", "norm", "linalg_vector_norm", "norm_in_pieces",
     "cumsum", "argmax", "argmin", "topk", "sort", "_adaptive_avg_pool2d"}
)  # fmt: skip
_POOLS = frozenset({"avg_pool2d", "avg_pool2d_backward", "max_pool2d_with_indices", "max_pool2d_with_indices_backward"})
_NORMS = ("batch_norm", "layer_norm", "group_norm", "rms_norm", "_weight_norm")
"""Parts of the names of norms; `normal_`, `renorm` and `linalg_vector_norm` are none."""
_GROUPED = {"_grouped_mm": 1, "grouped_mm_fallback": 1, "grouped_mm_fallback_backward": 2}
"""Grouped products of experts -> number of products; the fallback is transformers' for weights other than bfloat16."""
_PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm", *_GROUPED, "_scaled_mm", "frozen_product"})

_TILE, _DEPTH = 32, 16
"""Rows and columns of a tile of 16-bit and TF32 products, and the tile's depth; half of both in float32."""
_BLOCK, _WIDTH = 128, 64
"""Queries and keys in a block of fused attention, and the least width of a head."""
_SCORES = {"flash": 1, "cudnn": 1, "efficient": 4, "float32": 12}
"""Time of a score in a kernel of attention, relative to flash attention."""
_TOGETHER = 32
"""Elements of a row that threads read together."""
_LINE = 128
"""Elements between neighbours from which on they are read from different lines of memory."""
_SHORT, _FEW = 128, 768
"""Elements of a row of a sum, and outputs that lie together, for which a processor has threads."""
_POINTERS = 128
"""Tensors of which a launch knows the places (MultiTensorApply.cuh)."""

# measured on an H200, as so many elements of the same class, or launches
_ROW, _ROW_OF_SQUARES = 2000, 300  # in which threads exchange mean and variance of a row, or a sum of squares
_MOMENTS = (5, 3)  # of a group norm, forward and backward, which reads one element after the other
_ROW_SUMS = 8  # of a gradient of an embedding, whose equal rows are summed in two steps
_SORT_LAUNCHES = 7  # of a scatter that finds equal rows
_SORT_READS = 8  # of a sort, or the search of the largest elements
_RUNNING = 4000  # of a row of running sums, at least, and 3 for each element
_PLANE = 100_000  # of an image and channel of a bilinear interpolation in ordinary layout
_TAPS = 4  # of an interpolation between elements
_CHANNELS_IN, _CHANNELS_OUT = 16, 64
"""Multiples to which the channels of a dense convolution are padded."""


def work_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any, halves: Halves = _HALF) -> Work:
    """Return the work of one operator by class; empty for an operator that moves no bytes.

    halves: the 16-bit dtypes that the device's matrix units take, which compute whole tiles; (): no matrix units.
    """
    name, changed, count = _known_of(func)
    if count is None:
        return {}
    inputs = list(tensors_in((*args, *kwargs.values())))
    outputs = list(
        tensors_in(args[place] for place in changed if place < len(args)) if changed else tensors_in((result,))
    )
    return count(name, args, inputs, outputs, result, halves)


_Count = Callable[[str, Sequence[Any], list[Tensor], list[Tensor], Any, Halves], Work]


@functools.cache
def _known_of(func: Any) -> tuple[str, tuple[int, ...], _Count | None]:
    """Return an operator's name, the arguments that it writes into, and its counter: None if it moves no bytes."""
    name = func.overloadpacket.__name__
    returns = [part.alias_info for part in func._schema.returns]
    views = bool(returns) and all(alias is not None and not alias.is_write for alias in returns)
    arguments = enumerate(func._schema.arguments)
    changed = tuple(place for place, part in arguments if part.alias_info is not None and part.alias_info.is_write)
    return name, changed, None if name in _FREE or views else _kind_of(name)


def _kind_of(name: str) -> _Count:
    if name in _PRODUCTS:
        return _product
    if name in ("convolution", "convolution_backward"):
        return _convolution
    if name.startswith("_scaled_dot_product"):
        return _attention
    if name.startswith("fused_scan"):
        return _scanned
    if "rnn_layer" in name or name.startswith("_cudnn_rnn"):
        return _recurrence
    if any(norm in name for norm in _NORMS):
        return _norm
    if name in _GATHERS or name in _SCATTERS:
        return _indexed
    if name.startswith("nll_loss"):
        return _chosen
    if name in _REDUCTIONS:
        return _reduced
    if name in _POOLS or name.startswith("upsample"):
        return _resized
    return _streamed


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors among values, also in tuples and lists, in order."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from tensors_in(value)


def _bytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors)


# -- products, convolutions, attention


def _product(
    name: str, args: Sequence[Any], inputs: list[Tensor], outputs: list[Tensor], result: Any, halves: Halves
) -> Work:
    if name in _GROUPED:
        first, second = inputs[0], inputs[1]
        rows, inner, columns = first.shape[-2], first.shape[-1], second.shape[-1]
        batch = first.shape[0] if first.dim() == second.dim() == 3 else 1
    else:
        first, second = [tensor for tensor in inputs if tensor.dim() >= 2][-2:]
        rows, inner, columns = first.shape[-2], first.shape[-1], second.shape[-1]
        batch = first.shape[0] if first.dim() == 3 else 1
    kind, tiled = _type_of(first, halves), bool(halves)
    routed = name in _GROUPED and first.dim() < second.dim()
    idle = _bytes([second]) * max(0.0, 1 - first.shape[0] / second.shape[0]) if routed else 0.0
    if tiled:
        tile, depth = (_TILE, _DEPTH) if kind != "float32" else (_TILE // 2, _DEPTH // 2)
        rows, inner, columns = round_up(rows, tile), round_up(inner, depth), round_up(columns, tile)
    if tiled and kind == "half":
        kind += _alignment([first, second, outputs[0]])
    elif kind == "tf32" and first.stride(-2) == 1 < first.stride(-1) and second.stride(-1) == 1:
        kind += " columns"
    return {
        f"product {kind}": 2.0 * _GROUPED.get(name, 1) * batch * rows * inner * columns,
        "product bytes": _bytes(inputs + outputs) - idle,  # of experts that get no row, where rows are fewer
        "launch": 1,
    }


def _scanned(
    name: str, args: Sequence[Any], inputs: list[Tensor], outputs: list[Tensor], result: Any, halves: Halves
) -> Work:
    """Return the products of a kernel for a recurrence, from its last argument; inputs and outputs move once."""
    return {
        f"product {_type_of(inputs[0], halves)}": args[-1],
        "product bytes": _bytes(inputs + outputs),
        "launch": 1,
    }


def _type_of(tensor: Tensor, halves: Halves, convolution: bool = False) -> str:
    """Return the name of the rate at which this tensor is multiplied: "half", "tf32" or "float32"."""
    if tensor.dtype in halves or (tensor.itemsize == 1 and halves):
        return "half"
    if tensor.dtype != torch.float32 or not halves:
        return "float32"
    allowed = torch.backends.cudnn.allow_tf32 if convolution else torch.get_float32_matmul_precision() != "highest"
    return "tf32" if allowed else "float32"


def _alignment(matrices: Sequence[Tensor]) -> str:
    """Return "" if every row of 16-bit matrices begins at a multiple of 16 bytes, " even" for 4 bytes, else " odd"."""
    steps = {max(matrix.stride()[-2:]) for matrix in matrices if min(matrix.shape[-2:]) > 1}
    if all(step % 8 == 0 for step in steps):
        return ""
    return " even" if all(step % 2 == 0 for step in steps) else " odd"


def _convolution(
    name: str, args: Sequence[Any], inputs: list[Tensor], outputs: list[Tensor], result: Any, halves: Halves
) -> Work:
    if name == "convolution":
        x, w, y, place = args[0], args[1], result, 3
        makes = (True, False, False)
    else:
        y, x, w, place = args[0], args[1], args[2], 4
        makes = (False, args[-1][0], args[-1][1])
    sums_bias = name == "convolution_backward" and args[-1][2]
    stride, transposed, groups = args[place], args[place + 3], args[place + 5]
    if transposed:
        x, y = y, x
    window = math.prod(w.shape[2:])
    reads, features = w.shape[1], w.shape[0] // groups
    passes = sum(makes)
    moved = float(passes * _bytes([x, y]))
    work: Work = {"bytes": moved, "launch": passes}
    if sums_bias:
        dims = (0, *range(2, y.dim()))
        work = {"bytes": moved + _bytes([y]), "reduced": _summed(y, dims), "launch": passes + 1}
    last = x.dim() == 4 and (
        _is_channels_last(x) or (_is_channels_last(w) and w.shape[1] > 1 and w.shape[2:].numel() > 1)
    )
    if groups > 1 and reads == 1:
        work |= _depthwise(x, w, y, window, stride, makes, last)
        return work
    flops = 2.0 * passes * y.numel() * reads * window
    if halves and groups == 1:
        flops *= round_up(reads, _CHANNELS_IN) * round_up(features, _CHANNELS_OUT) / (reads * features)
    elif halves:
        flops *= max(1.0, _TILE / min(reads, features))
    kind = _type_of(x, halves, convolution=True)
    work[f"convolution {kind}"] = flops
    if last and groups > 1 and kind != "float32":
        # groups of 4, 8, 16 channels share tiles; of others, and of gradients of weights in TF32, each is one kernel's
        shares = reads == features and reads & (reads - 1) == 0
        work["grouped last"] = float(y.numel()) * (sum(makes[2:]) * (kind == "tf32") if shares else passes)
    pointwise = window == 1 and groups == 1 and all(step == 1 for step in stride)
    if halves and not last and not pointwise:  # matrix units convolve where the channels lie together
        work["conversion bytes"], work["conversion"] = moved, float(passes * (x.numel() + y.numel()))
    return work


def _is_channels_last(tensor: Tensor) -> bool:
    return tensor.is_contiguous(memory_format=torch.channels_last) and not tensor.is_contiguous()


def _depthwise(
    x: Tensor, w: Tensor, y: Tensor, window: int, stride: Sequence[int], makes: Sequence[bool], last: bool
) -> Work:
    """Return FLOPs of kernels for one channel at a time.

    torch's kernel reads the whole input for its gradient, at any stride, and takes about twice as long for the gradient
    of the weights. cuDNN's kernels are for float16 windows of 1, 3 and 5 without stride, and for channels last
    (use_cudnn_depthwise, ATen/native/Convolution.cpp).
    """
    square = w.dim() == 4 and w.shape[-1] == w.shape[-2] and w.shape[-1] in (1, 3, 5)
    quick = x.dtype == torch.float16 and square and all(step == 1 for step in stride)
    quick = quick and not last and x.shape[-1] >= 7 and w.shape[0] >= 32
    if quick:
        return {"depthwise cudnn": 2.0 * window * y.numel() * (makes[0] + makes[1] + 1.5 * makes[2])}
    if last:
        # the weight gradient of large float32 windows is summed one position at a time
        slow = 13.0 if window > 25 and x.dtype == torch.float32 else 1.0
        kind = "depthwise last half" if x.dtype in _HALF else "depthwise last"
        return {kind: 2.0 * window * y.numel() * (makes[0] + 2 * makes[1] + slow * makes[2])}
    return {"depthwise": 2.0 * window * (y.numel() * (makes[0] + 2 * makes[2]) + x.numel() * makes[1])}


def _attention(
    name: str, args: Sequence[Any], inputs: list[Tensor], outputs: list[Tensor], result: Any, halves: Halves
) -> Work:
    """Return the two products of fused attention and its scores, each of which takes an exponential.

    The backward computes the scores anew, and three products more. Of a causal matrix the blocks below the diagonal are
    computed, and those on it, which are masked, count one and a half times.
    """
    backward = "backward" in name
    query, key, values = inputs[1:4] if backward else inputs[:3]
    width = (query.shape[-1] + values.shape[-1]) / 2
    queries, keys, diagonal = query.shape[-2], key.shape[-2], 0.0
    if halves:
        width, queries, keys = max(width, _WIDTH), round_up(queries, _BLOCK), round_up(keys, _BLOCK)
        diagonal = _BLOCK / max(queries, keys)
    scores = float(math.prod(query.shape[:-2])) * queries * keys * (3 if backward else 1)
    place = _place_of_causal(name)
    if place < len(args) and args[place]:
        scores *= min(1.0, 0.5 + diagonal)
    kernel = next((kernel for kernel in ("flash", "cudnn") if kernel in name), "efficient")
    if query.dtype not in halves:
        kernel = "float32"
    return {
        f"attention {kernel}": 4.0 * scores * width,
        "scores": scores * _SCORES[kernel],
        "product bytes": _bytes(inputs + outputs),
        "launch": 1,
    }


@functools.cache
def _place_of_causal(name: str) -> int:
    names = [argument.name for argument in getattr(torch.ops.aten, name).default._schema.arguments]
    return names.index("is_causal") if "is_causal" in names else len(names)


def _recurrence(
    name: str, args: Sequence[Any], inputs: list[Tensor], outputs: list[Tensor], result: Any, halves: Halves
) -> Work:
    """Return the work of an LSTM or GRU layer: its weights are multiplied with each step of each sequence in turn."""
    x, weights = inputs[0], [tensor for tensor in inputs[1:] if tensor.dim() == 2][:2]
    steps = x.shape[0] * x.shape[1]
    flops = 2.0 * steps * sum(weight.numel() for weight in weights) * (2 if "backward" in name else 1)
    return {f"product {_type_of(x, halves)}": flops, "bytes": 2.0 * _bytes(inputs + outputs), "launch": x.shape[0]}


# -- work limited by memory


def _norm(
    name: str, args: Sequence[Any], inputs: list[Tensor], outputs: list[Tensor], result: Any, halves: Halves
) -> Work:
    backward = "backward" in name
    x = inputs[1] if backward else inputs[0]
    if name == "native_batch_norm" and not args[5]:  # with the running statistics
        return {"bytes": _bytes(inputs + outputs), "broadcast": x.numel(), "launch": 1}
    if "batch" in name:
        # cuDNN's batch norm takes float32 and float16 (_select_batch_norm_backend, ATen/native/Normalization.cpp)
        kind = "batch norm backward" if backward else "batch norm"
        kind += " bfloat16" if x.dtype == torch.bfloat16 else ""
        last = x.dim() == 4 and _is_channels_last(x)
        # each channel is one processor's work, so with few channels some processors are idle
        elements = x.numel() if last else x.numel() * max(1.0, _CHANNELS_AT_ONCE / x.shape[1])
        kind += " last" if last else ""
    else:
        # the threads of a row exchange mean and variance; those of a group of channels read one element after the other
        kind = "norm backward" if backward else "norm"
        squares = name == "native_layer_norm" and args[3] is None  # RMS norm (quirk "fused rms norm")
        reads = _MOMENTS[backward] if "group" in name else 1
        elements = reads * x.numel() + _rows_of(name, args, outputs) * (_ROW_OF_SQUARES if squares else _ROW)
    return {"bytes": _bytes(inputs + outputs), kind: elements, "launch": 1}


_CHANNELS_AT_ONCE = 128


def _rows_of(name: str, args: Sequence[Any], outputs: list[Tensor]) -> int:
    """Return the number of rows of a norm over the last dimensions or groups of channels, or of weight norms."""
    if "group" in name:
        return int(args[0].shape[0] * args[6 if "backward" not in name else 8])
    shape = args[1] if "backward" not in name else args[2]
    if isinstance(shape, Tensor):
        return shape.numel()
    x = args[0]
    return int(x.numel() // max(1, math.prod(shape))) if isinstance(shape, Sequence) else 1


def _indexed(
    name: str, args: Sequence[Any], inputs: list[Tensor], outputs: list[Tensor], result: Any, halves: Halves
) -> Work:
    """Return the work of gathers, which read as much as they write, and of scatters, which read a source, read and
    write as many bytes of the result, and read and write the whole result if they are not in place.

    Rows that lie together are read at the rate of memory, others element by element. Gradients of the same row are
    found by sorting (EmbeddingBackwardKernel.cu, Indexing.cu).
    """
    if name in _GATHERS:
        made = sum(tensor.numel() for tensor in outputs)
        places = _bytes(inputs[1:]) if name == "gather" else 0
        work: Work = {"bytes": 2.0 * _bytes(outputs) + places, "launch": 1}
        return work if _gathers_rows(name, args, inputs[0]) else work | {"indexed": made}
    gradient = name == "embedding_dense_backward"
    source = inputs[0] if gradient else inputs[-1]
    made = 0 if name.endswith("_") else _bytes(outputs) * (1 if gradient else 2)
    sorts = gradient or ("index_put" in name and len(args) > 3 and args[3])
    return {
        "bytes": 3.0 * _bytes([source]) + made,
        "indexed": source.numel() * (_ROW_SUMS if gradient else 1),
        "launch": _SORT_LAUNCHES if sorts else 1,
    }


def _gathers_rows(name: str, args: Sequence[Any], x: Tensor) -> bool:
    """True where rows of neighbouring elements are gathered, which threads read together."""
    if name == "gather" or x.dim() < 2 or x.shape[-1] < _TOGETHER:
        return False
    if name == "index":
        return sum(part.dim() if part is not None and part.dtype == torch.bool else 1 for part in args[1]) < x.dim()
    return name == "embedding" or args[1] % x.dim() < x.dim() - 1


def _chosen(
    name: str, args: Sequence[Any], inputs: list[Tensor], outputs: list[Tensor], result: Any, halves: Halves
) -> Work:
    """Return the work of a negative log likelihood: one number of each row; its backward also writes the zeros."""
    logits, target = (inputs[1], inputs[2]) if "backward" in name else (inputs[0], inputs[1])
    return {"bytes": _bytes([*outputs, target]) + target.numel() * logits.itemsize, "launch": 1}


def _reduced(
    name: str, args: Sequence[Any], inputs: list[Tensor], outputs: list[Tensor], result: Any, halves: Halves
) -> Work:
    """Return the work of sums, maxima and means; of running sums, which take each row in turn; and of sorting."""
    x = inputs[0]
    work: Work = {"bytes": _bytes([x, *outputs]), "launch": 1}
    if name in ("topk", "sort"):
        return work | {"reduced": _SORT_READS * x.numel()}
    if name == "cumsum":
        width = x.shape[args[1]] if x.dim() else 1
        return work | {"reduced": x.numel() / max(1, width) * max(3 * width, _RUNNING)}
    if outputs and outputs[0].dtype == torch.float64 != x.dtype:  # copied first (quirk "reduction in another type")
        return {"bytes": work["bytes"] + 2.0 * 8 * x.numel(), "reduced": x.numel(), "launch": 2}
    place = 2 if name.endswith("norm") else 1
    dims = (-2, -1) if "pool" in name else args[place] if len(args) > place else None
    return work | {"reduced": _summed(x, [dims] if isinstance(dims, int) else dims)}


def _summed(x: Tensor, dims: Sequence[int] | None) -> float:
    """Return how many elements of a sum take longer than memory gives them: those of short rows, which leave threads of
    a row idle, and where few outputs lie together, which are split among processors that stage their sums in memory.
    """
    over = {dim % x.dim() for dim in dims} if dims and x.dim() else set(range(x.dim()))
    outputs = math.prod(size for dim, size in enumerate(x.shape) if dim not in over)
    inner = _inner(x)
    if inner in over or not x.dim():
        return x.numel() * min(2.0, _SHORT * outputs / max(1, x.numel()))
    return x.numel() * min(1.0, _FEW / max(1, outputs))


def _resized(
    name: str, args: Sequence[Any], inputs: list[Tensor], outputs: list[Tensor], result: Any, halves: Halves
) -> Work:
    """Return the work of pooling, in which each output reads its window and each gradient all windows around it, and of
    interpolation. Between elements of images in ordinary layout, a thread makes one place of all images and channels
    (upsample_bilinear2d_out_frame, UpSampleBilinear2d.cu).
    """
    work: Work = {"bytes": _bytes(inputs + outputs), "launch": 1}
    made, backward = outputs[0].numel(), "backward" in name
    if name in _POOLS:
        window, *steps = args[1 + backward : 3 + backward]
        if backward:
            window = [-(-size // step) for size, step in zip(window, steps[0] or window, strict=False)]
        return work | {"reduced": made * math.prod(window)}
    larger = max(made, inputs[0].numel())
    if "nearest" in name:
        return work | {"strided": larger}
    planes = made / max(1, math.prod(outputs[0].shape[2:]))
    alone = "bilinear2d" in name and not backward and not _is_channels_last(inputs[0])
    return work | {"strided": _TAPS * larger + _PLANE * planes * alone}


def _streamed(
    name: str, args: Sequence[Any], inputs: list[Tensor], outputs: list[Tensor], result: Any, halves: Halves
) -> Work:
    both = inputs + outputs
    if not both:
        return {"launch": 1}
    if name.startswith(("_foreach", "_fused")):
        return {"bytes": _bytes(both), "launch": -(-len(both) // _POINTERS)}
    elements = max(tensor.numel() for tensor in both)
    work: Work = {"bytes": _bytes(both[1:] if name in _WRITES and inputs else both), "launch": 1}
    if "softmax" in name:
        if name == "_softmax_backward_data":  # multiplies gradient and output first (quirk "softmax backward product")
            work["bytes"] *= 2
        return work | {"softmax": elements}
    largest = [tensor for tensor in both if tensor.numel() == elements]
    alike = all(_lie_alike(tensor, largest[0]) for tensor in largest[1:]) and is_dense(largest[0])
    if name in _COPIES:
        moved = sum(tensor.numel() for tensor in outputs)
        if name in _SHIFTED:
            return work | {"strided": moved}
        if not alike:
            return work | {"strided": moved * (2.0 if _reads_across(inputs, outputs[0]) else 0.5)}
        widens = name == "_to_copy" and inputs[0].itemsize < outputs[0].itemsize  # one element at a time
        return work | {"broadcast": moved} if widens else work
    of_one_size = all(tensor.numel() in (elements, 1, 0) for tensor in both)
    if alike and name not in _COMPUTED and of_one_size:
        return work
    return work | {"broadcast": elements * (1.0 if of_one_size or name not in _COMPUTED else 2.0)}


def _inner(x: Tensor) -> int:
    """Return the dimension whose neighbours lie next to each other."""
    return min(range(x.dim()), key=lambda dim: (x.shape[dim] == 1, x.stride(dim)), default=0)


def _reads_across(inputs: Sequence[Tensor], output: Tensor) -> bool:
    """True where elements that are written side by side are read from different lines of memory."""
    inner = _inner(output)
    return any(x.dim() == output.dim() > 0 and x.stride(inner) >= _LINE for x in inputs)


def _lie_alike(first: Tensor, second: Tensor) -> bool:
    if first.shape != second.shape:
        return False
    if first.stride() == second.stride():
        return True
    both = zip(first.shape, first.stride(), second.stride(), strict=True)
    return all(size == 1 or step == step_of_other for size, step, step_of_other in both)
