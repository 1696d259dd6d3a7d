"""Random statistics for planner tests, and the answers by exhaustive search."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

from varuna_capslog.memory.additive import AdditiveCosts


def exhaustive(costs: AdditiveCosts, devices: int) -> Iterator[list[int]]:
    """Every cut list into `devices` stages."""
    for rest in itertools.combinations(range(1, costs.num_layers), devices - 1):
        yield [0, *rest]


def peaks(isolated: list[int], added: list[int], cuts: list[int]) -> list[int]:
    """Stage peaks by the plain sum of the paper's equation."""
    bounds = [*cuts, len(isolated)]
    return [isolated[l] + sum(added[l + 1 : m]) for l, m in itertools.pairwise(bounds)]


def statistics(rng: random.Random, kind: str, num_layers: int) -> tuple[list[int], list[int]]:
    """M_i and M_a (0 for layer 0) of one kind.

    any: independent; negative: some M_a below 0; ties: tiny numbers; monotone: a stage's peak never falls when a layer
    joins it at either end (M_a >= 0 and M_i(l+1) <= M_i(l) + M_a(l+1)).
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
