"""Calls a model itself once, on its example; leaves nothing behind on the model or in random generators.

Where the model's weights have values, it is a real call; a model without memory for its weights is called on tensors
without values.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from varuna_capslog import accelerator
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.model.capture.opaque import OpaqueCalls
from varuna_capslog.model.capture.step_memory import KeptTensor, MemoryGuard, NoRoom, StepMemory, with_room
from varuna_capslog.model.hollow import ReadNumbers, on_host, unlogged
from varuna_capslog.model.python_state import PythonState, RandomStates, StateChange

__all__ = ["Watch", "has_weights", "same_bits", "try_model", "untouched"]


def has_weights(model: nn.Module) -> bool:
    """True where all its parameters and buffers have values."""
    return not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


@contextmanager
def untouched(model: nn.Module, memory: StepMemory) -> Iterator[dict[str, KeptTensor]]:
    """Restore parameters, buffers and random states at the end.

    Yields the parameters' values at the beginning, by name.
    """
    values = {
        name: memory.keep(parameter.detach(), changes=True)
        for name, parameter in model.named_parameters()
        if not parameter.is_meta
    }
    kept = [(buffer, memory.keep(buffer.detach(), changes=True)) for buffer in model.buffers() if not buffer.is_meta]
    devices = {torch.device("cpu"), *(tensor.device for tensor in model.parameters() if not tensor.is_meta)}
    states = {device: accelerator.random_state(device) for device in devices}
    try:
        yield values
    finally:
        for device, state in states.items():
            accelerator.set_random_state(device, state)
        with torch.no_grad():
            for buffer, value in kept:
                buffer.copy_(value())
            for name, value in values.items():
                parameter, before = model.get_parameter(name), value()
                if not same_bits(parameter, before):
                    parameter.data.copy_(before)


def same_bits(first: Tensor, second: Tensor) -> bool:
    """True where two tensors hold equal numbers; NaN equals NaN."""
    return torch.equal(first.detach(), second) or bool(
        torch.isclose(first.detach(), second, 0.0, 0.0, equal_nan=True).all()
    )


def try_model(
    model: nn.Module, arguments: tuple[Any, ...], keywords: Mapping[str, Any], calls: OpaqueCalls
) -> tuple[Watch, Any]:
    """Call the model; return what was noticed, and its result.

    Args:
        calls: records what it is made to record.

    Raises:
        CapslogError: its weights and one operator do not fit into memory.
    """
    if not has_weights(model):
        return _try(model, arguments, keywords, calls, StepMemory(model))
    try:
        return with_room(model, functools.partial(_try, model, arguments, keywords, calls))
    except NoRoom as error:
        raise CapslogError(
            f"the {type(model).__name__} cannot be run on its example: {error}; capture it where more is free"
        ) from error


def _try(
    model: nn.Module,
    arguments: tuple[Any, ...],
    keywords: Mapping[str, Any],
    calls: OpaqueCalls,
    memory: StepMemory,
) -> tuple[Watch, Any]:
    """Call the model with this memory."""
    watch = Watch(model)
    with ExitStack() as stack:
        stack.enter_context(untouched(model, memory))
        if has_weights(model):
            stack.enter_context(memory.saving())
            stack.enter_context(MemoryGuard(memory))
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


class Watch:
    """Observes one call of a model.

    Args:
        by_module: find also which modules draw random numbers.
        keeps: the model also returns the tensors that its code leaves on its modules: a pair of its own result and
            these.

    Attributes:
        simple: ids of the modules that were only ever called as `module(one tensor)` and returned one tensor.
        running: (qualified name, class) of the modules that run now, or ran when something failed.
        changes: what its code has changed.
        drawn: names of the generators that its code has drawn from.
        drawers: module's qualified name -> the generators that its own code draws from.
    """

    def __init__(self, model: nn.Module, by_module: bool = False, keeps: bool = False) -> None:
        self._model, self._by_module, self.keeps = model, by_module, keeps
        self._calls: dict[int, bool] = {}
        self._state: PythonState | None = None
        self._draws: RandomStates | None = None
        self.running: list[tuple[str, str]] = []
        self.changes: list[StateChange] = []
        self.drawn: list[str] = []
        self.drawers: dict[str, set[str]] = {}
        self.generators: dict[str, Any] = {}

    @property
    def simple(self) -> set[int]:
        """Ids of the modules that were only ever called as `module(one tensor)` and returned one tensor."""
        return {key for key, simple in self._calls.items() if simple}

    @contextmanager
    def open(self) -> Iterator[None]:
        """Observe the model while this is open."""
        state = self._now()  # an export puts copies of lists and the like in their places
        handles = [self._model.register_forward_pre_hook(self._begin, prepend=True)]
        for path, module in self._model.named_modules():
            handles.append(module.register_forward_pre_hook(self._entering(path, module)))
            handles.append(module.register_forward_hook(self._leave, with_kwargs=True))
        handles.append(self._model.register_forward_hook(self._end, always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            state.put_back()

    def _now(self) -> PythonState:
        return PythonState(dict(self._model.named_modules()), files=True, apart=[self])

    def _begin(self, module: nn.Module, args: Any) -> None:
        self._state = self._now()
        self.generators = self._state.generators
        self._draws = RandomStates(self.generators)
        self._last = self._draws

    def _end(self, module: nn.Module, args: Any, output: Any) -> Any:
        if self._state is None or self._draws is None:
            return None  # a hook of the user's failed before
        self.changes += self._state.changes()
        self.drawn += self._draws.drawn()
        self._state.put_back()
        self._draws.put_back()
        self._state = None
        return (output, [change.after for change in self.changes]) if self.keeps else None

    def _entering(self, path: str, module: nn.Module) -> Any:
        named = path, type(module).__name__

        def enter(_: nn.Module, args: Any) -> None:
            self._count_draws()
            self.running.append(named)

        return enter

    def _leave(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        self._count_draws()
        self.running.pop()
        simple = len(args) == 1 and isinstance(args[0], Tensor) and not kwargs and isinstance(output, Tensor)
        self._calls[id(module)] = self._calls.get(id(module), True) and simple

    def _count_draws(self) -> None:
        if not self._by_module or self._state is None:
            return
        drawn = self._last.drawn()
        if drawn:
            path = self.running[-1][0] if self.running else ""
            self.drawers.setdefault(path, set()).update(drawn)
            self._last = RandomStates(self.generators)
