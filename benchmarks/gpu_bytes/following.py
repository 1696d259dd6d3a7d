"""Any training loop on fake tensors of a GPU: what it asks of the allocator, without a device.

The library's estimates drive its own engine. Here the loop is somebody else's: the model becomes fake, the loop runs
inside `Quirks.dispatch` and `Lifetimes`, and the events are replayed.
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
    """The events of a loop, the model's parameters and buffers first.

    Workspaces are taken where a product first meets them and stay.

    Args:
        make: builds the model on the CPU or on meta tensors.
        gpu: its kind (`base.gpus`).
        keeps_cublaslt: the workspace of products with a bias stays, as on an H200 with torch 2.11; the torch of 2024
            takes it for each call and gives it back.
    """
    warnings.filterwarnings("ignore")
    quirks, made = Quirks("cuda", gpu), make()
    with torch.random.fork_rng(devices=[]), FakeTensorMode(allow_non_fake_inputs=True) as mode, quirks.dispatch():
        model = _made_fake(mode, made)

        def temporary(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Sequence[int]:
            known = len(quirks.lasting)
            blocks = tuple(quirks.temporary(func, args, kwargs, result))
            for size in quirks.lasting[known:]:
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
    """The model with fake parameters and buffers that lie as its own do; a tensor in two places stays one."""
    known: dict[int, Any] = {}
    for module in model.modules():
        for name, value in list(module._parameters.items()):
            if value is not None:
                fake = known.get(id(value))
                if fake is None:
                    fake = nn.Parameter(mode.from_tensor(value.detach()), requires_grad=value.requires_grad)
                module._parameters[name] = known[id(value)] = fake
        for name, buffer in list(module._buffers.items()):
            if buffer is not None:
                module._buffers[name] = known.setdefault(id(buffer), mode.from_tensor(buffer))
    return model


def summary(errors: Iterable[float]) -> str:
    """Median size of the errors, the lowest and the highest."""
    found = sorted(errors)
    middle = sorted(map(abs, found))[len(found) // 2]
    return f"{len(found)} rows: median error {middle:.3%}, lowest {found[0]:+.3%}, highest {found[-1]:+.3%}"
