"""Captures equal blocks once: the first of several blocks that compute the same on tensors of the same kind is
exported, and its part of the graph is copied for the others.

Used for models without memory for their weights, which are planned and not trained. Blocks are the children of lists of
modules; they are equal if their modules, plain attributes and shapes are. The parameters of the other blocks are
hidden from torch, since each takes an export about a millisecond. An attribute that is the block's number in its list,
such as `layer_idx`, or the name of its own module, may differ if the first block's code does not read it, or only
passes the number on.
"""

from __future__ import annotations

import copy
import functools
import itertools
import operator
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._ops import _get_dispatch_mode_pre_dispatch
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils import _pytree as pytree

__all__ = ["EqualBlocks", "NotEqual", "is_own_name", "is_view", "storage_key", "value_of"]

_LIBRARY = torch.library.Library("capslog", "FRAGMENT")
_LIBRARY.define("block_border(Tensor[] tensors, int number) -> ()")
_LIBRARY.impl("block_border", lambda tensors, number: None, "CompositeExplicitAutograd")
_LIBRARY.define("equal_block(Tensor[] tensors, int first, int number) -> Tensor[]")
_NUMBERS = itertools.count(1)
_MADE: dict[int, list[tuple[Any, ...]]] = {}
"""Shape, strides, dtype and device of each tensor that a first block returned, by number of the call, during the
export; sizes may be open."""


def _made(tensors: list[Tensor], first: int, number: int) -> list[Tensor]:
    return [
        torch.empty_strided(shape, stride, dtype=dtype, device=device) for shape, stride, dtype, device in _MADE[first]
    ]


torch.library.register_fake("capslog::equal_block", _made, lib=_LIBRARY)
_BORDER = torch.ops.capslog.block_border.default
_EQUAL = torch.ops.capslog.equal_block.default
_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)


class NotEqual(Exception):
    """Raised where a part of a graph cannot be copied for another block, or code reads that block's parameters."""


@dataclass
class _Group:
    """Equal blocks. numbered: (module's name in the block, attribute) whose value is the block's number or name."""

    numbered: frozenset[tuple[str, str]]
    was_read: bool = False


@dataclass
class _First:
    """First of several equal calls. tree: structure of its result."""

    path: str
    number: int
    tree: Any


