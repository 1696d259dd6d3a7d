"""Operators for sizes that depend on values, where torch found at the export that they can only be one number.

A Qwen3-VL adds features of its pictures to the rows of picture tokens: as many rows as there are features. With the
number in the graph it runs on tensors without values, too; on real tensors other numbers are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor

from varuna_capslog.base.errors import CapslogError

__all__ = ["fix_sizes"]

_aten = torch.ops.aten
_LIBRARY = torch.library.Library("capslog", "FRAGMENT")
_LIBRARY.define("number_of(Tensor x, int number) -> int")
_LIBRARY.define("rows_of(Tensor x, Tensor?[] masks, int rows) -> Tensor")
_LIBRARY.define("put_rows_(Tensor(a!) x, Tensor?[] masks, Tensor values, bool accumulate, int rows) -> Tensor(a!)")


def fix_sizes(graph: fx.Graph) -> None:
    """Put the one possible number into each operator that reads a number from a tensor, selects rows by a mask or
    writes them.
    """
    for node in graph.find_nodes(op="call_function", target=_aten.item.default):
        number = _only(node.meta.get("val"))
        if number is not None:
            node.target, node.args = torch.ops.capslog.number_of.default, (*node.args, number)
    for node in graph.find_nodes(op="call_function", target=_aten.index.Tensor):
        x, masks = node.args
        rows = _rows(node, masks)
        if rows is not None:
            node.target, node.args = torch.ops.capslog.rows_of.default, (x, masks, rows)
    for node in graph.find_nodes(op="call_function", target=_aten.index_put_.default):
        x, masks, values, *accumulate = node.args
        rows = _rows(values, masks) if len(_shape(values)) == len(_shape(x)) + 1 - len(_shape(masks[-1])) else None
        if rows is not None and rows != 1:  # one row of values may be written into many
            node.target = torch.ops.capslog.put_rows_.default
            node.args = (x, masks, values, any(accumulate), rows)


def _shape(node: fx.Node) -> Sequence[Any]:
    shape: Sequence[Any] = node.meta["val"].shape
    return shape


def _rows(selected: fx.Node, masks: Sequence[fx.Node | None]) -> int | None:
    *before, mask = masks
    if any(before) or mask is None or mask.meta["val"].dtype not in (torch.bool, torch.uint8):
        return None
    return _only(_shape(selected)[len(before)])


def _only(size: Any) -> int | None:
    is_number = isinstance(size, int) or (isinstance(size, torch.SymInt) and size.node.expr.is_number)
    return int(size) if is_number else None


def _number_of(x: Tensor, number: int) -> int:
    if not isinstance(x, FakeTensor) and x.item() != number:
        raise CapslogError(
            f"the model was captured where it reads the number {number} from a tensor, but got {x.item()}; capture the "
            "model again with example_inputs of these values"
        )
    return number


def _places(masks: Sequence[Tensor | None], rows: int) -> list[Tensor | None]:
    *before, mask = masks
    assert mask is not None
    if isinstance(mask, FakeTensor):
        places = [mask.new_empty(rows, dtype=torch.int64) for _ in mask.shape]
    else:
        places = [*mask.nonzero().unbind(1)]
        if len(places[0]) != rows:
            raise CapslogError(
                f"the model was captured where a mask selects {rows} rows, but it selects {len(places[0])}; capture "
                "the model again with example_inputs of this many"
            )
    return [*before, *places]


def _rows_of(x: Tensor, masks: Sequence[Tensor | None], rows: int) -> Tensor:
    result: Tensor = _aten.index.Tensor(x, _places(masks, rows))
    return result


def _put_rows(x: Tensor, masks: Sequence[Tensor | None], values: Tensor, accumulate: bool, rows: int) -> Tensor:
    result: Tensor = _aten.index_put_.default(x, _places(masks, rows), values, accumulate)
    return result


_LIBRARY.impl("number_of", _number_of, "CompositeImplicitAutograd")
_LIBRARY.impl("rows_of", _rows_of, "CompositeImplicitAutograd")
_LIBRARY.impl("put_rows_", _put_rows, "CompositeImplicitAutograd")
