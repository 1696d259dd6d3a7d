"""Cross entropy of many classes in chunks of rows, from existing logits, or from logits that are made chunk by chunk.

Plain cross entropy holds the logits, their log-softmax and two gradients, each [N, V]. `chunked_cross_entropy`, a loss
that configs may name, holds only the logits and one gradient. The variant `chunked-loss` holds neither: it joins the
last linear layer of a captured model with the loss, if nothing else reads the layer's logits.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from varuna_capslog.variants.attention import chunks, take_graph, wide_type

__all__ = ["chunked_cross_entropy", "chunked_loss", "drop_unread_logits"]

ROWS = 256
"""Rows of one chunk: their logits are a small part of all logits, but keep a device busy."""
_ATEN = torch.ops.aten


def chunked_cross_entropy(logits: Tensor, classes: Tensor, ignored: int = -100, rows: int = ROWS) -> Tensor:
    """Return the mean of `torch.nn.functional.cross_entropy` over the rows that count, in float32 for 16-bit logits.
    The forward saves the logits and one number per row; the backward recomputes the softmax chunk by chunk and writes
    it into the gradient's memory.

    Args:
        logits, classes: [N, V], and [N] whole numbers.
        ignored: rows of this class do not count; the mean of no rows is NaN, and its gradient is zero.
        rows: number of rows in a chunk.
    """
    loss: Tensor = _Chunked.apply(logits, None, None, classes, _Rows(ignored, rows, wide_type(logits)))
    return loss


@dataclass(frozen=True)
class _Rows:
    """Settings of the chunks. ignored, rows: see `chunked_cross_entropy`. dtype: of the computation in a chunk."""

    ignored: int
    rows: int
    dtype: torch.dtype


class _Chunked(torch.autograd.Function):
    """Loss of x [N, D], weight [V, D] and bias [V]. The forward makes the logits chunk by chunk, and the backward makes
    them again, as in `attention.ChunkedAttention`. Without weight and bias, x is the logits.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, classes: Tensor, how: _Rows) -> Tensor:
        counts = classes != how.ignored
        log_sums, of_class = (x.new_zeros(x.shape[0], dtype=how.dtype) for _ in range(2))
        with torch.autocast(x.device.type, enabled=False):
            for rows in chunks(x.shape[0], how.rows):
                logits = _logits(x[rows], weight, bias).to(how.dtype)
                of_class[rows] = logits.gather(1, _column(classes[rows], counts[rows])).squeeze(1)
                largest = logits.amax(-1, keepdim=True)
                # not logsumexp, which copies the logits
                maps = logits.sub(largest) if _is_given(x, weight, how) else logits.sub_(largest)
                log_sums[rows] = maps.exp_().sum(-1).log_().add_(largest.squeeze(1))
                del logits, maps  # before the next chunk's logits are made
        ctx.how = how
        ctx.save_for_backward(x, weight, bias, classes, log_sums)
        return (log_sums - of_class).masked_fill_(~counts, 0.0).sum() / counts.sum()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upper: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, classes, log_sums = ctx.saved_tensors
        how, counts = ctx.how, classes != ctx.how.ignored
        # each row's share of the mean; 0 for rows that do not count
        factor = torch.where(counts, upper.to(how.dtype) / counts.sum(), 0.0)[:, None]
        of_x = torch.empty_like(x)
        of_weight, of_bias = (
            torch.zeros_like(parameter, dtype=wide_type(parameter)) if wanted else None
            for parameter, wanted in ((weight, ctx.needs_input_grad[1]), (bias, ctx.needs_input_grad[2]))
        )
        with torch.autocast(x.device.type, enabled=False):
            for rows in chunks(x.shape[0], how.rows):
                if _is_given(x, weight, how):  # compute in the gradient's memory
                    maps = torch.sub(x[rows], log_sums[rows, None], out=of_x[rows])
                else:
                    maps = _logits(x[rows], weight, bias).to(how.dtype).sub_(log_sums[rows, None])
                maps.exp_().scatter_add_(1, _column(classes[rows], counts[rows]), -counts[rows, None].to(how.dtype))
                maps = maps.mul_(factor[rows]).to(x.dtype)
                if weight is None:
                    if x.dtype != how.dtype:
                        of_x[rows] = maps
                    continue
                torch.mm(maps, weight, out=of_x[rows])
                if of_weight is not None:
                    _add_product(of_weight, maps.t(), x[rows])
                if of_bias is not None:
                    of_bias += maps.sum(0, dtype=of_bias.dtype)
                del maps
        return of_x, _as(of_weight, weight), _as(of_bias, bias), None, None


