"""The one list scheduler behind all generators.

It plays a step in unit costs (forward 1, recompute 1, backward 2, messages 0) and lets every idle rank take the best
action that is ready; the order in which a rank took them is its list. The generators choose limits and rules; only
they call it. Real durations never enter, so that a schedule depends only on stages, microbatches and
placement.
"""

from __future__ import annotations

__all__ = ["check_placement", "list_schedule"]

import heapq
from collections.abc import Sequence

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.schedules.actions import Action, Schedule

_COST = {"F": 1, "R": 1, "B": 2}


def check_placement(num_stages: int, num_microbatches: int, placement: Sequence[int] | None) -> list[int]:
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

    def _gradient_end(self, stage: int) -> int | None:
        """When the gradient for the stage's next backward arrives; None while no rank has started to compute it."""
        microbatch = len(self.backward_ends[stage])
        if microbatch >= len(self.forward_ends[stage]):
            return None
        if stage == self.num_stages - 1:
            return self.forward_ends[stage][microbatch]
        ends = self.backward_ends[stage + 1]
        return ends[microbatch] if microbatch < len(ends) else None

    def _backward_ready(self, stage: int, now: int) -> bool:
        end = self._gradient_end(stage)
        if end is None or end > now:
            return False
        return not self.recompute or self.graph_of[stage] == len(self.backward_ends[stage])

    def _gradient_due(self, stage: int, now: int) -> bool:
        """The next gradient is here or comes before an R would end: earlier would hold up forwards that still fit."""
        end = self._gradient_end(stage)
        return end is not None and end <= now + _COST["R"]

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
