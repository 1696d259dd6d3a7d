"""How the layers of captured models are split by tensor-N: attention by heads, feed-forwards by columns.

Every linear map of a whole value is divided by its outputs; `division` follows the shares through what comes after, up
to a linear map that reads them, of which every part has the same share of the inputs (Megatron-LM, Shoeybi et al. 2019,
section 3). What the parts of that one give is added. The graph is cut there: what runs before and after on whole values
is a layer for itself, and so is each part.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.model.capture.collapse import mutated_arguments
from varuna_capslog.model.capture.runtime import ByMode, CapturedGraph, Guard, Region
from varuna_capslog.model.capture.split import layer_module
from varuna_capslog.model.splitting.division import VIEWS, Call, Divided, Share, divided_result, operator_name
from varuna_capslog.model.splitting.splitter import Splitter

__all__ = ["ENTRY_BY_ENTRY", "split_captured", "splits_captured"]

ENTRY_BY_ENTRY = (nn.Dropout, nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.ELU, nn.LeakyReLU, nn.Identity)
"""Modules of torch that work on each entry alone."""

_ATEN = torch.ops.aten
_NORMS = (nn.LayerNorm, nn.RMSNorm)
_NUMBERS = ("getattr", "sym_size", "size")
"""What reads a type or a size of a tensor, and makes none."""
_OF_ATTENTION = ("softmax", "scaled_dot_product_attention")


@dataclass(frozen=True)
class _Linear:
    """A linear map in a graph.

    weight, bias: names of its parameters. into_columns: whether the weight has a column for each output, not a row.
    """

    x: fx.Node
    weight: str
    bias: str | None
    into_columns: bool


class _Unclear(Exception):
    """A module must be seen from inside; `node` calls it."""

    def __init__(self, node: fx.Node) -> None:
        super().__init__(node)
        self.node = node


def splits_captured(module: nn.Module) -> bool:
    """Whether it is a captured layer with linear maps one after the other."""
    if not isinstance(module, CapturedGraph):
        return False
    found: set[fx.Node] = set()  # what is made of the result of a linear map
    for node in module.graph.nodes:
        inside = module.get_submodule(str(node.target)) if node.op == "call_module" else None
        count = sum(map(_is_linear, inside.modules())) if inside else int(operator_name(node.target) == "linear")
        reached = any(source in found for source in node.all_input_nodes)
        if count > 1 or (count and reached):
            return True
        if count or reached:
            found.add(node)
    return False


def split_captured(module: CapturedGraph, into: Splitter) -> None:
    """Adds the parts of a captured layer.

    Raises:
        CapslogError: an operator that is not known to keep heads or columns apart, shares that are not equal, or a
            layer of several graphs.
    """
    if hasattr(module, "graphs"):
        raise CapslogError("it has a graph for each of several sizes; capture the model for one of them")
    graph = copy.deepcopy(module.graph)
    for node in list(graph.nodes):
        if node.op == "call_module" and not _is_linear(held := module.get_submodule(str(node.target))):
            if any(isinstance(one, nn.Linear) or _is_linear(one) for one in held.modules()):
                _open(graph, module, node)
    while True:
        try:
            _Parts(module, graph, into).add()
            return
        except _Unclear as unclear:
            _open(graph, module, unclear.node)


def _is_linear(module: nn.Module) -> bool:
    return type(module) is nn.Linear or _of_transformers(module)


def _of_transformers(module: nn.Module) -> bool:
    """Whether it is the linear map of GPT-2, whose weight lies the other way round."""
    return type(module).__name__ == "Conv1D" and type(module).__module__ == "transformers.pytorch_utils"


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return _is_linear(m) or super().is_leaf_module(m, module_qualified_name)


def _open(graph: fx.Graph, root: nn.Module, node: fx.Node) -> None:
    """Puts what a module does in the place of its call."""
    target = str(node.target)
    held = root.get_submodule(target)
    own = copy.deepcopy(held, {id(one): one for one in held.parameters()})
    try:
        inner, other = (_Tracer().trace(own.train(mode)) for mode in (True, False))
        if str(inner) != str(other):
            raise ValueError("it does something else in eval mode")
        (result,) = inner.find_nodes(op="output")[0].all_input_nodes
    except Exception as error:
        raise CapslogError(
            f"what its module {target!r} ({type(held).__name__}) does cannot be followed ({error}); leave the layer whole"
        ) from error
    env: dict[fx.Node, Any] = {}
    for place, one in enumerate(inner.find_nodes(op="placeholder")):
        default = one.args[0] if one.args else None
        env[one] = node.args[place] if place < len(node.args) else node.kwargs.get(str(one.target), default)
    with graph.inserting_before(node):
        for one in inner.nodes:
            if one.op not in ("placeholder", "output"):
                env[one] = graph.node_copy(one, env.__getitem__)
                if one.op in ("call_module", "get_attr"):
                    env[one].target = f"{target}.{one.target}"
    node.replace_all_uses_with(env[result])
    graph.erase_node(node)


class _Sizes(fx.Interpreter):
    """Finds the sizes of every value by a run without memory, in which all numbers with a fraction are float32."""

    def __init__(self, module: nn.Module, graph: fx.Graph) -> None:
        super().__init__(module, graph=graph)
        self.sizes: dict[fx.Node, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        value = pytree.tree_map_only(torch.Tensor, _bare, super().run_node(n))
        self.sizes[n] = pytree.tree_map_only(torch.Tensor, lambda one: tuple(one.shape), value)
        return value


def _bare(tensor: torch.Tensor) -> torch.Tensor:
    bare = tensor.detach().to("meta")
    return bare.float() if bare.is_floating_point() else bare


def _sizes(module: nn.Module, graph: fx.Graph, guard: Guard) -> dict[fx.Node, Any]:
    memo: dict[int, Any] = {id(one): _bare(one) for one in (*module.parameters(), *module.buffers())}
    runner = _Sizes(copy.deepcopy(module, memo).train(), graph)
    shapes = [[size if isinstance(size, int) else max(size[1], 2) for size in shape] for shape in guard.shapes]
    inputs = [torch.empty(shape, dtype=kind, device="meta") for shape, kind in zip(shapes, guard.dtypes, strict=True)]
    try:
        runner.run(*map(_bare, inputs))
    except Exception as error:
        raise CapslogError(f"the sizes inside it cannot be followed ({error}); leave the layer whole") from error
    return runner.sizes


class _Parts:
    """What is known of a captured layer that is split.

    Attributes:
        divided: how the values are divided that are; `args`: with which arguments a part calls their operators.
        linears: the linear maps. rows: those of them that read divided values.
        phase: of every value: even for whole ones, odd for divided ones, and not less than that of what it is made of.
    """

    def __init__(self, module: CapturedGraph, graph: fx.Graph, into: Splitter) -> None:
        self.module, self.graph, self.into = module, graph, into
        (guard,) = (one for one in module.children() if isinstance(one, Guard))
        self.guard, self.sizes = guard, _sizes(module, graph, guard)
        self.divided: dict[fx.Node, Any] = {}
        self.args: dict[fx.Node, Any] = {}
        self.linears: dict[fx.Node, _Linear] = {}
        self.rows: set[fx.Node] = set()
        self.phase: dict[fx.Node, int] = {}
        self.inputs = graph.find_nodes(op="placeholder")
        (output,) = graph.find_nodes(op="output")
        self.outputs = dict(zip(pytree.tree_leaves(output.args[0]), into.writes, strict=True))
        self.uses: dict[int, Divided | None] = {}
        self._origin: dict[fx.Node, str] = {}
        for node in graph.nodes:
            self._follow(node)
        self.names = {phase: self._name(phase) for phase in range(max(self.phase.values()) + 1)}

    def _follow(self, node: fx.Node) -> None:
        sources = [one for one in node.all_input_nodes if one.op != "get_attr"]
        shared = [one for one in sources if one in self.divided]
        if shared:
            self._origin[node] = self._origin[shared[0]]
        linear = self._linear(node)
        if linear is not None:
            self.linears[node] = linear
            self._divide(node, linear)
        elif node.op == "output":
            if shared or len(self.outputs) < len(self.into.writes) or any(one in self.inputs for one in self.outputs):
                raise CapslogError(
                    f"what it writes must be whole, and not what it reads, but {[one.name for one in sources]} are not; "
                    "leave the layer whole"
                )
        elif shared and operator_name(node.target) not in _NUMBERS:
            self.divided[node], self.args[node] = self._result(node)
        phases = [self.phase[one] for one in sources]
        odd = node in self.divided
        if phases and operator_name(node.target) not in _NUMBERS:
            phases = [phase + (phase % 2 != odd) for phase in phases]
        self.phase[node] = max(phases, default=0)
        for one in self._changes(node):
            if one.op[:4] != "call" or len(one.users) > 1 or self.phase[one] != self.phase[node] or self.light(one):
                raise CapslogError(
                    f"its operator {operator_name(node.target)!r} ({node.name}) works in place on what other parts may "
                    "read; make it work out of place"
                )

    def _changes(self, node: fx.Node) -> list[fx.Node]:
        held = self.module.get_submodule(str(node.target)) if node.op == "call_module" else None
        if getattr(held, "inplace", False) or node.kwargs.get("inplace", False):
            return node.all_input_nodes
        return mutated_arguments(node)

    def _linear(self, node: fx.Node) -> _Linear | None:
        if node.op == "call_module" and _is_linear(held := self.module.get_submodule(str(node.target))):
            bias = None if held.bias is None else f"{node.target}.bias"
            return _Linear(node.args[0], f"{node.target}.weight", bias, _of_transformers(held))  # type: ignore[arg-type]
        if operator_name(node.target) == "linear":
            x, *tensors = (*node.args, *node.kwargs.values())
            names = [one if one is None else str(one.target) for one in tensors if getattr(one, "op", "get_attr") == "get_attr"]
            if len(names) == len(tensors):
                return _Linear(x, names[0], names[1] if len(names) > 1 else None, False)
        return None

    def _divide(self, node: fx.Node, linear: _Linear) -> None:
        name, last = repr(linear.weight.removesuffix(".weight")), len(self.sizes[node]) - 1
        found = self.divided.get(linear.x)
        if found is None:
            self._origin[node] = name
            self.divided[node] = found = Divided(last, self._blocks(node, self.sizes[node][last]))
        elif found.dim == last:
            self.rows.add(node)
        else:
            raise CapslogError(f"its linear map {name} reads the heads of {self._origin[node]} one by one; leave it whole")
        found.ranges(0, self.into.degree, f"columns of {name}")

    def _blocks(self, node: fx.Node, columns: int) -> tuple[int, ...]:
        """The parts that a linear map's outputs are cut into by what reads them."""
        bounds = {0, columns}
        for user in node.users:
            call = self._call(user, user.args, user.kwargs)
            if call.name in ("split", "split_with_sizes", "chunk") and call.argument(2, "dim", 0) in (-1, len(self.sizes[node]) - 1):
                sizes = [size[-1] for size in self.sizes[user]]
                bounds |= {sum(sizes[:count]) for count in range(len(sizes))}
            elif call.name == "slice" and call.argument(1, "dim", 0) in (-1, len(self.sizes[node]) - 1):
                bounds |= {min(int(at), columns) % (columns + 1) for at in user.args[2:4]}  # type: ignore[arg-type]
        edges = sorted(bounds)
        return tuple(end - first for first, end in zip(edges, edges[1:], strict=False))

    def _call(self, node: fx.Node, args: Any, kwargs: Mapping[str, Any], target: Any = None) -> Call:
        target = target or node.target
        name, exact = operator_name(target), isinstance(target, torch._ops.OpOverload)
        origin = self._origin.get(node, "")
        return Call(node, name, args, kwargs, self.sizes, self.divided, self.into.degree, origin, exact)

    def _result(self, node: fx.Node) -> tuple[Any, Any]:
        if node.op != "call_module":
            return divided_result(self._call(node, node.args, node.kwargs))
        held = self.module.get_submodule(str(node.target))
        found = self.divided.get(node.args[0])
        if isinstance(held, ENTRY_BY_ENTRY):
            return found, node.args
        if isinstance(held, _NORMS) and found.dim < len(self.sizes[node]) - len(held.normalized_shape):
            return found, node.args
        if isinstance(held, ByMode):
            return self._by_mode(node, held)
        if isinstance(held, (Region, *_NORMS)):
            raise CapslogError(
                f"its module {node.target!r} ({type(held).__name__}) works across the shares of {self._origin[node]}; "
                "leave the layer whole"
            )
        raise _Unclear(node)

    def _by_mode(self, node: fx.Node, held: ByMode) -> tuple[Any, Any]:
        leaves = list(held.in_training)
        for slot, one in zip(held.slots, node.args, strict=True):
            leaves[slot] = one
        args, kwargs = pytree.tree_unflatten(leaves, held.spec)
        found, given = divided_result(self._call(node, args, kwargs, held.target))
        new = pytree.tree_leaves((given, kwargs))
        if any(one != other for at, (one, other) in enumerate(zip(new, leaves, strict=True)) if at not in held.slots):
            raise CapslogError(
                f"its operator {operator_name(held.target)!r} ({node.name}) has other sizes in eval mode; leave it whole"
            )
        return found, tuple(new[slot] for slot in held.slots)

    def light(self, node: fx.Node) -> bool:
        """Whether every part that reads a whole value makes it itself: views, and numbers."""
        name = operator_name(node.target)
        if node.op[:6] != "call_f" and node.op[:6] != "call_m" or node.op == "call_module":
            return False
        return name in _NUMBERS or (name in VIEWS and node not in self.divided and node not in self.outputs)

    def _name(self, phase: int) -> str:
        if phase % 2 == 0:
            return f"sum{phase // 2}" if phase else "before"
        held = [self._target(node) for node, one in self.phase.items() if one == phase and node in self.divided]
        name = "attention" if any(operator_name(one) in _OF_ATTENTION for one in held) else "feed_forward"
        return name if phase < 5 else f"{name}{phase // 2 + 1}"

    def _target(self, node: fx.Node) -> Any:
        held = self.module.get_submodule(str(node.target)) if node.op == "call_module" else None
        return held.target if isinstance(held, ByMode) else node.target

    def value(self, node: fx.Node, part: int | None) -> str:
        """The name of a value that passes between parts."""
        if node in self.outputs:
            return self.outputs[node]
        name = self.names[self.phase[node] - (part is not None and node in self.rows)]
        return self.into.value(f"{name}.{node.name}" if part is None else f"{name}.{part}.{node.name}")

    def use(self, target: str, divided: Divided | None) -> torch.Tensor:
        """A tensor of the layer that parts use whole, or by their shares."""
        tensor = operator.attrgetter(target)(self.module)
        if self.uses.setdefault(id(tensor), divided) != divided:
            raise CapslogError(f"it uses {target!r} twice, and shares it out in two ways; leave the layer whole")
        return tensor

    def add(self) -> None:
        """Adds the parts to the splitter."""
        found: list[_Part] = []
        for phase, name in self.names.items():
            numbers = range(self.into.degree) if phase % 2 else [None]
            found += [_Part(self, phase, name, number) for number in numbers]
        wanted = set(self.into.writes).union(*(one.reads for one in found))
        for one in found:
            one.finish(wanted)


