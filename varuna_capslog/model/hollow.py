"""Modules without memory: real buffers, and parameters that have shapes only.

Profiles are made of such modules, and a chain of factories keeps one in the place of every layer that is not built. All
of a module is built by its own code; each parameter leaves memory as soon as it is registered.
"""

from __future__ import annotations

import copy
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from varuna_capslog.base.errors import CapslogError

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

_Built = TypeVar("_Built")
Stripped = dict[int, tuple["weakref.ref[nn.Parameter]", nn.Parameter]]
"""Which parameter of shape only stands for which parameter, by the latter's identity."""


def built_hollow(
    build: Callable[[], _Built], modules: Callable[[_Built], Sequence[nn.Module]], stripped: Stripped | None = None
) -> tuple[_Built, list[nn.Module]]:
    """What `build` gives, and its modules with real buffers but all parameters on the meta device.

    While it is built every parameter is moved there as soon as a module registers it, so that a model larger than the
    host can be built; one that needs its weights while it is built is built whole and then stripped. What `build` puts
    on the meta device itself has no values: buffers get zeros.

    Args:
        modules: those of what was built. They are not changed.
        stripped: from earlier calls, so that a parameter that they had, too, is the same one here.
    """
    stripped = {} if stripped is None else stripped
    try:
        with _parameters_on_meta(stripped) as given_on_meta:
            built = build()
        found = modules(built)
        valueless = any(buffer.is_meta for module in found for buffer in module.buffers())
        needs_weights = valueless and not given_on_meta
    except Exception:
        needs_weights = True  # whatever went wrong: if it was not for the missing weights, this raises it again
    if needs_weights:
        built = build()
        found = modules(built)
    return built, copy.deepcopy(list(found), _hollow_memo(found, stripped))


def hollow_copy(model: nn.Module) -> nn.Module:
    """A copy with buffers of its own on the CPU, and parameters that have shapes only; `model` is not changed.

    Raises:
        CapslogError: the module holds what cannot be copied, such as a tensor that was computed from a parameter.
    """
    memo = _hollow_memo([model], {})
    memo |= {id(one): one.detach().to("cpu", copy=True) for one in model.buffers() if not one.is_meta}
    try:
        return copy.deepcopy(model, memo)
    except (RuntimeError, TypeError) as error:
        raise CapslogError(
            f"the {type(model).__name__} cannot be copied ({' '.join(str(error).split())}); give a function that "
            "builds it, as 'package.module:function'"
        ) from error


def hollow_parameter(parameter: nn.Parameter) -> nn.Parameter:
    """A parameter of the same shape that takes no memory."""
    return nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)


def replace_parameters(modules: Iterable[nn.Module], replaced: Mapping[nn.Parameter, nn.Parameter]) -> None:
    """Puts each parameter that is a value of `replaced` in the place of its key, under all its names."""
    for module in modules:
        for part in module.modules():
            for name, parameter in part._parameters.items():
                if parameter is not None and parameter in replaced:
                    part._parameters[name] = replaced[parameter]


@contextmanager
def on_host(model: nn.Module) -> Iterator[None]:
    """While it is open, what `model` has on the meta device has host memory instead, for code that asks for devices.

    Nothing is written there, so that it stays a reservation of addresses; the values are undefined. Tied parameters
    stay tied, and afterwards the model holds what it held before.
    """
    parameters = {one: _reserved(one) for one in model.parameters() if one.is_meta}
    buffers = {one: _reserved(one) for one in model.buffers() if one.is_meta}
    replace_parameters([model], parameters)
    _replace_buffers(model, buffers)
    try:
        yield
    finally:
        replace_parameters([model], {new: old for old, new in parameters.items()})
        _replace_buffers(model, {new: old for old, new in buffers.items()})


