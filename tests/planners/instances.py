"""Random statistics for planner tests, and all cut lists for exhaustive search."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from varuna_capslog.memory.additive import AdditiveCosts
from varuna_capslog.memory.costs import StageCosts, full_matrix, peaks_of


def exhaustive(costs: StageCosts, devices: int) -> Iterator[list[int]]:
    """Yield every cut list with `devices` stages."""
    for inner_cuts in itertools.combinations(range(1, costs.num_layers), devices - 1):
        yield [0, *inner_cuts]


def peaks(isolated: list[int], added: list[int], cuts: list[int]) -> list[int]:
    """Return the stage peaks by the plain sum of the paper's equation."""
    bounds = [*cuts, len(isolated)]
    return [isolated[l] + sum(added[l + 1 : m]) for l, m in itertools.pairwise(bounds)]


def statistics(rng: random.Random, kind: str, num_layers: int) -> tuple[list[int], list[int]]:
    """Draw M_i and M_a (0 for layer 0) of one kind.

    any: independent; negative: some M_a below 0; ties: tiny numbers; monotone: a stage's peak never falls when a layer
    is added at either end (M_a >= 0 and M_i(l+1) <= M_i(l) + M_a(l+1)).
    """
    high = rng.choice([3, 5]) if kind == "ties" else rng.choice([12, 1000, 10**11])
    isolated = [rng.randrange(high) for _ in range(num_layers)]
    if kind == "monotone":
        added = [0]
        for before, alone in itertools.pairwise(isolated):
            least = max(0, alone - before)
            added.append(rng.randrange(least, least + 1 + alone // 2))
    else:
        low = -high if kind == "negative" else 0
        added = [0, *(rng.randrange(low, high) for _ in range(num_layers - 1))]
    return isolated, added


def instances(
    rng: random.Random, kind: str, count: int, most: int, least: int = 1
) -> Iterator[tuple[list[int], list[int], AdditiveCosts, int]]:
    """Yield M_i, M_a, their costs and a number of devices, for chains of `least` to `most` layers."""
    for _ in range(count):
        num_layers = rng.randrange(least, most + 1)
        devices = rng.randrange(1, num_layers + 1)
        isolated, added = statistics(rng, kind, num_layers)
        yield isolated, added, AdditiveCosts.of_statistics(isolated, added), devices


@dataclass
class TableCosts:
    """Bytes of every (stage, stages, first, end), without any rule between them."""

    num_layers: int
    entries: Mapping[tuple[int, int, int, int], int]
    position_free: bool = False

    def stage_bytes(self, first: int, end: int, stage: int = 0, stages: int = 1) -> int:
        return self.entries[(0, 1, first, end) if self.position_free else (stage, stages, first, end)]

    def matrix(self, stage: int = 0, stages: int = 1) -> NDArray[np.int64]:
        return full_matrix(self, stage, stages)

    def peaks(self, cuts: Sequence[int]) -> list[int]:
        return peaks_of(self, cuts)


def table(rng: random.Random, kind: str, num_layers: int, position_free: bool) -> TableCosts:
    """Draw bytes of one kind for every number of stages (for chains of over 24 layers only for 24 stages).

    any: independent; ties: tiny numbers; growing: more layers take more, late stages take less; falling: more layers
    may take less.
    """
    high = rng.choice([2, 4]) if kind == "ties" else rng.choice([12, 10**11])
    weights = [rng.randrange(high) for _ in range(num_layers)]
    saved = [rng.randrange(high) for _ in range(num_layers)]
    sign = {"growing": 1, "falling": -1}.get(kind, 0)
    entries = {}
    for stages in [1] if position_free else [24] if num_layers > 24 else range(1, num_layers + 1):
        for stage in range(stages):
            for first in range(num_layers):
                for end in range(first + 1, num_layers + 1):
                    bytes_ = rng.randrange(high)
                    if sign:
                        bytes_ = sum(weights[first:end]) + sign * (stages - stage) * sum(saved[first:end])
                    entries[stage, stages, first, end] = max(0, bytes_)
    return TableCosts(num_layers, entries, position_free)