class _Part:
    """One layer that a captured layer becomes: the graph of one phase, of one part if values are divided in it.

    Attributes:
        reads: names of the values that it reads, in order.
    """

    def __init__(self, parts: _Parts, phase: int, name: str, part: int | None) -> None:
        self._parts, self._phase, self._part = parts, phase, part
        self._name = name if part is None else f"{name}.{part}"
        self._graph = fx.Graph()
        self._begin = self._graph.call_module("guard")
        self._made: dict[fx.Node, fx.Node] = {}
        self._writes: dict[str, fx.Node] = {}
        self._held: dict[str, Any] = {}
        self.reads: dict[str, fx.Node] = {}
        for node in parts.graph.nodes:
            if node in parts.rows and phase == parts.phase[node] - 1:
                self._writes[parts.value(node, part)] = self._linear(node, None)
            elif parts.phase[node] == phase and node.op[:4] == "call" and not parts.light(node):
                if (node in parts.divided) == (part is not None) and node.target != "guard":
                    self._writes[parts.value(node, part)] = self._made[node] = self._emit(node)

    def finish(self, wanted: set[str]) -> None:
        """Adds it, if it makes values that are wanted."""
        writes = {name: node for name, node in self._writes.items() if name in wanted}
        if not writes:
            return
        guard, names = self._parts.guard, self._parts.into.reads
        guarded = [at for at, name in enumerate(names) if name in self.reads]
        self._begin.args = tuple(self.reads[names[at]] for at in guarded)
        given = ([of[at] for at in guarded] for of in (guard.names, guard.shapes, guard.dtypes))
        own_names, shapes, dtypes = given
        self._held["guard"] = Guard(guard.layer, own_names, shapes, guard.train_only, guard.conditions, dtypes)
        results = tuple(writes.values())
        self._graph.output(results[0] if len(results) == 1 else results)
        module = layer_module(self._graph, self._held, self._parts.module, ())
        module.meta.update(self._parts.module.meta)
        self._parts.into.add(self._name, module, list(self.reads), list(writes))

    def _get(self, node: fx.Node) -> fx.Node:
        """The value in this part's graph."""
        parts = self._parts
        if node in self._made:
            return self._made[node]
        if node.op == "placeholder":
            made = self._read(parts.into.reads[parts.inputs.index(node)])
        elif node.op == "get_attr":
            made = self._hold(str(node.target), None)
        elif parts.light(node):
            made = self._emit(node)
        elif node in parts.divided and self._part is None:
            raise CapslogError(f"it reads {node.name!r}, which is shared out, as a whole; leave the layer whole")
        else:
            made = self._read(parts.value(node, self._part if node in parts.divided else None))
        return self._made.setdefault(node, made)

    def _read(self, name: str) -> fx.Node:
        if name not in self.reads:
            with self._graph.inserting_before(self._begin):
                self.reads[name] = self._graph.placeholder(f"value_{len(self.reads)}")
        return self.reads[name]

    def _hold(self, target: str, divided: Divided | None) -> fx.Node:
        """A tensor of the layer, or this part's share of it."""
        tensor, into = self._parts.use(target, divided), self._parts.into
        if divided is not None:
            assert self._part is not None
            cut = into.cut if isinstance(tensor, nn.Parameter) else into.cut_buffer
            tensor = cut(tensor, divided.dim, divided.ranges(self._part, into.degree))
        elif not isinstance(tensor, nn.Parameter):
            tensor = into.cut_buffer(tensor, 0, ())
        self._held[target] = tensor
        return self._graph.create_node("get_attr", target)

    def _emit(self, node: fx.Node) -> fx.Node:
        parts = self._parts
        if node in parts.linears:
            return self._sum(node) if node in parts.rows else self._linear(node, parts.linears[node].bias)
        if node.op == "call_module":
            held = parts.module.get_submodule(str(node.target))
            for name, _ in held.named_parameters():
                parts.use(f"{node.target}.{name}", None)
            self._held[str(node.target)] = parts.into.sharing(held)
        args, kwargs = fx.node.map_aggregate((parts.args.get(node, node.args), node.kwargs), self._argument)  # type: ignore[misc]
        return self._graph.create_node(node.op, node.target, args, kwargs, node.name)

    def _argument(self, value: Any) -> Any:
        if isinstance(value, fx.Node):
            return self._get(value)
        if not isinstance(value, Share):
            return value
        if value.node.op == "get_attr":
            return self._hold(str(value.node.target), value.divided)
        assert self._part is not None
        whole, dim = self._get(value.node), value.divided.dim
        ranges = value.divided.ranges(self._part, self._parts.into.degree)
        found = [self._graph.call_function(_ATEN.slice.Tensor, (whole, dim, *one)) for one in ranges]
        return found[0] if len(found) == 1 else self._graph.call_function(_ATEN.cat.default, (found, dim))

    def _linear(self, node: fx.Node, bias: str | None) -> fx.Node:
        """A part's share of a linear map: of its outputs, or of its inputs and then without the bias."""
        linear = self._parts.linears[node]
        across = node in self._parts.rows
        blocks = self._parts.divided[linear.x if across else node].blocks
        weight = self._hold(linear.weight, Divided(int(across != linear.into_columns), blocks))
        if linear.into_columns:
            weight = self._graph.call_function(_ATEN.t.default, (weight,))
        added = () if bias is None else (self._hold(bias, Divided(0, blocks)),)
        return self._graph.call_function(_ATEN.linear.default, (self._get(linear.x), weight, *added))

    def _sum(self, node: fx.Node) -> fx.Node:
        """What the parts of a linear map give, first part first, and its bias."""
        parts = self._parts
        total, *others = (self._read(parts.value(node, part)) for part in range(parts.into.degree))
        bias = parts.linears[node].bias
        for one in (*others, *([] if bias is None else [self._hold(bias, None)])):
            total = self._graph.call_function(_ATEN.add.Tensor, (total, one))
        return total
