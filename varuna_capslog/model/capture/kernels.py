"""Calls of fused kernels for recurrences (linear attention, state spaces) as single operators of captured graphs.

transformers swaps such a function for a kernel of another package where that is installed, and else loops over the
sequence in Python. A graph holds the call, for any length of the loop. A run of the graph makes the module's own call;
an estimate for a device that has the kernel runs an operator with the kernel's bytes and FLOPs instead (`as_fused`).
"""

from __future__ import annotations

import functools
import inspect
import json
import logging
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from varuna_capslog.base.errors import CapslogError

__all__ = ["as_fused", "as_shapes", "kernels_stay_calls"]

_LIBRARY = torch.library.Library("capslog", "FRAGMENT")
_LIBRARY.define("kernel_call(Tensor[] tensors, str function, str call) -> Tensor")
_LIBRARY.define(
    "fused_scan(Tensor[] tensors, int[] size, int kept_bytes, int passing_bytes, float flops) "
    "-> (Tensor, Tensor, Tensor)"
)
_LIBRARY.define(
    "fused_scan_backward(Tensor gradient, Tensor[] saved, int[] sizes, str[] types, int passing_bytes, "
    "float flops) -> Tensor[]"
)
_CHUNK = 64
"""Positions that the kernels of flash-linear-attention handle as matrices."""
_BACKWARD = 3.0
"""FLOPs of a backward per FLOP of the forward: two products for each product, and most of the forward again."""
_log = logging.getLogger(__name__)
_open: list[str] = []
"""Open contexts of this module: "shapes" where only shapes are needed, "fused" in an estimate."""


class _Cost(NamedTuple):
    """Cost of a kernel. size: sizes of the result. saved: names of arguments that the backward reads. saves_result:
    True if it reads the result. kept_bytes: other bytes kept for it; passing_bytes: bytes held during the call.
    """

    size: Sequence[int]
    saved: Sequence[str]
    saves_result: bool
    kept_bytes: int
    passing_bytes: int
    flops: float