def _logits(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    return x if weight is None else F.linear(x, weight, bias)


def _is_given(x: Tensor, weight: Tensor | None, how: _Rows) -> bool:
    """Return True if a chunk's logits are a view of x, so that they must not be overwritten."""
    return weight is None and x.dtype == how.dtype


def _column(classes: Tensor, counts: Tensor) -> Tensor:
    """Return [rows, 1]: the class of each row, class 0 for rows that do not count."""
    return torch.where(counts, classes, 0)[:, None]


def _add_product(total: Tensor, first: Tensor, second: Tensor) -> None:
    if first.dtype == total.dtype:
        total.addmm_(first, second)
    else:
        total += torch.mm(first, second)


def _as(total: Tensor | None, like: Tensor | None) -> Tensor | None:
    return None if total is None or like is None else total.to(like.dtype)


# -- Losses in the graphs of captured models


class _Loss(nn.Module):
    """Loss of logits [N, V] and classes [N], in chunks; torch's loss for other targets, such as probabilities. ignored:
    see `chunked_cross_entropy`. dtype: to which the graph converts logits before the loss; None: no conversion.
    """

    def __init__(self, ignored: int, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.ignored, self.dtype = ignored, dtype

    def forward(self, logits: Tensor, classes: Tensor) -> Tensor:
        """Return the mean loss."""
        if self.takes(logits, classes):
            return self.of(logits, None, None, classes)
        logits = logits if self.dtype is None else logits.to(self.dtype)
        return F.cross_entropy(logits, classes, ignore_index=self.ignored)

    @staticmethod
    def takes(logits: Tensor, classes: Tensor) -> bool:
        """Return True if there is one class for each row."""
        return logits.dim() == 2 and classes.dim() == 1 and not classes.is_floating_point()

    def of(self, x: Tensor, weight: Tensor | None, bias: Tensor | None, classes: Tensor) -> Tensor:
        """See `_Chunked`."""
        loss: Tensor = _Chunked.apply(x, weight, bias, classes, _Rows(self.ignored, ROWS, self.dtype or wide_type(x)))
        return loss


class _LinearLoss(_Loss):
    """Linear layer and the loss of its logits. joined: last of the dimensions that the graph flattens to rows; None: no
    reshape. place: index of the logits among the graph's outputs; None: they are no output. whole: True if the logits
    are read, so that they must be made whole.
    """

    def __init__(self, ignored: int, dtype: torch.dtype | None, joined: int | None, place: int | None) -> None:
        super().__init__(ignored, dtype)
        self.joined, self.place, self.whole = joined, place, place is not None

    def forward(  # type: ignore[override]
        self, x: Tensor, weight: Tensor, bias: Tensor | None, classes: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the logits [..., V], or an empty tensor in their place, and the mean loss. x: [..., D]."""
        rows = x if self.joined is None else x.flatten(0, self.joined)
        if self.whole or not self.takes(rows, classes):
            logits = F.linear(x, weight, bias)
            return logits, super().forward(logits if self.joined is None else logits.flatten(0, self.joined), classes)
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            rows, weight, bias = rows.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
        return x.new_empty(0), self.of(rows, weight, bias, classes)


def chunked_loss(layer: nn.Module) -> int | None:
    """Compute in chunks every mean cross entropy of unweighted classes in a captured graph, with the linear layer
    before it if nothing else in the graph reads that layer's outputs. Returns the number of changed places; None if
    there are none.
    """
    if any(isinstance(part, _Loss) for part in layer.modules()):
        return 0
    if not isinstance(layer, fx.GraphModule) or hasattr(layer, "graphs"):
        return None  # a graph for each of several sizes, chosen at run time
    graph, count = copy.deepcopy(layer.graph), 0
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target is _ATEN.cross_entropy_loss.default:
            arguments = dict(zip(_NAMES, node.args, strict=False)) | node.kwargs
            if (
                arguments.get("weight") is None
                and arguments.get("reduction", 1) == 1
                and not arguments.get("label_smoothing")
            ):
                _replace(layer, graph, node, arguments, f"loss_{count}")
                count += 1
    if count:
        take_graph(layer, graph)
    return count or None


_NAMES = ("self", "target", "weight", "reduction", "ignore_index", "label_smoothing")


def _replace(module: fx.GraphModule, graph: fx.Graph, loss: fx.Node, arguments: Mapping[str, Any], name: str) -> None:
    ignored, classes = arguments.get("ignore_index", -100), arguments["target"]
    between, dtype, joins, last = [], None, [], arguments["self"]
    while last.op == "call_function" and len(last.users) == 1 and last.target in (*_JOINING, _ATEN.to.dtype):
        if last.target is _ATEN.to.dtype:
            dtype = dtype or last.args[1]
        else:
            joins.append(last)
        between.append(last)
        last = last.args[0]
    ends = next(node for node in graph.nodes if node.op == "output")
    linear = module.get_submodule(str(last.target)) if last.op == "call_module" else None
    with graph.inserting_before(loss):
        if (
            type(linear) is not nn.Linear
            or not {*last.users} <= {*between, loss, ends}
            or not all(_joined(join, linear) is not None for join in joins)
            or len(joins) > 1
        ):
            module.add_module(name, _Loss(ignored))
            loss.replace_all_uses_with(graph.call_module(name, (arguments["self"], classes)))
            graph.erase_node(loss)
            return
        outputs = tuple(ends.args[0]) if isinstance(ends.args[0], (tuple, list)) else ends.args
        joined, place = (_joined(join, linear) for join in joins), outputs.index(last) if last in outputs else None
        module.add_module(name, _LinearLoss(ignored, dtype, next(joined, None), place))
        held = [graph.get_attr(f"{last.target}.{part}") for part in ("weight", "bias")[: 1 + (linear.bias is not None)]]
        both = graph.call_module(name, (last.args[0], *held, *([None] * (2 - len(held))), classes))
        logits, mean_loss = (graph.call_function(operator.getitem, (both, place)) for place in (0, 1))
    loss.replace_all_uses_with(mean_loss)
    for node in (loss, *between):
        graph.erase_node(node)
    last.replace_all_uses_with(logits)
    graph.erase_node(last)


_JOINING = (_ATEN.view.default, _ATEN.reshape.default, _ATEN.flatten.using_ints)


def _joined(node: fx.Node, linear: nn.Linear) -> int | None:
    """Return the last of the logits' dimensions that an operator joins; None for another operator."""
    if node.target is not _ATEN.flatten.using_ints:
        sizes: Any = node.args[1]
        return -2 if len(sizes) == 2 and sizes[1] == linear.out_features else None
    dimensions: list[Any] = [0, -1]  # torch's defaults
    dimensions[: len(node.args) - 1] = node.args[1:]
    first, last = dimensions
    return last if first == 0 and last != -1 and isinstance(last, int) else None


def drop_unread_logits(
    layers: Sequence[nn.Module], writes: Sequence[Sequence[str]], readers: Mapping[Any, Sequence[int]]
) -> None:
    """Make logits chunk by chunk where neither layers nor the loss read them. Args: see `registry.drop_unread_work`."""
    for number, layer in enumerate(layers):
        for part in layer.children():
            if isinstance(part, _LinearLoss) and part.place is not None:
                part.whole = bool(readers.get((writes[number][part.place], number)))
