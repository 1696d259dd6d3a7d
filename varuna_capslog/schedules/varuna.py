"""Varuna's schedule: recompute just before the gradient arrives (Athlur et al., EuroSys 2022).

Called through `make_schedule`. Its rules: a backward goes before a forward; a recompute starts so that it ends when the
gradient arrives; between the recompute and the backward the stage does nothing else; the last stage runs forward and
backward of a microbatch back to back. So a stage keeps one live graph at any time, which is what M_i + sum M_a
predicts. It is made from these rules and is not a copy of the lists that Microsoft's generator prints.
"""

from __future__ import annotations

__all__ = ["varuna_limits", "varuna_schedule"]

from varuna_capslog.schedules.actions import Schedule
from varuna_capslog.schedules.list_scheduler import list_schedule


def varuna_limits(num_stages: int, num_microbatches: int) -> list[int]:
    """Microbatches in flight per stage: 3 (S - 1 - s), at least 1 and at most M.

    A microbatch in flight keeps only the stage's input (no graph), so the limit is wider than 1F1B's. A microbatch is
    away from a stage for up to three units per deeper stage (one forward, one backward of two); in unit costs a smaller
    limit makes the step longer, and a larger one does not make it shorter.
    """
    return [max(1, min(num_microbatches, 3 * (num_stages - 1 - stage))) for stage in range(num_stages)]


def varuna_schedule(placement: list[int], num_microbatches: int) -> Schedule:
    """`placement[stage]` -> rank; always recomputes."""
    limits = varuna_limits(len(placement), num_microbatches)
    return list_schedule(placement, num_microbatches, limits, recompute=True)
