"""One call of a model itself, on its example; it leaves nothing behind on the model or in random generators.

Where the model's weights are there, it is a real call; a model without memory for its weights is called on tensors
without values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from varuna_capslog import accelerator
from varuna_capslog.model.capture.opaque import OpaqueCalls
from varuna_capslog.model.capture.watching import Watch
from varuna_capslog.model.hollow import ReadNumbers, on_host, unlogged

__all__ = ["has_weights", "same_bits", "try_model", "untouched"]


def has_weights(model: nn.Module) -> bool:
    """Whether all its parameters and buffers have values."""
    return not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


@contextmanager
def untouched(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """While it is open, parameters and buffers may change and random numbers be drawn; afterwards they are what they
    were.

    Gives the parameters' values at the beginning, by name.
    """
    values = {name: one.detach().clone() for name, one in model.named_parameters() if not one.is_meta}
    kept = [(buffer, buffer.detach().clone()) for buffer in model.buffers() if not buffer.is_meta]
    devices = {torch.device("cpu"), *(tensor.device for tensor in model.parameters() if not tensor.is_meta)}
    states = {device: accelerator.random_state(device) for device in devices}
    try:
        yield values
    finally:
        for device, state in states.items():
            accelerator.set_random_state(device, state)
        with torch.no_grad():
            for buffer, value in kept:
                buffer.copy_(value)
            for name, value in values.items():
                parameter = model.get_parameter(name)
                if not same_bits(parameter, value):
                    parameter.data.copy_(value)


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors hold equal numbers, where a missing one equals another."""
    return torch.equal(one.detach(), other) or bool(torch.isclose(one.detach(), other, 0.0, 0.0, equal_nan=True).all())


def try_model(
    model: nn.Module, arguments: tuple[Any, ...], keywords: Mapping[str, Any], calls: OpaqueCalls
) -> tuple[Watch, Any]:
    """Calls the model; gives what was noticed, and what it returns.

    Args:
        calls: notes what it is to record.
    """
    watch = Watch(model)
    with ExitStack() as stack:
        stack.enter_context(untouched(model))
        if has_weights(model):
            take: Any = Tensor.clone
        else:
            stack.enter_context(on_host(model))
            mode = stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            stack.enter_context(ReadNumbers())
            stack.enter_context(unlogged())
            take = mode.from_tensor
        arguments, keywords = pytree.tree_map_only(Tensor, take, (arguments, dict(keywords)))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(calls.open())
        stack.enter_context(watch.open())
        result = model(*arguments, **keywords)
    return watch, result
