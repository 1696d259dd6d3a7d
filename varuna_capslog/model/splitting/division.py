"""Which operators of a captured graph keep a division of their operands, and with which arguments a part calls them.

A value is whole, or divided along one dimension among the parts of a layer: heads of an attention, or columns. Sizes
are those of the whole layer (the one-dimensional case of GSPMD's propagation, Xu et al. 2021, section 3.5).
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

__all__ = ["VIEWS", "Divided", "Share", "SharedCall", "divided_result", "sliced", "spans"]


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
        shares = [share_of(size, part, degree, what) for size in self.blocks]
        return [(at + first, at + end) for (at, _), (first, end) in zip(spans(self.blocks), shares, strict=True)]


def spans(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """(first, end) of pieces of these sizes that lie one after the other."""
    return [(sum(sizes[:at]), sum(sizes[: at + 1])) for at in range(len(sizes))]


@dataclass(frozen=True)
class Share:
    """Takes the place of a whole operand of which every part reads its own share only."""

    node: fx.Node
    divided: Divided


@dataclass(frozen=True)
class SharedCall:
    """An operator in a graph.

    name: of the operator, as aten has it. exact: whether the arguments are those of an aten operator.
    sizes: of every value, a tuple for a tensor. divided: the values that are; a tuple for those of several tensors.
    origin: the linear map whose result was divided, for messages.
    """

    node: fx.Node
    name: str
    exact: bool
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    sizes: Mapping[fx.Node, Any]
    divided: Mapping[fx.Node, Any]
    origin: str

    @property
    def size(self) -> Any:
        """Of the first operand."""
        return self.sizes[self.args[0]]

    @property
    def one(self) -> Divided:
        """How the first operand is divided."""
        found = self.divided.get(self.args[0])
        if not isinstance(found, Divided):
            raise self.unknown("its first operand is whole")
        return found

    def argument(self, place: int, name: str, default: Any = None) -> Any:
        """One argument, by its place or its name."""
        return self.args[place] if place < len(self.args) else self.kwargs.get(name, default)

    def dim(self, place: int = 1, default: int = 0, rank: int | None = None) -> int:
        """An argument that is a dimension, from 0."""
        return self.argument(place, "dim", default) % (rank or len(self.size))

    def unknown(self, why: str) -> CapslogError:
        """The refusal of an operator."""
        return CapslogError(
            f"its operator {self.name!r} ({self.node.name}) works on shares of what {self.origin} makes, but {why}; "
            "leave the layer whole"
        )


Result = tuple[Any, tuple[Any, ...]]
"""How the result is divided, and the arguments with which a part calls the operator."""


def divided_result(call: SharedCall, degree: int) -> Result:
    """How what an operator gives is divided, and its arguments in a part.

    Raises CapslogError for an operator that does not keep its operands divided, or is not known.
    """
    if call.sizes[call.node] is None:
        return _number(call)
    rule = (_RULES if call.exact else _OF_METHODS).get(call.name)
    if rule is None and not _is_entrywise(call.name):
        raise call.unknown("it is not known to keep heads or columns apart")
    return rule(call, degree) if rule else _entrywise(call)


def _number(call: SharedCall) -> Result:
    """A type, a device or a size: the same in every part."""
    of_one = call.name in ("sym_size", "size") and isinstance(dim := call.argument(1, "dim"), int)
    if not (call.args[1:] in (("dtype",), ("device",)) or (of_one and dim % len(call.size) != call.one.dim)):
        raise call.unknown("it reads the size of a share")
    return None, call.args


_SAME = ("to", "contiguous", "dropout", "clone", "type_as", "detach", "alias", "masked_fill", "where", "softplus")


def _is_entrywise(name: str) -> bool:
    packet = None if name.startswith("_") else getattr(torch.ops.aten, name, None)
    tags = [getattr(packet, overload).tags for overload in packet.overloads()] if packet else []
    return name in _SAME or any(torch.Tag.pointwise in one for one in tags)


def _entrywise(call: SharedCall, inner: int = 0) -> Result:
    """Entry by entry, or for the matrices in the `inner` last dimensions one by one; operands are broadcast.

    Keys and values may have fewer heads than queries, which they are shared out with.
    """
    found: tuple[int, tuple[int, ...]] | None = None
    for node in call.node.all_input_nodes:
        one = call.divided.get(node)
        if one is None:
            continue
        own = (one.dim - len(call.sizes[node]), one.blocks) if isinstance(one, Divided) else None
        found = found or own
        if own is None or found is None or own[0] != found[0] or len(own[1]) != len(found[1]):
            raise call.unknown("its operands are shared out in different ways")
        if own != found and call.name != "scaled_dot_product_attention":
            raise call.unknown("its operands have shares of different sizes")
    assert found is not None, "an operand is divided"
    back, blocks = found
    sizes = [call.sizes[node] for node in call.node.all_input_nodes if call.sizes[node] is not None]
    across = -back <= inner if inner else torch.broadcast_shapes(*sizes) != call.sizes[call.node]
    if across:
        raise call.unknown("it works across them")

    def share(node: fx.Node) -> Any:
        size = call.sizes[node]
        if node in call.divided or not isinstance(size, tuple) or len(size) < -back or size[back] == 1:
            return node
        return Share(node, Divided(len(size) + back, blocks if sum(blocks) == size[back] else (size[back],)))

    if fx.map_arg(dict(call.kwargs), share) != dict(call.kwargs):
        raise call.unknown("an operand that is given by name would be shared out too")
    return Divided(len(call.sizes[call.node]) + back, blocks), fx.map_arg(call.args, share)


def _matrices(call: SharedCall, _: int) -> Result:
    return _entrywise(call, inner=2)


def _view(call: SharedCall, degree: int) -> Result:
    """The heads or columns stay the outermost of what lies together in memory, after as many blocks as before."""
    whole, sizes = call.size, call.sizes[call.node]
    if len(set(call.one.blocks)) > 1:
        raise call.unknown(f"it takes blocks of the sizes {call.one.blocks} together")
    chunks, before, dim = math.prod(whole[: call.one.dim]) * len(call.one.blocks), 1, 0
    while before * sizes[dim] <= chunks:
        before, dim = before * sizes[dim], dim + 1
    blocks = chunks // before
    if chunks % before or sizes[dim] % blocks:
        raise call.unknown(f"it makes {sizes} of {whole}, which mixes them")
    found = Divided(dim, (sizes[dim] // blocks,) * blocks)
    found.ranges(0, degree, f"heads of {call.origin}")
    if call.name == "unflatten" and 0 <= dim - call.dim() < len(call.args[2]):
        return found, _fewer(call, dim - call.dim(), degree, 2)
    return found, call.args if call.name in ("flatten", "unflatten") else _fewer(call, dim, degree)


def _fewer(call: SharedCall, dim: int, degree: int, place: int = 1) -> tuple[Any, ...]:
    """The arguments with a smaller size in the divided dimension; -1 is found out where it runs.

    place: of the sizes among the arguments.
    """
    size = call.args[place][dim]
    if isinstance(size, fx.Node):
        raise call.unknown("their number is a size that may change")
    sizes = [size if size == -1 else size // degree if at == dim else size for at, size in enumerate(call.args[place])]
    return *call.args[:place], sizes, *call.args[place + 1 :]


def _expand(call: SharedCall, degree: int) -> Result:
    dim = call.one.dim + len(call.sizes[call.node]) - len(call.size)
    return Divided(dim, call.one.blocks), _fewer(call, dim, degree)


def _transpose(call: SharedCall, _: int) -> Result:
    first, second = (call.dim(1), call.dim(2)) if call.name == "transpose" else (len(call.size) - 2, len(call.size) - 1)
    return Divided({first: second, second: first}.get(call.one.dim, call.one.dim), call.one.blocks), call.args


def _permute(call: SharedCall, _: int) -> Result:
    dims = [dim % len(call.size) for dim in call.args[1]]
    return Divided(dims.index(call.one.dim), call.one.blocks), call.args


def _unsqueeze(call: SharedCall, _: int) -> Result:
    return Divided(call.one.dim + (call.dim(rank=len(call.size) + 1) <= call.one.dim), call.one.blocks), call.args


def _select(call: SharedCall, _: int) -> Result:
    if call.dim() == call.one.dim:
        raise call.unknown("it picks one of them")
    found = Divided(call.one.dim - (call.dim() < call.one.dim), call.one.blocks)
    return found if call.name == "select" else (found,) * len(call.sizes[call.node]), call.args


def _along(call: SharedCall, _: int) -> Result:
    """Works along dimensions that are not divided, and keeps their number."""
    dims = call.argument(1, "dim")
    dims = [dim % len(call.size) for dim in ([dims] if isinstance(dims, int) else dims or ())]
    if len(call.sizes[call.node]) != len(call.size) or not dims or call.one.dim in dims:
        raise call.unknown("it works across them")
    return call.one, call.args


def _split(call: SharedCall, degree: int) -> Result:
    one = call.one
    if call.dim(2) != one.dim:
        return (one,) * len(call.sizes[call.node]), call.args
    found = tuple(_taken(call, *bounds) for bounds in spans([size[one.dim] for size in call.sizes[call.node]]))
    if call.name == "chunk":
        return found, call.args
    x, pieces, *rest = call.args
    return found, (x, pieces // degree if isinstance(pieces, int) else [size // degree for size in pieces], *rest)


def _taken(call: SharedCall, first: int, end: int) -> Divided:
    """The blocks between these two places of the divided dimension."""
    bounds = [0, *(end for _, end in spans(call.one.blocks))]
    if first not in bounds or end not in bounds:
        raise call.unknown(f"it takes {first} to {end} of blocks of the sizes {call.one.blocks}")
    return Divided(call.one.dim, call.one.blocks[bounds.index(first) : bounds.index(end)])


def _slice(call: SharedCall, degree: int) -> Result:
    if call.dim() != call.one.dim:
        return call.one, call.args
    first, end = sliced(call)
    return _taken(call, first, end), (call.args[0], call.one.dim, first // degree, end // degree)


def sliced(call: SharedCall) -> tuple[int, int]:
    """(first, end) of what a slice takes of a divided dimension."""
    bounds = (*call.args[2:5], None, None, None)[:3]
    if bounds[2] not in (None, 1) or any(isinstance(one, fx.Node) for one in bounds):
        raise call.unknown("it takes some of them")
    first, end, _ = slice(*bounds).indices(call.size[call.dim()])
    return first, end


def _getitem(call: SharedCall, _: int) -> Result:
    found, place = call.divided[call.args[0]], call.args[1]
    if not isinstance(found, tuple) or not isinstance(place, int):
        raise call.unknown("it picks some of them")
    return found[place], call.args


def _cat(call: SharedCall, _: int) -> Result:
    nodes, dim = call.args[0], call.argument(1, "dim", 0)
    found = {call.divided.get(node) for node in nodes}
    one, rank = found.pop(), len(call.sizes[call.node])
    if found or not isinstance(one, Divided) or (call.name == "cat" and dim % rank == one.dim):
        raise call.unknown("its operands are not all shared out in the same way along another dimension")
    return Divided(one.dim + (call.name == "stack" and dim % rank <= one.dim), one.blocks), call.args


VIEWS = ("view", "reshape", "expand", "transpose", "permute", "unsqueeze", "slice")
"""Operators that only look at their operand in another way: every part makes such views itself."""

_OF_METHODS: dict[str, Callable[[SharedCall, int], Result]] = {
    "chunk": _split,
    "getitem": _getitem,
    "mean": _along,
    "softmax": _along,
}
"""Also as Python writes them; the others have an aten operator's arguments."""
_RULES: dict[str, Callable[[SharedCall, int], Result]] = {
    **_OF_METHODS,
    **dict.fromkeys(("view", "reshape", "flatten", "unflatten"), _view),
    **dict.fromkeys(("split", "split_with_sizes"), _split),
    **dict.fromkeys(("transpose", "mT"), _transpose),
    **dict.fromkeys(("select", "unbind"), _select),
    **dict.fromkeys(("cat", "stack"), _cat),
    **dict.fromkeys(("matmul", "bmm", "baddbmm", "scaled_dot_product_attention"), _matrices),
    "expand": _expand,
    "unsqueeze": _unsqueeze,
    "permute": _permute,
    "slice": _slice,
}
