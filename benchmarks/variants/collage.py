"""Collage over the variants of five models on this CPU: sums over layers, whole models, and the best single variant.

    python -m benchmarks.variants.collage --model gpt2
    python -m benchmarks.variants.collage            # all five, some minutes

Choices are those of `capslog variants`. Every candidate is then measured again, by layer and as a whole model, as
processor time of a forward and a backward of one microbatch on one thread, so that other work on the machine counts
less; every round measures all candidates.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from varuna_capslog.config.reading import section
from varuna_capslog.config.settings import Config
from varuna_capslog.model.workload import load_workload
from varuna_capslog.profiling.trim import dummy_inputs
from varuna_capslog.start.collage_start import Collaged, collage

__all__ = ["bert", "dcgan", "gpt2", "resnext50"]

HEADINGS = ("model", "choice", "layers", "sum of layers, ms", "whole, ms", "whole / sum", "of as configured")


def gpt2() -> tuple[nn.Module, dict[str, Tensor]]:
    """4 blocks of width 128, eager attention."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(  # type: ignore[call-arg]
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

    config = BertConfig(  # type: ignore[call-arg]
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
    return nn.Sequential(*blocks), {"x": torch.rand(8, 100, 1, 1)}


DETR = {
    "backbone": "resnet18", "last_layer": "layer3", "encoder_layers": 3, "decoder_layers": 3, "hidden_dim": 64,
    "attention_heads": 4, "feedforward": 128, "queries": 20, "freeze": "none", "attention": "eager",
    "num_classes": 5, "cut_points": "all",
}  # fmt: skip
MODELS = ("detr", "gpt2", "bert", "resnext50", "dcgan")


def config_of(name: str) -> Config:
    """Return the config of a run of the model without recomputation."""
    samples = 8 if name == "dcgan" else 1
    values: dict[str, Any] = {
        "train": {"minibatch_size": 4 * samples, "microbatch_size": samples, "threads": 1},
        "pipeline": {"devices": 1, "schedule": "1f1b"},
        "device": "cpu",
        "numerics": "close",
    }
    if name == "detr":
        values |= {"workload": "detr_pipeline:workload", "model": DETR, "profile": {"image_size": [256, 256]}}
    else:
        values |= {
            "workload": "varuna_capslog.model.model_workload:workload",
            "model": {"factory": f"benchmarks.variants.collage:{name}"},
        }
    return section(Config, values, "")


class Timed:
    """Model with one choice of variants for its layers."""

    def __init__(self, config: Config, chosen: Mapping[int, str]) -> None:
        workload = copy.copy(load_workload(config))
        workload.variants, workload.numerics = {f"#{layer}": name for layer, name in chosen.items()}, "close"
        torch.manual_seed(0)
        self._chain = workload.chosen_chain()
        specs = workload.profile_inputs(config.train.microbatch_size)
        self._inputs = {name: dummy_inputs({name: spec})[name] for name, spec in specs.items()}

    def whole(self) -> float:
        """Return the seconds of all layers in one graph."""
        begun, values = time.process_time(), dict(self._inputs)
        for layer in self._chain.layers:
            values |= layer.run(values)
        _backward([values[name] for name in self._chain.outputs])
        return time.process_time() - begun

    def alone(self) -> float:
        """Return the sum of the seconds of each layer in a separate graph."""
        values, total = dict(self._inputs), 0.0
        for layer in self._chain.layers:
            inputs = {name: values[name].detach().requires_grad_(values[name].requires_grad) for name in layer.reads}
            begun = time.process_time()
            written = layer.run(inputs)
            _backward(list(written.values()))
            total += time.process_time() - begun
            values |= written
        return total


def _backward(outputs: list[Tensor]) -> None:
    ends = [tensor for tensor in outputs if tensor.requires_grad]
    torch.autograd.backward(ends, [torch.ones_like(tensor) for tensor in ends])


def show(name: str, config: Config, collaged: Collaged, rounds: int) -> None:
    """Print the model's rows of the table."""
    timed = [Timed(config, candidate.chosen) for candidate in collaged.candidates]
    whole_seconds: list[list[float]] = [[] for _ in timed]
    alone_seconds: list[list[float]] = [[] for _ in timed]
    for number in range(rounds + 1):
        for at in sorted(range(len(timed)), key=lambda at: (at + number) % len(timed)):
            seconds = timed[at].alone(), timed[at].whole()
            if number:  # the first round warms up
                alone_seconds[at].append(seconds[0])
                whole_seconds[at].append(seconds[1])
    for at, candidate in enumerate(collaged.candidates):
        ratios = [a / b for a, b in zip(whole_seconds[at], whole_seconds[0], strict=True)]
        parts = [a / b for a, b in zip(whole_seconds[at], alone_seconds[at], strict=True)]
        cells = (
            name,
            f"**{candidate.name}**" if candidate is collaged.best else candidate.name,
            f"{len(candidate.chosen)} of {collaged.profile.num_layers}",
            f"{1e3 * statistics.median(alone_seconds[at]):.1f}",
            f"{1e3 * statistics.median(whole_seconds[at]):.1f}",
            f"{statistics.median(parts):.2f}",
            f"{statistics.median(ratios):.3f} ({min(ratios):.2f}..{max(ratios):.2f})",
        )
        print(f"| {' | '.join(cells)} |", flush=True)


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=MODELS)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--generations", type=int, default=3)
    args = parser.parse_args()
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    torch.set_num_threads(1)
    print(f"| {' | '.join(HEADINGS)} |\n|{'---|' * len(HEADINGS)}")
    for name in [args.model] if args.model else MODELS:
        begun = time.perf_counter()
        config = config_of(name)
        collaged = collage(config, args.rounds, args.generations)
        show(name, config, collaged, args.rounds)
        runs = collaged.profile.conditions["profiling"]["stage_runs"]
        print(f"{name}: {runs} runs of layers and pairs; {time.perf_counter() - begun:.0f} s in all", flush=True)


if __name__ == "__main__":
    main()
