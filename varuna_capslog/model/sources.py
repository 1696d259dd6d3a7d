"""Collects the facts, other than weights, on which a module's work depends: classes, settings, shapes, source code.

A stored profile or capture is valid for a model with the same digest.
"""

from __future__ import annotations

import dis
import functools
import hashlib
import inspect
import re
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn

__all__ = [
    "cells_of",
    "class_name",
    "code_digest",
    "code_reads",
    "failing_line",
    "is_users_file",
    "line_of",
    "module_settings",
    "source_file",
]


_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})


def module_settings(module: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield a module's plain attributes as text; an address in the text is removed."""
    for key, value in sorted(vars(module).items()):
        if key == "meta" and isinstance(value, dict):  # these entries do not change what the module computes
            left_out = ("result", "whole", "joined", "parts", "left", "python")
            value = {name: setting for name, setting in value.items() if name not in left_out}
        if not key.startswith("_") and not isinstance(value, nn.Module | Tensor):
            yield key, _ADDRESS.sub("", repr(value))


def class_name(kind: type) -> str:
    """Return module and name of a class."""
    return f"{kind.__module__}.{kind.__qualname__}"


def source_file(kind: type) -> Path | None:
    """Return the file that defines a class, or None. None for torch's classes: its version is a separate condition."""
    if kind.__module__.partition(".")[0] == "torch":
        return None
    try:
        file = inspect.getsourcefile(kind)
    except (TypeError, OSError):  # a builtin; a class typed into an interpreter
        return None
    return Path(file) if file and Path(file).is_file() else None


def line_of(kind: type, pattern: str) -> str:
    """Return where a class's code first matches a pattern, or begins, as ` (net.py:12)`; "" where not known."""
    if kind.__module__.partition(".")[0] == "torch":
        return ""
    try:
        lines, first = inspect.getsourcelines(kind)
        file = inspect.getsourcefile(kind)
    except (OSError, TypeError):
        return ""
    number = next((number for number, line in enumerate(lines) if re.search(pattern, line)), 0)
    return f" ({Path(file or '').name}:{max(first, 1) + number})"


def failing_line(error: BaseException, kinds: Iterable[type]) -> str:
    """Return the place in the code of one of these classes where an error was raised, as in `line_of`."""
    files = {str(file) for kind in kinds if (file := source_file(kind)) is not None}
    place, trace = "", error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename in files:
            place = f" ({Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno})"
        trace = trace.tb_next
    return place


@functools.cache
def cells_of(kind: Any) -> tuple[tuple[str, CellType], ...]:
    """Return the variables, except the class itself, that the functions of a class close over."""
    attributes = [
        attribute
        for base in kind.__mro__
        if not base.__module__.startswith("torch.")
        for attribute in vars(base).values()
    ]
    functions = [attribute for attribute in attributes if isinstance(attribute, FunctionType) and attribute.__closure__]
    cells = [
        pair
        for function in functions
        for pair in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    ]
    return tuple(pair for pair in cells if pair[0] != "__class__")


def code_digest(kinds: Iterable[type], modules: Iterable[str]) -> str:
    """Return the SHA-256 of the code of these classes, their bases, and these Python modules.

    For installed packages, the version and the file of each class count; for a user's own files, also the files that
    they import, except inside functions. Torch does not count: its version is a separate condition.
    """
    bases = {base for kind in kinds for base in kind.__mro__ if base.__module__.partition(".")[0] not in _APART}
    names = {base.__module__ for base in bases} | {name for name in modules if name.partition(".")[0] not in _APART}
    files = {file for base in bases if (file := source_file(base)) is not None}
    user_files: dict[str, Path] = {}
    waiting = sorted(names)
    while waiting:
        module = sys.modules.get(waiting.pop())
        file = getattr(module, "__file__", None)
        if module is None or file is None or module.__name__ in user_files or not is_users_file(file):
            continue
        user_files[module.__name__] = Path(file)
        # torch.compile puts its own functions into the modules whose code it compiles, under names with two underscores
        values = [value for name, value in vars(module).items() if not name.startswith("__")]
        waiting += [home for home in map(_home, values) if home.partition(".")[0] not in _APART]
    digest = hashlib.sha256()
    for top in sorted({name.partition(".")[0] for name in names}):
        digest.update(repr((top, str(getattr(sys.modules.get(top), "__version__", None)))).encode())
    for path in sorted(files | set(user_files.values())):
        digest.update(path.read_bytes())
    return digest.hexdigest()


_APART = ("torch", "builtins", __name__.partition(".")[0])


def is_users_file(file: str) -> bool:
    """True where a Python file is the user's own, not an installed package's."""
    return file.endswith(".py") and not file.startswith(_INSTALLED)


def _home(value: Any) -> str:
    """Return the name of the Python module that a value is, or comes from."""
    return value.__name__ if isinstance(value, ModuleType) else str(getattr(value, "__module__", ""))


_NOT_FORWARD = {"__init__", "__new__", "__repr__", "extra_repr", "train", "__init_subclass__"}
"""Methods that run while a module is made, shown or put into a mode, not in its forward."""


def code_reads(modules: Iterable[nn.Module]) -> Iterator[tuple[str, Any, set[str], set[str]]]:
    """Yield each of the user's classes and Python files whose values the modules' methods read: (name, class or file,
    names read there, attribute names read of any object). The user's functions that methods call by name count, too.
    """
    kinds = {base for module in modules for base in type(module).__mro__}
    kinds = {kind for kind in kinds if is_users_file(_file_of(sys.modules.get(kind.__module__)))}
    waiting = [code for kind in kinds for code in _methods(kind)]
    visited: set[CodeType] = set()
    attributes: set[str] = set()
    globals_of: dict[str, set[str]] = {}
    while waiting:
        name, code = waiting.pop()
        if code in visited:
            continue
        visited.add(code)
        waiting += [(name, constant) for constant in code.co_consts if isinstance(constant, CodeType)]
        read = set()
        for step in dis.get_instructions(code):
            if step.opname == "LOAD_GLOBAL":
                read.add(step.argval)
            elif step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
                attributes.add(step.argval)
        globals_of.setdefault(name, set()).update(read)
        file = vars(sys.modules[name]) if name in sys.modules else {}
        for key in read:
            value = file.get(key)
            if isinstance(value, FunctionType) and is_users_file(value.__code__.co_filename):
                waiting.append((value.__module__, value.__code__))
    for kind in sorted(kinds, key=lambda kind: (kind.__module__, kind.__qualname__)):
        yield kind.__qualname__, kind, attributes, attributes
    for name in sorted(globals_of):
        if name in sys.modules:
            yield name, sys.modules[name], globals_of[name], attributes


def _file_of(module: Any) -> str:
    return getattr(module, "__file__", None) or ""


def _methods(kind: type) -> Iterator[tuple[str, CodeType]]:
    for key, value in vars(kind).items():
        for function in (value, getattr(value, "__func__", None), getattr(value, "fget", None)):
            if isinstance(function, FunctionType) and key not in _NOT_FORWARD:
                yield function.__module__, function.__code__
