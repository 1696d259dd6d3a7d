"""MadPipe: stages of which one processor may hold several that do not follow one another, and a periodic schedule.

Beaumont, Eyraud-Dubois, Shilova, "MadPipe: Memory Aware Dynamic Programming Algorithm for Pipelined Model Parallelism",
ScaDL 2022. `allocation` finds the stages (Sec. 4.2), `pattern` when each operation starts (Sec. 4.3);
`planning/placed/periodic` makes plans of both.
"""

from __future__ import annotations

from varuna_capslog.planners.madpipe.allocation import Allocation, best_allocation
from varuna_capslog.planners.madpipe.costs import ChainCosts
from varuna_capslog.planners.madpipe.pattern import Pattern, periodic_pattern

__all__ = ["Allocation", "ChainCosts", "Pattern", "best_allocation", "periodic_pattern"]
