"""Checks that compiled layers give bit-equal losses and weights under several plans, and measures the steps.

Every plan trains the same small transformer for some steps in separate processes, whose caches of compiled code are
empty. Prints the table of README.md.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from common import TransformerSize, run_ranks, token_loss, token_minibatch, transformer_chain, write_json

from varuna_capslog.engine.communicator import Communicator
from varuna_capslog.engine.layout import Layout
from varuna_capslog.engine.pipeline import PipelineEngine
from varuna_capslog.engine.recipe import EngineOptions, LearningRate, Recipe
from varuna_capslog.engine.step import train_step

SIZE = TransformerSize(blocks=4, dim=64, sequence=32, microbatch_size=2, num_microbatches=4)
PLANS: dict[str, tuple[tuple[int, ...], int, dict[str, Any]]] = {
    "one stage, 1f1b, everything kept": ((0,), 1, {"schedule": "1f1b", "recompute": False}),
    "one stage, varuna, recomputed": ((0,), 1, {"schedule": "varuna"}),
    "cuts 0, 2, 4, gpipe, recomputed": ((0, 2, 4), 1, {"schedule": "gpipe", "recompute": True}),
    "cuts 0, 1, 1f1b, kept": ((0, 1), 1, {"schedule": "1f1b", "recompute": False}),
    "cuts 0, 3, two replicas, varuna": ((0, 3), 2, {"schedule": "varuna"}),
}


def trained(communicator: Communicator, plan: str, backend: str | None, steps: int, cache: str) -> dict[str, Any]:
    """Return losses, digests of this rank's weights, and processor seconds of the first and the median later step."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{cache}/{communicator.rank}"
    cuts, replicas, options = PLANS[plan]
    chain = transformer_chain(SIZE)
    recipe = Recipe(LearningRate(1e-3))
    settings = EngineOptions(
        SIZE.num_microbatches, num_blocks=2, seed=3, recipe=recipe, compile=backend, clip_norm=1.0, **options
    )
    layout = Layout.pipelines(cuts, len(chain), tuple(range(len(cuts))), replicas, 2)
    engine = PipelineEngine(chain, token_loss, layout, settings, communicator, torch.device("cpu"))
    minibatch, tokens, _ = token_minibatch(SIZE)
    losses, seconds = [], []
    for step in range(1, steps + 1):
        begun = time.process_time()
        losses.append(train_step(engine, step, minibatch, lambda index: {"x": tokens[index]}).parts["loss"])
        seconds.append(time.process_time() - begun)
    digests = {
        f"{layer.name}.{name}": hashlib.sha256(parameter.detach().numpy().tobytes()).hexdigest()
        for layer in engine.layers
        for name, parameter in layer.parameters.items()
    }
    return {"losses": losses, "weights": digests, "first": seconds[0], "step": sorted(seconds[1:])[len(seconds) // 2]}


def main() -> None:
    """Train under every plan."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--plans", nargs="+", type=int, default=list(range(len(PLANS))), help="numbers, from 0")
    parser.add_argument("--output", type=Path, help="write the result as JSON")
    arguments = parser.parse_args()
    plain = run_ranks(trained, 1, next(iter(PLANS)), None, arguments.steps, "")[0]
    print("| plan | loss | bits of one stage | first step, processor s | later, ms |\n|---|---|---|---|---|")
    print(
        f"| one stage, not compiled | {plain['losses'][-1]:.9f} | | {plain['first']:.2f} | {1e3 * plain['step']:.1f} |"
    )
    single, rows = None, []
    for plan in [list(PLANS)[number] for number in arguments.plans]:
        cuts, replicas, _ = PLANS[plan]
        with tempfile.TemporaryDirectory() as cache:
            ranks = run_ranks(trained, len(cuts) * replicas, plan, arguments.backend, arguments.steps, cache)
        weights: dict[str, str] = {}
        for rank in ranks:
            for name, digest in rank["weights"].items():
                if weights.setdefault(name, digest) != digest:
                    raise SystemExit(f"{plan}: two ranks disagree about {name}")
        outcome = ranks[0]["losses"], weights
        single = single or outcome
        equal, first, later = outcome == single, max(r["first"] for r in ranks), max(r["step"] for r in ranks)
        print(f"| {plan} | {outcome[0][-1]:.9f} | {equal} | {first:.2f} | {1e3 * later:.1f} |", flush=True)
        rows.append({"plan": plan, "loss": outcome[0][-1], "equal": equal, "first": first, "later": later})
    write_json(arguments.output, {"rows": rows, "plain": plain["losses"][-1]})


if __name__ == "__main__":
    main()
