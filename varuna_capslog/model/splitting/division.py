"""Decides which operators of a captured graph keep their operands divided, and with which arguments a part calls them.

A value is whole, or divided along one dimension among the parts of a layer: heads of an attention, or columns. All
sizes are sizes in the whole layer (the one-dimensional case of GSPMD's propagation, Xu et al. 2021, section 3.5).
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

__all__ = ["ATTENTIONS", "VIEWS", "Divided", "Share", "SharedCall", "divided_result", "sliced", "spans"]


@dataclass(frozen=True)
class Divided:
    """Division of a value along the dimension `dim`, counted from 0.

    blocks: sizes of the consecutive blocks along `dim`; every part has an equal share of each block. Queries, keys and
        values that one linear map computes are three blocks.
    """

    dim: int
    blocks: tuple[int, ...]

    def ranges(self, part: int, degree: int, label: str = "entries") -> list[tuple[int, int]]:
        """Return (first, end) of a part's share of each block. Raises CapslogError, which names the entries `label`,
        where a block cannot be divided equally.
        """
        shares = [share_of(size, part, degree, label) for size in self.blocks]
        return [(at + first, at + end) for (at, _), (first, end) in zip(spans(self.blocks), shares, strict=True)]


def spans(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Return (first, end) of consecutive pieces of these sizes."""
    return [(sum(sizes[:at]), sum(sizes[: at + 1])) for at in range(len(sizes))]


@dataclass(frozen=True)
class Share:
    """Marks an argument: a whole value, of which each part reads only its share."""

    node: fx.Node
    divided: Divided


