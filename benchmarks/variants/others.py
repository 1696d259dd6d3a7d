"""Ways to compute layers that were weighed: what channels last costs at its borders, oneDNN off, torch.compile.

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

from varuna_capslog.engine.compiling.forward import CompiledForward
from varuna_capslog.variants.wrapped import in_channels_last


def layers() -> dict[str, tuple[nn.Module, Tensor]]:
    """Layers of four kinds with their inputs."""
    import torchvision

    found = torchvision.models.resnext50_32x4d()
    stem = nn.Sequential(found.conv1, found.bn1, found.relu, found.maxpool)
    up = nn.Sequential(nn.ConvTranspose2d(128, 64, 4, 2, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU())
    encoder = nn.TransformerEncoderLayer(256, 4, 1024, 0.0, batch_first=True)
    return {
        "ResNeXt-50 stem": (stem, torch.randn(2, 3, 224, 224)),
        "ResNeXt-50 layer1.1": (found.layer1[1], torch.randn(2, 256, 56, 56)),
        "ResNeXt-50 layer3.1": (found.layer3[1], torch.randn(2, 1024, 14, 14)),
        "DCGAN block": (up, torch.randn(8, 128, 32, 32)),
        "encoder layer": (encoder, torch.randn(4, 128, 256)),
    }


def step(module: Callable[[Tensor], Tensor], x: Tensor) -> None:
    """A forward and a backward; the input keeps its layout."""
    written = module(x.detach().clone(memory_format=torch.preserve_format).requires_grad_())
    written.backward(torch.ones_like(written))


def without_onednn(module: nn.Module, x: Tensor) -> None:
    """The step by torch's own kernels."""
    with torch.backends.mkldnn.flags(enabled=False):
        step(module, x)


def ways_of(module: nn.Module, x: Tensor) -> dict[str, Callable[[], None]]:
    """Name -> a step, the plain one first."""
    found: dict[str, Callable[[], None]] = {"plain": lambda: step(module, x)}
    other = copy.deepcopy(module)
    if in_channels_last(other) is not None:
        found["channels last, alone"] = lambda: step(other, x)
        inner, turned = copy.deepcopy(module), x.contiguous(memory_format=torch.channels_last)
        found["channels last, between such neighbours"] = lambda: step(inner, turned)
    found["oneDNN off"] = lambda: without_onednn(module, x)
    compiled, begun = CompiledForward(copy.deepcopy(module), "inductor"), time.perf_counter()
    step(compiled, x)
    print(f"compiled in {time.perf_counter() - begun:.0f} s", flush=True)
    found["torch.compile"] = lambda: step(compiled, x)
    return found


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
        for way, own in times.items():
            ratios = [a / b for a, b in zip(own, times["plain"], strict=True)]
            spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f}..{max(ratios):.2f})"
            print(f"| {name} | {way} | {1e3 * statistics.median(own):.1f} | {spread} |", flush=True)


if __name__ == "__main__":
    main()
