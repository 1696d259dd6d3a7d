"""GPipe's schedule: all forwards, then all backwards (Huang et al., 2019).

Called through `make_schedule`. Every stage holds all microbatches of the step at once. GPipe runs the backwards in
reverse order; ours run in ascending order, because gradients of microbatches are added in order (the engine's
exactness rule).
"""

from __future__ import annotations

__all__ = ["gpipe_limits", "gpipe_schedule"]

from varuna_capslog.schedules.actions import Schedule
from varuna_capslog.schedules.list_scheduler import list_schedule
from varuna_capslog.schedules.recompute import insert_recompute


def gpipe_limits(num_stages: int, num_microbatches: int) -> list[int]:
    """Microbatches in flight per stage: all of them."""
    return [num_microbatches] * num_stages


def gpipe_schedule(placement: list[int], num_microbatches: int, recompute: bool) -> Schedule:
    """`placement[stage]` -> rank; on every rank all forwards of all its stages come before its first backward."""
    limits = gpipe_limits(len(placement), num_microbatches)
    schedule = list_schedule(placement, num_microbatches, limits, forwards_first=True)
    return insert_recompute(schedule) if recompute else schedule