def _delta_rule(tensors: Mapping[str, Tensor], constants: Mapping[str, Any], matrices: int = 1) -> _Cost:
    """Return the cost of a gated delta rule by chunks (arXiv 2412.06464, section 3.3): two triangular products of
    `_CHUNK` keys, a state of keys x values for each chunk. The backward recomputes the states.
    """
    query, key, value = tensors["query"], tensors["key"], tensors["value"]
    (batch, tokens, _, keys), (heads, values) = key.shape, value.shape[-2:]
    rows = batch * tokens * heads
    kept_bytes = matrices * rows * _CHUNK * key.itemsize + 4 * tensors["g"].numel()
    saved = ["value", "beta"]
    if constants.get("use_qk_l2norm_in_kernel"):
        kept_bytes += sum(each.numel() * each.itemsize + 4 * each.numel() // keys for each in (query, key))
    else:
        saved += ["query", "key"]
    states = batch * math.ceil(tokens / _CHUNK) * heads * keys * values
    passing_bytes = key.itemsize * (states + rows * (keys + 2 * values))
    flops = 2.0 * rows * (_CHUNK * (3 * keys + 2 * values) + 3 * keys * values)
    return _Cost(value.shape, saved, False, kept_bytes, passing_bytes, flops)


def _state_space(tensors: Mapping[str, Tensor], constants: Mapping[str, Any]) -> _Cost:
    """Return the cost of a state space model by chunks (arXiv 2405.21060, section 6)."""
    x = tensors["hidden_states"]
    (batch, tokens, heads, width), (groups, state) = x.shape, tensors["B"].shape[-2:]
    chunk = int(constants["chunk_size"])
    rows, chunks = batch * tokens, batch * math.ceil(tokens / chunk)
    passing_bytes = 4 * (2 * chunks * heads * width * state + chunks * groups * chunk**2 + rows * heads)
    flops = 2.0 * rows * (groups * chunk * state + heads * (chunk * width + 2 * width * state))
    return _Cost(x.shape, list(tensors), True, 4 * rows * heads, passing_bytes, flops)


class _Kernel(NamedTuple):
    """Fused kernel. cost: computes the cost of a call. pair: True if it returns (result, last state). widens: dtype of
    the result of transformers' Python code; None: the first argument's.
    """

    cost: Callable[[Mapping[str, Tensor], Mapping[str, Any]], _Cost]
    pair: bool
    widens: torch.dtype | None = None


_KERNELS = {
    "chunk_gated_delta_rule": _Kernel(_delta_rule, True),
    "chunk_kda": _Kernel(functools.partial(_delta_rule, matrices=2), True),
    "mamba_chunk_scan_combined": _Kernel(_state_space, False, torch.float32),
}
"""Kernels by the names of their functions in flash-linear-attention and mamba-ssm."""


class _Swapped(NamedTuple):
    """Function that transformers' decorator replaces by a kernel. kernel, package: the kernel's name and package.
    plain: the function in Python. takes: names of the arguments that the decorator passes on.
    """

    kernel: str
    package: str
    plain: Callable[..., Any]
    takes: tuple[str, ...]


def _swapped(function: Any) -> _Swapped | None:
    """Describe a function decorated by `use_kernel_func_from_hub_with_fallback`; None for others, or other kernels."""
    code = getattr(function, "__code__", None)
    names = ("func_name", "package", "torch_function", "applicable_params")
    if code is None or not set(names) <= set(code.co_freevars):
        return None
    cells = dict(zip(code.co_freevars, function.__closure__, strict=True))
    swapped = _Swapped(*(cells[name].cell_contents for name in names))
    return swapped if swapped.kernel in _KERNELS else None


@contextmanager
def kernels_stay_calls(model: nn.Module) -> Iterator[None]:
    """Let an export in the block put the model's calls of fused kernels into its graph as single operators."""
    replaced = []
    for name in {type(module).__module__ for module in model.modules()}:
        namespace = vars(sys.modules[name]) if name in sys.modules else {}
        for key, function in list(namespace.items()):
            if (swapped := _swapped(function)) is not None:
                namespace[key] = functools.partial(_stand_in, f"{name}:{key}", function, swapped)
                replaced.append((namespace, key, function))
    try:
        with as_shapes():
            yield
    finally:
        for namespace, key, function in replaced:
            namespace[key] = function


def as_shapes() -> AbstractContextManager[None]:
    """Let kernel calls in the block, on tensors without values, return the shape and dtype of the Python code."""
    return _opened("shapes")


def as_fused() -> AbstractContextManager[None]:
    """Let kernel calls in the block, on tensors without values, have the bytes and FLOPs of the fused kernels."""
    return _opened("fused")


@contextmanager
def _opened(name: str) -> Iterator[None]:
    _open.append(name)
    try:
        yield
    finally:
        _open.remove(name)


def _stand_in(name: str, function: Callable[..., Any], swapped: _Swapped, *args: Any, **kwargs: Any) -> Any:
    kwargs = {key: argument for key, argument in kwargs.items() if key in swapped.takes}
    states = [key for key in kwargs if key.startswith(("output_final", "return_final", "initial", "cu_seq", "seq_idx"))]
    if any(kwargs[key] is not None and kwargs[key] is not False for key in states):
        return function(*args, **kwargs)  # serving, or packed sequences
    tensors: list[Tensor] = []

    def text_of(argument: Any) -> Any:
        if isinstance(argument, Tensor):
            tensors.append(argument)
            return {"tensor": len(tensors) - 1}
        return argument

    call = {"args": list(map(text_of, args)), "kwargs": {key: text_of(kwargs[key]) for key in kwargs}}
    try:
        text = json.dumps(call)
    except TypeError:
        return function(*args, **kwargs)
    result = torch.ops.capslog.kernel_call(tensors, name, text)
    return (result, None) if _KERNELS[swapped.kernel].pair else result


def _call(tensors: list[Tensor], function: str, call: str) -> Tensor:
    """Call a kernel; return its result. function: "module:name"; call: the arguments as JSON."""

    def argument_of(text: Any) -> Any:
        if isinstance(text, dict):
            return tensors[text["tensor"]]
        return tuple(text) if isinstance(text, list) else text

    described = json.loads(call)
    args = [argument_of(text) for text in described["args"]]
    kwargs = {key: argument_of(text) for key, text in described["kwargs"].items()}
    called, swapped = _function(function)
    if not _open:
        returned = called(*args, **kwargs)
        return returned[0] if isinstance(returned, tuple) else returned
    kernel = _KERNELS[swapped.kernel]
    arguments = inspect.signature(swapped.plain).bind(*args, **kwargs).arguments
    named = {key: argument for key, argument in arguments.items() if isinstance(argument, Tensor)}
    cost = kernel.cost(named, arguments)
    if _open[-1] == "shapes":
        result = tensors[0].new_empty(cost.size, dtype=kernel.widens)
        return result.requires_grad_(torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors))
    _tell(swapped.kernel, swapped.package)
    return _FusedScan.apply(cost, [list(named).index(name) for name in cost.saved], *named.values())


