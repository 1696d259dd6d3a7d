"""Records the allocations of any training loop, run on fake tensors of a GPU without a device.

The library's estimates drive its own engine. Here the loop is external: the model becomes fake, the loop runs inside
`Quirks.dispatch` and `Lifetimes`, and the events are replayed.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from varuna_capslog.profiling.estimation.allocator import Event
from varuna_capslog.profiling.estimation.lifetimes import Lifetimes
from varuna_capslog.profiling.estimation.quirks import CUBLASLT_WORKSPACE, Quirks

__all__ = ["follow", "summary"]

Loop = Callable[[nn.Module, Lifetimes], None]
"""Trains a model on the CPU for as many steps as are to be followed; may ask for `live_bytes` meanwhile."""


def follow(make: Callable[[], nn.Module], loop: Loop, gpu: str, keeps_cublaslt: bool = True) -> list[Event]:
    """Return the events of a loop, the model's parameters and buffers first.

    A workspace is allocated at the first product that needs it, and stays.

    Args:
        make: builds the model on the CPU or on meta tensors.
        gpu: kind of the GPU (`base.gpus`).
        keeps_cublaslt: the workspace of products with a bias stays, as on an H200 with torch 2.11; the torch of 2024
            allocates it for each call and frees it.
    """
    warnings.filterwarnings("ignore")
    quirks, made = Quirks("cuda", gpu), make()
    with torch.random.fork_rng(devices=[]), FakeTensorMode(allow_non_fake_inputs=True) as mode, quirks.dispatch():
        model = _made_fake(mode, made)

        def temporary(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Sequence[int]:
            seen = len(quirks.lasting)
            blocks = tuple(quirks.temporary(func, args, kwargs, result))
            for size in quirks.lasting[seen:]:
                if size == CUBLASLT_WORKSPACE and not keeps_cublaslt:
                    blocks = (*blocks, size)
                else:
                    followed._allocated(size)
            return blocks

        followed = Lifetimes(temporary, [*model.parameters(), *model.buffers()])
        with followed:
            loop(model, followed)
        return list(followed.events)


def _made_fake(mode: FakeTensorMode, model: nn.Module) -> nn.Module:
    """Replace parameters and buffers by fake ones of the same strides; a shared tensor stays shared."""
    fakes: dict[int, Any] = {}
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                fake = fakes.get(id(parameter))
                if fake is None:
                    fake = nn.Parameter(mode.from_tensor(parameter.detach()), requires_grad=parameter.requires_grad)
                module._parameters[name] = fakes[id(parameter)] = fake
        for name, buffer in list(module._buffers.items()):
            if buffer is not None:
                module._buffers[name] = fakes.setdefault(id(buffer), mode.from_tensor(buffer))
    return model


def summary(errors: Iterable[float]) -> str:
    """Return a sentence with the median absolute error, the lowest and the highest error."""
    ordered = sorted(errors)
    middle = sorted(map(abs, ordered))[len(ordered) // 2]
    return f"{len(ordered)} rows: median error {middle:.3%}, lowest {ordered[0]:+.3%}, highest {ordered[-1]:+.3%}"
