"""Cross entropy of many classes some rows at a time, of logits that are there, or of logits that never are all at once.

Plain cross entropy of logits [N, V] holds them, their log-softmax and two gradients, each [N, V]. Of these are left the
logits and one gradient (`chunked_cross_entropy`, a loss that configs may name), or neither: the variant `chunked-loss`
takes the last linear layer of a captured model into the loss, where nothing else reads its logits.
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

from varuna_capslog.variants.attention import chunks, wide_type
from varuna_capslog.variants.captured import take_graph

__all__ = ["ROWS", "chunked_cross_entropy", "chunked_loss", "leave_logits"]

ROWS = 256
"""Of one chunk: so many rows of logits are small beside all of them, and fill a device."""
_ATEN = torch.ops.aten


def chunked_cross_entropy(logits: Tensor, classes: Tensor, ignored: int = -100, rows: int = ROWS) -> Tensor:
    """As `torch.nn.functional.cross_entropy`: the mean over the rows that count; float32 where logits have 16 bits.

    It keeps the logits and one number for each row; the backward takes the softmax again, a chunk at a time, and writes
    it into the gradient.

    Args:
        logits: [N, V].
        classes: [N], whole numbers.
        ignored: rows of this class do not count; the mean of no row is no number, and its gradient is zero.
        rows: of one chunk.
    """
    found: Tensor = _Chunked.apply(logits, None, None, classes, _Rows(ignored, rows, wide_type(logits)))
    return found


@dataclass(frozen=True)
class _Rows:
    """ignored, rows: as above. dtype: in which a chunk is worked on."""

    ignored: int
    rows: int
    dtype: torch.dtype


class _Chunked(torch.autograd.Function):
    """Of x [N, D], weight [V, D] and bias [V], whose logits are made a chunk at a time; or of logits x, without these.

    A chunk's logits are made again in the backward, as those of `attention.ChunkedAttention` are.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, classes: Tensor, how: _Rows) -> Tensor:
        counts = classes != how.ignored
        seen, own = (x.new_zeros(x.shape[0], dtype=how.dtype) for _ in range(2))
        with torch.autocast(x.device.type, enabled=False):
            for rows in chunks(x.shape[0], how.rows):
                logits = _logits(x[rows], weight, bias).to(how.dtype)
                own[rows] = logits.gather(1, _column(classes[rows], counts[rows])).squeeze(1)
                most = logits.amax(-1, keepdim=True)
                # not logsumexp, which copies them
                maps = logits.sub(most) if _is_given(x, weight, how) else logits.sub_(most)
                seen[rows] = maps.exp_().sum(-1).log_().add_(most.squeeze(1))
                del logits, maps  # before the next chunk's are made
        ctx.how = how
        ctx.save_for_backward(x, weight, bias, classes, seen)
        return (seen - own).masked_fill_(~counts, 0.0).sum() / counts.sum()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upper: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, classes, seen = ctx.saved_tensors
        how, counts = ctx.how, classes != ctx.how.ignored
        # of a row: its part of the mean, or nothing
        factor = torch.where(counts, upper.to(how.dtype) / counts.sum(), 0.0)[:, None]
        of_x = torch.empty_like(x)
        of_weight, of_bias = (
            torch.zeros_like(one, dtype=wide_type(one)) if wanted else None
            for one, wanted in ((weight, ctx.needs_input_grad[1]), (bias, ctx.needs_input_grad[2]))
        )
        with torch.autocast(x.device.type, enabled=False):
            for rows in chunks(x.shape[0], how.rows):
                if _is_given(x, weight, how):  # the gradient is made in its place
                    maps = torch.sub(x[rows], seen[rows, None], out=of_x[rows])
                else:
                    maps = _logits(x[rows], weight, bias).to(how.dtype).sub_(seen[rows, None])
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
    """Whether the logits of a chunk are a part of x."""
    return weight is None and x.dtype == how.dtype


def _column(classes: Tensor, counts: Tensor) -> Tensor:
    """[rows, 1]: the class of each row, any for those that do not count."""
    return torch.where(counts, classes, 0)[:, None]


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    else:
        total += torch.mm(left, right)


def _as(found: Tensor | None, like: Tensor | None) -> Tensor | None:
    return None if found is None or like is None else found.to(like.dtype)


# -- in the graphs of captured models


