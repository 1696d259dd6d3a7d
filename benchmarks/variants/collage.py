"""Collage over the variants of five models on this CPU: sums over layers beside the whole, and the best single way.

    python -m benchmarks.variants.collage --model gpt2
    python -m benchmarks.variants.collage            # all five, some minutes

Every candidate is measured whole, forward and backward of one microbatch on one thread, interleaved.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
from torch import Tensor, nn

from varuna_capslog.config.reading import section
from varuna_capslog.config.settings import Config
from varuna_capslog.start.collage_start import Collaged, collage

__all__ = ["bert", "dcgan", "gpt2", "resnext50"]

HEADINGS = ("model", "choice", "layers", "sum of layers, ms", "whole, ms", "whole / sum", "of as configured")


def gpt2() -> tuple[nn.Module, dict[str, Tensor]]:
    """4 blocks of width 128, eager attention."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_embd=128,
        n_layer=4,
        n_head=4,
        vocab_size=2048,
        use_cache=False,
        attn_implementation="eager",
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config), {"input_ids": torch.ones(2, 256, dtype=torch.long)}


def bert() -> tuple[nn.Module, dict[str, Tensor]]:
    """4 layers of width 128, eager attention, with the head for masked tokens."""
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=2048, hidden_size=128, num_hidden_layers=4, num_attention_heads=4, intermediate_size=512,
        attn_implementation="eager",
    )  # fmt: skip
    return BertForMaskedLM(config), {"input_ids": torch.ones(2, 256, dtype=torch.long)}


def resnext50() -> tuple[nn.Module, dict[str, Tensor]]:
    """ResNeXt-50 32x4d on images of 64x64."""
    import torchvision

    return torchvision.models.resnext50_32x4d(), {"x": torch.rand(4, 3, 64, 64)}


def dcgan() -> tuple[nn.Module, dict[str, Tensor]]:
    """The generator of DCGAN for images of 64x64, 32 channels at its widest output, a layer for each of its blocks."""
    widths, blocks, inside = (256, 128, 64, 32), [], 100
    for number, width in enumerate(widths):
        way = (4, 1, 0) if number == 0 else (4, 2, 1)
        up = nn.ConvTranspose2d(inside, width, *way, bias=False)
        blocks.append(nn.Sequential(up, nn.BatchNorm2d(width), nn.ReLU()))
        inside = width
    blocks.append(nn.Sequential(nn.ConvTranspose2d(inside, 3, 4, 2, 1, bias=False), nn.Tanh()))
    return nn.Sequential(*blocks), {"x": torch.rand(4, 100, 1, 1)}


DETR = {
    "backbone": "resnet18", "last_layer": "layer3", "encoder_layers": 3, "decoder_layers": 3, "hidden_dim": 64,
    "attention_heads": 4, "feedforward": 128, "queries": 20, "freeze": "none", "attention": "eager",
    "num_classes": 5, "cut_points": "all",
}  # fmt: skip
MODELS = ("detr", "gpt2", "bert", "resnext50", "dcgan")


def config_of(name: str) -> Config:
    """A run of the model, each layer kept for its backward."""
    values: dict[str, Any] = {
        "train": {"minibatch_size": 4, "microbatch_size": 1, "threads": 1},
        "pipeline": {"devices": 1, "schedule": "1f1b"},
        "device": "cpu",
        "numerics": "close",
    }
    if name == "detr":
        values |= {"workload": "detr_pipeline:workload", "model": DETR, "profile": {"image_size": [256, 256]}}
    else:
        values |= {
            "workload": "varuna_capslog.model_workload:workload",
            "model": {"factory": f"benchmarks.variants.collage:{name}"},
        }
    return section(Config, values, "")


def show(name: str, found: Collaged) -> None:
    """Its rows of the table."""
    plain, best = found.candidates[0], found.best
    for one in found.candidates:
        whole = statistics.median(one.measured_seconds)
        ratios = [a / b for a, b in zip(one.measured_seconds, plain.measured_seconds, strict=True)]
        cells = (
            name,
            f"**{one.name}**" if one is best else one.name,
            f"{len(one.chosen)} of {found.profile.num_layers}",
            f"{1e3 * one.predicted_seconds:.1f}",
            f"{1e3 * whole:.1f}",
            f"{whole / one.predicted_seconds:.2f}",
            f"{one.ratio(plain):.3f} ({min(ratios):.2f}..{max(ratios):.2f})",
        )
        print(f"| {' | '.join(cells)} |", flush=True)


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=MODELS)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--generations", type=int, default=3)
    given = parser.parse_args()
    print(f"| {' | '.join(HEADINGS)} |\n|{'---|' * len(HEADINGS)}")
    for name in [given.model] if given.model else MODELS:
        begun = time.perf_counter()
        found = collage(config_of(name), given.rounds, given.generations)
        show(name, found)
        runs = found.profile.conditions["profiling"]["stage_runs"]
        print(f"{name}: {runs} runs of layers and pairs; {time.perf_counter() - begun:.0f} s in all", flush=True)


if __name__ == "__main__":
    main()
