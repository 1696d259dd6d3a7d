"""Modules without memory: real buffers, and parameters that have shapes only.

Profiles are made of such modules, and a chain of factories keeps one for every layer that is not built. A module is
built by its own code; each parameter is freed as soon as it is registered.
"""

from __future__ import annotations

import copy
import logging
import mmap
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_impls import op_implementations_dict, register_op_impl
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.model.quantised import QuantisedLinear, base_of

__all__ = [
    "VALUE_ERRORS",
    "NeedsValues",
    "ReadNumbers",
    "Stripped",
    "a_number",
    "attribute_tensors",
    "built_hollow",
    "hollow_copy",
    "hollow_parameter",
    "kept_tensors",
    "on_host",
    "replace_parameters",
    "unlogged",
]


# -- Registers shapes for operators that torch's kernels run but its fake tensors refuse.
#
# `torch._grouped_mm`, the product of experts, runs in float32 on processors and on CUDA devices, one product per
# expert; its shape function takes 16-bit matrices only.


_ROW_BYTES = 16  # every row of the product begins at a multiple of this


def _grouped_mm(mode: FakeTensorMode, operator: Any, first: Tensor, second: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Return the product of float32 matrices as the kernel lays it out; leave other types to torch's own function."""
    groups: Any = args[0] if args else kwargs.get("offs")
    if first.dtype != torch.float32 or second.dtype != torch.float32:
        return NotImplemented
    rows, columns = first.shape[-2], second.shape[-1]
    if first.dim() == second.dim():  # one matrix per group: the gradient of weights, or a batch
        batch = groups.shape[0] if first.dim() == 2 else first.shape[0]
        sizes = [batch, rows, columns]
    else:
        sizes = [rows, columns]
    step = _ROW_BYTES // first.element_size()
    padded = -(-columns // step) * step
    strides = [rows * padded, padded, 1][-len(sizes) :]
    with mode:
        return torch.empty_strided(sizes, strides, dtype=torch.float32, device=first.device)


if torch.ops.aten._grouped_mm.default not in op_implementations_dict:  # a later torch may bring its own
    register_op_impl(torch.ops.aten._grouped_mm.default)(_grouped_mm)


# -- Modules without memory


_Built = TypeVar("_Built")
Stripped = dict[int, tuple["weakref.ref[nn.Parameter]", nn.Parameter]]
"""id of a parameter -> the parameter, and its replacement on the meta device."""


def built_hollow(
    build: Callable[[], _Built], modules: Callable[[_Built], Sequence[nn.Module]], stripped: Stripped | None = None
) -> tuple[_Built, list[nn.Module]]:
    """Return the result of `build`, and its modules with real buffers but all parameters on the meta device.

    A parameter moves there as soon as a module registers it, so that a model larger than the host's memory can be
    built. A model whose constructor reads its weights is built with them, and they are replaced afterwards. Buffers
    that `build` itself puts on the meta device have no values: they become zeros.

    Args:
        modules: returns the modules of the result, which are not changed.
        stripped: replacements from earlier calls, so that a parameter of an earlier build has the same one here.
    """
    stripped = {} if stripped is None else stripped
    try:
        with _parameters_on_meta(stripped) as made_on_meta:
            built = build()
        parts = modules(built)
        valueless = any(buffer.is_meta for module in parts for buffer in module.buffers())
        needs_weights = valueless and not made_on_meta
    except Exception:
        needs_weights = True  # if the missing weights were not the cause, the second build raises the error again
    if needs_weights:
        built = build()
        parts = modules(built)
    return built, copy.deepcopy(list(parts), _hollow_memo(parts, stripped))


def hollow_copy(model: nn.Module) -> nn.Module:
    """Copy a model with its own buffers on the CPU, and parameters that have shapes only; `model` is not changed.
    Raises CapslogError where it holds something that cannot be copied, such as a tensor computed from a parameter.
    """
    memo = _hollow_memo([model], {})
    memo |= {id(buffer): buffer.detach().to("cpu", copy=True) for buffer in model.buffers() if not buffer.is_meta}
    try:
        return copy.deepcopy(model, memo)
    except (RuntimeError, TypeError) as error:
        raise CapslogError(
            f"the {type(model).__name__} cannot be copied ({' '.join(str(error).split())}); give a function that "
            "builds it, as 'package.module:function'"
        ) from error


def hollow_parameter(parameter: nn.Parameter) -> nn.Parameter:
    """Return a parameter of the same shape that takes no memory."""
    return nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)


def replace_parameters(modules: Iterable[nn.Module], replaced: Mapping[nn.Parameter, nn.Parameter]) -> None:
    """Replace each parameter that is a key of `replaced` by its value, under all its names."""
    for module in modules:
        for part in module.modules():
            for name, parameter in part._parameters.items():
                if parameter is not None and parameter in replaced:
                    part._parameters[name] = replaced[parameter]


@contextmanager
def on_host(model: nn.Module) -> Iterator[None]:
    """Replace the model's meta tensors by tensors on the CPU inside the block, for code that reads devices.

    They take no memory and nothing is written to them: all share one range of addresses, as long as the largest needs,
    and the values are undefined. Tied parameters stay tied.
    """
    hollow = [tensor for tensor in (*model.parameters(), *model.buffers()) if tensor.is_meta]
    addresses = _addresses(max(map(_extent, hollow), default=0))
    parameters = {tensor: _placed(tensor, addresses) for tensor in hollow if isinstance(tensor, nn.Parameter)}
    buffers = {tensor: _placed(tensor, addresses) for tensor in hollow if not isinstance(tensor, nn.Parameter)}
    replace_parameters([model], parameters)
    _replace_buffers(model, buffers)
    try:
        yield
    finally:
        replace_parameters([model], {new: old for old, new in parameters.items()})
        _replace_buffers(model, {new: old for old, new in buffers.items()})


def _addresses(size: int) -> mmap.mmap:
    """Return a range of addresses that takes no memory, and counts for no memory limit, until something is written."""
    kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NOT_COUNTED
    return mmap.mmap(-1, max(1, size), flags=kind)


_NOT_COUNTED = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)


