"""Runs a layer's two functions, as `varuna_capslog.engine.functions` traces them, in other ways than the engine does.

Here no autograd takes part, but for the loss: a step calls the functions of one layer after the other.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from varuna_capslog.engine.functions import _code as bound_code
from varuna_capslog.engine.functions import _joint_graph, _Part, _prune, _split, _sum_in_place, _text, _with_sums

__all__ = ["LayerFunctions", "as_tuple", "bound_code", "compiled", "interpreted", "layer_functions", "python_code"]

Saved = list[Tensor]
Emit = Callable[[_Part, int], Callable[..., Any]]
"""Makes a part a function. Its first argument is a list with so many of the part's arguments, which it empties; without
such arguments there is no list. Its last arguments are the part's state."""


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


def as_tuple(written: Tensor | Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return what a module wrote as a tuple."""
    return (written,) if isinstance(written, Tensor) else tuple(written)


def graph_of(part: _Part) -> fx.GraphModule:
    """Return the part as a graph of its own, whose arguments are those that it reads and then its state."""
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in (*part.reads, *part.state):
        copies[node] = graph.placeholder(node.name)
    for node in part.nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output([copies[node] if isinstance(node, fx.Node) else None for node in part.returns])
    return fx.GraphModule(nn.Module(), graph)


def python_code(part: _Part, taken: int) -> Callable[..., Any]:
    """Return the part as Python code that calls operators by name."""
    code = graph_of(part).code.split("\n")
    head = next(number for number, line in enumerate(code) if line.startswith("def forward"))
    names = [node.name for node in (*part.reads, *part.state)]
    arguments = ["saved", *names[taken:]] if taken else names
    lines = [f"def part({', '.join(arguments)}):"]
    lines += [f"    {name} = saved.pop()" for name in reversed(names[:taken])]
    scope: dict[str, Any] = {"torch": torch, "device": torch.device, "inf": float("inf")}
    exec("\n".join(lines + code[head + 1 :]), scope)
    function: Callable[..., Any] = scope["part"]
    return function


def compiled(part: _Part, taken: int, cpp_wrapper: bool = False) -> Callable[..., Any]:
    """Return the part compiled by torch.compile; its kernels are other ones, so that bits differ."""
    function = torch.compile(graph_of(part), fullgraph=True, options={"cpp_wrapper": cpp_wrapper})
    if not taken:
        return function

    def call(saved: Saved, *tensors: Tensor) -> Any:
        results = function(*saved, *tensors)
        saved.clear()
        return results

    return call


def interpreted(part: _Part, taken: int) -> Callable[..., Any]:
    """Return the part as a program of torch's interpreter in C++, with the same operators.

    The interpreter's optimizations are off, since they replace operators by others with other bits.
    """
    names = [f"{_text(node)}: Tensor" for node in (*part.reads[taken:], *part.state)]
    lines = [f"{_text(node)} = saved.pop()" for node in reversed(part.reads[:taken])]
    for node in part.nodes:
        if node.target is operator.getitem:
            lines.append(f"{_text(node)} = {_text(node.args[0])}[{node.args[1]}]")
            continue
        target: Any = node.target
        named = [f"{key}={_text(argument)}" for key, argument in node.kwargs.items()]
        arguments = ", ".join([_text(argument) for argument in node.args] + named)
        lines.append(f"{_text(node)} = torch.ops.aten.{target._opname}({arguments})")
    lines.append(f"return [{', '.join(_text(node) for node in part.returns if node is not None)}]")
    head = f"def part({', '.join(['saved: List[Tensor]', *names] if taken else names)}) -> List[Tensor]:"
    torch._C._set_graph_executor_optimize(False)
    program = torch.jit.CompilationUnit("\n    ".join([head, *lines]) + "\n").part
    missing = [number for number, node in enumerate(part.returns) if node is None]

    def call(*arguments: Any) -> list[Tensor | None]:
        results: list[Tensor | None] = program(*arguments)
        for number in missing:
            results.insert(number, None)
        return results

    return call


def layer_functions(
    module: nn.Module, inputs: Sequence[Tensor], wanted: Sequence[bool], pruned: bool, emit: Emit
) -> LayerFunctions:
    """Make the functions of a module for inputs of these sizes.

    Args:
        wanted: which of the inputs want a gradient.
        pruned: without operators that compute nothing. emit: what runs the functions.
    """
    state = dict(module.named_parameters()) | dict(module.named_buffers())
    leaves = [tensor.requires_grad_(want) for tensor, want in zip(inputs, wanted, strict=True)]
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.enable_grad():
        fakes = {name: mode.from_tensor(tensor) for name, tensor in state.items()}
        graph, carries = _joint_graph(module, fakes, [mode.from_tensor(leaf) for leaf in leaves])
    if pruned:
        _prune(graph)
    forward, backward, strides = _split(graph, len(state), len(inputs), len(carries))
    _sum_in_place(backward)
    tensors = dict(zip(graph.find_nodes(op="placeholder"), state.values(), strict=False))
    states = [[tensors[node].detach() for node in part.state] for part in (forward, backward)]
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    first_backward, later_backward, _ = _with_sums(backward, trained)
    calls = sum(node.target is not operator.getitem for part in (forward, backward) for node in part.nodes)
    taken = len(backward.reads)
    run_forward, run_first, run_later = emit(forward, 0), emit(first_backward, taken), emit(later_backward, taken)
    as_list: Callable[[list[Tensor]], Any] = torch._C.ScriptList if emit is interpreted else list

    def first(tensors: Sequence[Tensor]) -> tuple[list[Tensor], Saved]:
        results = run_forward(*tensors, *states[0])
        return results[: len(carries)], as_list(results[len(carries) :])

    def second(saved: Saved, sums: Sequence[Tensor]) -> list[Tensor | None]:
        run = run_later if sums else run_first
        results: list[Tensor | None] = run(saved, *sums, *states[1])
        return results

    return LayerFunctions(trained, list(wanted), strides, first, second, calls)
