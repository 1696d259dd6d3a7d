"""Synthetic chains for planners that choose a memory action per layer, with bytes that are plain sums."""

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
    """Bytes per layer: weights, saved bytes of each microbatch in flight, and work bytes while the layer runs."""

    weights: Sequence[int]
    saved: Sequence[int]
    work: Sequence[int]
    freed: Sequence[int]
    moved: Sequence[int]
    in_flight: Sequence[int]

    def peak(self, stage: int, first: int, end: int, intervals: tuple[MemoryInterval, ...]) -> int:
        kinds = {layer: interval.kind for interval in intervals for layer in range(interval.first, interval.end)}
        less = {"recompute": self.freed, "offload": self.moved}
        held = [self.saved[n] - (less[kinds[n]][n] if n in kinds else 0) for n in range(first, end)]
        return sum(self.weights[first:end]) + self.in_flight[stage] * sum(held)

    def once(self, first: int, end: int) -> int:
        """Return the peak of lines 6 to 9 of DawnPiper's Algorithm 2 over these layers."""
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
    """Build a chain. By default backwards take twice as long as forwards; layers have no weights and free nothing."""
    none = [0] * len(saved)
    numbers = Numbers(weights or none, saved, work or none, freed or none, moved or none, in_flight)
    return Layerwise(
        forward,
        backward or [2 * seconds for seconds in forward],
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
    """Draw a chain with whole seconds and bytes, small enough that ties occur."""
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
        freed=[max(0, layer_bytes - dice.randint(0, 4)) for layer_bytes in saved],
        moved=[max(0, layer_bytes - dice.randint(0, 4)) for layer_bytes in saved],
        transfer=[float(dice.choice([0, 0, 30])) for _ in range(size + 1)],
        host_bandwidth=dice.choice([None, 0.5, 1.0, 2.0, 8.0]),
        copies_beside=dice.random() < 0.7,
    )
