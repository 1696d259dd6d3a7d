"""Chains without memory: a workload's layers with parameters that have shapes only.

`trim` makes one or two layers of such a chain real at a time; `measure` reads shapes and bytes from it. Nothing here
changes the workload's own modules.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from varuna_capslog.model.capture.python_calls import WholeModel
from varuna_capslog.model.chain import Chain, Layer
from varuna_capslog.model.hollow import attribute_tensors, built_hollow
from varuna_capslog.model.training_modes import put_in_training
from varuna_capslog.model.workload import Workload

__all__ = ["real_parameter", "real_tensors", "skeleton", "with_real_layers"]


def skeleton(workload: Workload, evaluates: bool = False) -> Chain:
    """Return the workload's chain in training mode with real buffers and all parameters on the meta device; see
    `built_hollow`.

    evaluates: its layers run in eval mode too.
    """
    torch.manual_seed(0)
    build = functools.partial(workload.chosen_chain, evaluates)
    chain, modules = built_hollow(build, lambda built: [layer.module for layer in built.layers])
    put_in_training(modules)
    for part in (part for module in modules for part in module.modules()):
        if isinstance(part, (nn.Embedding, nn.EmbeddingBag)):
            part.sparse = False  # fake tensors are never sparse
    return _with_modules(chain, modules)


def _with_modules(chain: Chain, modules: Sequence[nn.Module]) -> Chain:
    layers = [replace(old, module=new) for old, new in zip(chain.layers, modules, strict=True)]
    return Chain(layers, chain.inputs, chain.outputs, chain.name)


def with_real_layers(chain: Chain, indices: Iterable[int]) -> Chain:
    """Return the chain with memory for these layers, also where others share it; other layers have only shapes."""
    wanted = set(indices)
    memo = real_tensors([chain.layers[index] for index in wanted])
    modules = [layer.module for layer in chain.layers]
    held = [[*module.parameters(), *module.buffers()] for module in modules]
    # the others stay as they are: copying a large model for every rank would take longer than its rehearsal
    copied = [at for at in range(len(chain)) if at in wanted or any(id(tensor) in memo for tensor in held[at])]
    for tensor in (tensor for at in copied for tensor in held[at]):
        memo.setdefault(id(tensor), tensor)
    for at, module in zip(copied, copy.deepcopy([modules[at] for at in copied], memo), strict=True):
        modules[at] = module
    return _with_modules(chain, modules)


def real_tensors(layers: Sequence[Layer], only: set[int] | None = None) -> dict[int, Any]:
    """Return a deep copy's memo with real parameters (`only` those of these identities) and buffers of the layers."""
    memo: dict[int, Any] = {}
    for layer in layers:
        for parameter in layer.module.parameters():
            if id(parameter) not in memo and (only is None or id(parameter) in only):
                memo[id(parameter)] = real_parameter(parameter)
        # not left to deepcopy, which cannot copy a tensor, or a generator, into the fake world of an estimate
        whole_models = [layer.module.model] if isinstance(layer.module, WholeModel) else []
        tensors = [*layer.module.buffers(), *attribute_tensors([layer.module, *whole_models])]
        memo |= {id(tensor): tensor.detach().clone() for tensor in tensors}
        kept = (value for part in (*layer.module.modules(), *whole_models) for value in vars(part).values())
        memo |= {id(value): value for value in kept if isinstance(value, torch.Generator)}
    return memo


def real_parameter(parameter: nn.Parameter) -> nn.Parameter:
    """Return a parameter of that shape in host memory, with values that keep activations finite."""
    values = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype)
    if parameter.dim() > 1:
        nn.init.normal_(values, std=(parameter.shape[0] / max(parameter.numel(), 1)) ** 0.5)
    else:
        values.fill_(0.5)
    return nn.Parameter(values, requires_grad=parameter.requires_grad)
