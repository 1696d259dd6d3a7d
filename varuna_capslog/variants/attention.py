"""Attention of projected queries, keys and values: eager, by torch's fused kernels, or a chunk of queries at a time.

A layer that holds one of these modules can be computed in each of the three ways (`registry`). The modules have no
parameters, so weights and checkpoints are the same for all. Results are equal up to rounding, but only without dropout:
each way drops other entries.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from varuna_capslog import accelerator

__all__ = [
    "AttentionCore",
    "ChunkedAttention",
    "EagerAttention",
    "SdpaAttention",
    "SdpaEfficientAttention",
    "SdpaFlashAttention",
    "SdpaMathAttention",
    "SplitKeysAttention",
    "attention_everywhere",
    "chunks",
    "merged",
    "put_in",
    "take_graph",
    "wide_type",
]


QUERIES = 256
"""Queries of one chunk: maps of [256, keys] are smaller than the layer's other tensors, but keep a device busy."""
KEYS = 1024
"""Keys of one chunk in `SplitKeysAttention`."""
_HALVES = (torch.bfloat16, torch.float16)


class AttentionCore(nn.Module):
    """softmax(q k^T / sqrt(D)) v for every head. rate: probability of dropping a map's entry in training."""

    def __init__(self, rate: float = 0.0) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, q: Tensor, k: Tensor, v: Tensor, padding: Tensor | None = None) -> Tensor:
        """Attend from q [B, H, T, D] to k, v [B, H, S, D]. padding: [B, S] bool, True where a key must not be seen.
        Returns [B, H, T, D].
        """
        bias = None if padding is None else _bias(padding, q.dtype)
        return self.attend(q, k, v, bias, 1 / math.sqrt(q.shape[-1]))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float) -> Tensor:
        """Return softmax(scale q k^T + bias) v. q, k, v: as in `forward`. bias: four dimensions that broadcast to
        [B, H, T, S], without a gradient.
        """
        raise NotImplementedError

    def of_block(self, q: Tensor, k: Tensor, v: Tensor, padding: Tensor) -> tuple[Tensor, Tensor]:
        """Return attention to one block of keys [B, H, T, D], and the log-sum-exp of its logits [B, H, T], for
        `merged`: 0 and minus infinity where all keys of the block are hidden. k, v, padding: those of the block.
        """
        nothing = padding.all(1)[:, None, None]
        # samples without a visible key are computed unmasked and zeroed afterwards: a softmax over no keys is NaN
        out, log_sums = self._with_sum(q, k, v, _bias(padding & ~nothing[:, 0], q.dtype), 1 / math.sqrt(q.shape[-1]))
        return out.masked_fill(nothing.unsqueeze(-1), 0.0), log_sums.masked_fill(nothing, -math.inf)

    def _with_sum(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Return the result of `attend`, and the log-sum-exp of each query's logits [B, H, T]."""
        return _in_chunks(q * scale, k, v, bias, self._how(q, max(k.shape[2], 1)))

    def _how(self, q: Tensor, keys: int) -> _How:
        """Return the settings for queries q [B, H, T, D] and chunks of `keys` keys."""
        return _How(self.rate if self.training else 0.0, QUERIES, keys, (q.shape[0], q.shape[1]))


def merged(outs: Sequence[Tensor], log_sums: Sequence[Tensor]) -> Tensor:
    """Return attention to all blocks of keys, from the results of `AttentionCore.of_block`, added in their order. The
    weight of block j is exp(s_j) / (the sum of exp(s) over all blocks), where s is a block's log-sum-exp. So a block in
    which a query sees no key has weight 0. A query that sees no key in any block gives NaN, as with a softmax.
    """
    largest = torch.stack([sum_of_block.detach() for sum_of_block in log_sums]).amax(0)
    shift = largest.masked_fill(largest == -math.inf, 0.0)  # any constant will do: it cancels
    weights = [(sum_of_block - shift).exp() for sum_of_block in log_sums]
    total, weighted = weights[0], outs[0] * weights[0].unsqueeze(-1)
    for out, weight in zip(outs[1:], weights[1:], strict=True):
        total, weighted = total + weight, weighted + out * weight.unsqueeze(-1)
    return (weighted / total.unsqueeze(-1)).to(outs[0].dtype)


class EagerAttention(AttentionCore):
    """Attention that computes whole [B * H, T, S] maps and keeps them for the backward, as `nn.MultiheadAttention` does
    with `need_weights`.
    """

    def attend(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float) -> Tensor:
        """See `AttentionCore`."""
        # One name for all three maps: a map is as large as all other tensors and must be freed when the next exists.
        maps = _all_logits(q, k, bias, scale)
        maps = maps.softmax(-1)
        maps = F.dropout(maps, self.rate, self.training)
        return torch.bmm(maps, v.flatten(0, 1)).unflatten(0, (q.shape[0], -1))

    def _with_sum(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        maps = _all_logits(q, k, bias, scale)
        maps, log_sums = _SoftmaxAndSum.apply(maps)
        maps = F.dropout(maps, self.rate, self.training)
        return tuple(tensor.unflatten(0, (q.shape[0], -1)) for tensor in (torch.bmm(maps, v.flatten(0, 1)), log_sums))


def _all_logits(q: Tensor, k: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    batch, heads = q.shape[:2]
    rows = None if bias is None else bias.expand(batch, heads, *bias.shape[2:]).flatten(0, 1)
    q, k = (q * scale).flatten(0, 1), k.flatten(0, 1).transpose(1, 2)
    return torch.bmm(q, k) if rows is None else torch.baddbmm(rows, q, k)


class _SoftmaxAndSum(torch.autograd.Function):
    """Softmax of logits [N, T, S] over S, and their log-sum-exp [N, T]. Saves only the softmax for the backward."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> tuple[Tensor, Tensor]:
        maps = logits.softmax(-1)
        ctx.save_for_backward(maps)
        if not logits.shape[-1]:
            return maps, logits.new_full(logits.shape[:-1], -math.inf, dtype=wide_type(maps))
        # the largest entry of a softmax is 1 / the sum of exp(logit - the largest)
        return maps, logits.amax(-1).to(wide_type(maps)) - maps.amax(-1).to(wide_type(maps)).log()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, of_maps: Tensor, of_log_sums: Tensor) -> Tensor:
        (maps,) = ctx.saved_tensors
        # the softmax's own backward, and that of the log-sum-exp, whose gradient is the softmax
        return torch._softmax_backward_data(of_maps, maps, -1, maps.dtype).addcmul_(
            maps, of_log_sums.to(maps).unsqueeze(-1)
        )


class SdpaAttention(AttentionCore):
    """Attention by torch's `scaled_dot_product_attention`. Fused kernels keep no map. kernels: allowed; (): all."""

    kernels: tuple[SDPBackend, ...] = ()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, padding: Tensor | None = None) -> Tensor:
        """See `AttentionCore`."""
        return self._attend(q, k, v, None if padding is None else ~padding[:, None, None, :], None)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float) -> Tensor:
        """See `AttentionCore`."""
        return self._attend(q, k, v, bias, scale)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
        rate = self.rate if self.training else 0.0
        with sdpa_kernel(list(self.kernels)) if self.kernels else nullcontext():
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=rate, scale=scale)


