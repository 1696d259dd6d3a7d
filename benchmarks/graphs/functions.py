"""Makes plain functions of a layer: its forward and its backward as lists of operators, without autograd.

A layer is traced once for given shapes by torch's ahead-of-time tracing, without decompositions, so that it calls the
same kernels in the same order as autograd does. The traced graph is pruned of operators that only look at a tensor in
another way, and split into forward and backward; what the backward reads of the forward are the saved tensors.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx

aten = torch.ops.aten
SAME = (aten.alias.default, aten.detach.default)
"""Operators that return the same tensor; autograd needs them, functions without it do not."""
VIEWS = (
    *SAME,
    aten.t.default,
    aten.view.default,
    aten.transpose.int,
    aten.permute.default,
    aten.expand.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.select.int,
    aten.slice.Tensor,
)
"""Operators that compute nothing: they return another view of their first argument."""

Saved = list[Tensor]
Emit = Callable[["Part", int], Callable[..., Any]]
"""Makes a part a function. Its first argument is a list with so many of the part's arguments, which it empties."""


@dataclass
class Part:
    """Nodes of one function. reads: its tensor arguments. constants: arguments that stay the same. returns: results."""

    nodes: list[fx.Node]
    reads: list[fx.Node]
    constants: dict[fx.Node, Tensor]
    returns: list[Any]

    def graph(self) -> fx.GraphModule:
        """Return the part as a graph of its own, whose arguments are `reads` and then `constants`."""
        graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
        for node in (*self.reads, *self.constants):
            copies[node] = graph.placeholder(node.name)
        for node in self.nodes:
            copies[node] = graph.node_copy(node, copies.__getitem__)
        graph.output([copies[node] if isinstance(node, fx.Node) else None for node in self.returns])
        return fx.GraphModule(nn.Module(), graph)


@dataclass
class LayerFunctions:
    """Forward and backward of a layer for one size of its inputs.

    forward: inputs -> (outputs, saved tensors). backward: saved tensors, gradients of the outputs, and the sums of the
    parameters' gradients, if there are some -> gradients of the parameters (or nothing, where they were added to the
    sums), then of the inputs that want one. calls: operators of both.
    """

    parameters: list[nn.Parameter]
    wanted: list[bool]
    strides: list[tuple[int, ...]]
    forward: Callable[[Sequence[Tensor]], tuple[list[Tensor], Saved]]
    backward: Callable[[Saved, Sequence[Tensor]], list[Tensor | None]]
    calls: int


