"""Splits the layers of captured models by tensor-N: attention by heads, feed-forwards by columns.

A linear map that reads a whole value is divided by its outputs; `division` follows the shares through later operators,
up to the linear map that reads them, which is divided by its inputs into the same shares (Megatron-LM, Shoeybi et al.
2019, section 3). The results of the parts are added. Each part becomes a layer, as do the operators on whole values
before and behind the parts.
"""

from __future__ import annotations

import copy
import itertools
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.model.capture.collapse import mutated_arguments
from varuna_capslog.model.capture.runtime import ByMode, CapturedGraph, Guard, Region
from varuna_capslog.model.capture.split import layer_module, part_identities
from varuna_capslog.model.splitting.division import (
    ATTENTIONS,
    VIEWS,
    Divided,
    Share,
    SharedCall,
    divided_result,
    sliced,
    spans,
)
from varuna_capslog.model.splitting.splitter import Splitter

__all__ = ["ELEMENTWISE", "open_module", "some_shapes", "split_captured", "splits_captured"]


# -- Finds the linear maps, the operations inside modules, and the sizes that a split of a captured layer needs.


def operator_name(target: Any) -> str:
    """Return the aten name of an operator, function or method."""
    packet = getattr(target, "overloadpacket", target)
    name = packet if isinstance(packet, str) else getattr(packet, "__name__", str(packet))
    return {"truediv": "div", "float": "to", "type": "to"}.get(name, name)


@dataclass(frozen=True)
class Linear:
    """Linear map in a graph: its input x, and names of its parameters. into_columns: weight columns are outputs."""

    x: fx.Node
    weight: str
    bias: str | None
    into_columns: bool


def linear_at(node: fx.Node, root: nn.Module) -> Linear | None:
    """Return the linear map that a node computes; None for other nodes."""
    read, names = node.all_input_nodes, []
    if node.op == "call_module" and _is_linear(held := root.get_submodule(str(node.target))):
        names = [f"{node.target}.{name}" for name in ("weight", "bias") if getattr(held, name) is not None]
    elif operator_name(node.target) == "linear" and all(source.op == "get_attr" for source in read[1:]):
        held, names = None, [str(source.target) for source in read[1:]]
    if not names:
        return None
    return Linear(read[0], names[0], names[1] if len(names) > 1 else None, type(held) not in (type(None), nn.Linear))


def _is_linear(module: nn.Module) -> bool:
    """True for a linear map, also for GPT-2's `Conv1D`, whose weight is transposed."""
    class_name = f"{type(module).__module__}.{type(module).__qualname__}"
    return type(module) is nn.Linear or class_name == "transformers.pytorch_utils.Conv1D"


def has_linear(module: nn.Module) -> bool:
    """True where a module contains linear maps but is not itself one."""
    return not _is_linear(module) and any(isinstance(part, nn.Linear) or _is_linear(part) for part in module.modules())


class _Tracer(fx.Tracer):
    def __init__(self, by_one: bool = False) -> None:
        super().__init__()
        self._by_one = by_one

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return self._by_one or not has_linear(m)


