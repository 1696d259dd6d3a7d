"""Shared code of the engine's benchmarks: a transformer as a chain, ranks on this machine, interleaved timing, JSON.

The scripts in the folders beside this file import it; it measures nothing itself.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import platform
import queue
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

sys.path.append(str(Path(__file__).parents[1]))  # behind PYTHONPATH, which may name another checkout

from tests.planning.asking import judged_layerwise_plan, layerwise_plan, plan
from varuna_capslog.engine.communicator import connect
from varuna_capslog.engine.pipeline import PipelineEngine
from varuna_capslog.engine.step import train_step
from varuna_capslog.model.chain import Chain, Layer, TensorSpec
from varuna_capslog.model.workload import Minibatch

__all__ = [
    "Sleeping",
    "TransformerSize",
    "beside_play",
    "captured_chain",
    "interleave",
    "judged_layerwise_plan",
    "layerwise_plan",
    "machine",
    "mean_loss",
    "median_ratio",
    "plan",
    "run_ranks",
    "stepping",
    "token_loss",
    "token_minibatch",
    "trained_peaks",
    "transformer_chain",
    "write_json",
]


@dataclass(frozen=True)
class TransformerSize:
    """A decoder-only transformer and its minibatch; every microbatch has the same shape."""

    blocks: int
    dim: int
    sequence: int
    microbatch_size: int
    num_microbatches: int = 8
    heads: int = 4
    vocabulary: int = 512

    def __str__(self) -> str:
        return (
            f"{self.blocks} blocks, d={self.dim}, T={self.sequence}, microbatch {self.microbatch_size} x "
            f"{self.num_microbatches}"
        )


class Embedding(nn.Module):
    """Maps tokens [B, T] to vectors [B, T, D] and adds positions."""

    def __init__(self, size: TransformerSize) -> None:
        super().__init__()
        self.tokens = nn.Embedding(size.vocabulary, size.dim)
        self.positions = nn.Parameter(torch.randn(size.sequence, size.dim) * 0.02)

    def forward(self, x: Tensor) -> Tensor:
        return self.tokens(x) + self.positions


class Block(nn.Module):
    """Pre-norm causal self-attention and a feed-forward of four times the width."""

    def __init__(self, size: TransformerSize) -> None:
        super().__init__()
        self.heads = size.heads
        self.norm1, self.norm2 = nn.LayerNorm(size.dim), nn.LayerNorm(size.dim)
        self.qkv, self.out = nn.Linear(size.dim, 3 * size.dim), nn.Linear(size.dim, size.dim)
        self.up, self.down = nn.Linear(size.dim, 4 * size.dim), nn.Linear(4 * size.dim, size.dim)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, dim // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, dim))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Head(nn.Module):
    """Maps vectors [B, T, D] to logits [B, T, vocabulary]."""

    def __init__(self, size: TransformerSize) -> None:
        super().__init__()
        self.norm, self.project = nn.LayerNorm(size.dim), nn.Linear(size.dim, size.vocabulary)

    def forward(self, x: Tensor) -> Tensor:
        return self.project(self.norm(x))


def transformer_chain(size: TransformerSize) -> Chain:
    """Return a chain of `blocks + 2` layers of one tensor each; the same size has the same weights."""
    torch.manual_seed(0)
    blocks = [Layer(f"block.{index}", Block(size)) for index in range(size.blocks)]
    return Chain([Layer("embedding", Embedding(size)), *blocks, Layer("head", Head(size))], name="transformer")


class _Whole(nn.Module):
    """Module that runs layers of one tensor one after the other, for a capture."""

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def captured_chain(size: TransformerSize) -> Chain:
    """Return the model of `transformer_chain` as the library captures it. Only captured layers have functions."""
    _, tokens, _ = token_minibatch(size)
    whole = _Whole(layer.module for layer in transformer_chain(size).layers)
    return Chain.from_module(whole.train(), None, {"x": tokens[0]})


def token_minibatch(size: TransformerSize) -> tuple[Minibatch, list[Tensor], list[Tensor]]:
    """Return a minibatch, its microbatches' tokens and their targets (both [B, T])."""
    generator = torch.Generator().manual_seed(1)
    shape = (size.num_microbatches, size.microbatch_size, size.sequence)
    tokens = list(torch.randint(size.vocabulary, shape, generator=generator))
    targets = list(torch.randint(size.vocabulary, shape, generator=generator))
    specs = [{"x": TensorSpec.of(microbatch)} for microbatch in tokens]
    return Minibatch(specs, targets, {"tokens": float(sum(target.numel() for target in targets))}), tokens, targets


def token_loss(outputs: Mapping[str, Tensor], targets: Tensor, normalisers: Mapping[str, float]) -> dict[str, Tensor]:
    """Return a microbatch's share of the minibatch's mean cross entropy."""
    (scores,) = outputs.values()
    entropy = F.cross_entropy(scores.flatten(0, 1), targets.to(scores.device).flatten(), reduction="sum")
    return {"loss": entropy / normalisers["tokens"]}


class _Wait(torch.autograd.Function):
    """Passes the input through after a delay, and the gradient after another delay."""

    @staticmethod
    def forward(context: Any, tensor: Tensor, forward_seconds: float, backward_seconds: float) -> Tensor:
        context.seconds = backward_seconds
        time.sleep(forward_seconds)
        return tensor.clone()

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(context.seconds)
        return gradients[0], None, None


