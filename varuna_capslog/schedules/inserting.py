"""What is put into a finished order of forwards and backwards.

Recomputations, copies to and from the host tier, and the two halves of each backward.
"""

from __future__ import annotations

__all__ = ["insert_offload", "insert_recompute", "split_backwards"]

from collections.abc import Sequence

from varuna_capslog.schedules.actions import Action, Schedule, backwards_at_once


def insert_recompute(schedule: Sequence[Sequence[Action]], recompute: Sequence[bool] | None = None) -> Schedule:
    """Puts an R directly before every B or I that needs one, on its stage.

    Where the forward of the same microbatch is the stage's last action before it, no R is needed: nothing of that
    stage comes between, so keeping the forward's graph costs no more than building it again.

    recompute: stage -> whether it recomputes; default: every stage.
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
    """Puts an O behind every F of the stages that offload, but where the backward follows at once, and an L before the
    R, B or I.

    The L stands one computation earlier than what needs it, so that both copies run beside a computation; where that
    would be directly behind the O, it stands directly before what needs it.

    offload: stage -> whether it offloads; a shorter list: no further one does.
    """
    if not any(offload):
        return [list(actions) for actions in schedule]
    result: Schedule = []
    for actions in schedule:
        row: list[Action] = []
        kept = backwards_at_once(actions)
        away: set[tuple[int, int]] = set()
        begin = 0  # where the last computation and what belongs to it stand in the row
        for action in actions:
            assert action.microbatch is not None
            here = action.stage, action.microbatch
            load = action.kind in "RBI" and here in away
            if load:
                away.discard(here)
                just_left = Action(action.stage, "O", action.microbatch) in row[max(0, begin - 1) :]
                row.insert(len(row) if just_left else begin, Action(action.stage, "L", action.microbatch))
            begin = len(row)
            row.append(action)
            if action.kind == "F" and here not in kept and action.stage < len(offload) and offload[action.stage]:
                row.append(Action(action.stage, "O", action.microbatch))
                away.add(here)
        result.append(row)
    return result


def split_backwards(schedule: Sequence[Sequence[Action]], delays: Sequence[int]) -> Schedule:
    """Every B in two halves: I in its place, and W directly behind the I of the microbatch that is so many calls later.

    delays: stage -> how many calls its W comes later; what is left comes at the end of the rank's list, the stages of
        the later layers first.
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
        result.append([*row, *(one for stage in sorted(waiting, reverse=True) for one in waiting[stage])])
    return result
