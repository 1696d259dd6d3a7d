"""Measures how long training stalls for a checkpoint: written at the boundary, or during the following steps.

The kinds are interleaved on one engine whose weights and moments have the given size: at the boundary; during training
with a copy in new memory, as for the first checkpoint of a generation; and during training in the memory of the
previous copy. Every checkpoint replaces the previous one. Prints a row for each, and the ratios of their stalls round
by round; steps during a write are compared with steps of the same engine without one.
"""

from __future__ import annotations

import argparse
import datetime
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))

from common import machine, median_ratio, write_json

from varuna_capslog.engine.communicator import Communicator
from varuna_capslog.engine.layout import Layout
from varuna_capslog.engine.pipeline import PipelineEngine
from varuna_capslog.engine.recipe import EngineOptions
from varuna_capslog.engine.step import train_step
from varuna_capslog.model.chain import Chain, Layer, TensorSpec
from varuna_capslog.model.workload import Minibatch
from varuna_capslog.training.checkpoint import open_checkpoint, prune
from varuna_capslog.training.checkpoint_writer import CheckpointWriter, HostCopies

LAYERS, ROWS = 10, 32
BOUNDARY, NEW, KEPT = "at the boundary", "beside training, new memory", "beside training, kept memory"


def loss(outputs: Mapping[str, Tensor], targets: Tensor, normalisers: Mapping[str, float]) -> dict[str, Tensor]:
    """Return the mean square of the last layer's output."""
    return {"loss": (outputs["x"] - targets).square().mean()}


def engine_of(megabytes: float) -> PipelineEngine:
    """Return an engine of square linear layers whose weights and two moments take `megabytes` in all."""
    width = int((megabytes * 1e6 / 12 / LAYERS) ** 0.5)
    layers = [Layer(f"linear.{k}", nn.Linear(width, width), ("x",), ("x",)) for k in range(LAYERS)]
    chain = Chain(layers, ("x",), ("x",), "linear")
    alone = Communicator(0, 1, "alone", datetime.timedelta(seconds=5))
    options = EngineOptions(num_microbatches=1, num_blocks=1)
    return PipelineEngine(chain, loss, Layout.pipelines((0,), LAYERS), options, alone, torch.device("cpu"))


def main() -> None:
    """Run the rounds and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=float, default=500.0)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    engine, number = engine_of(args.megabytes), 0
    width = engine.layers[0].parameters["weight"].shape[0]
    inputs, targets = {"x": torch.randn(ROWS, width)}, torch.randn(ROWS, width)
    minibatch = Minibatch([{"x": TensorSpec((ROWS, width))}], [targets], {}, [None], [list(range(ROWS))])

    def step() -> float:
        nonlocal number
        number += 1
        began = time.perf_counter()
        assert train_step(engine, number, minibatch, lambda microbatch: inputs).refusal is None
        return time.perf_counter() - began

    stalls: dict[str, list[float]] = {BOUNDARY: [], NEW: [], KEPT: []}
    kept = HostCopies()
    totals: dict[str, list[float]] = {name: [] for name in stalls}
    processor: dict[str, list[float]] = {name: [] for name in stalls}
    alone, beside, size = [], [], 0
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(args.rounds + 1):
            for name in list(stalls) if turn % 2 else list(stalls)[::-1]:
                quiet = [step() for _ in range(3)]
                copies = {BOUNDARY: None, NEW: HostCopies(), KEPT: kept}[name]
                began = time.thread_time()
                saving = CheckpointWriter(Path(folder), number, 0, engine, {}, copies)
                worked = time.thread_time() - began
                busy = []
                while copies is not None and not saving.marked(b""):
                    busy.append(step())
                began = time.thread_time()
                path = saving.complete(partial(prune, Path(folder), 1, in_thread=copies is not None))
                worked += time.thread_time() - began
                size = sum(layer["bytes"] for layer in open_checkpoint(path).manifest["layers"].values())
                if turn:  # the first round only warms up
                    stalls[name].append(saving.stall_seconds)
                    processor[name].append(worked)
                    totals[name].append(saving.seconds)
                    alone.append(statistics.median(quiet))
                    beside += busy
    print(f"{machine()}, {size / 1e6:.0f} MB on disk, {args.rounds} rounds")
    for name, seconds in stalls.items():
        print(
            f"| {name} | stall {statistics.median(seconds):.3f} s, at most {max(seconds):.3f} s | "
            f"{statistics.median(processor[name]):.3f} s, at most {max(processor[name]):.3f} s of it worked | "
            f"whole after {statistics.median(totals[name]):.2f} s |"
        )
    ratios = {name: median_ratio(stalls[KEPT], stalls[name]) for name in (BOUNDARY, NEW)}
    slower = statistics.median(beside) / statistics.median(alone)
    for name, ratio in ratios.items():
        print(f"{KEPT} / {name}: {ratio[0]:.3f} ({ratio[1]:.3f}-{ratio[2]:.3f})")
    print(f"a step {statistics.median(alone):.3f} s, beside a write {statistics.median(beside):.3f} s ({slower:.2f})")
    write_json(
        args.json,
        {
            "stall_seconds": stalls,
            "processor_seconds": processor,
            "whole_seconds": totals,
            "ratios": ratios,
            "slower": slower,
        },
    )


if __name__ == "__main__":
    main()