def _reserved(tensor: Tensor) -> Any:
    empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    return nn.Parameter(empty, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


def _replace_buffers(model: nn.Module, replaced: Mapping[Tensor, Tensor]) -> None:
    for part in model.modules():
        for name, buffer in part._buffers.items():
            if buffer is not None and buffer in replaced:
                part._buffers[name] = replaced[buffer]


def _hollow_memo(modules: Sequence[nn.Module], stripped: Stripped) -> dict[int, object]:
    """What a deep copy puts in place of parameters and buffers."""
    memo: dict[int, object] = {}
    for module in modules:
        for parameter in module.parameters():
            memo[id(parameter)] = _on_meta(parameter, stripped)
        for buffer in module.buffers():
            memo[id(buffer)] = torch.zeros_like(buffer, device="cpu") if buffer.is_meta else buffer
    return kept_tensors(modules) | memo


def kept_tensors(modules: Iterable[nn.Module]) -> dict[int, object]:
    """What a deep copy puts in place of the tensors that modules keep as attributes, where torch cannot copy them: the
    values of one with a gradient, such as the weight that `weight_norm` computes, and one without memory itself.
    """
    return {id(one): one.detach() for one in attribute_tensors(modules) if one.is_meta or not one.is_leaf}


def attribute_tensors(modules: Iterable[nn.Module]) -> Iterator[Tensor]:
    """The tensors that modules keep as plain attributes, also in lists, tuples and dicts."""
    for module in modules:
        for part in module.modules():
            own = {name: value for name, value in vars(part).items() if name not in _TABLES}
            for leaf in pytree.tree_leaves(own):
                if isinstance(leaf, Tensor) and not isinstance(leaf, nn.Parameter):
                    yield leaf


_TABLES = ("_parameters", "_buffers", "_modules")


@contextmanager
def _parameters_on_meta(stripped: Stripped) -> Iterator[list[nn.Parameter]]:
    """For modules that are built while it is open, by torch's own hook for it; gives the first parameter that was made
    on the meta device by whoever builds, once there is one.
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

    # what the hook returns takes the parameter's place; torch's annotation knows only None
    handle = register_module_parameter_registration_hook(strip)  # type: ignore[arg-type]
    try:
        yield theirs
    finally:
        handle.remove()


def _on_meta(parameter: nn.Parameter, stripped: Stripped) -> nn.Parameter:
    """One parameter of shape only per parameter, so that tied ones stay tied."""
    if parameter.is_meta:
        return parameter
    known = stripped.get(id(parameter))
    # weakly: weights that the model has let go must leave memory, and their identity may come again
    if known is None or known[0]() is not parameter:
        hollow = hollow_parameter(parameter)
        known = stripped[id(parameter)] = (weakref.ref(parameter), hollow)
    return known[1]


class ReadNumbers(TorchDispatchMode):
    """While it is open, reading a number out of a fake tensor gives `a_number`."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return a_number(args[0].dtype)
        return func(*args, **(kwargs or {}))


VALUE_ERRORS = (DataDependentOutputException, DynamicOutputShapeException)
"""What fake tensors raise where values decide something."""


@contextmanager
def unlogged() -> Iterator[None]:
    """torch logs a traceback where an operator refuses fake tensors; the error that follows says what a user needs."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


class NeedsValues(CapslogError):
    """Something that cannot run on tensors without values, which profiles and plans are made on.

    Args:
        what: that is.
        why: in torch's words.
    """

    def __init__(self, what: str, why: object) -> None:
        super().__init__(
            f"{what} cannot run on tensors without values ({why}), which plans and profiles are made on; give it fixed "
            "sizes, or set pipeline.cuts and no pipeline.capacity, with which a run needs no profile"
        )
        self.what, self.why = what, why


def a_number(dtype: torch.dtype) -> bool | int | float:
    """What reading a number out of a fake tensor gives: True, 1 or 1.5, by which an optimizer of torch can divide, and
    by whose difference from 1, too.
    """
    if dtype == torch.bool:
        return True
    return 1.5 if dtype.is_floating_point else 1
