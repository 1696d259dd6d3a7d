"""MadPipe: stages of which one processor may hold several that do not follow one another, and a periodic schedule.

Beaumont, Eyraud-Dubois, Shilova, "MadPipe: Memory Aware Dynamic Programming Algorithm for Pipelined Model Parallelism",
ScaDL 2022. `allocation` finds the stages (Sec. 4.2), `pattern` when each operation starts (Sec. 4.3);
`planning/placed/periodic` makes plans of both.
"""

from __future__ import annotations

from varuna_capslog.planners.madpipe.allocation import CLOSE, Allocation, best_allocation
from varuna_capslog.planners.madpipe.costs import ChainCosts
from varuna_capslog.planners.madpipe.pattern import Pattern, periodic_pattern

__all__ = [
    "CLOSE",
    "WEIGHED",
    "Allocation",
    "ChainCosts",
    "Pattern",
    "best_allocation",
    "periodic_pattern",
    "shortest_pattern",
    "weighed_allocations",
]

WEIGHED = ("least", "most", "none")
"""Those of `COUNTINGS` between which the schedules decide."""


def weighed_allocations(costs: ChainCosts) -> dict[str, Allocation]:
    """counting -> its best allocation, where it has one.

    What fits by another counting of `WEIGHED` fits by the first as well, so that none has a shorter period than it.
    """
    found, at_least = dict[str, Allocation](), 0.0
    for counting in WEIGHED if costs.devices > 1 else ("none",):
        one = best_allocation(costs, counting, at_least)
        if one is None and not found:
            break
        if one is not None:
            at_least = at_least or one.period / (1 + CLOSE)
            found[counting] = one
    return found


def shortest_pattern(costs: ChainCosts) -> Pattern | None:
    """The pattern of the shortest period of all countings; None where nothing fits."""
    best: Pattern | None = None
    every = {one.stages: one for one in weighed_allocations(costs).values()}
    for one in sorted(every.values(), key=lambda one: one.load(costs)):
        if best is not None and one.load(costs) >= best.period:
            break  # its period is no shorter than its loads
        pattern = periodic_pattern(costs, one)
        if pattern is not None and (best is None or pattern.period < best.period):
            best = pattern
    return best
