"""MadPipe: stages of which one processor may hold several that do not follow one another, and a periodic schedule.

Beaumont, Eyraud-Dubois, Shilova, "MadPipe: Memory Aware Dynamic Programming Algorithm for Pipelined Model Parallelism",
ScaDL 2022. `allocation` finds the stages (Sec. 4.2), `pattern` when each operation starts (Sec. 4.3);
`planning/placed/periodic` makes plans of both.
"""

from __future__ import annotations

from varuna_capslog.planners.madpipe.allocation import Allocation, best_allocation
from varuna_capslog.planners.madpipe.costs import ChainCosts
from varuna_capslog.planners.madpipe.pattern import Pattern, periodic_pattern

__all__ = [
    "WEIGHED",
    "Allocation",
    "ChainCosts",
    "Pattern",
    "best_allocation",
    "periodic_pattern",
    "shortest_pattern",
]

WEIGHED = ("least", "most", "none")
"""Those of `COUNTINGS` between which the schedules decide."""


def shortest_pattern(costs: ChainCosts) -> Pattern | None:
    """The pattern of the shortest period of all countings; None where nothing fits."""
    found = {one.stages: one for counting in WEIGHED if (one := best_allocation(costs, counting)) is not None}
    best: Pattern | None = None
    for one in sorted(found.values(), key=lambda one: one.load(costs)):
        if best is not None and one.load(costs) >= best.period:
            break  # its period is no shorter than its loads
        pattern = periodic_pattern(costs, one)
        if pattern is not None and (best is None or pattern.period < best.period):
            best = pattern
    return best