@dataclass
class EqualBlocks:
    """Blocks of one model during one export.

    hides: True: hide the parameters of later equal blocks from torch.
    calls: path of the block, and the first equal call, by number of the call.
    hidden_are_needed: True once code has read hidden parameters; the export is wrong then.
    """

    model: nn.Module
    hides: bool = True
    calls: dict[int, tuple[str, _First]] = field(default_factory=dict)
    hidden_are_needed: bool = False
    _first: dict[object, _First] = field(default_factory=dict)
    _called: set[str] = field(default_factory=set)
    _hidden: dict[str, str] = field(default_factory=dict)
    """Qualified name of a hidden parameter -> qualified name of the first block's parameter."""
    _behind: set[str] = field(default_factory=set)
    """Blocks with hidden parameters."""

    @contextmanager
    def open(self) -> Iterator[Sequence[object]]:
        """Let the first of equal blocks be exported whole, and each other block as one operation. Yields the tables
        that replace the tables of hidden parameters.
        """
        kinds: dict[nn.Module, Any] = {}
        groups = _groups(self.model)
        tables = self._hide(groups) if self.hides else []
        try:
            for path, (block, group) in groups.items():
                for name, part in block.named_modules():
                    watched = [attribute for place, attribute in group.numbered if place == name]
                    if watched or part is block:
                        kinds[part] = type(part)
                        forward = functools.partial(self._call, path, block, group) if part is block else None
                        part.__class__ = _kind(type(part), watched, group, forward)
            yield [part._parameters for part, _ in tables]
        finally:
            for part, kind in kinds.items():
                part.__class__ = kind
            for part, table in tables:
                vars(part)["_parameters"] = table
            for first in self._first.values():
                del _MADE[first.number]

    def _hide(self, groups: Mapping[str, tuple[nn.Module, _Group]]) -> list[tuple[nn.Module, dict[str, Any]]]:
        """Hide the parameters of equal blocks except the first two; return the modules and their tables. The second
        block may differ from the first, whose inputs may have no gradient.
        """
        tables: list[tuple[nn.Module, dict[str, Any]]] = []
        leaders: dict[int, list[str]] = {}
        for path, (block, group) in groups.items():
            leader, *more = leaders.setdefault(id(group), [])[:2] or [path]
            if not more:
                leaders[id(group)].append(path)
                continue
            self._behind.add(path)
            for name, part in block.named_modules():
                if part._parameters:
                    tables.append((part, part._parameters))
                    inner = name and f"{name}."
                    held = [key for key, parameter in part._parameters.items() if parameter is not None]
                    self._hidden |= {f"{path}.{inner}{key}": f"{leader}.{inner}{key}" for key in held}
                    vars(part)["_parameters"] = _Hidden(part._parameters, self._need_hidden)
        return tables

    def _need_hidden(self) -> None:
        self.hidden_are_needed = True
        raise NotEqual

    def with_hidden(self, parameters: Mapping[str, fx.Node]) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the name of each parameter of the model, hidden or not, and the value that its node gets.

        parameters: parameters that are not hidden, by name.
        """
        for name, _ in self.model.named_parameters():
            if name in self._hidden:
                yield name, {"val": parameters[self._hidden[name]].meta.get("val"), "storage": -next(_NUMBERS)}
            elif name in parameters:
                yield name, {"val": parameters[name].meta.get("val")}

    def _call(
        self, path: str, block: nn.Module, group: _Group, run: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        leaves, tree = pytree.tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        plain = all(isinstance(leaf, (Tensor, *_PLAIN)) for leaf in leaves)
        if not plain or path in self._called or not tensors or not _is_exporting():
            if path in self._behind:
                self._need_hidden()
            return run(*args, **kwargs)
        self._called.add(path)
        now = tuple(_attributes(part, name, group.numbered) for name, part in block.named_modules())
        key = id(group), str(tree), tuple(map(_described, leaves)), _places(tensors), _state(), now
        first = None if group.was_read else self._first.get(key)
        number = next(_NUMBERS)
        if first is not None:
            self.calls[number] = path, first
            return pytree.tree_unflatten(torch.ops.capslog.equal_block(tensors, first.number, number), first.tree)
        if path in self._behind:
            self._need_hidden()
        versions = [tensor._version for tensor in tensors]
        torch.ops.capslog.block_border(tensors, number)
        output = run(*args, **kwargs)
        made, tree = pytree.tree_flatten(output)
        if all(isinstance(leaf, Tensor) for leaf in made) and versions == [tensor._version for tensor in tensors]:
            torch.ops.capslog.block_border(made, number)
            _MADE[number] = [(leaf.shape, leaf.stride(), leaf.dtype, leaf.device) for leaf in made]
            self._first[key] = _First(path, number, tree)
        return output

    def with_equals(self, modules: set[int]) -> set[int]:
        """Return these ids of modules, and the ids of the same modules in equal blocks."""
        more = set()
        for path, first in self.calls.values():
            blocks = self.model.get_submodule(first.path), self.model.get_submodule(path)
            parts = zip(*(block.modules() for block in blocks), strict=True)
            more |= {id(other) for earlier, other in parts if id(earlier) in modules}
        return modules | more

    def copy_parts(self, graph: fx.Graph, extra: dict[str, Any]) -> dict[fx.Node, fx.Node]:
        """Put copies of the first blocks' parts in place of the other blocks' operations; return old node -> its copy.
        Raises NotEqual where a part cannot be copied.
        """
        nodes = list(graph.nodes)
        borders: dict[Any, list[fx.Node]] = {}
        for node in nodes:
            if node.target is _BORDER:
                borders.setdefault(node.args[1], []).append(node)
        operations = {node.args[2]: node for node in nodes if node.target is _EQUAL}
        held = {str(node.target): node for node in graph.find_nodes(op="get_attr")}
        places, replaced = {node: at for at, node in enumerate(nodes)}, dict[fx.Node, fx.Node]()
        compared: set[int] = set()
        for number, (path, first) in self.calls.items():
            operation, both = operations.get(number), borders.get(first.number, [])
            if operation is None or len(both) != 2:
                raise NotEqual
            (begin, end), users = both, list(operation.users)
            if any(user.target is not operator.getitem for user in users):
                raise NotEqual
            copies = dict(zip(_nodes(begin), _nodes(operation), strict=True))
            part = nodes[places[begin] + 1 : places[end]]
            if first.number not in compared and any(map(_of_values, part)):
                raise NotEqual
            compared.add(first.number)
            _copy(graph, extra, held, part, copies, operation, (first.path, path))
            moved: dict[int | fx.Node, int | fx.Node] = {}
            for user in users:
                made = _nodes(end)[user.args[1]]
                replaced[user] = copies.get(made, made)
                moved[storage_key(user)] = storage_key(replaced[user])
                user.replace_all_uses_with(replaced[user])
                graph.erase_node(user)
            graph.erase_node(operation)
            for node in nodes[places[operation] :]:  # views of what the block returns
                if (key := storage_key(node)) in moved:
                    node.meta["storage"] = moved[key]
        for node in itertools.chain.from_iterable(borders.values()):
            graph.erase_node(node)
        return replaced


def storage_key(node: fx.Node) -> int | fx.Node:
    """Return the number of a tensor's storage, or the node itself where its value is no tensor. A node copied for
    another block has the value of the original, but a storage number of its own.
    """
    tensor = node.meta.get("val")
    if not isinstance(tensor, Tensor):
        return node
    number: int | None = node.meta.get("storage")
    return tensor.untyped_storage()._cdata if number is None else number


def is_view(target: Any) -> bool:
    """Return True for an operator that returns views of its arguments, without a change of them."""
    schema = getattr(target, "_schema", None)
    aliases = [returned.alias_info for returned in schema.returns] if schema is not None else []
    return any(alias is not None and not alias.is_write for alias in aliases)


def value_of(node: fx.Node) -> dict[str, Any]:
    """Return the entries of a node's `meta` that describe its value."""
    return {key: node.meta[key] for key in ("val", "storage") if key in node.meta}


