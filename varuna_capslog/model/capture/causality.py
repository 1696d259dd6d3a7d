"""Replaces attention masks that follow from sizes alone by their meaning: causality, a window, or nothing masked.

Captured code cannot read the values of a mask, so libraries build it for every pair of positions, whereas the same code
passes `is_causal` in a plain run. Such a mask has sequence x sequence elements, is saved for the backward, crosses
every cut, and rules out flash kernels and grouped heads.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from varuna_capslog.model.capture.band import attend_in_band

__all__ = ["attend_causally", "makers_of"]

_attention = torch.ops.aten.scaled_dot_product_attention.default
_PART = 1 << 24
"""Elements of a mask that are compared at once."""
_ALL_ROWS = 1 << 28
"""Most elements of a mask that is compared whole; of a larger mask, rows at equal distances are compared."""
_SOME_ROWS = 256
"""Number of these rows. Their distance is odd, so that in a periodic mask not all of them are equal."""
_WIDEST_HEAD = 256
"""Largest width of a head for which fused kernels of 16-bit types share keys and values among heads. No fused kernel of
CUDA does so for float32 (check_batch_size_and_num_heads_dense, sdp_utils.cpp), so these are repeated."""


_BY_ELEMENT = {"to", "clone", "contiguous", "alias", "where", "zeros_like", "ones_like", "__and__", "__or__", "__xor__"}
"""Elementwise operators that lack torch's tag `pointwise`."""


class _NotKnown(Exception):
    """Raised where the values of a mask depend on more than sizes, or need an operator that is not handled here."""


def attend_causally(graph: fx.Graph, kept: Collection[fx.Node]) -> None:
    """Replace masks by `is_causal`, no mask or the width of a band where these mean the same. Attention without a mask
    then reads keys and values before their repetition for groups of heads; its kernel may round in another way. Other
    masks are made in each module that reads them. kept: nodes that are read outside the graph.
    """
    bands: dict[fx.Node, _Band | None] = {}
    replaced: set[fx.Node] = set()
    for node in graph.find_nodes(op="call_function", target=_attention):
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
        arguments = dict(zip(names, node.args, strict=False)) | node.kwargs
        mask = arguments.get("attn_mask")
        if not isinstance(mask, fx.Node) or arguments.get("is_causal"):
            continue
        if mask not in bands:
            bands[mask] = _band(mask)
        band = bands[mask]
        if band is None:
            continue
        queries, keys = _fake(mask).shape[-2:]
        if band.before < queries - 1 or 0 < band.after < keys - 1:
            del arguments["attn_mask"]
            arguments.pop("is_causal", None)
            node.target = attend_in_band
            node.args = (*(arguments.pop(name) for name in names[:3]), *band)
        else:
            arguments |= {"attn_mask": None, "is_causal": band.after == 0 < keys - 1}
            _share_heads(arguments)
            node.args = tuple(arguments.pop(name) for name in names[:3])
        node.kwargs = arguments
        replaced.add(mask)
    _drop_unread(graph, replaced, kept)
    _drop_unread(graph, _make_where_read(graph), kept)


def _make_where_read(graph: fx.Graph) -> list[fx.Node]:
    """Let each module make the masks that it reads itself, so that none crosses a cut; return the masks replaced."""
    made_of_sizes: dict[fx.Node, None] = {}
    for node in graph.nodes:
        if _is_plain(node) and all(source in made_of_sizes for source in node.all_input_nodes):
            made_of_sizes[node] = None
    position = {node: place for place, node in enumerate(graph.nodes)}
    masks = [node for node in made_of_sizes if node.users.keys() - made_of_sizes.keys() and _is_mask(node)]
    for mask in masks:
        makers = [node for node in made_of_sizes if node in makers_of([mask])]
        readers: dict[str, list[fx.Node]] = {}
        for user in sorted(mask.users, key=position.__getitem__):
            if user not in made_of_sizes:
                readers.setdefault(str(user.meta.get("nn_module_stack")), []).append(user)
        for users in readers.values():
            made: dict[fx.Node, fx.Node] = {}
            for maker in makers:
                with graph.inserting_before(users[0]):
                    made[maker] = graph.node_copy(maker, made.__getitem__)
                made[maker].meta["nn_module_stack"] = users[0].meta.get("nn_module_stack")
            for user in users:
                user.replace_input_with(mask, made[mask])
    return masks


