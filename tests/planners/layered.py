"""Chains of plain numbers for planners that treat layers, with bytes that anybody can add up."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from varuna_capslog.memory.costs import NEVER
from varuna_capslog.planners.layerwise import Layerwise
from varuna_capslog.plans.parts import MemoryInterval


@dataclass(frozen=True)
class Numbers:
    """Per layer: weights, and of each microbatch in flight what the layer saves, and what it takes only at work."""

    weights: Sequence[int]
    saved: Sequence[int]
    work: Sequence[int]
    freed: Sequence[int]
    moved: Sequence[int]
    in_flight: Sequence[int]

    def peak(self, stage: int, first: int, end: int, intervals: tuple[MemoryInterval, ...]) -> int:
        kinds = {layer: one.kind for one in intervals for layer in range(one.first, one.end)}
        less = {"recompute": self.freed, "offload": self.moved}
        held = [self.saved[n] - (less[kinds[n]][n] if n in kinds else 0) for n in range(first, end)]
        return sum(self.weights[first:end]) + self.in_flight[stage] * sum(held)

    def once(self, first: int, end: int) -> int:
        """Lines 6 to 9 of DawnPiper's Algorithm 2 over these layers."""
        current = most = 0
        for layer in range(first, end):
            current += self.weights[layer] + self.saved[layer] + self.work[layer]
            most = max(most, current)
            current -= self.work[layer]
        return most


def chain_of(
    forward: Sequence[float],
    saved: Sequence[int],
    in_flight: Sequence[int],
    usable: Sequence[int] | None = None,
    *,
    backward: Sequence[float] | None = None,
    weights: Sequence[int] | None = None,
    work: Sequence[int] | None = None,
    freed: Sequence[int] | None = None,
    moved: Sequence[int] | None = None,
    **more: Any,
) -> Layerwise:
    """Where nothing is said, backwards take twice as long as forwards, and layers have no weights and free nothing."""
    none = [0] * len(saved)
    numbers = Numbers(weights or none, saved, work or none, freed or none, moved or none, in_flight)
    return Layerwise(
        forward,
        backward or [2 * one for one in forward],
        numbers.freed,
        numbers.moved,
        in_flight,
        usable or [NEVER] * len(in_flight),
        numbers.peak,
        numbers.once,
        more.pop("transfer", [0.0] * (len(saved) + 1)),
        **more,
    )


def random_chain(dice: random.Random, stages: int) -> Layerwise:
    """Whole numbers of seconds and bytes, few enough that ties occur."""
    size = dice.randint(stages, stages + 8)
    saved = [dice.randint(1, 12) for _ in range(size)]
    weights = [dice.randint(0, 4) for _ in range(size)]
    limit = (sum(saved) * (stages + 1) // 2 + sum(weights)) * dice.choice([3, 5, 7, 9]) // (6 * stages)
    in_flight = dice.choice([list(range(stages, 0, -1)), [4] * stages])
    return chain_of(
        [float(dice.randint(1, 6)) for _ in range(size)],
        saved,
        in_flight,
        [limit + dice.randint(0, 9) for _ in range(stages)] if dice.random() < 0.9 else None,
        backward=[float(dice.randint(1, 9)) for _ in range(size)],
        weights=weights,
        work=[dice.randint(0, 5) for _ in range(size)],
        freed=[max(0, one - dice.randint(0, 4)) for one in saved],
        moved=[max(0, one - dice.randint(0, 4)) for one in saved],
        transfer=[float(dice.choice([0, 0, 30])) for _ in range(size + 1)],
        host_bandwidth=dice.choice([None, 0.5, 1.0, 2.0, 8.0]),
        copies_beside=dice.random() < 0.7,
    )
