"""Records the state, other than tensors, that a model's Python code may keep and change: attributes and their contents.

A capture runs that code once, on tensors without values; this module finds the changes and undoes them. `fit` does so
for a layer that runs again, and a captured model is checked for the attributes of its capture.
"""

from __future__ import annotations

import contextlib
import functools
import random
import sys
import types
import warnings
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from varuna_capslog.model.sources import cells_of, code_reads, is_users_file

__all__ = ["GLOBAL", "PythonState", "RandomStates", "StateChange", "crafted_draws", "seed_generators"]


# -- Saves and restores states of random generators: Python's, numpy's, and those that a model keeps.


GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)
"""Kinds of generators that code may keep."""
GLOBAL: Mapping[str, Any] = {"random": random, "numpy.random": np.random}
"""Python's generator and numpy's."""


class RandomStates:
    """Saved states of generators by name: `GLOBAL`, and others that a model keeps."""

    def __init__(self, generators: Mapping[str, Any]) -> None:
        self._generators = dict(generators)
        self._states = {name: _state_of(generator) for name, generator in self._generators.items()}

    def drawn(self) -> list[str]:
        """Return the names of the generators that code has drawn from since the states were saved."""
        return [
            name for name, generator in self._generators.items() if not _equal(_state_of(generator), self._states[name])
        ]

    def put_back(self, names: Collection[str] | None = None) -> None:
        """Make all generators, or some of them, continue from their saved states."""
        for name, state in self._states.items():
            if names is None or name in names:
                _set_state(self._generators[name], state)


def _state_of(generator: Any) -> Any:
    if generator is np.random:
        return np.random.get_state(legacy=False)  # noqa: NPY002 (users draw from it)
    if generator is random or isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    with unset_fake_temporarily():
        return generator.get_state()


def _set_state(generator: Any, state: Any) -> None:
    if generator is np.random:
        np.random.set_state(state)  # noqa: NPY002
    elif generator is random or isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        with unset_fake_temporarily():
            generator.set_state(state)


def _equal(first: Any, second: Any) -> bool:
    if isinstance(first, Tensor):
        with unset_fake_temporarily():
            return torch.equal(first, second)
    if isinstance(first, dict):
        return all(_equal(value, second[key]) for key, value in first.items())
    if isinstance(first, np.ndarray):
        return bool((first == second).all())
    return bool(first == second)


def seed_generators(generators: Mapping[str, Any], seed: int) -> None:
    """Seed all these generators."""
    for generator in generators.values():
        if generator is random or isinstance(generator, random.Random):
            generator.seed(seed)
        elif isinstance(generator, np.random.Generator):
            generator.bit_generator.state = type(generator.bit_generator)(seed).state
        elif isinstance(generator, torch.Generator):
            generator.manual_seed(seed)
        else:
            generator.seed(seed & 0xFFFFFFFF)


@contextmanager
def crafted_draws(high: bool) -> Iterator[None]:
    """Make the next numbers of `random` and of numpy's global generator the lowest, or the highest, in the block.

    A decision that compares a draw with a probability goes one way with the lowest and the other way with the highest
    numbers, and a value computed from a draw differs between the two.
    """
    before = RandomStates(GLOBAL)
    word = _HIGHEST if high else 0
    filler = random.Random(int(high))
    words = [word] * _CRAFTED + [filler.getrandbits(32) for _ in range(624 - _CRAFTED)]
    try:
        random.setstate((3, (*words, 0), None))
        np.random.set_state(("MT19937", np.array(words, dtype=np.uint32), 0, 0, 0.0))  # noqa: NPY002 (users draw from it)
        yield
    finally:
        before.put_back()


_CRAFTED = 400
"""Number of crafted words of the generator's state. Random words follow, so that rejection loops end."""
_HIGHEST = 0x12DD9BB3
"""Word of a Mersenne Twister's state from which it makes 2^32 - 1 (MT19937, Matsumoto and Nishimura 1998)."""


# -- the state that a model's Python code keeps beside its tensors