def _nodes(operation: fx.Node) -> Sequence[fx.Node]:
    """Return the tensors that a `block_border` or `equal_block` takes."""
    tensors: Any = operation.args[0]
    return tuple(tensors)


class _Hidden(dict[str, Any]):
    """Empty table in place of a module's parameters; it calls `on_read` when the model's code reads it."""

    def __init__(self, table: Mapping[str, Any], on_read: Callable[[], None]) -> None:
        super().__init__()
        self._names, self._on_read = frozenset(table), on_read

    def __contains__(self, name: object) -> bool:
        if name in self._names and _is_exporting():
            self._on_read()
        return False

    def items(self) -> Any:
        """Return no parameters."""
        if _is_exporting():
            self._on_read()
        return super().items()


def _is_exporting() -> bool:
    return _get_dispatch_mode_pre_dispatch(torch._C._TorchDispatchModeKey.PROXY) is not None


def _state() -> object:
    return torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")


def _described(leaf: Any) -> object:
    if isinstance(leaf, Tensor):
        return str(tuple(leaf.shape)), str(leaf.stride()), leaf.dtype, leaf.device, leaf.requires_grad
    return type(leaf), leaf


def _places(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """Return for each tensor the place of its first occurrence."""
    ids = [id(tensor) for tensor in tensors]
    return tuple(map(ids.index, ids))


def _kind(kind: Any, watched: Sequence[str], group: _Group, call: Any) -> Any:
    """Return a class like `kind` that notes when a watched attribute is read, and hands its forward to `call`."""

    def read(name: str, module: Any) -> Any:
        value = vars(module)[name]
        if type(value) is int:
            return _Number(value, group)
        group.was_read = True
        return value

    def write(name: str, module: Any, value: Any) -> None:
        group.was_read = True
        vars(module)[name] = value

    contents: dict[str, Any] = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    contents |= {name: property(functools.partial(read, name), functools.partial(write, name)) for name in watched}
    if call is not None:

        @functools.wraps(kind.forward)
        def forward(module: Any, *args: Any, **kwargs: Any) -> Any:
            return call(functools.partial(kind.forward, module), *args, **kwargs)

        contents["forward"] = forward
    return type(kind.__name__, (kind,), contents)


class _Number:
    """Number of a block, which notes when code does more with it than pass it on."""

    def __init__(self, value: int, group: _Group) -> None:
        self._value, self._group = value, group

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # for isinstance
        return int

    def __reduce_ex__(self, protocol: Any) -> Any:
        self._group.was_read = True
        return int, (self._value,)


def _noted(name: str) -> Callable[..., Any]:
    def operation(number: Any, *others: Any) -> Any:
        number._group.was_read = True
        return getattr(int, name)(number._value, *(getattr(other, "_value", other) for other in others))

    return operation


for _name in {*vars(int), "__str__"} - {"__new__", "__doc__", "__getattribute__", "real", "imag"}:
    if callable(getattr(int, _name)):
        setattr(_Number, _name, _noted(_name))


# -- equal blocks of a model


def _groups(model: nn.Module) -> dict[str, tuple[nn.Module, _Group]]:
    """Map qualified name -> the block, and the group of blocks that equal it; blocks without an equal are left out."""
    uses = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    rows: dict[object, list[tuple[str, nn.Module, frozenset[tuple[str, str]]]]] = {}
    for path, module in model.named_modules():
        if not isinstance(module, nn.ModuleList):
            continue
        alike = _of_all(module)
        for place, (name, block) in enumerate(module.named_children()):
            shares = any(uses[id(parameter)] > 1 for parameter in block.parameters())
            if shares or "forward" in vars(block) or isinstance(block, torch.jit.ScriptModule):
                continue
            numbered = frozenset(
                (inner, attribute)
                for inner, part in block.named_modules()
                for attribute, value in vars(part).items()
                if (type(value) is int and value == place and (inner, attribute) not in alike)
                or _holds_name(value, f"{path}.{name}.{inner}".strip("."))
            )
            key = tuple(_signature(part, inner, numbered) for inner, part in block.named_modules())
            rows.setdefault((path, key, numbered), []).append((f"{path}.{name}".lstrip("."), block, numbered))
    groups: dict[str, tuple[nn.Module, _Group]] = {}
    for blocks in rows.values():
        group = _Group(blocks[0][2])
        if len(blocks) > 1 and not any(f"{path}.".startswith(f"{outer}.") for path, _, _ in blocks for outer in groups):
            groups |= {path: (block, group) for path, block, _ in blocks}
    return groups


def _of_all(blocks: nn.ModuleList) -> set[tuple[str, str]]:
    """Return (module's name in the block, attribute) of whole numbers that are the same in all blocks: in one block,
    such a number may equal the block's number by chance.
    """
    numbers: dict[tuple[str, str], set[int]] = {}
    for block in blocks:
        for inner, part in block.named_modules():
            for attribute, value in vars(part).items():
                if type(value) is int:
                    numbers.setdefault((inner, attribute), set()).add(value)
    return {place for place, values in numbers.items() if len(values) == 1}


def is_own_name(value: str, path: str) -> bool:
    """True where a string is the qualified name of the module at `path`, from the model or from a part of it."""
    return "." in value and f".{path}".endswith(f".{value}")


def _holds_name(value: Any, path: str) -> bool:
    if isinstance(value, str):
        return is_own_name(value, path)
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return any(_holds_name(part, path) for part in parts)


def _signature(part: nn.Module, name: str, numbered: Collection[tuple[str, str]]) -> object:
    """Return a key of everything that decides what a module computes, except its attributes in `numbered`."""
    hooks = [(attribute, _of_value(vars(part)[attribute])) for attribute in vars(part) if attribute in _OF_EVERY_MODULE]
    tensors = [
        (key, None if tensor is None else _described(tensor))
        for table in (part._parameters, part._buffers)
        for key, tensor in table.items()
    ]
    return name, type(part), tuple(hooks), tuple(tensors), _attributes(part, name, numbered)


def _attributes(part: nn.Module, name: str, numbered: Collection[tuple[str, str]]) -> object:
    """Return a key of the attributes that a module has in addition to those of every module."""
    return part.training, tuple(
        (attribute, _of_value(value))
        for attribute, value in vars(part).items()
        if attribute not in _TABLES and attribute not in _OF_EVERY_MODULE and (name, attribute) not in numbered
    )


_TABLES = ("_parameters", "_buffers", "_modules")
_OF_EVERY_MODULE = frozenset(vars(nn.Module())) - {*_TABLES}


def _of_value(value: Any) -> object:
    if isinstance(value, _PLAIN):
        return type(value), value
    if isinstance(value, (list, tuple)):
        return type(value), tuple(map(_of_value, value))
    if isinstance(value, dict):
        return type(value), tuple((_of_value(key), _of_value(part)) for key, part in value.items())
    if isinstance(value, set):
        return type(value), frozenset(map(_of_value, value))
    return id(value)


# -- the copy of a part of a graph


def _copy(
    graph: fx.Graph,
    extra: dict[str, Any],
    held: Mapping[str, fx.Node],
    part: Sequence[fx.Node],
    copies: dict[fx.Node, fx.Node],
    operation: fx.Node,
    paths: tuple[str, str],
) -> None:
    """Copy the nodes of `part` to the place before an operation.

    held: nodes of parameters, buffers and constants, by name. copies: input -> its copy; node -> copy is added.
    paths: path of the nodes' block, and of the block that gets the copies.
    """
    path, other = paths
    storages = {storage_key(old): storage_key(new) for old, new in copies.items()}

    def copy_of(node: fx.Node) -> fx.Node:
        if node in copies:
            return copies[node]
        if isinstance(node.meta.get("val"), torch.SymInt):  # an open size, or computed from open sizes
            return node
        if node.op != "get_attr":
            raise NotEqual
        target = str(node.target)
        if target.startswith(f"{path}."):
            if (theirs := f"{other}{target[len(path) :]}") not in held:
                raise NotEqual
            storages[storage_key(node)] = storage_key(held[theirs])
            return held[theirs]
        storages[storage_key(node)] = storage_key(node)
        return node

    for node in part:
        with graph.inserting_before(operation):
            new = copies[node] = graph.node_copy(node, copy_of)
        if node.op == "call_module" and str(node.target) in extra:
            new.target = f"{node.target}_of_{other.replace('.', '_')}"
            extra[str(new.target)] = copy.deepcopy(extra[str(node.target)])
        new.meta = dict(node.meta)
        if isinstance(node.meta.get("val"), Tensor):
            new.meta["storage"] = storages.setdefault(storage_key(node), -next(_NUMBERS))
        if stack := node.meta.get("nn_module_stack"):
            new.meta["nn_module_stack"] = _renamed(stack, path, other)
        if "inner_stacks" in node.meta:
            new.meta["inner_stacks"] = [_renamed(inner, path, other) for inner in node.meta["inner_stacks"]]


def _renamed(stack: Mapping[str, Any], path: str, other: str) -> dict[str, Any]:
    return {
        f"{key} of {other}" if (inside := f"{entry[0]}.".startswith(f"{path}.")) else key: (
            f"{other}{entry[0][len(path) :]}" if inside else entry[0],
            *entry[1:],
        )
        for key, entry in stack.items()
    }


def _of_values(node: fx.Node) -> bool:
    """True where the size of a node's tensor depends on values, which differ in another block."""
    leaves = pytree.tree_leaves(node.meta.get("val"))
    return any(isinstance(leaf, Tensor) and bool(free_unbacked_symbols(leaf)) for leaf in leaves)