class _Loss(nn.Module):
    """A loss of logits [N, V] and classes [N]; of others, such as probabilities, the plain one.

    ignored: see `chunked_cross_entropy`. dtype: that the graph converts logits to before; None: none.
    """

    def __init__(self, ignored: int, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.ignored, self.dtype = ignored, dtype

    def forward(self, logits: Tensor, classes: Tensor) -> Tensor:
        """Returns the mean loss."""
        if self.takes(logits, classes):
            return self.of(logits, None, None, classes)
        logits = logits if self.dtype is None else logits.to(self.dtype)
        return F.cross_entropy(logits, classes, ignore_index=self.ignored)

    @staticmethod
    def takes(logits: Tensor, classes: Tensor) -> bool:
        """Whether it is one class for each row."""
        return logits.dim() == 2 and classes.dim() == 1 and not classes.is_floating_point()

    def of(self, x: Tensor, weight: Tensor | None, bias: Tensor | None, classes: Tensor) -> Tensor:
        """See `_Chunked`."""
        found: Tensor = _Chunked.apply(x, weight, bias, classes, _Rows(self.ignored, ROWS, self.dtype or wide_type(x)))
        return found


class _LinearLoss(_Loss):
    """A linear layer and the loss of its logits.

    Attributes:
        joined: the last of the dimensions that the graph makes one, of rows; None: it leaves logits as they are.
        place: of the logits among what the graph gives; None: they stay inside.
        whole: somebody reads them, so that they are made.
    """

    def __init__(self, ignored: int, dtype: torch.dtype | None, joined: int | None, place: int | None) -> None:
        super().__init__(ignored, dtype)
        self.joined, self.place, self.whole = joined, place, place is not None

    def forward(  # type: ignore[override]
        self, x: Tensor, weight: Tensor, bias: Tensor | None, classes: Tensor
    ) -> tuple[Tensor, Tensor]:
        """x: [..., D]. Returns the logits [..., V], or nothing in their place, and the mean loss."""
        rows = x if self.joined is None else x.flatten(0, self.joined)
        if self.whole or not self.takes(rows, classes):
            logits = F.linear(x, weight, bias)
            return logits, super().forward(logits if self.joined is None else logits.flatten(0, self.joined), classes)
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            rows, weight, bias = rows.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
        return x.new_empty(0), self.of(rows, weight, bias, classes)


def chunked_loss(layer: nn.Module) -> int | None:
    """Every cross entropy in a captured graph goes in chunks, with the linear layer before it where that has no other
    reader inside the graph; the mean of unweighted classes, that is.

    Returns how many places it changed, None if there are none.
    """
    if any(isinstance(one, _Loss) for one in layer.modules()):
        return 0
    if not isinstance(layer, fx.GraphModule) or hasattr(layer, "graphs"):
        return None  # a graph for each of several sizes, which are chosen among when it runs
    graph, count = copy.deepcopy(layer.graph), 0
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target is _ATEN.cross_entropy_loss.default:
            given = dict(zip(_NAMES, node.args, strict=False)) | node.kwargs
            if given.get("weight") is None and given.get("reduction", 1) == 1 and not given.get("label_smoothing"):
                _replace(layer, graph, node, given, f"loss_{count}")
                count += 1
    if count:
        take_graph(layer, graph)
    return count or None


_NAMES = ("self", "target", "weight", "reduction", "ignore_index", "label_smoothing")


def _replace(module: fx.GraphModule, graph: fx.Graph, loss: fx.Node, given: Mapping[str, Any], name: str) -> None:
    ignored, classes = given.get("ignore_index", -100), given["target"]
    between, dtype, joins, last = [], None, [], given["self"]
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
            or not all(_joined(one, linear) is not None for one in joins)
            or len(joins) > 1
        ):
            module.add_module(name, _Loss(ignored))
            loss.replace_all_uses_with(graph.call_module(name, (given["self"], classes)))
            graph.erase_node(loss)
            return
        outputs = tuple(ends.args[0]) if isinstance(ends.args[0], (tuple, list)) else ends.args
        joined, place = (_joined(one, linear) for one in joins), outputs.index(last) if last in outputs else None
        module.add_module(name, _LinearLoss(ignored, dtype, next(joined, None), place))
        held = [graph.get_attr(f"{last.target}.{part}") for part in ("weight", "bias")[: 1 + (linear.bias is not None)]]
        both = graph.call_module(name, (last.args[0], *held, *([None] * (2 - len(held))), classes))
        logits, found = (graph.call_function(operator.getitem, (both, place)) for place in (0, 1))
    loss.replace_all_uses_with(found)
    for node in (loss, *between):
        graph.erase_node(node)
    last.replace_all_uses_with(logits)
    graph.erase_node(last)


_JOINING = (_ATEN.view.default, _ATEN.reshape.default, _ATEN.flatten.using_ints)


def _joined(node: fx.Node, linear: nn.Linear) -> int | None:
    """The last of the dimensions of logits that an operator makes one; None where it does something else."""
    if node.target is not _ATEN.flatten.using_ints:
        sizes: Any = node.args[1]
        return -2 if len(sizes) == 2 and sizes[1] == linear.out_features else None
    dimensions: list[Any] = [0, -1]  # torch's defaults
    dimensions[: len(node.args) - 1] = node.args[1:]
    first, last = dimensions
    return last if first == 0 and last != -1 and isinstance(last, int) else None


def leave_logits(
    layers: Sequence[nn.Module], writes: Sequence[Sequence[str]], readers: Mapping[Any, Sequence[int]]
) -> None:
    """Makes logits a chunk at a time where neither a layer nor the loss of the chain reads them.

    Args as of `registry.tell_readers`.
    """
    for number, layer in enumerate(layers):
        for one in layer.children():
            if isinstance(one, _LinearLoss) and one.place is not None:
                one.whole = bool(readers.get((writes[number][one.place], number)))
