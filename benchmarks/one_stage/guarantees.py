"""Measures the cost of the engine's guarantees in a one-stage step, by adding each of them to a plain training loop.

Each is written into the plain loop by hand, as short as possible; the rest of the engine's time is its bookkeeping.
All runs are interleaved in one process. Prints the table of README.md.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

sys.path.insert(0, str(Path(__file__).parents[1]))

from common import interleave, median_ratio, run_ranks, write_json
from one_stage import CLIP, DECAY, RATE, TRANSFORMERS, Unsplit, engine_of, make_case

from varuna_capslog.base.seeds import mix
from varuna_capslog.engine.communicator import Communicator
from varuna_capslog.engine.layers import keep_layout
from varuna_capslog.engine.step import train_step

PARTS = {
    "seeds": "every layer seeds its random numbers",
    "layouts": "gradients between layers have the layout of their tensors",
    "loss": "the loss is differentiated apart from the layers",
    "norm": "the gradient norm in float64, by layer",
}


def clip_by_layer(layers: nn.ModuleList) -> None:
    """Clip the gradients as the engine does: squared norms in float64, and one multiplication of all gradients."""
    squared = []
    for layer in layers:
        norms = [torch.linalg.vector_norm(parameter.grad, dtype=torch.float64) for parameter in layer.parameters()]
        squared.append(torch.stack(norms).square().sum())
    norm = sum(torch.stack(squared).tolist()) ** 0.5
    scale = min(1.0, CLIP / (norm + 1e-6))
    torch._foreach_mul_([parameter.grad for parameter in layers.parameters()], scale)


def measure(communicator: Communicator, name: str, rounds: int) -> dict[str, Any]:
    """Return the times of the plain loop, of the loop with each part and with all of them, and of the engine."""
    chain, loss, minibatch, inputs = make_case(name)

    def loop(*parts: str) -> Callable[[], object]:
        model = Unsplit(chain).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=DECAY, fused=True)

        def forward(values: dict[str, Tensor]) -> Tensor:
            x = values["x"]
            for index, layer in enumerate(model.layers):
                if "seeds" in parts:
                    torch.default_generator.manual_seed(mix(index, after=1234))
                x = layer(x)
                if "layouts" in parts:
                    keep_layout(x)
            return x

        def step() -> None:
            total = 0.0
            for values, targets in zip(inputs, minibatch.targets, strict=True):
                x = forward(values)
                if "loss" in parts:
                    edge, leaf = get_gradient_edge(x), x.detach().requires_grad_()
                    del x
                    share = loss({"x": leaf}, targets, minibatch.normalisers)["loss"]
                    share.backward()
                    torch.autograd.backward([edge], [leaf.grad])
                else:
                    share = loss({"x": x}, targets, minibatch.normalisers)["loss"]
                    share.backward()
                total += share.item()
            if "norm" in parts:
                clip_by_layer(model.layers)
            else:
                torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()

        return step

    engine = engine_of(chain, loss, len(inputs), communicator)
    numbers = itertools.count(1)
    runs = {
        "plain loop": loop(),
        **{name: loop(name) for name in PARTS},
        "all of these": loop(*PARTS),
        "engine": lambda: train_step(engine, next(numbers), minibatch, inputs.__getitem__),
    }
    return interleave(runs, rounds)


def main() -> None:
    """Measure the requested cases."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="+", default=list(TRANSFORMERS)[:1], choices=list(TRANSFORMERS))
    parser.add_argument("--rounds", type=int, default=100, help="steps of each run")
    parser.add_argument("--output", type=Path, help="write the result as JSON")
    arguments = parser.parse_args()
    print("| model | run | processor ms | by the plain loop (quartiles) |\n|---|---|---|---|")
    rows = []
    for case in arguments.cases:
        times = run_ranks(measure, 1, case, arguments.rounds)[0]
        work = {run: [worked for _, worked in pairs] for run, pairs in times.items()}
        for run, seconds in work.items():
            middle, low, high = median_ratio(seconds, work["plain loop"])
            label = PARTS.get(run, run)
            print(
                f"| {case} | {label} | {1e3 * statistics.median(seconds):.1f} | {middle:.3f} ({low:.3f}-{high:.3f}) |"
            )
            rows.append({"model": case, "run": run, "seconds": seconds})
    write_json(arguments.output, {"rows": rows})


if __name__ == "__main__":
    main()
