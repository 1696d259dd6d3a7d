"""Chains without memory: a workload's layers with parameters that have shapes only.

`trim` makes one or two layers of such a chain real at a time; `measure` reads shapes and bytes from it. Nothing here
changes the workload's own modules.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from varuna_capslog.model.chain import Chain, Layer
from varuna_capslog.model.workload import Workload

__all__ = ["hollow_module", "real_parameter", "real_tensors", "skeleton", "with_real_layers"]

_Built = TypeVar("_Built")
_Stripped = dict[int, tuple["weakref.ref[nn.Parameter]", nn.Parameter]]


def skeleton(workload: Workload) -> Chain:
    """The workload's chain with real buffers but all parameters on the meta device.

    While it is built every parameter is moved there as soon as a module registers it, so that a model larger than the
    host can be profiled; a model that needs its weights while it is built is built whole and then stripped.
    """
    chain, stripped = _built(workload.build_chain)
    modules = [layer.module for layer in chain.layers]
    return _with_modules(chain, copy.deepcopy(modules, _hollow_memo(modules, stripped)))


def hollow_module(build: Callable[[], nn.Module]) -> nn.Module:
    """The same for one module: what `build` gives, with real buffers and all parameters on the meta device."""
    module, stripped = _built(build)
    hollow: nn.Module = copy.deepcopy(module, _hollow_memo([module], stripped))
    return hollow


def _built(build: Callable[[], _Built]) -> tuple[_Built, _Stripped]:
    torch.manual_seed(0)
    stripped: _Stripped = {}
    try:
        with _parameters_on_meta(stripped):
            return build(), stripped
    except Exception:
        # whatever went wrong: if it was not for the missing weights, this raises it again
        return build(), stripped


def _hollow_memo(modules: Sequence[nn.Module], stripped: _Stripped) -> dict[int, object]:
    """What a deep copy puts in place of parameters and buffers."""
    memo: dict[int, object] = {}
    for module in modules:
        for parameter in module.parameters():
            memo[id(parameter)] = _on_meta(parameter, stripped)
        for buffer in module.buffers():
            memo[id(buffer)] = buffer
    return memo


@contextmanager
def _parameters_on_meta(stripped: _Stripped) -> Iterator[None]:
    """For modules that are built while it is open, by torch's own hook for it."""

    def strip(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        return None if parameter is None else _on_meta(parameter, stripped)

    # what the hook returns takes the parameter's place; torch's annotation knows only None
    handle = register_module_parameter_registration_hook(strip)  # type: ignore[arg-type]
    try:
        yield
    finally:
        handle.remove()


def _on_meta(parameter: nn.Parameter, stripped: _Stripped) -> nn.Parameter:
    """One parameter of shape only per parameter, so that tied ones stay tied."""
    if parameter.is_meta:
        return parameter
    known = stripped.get(id(parameter))
    # weakly: weights that the model has let go must leave memory, and their identity may come again
    if known is None or known[0]() is not parameter:
        hollow = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
        known = stripped[id(parameter)] = (weakref.ref(parameter), hollow)
    return known[1]


def _with_modules(chain: Chain, modules: Sequence[nn.Module]) -> Chain:
    layers = [Layer(old.name, new, old.reads, old.writes) for old, new in zip(chain.layers, modules, strict=True)]
    return Chain(layers, chain.inputs, chain.outputs, chain.name)


def with_real_layers(chain: Chain, indices: Iterable[int]) -> Chain:
    """The chain with memory for these layers, also where other layers share it; the rest keep shapes alone."""
    memo = real_tensors([chain.layers[index] for index in indices])
    modules = [layer.module for layer in chain.layers]
    for module in modules:
        for tensor in (*module.parameters(), *module.buffers()):
            memo.setdefault(id(tensor), tensor)
    return _with_modules(chain, copy.deepcopy(modules, memo))


def real_tensors(layers: Sequence[Layer], only: set[int] | None = None) -> dict[int, Any]:
    """What a deep copy puts in place of the layers' parameters (`only` those of these identities) and buffers."""
    memo: dict[int, Any] = {}
    for layer in layers:
        for parameter in layer.module.parameters():
            if id(parameter) not in memo and (only is None or id(parameter) in only):
                memo[id(parameter)] = real_parameter(parameter)
        # not left to deepcopy, which cannot copy a tensor into the fake world of an estimate
        memo |= {id(buffer): buffer.detach().clone() for buffer in layer.module.buffers()}
    return memo


def real_parameter(parameter: nn.Parameter) -> nn.Parameter:
    """A parameter of that shape in host memory, of values that keep activations finite."""
    values = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype)
    if parameter.dim() > 1:
        nn.init.normal_(values, std=(parameter.shape[0] / max(parameter.numel(), 1)) ** 0.5)
    else:
        values.fill_(0.5)
    return nn.Parameter(values, requires_grad=parameter.requires_grad)
