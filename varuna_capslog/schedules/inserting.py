"""Inserts recomputations, copies to and from the host tier, and halves of backwards into a finished order."""

from __future__ import annotations

__all__ = ["insert_offload", "insert_recompute", "split_backwards"]

from collections.abc import Sequence

from varuna_capslog.schedules.actions import Action, Schedule, backwards_at_once


def insert_recompute(schedule: Sequence[Sequence[Action]], recompute: Sequence[bool] | None = None) -> Schedule:
    """Insert an R directly before every B or I that needs one, on its stage.

    Where the forward of the same microbatch is the stage's last action before it, no R is needed: no action of that
    stage comes between, so keeping the forward's graph costs no more than building it again.

    recompute: stage -> True where it recomputes; default: every stage.
    """
    result: Schedule = []
    for actions in schedule:
        row: list[Action] = []
        kept = backwards_at_once(actions)
        for action in actions:
            again = action.kind in "BI" and (recompute is None or recompute[action.stage])
            if again and (action.stage, action.microbatch) not in kept:
                row.append(Action(action.stage, "R", action.microbatch))
            row.append(action)
        result.append(row)
    return result


def insert_offload(schedule: Sequence[Sequence[Action]], offload: Sequence[bool]) -> Schedule:
    """Insert an O behind every F of the stages that offload, except where the backward follows at once, and an L before
    the R, B or I.

    The L is one computation earlier than the action that needs it, so that both copies run beside a computation; where
    that would be directly behind the O, the L is directly before the action that needs it.

    offload: stage -> True where it offloads; stages beyond a shorter list do not.
    """
    if not any(offload):
        return [list(actions) for actions in schedule]
    result: Schedule = []
    for actions in schedule:
        row: list[Action] = []
        kept = backwards_at_once(actions)
        away: set[tuple[int, int]] = set()
        begin = 0  # position in the row of the last computation
        for action in actions:
            assert action.microbatch is not None
            call = action.stage, action.microbatch
            load = action.kind in "RBI" and call in away
            if load:
                away.discard(call)
                just_left = Action(action.stage, "O", action.microbatch) in row[max(0, begin - 1) :]
                row.insert(len(row) if just_left else begin, Action(action.stage, "L", action.microbatch))
            begin = len(row)
            row.append(action)
            if action.kind == "F" and call not in kept and action.stage < len(offload) and offload[action.stage]:
                row.append(Action(action.stage, "O", action.microbatch))
                away.add(call)
        result.append(row)
    return result


def split_backwards(schedule: Sequence[Sequence[Action]], delays: Sequence[int]) -> Schedule:
    """Split every B into two halves: I in its place, and W behind the I of the call that is `delays[stage]` later.

    delays: stage -> number of calls by which its W comes later; remaining W come at the end of the rank's list, those
        of the last stages first.
    """
    result: Schedule = []
    for actions in schedule:
        row: list[Action] = []
        waiting: dict[int, list[Action]] = {}
        for action in actions:
            if action.kind != "B":
                row.append(action)
                continue
            row.append(Action(action.stage, "I", action.microbatch))
            queue = waiting.setdefault(action.stage, [])
            queue.append(Action(action.stage, "W", action.microbatch))
            if len(queue) > delays[action.stage]:
                row.append(queue.pop(0))
        result.append(
            [*row, *(weight_half for stage in sorted(waiting, reverse=True) for weight_half in waiting[stage])]
        )
    return result