def _function(name: str) -> tuple[Callable[..., Any], _Swapped]:
    """Return a kernel's function in a model's code that this process has imported. Raises CapslogError for others."""
    module, _, key = name.partition(":")
    function: Any = getattr(sys.modules.get(module), key, None)
    if isinstance(function, functools.partial):  # in an export
        function = function.args[1]
    swapped = _swapped(function)
    if swapped is None:
        raise CapslogError(f"the captured model calls {name}, which this transformers has not; capture it again")
    return function, swapped


@functools.cache
def _tell(kernel: str, package: str) -> None:
    if package not in sys.modules:
        _log.warning(
            "the model is estimated with the fused kernel %s of %s; where that package is not installed, training runs "
            "transformers' own Python instead, which is far slower and holds more",
            kernel,
            package,
        )


class _FusedScan(torch.autograd.Function):
    """Kernel on tensors without values."""

    @staticmethod
    def forward(ctx: Any, cost: _Cost, saved: Sequence[int], *tensors: Tensor) -> Tensor:
        """Return the result; save the tensors that the backward reads."""
        result, kept, _ = torch.ops.capslog.fused_scan(
            list(tensors), list(cost.size), cost.kept_bytes, cost.passing_bytes, cost.flops
        )
        ctx.cost, ctx.forms = cost, [(tensor.shape, tensor.dtype) for tensor in tensors]
        ctx.save_for_backward(*(tensors[place] for place in saved), kept, *([result] if cost.saves_result else []))
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """Return the gradients of all tensors."""
        *gradients, _ = torch.ops.capslog.fused_scan_backward(
            *(gradient, list(ctx.saved_tensors), [shape.numel() for shape, _ in ctx.forms]),
            *(
                [str(dtype).removeprefix("torch.") for _, dtype in ctx.forms],
                2 * ctx.cost.passing_bytes,
                _BACKWARD * ctx.cost.flops,
            ),
        )
        return None, None, *(flat.view(shape) for flat, (shape, _) in zip(gradients, ctx.forms, strict=True))


def _scan(
    tensors: list[Tensor], size: list[int], kept_bytes: int, passing_bytes: int, flops: float
) -> tuple[Tensor, Tensor, Tensor]:
    kept, passing = (tensors[0].new_empty(count, dtype=torch.uint8) for count in (kept_bytes, passing_bytes))
    return tensors[0].new_empty(size), kept, passing


def _scan_backward(
    gradient: Tensor,
    saved: list[Tensor],
    sizes: list[int],
    types: list[str],
    passing_bytes: int,
    flops: float,
) -> list[Tensor]:
    # Types by name: torch 2.11 hands dtypes of a list to Python as numbers.
    blocks = [*zip(sizes, types, strict=True), (passing_bytes, "uint8")]
    return [gradient.new_empty(size, dtype=getattr(torch, name)) for size, name in blocks]


_LIBRARY.impl("kernel_call", _call, "CompositeImplicitAutograd")
torch.library.register_fake("capslog::fused_scan", _scan, lib=_LIBRARY)
torch.library.register_fake("capslog::fused_scan_backward", _scan_backward, lib=_LIBRARY)
