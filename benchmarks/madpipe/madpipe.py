"""Compares MadPipe with PipeDream on the paper's four models, under two versions of the weights: see README.md."""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch
import torchvision
from common import write_json
from torch import nn

import varuna_capslog
from varuna_capslog.planners.madpipe import (
    Allocation,
    ChainCosts,
    allocations_by_counting,
    best_allocation,
    periodic_pattern,
    shortest_pattern,
)
from varuna_capslog.planners.seconds import Link
from varuna_capslog.planning.placed.periodic import MOST_LAYERS
from varuna_capslog.profiles.record import Profile, read_profile, write_profile

MODELS: dict[str, Callable[[], nn.Module]] = {
    "ResNet-50": torchvision.models.resnet50,
    "ResNet-101": torchvision.models.resnet101,
    "Inception-v3": lambda: torchvision.models.inception_v3(aux_logits=False, init_weights=False),
    "DenseNet-121": torchvision.models.densenet121,
}
DEVICE = "cuda:v100-16gb"
MEMORY = (3, 4, 5, 6, 8, 10, 12, 14, 16)
"""GiB of each device."""
BANDWIDTH = (12, 24)
"""GB/s of each link, both directions together."""
READINGS = ("inputs", "saved")


def profiles(folder: Path) -> Iterator[tuple[str, Profile]]:
    """Yield the name and the profile of each model, estimated at 8 images of 1000 x 1000; the folder caches them."""
    for name, build in MODELS.items():
        path = folder / f"{name}.json"
        if not path.exists():
            settings = {"pipeline.recompute": False, "pipeline.schedule": "1f1b"}
            sample = torch.zeros(8, 3, 1000, 1000)
            write_profile(path, varuna_capslog.estimate(build(), sample, device=DEVICE, settings=settings))
        yield name, read_profile(path)


def costs_of(profile: Profile, devices: int, memory: int, bandwidth: int, reading: str) -> ChainCosts:
    """Return the costs of a chain whose links are shared by both directions, as in the paper.

    reading: tensors of a layer that a microbatch in flight holds: "inputs", the tensors that the layer reads, as the
        paper counts; or "saved", all that autograd saves.
    """
    link = Link(bandwidth * 1e9, shared=True)
    costs = ChainCosts.of_profile(profile, devices, memory << 30, link, two_versions=True)
    costs = costs if reading == "saved" else dataclasses.replace(costs, saved=costs.crossing[:-1])
    return costs.merged(MOST_LAYERS)[0]


def pipedream(costs: ChainCosts) -> Allocation | None:
    """Return PipeDream's cuts without replicas: the smallest time of the slowest stage or link, when the stage with n
    stages from it to the loss has n microbatches in flight. None where nothing fits by this count; the benchmark then
    schedules the cuts that are the fastest without a limit.
    """
    layers, devices = costs.num_layers, costs.devices
    best = np.full((devices + 1, layers + 1), np.inf)
    best[0, layers] = 0.0
    after = np.zeros((devices + 1, layers + 1), dtype=int)
    for count in range(1, devices + 1):
        for first in range(layers):
            for end in range(first + 1, layers + 1):
                if costs.memory(first, end, count) <= (costs.usable or math.inf):
                    link = costs.link_load(end) if end < layers else 0.0
                    slowest = max(costs.of("seconds", first, end), link, best[count - 1, end])
                    if slowest < best[count, first]:
                        best[count, first], after[count, first] = slowest, end
    count = int(np.argmin(best[:, 0]))
    if math.isinf(best[count, 0]):
        return None
    parts, first = list[tuple[int, int, bool]](), 0
    while first < layers:
        end = int(after[count, first])
        parts.append((first, end, False))
        first, count = end, count - 1
    return Allocation.of(costs, parts)


