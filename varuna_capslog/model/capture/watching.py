"""What is noticed of a model's Python code while it runs once, in an export or plainly; nothing of that run stays.

A capture needs to know which module was running when something failed, how modules are called, which attributes the
code has written, and which random generators it has drawn from. Attributes and generators are put back when the model's
forward is over.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from varuna_capslog.model.python_state import PythonState, StateChange
from varuna_capslog.model.random_states import RandomStates

__all__ = ["Watch"]


class Watch:
    """Watches one call of a model.

    Args:
        by_module: whether to find which modules draw, too.
        keeps: whether the model is to return the tensors, too, that its code leaves on its modules: then it returns a
            pair of its own result and these.

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
        """As above."""
        return {key for key, simple in self._calls.items() if simple}

    @contextmanager
    def open(self) -> Iterator[None]:
        """Watches while it is open."""
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
