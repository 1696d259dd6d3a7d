"""Small random chains, and allocations weighed one by one: the oracles of MadPipe."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator

from varuna_capslog.planners.madpipe.costs import ChainCosts

Parts = list[tuple[int, int, bool]]
"""Stages in order: first layer, end, special."""


def draw_chain(dice: random.Random, layers: int, devices: int) -> ChainCosts:
    """Layers that differ widely, with activations that shrink for half of the chains, and a limit of bytes."""
    forward = [dice.choice([0.05, dice.uniform(0.1, 2.0)]) for _ in range(layers)]
    static, saved = ([float(dice.randrange(1, most)) for _ in range(layers)] for most in (5, 20))
    if dice.random() < 0.5:
        saved.sort(reverse=True)
    crossing = [0.0, *(float(dice.randrange(1, 9)) for _ in range(layers - 1)), 0.0]
    pace = dice.choice([0.0, 0.02, 0.2])
    return ChainCosts(
        tuple(forward),
        tuple(one * dice.uniform(1.0, 3.0) for one in forward),
        tuple(static),
        tuple(saved),
        tuple(crossing),
        tuple(pace * size for size in crossing),
        devices,
        (sum(static) + sum(saved)) * dice.uniform(0.3, 1.3),
        dice.random() < 0.5,
    )


def plus(one: float, other: float, target: float) -> float:
    """The (+) of Sec. 4.2.2."""
    if ceiling(one / target) == ceiling((one + other) / target):
        return one + other
    return target * ceiling(one / target) + other


def ceiling(value: float) -> int:
    return math.ceil(value - 1e-9)


def every_allocation(layers: int, normal: int) -> Iterator[Parts]:
    """All stages, and all choices of special ones that leave at most so many normal ones."""
    for count in range(1, layers + 1):
        for cuts in itertools.combinations(range(1, layers), count - 1):
            bounds = [0, *cuts, layers]
            for special in itertools.product([False, True], repeat=count):
                if count - sum(special) <= normal:
                    yield list(zip(bounds[:-1], bounds[1:], special, strict=True))


def fits(costs: ChainCosts, parts: Parts, target: float, counting: str = "least") -> bool:
    """Whether loads and bytes of an allocation are within their limits, stage by stage from the last."""
    delay, load, held = 0.0, 0.0, 0.0
    usable = (costs.usable or math.inf) * (1 + 1e-9)
    for first, end, special in reversed(parts):
        seconds = sum(costs.forward[first:end]) + sum(costs.backward[first:end])
        in_flight, saved = ceiling((delay + seconds) / target), sum(costs.saved[first:end])
        own = sum(costs.static[first:end]) + 2 * (costs.crossing[first] + costs.crossing[end])
        if special:
            load, held = load + seconds, held + own + (in_flight - (counting != "most")) * saved
            if held + (saved if counting == "least" else 0) > usable:
                return False
        elif own + in_flight * saved > usable:
            return False
        wire = costs.transfer[first]
        if max(seconds, load, (1 + costs.shared) * wire) > target * (1 + 1e-9):
            return False
        delay = plus(plus(delay, seconds, target), 2 * wire, target)
    return True
