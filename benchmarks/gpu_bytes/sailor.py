"""Compares predicted bytes of ranks of Sailor's runs (Megatron-DeepSpeed on GH200s and RTX cards) with nvidia-smi's.

A rank's stage is written here in plain torch, as one shard of tensor parallelism without its messages, and its 1F1B
order runs on fake tensors; the README gives the sources.
"""

from __future__ import annotations

import functools
import json
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from following import follow, summary
from torch import Tensor, nn
from torch.nn import functional as F

from varuna_capslog.profiling.estimation.allocator import Event, replay
from varuna_capslog.profiling.estimation.headroom import COMMUNICATOR_BYTES, context_bytes
from varuna_capslog.profiling.estimation.lifetimes import Lifetimes

__all__ = ["compare_plans", "compare_saved"]

VOCABULARY = 50257
_aten = torch.ops.aten


@dataclass(frozen=True)
class Architecture:
    """Architecture of a model of the runs.

    Attributes:
        relu: ReLU as in OPT; else GELU, with a dropout after attention and feed-forward.
        lean_norms: norms whose backward reads their output, so that their input is not kept (apex).
        head: logits of the vocabulary follow the last block; GPT-Neo's loss reads the hidden states.
    """

    hidden: int
    heads: int
    ffn: int
    sequence: int
    relu: bool
    lean_norms: bool
    head: bool


ARCHITECTURES = {
    "OPT-350": Architecture(1024, 16, 4096, 2048, True, True, True),
    "OPT-30": Architecture(7168, 56, 28672, 2048, True, True, True),
    "GPT-Neo-2.7": Architecture(2560, 20, 10240, 2048, False, False, False),
}
CARDS = {"GH-96": "gh200-96gb", "RTX-3090": "rtx3090", "Titan-RTX": "titan-rtx", "RTX-2080": "rtx2080"}