_DEPTH = 6
"""Depth to which containers and objects are followed from a module's attribute."""
_MOST = 1000
"""Most entries of a container that is compared by its contents; larger containers are compared by identity."""
_IN_CLOSURES = 2
"""Depth, as `_DEPTH`, from variables that a function among the attributes closes over: a loop's state is close."""
_ALL = 100_000
"""Most values that are followed in total."""
_TABLES = ("_parameters", "_buffers", "_modules")
_OWN = frozenset(vars(nn.Module())) - {"training"}
_SCALARS = (bool, int, float, complex, str, bytes, type(None))
_CLOSED = (
    *(*_SCALARS, Tensor, type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size),
)
"""Types of values that are not followed."""


@dataclass(frozen=True)
class StateChange:
    """Attribute, entry of a container, parameter, buffer or submodule whose value has changed.

    module: qualified name of the module that holds the value; None for a class or a file.
    name: name of the attribute, such as `steps` or `losses[...]`.
    kind: "attribute", "buffer", "parameter" or "submodule"; "iterator" for an iterator that has advanced.
    before, after: the values; None where there was none.
    put: sets another value; None where that is impossible.
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
        """True where a number became another number."""
        numbers = (int, float)
        plain = not isinstance(self.before, bool) and isinstance(self.before, numbers)
        return plain and isinstance(self.after, numbers) and self.put is not None


class _Place:
    """Container that code may write to, with its original contents."""

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
        elif not (len(table) == len(saved) and all(a is b for a, b in zip(table, saved, strict=True))):
            self._fill(saved)


def _same(a: Any, b: Any, depth: int = _DEPTH) -> bool:
    """True where two values are one object, or equal plain values, which code often creates again."""
    if a is b:
        return True
    if type(a) is not type(b) or not depth:
        return False
    if isinstance(a, _SCALARS):
        return bool(a == b or a != a)
    if isinstance(a, (list, tuple, dict)) and len(a) == len(b) <= _MOST:
        pairs = zip(a.items(), b.items(), strict=True) if isinstance(a, dict) else zip(a, b, strict=True)
        return all(_same(mine, yours, depth - 1) for mine, yours in pairs)
    return False


class PythonState:
    """Record of the attributes of modules, and of the values inside these.

    Args:
        modules: by qualified name.
        files: include values that the modules' classes and the user's own files keep.
        modes: include which modules are in training mode.
        reads: as `files`, but only values that the modules' code reads by name.
        apart: objects and tables of modules that are left out.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        files: bool = False,
        modes: bool = True,
        reads: bool = False,
        apart: Collection[object] = (),
    ) -> None:
        self._places: list[_Place] = []
        self._modules: list[nn.Module] = []
        self.generators: dict[str, Any] = dict(GLOBAL)
        """Random generators that code may draw from, by name: `GLOBAL` and those that are kept among the attributes."""
        seen = {id(excluded) for excluded in apart}
        for path, module in modules.items():
            if id(module) in seen:
                continue
            seen.add(id(module))
            self._take(path, "", module, modes, _DEPTH, seen)
            tables = [(name, vars(module)[name]) for name in _TABLES]
            self._places += [_Place(path, "", table, _KINDS[name]) for name, table in tables if id(table) not in seen]
            for name, value in _closures(module):
                self._follow(path, name, value, 1, seen)
            if files:
                kind: Any = type(module)
                self._follow_cells(path, "", cells_of(kind), 1, seen)
        if files:
            for name, table in _files_of(self._modules):
                self._places.append(_Files(name, table))
                kept = [cache for cache in vars(table).values() if isinstance(cache, functools._lru_cache_wrapper)]
                self._places += [_Cache(None, name, cache) for cache in kept]
                for key, value in _values_of(table):
                    self._follow(None, f"{name}.{key}", value, 1, seen)
        if reads:
            for name, table, names, attributes in code_reads(self._modules):
                self._places.append(_Files(name, table, names))
                for key, value in _values_of(table, names):
                    if _is_object(value) and hasattr(value, "__dict__"):
                        self._places.append(_Files(f"{name}.{key}", value, attributes))
                    else:
                        self._follow(None, f"{name}.{key}", value, 2, seen)

    def _take(self, path: str | None, name: str, module: nn.Module, modes: bool, depth: int, seen: set[int]) -> None:
        self._modules.append(module)
        self._places.append(_Attributes(path, name, module, modes))
        for key, value in vars(module).items():
            if key not in _OWN:
                self._follow(path, f"{name}.{key}".lstrip("."), value, depth, seen)

    def _follow(self, path: str | None, name: str, value: Any, depth: int, seen: set[int]) -> None:
        if isinstance(value, types.FunctionType) and depth and is_users_file(value.__code__.co_filename):
            cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
            self._follow_cells(path, name, cells, min(depth - 1, _IN_CLOSURES), seen)
            return
        if isinstance(value, _CLOSED) or id(value) in seen or not depth or len(seen) > _ALL:
            return
        if type(value).__module__.startswith("torch._dynamo"):  # a compiler's own state
            return
        seen.add(id(value))
        if isinstance(value, Iterator) and type(value).__module__ in ("builtins", "itertools"):
            self._places.append(_Iterating(path, name, value))
        elif isinstance(value, GENERATORS):
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
            inside = value.items() if isinstance(value, dict) else ((None, part) for part in value)
            for key, part in list(inside):
                self._follow(
                    path, f"{name}[{key!r}]" if isinstance(value, dict) else f"{name}[...]", part, depth - 1, seen
                )
        elif isinstance(value, tuple):
            for part in value[:_MOST]:
                self._follow(path, f"{name}[...]", part, depth - 1, seen)
        else:
            self._follow_object(path, name, value, depth, seen)

    def _follow_cells(
        self, path: str | None, name: str, cells: Iterable[tuple[str, types.CellType]], depth: int, seen: set[int]
    ) -> None:
        for variable, cell in cells:
            if id(cell) not in seen:
                seen.add(id(cell))
                self._places.append(place := _Cell(path, name, cell, variable))
                for inside in place.saved.values():
                    self._follow(path, f"{name}.{variable}".lstrip("."), inside, depth, seen)

    def _follow_object(self, path: str | None, name: str, value: Any, depth: int, seen: set[int]) -> None:
        if slots := [key for key in _slots_of(type(value)) if hasattr(value, key)]:
            self._places.append(_Slots(path, name, value, slots))
            for key in slots:
                self._follow(path, f"{name}.{key}", getattr(value, key), depth - 1, seen)
        if isinstance(attributes := getattr(value, "__dict__", None), dict):
            self._places.append(_Place(path, name, attributes, "attribute of an object"))
            for key, attribute in list(attributes.items())[:_MOST]:
                self._follow(path, f"{name}.{key}", attribute, depth - 1, seen)

    def changes(self) -> list[StateChange]:
        """Return the changes since this state was taken."""
        return [change for place in self._places for change in place.changes()]

    def put_back(self) -> None:
        """Restore everything except the values of tensors: of these, only which tensor is held."""
        for place in self._places:
            place.put_back()