class Table:
    """Periods of the cells, and the longest searches."""

    def __init__(self) -> None:
        self.ratios: dict[tuple[str, str, str, int], list[float]] = defaultdict(list)
        self.answers: dict[tuple[str, str, int], Counter[str]] = defaultdict(Counter)
        self.longest: dict[str, float] = defaultdict(float)
        self.rows: list[dict[str, object]] = []

    def timed(self, name: str, devices: int, seconds: float) -> None:
        """Record the time of a search, only at P = 8, or of a schedule."""
        if devices == 8 or "schedule" in name:
            self.longest[name] = max(self.longest[name], seconds)

    def ours(self, costs: ChainCosts) -> float | None:
        """Return the shortest period of three ways to count the special processor."""
        begun = time.perf_counter()
        allocations_by_counting(costs)
        self.timed("search, three countings", costs.devices, time.perf_counter() - begun)
        pattern = shortest_pattern(costs)
        return None if pattern is None else pattern.period

    def printed(self, costs: ChainCosts) -> float | None:
        """Return the period by the paper's method, without the errors in its text."""
        begun = time.perf_counter()
        allocation = best_allocation(costs, "printed")
        self.timed("search, as printed", costs.devices, time.perf_counter() - begun)
        begun = time.perf_counter()
        pattern = None if allocation is None else periodic_pattern(costs, allocation)
        self.timed("schedule", costs.devices, time.perf_counter() - begun)
        return None if pattern is None else pattern.period

    def add(self, model: str, costs: ChainCosts, memory: int, bandwidth: int, reading: str) -> None:
        """Add a cell: the periods of both planners."""
        cuts = pipedream(costs) or pipedream(dataclasses.replace(costs, usable=None))
        pattern = None if cuts is None else periodic_pattern(costs, cuts)
        pipedream_period = None if pattern is None else pattern.period
        periods = {"ours": self.ours(costs), "printed": self.printed(costs)}
        for name, period in periods.items():
            have = (period is not None, pipedream_period is not None)
            outcomes = {(True, True): "both", (True, False): "MadPipe alone", (False, True): "PipeDream alone"}
            self.answers[reading, name, memory][outcomes.get(have, "neither")] += 1
            if period is not None and pipedream_period is not None:
                self.ratios[reading, name, model, memory].append(pipedream_period / period)
        work = costs.of("seconds", 0, costs.num_layers)
        self.rows.append(
            {"model": model, "reading": reading, "devices": costs.devices, "GiB": memory, "GB/s": bandwidth}
            | {"work": work, "pipedream": pipedream_period, "bound": None if cuts is None else cuts.period, **periods}
        )

    def print(self, models: list[str], memories: tuple[int, ...]) -> None:
        """Print the geometric means over devices and links."""
        for reading in READINGS:
            for name in ("printed", "ours"):
                print(f"\n{name}, a microbatch holds: {reading}")
                print(f"| GiB | {' | '.join(models)} | all | both | MadPipe alone | PipeDream alone | neither |")
                print("|---" * (len(models) + 6) + "|")
                below = list[float]()
                for memory in memories:
                    rows = [self.ratios[reading, name, model, memory] for model in models]
                    all_ratios = [ratio for row in rows for ratio in row]
                    below += all_ratios if memory < 10 else []
                    counts = self.answers[reading, name, memory]
                    kinds = ("both", "MadPipe alone", "PipeDream alone", "neither")
                    cells = [*map(_mean, [*rows, all_ratios]), *(str(counts[kind]) for kind in kinds)]
                    print(f"| {memory} | {' | '.join(cells)} |")
                print(f"below 10 GiB: {_mean(below)} over {len(below)} cells, largest {max(below, default=0):.2f}")
        for name, seconds in sorted(self.longest.items()):
            print(f"longest {name}: {seconds:.2f} s")


def _mean(ratios: list[float]) -> str:
    """Return the geometric mean."""
    return f"{math.exp(sum(map(math.log, ratios)) / len(ratios)):.3f}" if ratios else "-"


def main() -> None:
    """Estimate the profiles, plan, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--profiles", type=Path, default=Path("/tmp/madpipe-profiles"))
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    parser.add_argument("--devices", nargs="*", type=int, default=list(range(2, 9)))
    parser.add_argument("--memory", nargs="*", type=int, default=list(MEMORY))
    parser.add_argument("-o", type=Path, default=None)
    args = parser.parse_args()
    args.profiles.mkdir(parents=True, exist_ok=True)
    table = Table()
    for name, profile in profiles(args.profiles):
        if name not in args.models:
            continue
        for reading in READINGS:
            for memory in args.memory:
                for devices in args.devices:
                    for bandwidth in BANDWIDTH:
                        costs = costs_of(profile, devices, memory, bandwidth, reading)
                        table.add(name, costs, memory, bandwidth, reading)
                print(name, reading, memory, file=sys.stderr, flush=True)
    table.print(args.models, tuple(args.memory))
    write_json(args.o, {"rows": table.rows})


if __name__ == "__main__":
    main()