def open_module(graph: fx.Graph, root: nn.Module, node: fx.Node, by_one: bool = False) -> None:
    """Replace the call of a module by its operations, down to modules that contain no linear maps. by_one: down to the
    calls of its children. Raises CapslogError where the module's code depends on values or mode.
    """
    target = str(node.target)
    held = root.get_submodule(target)
    copied = copy.deepcopy(held, {id(parameter): parameter for parameter in held.parameters()})
    try:
        if isinstance(held, Region):
            raise ValueError("it has a gradient mode or an autocast of its own")
        inner, eval_graph = (_Tracer(by_one).trace(copied.train(mode)) for mode in (True, False))
        if str(inner) != str(eval_graph):
            raise ValueError("it does something else in eval mode")
        if any(
            str(placeholder.target).startswith("*") and placeholder.users
            for placeholder in inner.find_nodes(op="placeholder")
        ):
            raise ValueError("it takes any number of arguments")
        (result,) = inner.find_nodes(op="output")[0].all_input_nodes
    except Exception as error:
        raise CapslogError(
            f"what its module {target!r} ({type(held).__name__}) does cannot be followed ({_line(error)}); leave "
            "the layer whole"
        ) from error
    env: dict[fx.Node, Any] = {}
    for place, inner_node in enumerate(inner.find_nodes(op="placeholder")):
        default = inner_node.args[0] if inner_node.args else None
        env[inner_node] = (
            node.args[place] if place < len(node.args) else node.kwargs.get(str(inner_node.target), default)
        )
    with graph.inserting_before(node):
        for inner_node in inner.nodes:
            if inner_node.op in ("placeholder", "output"):
                continue
            env[inner_node] = graph.node_copy(inner_node, env.__getitem__)
            if inner_node.op in ("call_module", "get_attr"):
                env[inner_node].target = f"{target}.{inner_node.target}"
    node.replace_all_uses_with(env[result])
    graph.erase_node(node)


def _line(error: Exception) -> str:
    return str(error).partition("\n")[0]


class _SizesFound(fx.Interpreter):
    sizes: dict[fx.Node, Any]

    def run_node(self, n: fx.Node) -> Any:
        value = pytree.tree_map_only(torch.Tensor, _bare, super().run_node(n))
        if isinstance(value, torch.Tensor):
            self.sizes[n] = tuple(value.shape)
        elif isinstance(value, tuple | list) and all(isinstance(tensor, torch.Tensor) for tensor in value):
            self.sizes[n] = tuple(tuple(tensor.shape) for tensor in value)
        else:
            self.sizes[n] = None
        return value


def _bare(tensor: torch.Tensor) -> torch.Tensor:
    """Return a meta tensor, float32 for any floating-point dtype: parameters may have been converted by `Module.to`."""
    bare = tensor.detach().to("meta")
    return bare.float() if bare.is_floating_point() else bare


def some_shapes(guard: Guard) -> list[list[int]]:
    """Return input shapes that a layer was captured for; where possible, open sizes differ from each other."""
    for start in range(3, 1000):
        chosen: dict[str, int] = {}
        shapes: list[list[int]] = [[] for _ in guard.shapes]
        for sizes, shape in zip(shapes, guard.shapes, strict=True):
            for size in shape:
                name, least, most = ("", size, None) if isinstance(size, int) else size
                wanted = min(max(least, start + 2 * len(chosen)), most or least + 1000)
                sizes.append(chosen.setdefault(name, wanted) if name else least)
        if guard.takes(shapes):
            break
    return shapes


def whole_sizes(module: nn.Module, graph: fx.Graph, guard: Guard) -> dict[fx.Node, Any]:
    """Return the sizes of every value of a layer's graph: a tuple for a tensor, tuples for several; None for others.

    Open sizes get an arbitrary value. Raises CapslogError where the graph does not run without values.
    """
    memo: dict[int, Any] = {id(tensor): _bare(tensor) for tensor in (*module.parameters(), *module.buffers())}
    shapes = some_shapes(guard)
    inputs = [torch.empty(shape, dtype=kind, device="meta") for shape, kind in zip(shapes, guard.dtypes, strict=True)]
    runner = _SizesFound(copy.deepcopy(module, memo).train(), graph=graph)
    runner.sizes = {}
    try:
        runner.run(*map(_bare, inputs))
    except Exception as error:
        raise CapslogError(f"the sizes inside it cannot be followed ({_line(error)}); leave the layer whole") from error
    return runner.sizes


# -- the splits of a captured layer


ELEMENTWISE = (nn.Dropout, nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.ELU, nn.LeakyReLU, nn.Identity)
"""Modules of torch that are elementwise."""

_ATEN = torch.ops.aten