_KINDS = {"_parameters": "parameter", "_buffers": "buffer", "_modules": "submodule"}


class _Attributes(_Place):
    """Attributes of a module."""

    def __init__(self, path: str | None, name: str, module: nn.Module, modes: bool) -> None:
        self._apart, self._class = _OWN if modes else _OWN | {"training"}, type(module)
        super().__init__(path, name, vars(module), "attribute of an object" if name else "attribute")

    def _default(self, key: Any) -> Any:
        return getattr(self._class, key, None)

    def _skips(self, key: Any) -> bool:
        return key in self._apart


class _Owned(_Place):
    """Values held by an object that is no container."""

    def put_back(self) -> None:
        now = self._content()
        for key, value in self.saved.items():
            if now.get(key) is not value:
                self._put(key, value)


class _Files(_Owned):
    """Plain values that a class or a Python file holds under these names; None: under any name."""

    def __init__(self, name: str, owner: Any, names: Collection[str] | None = None) -> None:
        self._names = names
        super().__init__(None, name, owner, "attribute of an object")

    def _content(self) -> dict[str, Any]:
        return dict(_values_of(self.table, self._names))

    def _put(self, key: Any, value: Any) -> None:
        setattr(self.table, key, value)


class _Slots(_Owned):
    """Values of an object with `__slots__`."""

    def __init__(self, module: str | None, name: str, value: Any, slots: Sequence[str]) -> None:
        self._slots = slots
        super().__init__(module, name, value, "attribute of an object")

    def _content(self) -> dict[str, Any]:
        return {key: getattr(self.table, key) for key in self._slots if hasattr(self.table, key)}

    def _put(self, key: Any, value: Any) -> None:
        setattr(self.table, key, value)


