"""Memory floors of the paper's dilated models with each attention variant, and the seconds of one encoder layer.

python benchmarks/variants/attention.py floors
python benchmarks/variants/attention.py seconds --rounds 5
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import torch

from detr_pipeline.config import ModelConfig
from detr_pipeline.transformer import EncoderLayer
from varuna_capslog.config.reading import load_config
from varuna_capslog.start.prepare import plan_run, profile_run
from varuna_capslog.variants.registry import apply_variants

CONFIGS = Path(__file__).parents[2] / "configs" / "paper"
WAYS = ("eager", "chunked", "sdpa")
SIDE = 84
"""Rows and columns of the dilated feature map of an image of 1333x1333."""


def floors() -> None:
    """Print the largest stage of the plan that minimizes it, for 8 devices."""
    for model in ("rn50_d_e6", "rn101_d_e12"):
        for way in WAYS:
            overrides = ["pipeline.devices=8", "pipeline.planner=exact", "profile.source=estimated", "numerics=close"]
            config = load_config(CONFIGS / f"{model}.yaml", [*overrides, f"variants={{'encoder.*': {way}}}"])
            plan = plan_run(config, profile_run(config, show=False))
            largest = max(stage.bytes or 0 for stage in plan.stages)
            print(f"{model:12} {way:8} {largest / 2**30:5.2f} GiB", flush=True)


def seconds(rounds: int, side: int) -> None:
    """Time forward and backward of one encoder layer without dropout, each round in another order."""
    memory, valid = torch.randn(1, side, side, 256), torch.tensor([[side, side]])
    layers = {}
    for way in WAYS:
        torch.manual_seed(0)
        layers[way] = EncoderLayer(ModelConfig(attention="eager", dropout=0.0))
        apply_variants([("encoder", layers[way])], {"*": way}, "close")
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    results = {}
    for number in range(rounds + 1):
        for way in WAYS[number % 3 :] + WAYS[: number % 3]:
            inputs = memory.clone().requires_grad_()
            begun = time.perf_counter()
            out = layers[way](inputs, valid)
            out.backward(torch.ones_like(out).mul_(memory))
            if number:  # the first round warms up
                times[way].append(time.perf_counter() - begun)
            results[way] = out.detach(), inputs.grad
    for way in WAYS:
        ratios = [took / eager for took, eager in zip(times[way], times["eager"], strict=True)]
        errors = [
            float((a - b).abs().max() / b.abs().max()) for a, b in zip(results[way], results["eager"], strict=True)
        ]
        print(
            f"{way:8} {statistics.median(times[way]):6.2f} s  {statistics.median(ratios):5.2f} x eager "
            f"({min(ratios):.2f}..{max(ratios):.2f})  error: output {errors[0]:.1e}, gradient {errors[1]:.1e}",
            flush=True,
        )


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["floors", "seconds"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--side", type=int, default=SIDE, help="rows and columns of the feature map")
    args = parser.parse_args()
    if args.what == "floors":
        floors()
    else:
        seconds(args.rounds, args.side)


if __name__ == "__main__":
    main()