class _LeanNorm(torch.autograd.Function):
    """A layer norm that keeps its output."""

    @staticmethod
    def forward(context: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        y, _, scale = torch.native_layer_norm(x, x.shape[-1:], weight, bias, 1e-5)
        context.save_for_backward(y, scale, weight, bias)
        return y

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Any:
        y, scale, weight, bias = context.saved_tensors
        return _aten.native_layer_norm_backward(
            gradient, y, y.shape[-1:], scale, scale, weight, bias, [True, True, True]
        )


class _ShardLoss(torch.autograd.Function):
    """Cross entropy over a shard of the vocabulary; it keeps the softmax and computes the gradient in place."""

    @staticmethod
    def forward(context: Any, logits: Tensor) -> Tensor:
        shifted = logits - logits.max(dim=-1)[0].unsqueeze(-1)
        softmax = shifted.exp_()
        softmax.div_(softmax.sum(dim=-1).unsqueeze(-1))
        context.save_for_backward(softmax)
        return softmax[..., 0].log().neg().mean()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        (softmax,) = context.saved_tensors
        return softmax.view(-1, softmax.shape[-1]).mul_(gradient).view_as(softmax)


class _Norm(nn.Module):
    def __init__(self, width: int, lean: bool) -> None:
        super().__init__()
        self.weight, self.bias, self.lean = nn.Parameter(torch.empty(width)), nn.Parameter(torch.empty(width)), lean

    def forward(self, x: Tensor) -> Tensor:
        if self.lean:
            kept: Tensor = _LeanNorm.apply(x, self.weight, self.bias)
            return kept
        return F.layer_norm(x, x.shape[-1:], self.weight, self.bias)


class Block(nn.Module):
    """Shard of a block on [tokens, batch, width], as in Megatron. All blocks share the mask of the scores."""

    def __init__(self, size: Architecture, shards: int) -> None:
        super().__init__()
        self.size, self.heads = size, size.heads // shards
        width = size.hidden // shards
        self.norm1, self.norm2 = _Norm(size.hidden, size.lean_norms), _Norm(size.hidden, size.lean_norms)
        self.qkv = nn.Linear(size.hidden, 3 * width)
        self.out, self.out_bias = nn.Linear(width, size.hidden, bias=False), nn.Parameter(torch.empty(size.hidden))
        self.up = nn.Linear(size.hidden, size.ffn // shards, bias=False)
        self.up_bias = nn.Parameter(torch.empty(size.ffn // shards))
        self.down, self.down_bias = (
            nn.Linear(size.ffn // shards, size.hidden, bias=False),
            nn.Parameter(torch.empty(size.hidden)),
        )
        self.register_buffer("mask", None)

    def forward(self, x: Tensor) -> Tensor:
        length, batch, _ = x.shape
        mixed = self.qkv(self.norm1(x)).view(length, batch * self.heads, -1)
        query, key, value = mixed.chunk(3, dim=-1)
        scores = x.new_empty(batch * self.heads, length, length)
        scores = torch.baddbmm(
            scores, query.transpose(0, 1), key.transpose(0, 1).transpose(1, 2), beta=0.0, alpha=query.shape[-1] ** -0.5
        )
        if self.mask is not None:
            scores = scores.masked_fill_(self.mask, -1e4)
        weights = torch.softmax(scores, dim=-1)
        del scores
        read = torch.bmm(weights, value.transpose(0, 1))
        read = read.view(batch, self.heads, length, -1).permute(2, 0, 1, 3).contiguous().view(length, batch, -1)
        attended = self._dropped(self.out(read))
        x = x + attended
        del attended, read
        inner = self.up(self.norm2(x))
        inner = F.relu(inner) if self.size.relu else F.gelu(inner)
        return x + self._dropped(self.down(inner))

    def _dropped(self, x: Tensor) -> Tensor:
        return x if self.size.relu else F.dropout(x, 0.1)


class Embedding(nn.Module):
    """Shard of the word embeddings, and position embeddings."""

    def __init__(self, size: Architecture, shards: int) -> None:
        super().__init__()
        self.words = nn.Embedding(_words(shards), size.hidden)
        self.positions = nn.Embedding(size.sequence, size.hidden)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.zeros_like(tokens)
        return (self.words(tokens) + self.positions(places)).transpose(0, 1).contiguous()


class Head(nn.Module):
    """Logits of a shard of the vocabulary; for a model without a head, the hidden states that the loss reads."""

    def __init__(self, size: Architecture, shards: int) -> None:
        super().__init__()
        self.norm = None if size.head else _Norm(size.hidden, True)
        self.project = nn.Linear(size.hidden, _words(shards), bias=False) if size.head else None

    def forward(self, x: Tensor) -> Tensor:
        if self.norm is not None:
            x = self.norm(x)
        return x if self.project is None else self.project(x)


def _words(shards: int) -> int:
    """Return the words of a shard; the vocabulary is padded to a multiple of 128 for every shard."""
    return -(-VOCABULARY // (128 * shards)) * 128


@dataclass(frozen=True)
class Rank:
    """Rank of a plan.

    Attributes:
        in_flight: forwards of its stage before the first backward.
        replicated: gradients are averaged over replicas, in one flat copy.
    """

    model: str
    shards: int
    microbatch: int
    blocks: int
    first: bool
    last: bool
    in_flight: int
    replicated: bool
    microbatches: int

    @property
    def size(self) -> Architecture:
        return ARCHITECTURES[self.model]

    def stage(self) -> nn.Sequential:
        """Return the rank's stage on meta tensors."""
        with torch.device("meta"):
            layers: list[nn.Module] = [Embedding(self.size, self.shards)] if self.first else []
            layers += [Block(self.size, self.shards) for _ in range(self.blocks)]
            return nn.Sequential(*layers, *([Head(self.size, self.shards)] if self.last else []))

    def parameter_bytes(self) -> int:
        """Return the bytes of this shard's parameters in float32."""
        return sum(4 * parameter.numel() for parameter in self.stage().parameters())


class _Training:
    """1F1B steps of a rank that keeps tensors as DeepSpeed's pipeline does.

    A message between stages is a shard of the tensor. A sent output is freed except for its shard, the last stage
    keeps the outputs of two microbatches, and gradients are dropped after the update.
    """

    def __init__(self, rank: Rank, model: nn.Module) -> None:
        self.rank, self.model, self.parameters = rank, model, list(model.parameters())
        self.mask = torch.zeros(1, rank.size.sequence, rank.size.sequence, dtype=torch.bool)
        for module in model.modules():
            if isinstance(module, Block):
                module.mask = self.mask
        shard = self._whole_size() // rank.shards
        self.received = [torch.empty(shard) for end in (rank.first, rank.last) if not end]
        self.waiting: list[tuple[Tensor, Tensor, Tensor]] = []
        self.kept: deque[Tensor] = deque(maxlen=max(2, rank.in_flight))
        self.moments: list[Tensor] = []

    def step(self) -> None:
        rank = self.rank
        count = min(rank.microbatches, rank.in_flight + 2)
        for number in range(count + rank.in_flight):
            if number >= rank.in_flight and self.waiting:
                self._backward(*self.waiting.pop(0))
            if number < count:
                self._forward()
        if rank.replicated:
            flat = torch.cat([parameter.grad.view(-1) for parameter in self.parameters if parameter.grad is not None])
            del flat
        if not self.moments:
            self.moments = [torch.empty_like(parameter) for parameter in self.parameters for _ in range(2)]
        for parameter in self.parameters:
            parameter.grad = None

    def _forward(self) -> None:
        rank, size = self.rank, self.rank.size
        if rank.first:
            inputs = torch.zeros(rank.microbatch, size.sequence, dtype=torch.long)
        else:
            inputs = torch.empty(size.sequence, rank.microbatch, size.hidden, requires_grad=True)
        output = self.model(inputs)
        if rank.last:
            self.kept.append(output)
            self.waiting.append((inputs, _ShardLoss.apply(output), output))
            return
        sent = output.detach().view(-1)[: output.numel() // rank.shards].clone()
        output.data = torch.zeros(1)
        self.waiting.append((inputs, output, sent))

    def _backward(self, inputs: Tensor, output: Tensor, sent: Tensor) -> None:
        if self.rank.last:
            output.backward()
            return
        gradient = torch.empty(self.rank.size.sequence, self.rank.microbatch, self.rank.size.hidden)
        output.data = gradient
        torch.autograd.backward(output, gradient)

    def _whole_size(self) -> int:
        return self.rank.size.sequence * self.rank.microbatch * self.rank.size.hidden


def _train(rank: Rank, model: nn.Module, followed: object) -> None:
    """Run two steps, so that the second has the optimizer's moments."""
    training = _Training(rank, model)
    for _ in range(2):
        training.step()


@functools.cache
def _events(rank: Rank, gpu: str) -> list[Event]:
    return follow(
        lambda: rank.stage().to_empty(device="cpu"), functools.partial(_train, rank), gpu, keeps_cublaslt=False
    )


@dataclass(frozen=True)
class Parts:
    """Bytes of a rank, which add up to those of the device.

    Attributes:
        weights: parameters, gradients and two moments: 16 bytes a parameter.
        activations: rest of the allocator's peak: graphs in flight, kernels' and messages' memory.
        gaps: reserved bytes beyond the peak.
        context: `headroom.context_bytes`.
        communicators: number of communicators; each takes `headroom.COMMUNICATOR_BYTES`.
    """

    weights: int
    activations: int
    gaps: int
    context: int
    communicators: int

    def total(self, each: float = COMMUNICATOR_BYTES) -> float:
        """Return the bytes of the device, with `each` bytes for a communicator."""
        return self.weights + self.activations + self.gaps + self.context + self.communicators * each


def _parts(rank: Rank, card: str, stages: int) -> Parts:
    peaks = replay(_events(rank, card))
    weights = 4 * rank.parameter_bytes()
    return Parts(
        weights,
        peaks.allocated_bytes - weights,
        peaks.reserved_bytes - peaks.allocated_bytes,
        context_bytes(card),
        _communicators(rank, stages),
    )


def _communicators(rank: Rank, stages: int) -> int:
    """Return the number of communicators of a rank: groups that carry a message, as in DeepSpeed's pipeline.

    These are the world's (barriers), Megatron's for the shards, DeepSpeed's of a whole replica (counting parameters)
    and of a stage's replicas (the first weights, even of one). Several stages add DeepSpeed's for the shards, the
    pipeline's (the loss), and one for each neighbour, as torch opens a separate pair for its sends.
    """
    neighbours = (not rank.first) + (not rank.last)
    return 4 + 2 * (stages > 1) + neighbours


def _ranks(row: dict[str, Any]) -> list[tuple[Rank, str]]:
    """Return a rank of each stage and card of a plan, with the kind of GPU."""
    stages, ranks = row["stages"], []
    microbatches = row["gbs"] // (row["mbs"] * row["dp"])
    for number, stage in enumerate(stages):
        first, last = number == 0, number == len(stages) - 1
        for card, shards in sorted({tuple(gpu) for gpu in stage["gpus"]}):
            rank = Rank(
                row["model"],
                shards,
                row["mbs"],
                stage["layers"] - first - last,
                first,
                last,
                min(len(stages) - number, microbatches),
                row["dp"] > 1,
                microbatches,
            )
            ranks.append((rank, CARDS[card]))
    return ranks


def compare_plans(folder: Path) -> list[dict[str, Any]]:
    """Print the largest rank of every plan, part by part, and the bytes that remain for NCCL, by cluster."""
    print(
        "| plan | tp | 16 B x params | activations | gaps | context | NCCL | sum | nvidia-smi | error | left for each |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    by_cluster: dict[str, list[tuple[Parts, int]]] = {}
    results, printed = [], _printed_saved(folder)
    for row in _read(folder):
        if row["kind"] != "plan":
            continue
        measured = row["max_device_used_bytes"]
        parts, rank = max(
            ((_parts(rank, card, row["pp"]), rank) for rank, card in _ranks(row)), key=lambda pair: pair[0].total()
        )
        layers = sum(stage["layers"] for stage in row["stages"])
        name = f"{row['model']}, {layers} layers, {row['cluster']}, pp {row['pp']}, dp {row['dp']}, mbs {row['mbs']}"
        messages = parts.communicators * COMMUNICATOR_BYTES
        cells = (parts.weights, parts.activations, parts.gaps, parts.context, messages, parts.total(), measured)
        numbers = " | ".join(f"{value / 1e9:.2f}" for value in cells)
        remainder = (measured - parts.total(0)) / parts.communicators
        error = parts.total() / measured - 1
        least = max(_least(rank, printed) for rank, _ in _ranks(row))
        mark = "*" if least > measured else ""
        print(f"| {name}{mark} | {rank.shards} | {numbers} | {error:+.1%} | {remainder / 1e9:.2f} |", flush=True)
        if not mark:
            by_cluster.setdefault(row["cluster"], []).append((parts, measured))
        results.append({"plan": name, "parts": parts.__dict__, "measured": measured, "least": least})
    print(f"all: {summary([_error(row) for row in results])}")
    print("* by the printed saved bytes and 16 B a parameter alone the largest rank has more than was printed")
    possible = [row for row in results if row["least"] <= row["measured"]]
    print(f"without these: {summary([_error(row) for row in possible])}")
    for cluster, rows in by_cluster.items():
        each = statistics.median((measured - parts.total(0)) / parts.communicators for parts, measured in rows)
        print(f"{cluster}: {summary([parts.total() / measured - 1 for parts, measured in rows])}")
        fitted = summary([parts.total(each) / measured - 1 for parts, measured in rows])
        print(f"{cluster}, {each / 1e9:.2f} GB a communicator, the median of what is left: {fitted}")
    return results


def _error(row: dict[str, Any]) -> float:
    return float(Parts(**row["parts"]).total() / row["measured"] - 1)


def _printed_saved(folder: Path) -> dict[tuple[str, int], int]:
    """Return the bytes that a block saves for a microbatch of one sequence, by model and shards."""
    rows = [row for row in _read(folder) if row["kind"] == "layer bytes" and row["layer"] == "block"]
    return {(row["model"], row["tp"]): row["saved_bytes"] for row in rows}


def _least(rank: Rank, printed: dict[tuple[str, int], int]) -> int:
    """Return the least bytes of a rank: 16 bytes a parameter, and the printed bytes of its blocks' graphs in flight."""
    return (
        4 * rank.parameter_bytes() + rank.blocks * rank.microbatch * rank.in_flight * printed[rank.model, rank.shards]
    )


def compare_saved(folder: Path) -> list[dict[str, Any]]:
    """Print the bytes that a forward of a block saves, estimated and printed by others; return the rows."""
    print("| block | tp | estimated MB | printed MB | error |\n|---|---|---|---|---|")
    results = []
    for row in _read(folder):
        if row["kind"] != "layer bytes" or row["layer"] != "block" or row["model"] not in ARCHITECTURES:
            continue
        rank = Rank(row["model"], row["tp"], row["mbs"], 1, False, False, 1, False, 1)
        saved = _saved(rank)
        error = saved / row["saved_bytes"] - 1
        print(
            f"| {row['model']} | {row['tp']} | {saved / 1e6:.1f} | {row['saved_bytes'] / 1e6:.1f} | {error:+.2%} |",
            flush=True,
        )
        results.append({"model": row["model"], "tp": row["tp"], "saved": saved, "measured": row["saved_bytes"]})
    print(summary([row["saved"] / row["measured"] - 1 for row in results]))
    return results


def _saved(rank: Rank) -> int:
    """Return the bytes that a forward saves, including its output but not its input."""
    saved: list[int] = []

    def loop(model: nn.Module, followed: Lifetimes) -> None:
        inputs = torch.empty(rank.size.sequence, rank.microbatch, rank.size.hidden, requires_grad=True)
        model[0].mask = torch.zeros(1, rank.size.sequence, rank.size.sequence, dtype=torch.bool)
        for _ in range(2):  # the first product takes a workspace that stays
            before = followed.live_bytes
            output = model(inputs)
            saved.append(followed.live_bytes - before)
            del output

    follow(lambda: rank.stage().to_empty(device="cpu"), loop, "a100-80gb", keeps_cublaslt=False)
    return saved[-1]


def _read(folder: Path) -> Sequence[dict[str, Any]]:
    rows: Sequence[dict[str, Any]] = json.loads((folder / "gpu-truth" / "sailor-layers-fit.json").read_text())["rows"]
    return rows
