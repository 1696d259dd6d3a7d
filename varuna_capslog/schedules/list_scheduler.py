"""A list scheduler: it simulates a step in unit costs, in which every idle rank starts the best action that is ready.

A forward and a recomputation of a microbatch take 1, a backward 2, messages 0. The order in which a rank starts its
actions is its list. Real durations are not used, so that a schedule depends only on stages, microbatches and placement.
"""

from __future__ import annotations

__all__ = ["list_schedule"]

import heapq
import math
from collections.abc import Sequence

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.schedules.actions import Action, Schedule
from varuna_capslog.schedules.stage_graph import StageGraph

_COST = {"F": 1, "R": 1, "B": 2}


class _Step:
    """The actions started so far in the simulated step; times are in units, an end may lie in the future."""

    def __init__(
        self, graph: StageGraph, limits: Sequence[int], forwards_first: bool, recompute: Sequence[bool]
    ) -> None:
        self.limits, self.forwards_first = limits, forwards_first
        self.recompute = recompute or [False] * len(limits)
        self.upstream, self.downstream = graph.upstream, graph.downstream
        self.calls, self.grains = [len(row) for row in graph.calls], graph.grains
        # Deepest stage first: the oldest microbatch ends earlier, and its memory is freed.
        deepest = sorted(range(len(graph.ranks)), key=lambda stage: (graph.depths[stage], -stage))
        self.stages_of_rank = [
            [stage for stage in deepest if graph.ranks[stage] == rank] for rank in range(graph.num_ranks)
        ]
        self.forward_ends: list[list[int]] = [[] for _ in graph.ranks]
        self.backward_ends: list[list[int]] = [[] for _ in graph.ranks]
        self.graph_of: list[int | None] = [None] * len(graph.ranks)  # the call whose autograd graph a stage keeps
        self.last_of_stage: list[Action | None] = [None] * len(graph.ranks)

    def choose(self, rank: int, now: int) -> Action | None:
        """Return the rank's best ready action at time `now`: backward before recompute before forward."""
        stages = self.stages_of_rank[rank]
        for stage in stages:
            if self.recompute[stage]:
                self._keep_graph_if_due(stage, now)
        forwards_done = all(len(self.forward_ends[stage]) == self.calls[stage] for stage in stages)
        if not self.forwards_first or forwards_done:
            for stage in stages:
                if self._backward_ready(stage, now):
                    return Action(stage, "B", len(self.backward_ends[stage]))
        for stage in stages:
            if self.recompute[stage] and self._recompute_ready(stage, now):
                return Action(stage, "R", len(self.backward_ends[stage]))
        for stage in stages:
            if self._forward_ready(stage, now):
                return Action(stage, "F", len(self.forward_ends[stage]))
        return None

    def start(self, action: Action, now: int) -> int:
        """Record the start of the action and return its end."""
        stage = action.stage
        end = now + _COST[action.kind] * self.grains[stage]
        if action.kind == "F":
            self.forward_ends[stage].append(end)
        elif action.kind == "B":
            self.backward_ends[stage].append(end)
        self.graph_of[stage] = action.microbatch if action.kind == "R" else None
        self.last_of_stage[stage] = action
        return end

    def _gradient_end(self, stage: int) -> float:
        """Return the time at which the gradient of the stage's next backward arrives; inf before its computation."""
        call = len(self.backward_ends[stage])
        if call >= self.calls[stage]:
            return math.inf
        after = self.downstream[stage][call]
        if not after:
            ends = self.forward_ends[stage]
            return ends[call] if call < len(ends) else math.inf
        rows = [(self.backward_ends[stage_after], place) for stage_after, place in after]
        return max(ends[place] if place < len(ends) else math.inf for ends, place in rows)

    def _backward_ready(self, stage: int, now: int) -> bool:
        has_graph = not self.recompute[stage] or self.graph_of[stage] == len(self.backward_ends[stage])
        return has_graph and self._gradient_end(stage) <= now

    def _gradient_due(self, stage: int, now: int) -> bool:
        """Return True once the next gradient arrives before an R would end: an earlier R would delay forwards."""
        return self._gradient_end(stage) <= now + _COST["R"] * self.grains[stage]

    def _keep_graph_if_due(self, stage: int, now: int) -> None:
        """Keep the forward's graph instead of an R, if the forward is the stage's last action; the stage then waits."""
        microbatch = len(self.backward_ends[stage])
        if self.last_of_stage[stage] == Action(stage, "F", microbatch) and self._gradient_due(stage, now):
            self.graph_of[stage] = microbatch

    def _recompute_ready(self, stage: int, now: int) -> bool:
        return self.graph_of[stage] is None and self._gradient_due(stage, now)

    def _forward_ready(self, stage: int, now: int) -> bool:
        call = len(self.forward_ends[stage])
        in_flight = call - len(self.backward_ends[stage])
        if call == self.calls[stage] or in_flight >= self.limits[stage] or self.graph_of[stage] is not None:
            return False
        rows = [(self.forward_ends[stage_before], place) for stage_before, place in self.upstream[stage][call]]
        return all(place < len(ends) and ends[place] <= now for ends, place in rows)

    def check_complete(self) -> None:
        """Raise CapslogError if a stage could not do all its calls."""
        for stage, ends in enumerate(self.backward_ends):
            if len(ends) < self.calls[stage]:
                rows = enumerate(self.backward_ends)
                full = next(
                    (stage_number for stage_number, done in rows if self._is_full(stage_number, len(done))), stage
                )
                raise CapslogError(
                    f"stage {full} may have {self.limits[full]} calls in flight, which is less than a stage behind it "
                    "takes at once; raise its in_flight"
                )

    def _is_full(self, stage: int, ended: int) -> bool:
        return len(self.forward_ends[stage]) < self.calls[stage] and (
            len(self.forward_ends[stage]) - ended >= self.limits[stage]
        )


def list_schedule(
    graph: StageGraph, limits: Sequence[int], *, forwards_first: bool = False, recompute: Sequence[bool] = ()
) -> Schedule:
    """Return the order in which each rank runs its forwards and backwards (and recomputes, with `recompute`).

    `limits[stage]` >= 1 bounds the microbatches in flight on a stage. `forwards_first`: no backward on a rank before
    its last forward. `recompute[stage]` (default: no stage): an R builds the graph for a backward and starts so that it
    ends when the gradient arrives; from R to B the stage does nothing else. No R where the forward was the stage's last
    action by then: its graph is kept and the stage waits.

    Where all grains are equal it cannot stall: all stages take microbatches in rising order, so that the first
    microbatch which has not ended is the next one of every stage on its route, and none of these is at its limit. Cost:
    O(distinct times x stages).

    Raises CapslogError where a limit holds back microbatches that a stage with a larger grain waits for.
    """
    step = _Step(graph, limits, forwards_first, recompute)
    schedule: Schedule = [[] for _ in step.stages_of_rank]
    free_at = [0] * len(schedule)
    again_of = {_COST["R"] * grain for grain in graph.grains} if any(recompute) else set()
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
            for cost in again_of if action.kind == "B" else ():
                heapq.heappush(wake_ups, max(now, end - cost))
    step.check_complete()
    return schedule