class _Closed(Exception):
    """Module whose operations must be known; `node` calls it."""

    def __init__(self, node: fx.Node) -> None:
        super().__init__(node)
        self.node = node


def splits_captured(module: nn.Module) -> bool:
    """True for a captured layer in which a linear map reads values computed from another linear map's result."""
    if not isinstance(module, CapturedGraph):
        return False
    derived: set[fx.Node] = set()  # values computed from the result of a linear map
    for node in module.graph.nodes:
        reached, linear = any(source in derived for source in node.all_input_nodes), linear_at(node, module) is not None
        inside = node.op == "call_module" and has_linear(module.get_submodule(str(node.target)))
        if inside or (linear and reached):
            return True
        if linear or reached:
            derived.add(node)
    return False


def split_captured(module: CapturedGraph, into: Splitter) -> None:
    """Add the parts of a captured layer to `into`. Raises CapslogError: an operator that is not known to keep heads or
    columns separate, unequal shares, or a layer with several graphs.
    """
    if hasattr(module, "graphs"):
        raise CapslogError("it has a graph for each of several sizes; capture the model for one of them")
    graph = copy.deepcopy(module.graph)
    for node in graph.nodes:
        while node.op == "call_module" and has_linear(module.get_submodule(str(node.target))):
            opened, node = node, node.next
            open_module(graph, module, opened)
    while True:
        try:
            return _Parts(module, graph, into).add()
        except _Closed as closed:
            open_module(graph, module, closed.node)


