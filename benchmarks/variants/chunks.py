"""Peak and processor seconds of one encoder layer of DETR by the number of chunks of its queries.

Forward and backward without dropout, float32, one thread; the peak is the CPU allocator's. Every round runs all
degrees once, the order reversed from one round to the next. Prints the table of README.md.

python -m benchmarks.variants.chunks --sequences 2000 5000 --rounds 3
"""

from __future__ import annotations

import argparse
import math
import statistics
import time

import torch
from torch import nn

from detr_pipeline.config import ModelConfig
from detr_pipeline.transformer import EncoderLayer
from varuna_capslog.engine.probe import PeakProbe
from varuna_capslog.variants.attention import ChunkedAttention

WIDTH = 256


def run(layer: nn.Module, rows: int, columns: int) -> tuple[float, int]:
    """Return the processor seconds and peak bytes of a forward and a backward."""
    memory = torch.randn(1, rows, columns, WIDTH, requires_grad=True)
    valid, upper = torch.tensor([[rows, columns]]), torch.randn(1, rows, columns, WIDTH)
    layer.zero_grad()
    with PeakProbe(torch.device("cpu"), [memory, upper, *layer.parameters()]) as probe:
        begun = time.process_time()
        layer(memory, valid).backward(upper)
        spent = time.process_time() - begun
    return spent, probe.peak_bytes


def compare(sequence: int, degrees: list[int], rounds: int) -> None:
    """Print a row for each degree."""
    rows, columns = math.isqrt(sequence), round(sequence / math.isqrt(sequence))
    torch.manual_seed(0)
    layer = EncoderLayer(ModelConfig(attention="eager", dropout=0.0))
    seconds: dict[int, list[float]] = {degree: [] for degree in degrees}
    peaks: dict[int, int] = {}
    run(layer, 4, 4)
    for number in range(rounds):
        for degree in degrees if number % 2 == 0 else degrees[::-1]:
            layer.self_attn.core = ChunkedAttention(queries=math.ceil(rows * columns / degree))
            spent, peaks[degree] = run(layer, rows, columns)
            seconds[degree].append(spent)
    for degree in degrees:
        ratios = [took / first for took, first in zip(seconds[degree], seconds[degrees[0]], strict=True)]
        print(
            f"| {rows * columns} | {degree} | {peaks[degree] / 2**20:.0f} | {peaks[degree] / peaks[degrees[0]]:.3f} | "
            f"{statistics.median(seconds[degree]):.1f} | "
            f"{statistics.median(ratios):.2f} ({min(ratios):.2f}..{max(ratios):.2f}) |",
            flush=True,
        )


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sequences", type=int, nargs="+", default=[2000, 5000])
    parser.add_argument("--degrees", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print("| positions | chunks | peak, MiB | of the first row | processor s | of the first row |")
    print("|---|---|---|---|---|---|")
    for sequence in args.sequences:
        compare(sequence, args.degrees, args.rounds)


if __name__ == "__main__":
    main()
