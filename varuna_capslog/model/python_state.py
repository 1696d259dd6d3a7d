"""What a model's Python code may keep and change beside its tensors: attributes, and what hangs on them.

A capture runs that code once, on tensors without values. What it left behind is found and put back here, `fit` puts
back what a layer that runs again has changed, and whoever runs a captured model asks here whether its attributes are
still those that were captured.
"""

from __future__ import annotations

import dis
import functools
import sys
import types
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from varuna_capslog.model.random_states import GENERATORS
from varuna_capslog.model.sources import is_users_file

__all__ = ["PythonState", "StateChange"]

_DEPTH = 6
"""How many containers and objects are followed from a module's attribute."""
_MOST = 1000
"""Entries of a container beyond which it counts as data: its identity is compared alone."""
_ALL = 100_000
"""Values that are looked into in all."""
_TABLES = ("_parameters", "_buffers", "_modules")
_OWN = frozenset(vars(nn.Module())) - {"training"}
_SCALARS = (bool, int, float, complex, str, bytes, type(None))
_CLOSED = (
    *(*_SCALARS, Tensor, type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size),
)
"""Values that are not looked into."""


@dataclass(frozen=True)
class StateChange:
    """One attribute, entry of a container, parameter, buffer or submodule that is another one than it was.

    Attributes:
        module: qualified name of the module that it is kept on; None for a class or a file.
        name: of the attribute, such as `steps` or `losses[...]`.
        kind: "attribute", "buffer", "parameter" or "submodule".
        before, after: the values; None where there was none.
        put: makes it another value; None where it cannot be.
    """

    module: str | None
    name: str
    kind: str
    before: Any
    after: Any
    put: Callable[[Any], None] | None = field(default=None, compare=False, repr=False)

    def __str__(self) -> str:
        return self.name if not self.module else f"{self.module}.{self.name}"

    @property
    def counts(self) -> bool:
        """Whether one number became another one."""
        numbers = (int, float)
        plain = not isinstance(self.before, bool) and isinstance(self.before, numbers)
        return plain and isinstance(self.after, numbers) and self.put is not None


class _Place:
    """A table that code may write to, with what was in it."""

    def __init__(self, module: str | None, name: str, table: Any, kind: str = "attribute") -> None:
        self.module, self.name, self.table, self.kind = module, name, table, kind
        self.saved = self._content()

    def _content(self) -> Any:
        if isinstance(self.table, np.ndarray):
            return self.table.copy()
        if isinstance(self.table, Mapping):
            return {key: value for key, value in self.table.items() if not self._skips(key)}
        return type(self.table)(self.table)

    def _skips(self, key: Any) -> bool:
        return False

    def _default(self, key: Any) -> Any:
        return None

    def changes(self) -> Iterator[StateChange]:
        now = self._content()
        if isinstance(now, dict):
            for key in [*self.saved, *(key for key in now if key not in self.saved)]:
                before, after = self.saved[key] if key in self.saved else self._default(key), now.get(key)
                if key not in now or key not in self.saved or not _same(before, after):
                    yield StateChange(
                        self.module, self._named(key), self.kind, before, after, functools.partial(self._put, key)
                    )
        elif isinstance(now, np.ndarray):
            if not np.array_equal(now, self.saved):
                yield StateChange(self.module, self.name, self.kind, self.saved, now)
        elif isinstance(now, list) and len(now) == len(self.saved):
            for place, (before, after) in enumerate(zip(self.saved, now, strict=True)):
                if not _same(before, after):
                    put = functools.partial(self._put, place)
                    yield StateChange(self.module, f"{self.name}[{place}]", self.kind, before, after, put)
        elif len(now) != len(self.saved) or not all(map(_same, now, self.saved)):
            yield StateChange(self.module, f"{self.name}[...]", self.kind, self.saved, now, self._fill)

    def _put(self, key: Any, value: Any) -> None:
        self.table[key] = value

    def _fill(self, values: Any) -> None:
        self.table.clear()
        (self.table.update if isinstance(self.table, set) else self.table.extend)(values)

    def _named(self, key: Any) -> str:
        if not self.name:
            return str(key)
        return f"{self.name}.{key}" if self.kind == "attribute of an object" else f"{self.name}[{key!r}]"

    def put_back(self) -> None:
        table, saved = self.table, self.saved
        if isinstance(table, np.ndarray):
            table[...] = saved
        elif isinstance(table, Mapping):
            for key in [key for key in table if key not in saved and not self._skips(key)]:
                del table[key]  # type: ignore[attr-defined]
            for key, value in saved.items():
                if key not in table or table[key] is not value:
                    table[key] = value  # type: ignore[index]
        elif not (len(table) == len(saved) and all(one is other for one, other in zip(table, saved, strict=True))):
            self._fill(saved)


