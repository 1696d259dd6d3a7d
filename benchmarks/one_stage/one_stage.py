"""Compares the step time of a one-stage run of the engine with a plain training loop of the same model.

Their steps are interleaved in one process. Both clip the gradient norm and step the same AdamW; the plain loop is
ordinary code without a pipeline. Prints the table of README.md.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))

from common import (
    TransformerSize,
    captured_chain,
    interleave,
    median_ratio,
    run_ranks,
    token_loss,
    token_minibatch,
    transformer_chain,
    write_json,
)

import detr_pipeline
from varuna_capslog.config.settings import Config
from varuna_capslog.engine import functions
from varuna_capslog.engine.communicator import Communicator
from varuna_capslog.engine.layout import Layout
from varuna_capslog.engine.pipeline import PipelineEngine
from varuna_capslog.engine.recipe import EngineOptions, LearningRate, Recipe
from varuna_capslog.engine.step import train_step
from varuna_capslog.model.chain import Chain, TensorSpec
from varuna_capslog.model.workload import HostTargets, Minibatch

Loss = Callable[[Mapping[str, Tensor], Any, Mapping[str, float]], dict[str, Tensor]]
Case = tuple[Chain, Loss, Minibatch, list[dict[str, Tensor]]]

TRANSFORMERS = {
    "transformer, small": TransformerSize(blocks=6, dim=64, sequence=32, microbatch_size=2),
    "transformer, medium": TransformerSize(blocks=8, dim=256, sequence=64, microbatch_size=4),
}
DETR = {
    "backbone": "resnet18",
    "last_layer": "layer3",
    "norm": "group",
    "freeze": "none",
    "encoder_layers": 1,
    "decoder_layers": 2,
    "hidden_dim": 32,
    "attention_heads": 4,
    "feedforward": 64,
    "queries": 10,
    "dropout": 0.0,
    "num_classes": 10,
}
CASES = ["detr", *TRANSFORMERS]
RATE, DECAY, CLIP = 1e-4, 1e-4, 0.1
CPU = torch.device("cpu")


def detr_case(microbatches: int = 4, images: int = 2, side: int = 128) -> Case:
    """Return the DETR of `configs/tiny.yaml` on random [side, side] images, without dropout so that both runs agree."""
    config = Config.model_validate({"workload": "detr_pipeline:workload", "model": DETR})
    workload = detr_pipeline.workload(config)
    torch.manual_seed(0)
    chain = workload.build_chain()
    generator = torch.Generator().manual_seed(1)
    inputs = [
        {
            "images": torch.randn(images, 3, side, side, generator=generator),
            "sizes": torch.tensor([[side, side]] * images),
        }
        for _ in range(microbatches)
    ]
    targets = [
        [
            HostTargets(labels=torch.arange(3), boxes=0.2 + 0.3 * torch.rand(3, 4, generator=generator))
            for _ in range(images)
        ]
        for _ in range(microbatches)
    ]
    specs = [{name: TensorSpec.of(tensor) for name, tensor in values.items()} for values in inputs]
    count = float(microbatches * images)
    return chain, workload.loss, Minibatch(specs, targets, {"boxes": 3 * count, "queries": 10 * count}), inputs


def make_case(name: str) -> Case:
    """Return chain, loss, minibatch and inputs of a named case."""
    if name == "detr":
        return detr_case()
    size = TRANSFORMERS[name]
    minibatch, tokens, _ = token_minibatch(size)
    return transformer_chain(size), token_loss, minibatch, [{"x": part} for part in tokens]


class Unsplit(nn.Module):
    """Whole chain as an ordinary module."""

    def __init__(self, chain: Chain) -> None:
        super().__init__()
        self.layers = nn.ModuleList(copy.deepcopy([layer.module for layer in chain.layers]))
        self.wiring = [(layer.reads, layer.writes) for layer in chain.layers]
        self.outputs = chain.outputs

    def forward(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        for module, (reads, writes) in zip(self.layers, self.wiring, strict=True):
            result = module(*[values[name] for name in reads])
            values = values | dict(zip(writes, (result,) if isinstance(result, Tensor) else result, strict=True))
        return {name: values[name] for name in self.outputs}


def engine_of(
    chain: Chain, loss: Loss, microbatches: int, communicator: Communicator, device: torch.device = CPU
) -> PipelineEngine:
    """Return our engine with the whole chain as its only stage, and the optimizer and clipping of the plain loop."""
    options = EngineOptions(
        microbatches,
        schedule="1f1b",
        recompute=False,
        clip_norm=CLIP,
        recipe=Recipe(LearningRate(RATE), weight_decay=DECAY),
    )
    return PipelineEngine(chain, loss, Layout.pipelines((0,), len(chain)), options, communicator, device)


def measure(
    communicator: Communicator, name: str, rounds: int, device: torch.device = CPU, captured: bool = False
) -> dict[str, Any]:
    """Return times and losses of both runs. captured: the engine runs the captured model, with functions from the
    second call of a layer on; for transformers only.
    """
    chain, loss, minibatch, inputs = make_case(name)
    functions.CALLS = 1
    model = Unsplit(chain).train().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=DECAY, fused=True)
    plain: list[float] = []

    def step_plain() -> None:
        total = 0.0
        for values, targets in zip(inputs, minibatch.targets, strict=True):
            there = {key: value.to(device) for key, value in values.items()}
            share = loss(model(there), targets, minibatch.normalisers)["loss"]
            share.backward()
            total += share.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        plain.append(total)

    run_chain = captured_chain(TRANSFORMERS[name]) if captured else chain
    engine = engine_of(run_chain, loss, len(inputs), communicator, device)
    ours: list[float] = []

    def step_ours() -> None:
        ours.append(train_step(engine, len(ours) + 1, minibatch, inputs.__getitem__).parts["loss"])

    times = interleave({"ours": step_ours, "plain": step_plain}, rounds)
    return {"times": times, "losses": {"ours": ours, "plain": plain}}


def main() -> None:
    """Measure the requested cases."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="+", default=CASES, choices=CASES)
    parser.add_argument("--rounds", type=int, default=40, help="pairs of steps per case")
    parser.add_argument("--captured", action="store_true", help="the engine runs the captured model, with functions")
    parser.add_argument("--output", type=Path, help="write the result as JSON")
    arguments = parser.parse_args()
    print("| model | ours ms | plain loop ms | ours / plain (quartiles) | processor time ours / plain |")
    print("|---|---|---|---|---|")
    rows = []
    for name in arguments.cases:
        result = run_ranks(measure, 1, name, arguments.rounds, CPU, arguments.captured)[0]
        ours, plain = result["losses"]["ours"][:3], result["losses"]["plain"][:3]
        if max(abs(a - b) / b for a, b in zip(ours, plain, strict=True)) > 1e-4:
            raise SystemExit(f"{name}: the two runs do not train the same model: losses {ours} and {plain}")
        seconds, work = ({run: [t[kind] for t in times] for run, times in result["times"].items()} for kind in (0, 1))
        row = {
            "model": name,
            "rounds": arguments.rounds,
            "ours_seconds": statistics.median(seconds["ours"]),
            "plain_seconds": statistics.median(seconds["plain"]),
            "ratio": median_ratio(seconds["ours"], seconds["plain"]),
            "cpu_ratio": median_ratio(work["ours"], work["plain"]),
        }
        ratios = " | ".join(f"{m:.3f} ({low:.3f}-{high:.3f})" for m, low, high in (row["ratio"], row["cpu_ratio"]))
        print(f"| {name} | {1e3 * row['ours_seconds']:.1f} | {1e3 * row['plain_seconds']:.1f} | {ratios} |", flush=True)
        rows.append(row)
    write_json(arguments.output, {"rows": rows})


if __name__ == "__main__":
    main()