class SdpaMathAttention(SdpaAttention):
    """`SdpaAttention` by the math kernel, which keeps the maps."""

    kernels = (SDPBackend.MATH,)


class SdpaEfficientAttention(SdpaAttention):
    """`SdpaAttention` by the memory-efficient kernel, or the math kernel for devices and dtypes without it."""

    kernels = (SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)


class SdpaFlashAttention(SdpaAttention):
    """`SdpaAttention` by the flash kernel, or the math kernel for devices, dtypes and masks without it."""

    kernels = (SDPBackend.FLASH_ATTENTION, SDPBackend.MATH)


class ChunkedAttention(AttentionCore):
    """Attention with the maps of `queries` queries at a time. The backward recomputes each map, so that none is kept.

    A row of the map depends on one query alone, so every output is that of `EagerAttention`. The gradients of keys and
    values are sums over the chunks, first chunk first. With `keys` (None: all) a chunk takes that many keys at a time
    and merges the partial results: with the largest logit m so far and the sum l of exp(logit - m), the weight of each
    is exp(its m - the larger m). Both ideas: Rabe and Staats, "Self-attention Does Not Need O(n^2) Memory" (2021).
    """

    def __init__(self, rate: float = 0.0, queries: int = QUERIES, keys: int | None = None) -> None:
        super().__init__(rate)
        self.queries, self.keys = queries, keys

    def attend(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float) -> Tensor:
        """See `AttentionCore`."""
        if bias is not None and bias.requires_grad:
            raise RuntimeError("attention in chunks has no gradient of what is added to the logits")
        return _in_chunks(q * scale, k, v, bias, self._how(q, k.shape[2]))[0]

    def _how(self, q: Tensor, keys: int) -> _How:
        return replace(super()._how(q, keys), queries=self.queries, keys=keys if self.keys is None else self.keys)


class SplitKeysAttention(ChunkedAttention):
    """`ChunkedAttention` of `QUERIES` queries and `KEYS` keys at a time."""

    def __init__(self, rate: float = 0.0, queries: int = QUERIES, keys: int = KEYS) -> None:
        super().__init__(rate, queries, keys)


