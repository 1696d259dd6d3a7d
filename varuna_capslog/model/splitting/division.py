"""Which operators of a captured graph give divided results from divided operands, and with which arguments.

A value is whole, or divided along one dimension among the parts of a layer: heads of an attention, or columns. What is
said here holds for every part alike; sizes are those of the whole layer (the one-dimensional case of the sharding
propagation of GSPMD, Xu et al. 2021, section 3.5).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.model.splitting.splitter import share_of

__all__ = ["VIEWS", "Call", "Divided", "Share", "divided_result", "operator_name"]


@dataclass(frozen=True)
class Divided:
    """How a value is divided.

    dim: the dimension, from 0.
    blocks: sizes of what lies one after the other in it; every part has an equal share of each. Queries, keys and
        values that one linear map makes are three blocks.
    """

    dim: int
    blocks: tuple[int, ...]

    def ranges(self, part: int, degree: int, what: str = "entries") -> list[tuple[int, int]]:
        """(first, end) of what a part has of each block.

        Raises CapslogError where a block has no equal shares; `what`: its name there.
        """
        found, at = [], 0
        for size in self.blocks:
            first, end = share_of(size, part, degree, what)
            found.append((at + first, at + end))
            at += size
        return found


@dataclass(frozen=True)
class Share:
    """Takes the place of a whole operand of which every part reads its own share only."""

    node: fx.Node
    divided: Divided


@dataclass(frozen=True)
class Call:
    """An operator in a graph, some of whose operands are divided.

    name: of the operator, as aten has it. args, kwargs: with nodes in the places of tensors.
    sizes: of every value, a tuple for a tensor. divided: the values that are; a tuple for those of several tensors.
    origin: the linear map whose result was divided, for messages. exact: whether the arguments are those of an aten operator.
    """

    node: fx.Node
    name: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    sizes: Mapping[fx.Node, Any]
    divided: Mapping[fx.Node, Any]
    degree: int
    origin: str
    exact: bool

    def argument(self, place: int, name: str, default: Any = None) -> Any:
        """One argument, by its place or its name."""
        return self.args[place] if place < len(self.args) else self.kwargs.get(name, default)

    def given(self, place: int, value: Any) -> tuple[Any, ...]:
        """The arguments with another one in this place."""
        return (*self.args[:place], value, *self.args[place + 1 :])


Result = tuple[Any, tuple[Any, ...]]
"""How the result is divided, and the arguments with which a part calls the operator."""


def operator_name(target: Any) -> str:
    """The name that an operator, function or method has in aten."""
    packet = getattr(target, "overloadpacket", target)
    name = packet if isinstance(packet, str) else getattr(packet, "__name__", str(packet))
    return {"truediv": "div", "float": "to", "type": "to"}.get(name, name)


def divided_result(call: Call) -> Result:
    """Raises CapslogError for an operator that does not keep its operands divided, or is not known."""
    rule = _RULES.get(call.name) if call.exact else _OF_METHODS.get(call.name)
    if rule is None and _is_entrywise(call.name):
        rule = _entrywise
    if rule is None:
        raise _unknown(call, "it is not known to keep heads or columns apart")
    return rule(call)


def _unknown(call: Call, why: str) -> CapslogError:
    return CapslogError(
        f"its operator {call.name!r} ({call.node.name}) works on shares of what {call.origin} makes: {why}; leave the layer "
        "whole"
    )


_SAME = ("to", "contiguous", "dropout", "clone", "type_as", "detach", "alias", "masked_fill", "where", "softplus")


def _is_entrywise(name: str) -> bool:
    packet = getattr(torch.ops.aten, name.rstrip("_"), None)
    if packet is None or name.startswith("_"):
        return False
    tags = [getattr(packet, overload).tags for overload in packet.overloads()]
    return name.rstrip("_") in _SAME or any(torch.Tag.pointwise in one for one in tags)


def _one(call: Call) -> Divided:
    found = call.divided.get(call.args[0])
    if not isinstance(found, Divided):
        raise _unknown(call, "its first operand is whole")
    return found


def _dim(call: Call, dim: int, rank: int | None = None) -> int:
    return dim % (len(call.sizes[call.args[0]]) if rank is None else rank)


def _entrywise(call: Call, inner: int = 0, blocks_differ: bool = False) -> Result:
    """Entry by entry, or for matrices in the `inner` last dimensions one by one; operands are broadcast."""
    found: tuple[int, tuple[int, ...]] | None = None
    for node in call.node.all_input_nodes:
        one = call.divided.get(node)
        if one is None:
            continue
        if not isinstance(one, Divided):
            raise _unknown(call, "it takes several tensors at once")
        back = one.dim - len(call.sizes[node])
        found = found or (back, one.blocks)
        if back != found[0] or (one.blocks != found[1] and not blocks_differ) or len(one.blocks) != len(found[1]):
            raise _unknown(call, "its operands are shared out in different ways")
    assert found is not None, "an operand is divided"
    back, blocks = found
    if -back <= inner:
        raise _unknown(call, "it works across them")

    def own(node: fx.Node) -> Any:
        size = call.sizes[node]
        if node in call.divided or not isinstance(size, tuple) or len(size) < -back or size[back] == 1:
            return node
        return Share(node, Divided(len(size) + back, blocks if sum(blocks) == size[back] else (size[back],)))

    if fx.map_arg(dict(call.kwargs), own) != dict(call.kwargs):
        raise _unknown(call, "an operand that is given by name has them too")
    return Divided(len(call.sizes[call.node]) + back, blocks), fx.map_arg(call.args, own)  # type: ignore[return-value]


def _view(call: Call) -> Result:
    one, whole, sizes = _one(call), call.sizes[call.args[0]], call.sizes[call.node]
    if len(set(one.blocks)) > 1:
        raise _unknown(call, f"it takes blocks of the sizes {one.blocks} together")
    chunks, before = math.prod(whole[: one.dim]) * len(one.blocks), 1
    dim = 0
    while before * sizes[dim] <= chunks:
        before *= sizes[dim]
        dim += 1
    blocks = chunks // before
    if chunks % before or sizes[dim] % blocks:
        raise _unknown(call, f"it makes {sizes} of {whole}, which mixes them")
    found = Divided(dim, (sizes[dim] // blocks,) * blocks)
    found.ranges(0, call.degree, f"heads of {call.origin}")
    if len(call.args) < 2 or not isinstance(call.args[1], list | tuple):  # flatten
        return found, call.args
    return found, call.given(1, _fewer(call, call.args[1], dim))


def _fewer(call: Call, sizes: Sequence[Any], dim: int) -> list[Any]:
    """Sizes, less in the divided dimension; -1 is found out where it runs."""
    size = sizes[dim]
    if isinstance(size, fx.Node):
        raise _unknown(call, "their number is a size that may change")
    return [*sizes[:dim], size if size == -1 else size // call.degree, *sizes[dim + 1 :]]


def _expand(call: Call) -> Result:
    one, sizes = _one(call), call.sizes[call.node]
    dim = one.dim + len(sizes) - len(call.sizes[call.args[0]])
    return Divided(dim, one.blocks), call.given(1, _fewer(call, call.args[1], dim))


def _transpose(call: Call) -> Result:
    one = _one(call)
    first, second = (_dim(call, dim) for dim in call.args[1:3])
    return Divided({first: second, second: first}.get(one.dim, one.dim), one.blocks), call.args


def _permute(call: Call) -> Result:
    one = _one(call)
    return Divided([_dim(call, dim) for dim in call.args[1]].index(one.dim), one.blocks), call.args


def _unsqueeze(call: Call) -> Result:
    one, rank = _one(call), len(call.sizes[call.node])
    return Divided(one.dim + (_dim(call, call.args[1], rank) <= one.dim), one.blocks), call.args


def _apart(call: Call) -> Result:
    """Works along dimensions that are not divided, each by itself, and keeps their number."""
    one, dims = _one(call), call.argument(1, "dim")
    kept = len(call.sizes[call.node]) == len(call.sizes[call.args[0]])
    if dims is None or not kept or one.dim in [_dim(call, dim) for dim in (dims if isinstance(dims, list) else [dims])]:
        raise _unknown(call, "it works across them")
    return one, call.args


def _split(call: Call) -> Result:
    one = _one(call)
    sizes = [size[one.dim] for size in call.sizes[call.node]]
    if _dim(call, call.argument(2, "dim", 0)) != one.dim:
        return (one,) * len(sizes), call.args
    blocks, found = list(one.blocks), []
    for size in sizes:
        own: list[int] = []
        while sum(own) < size and blocks:
            own.append(blocks.pop(0))
        if sum(own) != size:
            raise _unknown(call, f"it cuts blocks of the sizes {one.blocks} into pieces of {sizes}")
        found.append(Divided(one.dim, tuple(own)))
    pieces = call.args[1]
    if call.name != "chunk":
        pieces = [size // call.degree for size in pieces] if isinstance(pieces, list) else pieces // call.degree
    return tuple(found), call.given(1, pieces)


def _getitem(call: Call) -> Result:
    found, place = call.divided[call.args[0]], call.args[1]
    if not isinstance(found, tuple) or not isinstance(place, int):
        raise _unknown(call, "it picks some of them")
    return found[place], call.args


def _slice(call: Call) -> Result:
    one = _one(call)
    dim, size = _dim(call, call.argument(1, "dim", 0)), call.sizes[call.args[0]][one.dim]
    first, end, step = (call.argument(at, "", default) for at, default in ((2, 0), (3, None), (4, 1)))
    if dim != one.dim:
        return one, call.args
    first, end = (min(at + size if at < 0 else at, size) for at in (first or 0, size if end is None else end))
    bounds = [sum(one.blocks[:count]) for count in range(len(one.blocks) + 1)]
    if first not in bounds or end not in bounds or step != 1:
        raise _unknown(call, f"it takes {first} to {end} of the blocks {one.blocks}")
    blocks = one.blocks[bounds.index(first) : bounds.index(end)]
    return Divided(dim, blocks), (call.args[0], dim, first // call.degree, end // call.degree)


def _cat(call: Call) -> Result:
    nodes, dim = call.args[0], call.argument(1, "dim", 0)
    found = {call.divided.get(node) for node in nodes}
    one = found.pop()
    if found or not isinstance(one, Divided) or dim % len(call.sizes[nodes[0]]) == one.dim:
        raise _unknown(call, "its operands are not all shared out in the same way along another dimension")
    return one, call.args


def _attend(call: Call) -> Result:
    return _entrywise(call, inner=2, blocks_differ=True)


def _matrices(call: Call) -> Result:
    return _entrywise(call, inner=2)


VIEWS = ("view", "reshape", "expand", "transpose", "permute", "unsqueeze", "slice")
"""Operators whose result takes no memory and no time: parts make these themselves of whole operands."""

_OF_METHODS: dict[str, Callable[[Call], Result]] = {
    **{"chunk": _split, "getitem": _getitem, "mean": _apart, "softmax": _apart},
}
_RULES: dict[str, Callable[[Call], Result]] = {
    **_OF_METHODS,
    **{"view": _view, "reshape": _view, "flatten": _view, "expand": _expand, "unsqueeze": _unsqueeze, "cat": _cat},
    **{"transpose": _transpose, "permute": _permute, "split": _split, "split_with_sizes": _split, "slice": _slice},
    **{"matmul": _matrices, "bmm": _matrices, "scaled_dot_product_attention": _attend},
}