def _extent(tensor: Tensor) -> int:
    """Return the bytes from a tensor's first element to the end of its last."""
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.itemsize if tensor.numel() else 0


def _placed(tensor: Tensor, addresses: mmap.mmap) -> Any:
    """Return a tensor of the same shape, dtype and kind at these addresses, with a storage object of its own."""
    storage = torch.frombuffer(addresses, dtype=torch.uint8, count=max(1, _extent(tensor))).untyped_storage()
    placed = torch.empty(0, dtype=tensor.dtype).set_(storage, 0, tensor.shape, tensor.stride())
    return nn.Parameter(placed, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else placed


def _replace_buffers(model: nn.Module, replaced: Mapping[Tensor, Tensor]) -> None:
    for part in model.modules():
        for name, buffer in part._buffers.items():
            if buffer is not None and buffer in replaced:
                part._buffers[name] = replaced[buffer]


def _hollow_memo(modules: Sequence[nn.Module], stripped: Stripped) -> dict[int, object]:
    memo: dict[int, object] = {}
    for module in modules:
        for parameter in module.parameters():
            memo[id(parameter)] = _on_meta(parameter, stripped)
        for buffer in module.buffers():
            memo[id(buffer)] = torch.zeros_like(buffer, device="cpu") if buffer.is_meta else buffer
        linear: Any
        for linear in module.modules():
            if (base := base_of(linear)) is not None:
                memo[id(linear)] = layer = QuantisedLinear(linear, base).to("meta")
                layer.register_parameter("bias", None if linear.bias is None else _on_meta(linear.bias, stripped))
    return kept_tensors(modules) | memo


def kept_tensors(modules: Iterable[nn.Module]) -> dict[int, object]:
    """Return a memo for deep copies of modules that keep, as attributes, tensors that torch cannot copy: a computed
    tensor, such as the weight of `weight_norm`, is replaced by its values; a meta tensor is not copied.
    """
    return {
        id(tensor): tensor.detach() for tensor in attribute_tensors(modules) if tensor.is_meta or not tensor.is_leaf
    }


def attribute_tensors(modules: Iterable[nn.Module]) -> Iterator[Tensor]:
    """Yield the tensors that modules keep as plain attributes, also in lists, tuples and dicts."""
    for module in modules:
        for part in module.modules():
            attributes = {name: value for name, value in vars(part).items() if name not in _TABLES}
            for leaf in pytree.tree_leaves(attributes):
                if isinstance(leaf, Tensor) and not isinstance(leaf, nn.Parameter):
                    yield leaf


_TABLES = ("_parameters", "_buffers", "_modules")


@contextmanager
def _parameters_on_meta(stripped: Stripped) -> Iterator[list[nn.Parameter]]:
    """Replace the parameters of modules that are built in the block, by torch's registration hook. Yields a list, with
    the first parameter that the building code itself made on the meta device, if any.
    """
    ours: set[nn.Parameter] = set()
    theirs: list[nn.Parameter] = []

    def strip(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None:
            return None
        if parameter.is_meta and parameter not in ours and not theirs:
            theirs.append(parameter)
        hollow = _on_meta(parameter, stripped)
        ours.add(hollow)
        return hollow

    # the hook's result replaces the parameter; torch's annotation allows only None
    handle = register_module_parameter_registration_hook(strip)  # type: ignore[arg-type]
    try:
        yield theirs
    finally:
        handle.remove()


def _on_meta(parameter: nn.Parameter, stripped: Stripped) -> nn.Parameter:
    """Return the meta parameter that replaces a parameter, always the same, so that tied parameters stay tied."""
    if parameter.is_meta:
        return parameter
    stored = stripped.get(id(parameter))
    # a weak reference: weights that the model drops must be freed, and another object may get their id
    if stored is None or stored[0]() is not parameter:
        hollow = hollow_parameter(parameter)
        stored = stripped[id(parameter)] = (weakref.ref(parameter), hollow)
    return stored[1]


class ReadNumbers(TorchDispatchMode):
    """Mode in which reading a number out of a fake tensor gives `a_number`."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return a_number(args[0].dtype)
        return func(*args, **(kwargs or {}))


VALUE_ERRORS = (DataDependentOutputException, DynamicOutputShapeException)
"""Errors that fake tensors raise where the result or its shape depends on values."""


@contextmanager
def unlogged() -> Iterator[None]:
    """Silence torch's traceback of an operator that refuses fake tensors; the error that follows has the reason."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


class NeedsValues(CapslogError):
    """Code (`what`) that cannot run on tensors without values; `why`: torch's reason."""

    def __init__(self, what: str, why: object) -> None:
        super().__init__(
            f"{what} cannot run on tensors without values ({why}), which plans and profiles are made on; give it fixed "
            "sizes, or set pipeline.cuts and no pipeline.capacity, with which a run needs no profile"
        )
        self.what, self.why = what, why


def a_number(dtype: torch.dtype) -> bool | int | float:
    """Return the number read out of a fake tensor: True, 1 or 1.5, by which torch's optimizers can divide."""
    if dtype == torch.bool:
        return True
    return 1.5 if dtype.is_floating_point else 1