@dataclass(frozen=True)
class _How:
    """Settings of attention in chunks. rate: of dropout. queries, keys: their numbers per chunk. heads: (B, H)."""

    rate: float
    queries: int
    keys: int
    heads: tuple[int, int]


def _in_chunks(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, how: _How) -> tuple[Tensor, Tensor]:
    """Run `_InChunks` with samples and heads joined into one dimension, which is split again in the results."""
    out, log_sums = _InChunks.apply(*(tensor.flatten(0, 1) for tensor in (q, k, v)), bias, how)
    return out.unflatten(0, how.heads), log_sums.unflatten(0, how.heads)


class _InChunks(torch.autograd.Function):
    """Chunked attention of scaled queries q [N, T, D], keys and values [N, S, D] and the bias of the logits. N: samples
    times heads. Returns [N, T, D], and the log-sum-exp of the logits [N, T].
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, how: _How) -> tuple[Tensor, Tensor]:
        ctx.how, ctx.random = how, accelerator.random_state(q.device) if how.rate else None
        out = q.new_empty(*q.shape[:2], v.shape[-1])
        largest, sums = (q.new_empty(*q.shape[:2], 1, dtype=wide_type(q)) for _ in range(2))
        with torch.autocast(q.device.type, enabled=False):
            for rows in chunks(q.shape[1], how.queries):
                merging = _Merged(out[:, rows], largest[:, rows], sums[:, rows])
                for columns in chunks(k.shape[1], how.keys):
                    logits = _logits(q[:, rows], k[:, columns], bias, rows, columns, how.heads)
                    merging.add(logits, v[:, columns], how.rate)
                merging.finish()
        ctx.save_for_backward(q, k, v, bias, out, largest, sums)
        ctx.set_materialize_grads(False)
        return out, (sums.log() + largest).squeeze(-1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor | None, of_log_sums: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, bias, out, largest, sums = ctx.saved_tensors
        wide, how, parts = wide_type(q), ctx.how, chunks(k.shape[1], ctx.how.keys)
        gradient = torch.zeros_like(out) if gradient is None else gradient
        of_q, of_k, of_v = (torch.zeros_like(tensor, dtype=wide) for tensor in (q, k, v))
        drawn = _drawn_again(q.device, ctx.random) if how.rate else nullcontext()
        with torch.autocast(q.device.type, enabled=False), drawn:
            for rows in chunks(q.shape[1], how.queries):
                part, upper = q[:, rows], gradient[:, rows]
                # the row's sum of of_maps * maps over all keys
                of_row = (upper.to(wide) * out[:, rows].to(wide)).sum(-1, keepdim=True)
                for columns in parts:
                    maps = _logits(part, k[:, columns], bias, rows, columns, how.heads)
                    maps = maps.sub_(largest[:, rows]).exp_().div_(sums[:, rows])
                    of_maps = torch.bmm(upper, v[:, columns].transpose(1, 2)).to(wide)
                    dropped = maps
                    if how.rate:
                        kept = _kept(maps, how.rate)
                        of_maps *= kept
                        dropped = maps * kept
                    of_v[:, columns] += torch.bmm(dropped.to(v.dtype).transpose(1, 2), upper)
                    if len(parts) == 1:  # the same sum; its rounding cancels where one key outweighs all others
                        of_row = (of_maps * maps).sum(-1, keepdim=True)
                    # the softmax's own backward, and that of the log-sum-exp, whose gradient is the softmax
                    of_logits = of_maps.sub_(of_row if of_log_sums is None else of_row - of_log_sums[:, rows, None])
                    of_logits = of_logits.mul_(maps).to(k.dtype)
                    of_q[:, rows] += torch.bmm(of_logits, k[:, columns])
                    of_k[:, columns] += torch.bmm(of_logits.transpose(1, 2), part)
                    del maps, dropped, of_maps, of_logits  # before the next chunk's maps are made
        return of_q.to(q.dtype), of_k.to(k.dtype), of_v.to(v.dtype), None, None


class _Merged:
    """Accumulator of some rows of the output, one chunk of keys after the other. out: [N, rows, D], written by
    `finish`. largest, sums: [N, rows, 1], each row's largest logit, and the sum of exp(logit - largest logit). For rows
    without a visible key, outputs and gradients are NaN, as with a softmax.
    """

    def __init__(self, out: Tensor, largest: Tensor, sums: Tensor) -> None:
        self._out, self._largest, self._sums = out, largest.fill_(-math.inf), sums.zero_()
        self._total: Tensor | None = None

    def add(self, logits: Tensor, v: Tensor, rate: float) -> None:
        """Add a chunk of keys. logits: [N, rows, keys], overwritten. v: [N, keys, D]."""
        largest = torch.maximum(self._largest, logits.amax(-1, keepdim=True))
        shift = largest.masked_fill(largest == -math.inf, 0.0)  # no visible key so far
        maps = logits.sub_(shift).exp_()
        before = (self._largest - shift).exp_()
        self._sums.mul_(before).add_(maps.sum(-1, keepdim=True))
        self._largest.copy_(largest)
        if rate:
            maps *= _kept(maps, rate)
        new = torch.bmm(maps.to(v.dtype), v).to(maps.dtype)
        self._total = new if self._total is None else self._total.mul_(before).add_(new)

    def finish(self) -> None:
        """Write the output."""
        if self._total is None:  # there is no key
            self._out.zero_()
        else:
            self._out.copy_(self._total / self._sums)


def chunks(count: int, size: int) -> list[slice]:
    """Return slices of `count` elements, `size` in each but the last."""
    return [slice(begin, min(begin + size, count)) for begin in range(0, count, size)]


def wide_type(q: Tensor) -> torch.dtype:
    """Return the dtype for sums over a tensor: float32 for 16 bits, else the tensor's own."""
    return torch.float32 if q.dtype in _HALVES else q.dtype


