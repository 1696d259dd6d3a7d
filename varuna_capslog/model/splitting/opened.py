"""What must be known of a captured layer's graph before it can be split: linear maps, what modules do inside, sizes."""

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
    """The name that an operator, function or method has in aten."""
    packet = getattr(target, "overloadpacket", target)
    name = packet if isinstance(packet, str) else getattr(packet, "__name__", str(packet))
    return {"truediv": "div", "float": "to", "type": "to"}.get(name, name)


@dataclass(frozen=True)
class Linear:
    """A linear map in a graph.

    weight, bias: names of its parameters. into_columns: whether the weight has a column for each output, not a row.
    """

    x: fx.Node
    weight: str
    bias: str | None
    into_columns: bool


def linear_at(node: fx.Node, root: nn.Module) -> Linear | None:
    """The linear map that a node is; None where it is something else."""
    read, names = node.all_input_nodes, []
    if node.op == "call_module" and _is_linear(held := root.get_submodule(str(node.target))):
        names = [f"{node.target}.{name}" for name in ("weight", "bias") if getattr(held, name) is not None]
    elif operator_name(node.target) == "linear" and all(one.op == "get_attr" for one in read[1:]):
        held, names = None, [str(one.target) for one in read[1:]]
    if not names:
        return None
    return Linear(read[0], names[0], names[1] if len(names) > 1 else None, type(held) not in (type(None), nn.Linear))


def _is_linear(module: nn.Module) -> bool:
    """Also the linear map of GPT-2, whose weight lies the other way round."""
    own = f"{type(module).__module__}.{type(module).__qualname__}"
    return type(module) is nn.Linear or own == "transformers.pytorch_utils.Conv1D"


def has_linear(module: nn.Module) -> bool:
    """Whether it holds linear maps and does more with them."""
    return not _is_linear(module) and any(isinstance(one, nn.Linear) or _is_linear(one) for one in module.modules())


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return not has_linear(m)


def open_module(graph: fx.Graph, root: nn.Module, node: fx.Node) -> None:
    """Puts what a module does in the place of its call.

    Raises CapslogError where its code depends on values or on the mode.
    """
    target = str(node.target)
    held = root.get_submodule(target)
    own = copy.deepcopy(held, {id(one): one for one in held.parameters()})
    try:
        if isinstance(held, Region):
            raise ValueError("it has a gradient mode or an autocast of its own")
        inner, other = (_Tracer().trace(own.train(mode)) for mode in (True, False))
        if str(inner) != str(other):
            raise ValueError("it does something else in eval mode")
        if any(str(one.target).startswith("*") and one.users for one in inner.find_nodes(op="placeholder")):
            raise ValueError("it takes any number of arguments")
        (result,) = inner.find_nodes(op="output")[0].all_input_nodes
    except Exception as error:
        raise CapslogError(
            f"what its module {target!r} ({type(held).__name__}) does cannot be followed ({_line(error)}); leave "
            "the layer whole"
        ) from error
    env: dict[fx.Node, Any] = {}
    for place, one in enumerate(inner.find_nodes(op="placeholder")):
        default = one.args[0] if one.args else None
        env[one] = node.args[place] if place < len(node.args) else node.kwargs.get(str(one.target), default)
    with graph.inserting_before(node):
        for one in inner.nodes:
            if one.op in ("placeholder", "output"):
                continue
            env[one] = graph.node_copy(one, env.__getitem__)
            if one.op in ("call_module", "get_attr"):
                env[one].target = f"{target}.{one.target}"
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
        elif isinstance(value, tuple | list) and all(isinstance(one, torch.Tensor) for one in value):
            self.sizes[n] = tuple(tuple(one.shape) for one in value)
        else:
            self.sizes[n] = None
        return value


def _bare(tensor: torch.Tensor) -> torch.Tensor:
    """Without memory; all that may have a fraction is float32, so that a layer may have been converted."""
    bare = tensor.detach().to("meta")
    return bare.float() if bare.is_floating_point() else bare


def _some_shapes(guard: Guard) -> list[list[int]]:
    """Shapes of a layer's inputs that it was captured for; as far as it leaves that open, of sizes that differ."""
    for start in range(3, 1000):
        chosen: dict[str, int] = {}
        shapes: list[list[int]] = [[] for _ in guard.shapes]
        for found, shape in zip(shapes, guard.shapes, strict=True):
            for size in shape:
                name, least, most = ("", size, None) if isinstance(size, int) else size
                wanted = min(max(least, start + 2 * len(chosen)), most or least + 1000)
                found.append(chosen.setdefault(name, wanted) if name else least)
        if guard.takes(shapes):
            break
    return shapes


def whole_sizes(module: nn.Module, graph: fx.Graph, guard: Guard) -> dict[fx.Node, Any]:
    """The sizes of every value of a layer's graph: a tuple for a tensor, None for what is none.

    Sizes that may change are one of those that they may be.

    Raises CapslogError where the graph does not run without values.
    """
    memo: dict[int, Any] = {id(one): _bare(one) for one in (*module.parameters(), *module.buffers())}
    shapes = _some_shapes(guard)
    inputs = [torch.empty(shape, dtype=kind, device="meta") for shape, kind in zip(shapes, guard.dtypes, strict=True)]
    runner = _SizesFound(copy.deepcopy(module, memo).train(), graph=graph)
    runner.sizes = {}
    try:
        runner.run(*map(_bare, inputs))
    except Exception as error:
        raise CapslogError(f"the sizes inside it cannot be followed ({_line(error)}); leave the layer whole") from error
    return runner.sizes