def _is_mask(node: fx.Node) -> bool:
    """True for a mask over pairs of positions that no operation writes into. node: a value made of sizes alone."""
    shape: Sequence[int] = getattr(_fake(node), "shape", ())
    if len(shape) < 2 or not all(isinstance(size, int) and size > 1 for size in shape[-2:]):
        return False
    if any(user.op != "call_function" or not _is_plain(user, seeded=True) for user in node.users):
        return False
    try:
        _allowed_row(node, shape[-2] - 1, {})
    except _NotKnown:
        return False
    return True


def _share_heads(arguments: dict[str, Any]) -> None:
    """Replace keys and values of an attention by the tensors before their repetition for groups of heads."""
    key, value = arguments["key"], arguments["value"]
    grouped = _before_groups(key), _before_groups(value)
    if all(grouped) and _fake(key).itemsize == 2 and _fake(key).shape[-1] == _fake(value).shape[-1] <= _WIDEST_HEAD:
        arguments |= {"key": grouped[0], "value": grouped[1], "enable_gqa": True}


def _drop_unread(graph: fx.Graph, masks: Collection[fx.Node], kept: Collection[fx.Node]) -> None:
    """Remove masks that nothing reads any more, and nodes that were computed for them alone."""
    made_for = makers_of(masks)
    for node in reversed(graph.nodes):
        if node in made_for and not node.users and node not in kept:
            graph.erase_node(node)


def makers_of(nodes: Collection[fx.Node], ends: Callable[[fx.Node], bool] = lambda node: False) -> set[fx.Node]:
    """Return the nodes and all nodes from which they are computed. ends: True for a node where the search stops."""
    waiting, visited = list(nodes), set(nodes)
    while waiting:
        node = waiting.pop()
        new = set() if ends(node) else set(node.all_input_nodes) - visited
        visited |= new
        waiting += new
    return visited


def _before_groups(node: Any) -> fx.Node | None:
    """Return keys or values before their repetition for groups of heads, [batch, heads, sequence, width], or None."""
    if not isinstance(node, fx.Node) or _name(node) not in ("reshape", "view", "_unsafe_view"):
        return None
    expanded: Any = node.args[0]
    while isinstance(expanded, fx.Node) and _name(expanded) in ("clone", "contiguous"):
        expanded = expanded.args[0]
    if not isinstance(expanded, fx.Node) or _name(expanded) != "expand" or _fake(node).dim() != 4:
        return None
    before, after = _fake(expanded.args[0]).shape, _fake(expanded).shape
    whole = _fake(node).shape
    if len(before) != 5 or before[2] != 1 or after != (*before[:2], after[2], *before[3:]):
        return None
    if whole != (after[0], after[1] * after[2], *after[3:]):
        return None
    source: Any = expanded.args[0]
    while isinstance(source, fx.Node) and _fake(source).dim() == 5:  # full slices around the new dimension
        kept = _name(source) == "slice" and _fake(source).shape == _fake(source.args[0]).shape
        if not kept and _name(source) != "unsqueeze":
            return None
        source = source.args[0]
    return source if _fake(source).shape == (*before[:2], *before[3:]) else None


class _Band(NamedTuple):
    """Mask by which each position reads itself and up to `before` positions before and `after` behind it."""

    before: int
    after: int


def _band(mask: fx.Node) -> _Band | None:
    """Return the band that a mask allows: the last and the first row give its width, then rows are compared with it.
    None for a mask of another form, or a mask other than full for unequal numbers of queries and keys.
    """
    shape = _fake(mask).shape
    if len(shape) < 2 or not all(isinstance(size, int) for size in shape) or not _follows_from_sizes(mask):
        return None
    queries, keys = shape[-2:]
    try:
        small = dict[fx.Node, Any]()
        before, after = (int(_allowed_row(mask, row, small).sum()) - 1 for row in (queries - 1, 0))
        full = before == after == keys - 1
        if min(before, after) < 0 or (queries != keys and not full):
            return None
        band = _Band(max(queries, keys) - 1 if full else before, after)
        for first, end in _rows(queries, _fake(mask).numel()):
            position = torch.arange(first, end)[:, None]
            allowed = torch.arange(keys) >= position - band.before
            allowed &= torch.arange(keys) <= position + band.after
            if not (_allowed(_part(mask, first, end, {}, small)) == allowed).all():
                return None
    except _NotKnown:
        return None
    return band


