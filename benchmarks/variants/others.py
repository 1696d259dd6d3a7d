"""Measures other variants: the conversions that channels last needs at its borders, oneDNN off, and torch.compile.

python -m benchmarks.variants.others --rounds 5

Processor time of a forward and a backward of one layer on one thread, ratios to the plain layer, rounds interleaved.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from varuna_capslog.engine.layers import CompiledForward
from varuna_capslog.variants.wrapped import in_channels_last


def layers() -> dict[str, tuple[nn.Module, Tensor]]:
    """Return layers of four kinds with their inputs."""
    import torchvision

    resnext = torchvision.models.resnext50_32x4d()
    stem = nn.Sequential(resnext.conv1, resnext.bn1, resnext.relu, resnext.maxpool)
    up = nn.Sequential(nn.ConvTranspose2d(128, 64, 4, 2, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU())
    encoder = nn.TransformerEncoderLayer(256, 4, 1024, 0.0, batch_first=True)
    return {
        "ResNeXt-50 stem": (stem, torch.randn(2, 3, 224, 224)),
        "ResNeXt-50 layer1.1": (resnext.layer1[1], torch.randn(2, 256, 56, 56)),
        "ResNeXt-50 layer3.1": (resnext.layer3[1], torch.randn(2, 1024, 14, 14)),
        "DCGAN block": (up, torch.randn(8, 128, 32, 32)),
        "encoder layer": (encoder, torch.randn(4, 128, 256)),
    }


def step(module: Callable[[Tensor], Tensor], x: Tensor) -> None:
    """Run a forward and a backward; the input keeps its layout."""
    written = module(x.detach().clone(memory_format=torch.preserve_format).requires_grad_())
    written.backward(torch.ones_like(written))


def without_onednn(module: nn.Module, x: Tensor) -> None:
    """Run the step with torch's own kernels."""
    with torch.backends.mkldnn.flags(enabled=False):
        step(module, x)


def ways_of(module: nn.Module, x: Tensor) -> dict[str, Callable[[], None]]:
    """Return steps by name, the plain one first."""
    steps: dict[str, Callable[[], None]] = {"plain": lambda: step(module, x)}
    converted = copy.deepcopy(module)
    if in_channels_last(converted) is not None:
        steps["channels last, alone"] = lambda: step(converted, x)
        inner, turned = copy.deepcopy(module), x.contiguous(memory_format=torch.channels_last)
        steps["channels last, between such neighbours"] = lambda: step(inner, turned)
    steps["oneDNN off"] = lambda: without_onednn(module, x)
    compiled, begun = CompiledForward(copy.deepcopy(module), "inductor"), time.perf_counter()
    step(compiled, x)
    print(f"compiled in {time.perf_counter() - begun:.0f} s", flush=True)
    steps["torch.compile"] = lambda: step(compiled, x)
    return steps


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    for name, (module, x) in layers().items():
        ways = ways_of(module, x)
        times: dict[str, list[float]] = {way: [] for way in ways}
        for number in range(rounds + 1):
            for way, run in ways.items():
                begun = time.process_time()
                run()
                if number:  # the first round warms up
                    times[way].append(time.process_time() - begun)
        for way, way_seconds in times.items():
            ratios = [a / b for a, b in zip(way_seconds, times["plain"], strict=True)]
            spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f}..{max(ratios):.2f})"
            print(f"| {name} | {way} | {1e3 * statistics.median(way_seconds):.1f} | {spread} |", flush=True)


if __name__ == "__main__":
    main()