def _bias(padding: Tensor, dtype: torch.dtype) -> Tensor:
    """Return [B, 1, 1, S]: minus infinity where a key must not be seen, else 0."""
    return torch.zeros_like(padding, dtype=dtype).masked_fill(padding, -math.inf)[:, None, None]


def _logits(
    part: Tensor, k: Tensor, bias: Tensor | None, rows: slice, columns: slice, heads: tuple[int, int]
) -> Tensor:
    """Return logits [N, rows, columns], float32 for 16-bit inputs."""
    logits = torch.bmm(part, k.transpose(1, 2)).to(wide_type(part))
    if bias is not None:
        bias_of_chunk = bias[
            :, :, rows if bias.shape[2] > 1 else slice(None), columns if bias.shape[3] > 1 else slice(None)
        ]
        logits.unflatten(0, heads).add_(bias_of_chunk)
    return logits


def _kept(maps: Tensor, rate: float) -> Tensor:
    """Return dropout factors of the entries: 0 for dropped entries."""
    return torch.empty_like(maps).bernoulli_(1 - rate).div_(max(1 - rate, torch.finfo(maps.dtype).tiny))


@contextmanager
def _drawn_again(device: torch.device, state: Tensor) -> Iterator[None]:
    """Use random numbers from this state on the device inside the block, and restore the present state afterwards."""
    present = accelerator.random_state(device)
    accelerator.set_random_state(device, state)
    try:
        yield
    finally:
        accelerator.set_random_state(device, present)


def put_in(layer: nn.Module, kind: type[AttentionCore]) -> int | None:
    """Replace a layer's attention modules by this kind. Returns the number of changes; None without such modules."""
    places = [
        (module, name, child)
        for module in layer.modules()
        for name, child in module.named_children()
        if isinstance(child, AttentionCore)
    ]
    others = [place for place in places if type(place[2]) is not kind]
    for module, name, child in others:
        setattr(module, name, kind(child.rate).train(child.training))
    return len(others) if places else None


# -- Attention in the graphs of captured models: replaces the eager attention of transformers.
#
# The pattern of nodes is softmax(scale * (q @ k transposed) + mask) @ v. The softmax may be converted to another dtype
# and followed by dropout. These nodes become one call of an `AttentionCore`. Variants call `attention_everywhere`.


_ATEN = torch.ops.aten
_SCALED = {_ATEN.mul.Tensor: 1, _ATEN.div.Tensor: -1}
"""Operators that scale the logits by a number, and the exponent of that number."""


@dataclass(frozen=True)
class _Attention:
    """Match of the pattern in a graph. nodes: in graph order; the last node is the product with the values."""

    q: fx.Node
    k: fx.Node
    v: fx.Node
    bias: fx.Node | None
    scale: float
    rate: float
    nodes: tuple[fx.Node, ...]


class _Attend(nn.Module):
    """Module that the graph calls for attention. core: computes the attention. scale: factor of the logits."""

    def __init__(self, core: AttentionCore, scale: float) -> None:
        super().__init__()
        self.core, self.scale = core, scale

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """See `AttentionCore.attend`."""
        if bias is not None:
            bias = bias.to(q.dtype).reshape((1,) * (q.dim() - bias.dim()) + bias.shape)
        return self.core.attend(q, k, v, bias, self.scale)


def attention_everywhere(layer: nn.Module, kind: type[AttentionCore]) -> int | None:
    """Compute all attention inside a layer by this kind: modules (`put_in`), and patterns in captured graphs. Returns
    the number of changed places; None if there are none.
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
    """Make the module run this graph; its attributes, parameters and their order stay."""
    # copies of a module share one class, which holds the graph's code, so this module gets a class of its own
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
    """Return True if the node swaps the last two of four dimensions."""
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