class Sleeping(nn.Module):
    """A layer that waits instead of computing, so that its rank needs no core of its own."""

    def __init__(self, forward_seconds: float, backward_seconds: float) -> None:
        super().__init__()
        self.seconds, self.shift = (forward_seconds, backward_seconds), nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        waited: Tensor = _Wait.apply(x + self.shift, *self.seconds)
        return waited


def _serve(
    function: Callable[..., Any],
    rank: int,
    world_size: int,
    port: int,
    timeout: float,
    results: Any,
    arguments: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    try:
        communicator = connect(rank, world_size, "127.0.0.1", port, timeout_seconds=timeout)
        results.put((rank, None, function(communicator, *arguments)))
    except Exception as error:
        results.put((rank, f"{type(error).__name__}: {error}".splitlines()[0], None))
        raise
    if not communicator.aborted:
        communicator.barrier()
    communicator.close()


def run_ranks(function: Callable[..., Any], world_size: int, *arguments: Any, timeout: float = 600.0) -> list[Any]:
    """Run `function(communicator, *arguments)` in `world_size` processes of one thread each; return results by rank.

    Args:
        timeout: seconds that a rank waits for a message of another.

    Raises:
        SystemExit: a rank failed; its error is named.
    """
    os.environ["OMP_NUM_THREADS"] = "1"
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    processes = [
        context.Process(
            target=_serve, args=(function, rank, world_size, store.port, timeout, results, arguments), daemon=True
        )
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    outcomes: dict[int, Any] = {}
    while len(outcomes) < world_size:
        try:
            rank, error, answer = results.get(timeout=1.0)
            if error is not None:
                raise SystemExit(f"rank {rank} failed: {error}")
            outcomes[rank] = answer
        except queue.Empty:
            ended = {rank: process.exitcode for rank, process in enumerate(processes) if process.exitcode}
            if ended:
                raise SystemExit(f"ranks ended without an error of their own, with status {ended}") from None
    for process in processes:
        process.join()
    return [outcomes[rank] for rank in range(world_size)]


def interleave(
    runs: Mapping[str, Callable[[], object]], rounds: int, barrier: Callable[[], None] = lambda: None, warmup: int = 3
) -> dict[str, list[tuple[float, float]]]:
    """Return the (seconds, processor seconds of this process) of each round of each run, by name.

    Every round executes all runs once, the order reversed from one round to the next. Where other programs share the
    cores, processor seconds tell more of the work done.

    Args:
        barrier: called before every run, so that all ranks begin together.
        warmup: rounds that do not count.
    """
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    for number in range(warmup + rounds):
        for name in list(runs) if number % 2 == 0 else list(runs)[::-1]:
            barrier()
            began, worked = time.perf_counter(), time.process_time()
            runs[name]()
            if number >= warmup:
                times[name].append((time.perf_counter() - began, time.process_time() - worked))
    return times


def mean_loss(outputs: Mapping[str, Tensor], targets: Any, normalisers: Mapping[str, float]) -> dict[str, Tensor]:
    """Return the mean of `x` as the loss of layers that sleep."""
    return {"loss": outputs["x"].mean()}


def stepping(engine: PipelineEngine, microbatches: int, inputs: Mapping[str, Tensor]) -> Callable[[], object]:
    """Return a function that trains the next step, with these inputs and no targets for every microbatch."""
    specs, numbers = {name: TensorSpec.of(value) for name, value in inputs.items()}, itertools.count(1)
    minibatch = Minibatch([specs] * microbatches, [None] * microbatches, {})
    return lambda: train_step(engine, next(numbers), minibatch, lambda _: dict(inputs))


def beside_play(
    steps: Mapping[str, Sequence[float]], played: Mapping[str, float], first: str, second: str
) -> dict[str, Any]:
    """Return measured and simulated seconds, and in both the ratio of the run `first` to the run `second`.

    steps: seconds of every round by run. played: simulated seconds by run.
    """
    return {
        "measured_seconds": {name: statistics.median(row) for name, row in steps.items()},
        "played_seconds": dict(played),
        "ratio": median_ratio(steps[first], steps[second]),
        "played_ratio": played[first] / played[second],
    }


def median_ratio(first: Sequence[float], second: Sequence[float]) -> tuple[float, float, float]:
    """Return the median of first/second over the rounds and its quartiles; of a single round, its ratio three times."""
    ratios = [a / b for a, b in zip(first, second, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else 3 * ratios
    return middle, low, high


def machine() -> dict[str, Any]:
    """Return the versions and cores that a result was measured with."""
    return {"python": platform.python_version(), "torch": torch.__version__, "cores": os.cpu_count()}


def trained_peaks(config: Path, run_dir: Path, environment: Mapping[str, str]) -> list[int]:
    """Train by `capslog train`; return the allocator's peak of every rank in the second step. Raises SystemExit with
    the command's output where the run fails.
    """
    command = [sys.executable, "-c", "from varuna_capslog.cli import main; main()", "train", str(config)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        raise SystemExit(f"the run failed:\n{done.stdout}\n{done.stderr}")
    records = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    peaks: list[int] = next(record["peak_bytes"] for record in records if "peak_bytes" in record)
    return peaks


def write_json(path: Path | None, result: Mapping[str, Any]) -> None:
    """Write a result if a path is given."""
    if path is not None:
        path.write_text(json.dumps({**machine(), **result}, indent=1) + "\n")