def _allowed_row(mask: fx.Node, row: int, small: dict[fx.Node, Any]) -> Tensor:
    """Return one row of the mask, for the first sequence and head. small: as in `_part`."""
    return _allowed(_part(mask, row, row + 1, {}, small)).flatten()[: _fake(mask).shape[-1]]


def _rows(queries: int, elements: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges of rows to compare."""
    step = max(1, _PART * queries // elements)
    if elements <= _ALL_ROWS:
        yield from ((first, min(first + step, queries)) for first in reversed(range(0, queries, step)))
        return
    apart = queries // _SOME_ROWS | 1
    yield from ((row, row + 1) for row in reversed(range(0, queries, apart)))
    yield queries - 1, queries


def _allowed(mask: Tensor) -> Tensor:
    """Return a mask as bool. Raises _NotKnown for a mask that adds numbers other than 0, the dtype's least and -inf."""
    if mask.dtype == torch.bool:
        return mask
    allowed = mask == 0
    if not mask.is_floating_point() or not (allowed | (mask <= torch.finfo(mask.dtype).min)).all():
        raise _NotKnown
    return allowed


def _follows_from_sizes(node: fx.Node) -> bool:
    """True where a value depends on no input, weight, buffer or random number."""
    return all(map(_is_plain, makers_of([node])))


def _is_plain(node: fx.Node, seeded: bool = False) -> bool:
    """True for an operator that writes into none of its arguments and, unless `seeded`, draws no random numbers."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return False
    draws = torch.Tag.nondeterministic_seeded in _operator(node).tags
    return not _operator(node)._schema.is_mutable and (seeded or not draws)


def _fake(node: Any) -> Any:
    """Return the fake tensor that the export computed for a node."""
    return node.meta["val"]


def _operator(node: fx.Node) -> Any:
    return node.target


def _name(node: fx.Node) -> str:
    return str(getattr(getattr(node.target, "overloadpacket", None), "__name__", ""))


def _part(node: fx.Node, first: int, end: int, made: dict[fx.Node, Tensor], small: dict[fx.Node, Any]) -> Any:
    """Return rows [first, end), in the last but one dimension, of a node's value, without computing the other rows.
    made: values for these rows so far; small: small tensors, computed whole.
    """
    if node in made:
        return made[node]
    shape: Sequence[int] = _fake(node).shape
    if _fake(node).numel() <= max(_PART // 16, *shape, 1) or len(shape) < 2:
        if node not in small:
            small[node] = _whole(node, {})
        made[node] = _rows_of(small[node], first, end)
        return made[node]
    name = _name(node)
    part = lambda leaf: _part(leaf, first, end, made, small) if isinstance(leaf, fx.Node) else leaf  # noqa: E731
    args, kwargs = pytree.tree_map(part, (list(node.args), dict(node.kwargs)))
    if name == "slice" and _fake(node).shape == _fake(node.args[0]).shape:
        made[node] = args[0]
        return args[0]
    if name in ("expand", "full", "ones", "zeros"):
        place = 1 if name == "expand" else 0
        args[place] = [*shape[:-2], end - first, shape[-1]]
    elif name in ("tril", "triu"):
        args = [args[0], (args[1] if len(args) > 1 else 0) + first]
    elif name == "unsqueeze":
        if args[1] % len(shape) > len(shape) - 3:
            raise _NotKnown
        args[1] %= len(shape)
    elif name not in _BY_ELEMENT and torch.Tag.pointwise not in _operator(node).tags:
        raise _NotKnown
    made[node] = _operator(node)(*args, **kwargs)
    return made[node]


def _rows_of(tensor: Any, first: int, end: int) -> Any:
    if not isinstance(tensor, Tensor) or tensor.dim() < 2 or tensor.shape[-2] == 1:
        return tensor
    if tensor.shape[-2] < end:
        raise _NotKnown
    return tensor[..., first:end, :]


def _whole(node: fx.Node, made: dict[fx.Node, Any]) -> Any:
    """Return the value of a small tensor."""
    if node not in made:
        if _fake(node).numel() > max(_PART, *_fake(node).shape, 1):
            raise _NotKnown
        value_of = lambda leaf: _whole(leaf, made) if isinstance(leaf, fx.Node) else leaf  # noqa: E731
        args, kwargs = pytree.tree_map(value_of, (list(node.args), dict(node.kwargs)))
        made[node] = _operator(node)(*args, **kwargs)
    return made[node]