def joint_graph(module: nn.Module, inputs: Sequence[Tensor], wanted: Sequence[bool]) -> tuple[fx.Graph, int]:
    """Trace forward and backward of a module together, on fake tensors of the sizes of `inputs`.

    The arguments are all parameters, the inputs, and the gradients of the outputs that have one; the results are the
    outputs and the gradients of parameters and wanted inputs. Also returns the number of outputs.
    """
    names = [name for name, _ in module.named_parameters()]
    parameters = list(module.parameters())
    leaves = [tensor.detach().requires_grad_(want) for tensor, want in zip(inputs, wanted, strict=True)]
    outputs = as_tuple(functional_call(module, dict(zip(names, parameters, strict=True)), tuple(leaves)))
    gradients = [torch.zeros_like(output) for output in outputs if output.requires_grad]

    def joint(parameters: Sequence[Tensor], inputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> list[Any]:
        outputs = as_tuple(functional_call(module, dict(zip(names, parameters, strict=True)), tuple(inputs)))
        sources = [tensor for tensor in (*parameters, *inputs) if tensor.requires_grad]
        ends = [output for output in outputs if output.requires_grad]
        return [*outputs, *torch.autograd.grad(ends, sources, gradients, allow_unused=True)]

    traced = make_fx(joint, tracing_mode="fake", _allow_non_fake_inputs=True)(parameters, leaves, gradients)
    traced.graph.set_codegen(fx.graph.CodeGen())
    return traced.graph, len(outputs)


def as_tuple(written: Tensor | Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return what a module wrote as a tuple."""
    return (written,) if isinstance(written, Tensor) else tuple(written)


def prune(graph: fx.Graph) -> None:
    """Leave out operators that return the same tensor, views of views, and transposes of transposes."""
    for node in graph.nodes:
        if node.target in SAME:
            node.replace_all_uses_with(node.args[0])
        elif node.target is aten.t.default and node.args[0].target is aten.t.default:
            node.replace_all_uses_with(node.args[0].args[0])
        elif node.target is aten.view.default:
            _shorten(node)
    graph.eliminate_dead_code(is_impure_node=_changes_arguments)


def _shorten(view: fx.Node) -> None:
    """Let a view look at the tensor behind other views of contiguous memory; leave it out where it changes nothing."""
    source = view.args[0]
    while source.target in (aten.view.default, aten._unsafe_view.default) and _contiguous(source.args[0]):
        source = source.args[0]
    if source.meta["val"].shape == view.meta["val"].shape and source.meta["val"].stride() == view.meta["val"].stride():
        view.replace_all_uses_with(source)
    else:
        view.args = (source, view.args[1])


def _contiguous(node: fx.Node) -> bool:
    return bool(node.meta["val"].is_contiguous())


def _changes_arguments(node: fx.Node) -> bool:
    return node.op in ("placeholder", "output") or bool(
        isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable
    )


def split(
    graph: fx.Graph, parameters: Sequence[Tensor], num_inputs: int, num_outputs: int, early: bool
) -> tuple[Part, Part, list[fx.Node]]:
    """Split a joint graph into forward and backward; also return the saved tensors.

    early: views of parameters are made once, here, and views of saved tensors in the backward instead of the forward.
    """
    nodes = list(graph.nodes)
    arguments = [node for node in nodes if node.op == "placeholder"]
    of_parameters, inputs = arguments[: len(parameters)], arguments[len(parameters) :][:num_inputs]
    of_gradients = arguments[len(parameters) + num_inputs :]
    results = nodes[-1].args[0]
    calls = [node for node in nodes if node.op == "call_function"]
    behind = _behind(calls, of_gradients)
    constants = {node: tensor.detach() for node, tensor in zip(of_parameters, parameters, strict=True)}
    if early:
        for node in calls:
            if node.target in VIEWS and all(source in constants for source in node.all_input_nodes):
                constants[node] = node.target(*fx.map_arg(node.args, constants.__getitem__), **node.kwargs)
    first = [node for node in calls if node not in behind and node not in constants]
    if early:
        needed = _before(results[:num_outputs])
        needed |= _before([node for node in first if node.target not in VIEWS])
        first = [node for node in first if node in needed]
    done = {*first, *constants}
    second = [node for node in calls if node not in done]
    there = {*second, *constants, *of_gradients}
    saved = list(dict.fromkeys(node for call in second for node in call.all_input_nodes if node not in there))
    forward = Part(first, inputs, _used(constants, first), [*results[:num_outputs], *saved])
    backward = Part(second, [*saved, *of_gradients], _used(constants, second), results[num_outputs:])
    return forward, backward, saved


def _behind(calls: Iterable[fx.Node], sources: Iterable[fx.Node]) -> set[fx.Node]:
    reached = set(sources)
    for node in calls:
        if not reached.isdisjoint(node.all_input_nodes):
            reached.add(node)
    return reached


def _before(ends: Iterable[Any]) -> set[fx.Node]:
    reached, stack = set[fx.Node](), [node for node in ends if isinstance(node, fx.Node)]
    while stack:
        node = stack.pop()
        if node not in reached:
            reached.add(node)
            stack += node.all_input_nodes
    return reached


def _used(constants: Mapping[fx.Node, Tensor], calls: Collection[fx.Node]) -> dict[fx.Node, Tensor]:
    readers = set(calls)
    return {node: tensor for node, tensor in constants.items() if not readers.isdisjoint(node.users)}


def with_sums(part: Part, parameters: Sequence[Tensor]) -> tuple[Part, Part]:
    """Return the backward of the first microbatch, and that of later ones, which adds to the sums of gradients.

    The first returns gradients that nothing else holds, in the layout of their parameters, as autograd keeps them.
    """
    count = len(parameters)
    graph = part.nodes[0].graph
    roots = [_root(node, part) for node in part.returns]
    first, later, sums = list(part.nodes), list(part.nodes), []
    returned: list[Any] = []
    for node, root, parameter in zip(part.returns[:count], roots, parameters, strict=False):
        owned = root is not None and roots.count(root) == 1
        if node is not None and not (owned and node.meta["val"].stride() == parameter.stride()):
            with graph.inserting_after(node):
                copy = graph.call_function(aten.new_empty_strided.default, (node, parameter.shape, parameter.stride()))
            with graph.inserting_after(copy):
                filled = graph.call_function(aten.copy_.default, (copy, node))
            _insert_after(first, node, [copy, filled])
            returned.append(filled)
        else:
            returned.append(node)
        if node is not None:
            total = graph.placeholder(f"sum_of_{len(sums)}_{node.name}")
            with graph.inserting_after(node):
                added = graph.call_function(aten.add_.Tensor, (total, node))
            _insert_after(later, node, [added])
            sums.append(total)
    return (
        Part(first, part.reads, part.constants, [*returned, *part.returns[count:]]),
        Part(later, [*part.reads, *sums], part.constants, part.returns[count:]),
    )


def _insert_after(nodes: list[fx.Node], place: fx.Node, more: list[fx.Node]) -> None:
    position = nodes.index(place) + 1 if place in nodes else 0
    nodes[position:position] = more


def _root(node: Any, part: Part) -> fx.Node | None:
    """Return the call whose memory a result of the part looks at; None for the memory of an argument."""
    while node in part.nodes and node.target in (*VIEWS, aten._unsafe_view.default):
        node = node.args[0]
    return node if node in part.nodes else None


def python_code(part: Part, taken: int) -> Callable[..., Any]:
    """Return the part as Python code that calls operators."""
    code = part.graph().code.split("\n")
    head = next(number for number, line in enumerate(code) if line.startswith("def forward"))
    names = [node.name for node in (*part.reads, *part.constants)]
    lines = ["def part(saved, " + ", ".join(names[taken:]) + "):"]
    lines += [f"    {name} = saved.pop()" for name in reversed(names[:taken])]
    scope: dict[str, Any] = {"torch": torch, "device": torch.device, "inf": float("inf")}
    exec("\n".join(lines + code[head + 1 :]), scope)
    function: Callable[..., Any] = scope["part"]
    constants = list(part.constants.values())
    return lambda saved, *tensors: function(saved, *tensors, *constants)


def compiled(part: Part, taken: int, cpp_wrapper: bool = False) -> Callable[..., Any]:
    """Return the part compiled by torch.compile; its kernels are other ones, so that bits differ."""
    function = torch.compile(part.graph(), fullgraph=True, options={"cpp_wrapper": cpp_wrapper})
    constants = list(part.constants.values())

    def call(saved: Saved, *tensors: Tensor) -> Any:
        results = function(*saved, *tensors, *constants)
        saved.clear()
        return results

    return call


def interpreted(part: Part, taken: int) -> Callable[..., Any]:
    """Return the part as a program of torch's interpreter in C++, with the same operators.

    It pops the first arguments from a list, so that each is freed after its last use. The interpreter's optimizations
    are off, since they replace operators by others with other bits.
    """
    names = [f"{node.name}_" for node in (*part.reads[taken:], *part.constants)]
    lines = [f"{node.name}_ = saved.pop()" for node in reversed(part.reads[:taken])]
    for node in part.nodes:
        if node.target is operator.getitem:
            lines.append(f"{node.name}_ = {node.args[0].name}_[{node.args[1]}]")
            continue
        named = [f"{key}={_literal(argument)}" for key, argument in node.kwargs.items()]
        arguments = ", ".join([_literal(argument) for argument in node.args] + named)
        lines.append(f"{node.name}_ = torch.ops.aten.{node.target._schema.name.split('::')[1]}({arguments})")
    lines.append(f"return [{', '.join(_literal(node) for node in part.returns if node is not None)}]")
    head = f"def part({', '.join(['saved: List[Tensor]', *(f'{name}: Tensor' for name in names)])}) -> List[Tensor]:"
    torch._C._set_graph_executor_optimize(False)
    program = torch.jit.CompilationUnit("\n    ".join([head, *lines]) + "\n").part
    constants = list(part.constants.values())
    missing = [number for number, node in enumerate(part.returns) if node is None]

    def call(saved: Any, *tensors: Tensor) -> list[Tensor | None]:
        results: list[Tensor | None] = program(saved, *tensors, *constants)
        for number in missing:
            results.insert(number, None)
        return results

    return call


def _literal(argument: Any) -> str:
    if isinstance(argument, fx.Node):
        return f"{argument.name}_"
    if isinstance(argument, (list, tuple)):
        return f"[{', '.join(_literal(element) for element in argument)}]"
    if isinstance(argument, torch.device):
        return f'torch.device("{argument}")'
    if isinstance(argument, float) and not -float("inf") < argument < float("inf"):
        return f'float("{argument}")'
    return str(argument) if isinstance(argument, (torch.dtype, torch.memory_format, torch.layout)) else repr(argument)


def layer_functions(
    module: nn.Module, inputs: Sequence[Tensor], wanted: Sequence[bool], pruned: bool, emit: Emit
) -> LayerFunctions:
    """Make the functions of a module for inputs of these sizes.

    Args:
        wanted: which of the inputs want a gradient.
        pruned: without operators that compute nothing. emit: what runs the functions.
    """
    graph, num_outputs = joint_graph(module, inputs, wanted)
    if pruned:
        prune(graph)
    parameters = list(module.parameters())
    forward, backward, saved = split(graph, parameters, len(inputs), num_outputs, pruned)
    calls = sum(node.target is not operator.getitem for part in (forward, backward) for node in part.nodes)
    strides = [node.meta["val"].stride() for node in backward.reads[len(saved) :]]
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    taken = len(backward.reads)
    run_forward = emit(forward, 0)
    run_first, run_later = (emit(part, taken) for part in with_sums(backward, trained))
    as_list: Callable[[list[Tensor]], Any] = torch._C.ScriptList if emit is interpreted else list
    nothing = as_list([torch.empty(0)])
    nothing.clear()

    def first(tensors: Sequence[Tensor]) -> tuple[list[Tensor], Saved]:
        results = run_forward(nothing, *tensors)
        return results[:num_outputs], as_list(results[num_outputs:])

    def second(saved: Saved, sums: Sequence[Tensor]) -> list[Tensor | None]:
        results: list[Tensor | None] = run_later(saved, *sums) if sums else run_first(saved)
        return results

    return LayerFunctions(trained, list(wanted), strides, first, second, calls)
