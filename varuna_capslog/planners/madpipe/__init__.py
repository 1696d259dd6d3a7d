"""MadPipe: an allocation in which one processor may hold several non-consecutive stages, and its periodic schedule.

Beaumont, Eyraud-Dubois, Shilova, "MadPipe: Memory Aware Dynamic Programming Algorithm for Pipelined Model Parallelism",
ScaDL 2022. `allocation` finds the stages (Sec. 4.2), `pattern` the start of each operation (Sec. 4.3), and
`planning/placed/periodic` makes plans from both.
"""

from __future__ import annotations

import time

from varuna_capslog.planners.madpipe.allocation import CLOSE, Allocation, ChainCosts, best_allocation
from varuna_capslog.planners.madpipe.pattern import Pattern, periodic_pattern

__all__ = [
    "CLOSE",
    "COMPARED_COUNTINGS",
    "Allocation",
    "ChainCosts",
    "Pattern",
    "allocations_by_counting",
    "best_allocation",
    "periodic_pattern",
    "shortest_pattern",
]

COMPARED_COUNTINGS = ("least", "most", "none")
"""Members of `COUNTINGS` whose allocations are compared by their schedules."""


def allocations_by_counting(costs: ChainCosts) -> dict[str, Allocation]:
    """Return the best allocation of each counting that has one. An allocation that fits by a later counting of
    `COMPARED_COUNTINGS` also fits by the first, so none has a shorter period than the first.
    """
    allocations, at_least = dict[str, Allocation](), 0.0
    for counting in COMPARED_COUNTINGS if costs.devices > 1 else ("none",):
        allocation = best_allocation(costs, counting, at_least)
        if allocation is None and not allocations:
            break
        if allocation is not None:
            at_least = at_least or allocation.period / (1 + CLOSE)
            allocations[counting] = allocation
    return allocations


def shortest_pattern(costs: ChainCosts, limit_seconds: float = 60.0) -> Pattern | None:
    """Return the pattern of the shortest period over all countings; None where nothing fits, or none was found in time.
    limit_seconds: of all linear programs.
    """
    best, ends = None, time.perf_counter() + limit_seconds
    by_stages = {allocation.stages: allocation for allocation in allocations_by_counting(costs).values()}
    for allocation in sorted(by_stages.values(), key=lambda allocation: allocation.load(costs)):
        over = time.perf_counter() >= ends
        if over or (best is not None and allocation.load(costs) >= best.period):
            break  # a period is never shorter than the load
        pattern = periodic_pattern(costs, allocation, limit_seconds=ends - time.perf_counter())
        if pattern is not None and (best is None or pattern.period < best.period):
            best = pattern
    return best