def _slots_of(kind: type) -> list[str]:
    lists = [vars(base).get("__slots__", ()) for base in kind.__mro__ if base.__module__ not in ("builtins", "torch")]
    names = [key for slots in lists for key in ([slots] if isinstance(slots, str) else slots)]
    return [key for key in names if not key.startswith("__")]


class _Cell(_Owned):
    """Variable that a function closes over."""

    def __init__(self, module: str | None, name: str, cell: types.CellType, variable: str) -> None:
        self._variable = variable
        super().__init__(module, name, cell, "attribute of an object")

    def _content(self) -> dict[str, Any]:
        try:
            return {self._variable: self.table.cell_contents}
        except ValueError:  # not filled yet
            return {}

    def _put(self, key: Any, value: Any) -> None:
        self.table.cell_contents = value


class _Iterating(_Place):
    """Iterator, whose position cannot be restored."""

    def _content(self) -> Any:
        return _progress(self.table)

    def changes(self) -> Iterator[StateChange]:
        if self._content() != self.saved:
            yield StateChange(self.module, self.name, "iterator", self.saved, self._content())

    def put_back(self) -> None:
        return None


def _progress(value: Any) -> Any:
    """Return how far an iterator has advanced, as far as that can be known."""
    if isinstance(value, types.GeneratorType):
        frame = value.gi_frame
        plain = {} if frame is None else {k: v for k, v in frame.f_locals.items() if isinstance(v, _SCALARS)}
        return frame is None or (frame.f_lasti, plain)
    if isinstance(value, tuple):
        return tuple(_progress(part) for part in value)
    if not isinstance(value, Iterator):
        return value if isinstance(value, _SCALARS) else len(value) if isinstance(value, (list, dict)) else id(value)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # itertools deprecates `__reduce__`
        try:
            reduced = value.__reduce__()
        except Exception:
            return repr(value)
    return _progress(reduced) if isinstance(reduced, tuple) else None


class _Cache(_Place):
    """Contents of a `functools.lru_cache`, cleared if it grew while tensors had no values."""

    def _content(self) -> Any:
        return self.table.cache_info().misses

    def changes(self) -> Iterator[StateChange]:
        return iter(())

    def put_back(self) -> None:
        if self._content() != self.saved:
            self.table.cache_clear()


def _values_of(owner: Any, names: Collection[str] | None = None) -> Iterator[tuple[str, Any]]:
    """Yield an owner's plain values; with `names`, all values of these names except classes and functions."""
    for key, value in list(vars(owner).items()):
        if key.startswith("__") or (names is not None and key not in names):
            continue
        plain = isinstance(value, (bool, int, float, list, dict, set, deque, *GENERATORS))
        if plain or (names is not None and (value is None or isinstance(value, str) or _is_object(value))):
            yield key, value


def _is_object(value: Any) -> bool:
    """True where a value is an object of a class of the user's own."""
    file = getattr(sys.modules.get(type(value).__module__), "__file__", None) or ""
    return type(value).__module__ in ("types", "argparse") or (
        not isinstance(value, (type, *_CLOSED)) and is_users_file(file)
    )


def _files_of(modules: Iterable[nn.Module]) -> Iterator[tuple[str, Any]]:
    """Yield (name, class) of the modules' classes except torch's, and (name, file) of the user's files with them."""
    kinds = {base for module in modules for base in type(module).__mro__}
    names = set()
    for kind in sorted(kinds, key=lambda kind: (kind.__module__, kind.__qualname__)):
        if kind.__module__.partition(".")[0] in ("torch", "builtins", "abc", "typing"):
            continue
        yield kind.__qualname__, kind
        names.add(kind.__module__)
    for name in sorted(names):
        file = sys.modules.get(name)
        if file is not None and is_users_file(getattr(file, "__file__", None) or ""):
            yield name, file


def _closures(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the contents of the cells that the module's hooks close over, such as lists."""
    for hook in [*vars(module)["_forward_hooks"].values(), *vars(module)["_forward_pre_hooks"].values()]:
        for cell in getattr(hook, "__closure__", None) or ():
            with contextlib.suppress(ValueError):  # not filled yet
                yield "hook", cell.cell_contents
