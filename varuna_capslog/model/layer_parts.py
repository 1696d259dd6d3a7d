"""Finds the parts of a captured layer by what its operations do: attention, feed-forward, norms, experts.

A memory interval may name parts (`plans.parts.LAYER_PARTS`) that the engine runs again in the backward. The graph of
the layer runs once without values, and each node is classified by the operators that it runs, never by names of
modules. A module that holds a part beside other operations is first replaced by the operations of its code.
docs/plans.md defines the parts.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.model.capture.python_calls import PythonCall
from varuna_capslog.model.capture.runtime import CapturedGraph, Guard, Region
from varuna_capslog.model.layer import Layer
from varuna_capslog.model.splitting.captured import open_module, some_shapes

__all__ = ["LayerPart", "parts_of_layer"]

_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "_grouped_mm", "grouped_mm_fallback", "convolution"}
_FUSED = "_scaled_dot_product"
"""Prefix of the names of fused attention operators."""
_NORMS = {"native_layer_norm", "native_group_norm", "_fused_rms_norm"}
_MEANS = {"mean", "var", "var_mean", "std", "linalg_vector_norm"}
_ROOTS = {"rsqrt", "sqrt", "std", "linalg_vector_norm"}
_SOFTMAX = {"_softmax", "_safe_softmax"}
_PLAIN = {"_to_copy", "clone", "empty_like", "detach", "_unsafe_view", "split", "split_with_sizes", "cat", "glu"}
"""Operators that count as plain (`_Work.plain`), as do pointwise operators and views."""


@dataclass(frozen=True)
class LayerPart:
    """Operations of a layer that are recomputed together. part: name of the part. target: name of the module that
    replaces the operations in the layer's graph. body: this module. draws: True if it draws random numbers.
    """

    part: str
    target: str
    body: fx.GraphModule
    draws: bool


def parts_of_layer(layer: Layer, parts: Sequence[str]) -> tuple[fx.GraphModule, list[LayerPart]]:
    """Return a module that computes the same as the layer's, on the same parameters, in which each run of operations of
    the `parts` is a module; and the list of these modules.

    Raises CapslogError if the layer is no captured graph or has no such part, or operations are no single run.
    """
    instead = 'recompute whole layers there ([first, end, "recompute"])'
    where, module = f"layer {layer.name!r}", layer.module
    if not isinstance(module, CapturedGraph):
        raise CapslogError(
            f"{where} is a {type(module).__name__}, and only a captured layer shows its parts; {instead}"
        )
    if hasattr(module, "graphs"):
        raise CapslogError(f"{where} has a graph for each of several sizes of the inputs; {instead}, or give one size")
    with _disable_current_modes():
        structure = _Structure(where, module, instead)
        chosen: list[tuple[str, list[fx.Node]]] = []
        for part in parts:
            runs = structure.runs(part)
            if not runs:
                advice = f"take {part!r} out for this layer, or {instead}"
                raise CapslogError(f"{where} {structure.lacks(part)}; {advice}")
            chosen += [(part, run) for run in runs]
        return structure.divided(chosen)


_LACKS = {
    "attention": "no softmax stands between two products of activations",
    "mlp": "no two linear maps stand behind each other with an activation between them",
    "norms": "it calls no layer norm, RMS norm or group norm",
    "experts": "it has no product with weights that have a dimension of experts",
}


# -- what each node of a layer does


@dataclass
class _Work:
    """Operators that a node has run. names: their names; calls: their names with overloads, in order.

    weights: number of products with a parameter; dimensions: the most dimensions of such a parameter, except in
        convolutions. activations: number of products without a parameter.
    draws: True for random numbers. changes: nodes that made the tensors, present before, that this node writes into.
    plain: True if all are pointwise, views, copies or random. active: one is pointwise, but no copy, sum or product.
    """

    names: set[str] = field(default_factory=set)
    calls: list[str] = field(default_factory=list)
    weights: int = 0
    dimensions: int = 0
    activations: int = 0
    draws: bool = False
    changes: set[fx.Node] = field(default_factory=set)
    plain: bool = True
    active: bool = False

    @property
    def softmax(self) -> bool:
        return not _SOFTMAX.isdisjoint(self.names) or self.fused

    @property
    def attends(self) -> bool:
        """True where a softmax stands between products of activations, as in a fused attention."""
        return self.fused or (self.softmax and self.activations >= 2)

    @property
    def fused(self) -> bool:
        return any(name.startswith(_FUSED) for name in self.names)

    @property
    def normalises(self) -> bool:
        return not _NORMS.isdisjoint(self.names) or not (_MEANS.isdisjoint(self.names) or _ROOTS.isdisjoint(self.names))

    @property
    def is_norm(self) -> bool:
        return self.normalises and not (self.weights or self.activations or self.softmax)

    @property
    def has_experts(self) -> bool:
        return self.dimensions > 2

    @property
    def is_linear(self) -> bool:
        return self.weights == 1 and not (self.activations or self.softmax or self.normalises or self.has_experts)

    @property
    def is_mlp(self) -> bool:
        """True for a node that is a whole feed-forward."""
        has_no_other_part = not (self.activations or self.softmax or self.normalises or self.has_experts)
        return self.weights >= 2 and self.active and has_no_other_part and "convolution" not in self.names

    @property
    def whole(self) -> bool:
        """True for a node that holds no part beside other operations."""
        nothing = not (self.weights or self.activations or self.softmax or self.normalises)
        return nothing or self.is_norm or self.is_linear or self.is_mlp


class _Watched(TorchDispatchMode):
    """Mode that records operators in `work`. weights: address of each parameter's storage -> number of the parameter's
    dimensions. makers: address of a storage -> the node that made it.
    """

    def __init__(self, weights: Mapping[int, int], makers: Mapping[int, fx.Node]) -> None:
        super().__init__()
        self._weights, self._makers = weights, makers
        self.work = _Work()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace == "prim":  # a query, such as for a tensor's device
            return result
        name, work = func.overloadpacket.__name__, self.work
        work.names.add(name)
        work.calls.append(str(func))
        tensors = _tensors(args)
        if name in _PRODUCTS:
            known = [self._weights[key] for tensor in tensors if (key := _address(tensor)) in self._weights]
            large = [dimensions for dimensions in known if dimensions > 1]  # a bias is no factor
            work.weights += bool(large)
            work.activations += not large
            work.dimensions = max([work.dimensions, *(large if name != "convolution" else ())])
        # a fused attention on the CPU has no dropout; with dropout, its steps run as separate operators
        random = torch.Tag.nondeterministic_seeded in func.tags and not name.startswith(_FUSED)
        work.draws |= random
        if func._schema.is_mutable and tensors and (maker := self._makers.get(_address(tensors[0]))) is not None:
            work.changes.add(maker)
        views = any(argument.alias_info is not None for argument in func._schema.arguments)
        pointwise = torch.Tag.pointwise in func.tags
        work.plain &= pointwise or views or random or name in _PLAIN
        work.active |= pointwise and name not in (*_PLAIN, "add", "add_", "mul", "mul_", "div_")
        return result


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


class _Run(fx.Interpreter):
    """Runs a graph on tensors without values and keeps all values. works: operators of each node. made_by: the nodes
    that made the storages of each node's values.
    """

    def __init__(self, module: fx.GraphModule, graph: fx.Graph) -> None:
        super().__init__(module, garbage_collect_values=False, graph=graph)
        self._makers: dict[int, fx.Node] = {}
        weights = {_address(tensor): tensor.dim() for tensor in module.parameters()}
        self._watched = _Watched(weights, self._makers)
        self.works: dict[fx.Node, _Work] = {}
        self.made_by: dict[fx.Node, set[fx.Node]] = {}

    def run_node(self, n: fx.Node) -> Any:
        self._watched.work = self.works[n] = _Work()
        with self._watched:
            output = super().run_node(n)
        self.made_by[n] = {self._makers.setdefault(_address(tensor), n) for tensor in _tensors(output)}
        return output


def _bare(tensor: Tensor) -> Tensor:
    """Return a tensor of the same shape, strides and kind (parameter or not); in a FakeTensorMode without values."""
    bare = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    return nn.Parameter(bare, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else bare


class _Structure:
    """Graph of a layer; modules that hold a part beside other operations are opened: replaced by their operations."""

    def __init__(self, where: str, module: CapturedGraph, instead: str) -> None:
        self._where, self._module, self._instead = where, module, instead
        self._graph = copy.deepcopy(module.graph)
        self._run()
        self._closed: dict[str, str] = {}
        while (node := next(filter(self._must_open, self._graph.nodes), None)) is not None:
            self._open(node)
        self._claimed: set[fx.Node] = set()

    def _run(self) -> None:
        with FakeTensorMode():
            self._run_hollow()

    def _run_hollow(self) -> None:
        tensors = [*self._module.parameters(), *self._module.buffers()]
        memo: dict[int, Any] = {id(tensor): _bare(tensor) for tensor in tensors}
        guard = self._module.get_submodule("guard")
        assert isinstance(guard, Guard)
        inputs = [
            torch.empty(shape, dtype=dtype) for shape, dtype in zip(some_shapes(guard), guard.dtypes, strict=True)
        ]
        inputs = [tensor.requires_grad_(tensor.is_floating_point()) for tensor in inputs]
        copied = copy.deepcopy(self._module, memo).train()
        run = _Run(copied, self._graph)
        try:
            run.run(*inputs)
        except Exception as error:
            raise CapslogError(
                f"{self._where} does not run without values ({_line(error)}), so that its parts are not known; "
                f"{self._instead}"
            ) from error
        self._works, self._made_by = run.works, run.made_by

    def _must_open(self, node: fx.Node) -> bool:
        return node.op == "call_module" and node.name not in self._closed and not self._works[node].whole

    def _open(self, node: fx.Node) -> None:
        """Replace the call of a module by its operations, if they certainly do the same; else note why in `_closed`."""
        held = self._module.get_submodule(str(node.target))
        hooks = held._forward_hooks or held._forward_pre_hooks or held._backward_hooks or held._backward_pre_hooks
        if isinstance(held, (PythonCall, Region)) or not any(held.children()) or hooks:
            self._closed[node.name] = "it is called as a whole"
            return
        before, known, name, calls = (
            copy.deepcopy(self._graph),
            {*self._graph.nodes},
            node.name,
            self._works[node].calls,
        )
        try:
            open_module(self._graph, self._module, node, by_one=True)
        except CapslogError as error:
            self._closed[name] = _line(error.__cause__ or error).partition(". ")[0]
            return
        self._run()
        if calls != [call for made in self._graph.nodes if made not in known for call in self._works[made].calls]:
            # such as x += 1, which a trace takes for x = x + 1
            self._closed[name], self._graph = "a trace of its code runs other operators", before
            self._run()

    # -- the operations of each part

    def runs(self, part: str) -> list[list[fx.Node]]:
        """Return the runs of operations of a part, except operations that earlier calls returned for other parts."""
        find: Callable[[], Iterable[set[fx.Node]]] = getattr(self, f"_{part}")
        runs = [run for run in find() if self._claimed.isdisjoint(run)]
        # the norms of a closed module cannot be recomputed alone, nor can an attention beside them
        for node in self._graph.nodes if part in ("norms", "attention") else ():
            hides = node.name in self._closed and self._works[node].normalises and node not in self._claimed
            if hides and (part == "norms" or self._works[node].attends):
                raise CapslogError(
                    f"{self._where} has its {part} beside other work in {self._described(node)}; {self._instead}"
                )
        for run in runs:
            self._claimed |= run
        return [[node for node in self._graph.nodes if node in run] for run in runs]

    def lacks(self, part: str) -> str:
        """Return the end of a sentence: the layer has no such part, or where the part may be."""
        closed = [node for node in self._graph.nodes if node.name in self._closed]
        if not closed:
            return f"has no {part}: {_LACKS[part]}"
        largest = max(closed, key=lambda node: len(self._works[node].calls))
        return f"shows no {part} outside {self._described(largest)}"

    def _described(self, node: fx.Node) -> str:
        """Return the name of a closed module, with the reason."""
        kind = type(self._module.get_submodule(str(node.target))).__name__
        return f"module {node.target!r} ({kind}), which cannot be divided ({self._closed[node.name]})"

    def _norms(self) -> Iterable[set[fx.Node]]:
        for node in self._graph.nodes:
            held = self._module.get_submodule(str(node.target)) if node.op == "call_module" else nn.Identity()
            if self._works[node].is_norm and not _counts(held):
                yield {node}

    def _attention(self) -> Iterable[set[fx.Node]]:
        visited: set[fx.Node] = set()
        for node, work in self._works.items():
            if work.attends:
                yield {node}
            elif work.softmax and node not in visited:
                before = self._nearest([node], lambda node: node.all_input_nodes)
                behind = self._nearest([node], lambda node: node.users)
                if before and behind:
                    core = self._between(before, behind)
                    visited |= core
                    yield core

    def _nearest(self, start: Sequence[fx.Node], following: Callable[[fx.Node], Iterable[fx.Node]]) -> set[fx.Node]:
        """Return the first products of activations on all paths from `start` that pass no other product and no norm."""
        reached, waiting, products = set(start), list(start), set()
        while waiting:
            for node in following(waiting.pop()):
                work = self._works.get(node, _Work())
                if node in reached or node.op in ("placeholder", "get_attr", "output"):
                    continue
                reached.add(node)
                if work.activations and not work.weights:
                    products.add(node)
                elif not (work.weights or work.normalises):
                    waiting.append(node)
        return products

    def _between(self, first: set[fx.Node], last: set[fx.Node]) -> set[fx.Node]:
        """Return the nodes on all paths from nodes of `first` to nodes of `last`, both ends included."""
        behind, before = set(first), set(last)
        for node in self._graph.nodes:
            if not behind.isdisjoint(node.all_input_nodes):
                behind.add(node)
        for node in reversed(self._graph.nodes):
            if not before.isdisjoint(node.users):
                before.add(node)
        return behind & before

    def _mlp(self) -> Iterable[set[fx.Node]]:
        linear = {node for node, work in self._works.items() if work.is_linear and "convolution" not in work.names}
        joined: list[set[fx.Node]] = []
        for node in self._graph.nodes:
            if self._works[node].is_mlp:
                yield {node}
            elif node in linear and (run := self._feeding(node, linear)):
                overlapping = [other for other in joined if not other.isdisjoint(run)]
                joined = [other for other in joined if other.isdisjoint(run)] + [run.union(*overlapping)]
        yield from joined

    def _feeding(self, last: fx.Node, linear: Collection[fx.Node]) -> set[fx.Node]:
        """Return `last`, the linear maps that feed it through an activation, and the nodes between them; an empty set
        if anything else feeds it.
        """
        run, waiting, active = {last}, [last], False
        while waiting:
            for node in waiting.pop().all_input_nodes:
                if node.op == "get_attr" or node in run:
                    continue
                work = self._works[node]
                if node.op == "placeholder" or not (node in linear or (work.plain and not work.changes)):
                    return set()
                run.add(node)
                active |= work.active
                if node not in linear:
                    waiting.append(node)
        return run if active and len(run & set(linear)) > 1 else set()

    def _experts(self) -> Iterable[set[fx.Node]]:
        holders = {node for node, work in self._works.items() if work.has_experts}
        if holders:
            yield self._between(holders, holders)

    # -- the layer with modules in the place of the parts

    def divided(self, chosen: Sequence[tuple[str, Sequence[fx.Node]]]) -> tuple[fx.GraphModule, list[LayerPart]]:
        """Return the module with these runs as modules, and the list of parts."""
        parts, held = [], dict[str, Any]()
        for number, (part, run) in enumerate(chosen):
            draws = any(self._works[node].draws for node in run)
            self._gather(part, run)
            target, body = f"{part}_{number}", self._put(f"{part}_{number}", run)
            parts.append(LayerPart(part, target, body, draws))
            held[target] = body
        for node in self._graph.nodes:
            if node.op in ("call_module", "get_attr") and str(node.target) not in held:
                held[str(node.target)] = operator.attrgetter(str(node.target))(self._module)
        return fx.GraphModule(held, self._graph, class_name="PartedLayer"), parts

    def _gather(self, part: str, run: Sequence[fx.Node]) -> None:
        """Make the nodes of a run consecutive; keep the order of nodes that draw random numbers or change tensors."""
        for node in run:
            held = self._module.get_submodule(str(node.target)) if node.op == "call_module" else None
            if isinstance(held, PythonCall):
                why = "may do something else when it runs again, such as draw other random numbers of Python"
                raise self._no_run(part, f"{held.describe()} is called as Python code, which {why}")
            if held is not None and _counts(held):
                raise self._no_run(part, f"{node.target!r} keeps running statistics, which would count twice")
        inside, nodes = set(run), list(self._graph.nodes)
        span = nodes[nodes.index(run[0]) : nodes.index(run[-1]) + 1]
        behind: set[fx.Node] = set()
        for node in span:
            work = self._works.get(node, _Work())
            depends = not (inside | behind).isdisjoint(node.all_input_nodes)
            if node in inside:
                if not work.changes <= inside or not behind.isdisjoint(node.all_input_nodes):
                    why = "changes what enters" if work.changes else "reads what operations outside make of the part"
                    raise self._no_run(part, f"{node.name!r} {why}")
            elif work.draws or work.changes or node.op == "output":
                why = "draws random numbers" if work.draws else "changes what it reads"
                raise self._no_run(part, f"{node.name!r}, between them, {why}")
            elif depends:
                behind.add(node)
            elif node is not span[0]:
                run[0].prepend(node)
        for node in reversed([node for node in span if node in behind]):
            run[-1].append(node)
        entering = {source for node in run for source in node.all_input_nodes if source not in inside}
        made = set().union(*(self._made_by.get(source, set()) for source in entering))
        for node in nodes[nodes.index(run[-1]) + 1 :]:
            if not made.isdisjoint(self._works.get(node, _Work()).changes):
                raise self._no_run(part, f"{node.name!r} changes, behind them, what enters them")

    def _no_run(self, part: str, why: str) -> CapslogError:
        return CapslogError(
            f"the {part} of {self._where} is no single run of operations ({why}); take {part!r} out for this layer, or "
            f"{self._instead}"
        )

    def _put(self, target: str, run: Sequence[fx.Node]) -> fx.GraphModule:
        """Replace a run of nodes by the call of a module, and return the module."""
        inside, body = set(run), fx.Graph()
        sources = dict.fromkeys(
            source
            for node in run
            for source in node.all_input_nodes
            if source not in inside and source.op != "get_attr"
        )
        made = {source: body.placeholder(f"value_{number}") for number, source in enumerate(sources)}
        for node in run:
            for source in node.all_input_nodes:
                if source.op == "get_attr" and source not in made:
                    made[source] = body.create_node("get_attr", source.target)
            made[node] = body.node_copy(node, made.__getitem__)
        leaving = [node for node in run if not inside.issuperset(node.users)]
        body.output(tuple(made[node] for node in leaving))
        targets = {str(node.target) for node in body.nodes if node.op in ("call_module", "get_attr")}
        held = {name: operator.attrgetter(name)(self._module) for name in targets}
        with self._graph.inserting_before(run[0]):
            call = self._graph.call_module(target, tuple(sources))
            self._works[call] = _Work()
            for place, node in enumerate(leaving):
                output = self._graph.call_function(operator.getitem, (call, place))
                self._works[output] = _Work()
                node.replace_all_uses_with(output, delete_user_cb=lambda user: user not in inside)
        for node in reversed(run):
            self._graph.erase_node(node)
        return fx.GraphModule(held, body, class_name=f"Part_{target}")


def _counts(module: nn.Module) -> bool:
    """True where a module keeps running statistics."""
    return any(getattr(part, "track_running_stats", False) for part in module.modules())


def _line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
