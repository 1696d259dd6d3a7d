"""Finds what a split of a captured layer's graph needs: its linear maps, the inside of its modules, sizes."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.model.capture.runtime import Guard, Region

__all__ = ["Linear", "has_linear", "linear_at", "open_module", "operator_name", "whole_sizes"]


def operator_name(target: Any) -> str:
    """Return the name that an operator, function or method has in aten."""
    packet = getattr(target, "overloadpacket", target)
    name = packet if isinstance(packet, str) else getattr(packet, "__name__", str(packet))
    return {"truediv": "div", "float": "to", "type": "to"}.get(name, name)


@dataclass(frozen=True)
class Linear:
    """A linear map in a graph.

    weight, bias: names of its parameters. into_columns: True where the weight has a column for each output, not a row.
    """

    x: fx.Node
    weight: str
    bias: str | None
    into_columns: bool


def linear_at(node: fx.Node, root: nn.Module) -> Linear | None:
    """Return the linear map that a node is; None where it is something else."""
    read, names = node.all_input_nodes, []
    if node.op == "call_module" and _is_linear(held := root.get_submodule(str(node.target))):
        names = [f"{node.target}.{name}" for name in ("weight", "bias") if getattr(held, name) is not None]
    elif operator_name(node.target) == "linear" and all(source.op == "get_attr" for source in read[1:]):
        held, names = None, [str(source.target) for source in read[1:]]
    if not names:
        return None
    return Linear(read[0], names[0], names[1] if len(names) > 1 else None, type(held) not in (type(None), nn.Linear))


def _is_linear(module: nn.Module) -> bool:
    """True for a linear map, also that of GPT-2, whose weight is transposed."""
    class_name = f"{type(module).__module__}.{type(module).__qualname__}"
    return type(module) is nn.Linear or class_name == "transformers.pytorch_utils.Conv1D"


def has_linear(module: nn.Module) -> bool:
    """True where a module holds linear maps and does more with them."""
    return not _is_linear(module) and any(isinstance(part, nn.Linear) or _is_linear(part) for part in module.modules())


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return not has_linear(m)


def open_module(graph: fx.Graph, root: nn.Module, node: fx.Node) -> None:
    """Replace the call of a module by the operations inside it.

    Raises CapslogError where its code depends on values or on the mode.
    """
    target = str(node.target)
    held = root.get_submodule(target)
    copied = copy.deepcopy(held, {id(parameter): parameter for parameter in held.parameters()})
    try:
        if isinstance(held, Region):
            raise ValueError("it has a gradient mode or an autocast of its own")
        inner, eval_graph = (_Tracer().trace(copied.train(mode)) for mode in (True, False))
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
    """Return a tensor without memory; floating-point ones are float32, so that a layer may have been converted."""
    bare = tensor.detach().to("meta")
    return bare.float() if bare.is_floating_point() else bare


def _some_shapes(guard: Guard) -> list[list[int]]:
    """Return shapes of inputs that a layer was captured for; sizes that it leaves open differ where they can."""
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
    """Return the sizes of every value of a layer's graph: a tuple for a tensor, None for other values.

    Sizes that may change have one of their possible values.

    Raises CapslogError where the graph does not run without values.
    """
    memo: dict[int, Any] = {id(tensor): _bare(tensor) for tensor in (*module.parameters(), *module.buffers())}
    shapes = _some_shapes(guard)
    inputs = [torch.empty(shape, dtype=kind, device="meta") for shape, kind in zip(shapes, guard.dtypes, strict=True)]
    runner = _SizesFound(copy.deepcopy(module, memo).train(), graph=graph)
    runner.sizes = {}
    try:
        runner.run(*map(_bare, inputs))
    except Exception as error:
        raise CapslogError(f"the sizes inside it cannot be followed ({_line(error)}); leave the layer whole") from error
    return runner.sizes
