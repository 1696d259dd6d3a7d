"""Recomputation as a pass over a schedule, and which forwards keep their graph.

With recomputation a forward runs without a graph, keeps only the stage's input, and an R builds the graph again right
before the backward. The generators call the pass; the engine and the simulator ask which forwards keep their graph.
"""

from __future__ import annotations

__all__ = ["graph_keeping_forwards", "insert_recompute"]

from collections.abc import Iterable, Sequence

from varuna_capslog.schedules.actions import Action, Schedule


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


def graph_keeping_forwards(schedule: Iterable[Iterable[Action]]) -> set[tuple[int, int]]:
    """The (stage, microbatch) pairs whose F must build a graph: those that no R builds again."""
    forwards: set[tuple[int, int]] = set()
    recomputed: set[tuple[int, int]] = set()
    for actions in schedule:
        for action in actions:
            if action.microbatch is not None and action.kind in "FR":
                (forwards if action.kind == "F" else recomputed).add((action.stage, action.microbatch))
    return forwards - recomputed