@dataclass(frozen=True)
class SharedCall:
    """Call of an operator in a graph.

    name: aten name of the operator. exact: True where the arguments are those of the aten operator.
    sizes: sizes of each value, a tuple for a tensor. divided: `Divided` of each divided value; a tuple of these for
        several tensors.
    origin: name of the linear map whose result was divided, for messages.
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
        """Sizes of the first operand."""
        return self.sizes[self.args[0]]

    @property
    def first_division(self) -> Divided:
        """Division of the first operand."""
        division = self.divided.get(self.args[0])
        if not isinstance(division, Divided):
            raise self.unknown("its first operand is whole")
        return division

    def argument(self, place: int, name: str, default: Any = None) -> Any:
        """Return the argument at a place, or with a name."""
        return self.args[place] if place < len(self.args) else self.kwargs.get(name, default)

    def dim(self, place: int = 1, default: int = 0, rank: int | None = None) -> int:
        """Return an argument that is a dimension, counted from 0."""
        return self.argument(place, "dim", default) % (rank or len(self.size))

    def unknown(self, why: str) -> CapslogError:
        """Return the error that refuses the operator."""
        return CapslogError(
            f"its operator {self.name!r} ({self.node.name}) works on shares of what {self.origin} makes, but {why}; "
            "leave the layer whole"
        )


Result = tuple[Any, tuple[Any, ...]]
"""Division of the result, and the arguments with which a part calls the operator."""


def divided_result(call: SharedCall, degree: int) -> Result:
    """Return the division of an operator's result, and its arguments in a part. Raises CapslogError if the operator is
    unknown or does not keep its operands divided.
    """
    if call.sizes[call.node] is None:
        return _number(call)
    rule = (_RULES if call.exact else _OF_METHODS).get(call.name)
    if rule is None and not _is_entrywise(call.name):
        raise call.unknown("it is not known to keep heads or columns apart")
    return rule(call, degree) if rule else _entrywise(call)


def _number(call: SharedCall) -> Result:
    """Return the result for an operator that reads a dtype, a device or a size, which is the same in every part."""
    of_one = call.name in ("sym_size", "size") and isinstance(dim := call.argument(1, "dim"), int)
    if not (call.args[1:] in (("dtype",), ("device",)) or (of_one and dim % len(call.size) != call.first_division.dim)):
        raise call.unknown("it reads the size of a share")
    return None, call.args


_SAME = ("to", "contiguous", "dropout", "clone", "type_as", "detach", "alias", "masked_fill", "where", "softplus")


def _is_entrywise(name: str) -> bool:
    packet = None if name.startswith("_") else getattr(torch.ops.aten, name, None)
    tags = [getattr(packet, overload).tags for overload in packet.overloads()] if packet else []
    return name in _SAME or any(torch.Tag.pointwise in overload_tags for overload_tags in tags)


def _entrywise(call: SharedCall, inner: int = 0) -> Result:
    """Divide the result of an elementwise operator, or of an operator on matrices in the `inner` last dimensions.

    Operands are broadcast. In attention, keys and values may have fewer heads than queries; they are divided together.
    """
    common: tuple[int, tuple[int, ...]] | None = None
    for node in call.node.all_input_nodes:
        division = call.divided.get(node)
        if division is None:
            continue
        placement = (division.dim - len(call.sizes[node]), division.blocks) if isinstance(division, Divided) else None
        common = common or placement
        if placement is None or common is None or placement[0] != common[0] or len(placement[1]) != len(common[1]):
            raise call.unknown("its operands are shared out in different ways")
        if placement != common and call.name not in ATTENTIONS:
            raise call.unknown("its operands have shares of different sizes")
    assert common is not None, "an operand is divided"
    back, blocks = common
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
    """Divide a view along the dimension in which heads or columns are outermost, with as many blocks as before."""
    old_sizes, sizes = call.size, call.sizes[call.node]
    if len(set(call.first_division.blocks)) > 1:
        raise call.unknown(f"it takes blocks of the sizes {call.first_division.blocks} together")
    chunks, before, dim = math.prod(old_sizes[: call.first_division.dim]) * len(call.first_division.blocks), 1, 0
    while before * sizes[dim] <= chunks:
        before, dim = before * sizes[dim], dim + 1
    blocks = chunks // before
    if chunks % before or sizes[dim] % blocks:
        raise call.unknown(f"it makes {sizes} of {old_sizes}, which mixes them")
    division = Divided(dim, (sizes[dim] // blocks,) * blocks)
    division.ranges(0, degree, f"heads of {call.origin}")
    if call.name == "unflatten" and 0 <= dim - call.dim() < len(call.args[2]):
        return division, _fewer(call, dim - call.dim(), degree, 2)
    return division, call.args if call.name in ("flatten", "unflatten") else _fewer(call, dim, degree)


def _fewer(call: SharedCall, dim: int, degree: int, place: int = 1) -> tuple[Any, ...]:
    """Return the arguments with a smaller size in the divided dimension (-1 stays). place: the argument with sizes."""
    size = call.args[place][dim]
    if isinstance(size, fx.Node):
        raise call.unknown("their number is a size that may change")
    sizes = [size if size == -1 else size // degree if at == dim else size for at, size in enumerate(call.args[place])]
    return *call.args[:place], sizes, *call.args[place + 1 :]


def _expand(call: SharedCall, degree: int) -> Result:
    dim = call.first_division.dim + len(call.sizes[call.node]) - len(call.size)
    return Divided(dim, call.first_division.blocks), _fewer(call, dim, degree)


def _transpose(call: SharedCall, _: int) -> Result:
    first, second = (call.dim(1), call.dim(2)) if call.name == "transpose" else (len(call.size) - 2, len(call.size) - 1)
    old = call.first_division
    return Divided({first: second, second: first}.get(old.dim, old.dim), old.blocks), call.args


def _permute(call: SharedCall, _: int) -> Result:
    dims = [dim % len(call.size) for dim in call.args[1]]
    return Divided(dims.index(call.first_division.dim), call.first_division.blocks), call.args


def _unsqueeze(call: SharedCall, _: int) -> Result:
    old = call.first_division
    return Divided(old.dim + (call.dim(rank=len(call.size) + 1) <= old.dim), old.blocks), call.args


def _select(call: SharedCall, _: int) -> Result:
    if call.dim() == call.first_division.dim:
        raise call.unknown("it picks one of them")
    division = Divided(call.first_division.dim - (call.dim() < call.first_division.dim), call.first_division.blocks)
    return division if call.name == "select" else (division,) * len(call.sizes[call.node]), call.args


def _along(call: SharedCall, _: int) -> Result:
    """Keep the division for an operator that works along other dimensions and keeps the number of dimensions."""
    dims = call.argument(1, "dim")
    dims = [dim % len(call.size) for dim in ([dims] if isinstance(dims, int) else dims or ())]
    if len(call.sizes[call.node]) != len(call.size) or not dims or call.first_division.dim in dims:
        raise call.unknown("it works across them")
    return call.first_division, call.args


def _split(call: SharedCall, degree: int) -> Result:
    division = call.first_division
    if call.dim(2) != division.dim:
        return (division,) * len(call.sizes[call.node]), call.args
    divisions = tuple(_taken(call, *bounds) for bounds in spans([size[division.dim] for size in call.sizes[call.node]]))
    if call.name == "chunk":
        return divisions, call.args
    x, pieces, *others = call.args
    return divisions, (x, pieces // degree if isinstance(pieces, int) else [size // degree for size in pieces], *others)


def _taken(call: SharedCall, first: int, end: int) -> Divided:
    """Return the division of a slice [first, end) of the divided dimension, which must consist of whole blocks."""
    bounds = [0, *(end for _, end in spans(call.first_division.blocks))]
    if first not in bounds or end not in bounds:
        raise call.unknown(f"it takes {first} to {end} of blocks of the sizes {call.first_division.blocks}")
    return Divided(call.first_division.dim, call.first_division.blocks[bounds.index(first) : bounds.index(end)])


def _slice(call: SharedCall, degree: int) -> Result:
    if call.dim() != call.first_division.dim:
        return call.first_division, call.args
    first, end = sliced(call)
    return _taken(call, first, end), (call.args[0], call.first_division.dim, first // degree, end // degree)


def sliced(call: SharedCall) -> tuple[int, int]:
    """Return (first, end) of a slice of a divided dimension."""
    bounds = (*call.args[2:5], None, None, None)[:3]
    if bounds[2] not in (None, 1) or any(isinstance(bound, fx.Node) for bound in bounds):
        raise call.unknown("it takes some of them")
    first, end, _ = slice(*bounds).indices(call.size[call.dim()])
    return first, end


def _getitem(call: SharedCall, _: int) -> Result:
    divisions, place = call.divided[call.args[0]], call.args[1]
    if not isinstance(divisions, tuple) or not isinstance(place, int):
        raise call.unknown("it picks some of them")
    return divisions[place], call.args


def _cat(call: SharedCall, _: int) -> Result:
    nodes, dim = call.args[0], call.argument(1, "dim", 0)
    divisions = {call.divided.get(node) for node in nodes}
    division, rank = divisions.pop(), len(call.sizes[call.node])
    if divisions or not isinstance(division, Divided) or (call.name == "cat" and dim % rank == division.dim):
        raise call.unknown("its operands are not all shared out in the same way along another dimension")
    return Divided(division.dim + (call.name == "stack" and dim % rank <= division.dim), division.blocks), call.args


ATTENTIONS = ("scaled_dot_product_attention", "attend_in_band")
"""Operators of fused attention."""
VIEWS = ("view", "reshape", "expand", "transpose", "permute", "unsqueeze", "slice")
"""Operators that only return a view: every part makes such views itself."""

_OF_METHODS: dict[str, Callable[[SharedCall, int], Result]] = {
    "chunk": _split,
    "getitem": _getitem,
    "mean": _along,
    "softmax": _along,
}
"""Rules for operators that graphs also hold as functions or methods of Python; other rules need aten's arguments."""
_RULES: dict[str, Callable[[SharedCall, int], Result]] = {
    **_OF_METHODS,
    **dict.fromkeys(("view", "reshape", "flatten", "unflatten"), _view),
    **dict.fromkeys(("split", "split_with_sizes"), _split),
    **dict.fromkeys(("transpose", "mT"), _transpose),
    **dict.fromkeys(("select", "unbind"), _select),
    **dict.fromkeys(("cat", "stack"), _cat),
    **dict.fromkeys(("matmul", "bmm", "baddbmm", *ATTENTIONS), _matrices),
    "expand": _expand,
    "unsqueeze": _unsqueeze,
    "permute": _permute,
    "slice": _slice,
}