def _same(one: Any, other: Any, depth: int = _DEPTH) -> bool:
    """Whether two values are one, or plain values that are equal: those are often made anew."""
    if one is other:
        return True
    if type(one) is not type(other) or not depth:
        return False
    if isinstance(one, _SCALARS):
        return bool(one == other or one != one)
    if isinstance(one, (list, tuple, dict)) and len(one) == len(other) <= _MOST:
        pairs = zip(one.items(), other.items(), strict=True) if isinstance(one, dict) else zip(one, other, strict=True)
        return all(_same(mine, yours, depth - 1) for mine, yours in pairs)
    return False


class PythonState:
    """The attributes of modules as they are now.

    Args:
        modules: by qualified name.
        files: whether the values count that the modules' classes, their functions and the user's own files keep, too.
        reads: whether those of these values count that the modules' code names.
        modes: whether it counts which modules are in training mode.
        apart: objects that are not looked into, where hooks of the modules know them.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        files: bool = False,
        reads: bool = False,
        modes: bool = True,
        apart: Collection[object] = (),
    ) -> None:
        self._places: list[_Place] = []
        self._modules: list[nn.Module] = []
        self.generators: dict[str, Any] = {}
        """Random generators that are kept among the attributes, by name."""
        seen = {id(one) for one in apart}
        for path, module in modules.items():
            if id(module) in seen:
                continue
            seen.add(id(module))
            self._take(path, "", module, modes, _DEPTH, seen)
            for name in _TABLES:
                self._places.append(_Place(path, "", vars(module)[name], _KINDS[name]))
            for name, value in _closures(module, files):
                self._follow(path, name, value, 1, seen)
        if files or reads:
            attributes, values = (None, None) if files else _names_read(self._modules)
            for name, table in _files_of(self._modules):
                known = attributes if isinstance(table, type) else values
                self._places.append(_Files(name, table, known))
                for key, value in _values_of(table, known):
                    self._follow(None, f"{name}.{key}", value, 1, seen)

    def _take(self, path: str | None, name: str, module: nn.Module, modes: bool, depth: int, seen: set[int]) -> None:
        self._modules.append(module)
        self._places.append(_Attributes(path, name, module, modes))
        for key, value in vars(module).items():
            if key not in _OWN:
                self._follow(path, f"{name}.{key}".lstrip("."), value, depth, seen)

    def _follow(self, path: str | None, name: str, value: Any, depth: int, seen: set[int]) -> None:
        if isinstance(value, _CLOSED) or id(value) in seen or not depth or len(seen) > _ALL:
            return
        seen.add(id(value))
        if isinstance(value, GENERATORS):
            self.generators[name if not path else f"{path}.{name}"] = value
        elif isinstance(value, nn.Module):  # one that is no submodule, such as in a tuple
            self._take(path, name, value, False, depth - 1, seen)
        elif isinstance(value, np.ndarray):
            if value.size <= _MOST and value.dtype != object:
                self._places.append(_Place(path, name, value))
        elif isinstance(value, (list, set, deque, dict)):
            if len(value) > _MOST:
                return
            if type(value) in (list, set, deque) or isinstance(value, dict):
                self._places.append(_Place(path, name, value))
            inside = value.items() if isinstance(value, dict) else ((None, one) for one in value)
            for key, one in list(inside):
                self._follow(
                    path, f"{name}[{key!r}]" if isinstance(value, dict) else f"{name}[...]", one, depth - 1, seen
                )
        elif isinstance(value, tuple):
            for one in value[:_MOST]:
                self._follow(path, f"{name}[...]", one, depth - 1, seen)
        elif isinstance(own := getattr(value, "__dict__", None), dict):
            self._places.append(_Place(path, name, own, "attribute of an object"))
            for key, one in list(own.items())[:_MOST]:
                self._follow(path, f"{name}.{key}", one, depth - 1, seen)

    def changes(self) -> list[StateChange]:
        """What is another value now."""
        return [change for place in self._places for change in place.changes()]

    def put_back(self) -> None:
        """Makes all of it what it was; of tensors only which ones they are."""
        for place in self._places:
            place.put_back()


_KINDS = {"_parameters": "parameter", "_buffers": "buffer", "_modules": "submodule"}


class _Attributes(_Place):
    """The attributes of a module."""

    def __init__(self, path: str | None, name: str, module: nn.Module, modes: bool) -> None:
        self._apart, self._class = _OWN if modes else _OWN | {"training"}, type(module)
        super().__init__(path, name, vars(module), "attribute of an object" if name else "attribute")

    def _default(self, key: Any) -> Any:
        return getattr(self._class, key, None)

    def _skips(self, key: Any) -> bool:
        return key in self._apart


class _Files(_Place):
    """The plain values that a class or a file of Python keeps, of all names or of some."""

    def __init__(self, name: str, owner: Any, known: Collection[str] | None) -> None:
        self._known = known
        super().__init__(None, name, owner, "attribute of an object")

    def _content(self) -> dict[str, Any]:
        return dict(_values_of(self.table, self._known))

    def _put(self, key: Any, value: Any) -> None:
        setattr(self.table, key, value)

    def put_back(self) -> None:
        for key, value in self.saved.items():
            if vars(self.table).get(key) is not value:
                self._put(key, value)


def _values_of(owner: Any, known: Collection[str] | None) -> Iterator[tuple[str, Any]]:
    for key, value in list(vars(owner).items()):
        if (
            (known is None or key in known)
            and not key.startswith("__")
            and isinstance(value, (bool, int, float, list, dict, set, deque, *GENERATORS))
        ):
            yield key, value


def _files_of(modules: Iterable[nn.Module]) -> Iterator[tuple[str, Any]]:
    """The classes of modules that are not torch's, and the files of the user's that define them, by name."""
    kinds = {base for module in modules for base in type(module).__mro__}
    names = set()
    for kind in sorted(kinds, key=lambda one: (one.__module__, one.__qualname__)):
        if kind.__module__.partition(".")[0] in ("torch", "builtins", "abc", "typing"):
            continue
        yield kind.__qualname__, kind
        names.add(kind.__module__)
    for name in sorted(names):
        found = sys.modules.get(name)
        if found is not None and is_users_file(getattr(found, "__file__", None) or ""):
            yield name, found


def _names_read(modules: Iterable[nn.Module]) -> tuple[set[str], set[str]]:
    """The names of attributes, and of values of files, in the code of the modules' classes and in that of the functions
    of their files which it names.
    """
    attributes: set[str] = set()
    values: set[str] = set()
    waiting = [one for kind in {type(module) for module in modules} for one in _functions_of(kind)]
    while waiting:
        function = waiting.pop()
        of_objects, of_files = _names_in(function.__code__)
        named = [function.__globals__.get(name) for name in of_files - values]
        attributes |= of_objects
        values |= of_files
        own = function.__module__
        waiting += [one for one in named if isinstance(one, types.FunctionType) and one.__module__ == own]
    return attributes, values


@functools.cache
def _names_in(code: types.CodeType) -> tuple[set[str], set[str]]:
    """The names of attributes and of a file's values that code reads, functions within it included."""
    inner = [_names_in(one) for one in code.co_consts if isinstance(one, types.CodeType)]
    read = list(dis.get_instructions(code))
    attributes = {one.argval for one in read if one.opname in ("LOAD_ATTR", "LOAD_METHOD")}
    values = {one.argval for one in read if one.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    return attributes.union(*(one[0] for one in inner)), values.union(*(one[1] for one in inner))


def _functions_of(kind: type) -> Iterator[types.FunctionType]:
    for base in kind.__mro__:
        if base.__module__.partition(".")[0] not in ("torch", "builtins"):
            yield from (one for one in vars(base).values() if isinstance(one, types.FunctionType))


def _closures(module: nn.Module, of_class: bool) -> Iterator[tuple[str, Any]]:
    """What the module's hooks keep, and functions of its class if asked: lists and the like that are theirs."""
    hooks = [hook for table in ("_forward_hooks", "_forward_pre_hooks") for hook in vars(module)[table].values()]
    kind: Any = type(module)
    for function in (*hooks, *(_with_closures(kind) if of_class else ())):
        for place, cell in enumerate(getattr(function, "__closure__", None) or ()):
            try:
                value = cell.cell_contents
            except ValueError:  # not filled yet
                continue
            yield function.__code__.co_freevars[place], value


@functools.cache
def _with_closures(kind: Any) -> tuple[Any, ...]:
    """The functions of a class that keep something."""
    return tuple(one for one in _functions_of(kind) if one.__closure__)