class _Parts:
    """Analysis of a captured layer that is split.

    divided: division of each divided value. args: arguments with which a part calls the operators of these values.
    linears: the linear maps. rows: the linear maps that read divided values.
    phase: phase of each value: even for whole values, odd for divided values, never less than an operand's phase.
    """

    def __init__(self, module: CapturedGraph, graph: fx.Graph, into: Splitter) -> None:
        self.module, self.graph, self.into = module, graph, into
        (self.guard,) = (child for child in module.children() if isinstance(child, Guard))
        self.sizes = whole_sizes(module, graph, self.guard)
        self.divided: dict[fx.Node, Any] = {}
        self.args: dict[fx.Node, Any] = {}
        self.linears: dict[fx.Node, Linear] = {}
        self.rows: set[fx.Node] = set()
        self.phase: dict[fx.Node, int] = {}
        self.inputs = graph.find_nodes(op="placeholder")
        (output,) = graph.find_nodes(op="output")
        self.outputs = dict(zip(pytree.tree_leaves(output.args[0]), into.writes, strict=True))
        self._uses: dict[int, Divided | None] = {}
        self._origin: dict[fx.Node, str] = {}
        for node in graph.nodes:
            self._follow(node)
        self.names: dict[int, str] = {}
        for phase in range(max(self.phase.values()) + 1):
            self.names[phase] = self._name(phase)

    def _follow(self, node: fx.Node) -> None:
        sources = [source for source in node.all_input_nodes if source.op != "get_attr"]
        shared = [source for source in sources if source in self.divided]
        name, linear = operator_name(node.target), linear_at(node, self.module)
        if shared:
            self._origin[node] = self._origin[shared[0]]
        if linear is not None:
            self.linears[node] = linear
            self._divide(node, linear)
        elif node.op == "output":
            if (
                shared
                or len(self.outputs) < len(self.into.writes)
                or any(placeholder in self.outputs for placeholder in self.inputs)
            ):
                raise CapslogError("it writes shares, or what it reads, or one tensor twice; leave the layer whole")
        elif shared:
            division, part_args = self._result(node)
            if division is not None:
                self.divided[node], self.args[node] = division, part_args
        held = self.module.get_submodule(str(node.target)) if node.op == "call_module" else None
        if mutated_arguments(node) or getattr(held, "inplace", False) or node.kwargs.get("inplace", False):
            raise CapslogError(f"its operator {name!r} ({node.name}) works in place; make it work out of place")
        phases = [self.phase[source] for source in sources]
        if self.sizes[node] is not None:
            phases = [phase + (phase % 2 != (node in self.divided)) for phase in phases]
        self.phase[node] = max(phases, default=0)

    def _divide(self, node: fx.Node, linear: Linear) -> None:
        name, last = repr(linear.weight.removesuffix(".weight")), len(self.sizes[node]) - 1
        division = self.divided.get(linear.x)
        if division is None:
            self._origin[node] = name
            self.divided[node] = division = Divided(last, self._blocks(node))
        elif division.dim == last:
            self.rows.add(node)
        else:
            raise CapslogError(f"its {name} reads the heads of {self._origin[node]} one by one; leave the layer whole")
        division.ranges(0, self.into.degree, f"columns of {name}")

    def _blocks(self, node: fx.Node) -> tuple[int, ...]:
        """Return the sizes of the blocks into which readers cut a linear map's outputs, such as queries and keys."""
        *others, columns = self.sizes[node]
        bounds = {0, columns}
        for user in node.users:
            call, sizes = self._call(user, user.args, user.kwargs), self.sizes[user]
            if call.name in ("split", "split_with_sizes", "chunk") and call.dim(2) == len(others):
                bounds |= {end for _, end in spans([size[-1] for size in sizes])}
            elif call.name == "slice" and call.dim() == len(others):
                bounds |= set(sliced(call))
            elif call.name in ("view", "reshape") and len(sizes) > len(others) + 2 and sizes[len(others)] == 3:
                bounds |= {columns // 3, columns // 3 * 2}  # queries, keys and values, in a dimension of their own
        return tuple(end - first for first, end in itertools.pairwise(sorted(bounds)))

    def _call(self, node: fx.Node, args: Any, kwargs: Mapping[str, Any], target: Any = None) -> SharedCall:
        target = target or node.target
        name, exact = operator_name(target), isinstance(target, torch._ops.OpOverload)
        return SharedCall(node, name, exact, args, kwargs, self.sizes, self.divided, self._origin.get(node, ""))

    def _result(self, node: fx.Node) -> tuple[Any, Any]:
        """Return the division of an operator's result, and the arguments with which a part calls the operator."""
        if node.op != "call_module":
            return divided_result(self._call(node, node.args, node.kwargs), self.into.degree)
        held = self.module.get_submodule(str(node.target))
        division, across = self.divided[node.all_input_nodes[0]], False
        if isinstance(held, nn.LayerNorm | nn.RMSNorm):
            across = division.dim >= len(self.sizes[node]) - len(held.normalized_shape)
        elif isinstance(held, ByMode):
            leaves = list(held.in_training)
            for slot, argument in zip(held.slots, node.args, strict=True):
                leaves[slot] = argument
            args, kwargs = pytree.tree_unflatten(leaves, held.spec)
            division, part_args = divided_result(self._call(node, args, kwargs, held.target), self.into.degree)
            new = pytree.tree_leaves((part_args, kwargs), is_leaf=lambda leaf: leaf is None)
            across = any(leaf != leaves[at] for at, leaf in enumerate(new) if at not in held.slots)
            if not across:
                return division, tuple(new[slot] for slot in held.slots)
        elif not isinstance(held, ELEMENTWISE):
            raise _Closed(node)
        if across:
            raise CapslogError(
                f"its {node.target!r} ({type(held).__name__}) works across the shares of what {self._origin[node]} "
                "makes; leave the layer whole"
            )
        return division, node.args

    def _name(self, phase: int) -> str:
        if phase % 2 == 0:
            return f"sum{phase // 2}" if phase else "before"
        divided = [node for node in self.divided if self.phase[node] == phase]
        held = [self.module.get_submodule(str(node.target)) if node.op == "call_module" else node for node in divided]
        names = {operator_name(operation.target) for operation in held if isinstance(operation, fx.Node | ByMode)}
        name = "attention" if names & {"softmax", *ATTENTIONS} else "feed_forward"
        count = sum(taken.startswith(name) for taken in self.names.values())
        return f"{name}{count + 1}" if count else name

    def made_once(self, node: fx.Node) -> bool:
        """True where a value is computed once and sent to the parts; each part computes views and sizes itself."""
        if not node.op.startswith("call") or self.sizes[node] is None:
            return False
        return operator_name(node.target) not in VIEWS or node in self.outputs

    def value(self, node: fx.Node, part: int | None) -> str:
        """Return the name of a value that passes between parts. part: the part that computes it; None: not a share."""
        if part is None and node in self.outputs:
            return self.outputs[node]
        name = self.names[self.phase[node] - (part is not None and node in self.rows)]
        return self.into.value(f"{name}.{node.name}" if part is None else f"{name}.{part}.{node.name}")

    def used(self, target: str, divided: Divided | None) -> torch.Tensor:
        """Return a tensor of the layer; refuse a tensor that parts use both whole and divided, or in two divisions."""
        tensor = operator.attrgetter(target)(self.module)
        if self._uses.setdefault(id(tensor), divided) != divided:
            raise CapslogError(f"it uses {target!r} twice, and shares it out in two ways; leave the layer whole")
        return tensor

    def add(self) -> None:
        """Add the parts to the splitter."""
        undivided, shares = (None,), range(self.into.degree)
        layers = [_OnePart(self, phase, part) for phase in self.names for part in (shares if phase % 2 else undivided)]
        wanted = set(self.into.writes).union(*(layer.reads for layer in layers))
        for layer in layers:
            layer.finish(wanted)


class _OnePart:
    """Layer made of the operators of one phase of a captured layer, for one share of the divided values.

    reads: names of the values that it reads, in order.
    """

    def __init__(self, parts: _Parts, phase: int, part: int | None) -> None:
        self._parts, self._part = parts, part
        self._name = parts.names[phase] if part is None else f"{parts.names[phase]}.{part}"
        self._graph = fx.Graph()
        self._guard = self._graph.call_module("guard")
        self._made: dict[fx.Node, fx.Node] = {}
        self._held: dict[str, Any] = {}
        self._writes: dict[str, fx.Node] = {}
        self.reads: dict[str, fx.Node] = {}
        for node in parts.graph.nodes:
            if node in parts.rows and phase == parts.phase[node] - 1:
                self._writes[parts.value(node, part)] = self._linear(node, None)
            elif parts.phase[node] == phase and parts.made_once(node):
                self._writes[parts.value(node, part)] = self._made[node] = self._emit(node)

    def finish(self, wanted: set[str]) -> None:
        """Add the layer to the splitter, if it writes values in `wanted`."""
        writes = {name: node for name, node in self._writes.items() if name in wanted}
        if not writes:
            return
        guard, into = self._parts.guard, self._parts.into
        guarded = [at for at, name in enumerate(into.reads) if name in self.reads]
        self._guard.args = tuple(self.reads[into.reads[at]] for at in guarded)
        guarded_specs: Any = ([column[at] for at in guarded] for column in (guard.names, guard.shapes, guard.dtypes))
        names, shapes, dtypes = guarded_specs
        self._held["guard"] = Guard(guard.layer, names, shapes, guard.train_only, guard.conditions, dtypes)
        results = tuple(writes.values())
        self._graph.output(results[0] if len(results) == 1 else results)
        module = layer_module(self._graph, self._held, self._parts.module, (), part_identities(self._parts.module))
        module.freeze_as(self._parts.module)
        module.meta.update(self._parts.module.meta)
        into.add(self._name, module, list(self.reads), list(writes))

    def _get(self, node: fx.Node) -> fx.Node:
        parts = self._parts
        if node in self._made:
            return self._made[node]
        if node.op == "placeholder":
            made = self._read(parts.into.reads[parts.inputs.index(node)])
        elif node.op == "get_attr":
            made = self._hold(str(node.target), None)
        elif not parts.made_once(node):
            made = self._emit(node)
        elif node in parts.divided and self._part is None:
            raise CapslogError(f"it reads the shares of {node.name!r} as a whole; leave the layer whole")
        else:
            made = self._read(parts.value(node, self._part if node in parts.divided else None))
        return self._made.setdefault(node, made)

    def _read(self, name: str) -> fx.Node:
        if name not in self.reads:
            with self._graph.inserting_before(self._guard):
                self.reads[name] = self._graph.placeholder(f"value_{len(self.reads)}")
        return self.reads[name]

    def _hold(self, target: str, divided: Divided | None) -> fx.Node:
        """Return a tensor of the layer, or this part's share of it, as a node."""
        tensor, into = self._parts.used(target, divided), self._parts.into
        ranges = [] if divided is None else divided.ranges(self._part or 0, into.degree)
        if not isinstance(tensor, nn.Parameter):
            tensor = into.cut_buffer(tensor, divided.dim if divided else 0, ranges)
        elif divided is not None:
            tensor = into.cut(tensor, divided.dim, ranges)
        self._held[target] = tensor
        return self._graph.create_node("get_attr", target)

    def _emit(self, node: fx.Node) -> fx.Node:
        parts = self._parts
        if node in parts.linears:
            return self._sum(node) if node in parts.rows else self._linear(node, parts.linears[node].bias)
        if node.op == "call_module":
            held = parts.module.get_submodule(str(node.target))
            for name, _ in held.named_parameters():
                parts.used(f"{node.target}.{name}", None)
            self._held[str(node.target)] = parts.into.sharing(held)
        args, kwargs = parts.args.get(node, node.args), dict(node.kwargs)
        args, kwargs = fx.node.map_aggregate(args, self._argument), fx.node.map_aggregate(kwargs, self._argument)
        return self._graph.create_node(node.op, node.target, args, kwargs, node.name)

    def _argument(self, value: Any) -> Any:
        if isinstance(value, fx.Node):
            return self._get(value)
        if not isinstance(value, Share):
            return value
        if value.node.op == "get_attr":
            return self._hold(str(value.node.target), value.divided)
        operand, dim = self._get(value.node), value.divided.dim
        ranges = value.divided.ranges(self._part or 0, self._parts.into.degree)
        pieces = [self._graph.call_function(_ATEN.slice.Tensor, (operand, dim, *bounds)) for bounds in ranges]
        return pieces[0] if len(pieces) == 1 else self._graph.call_function(_ATEN.cat.default, (pieces, dim))

    def _linear(self, node: fx.Node, bias: str | None) -> fx.Node:
        """Apply a part's share of a linear map: a share of the outputs, or a share of the inputs, without the bias."""
        parts, linear = self._parts, self._parts.linears[node]
        across = node in parts.rows
        blocks = parts.divided[linear.x if across else node].blocks
        weight = self._hold(linear.weight, Divided(int(across != linear.into_columns), blocks))
        if linear.into_columns:
            weight = self._graph.call_function(_ATEN.t.default, (weight,))
        added = () if bias is None else (self._hold(bias, Divided(0, blocks)),)
        return self._graph.call_function(_ATEN.linear.default, (self._get(linear.x), weight, *added))

    def _sum(self, node: fx.Node) -> fx.Node:
        """Add the results of a linear map's parts, in the order of the parts, and the bias."""
        parts, bias = self._parts, self._parts.linears[node].bias
        total, *others = (self._read(parts.value(node, part)) for part in range(parts.into.degree))
        for addend in (*others, *([] if bias is None else [self._hold(bias, None)])):
            total = self._graph.call_function(_ATEN.add.Tensor, (total, addend))
        return total
