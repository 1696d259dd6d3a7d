"""Attention in the graphs of captured models, as transformers writes it eagerly, computed in another way.

The pattern on nodes: softmax(scale * (q @ k transposed) + mask), perhaps of another type and with dropout, @ v. Its
nodes become one call of an `attention.AttentionCore`. `attention_everywhere` is what the registry's variants call.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from varuna_capslog.variants.attention import AttentionCore, put_in

__all__ = ["attention_everywhere", "take_graph"]

_ATEN = torch.ops.aten
_SCALED = {_ATEN.mul.Tensor: 1, _ATEN.div.Tensor: -1}
"""Operators, and the power of the scale that they multiply by."""


@dataclass(frozen=True)
class _Attention:
    """A place of the pattern in a graph.

    nodes: in their order; the last one is the product with the values.
    """

    q: fx.Node
    k: fx.Node
    v: fx.Node
    bias: fx.Node | None
    scale: float
    rate: float
    nodes: tuple[fx.Node, ...]


class _Attend(nn.Module):
    """The module that the graph calls for attention.

    core: computes it. scale: of the logits.
    """

    def __init__(self, core: AttentionCore, scale: float) -> None:
        super().__init__()
        self.core, self.scale = core, scale

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """See `AttentionCore.attend`."""
        if bias is not None:
            bias = bias.to(q.dtype).reshape((1,) * (q.dim() - bias.dim()) + bias.shape)
        return self.core.attend(q, k, v, bias, self.scale)


def attention_everywhere(layer: nn.Module, kind: type[AttentionCore]) -> int | None:
    """Compute all attention inside a layer by this kind: cores (`attention.put_in`), and places in captured graphs.

    Returns the number of places that it changed, None if there are none.
    """
    changed = put_in(layer, kind)
    for module in [part for part in layer.modules() if isinstance(part, fx.GraphModule)]:
        if hasattr(module, "graphs"):
            continue  # a graph for each of several sizes, chosen at run time
        if places := list(_places(module)):
            _replace(module, kind)
            changed = (changed or 0) + len(places)
    return changed


def _replace(module: fx.GraphModule, kind: type[AttentionCore]) -> None:
    graph = copy.deepcopy(module.graph)
    for number, place in enumerate(list(_places(module, graph))):
        name = f"attention_{number}"
        module.add_module(name, _Attend(kind(place.rate), place.scale).train(module.training))
        last = place.nodes[-1]
        with graph.inserting_before(last):
            last.replace_all_uses_with(graph.call_module(name, (place.q, place.k, place.v, place.bias)))
        for node in reversed(place.nodes):
            graph.erase_node(node)
    take_graph(module, graph)


def take_graph(module: fx.GraphModule, graph: fx.Graph) -> None:
    """Make the module run this graph; its attributes do not change, neither the parameters nor their order."""
    # a module and its copies share one class with the code of the graph, so this one gets a class of its own
    built = type(module).__mro__[1](module, graph)
    held = ("_modules", "_parameters", "_buffers", "training")
    vars(module).update({name: value for name, value in vars(built).items() if name not in held})
    module.__class__ = type(built)


def _places(module: fx.GraphModule, graph: fx.Graph | None = None) -> Iterator[_Attention]:
    for node in (graph or module.graph).nodes:
        if node.op == "call_function" and node.target is _ATEN.softmax.int:
            place = _place(module, node)
            if place is not None:
                yield place


def _place(module: fx.GraphModule, softmax: fx.Node) -> _Attention | None:
    """Return the pattern around a softmax; None for another pattern."""
    if softmax.args[1] not in (-1, 3):
        return None
    nodes, bias, scale, node = [softmax], None, 1.0, softmax.args[0]
    while True:
        if not isinstance(node, fx.Node) or len(node.users) != 1 or node.op != "call_function":
            return None
        nodes.insert(0, node)
        if node.target is _ATEN.matmul.default:
            break
        first, second = node.args[:2]
        if node.target in _SCALED and isinstance(second, (int, float)):
            scale *= second ** _SCALED[node.target]
        elif node.target is _ATEN.add.Tensor and bias is None and scale == 1.0 and isinstance(second, fx.Node):
            bias = second
        else:
            return None
        node = first
    q, transposed = nodes[0].args
    if not isinstance(q, fx.Node) or not isinstance(transposed, fx.Node) or not _swaps_last(transposed):
        return None
    k, rate, last = transposed.args[0], 0.0, softmax
    while True:
        if len(last.users) != 1:
            return None
        last = next(iter(last.users))
        nodes.append(last)
        if last.target is _ATEN.matmul.default and last.args[0] is nodes[-2]:
            break
        dropped = _dropout(module, last)
        if dropped is None and last.target is not _ATEN.to.dtype:
            return None
        rate = dropped or rate
    v = last.args[1]
    if not isinstance(k, fx.Node) or not isinstance(v, fx.Node) or v in nodes:
        return None
    if len(transposed.users) == 1:
        nodes.insert(0, transposed)
    return _Attention(q, k, v, bias, float(scale), rate, tuple(nodes))


def _swaps_last(node: fx.Node) -> bool:
    """Return True where the node swaps the last two of four dimensions."""
    return node.target is _ATEN.transpose.int and {int(dim) % 4 for dim in node.args[1:3]} == {2, 3}  # type: ignore[arg-type]


def _dropout(module: fx.GraphModule, node: fx.Node) -> float | None:
    """Return the rate of a dropout; None for another node."""
    if node.target is _ATEN.dropout.default:  # captured for training alone
        rate, trains = node.args[1:3]
        return float(rate) if trains else 0.0  # type: ignore[arg-type]
    if node.op != "call_module":
        return None
    child: Any = module.get_submodule(str(node.target))
    if isinstance(child, nn.Dropout):
        return child.p
    if getattr(child, "target", None) is _ATEN.dropout.default:
        rates = [rate_in_training for rate_in_training in child.in_training if isinstance(rate_in_training, float)]
        return rates[0] if len(rates) == 1 else None
    return None
