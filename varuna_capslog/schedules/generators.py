"""Schedules by name: GPipe's, 1F1B and Varuna's, which differ in their limits and in two rules of the list scheduler.

`gpipe` (Huang et al., 2019): all forwards of a rank's stages, then all backwards, so every stage holds all microbatches
at once. GPipe runs the backwards in reverse order; ours run in ascending order, because gradients of microbatches are
added in order (the engine's exactness rule).

`1f1b` (PipeDream-Flush, Narayanan et al., 2021): one forward, one backward in the steady state; with one stage per rank
the textbook's lists exactly. With several the same limits and the rule "backward first" hold; the order is then ours
and not Megatron's interleaved one.

`varuna` (Athlur et al., EuroSys 2022): a backward goes before a forward; a recompute starts so that it ends when the
gradient arrives; between the recompute and the backward the stage does nothing else; the last stage runs forward and
backward of a microbatch back to back. So a stage keeps one live graph at any time, which is what M_i + sum M_a
predicts. It is made from these rules and is not a copy of the lists that Microsoft's generator prints.

With recomputation a forward runs without a graph, keeps only the stage's input, and an R builds the graph again right
before the backward.
"""

from __future__ import annotations

__all__ = ["SCHEDULES", "in_flight_limits", "insert_recompute", "make_schedule"]

import difflib
from collections.abc import Callable, Sequence

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.schedules.actions import Action, Schedule
from varuna_capslog.schedules.list_scheduler import check_placement, list_schedule
from varuna_capslog.schedules.shape import ALWAYS_RECOMPUTE


def _gpipe_limits(num_stages: int, num_microbatches: int) -> list[int]:
    """All microbatches."""
    return [num_microbatches] * num_stages


def _one_f_one_b_limits(num_stages: int, num_microbatches: int) -> list[int]:
    """min(S - s, M)."""
    return [min(num_stages - stage, num_microbatches) for stage in range(num_stages)]


def _varuna_limits(num_stages: int, num_microbatches: int) -> list[int]:
    """3 (S - 1 - s), at least 1 and at most M.

    A microbatch in flight keeps only the stage's input (no graph), so the limit is wider than 1F1B's. A microbatch is
    away from a stage for up to three units per deeper stage (one forward, one backward of two); in unit costs a smaller
    limit makes the step longer, and a larger one does not make it shorter.
    """
    return [max(1, min(num_microbatches, 3 * (num_stages - 1 - stage))) for stage in range(num_stages)]


_LIMITS: dict[str, Callable[[int, int], list[int]]] = {
    "gpipe": _gpipe_limits,
    "1f1b": _one_f_one_b_limits,
    "varuna": _varuna_limits,
}

SCHEDULES = tuple(_LIMITS)
"""The names that `make_schedule` knows."""


def make_schedule(
    name: str,
    num_stages: int,
    num_microbatches: int,
    placement: Sequence[int] | None = None,
    recompute: bool = False,
) -> Schedule:
    """The actions of one step of one pipeline, one ordered list per rank.

    Args:
        name: `gpipe`, `1f1b` or `varuna` (which always recomputes).
        num_stages: stages of the pipeline, at least 1.
        num_microbatches: microbatches of the step that this pipeline runs, at least 1.
        placement: `placement[stage]` -> rank; default: stage s on rank s. Several stages may share a rank, in any
            order.
        recompute: put an R before each B whose forward was not the stage's last action.

    Raises `CapslogError` for an unknown name or numbers that make no schedule.
    """
    limits = in_flight_limits(name, num_stages, num_microbatches)
    ranks = check_placement(num_stages, num_microbatches, placement)
    always = name in ALWAYS_RECOMPUTE
    schedule = list_schedule(ranks, num_microbatches, limits, forwards_first=name == "gpipe", recompute=always)
    return insert_recompute(schedule) if recompute and not always else schedule


def in_flight_limits(name: str, num_stages: int, num_microbatches: int) -> list[int]:
    """The most microbatches a stage has in flight (forward begun, backward not ended) under the schedule, per stage."""
    if name not in SCHEDULES:
        near = difflib.get_close_matches(name.lower(), SCHEDULES, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"use one of {', '.join(SCHEDULES)}"
        raise CapslogError(f"unknown schedule {name!r}; {hint}")
    check_placement(num_stages, num_microbatches, None)
    return _LIMITS[name](num_stages, num_microbatches)


def insert_recompute(schedule: Sequence[Sequence[Action]]) -> Schedule:
    """Puts an R directly before every B that needs one, on the stage of the B.

    Where the forward of the same microbatch is the stage's last action before the B, no R is needed: nothing of that
    stage comes between, so keeping the forward's graph costs no more than building it again.
    """
    result: Schedule = []
    for actions in schedule:
        row: list[Action] = []
        last_of_stage: dict[int, Action] = {}
        for action in actions:
            if action.kind == "B" and last_of_stage.get(action.stage) != Action(action.stage, "F", action.microbatch):
                row.append(Action(action.stage, "R", action.microbatch))
            row.append(action)
            last_of_stage[action.stage] = action
        result.append(row)
    return result
