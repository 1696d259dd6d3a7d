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

One list scheduler makes them all. It plays a step in unit costs (forward 1, recompute 1, backward 2, messages 0) and
lets every idle rank take the best action that is ready; the order in which a rank took them is its list. Real durations
never enter, so that a schedule depends only on stages, microbatches and placement.
"""

from __future__ import annotations

__all__ = ["SCHEDULES", "in_flight_limits", "insert_recompute", "list_schedule", "make_schedule"]

import difflib
import heapq
import math
from collections.abc import Callable, Sequence

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.schedules.actions import Action, Schedule
from varuna_capslog.schedules.shape import ALWAYS_RECOMPUTE

_COST = {"F": 1, "R": 1, "B": 2}


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
    ranks = _check_placement(num_stages, num_microbatches, placement)
    always = name in ALWAYS_RECOMPUTE
    schedule = list_schedule(ranks, num_microbatches, limits, forwards_first=name == "gpipe", recompute=always)
    return insert_recompute(schedule) if recompute and not always else schedule


def in_flight_limits(name: str, num_stages: int, num_microbatches: int) -> list[int]:
    """The most microbatches a stage has in flight (forward begun, backward not ended) under the schedule, per stage."""
    if name not in SCHEDULES:
        near = difflib.get_close_matches(name.lower(), SCHEDULES, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"use one of {', '.join(SCHEDULES)}"
        raise CapslogError(f"unknown schedule {name!r}; {hint}")
    _check_placement(num_stages, num_microbatches, None)
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


# -- the list scheduler


def _check_placement(num_stages: int, num_microbatches: int, placement: Sequence[int] | None) -> list[int]:
    """`placement[stage]` -> rank, checked; None means one stage per rank, in order.

    Raises `CapslogError` unless there is at least one stage and one microbatch, one rank per stage, and the ranks are
    0, 1, ..., n - 1 without a gap (a rank without a stage would wait for ever in the step's collectives).
    """
    if num_stages < 1 or num_microbatches < 1:
        raise CapslogError(
            f"{num_stages} stages and {num_microbatches} microbatches: a schedule needs at least one of each"
        )
    if placement is None:
        return list(range(num_stages))
    ranks = list(placement)
    if len(ranks) != num_stages:
        raise CapslogError(
            f"placement {ranks} names {len(ranks)} ranks for {num_stages} stages; give one rank per stage"
        )
    if set(ranks) != set(range(len(set(ranks)))):
        raise CapslogError(f"placement {ranks} leaves a rank without a stage; use ranks 0, 1, ... without a gap")
    return ranks


class _Step:
    """What has been started so far in the played step; times are in units, an end may lie in the future."""

    def __init__(
        self, placement: list[int], num_microbatches: int, limits: Sequence[int], forwards_first: bool, recompute: bool
    ) -> None:
        self.num_stages, self.num_microbatches, self.limits = len(placement), num_microbatches, limits
        self.forwards_first, self.recompute = forwards_first, recompute
        # Deepest stage first: it shortens the way of the oldest microbatch and frees what it holds.
        self.stages_of_rank = [
            [stage for stage in reversed(range(len(placement))) if placement[stage] == rank]
            for rank in range(max(placement) + 1)
        ]
        self.forward_ends: list[list[int]] = [[] for _ in placement]
        self.backward_ends: list[list[int]] = [[] for _ in placement]
        self.graph_of: list[int | None] = [None] * len(placement)  # the microbatch whose graph a stage keeps alive
        self.last_of_stage: list[Action | None] = [None] * len(placement)

    def choose(self, rank: int, now: int) -> Action | None:
        """The rank's best ready action at time `now`: backward before recompute before forward."""
        stages = self.stages_of_rank[rank]
        if self.recompute:
            for stage in stages:
                self._keep_graph_if_due(stage, now)
        forwards_done = all(len(self.forward_ends[stage]) == self.num_microbatches for stage in stages)
        if not self.forwards_first or forwards_done:
            for stage in stages:
                if self._backward_ready(stage, now):
                    return Action(stage, "B", len(self.backward_ends[stage]))
        if self.recompute:
            for stage in stages:
                if self._recompute_ready(stage, now):
                    return Action(stage, "R", len(self.backward_ends[stage]))
        for stage in stages:
            if self._forward_ready(stage, now):
                return Action(stage, "F", len(self.forward_ends[stage]))
        return None

    def start(self, action: Action, now: int) -> int:
        """Books the action and returns its end."""
        end = now + _COST[action.kind]
        stage = action.stage
        if action.kind == "F":
            self.forward_ends[stage].append(end)
        elif action.kind == "B":
            self.backward_ends[stage].append(end)
        self.graph_of[stage] = action.microbatch if action.kind == "R" else None
        self.last_of_stage[stage] = action
        return end

    def _gradient_end(self, stage: int) -> float:
        """When the gradient for the stage's next backward arrives; inf while no rank has started to compute it."""
        microbatch = len(self.backward_ends[stage])
        is_last = stage == self.num_stages - 1
        ends = self.forward_ends[stage] if is_last else self.backward_ends[stage + 1]
        return ends[microbatch] if microbatch < len(ends) else math.inf

    def _backward_ready(self, stage: int, now: int) -> bool:
        has_graph = not self.recompute or self.graph_of[stage] == len(self.backward_ends[stage])
        return has_graph and self._gradient_end(stage) <= now

    def _gradient_due(self, stage: int, now: int) -> bool:
        """The next gradient is here or comes before an R would end: earlier would hold up forwards that still fit."""
        return self._gradient_end(stage) <= now + _COST["R"]

    def _keep_graph_if_due(self, stage: int, now: int) -> None:
        """Where nothing of the stage came after the forward, its graph is kept and the stage waits, instead of an R."""
        microbatch = len(self.backward_ends[stage])
        if self.last_of_stage[stage] == Action(stage, "F", microbatch) and self._gradient_due(stage, now):
            self.graph_of[stage] = microbatch

    def _recompute_ready(self, stage: int, now: int) -> bool:
        return self.graph_of[stage] is None and self._gradient_due(stage, now)

    def _forward_ready(self, stage: int, now: int) -> bool:
        microbatch = len(self.forward_ends[stage])
        in_flight = microbatch - len(self.backward_ends[stage])
        if microbatch == self.num_microbatches or in_flight >= self.limits[stage] or self.graph_of[stage] is not None:
            return False
        if stage == 0:
            return True
        ends = self.forward_ends[stage - 1]
        return microbatch < len(ends) and ends[microbatch] <= now


def list_schedule(
    placement: list[int],
    num_microbatches: int,
    limits: Sequence[int],
    *,
    forwards_first: bool = False,
    recompute: bool = False,
) -> Schedule:
    """The order in which each rank takes its forwards and backwards (and recomputes, with `recompute`).

    `limits[stage]` >= 1 bounds the microbatches in flight on a stage. `forwards_first`: no backward on a rank before
    its last forward. `recompute`: an R builds the graph for a backward and starts so that it ends when the gradient
    arrives; from R to B the stage does nothing else. No R where the forward was the stage's last action by then: its
    graph is kept and the stage waits.

    It cannot stall: the last stage with a microbatch in flight is always able to run its backward; without one, the
    deepest microbatch can go one stage further. Cost: O(distinct times x stages).
    """
    step = _Step(placement, num_microbatches, limits, forwards_first, recompute)
    schedule: Schedule = [[] for _ in step.stages_of_rank]
    free_at = [0] * len(schedule)
    wake_ups = [0]
    while wake_ups:
        now = heapq.heappop(wake_ups)
        while wake_ups and wake_ups[0] == now:
            heapq.heappop(wake_ups)
        for rank, actions in enumerate(schedule):
            if free_at[rank] > now:
                continue
            action = step.choose(rank, now)
            if action is None:
                continue
            end = free_at[rank] = step.start(action, now)
            actions.append(action)
            heapq.heappush(wake_ups, end)
            if recompute and action.kind == "B":
                heapq.heappush(wake_ups, end - _COST["R"])
    return schedule
