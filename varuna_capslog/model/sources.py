"""Decides when layers do the same work on other parameters, from all facts that a module's work depends on."""

from __future__ import annotations

import dis
import enum
import functools
import hashlib
import inspect
import re
import sys
import sysconfig
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._ops import OpOverload

from varuna_capslog.model.capture.python_calls import CallShape, Whole
from varuna_capslog.model.capture.runtime import ByMode, ByShape, CapturedGraph, Frozen, Guard, SequentialSlice
from varuna_capslog.model.layer import Layer

__all__ = [
    "cells_of",
    "class_name",
    "code_digest",
    "code_reads",
    "failing_line",
    "is_users_file",
    "layer_signature",
    "line_of",
    "module_settings",
    "run_signature",
    "source_file",
]


# -- Decides when layers do the same work on other parameters, from all facts that a module's work depends on.
#
# Kept profiles and kept captures belong to a model with the same digest.


_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})


def module_settings(module: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield a module's plain attributes as text; an address in the text is removed."""
    for key, value in sorted(vars(module).items()):
        if key == "meta" and isinstance(value, dict):  # in which classes outputs are returned is no work
            left_out = ("result", "whole", "joined", "left", "python")
            value = {name: setting for name, setting in value.items() if name not in left_out}
        if not key.startswith("_") and not isinstance(value, nn.Module | Tensor):
            yield key, _ADDRESS.sub("", repr(value))


def class_name(kind: type) -> str:
    """Return module and name of a class."""
    return f"{kind.__module__}.{kind.__qualname__}"


def source_file(kind: type) -> Path | None:
    """Return the file that defines a class, or None; torch's classes have none: its version is a separate condition."""
    if kind.__module__.partition(".")[0] == "torch":
        return None
    try:
        file = inspect.getsourcefile(kind)
    except (TypeError, OSError):  # a builtin; a class typed into an interpreter
        return None
    return Path(file) if file and Path(file).is_file() else None


def line_of(kind: type, pattern: str) -> str:
    """Return where a class's code first matches a pattern, as ` (net.py:12)`; else where the class begins; empty where
    that is unknown, and for torch's classes.
    """
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
    """SHA-256 of the code that these classes, their bases, and these Python modules run.

    Installed packages count by their version and the file of each class; a user's own files also by those that they
    import, except inside functions. Torch counts by its version alone.
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
        waiting += [name for value in vars(module).values() if (name := _home(value)).partition(".")[0] not in _APART]
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
    """Yield the user's classes and files whose values the modules' methods read: (name, class or file, names that are
    read there, names that are read of any object). The user's functions that a method calls by name count, too.
    """
    kinds = {base for module in modules for base in type(module).__mro__}
    kinds = {kind for kind in kinds if is_users_file(_file_of(sys.modules.get(kind.__module__)))}
    waiting = [code for kind in kinds for code in _methods(kind)]
    seen: set[CodeType] = set()
    attributes: set[str] = set()
    globals_of: dict[str, set[str]] = {}
    while waiting:
        name, code = waiting.pop()
        if code in seen:
            continue
        seen.add(code)
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


# -- Decides when two layers, or two runs of layers, do the same work on other parameters, so that profilers do it
#    once.
#
# `ShapeTable` traces, and the estimator costs, layers of one signature once. A signature holds all that a result can
# depend on; what it cannot compare is equal to itself only, so that in doubt work is done again. Names, and with them
# the place of a layer in its model, are no part of it.


_PLAIN = (
    *(bool, int, float, complex, str, bytes, type(None), type(Ellipsis), enum.Enum),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)
_THEMSELVES = (type, types.FunctionType, types.BuiltinFunctionType, OpOverload)
"""Types compared by identity, as everything else that is not plain; these are often the same object in every block."""

_RATES = {
    "torchvision.ops.stochastic_depth.StochasticDepth": "p",
    "timm.layers.drop.DropPath": "drop_prob",
}
"""Probabilities that grow from block to block and decide nothing of the work, other than whether they are 0 or 1."""

_NAMES: Mapping[type, Sequence[str]] = {Frozen: ("meta", "frozen", "_trained"), Whole: ("path",)}
"""Attributes that are names in the model, or follow from them."""

_OWN_OF_MODULES = frozenset(vars(nn.Module())) - {"training"}
_HOOKS = tuple(sorted(name for name in _OWN_OF_MODULES if name.endswith("_hooks")))


def layer_signature(layer: Layer) -> tuple[object, ...]:
    """Return `run_signature` of a layer alone."""
    return run_signature([layer])


def run_signature(layers: Sequence[Layer]) -> tuple[object, ...]:
    """Return a key that is equal for two lists of layers that do the same work.

    It holds: the classes of all modules, their attributes (dilation, stride, eps, dropout rates), hooks and modes; the
    operations of captured graphs with their constants; shape, strides, dtype and `requires_grad` of every parameter and
    buffer; which of them, and which modules, are identical; how many tensors each layer reads and writes.
    """
    description = _Description()
    return tuple((len(layer.reads), len(layer.writes), description.module(layer.module)) for layer in layers)


class _Same:
    """Key equal to itself only; it keeps the object, so that no other object can take its id."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._value is other._value

    def __hash__(self) -> int:
        return id(self._value)


class _Description:
    """Describes modules and tensors by their properties; repeated ones by the number of their first mention."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}

    def module(self, module: nn.Module) -> object:
        number = self._numbers.get(id(module))
        if number is not None:
            return "again", number
        self._numbers[id(module)] = len(self._numbers)
        held = [
            *((name, self._tensor(tensor)) for name, tensor in module._parameters.items()),
            *((name, self._tensor(tensor)) for name, tensor in module._buffers.items()),
        ]
        hooks = [(name, self.value(list(vars(module)[name].values()))) for name in _HOOKS if vars(module)[name]]
        if isinstance(module, fx.GraphModule) and type(module).__mro__[1] in (fx.GraphModule, CapturedGraph, ByShape):
            # the names of what it holds are those of the whole model
            parts = [self.module(part) for part in module._modules.values() if part is not None]
            graphs = module.graphs if isinstance(module, ByShape) else (module.graph,)
            operations = tuple(operation for graph in graphs for operation in self._graph(module, graph))
            content: object = (fx.GraphModule, tuple(tensor for _, tensor in held), tuple(parts), operations)
        else:
            children = [(name, None if part is None else self.module(part)) for name, part in module._modules.items()]
            if isinstance(module, SequentialSlice) or type(module) is nn.Module:
                # made by a capture, under the names that the whole model has for its parts
                children = [("", described) for _, described in children]
            content = (type(module), tuple(held), tuple(children), tuple(self._attributes(module)))
        frozen: tuple[int, ...] = ()
        if isinstance(module, Frozen) and module.frozen:
            frozen = tuple(at for at, (name, _) in enumerate(module.named_modules()) if name in module.frozen)
        return (module.training, *frozen), tuple(hooks), content

    def value(self, value: object, numbers: dict[fx.Node, int] | None = None) -> object:
        """Describe a value of an attribute, or of an operation's argument; numbers: of the nodes of the operation's
        graph.
        """
        if isinstance(value, fx.Node):
            assert numbers is not None
            return "node", numbers[value]
        if isinstance(value, _PLAIN):
            return type(value), value  # 1, 1.0 and True are equal, but not to an operation
        if isinstance(value, _THEMSELVES):
            return value
        if isinstance(value, CallShape):
            return type(value), self.value(value.key)
        if type(value) is slice:
            value = ("slice", value.start, value.stop, value.step)
        if isinstance(value, dict):
            pairs = [(self.value(key), self.value(part, numbers)) for key, part in value.items()]
            return type(value), tuple(pairs)
        if isinstance(value, (list, tuple)):
            return type(value), tuple(self.value(part, numbers) for part in value)
        if isinstance(value, nn.Module):
            return self.module(value)
        return _Same(value)

    def _tensor(self, tensor: Tensor | None) -> object:
        if tensor is None:
            return None
        number = self._numbers.get(id(tensor))
        if number is not None:
            return "again", number
        self._numbers[id(tensor)] = len(self._numbers)
        if tensor.layout != torch.strided:
            return _Same(tensor)
        return type(tensor), tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad

    def _attributes(self, module: nn.Module) -> Iterator[tuple[str, object]]:
        if isinstance(module, Guard):
            yield "shapes", module.shapes
            yield "conditions", module.conditions
            yield "train_only", module.train_only is not None
            return
        rate = _RATES.get(f"{type(module).__module__}.{type(module).__qualname__}")
        for key, value in sorted(vars(module).items()):
            if key in _OWN_OF_MODULES or any(
                isinstance(module, kind) and key in names for kind, names in _NAMES.items()
            ):
                continue
            if isinstance(module, ByMode) and key == "spec":
                yield key, str(value)
            elif key == rate and isinstance(value, float) and 0 < value < 1:
                yield key, "between 0 and 1"
            else:
                yield key, self.value(value)

    def _graph(self, module: fx.GraphModule, graph: fx.Graph) -> Iterator[object]:
        if type(graph._codegen) is not fx.graph.CodeGen:
            yield _Same(module)
            return
        numbers: dict[fx.Node, int] = {}
        for node in graph.nodes:
            target: object = None
            if node.op == "call_module":
                target = self.module(module.get_submodule(str(node.target)))
            elif node.op == "get_attr":
                held: Any = module
                for part in str(node.target).split("."):
                    held = getattr(held, part)
                target = self._tensor(held) if isinstance(held, Tensor) else self.value(held)
            elif node.op in ("call_function", "call_method"):
                target = self.value(node.target)
            yield node.op, target, self.value(node.args, numbers), self.value(node.kwargs, numbers)
            numbers[node] = len(numbers)
