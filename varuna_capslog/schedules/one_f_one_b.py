"""The 1F1B schedule: one forward, one backward in the steady state (PipeDream-Flush, Narayanan et al., 2021).

Called through `make_schedule`. Stage s of S holds at most S - s microbatches, whatever their number. With several
stages per rank the same limits and the rule "backward first" hold; the order is then ours and not Megatron's
interleaved one.
"""

from __future__ import annotations

__all__ = ["one_f_one_b_limits", "one_f_one_b_schedule"]

from varuna_capslog.schedules.actions import Schedule
from varuna_capslog.schedules.list_scheduler import list_schedule
from varuna_capslog.schedules.recompute import insert_recompute


def one_f_one_b_limits(num_stages: int, num_microbatches: int) -> list[int]:
    """Microbatches in flight per stage: min(S - s, M)."""
    return [min(num_stages - stage, num_microbatches) for stage in range(num_stages)]


def one_f_one_b_schedule(placement: list[int], num_microbatches: int, recompute: bool) -> Schedule:
    """`placement[stage]` -> rank; one stage per rank gives the textbook's lists exactly."""
    schedule = list_schedule(placement, num_microbatches, one_f_one_b_limits(len(placement), num_microbatches))
    return insert_recompute(schedule) if recompute else schedule
