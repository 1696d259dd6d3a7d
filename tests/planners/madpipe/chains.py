"""Small random chains, and a check of single allocations: the oracles of MadPipe."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator

from varuna_capslog.planners.madpipe.allocation import ChainCosts

Parts = list[tuple[int, int, bool]]
"""Stages in order: first layer, end, special."""


def draw_chain(dice: random.Random, layers: int, devices: int) -> ChainCosts:
    """Draw layers that differ widely and a limit of bytes; in half of the chains activations shrink."""
    forward = [dice.choice([0.05, dice.uniform(0.1, 2.0)]) for _ in range(layers)]
    static, saved = ([float(dice.randrange(1, most)) for _ in range(layers)] for most in (5, 20))
    if dice.random() < 0.5:
        saved.sort(reverse=True)
    crossing = [0.0, *(float(dice.randrange(1, 9)) for _ in range(layers - 1)), 0.0]
    pace = dice.choice([0.0, 0.02, 0.2])
    return ChainCosts(
        tuple(forward),
        tuple(seconds * dice.uniform(1.0, 3.0) for seconds in forward),
        tuple(static),
        tuple(saved),
        tuple(crossing),
        tuple(pace * size for size in crossing),
        devices,
        (sum(static) + sum(saved)) * dice.uniform(0.3, 1.3),
        dice.random() < 0.5,
    )


def plus(delay: float, added: float, target: float) -> float:
    """Return the (+) of Sec. 4.2.2."""
    if ceiling(delay / target) == ceiling((delay + added) / target):
        return delay + added
    return target * ceiling(delay / target) + added


def ceiling(ratio: float) -> int:
    return math.ceil(ratio - 1e-9)


def every_allocation(layers: int, normal: int) -> Iterator[Parts]:
    """Yield all stages with all choices of special stages that leave at most `normal` normal ones."""
    for count in range(1, layers + 1):
        for cuts in itertools.combinations(range(1, layers), count - 1):
            bounds = [0, *cuts, layers]
            for special in itertools.product([False, True], repeat=count):
                if count - sum(special) <= normal:
                    yield list(zip(bounds[:-1], bounds[1:], special, strict=True))


def fits(costs: ChainCosts, parts: Parts, target: float, counting: str = "least") -> bool:
    """Return True if the allocation's loads and bytes are within their limits; stages are checked from the last."""
    delay, load = 0.0, 0.0
    special_stages: list[tuple[float, float]] = []  # always held, and saved by one call, from the last stage on
    usable = (costs.usable or math.inf) * (1 + 1e-9)
    for first, end, special in reversed(parts):
        seconds = sum(costs.forward[first:end]) + sum(costs.backward[first:end])
        in_flight, saved = ceiling((delay + seconds) / target), sum(costs.saved[first:end])
        stage_bytes = sum(costs.static[first:end]) + 2 * (costs.crossing[first] + costs.crossing[end])
        if special:
            load += seconds
            special_stages.append((stage_bytes + (in_flight - 1) * saved, saved))
        elif stage_bytes + in_flight * saved > usable:
            return False
        wire = costs.transfer[first]
        if max(seconds, load, (1 + costs.shared) * wire) > target * (1 + 1e-9):
            return False
        delay = plus(plus(delay, seconds, target), 2 * wire, target)
    saved_bytes = [saved for _, saved in special_stages] or [0.0]
    more = {"least": max(saved_bytes), "most": sum(saved_bytes), "printed": 0.0, "none": 0.0}[counting]
    return sum(held for held, _ in special_stages) + more <= usable
