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

__all__ = [
    "SCHEDULES",
    "in_flight_limits",
    "insert_offload",
    "insert_recompute",
    "list_schedule",
    "make_schedule",
    "schedule_of",
]

import difflib
import heapq
import math
from collections.abc import Callable, Sequence
from itertools import zip_longest

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.schedules.actions import Action, Schedule, backwards_at_once
from varuna_capslog.schedules.shape import ALWAYS_RECOMPUTE
from varuna_capslog.schedules.stage_graph import StageGraph

_COST = {"F": 1, "R": 1, "B": 2}


def _gpipe_limit(depth: int, calls: int) -> int:
    """All microbatches."""
    return calls


def _one_f_one_b_limit(depth: int, calls: int) -> int:
    """min(S - s, M)."""
    return min(depth, calls)


def _varuna_limit(depth: int, calls: int) -> int:
    """3 (S - 1 - s), at least 1 and at most M.

    A microbatch in flight keeps only the stage's input (no graph), so the limit is wider than 1F1B's. A microbatch is
    away from a stage for up to three units per deeper stage (one forward, one backward of two); in unit costs a smaller
    limit makes the step longer, and a larger one does not make it shorter.
    """
    return max(1, min(calls, 3 * (depth - 1)))


_LIMITS: dict[str, Callable[[int, int], int]] = {
    "gpipe": _gpipe_limit,
    "1f1b": _one_f_one_b_limit,
    "varuna": _varuna_limit,
}
"""Name -> the limit of a stage, from its depth (stages from it to the loss, S - s in one pipeline) and its calls."""

SCHEDULES = tuple(_LIMITS)
"""The names that `make_schedule` knows."""


def make_schedule(
    name: str,
    num_stages: int,
    num_microbatches: int,
    placement: Sequence[int] | None = None,
    recompute: bool = False,
) -> Schedule:
    """The actions of one step of one pipeline, one ordered list per rank; see `schedule_of` and `StageGraph.line`."""
    return schedule_of(name, StageGraph.line(num_stages, num_microbatches, placement), recompute)


def schedule_of(
    name: str,
    graph: StageGraph,
    recompute: bool | Sequence[bool] = False,
    in_flight: Sequence[int | None] = (),
    offload: Sequence[bool] = (),
) -> Schedule:
    """The actions of one step of all stages, one ordered list per rank.

    Args:
        name: `gpipe`, `1f1b` or `varuna` (which always recomputes).
        recompute: put an R before each B whose forward was not the stage's last action, on all stages or on each that
            says so; `varuna` does so on all where one value is given for all.
        in_flight: stage -> the most microbatches in flight; None, or a shorter list: the schedule's own limit.
        offload: stage -> whether it moves something to the host tier between F and B; default: none does.

    Raises `CapslogError` for an unknown name, and for a limit that the schedule cannot keep.
    """
    rule, always = _limit_rule(name), name in ALWAYS_RECOMPUTE
    limits = [rule(depth, len(row)) for depth, row in zip(graph.depths, graph.microbatches, strict=True)]
    for stage, (limit, given) in enumerate(zip(limits, in_flight, strict=False)):
        if name == "gpipe" and given is not None and given < limit:
            raise CapslogError(
                f"stage {stage} takes {limit} microbatches and may have {given} in flight, but gpipe runs all "
                "forwards before the first backward; leave in_flight out, or choose another schedule"
            )
    limits = [limit if given is None else given for limit, given in zip_longest(limits, in_flight)]
    again = [recompute or always] * len(limits) if isinstance(recompute, bool) else list(recompute)
    schedule = list_schedule(graph, limits, forwards_first=name == "gpipe", recompute=again if always else ())
    return insert_offload(schedule if always else insert_recompute(schedule, again), offload)


def in_flight_limits(name: str, num_stages: int, num_microbatches: int) -> list[int]:
    """The most microbatches a stage has in flight (forward begun, backward not ended) under the schedule, per stage of
    one pipeline."""
    rule = _limit_rule(name)
    StageGraph.line(num_stages, num_microbatches)  # refuses numbers that make no pipeline
    return [rule(num_stages - stage, num_microbatches) for stage in range(num_stages)]


def _limit_rule(name: str) -> Callable[[int, int], int]:
    if name not in SCHEDULES:
        near = difflib.get_close_matches(name.lower(), SCHEDULES, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"use one of {', '.join(SCHEDULES)}"
        raise CapslogError(f"unknown schedule {name!r}; {hint}")
    return _LIMITS[name]


def insert_recompute(schedule: Sequence[Sequence[Action]], recompute: Sequence[bool] | None = None) -> Schedule:
    """Puts an R directly before every B that needs one, on the stage of the B.

    Where the forward of the same microbatch is the stage's last action before the B, no R is needed: nothing of that
    stage comes between, so keeping the forward's graph costs no more than building it again.

    recompute: stage -> whether it recomputes; default: every stage.
    """
    result: Schedule = []
    for actions in schedule:
        row: list[Action] = []
        kept = backwards_at_once(actions)
        for action in actions:
            again = action.kind == "B" and (recompute is None or recompute[action.stage])
            if again and (action.stage, action.microbatch) not in kept:
                row.append(Action(action.stage, "R", action.microbatch))
            row.append(action)
        result.append(row)
    return result


def insert_offload(schedule: Sequence[Sequence[Action]], offload: Sequence[bool]) -> Schedule:
    """Puts an O behind every F of the stages that offload, but where the B follows at once, and an L before the R or B.

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
            load = action.kind in "RB" and here in away
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


# -- the list scheduler


class _Step:
    """What has been started so far in the played step; times are in units, an end may lie in the future."""

    def __init__(
        self, graph: StageGraph, limits: Sequence[int], forwards_first: bool, recompute: Sequence[bool]
    ) -> None:
        self.limits, self.forwards_first = limits, forwards_first
        self.recompute = recompute or [False] * len(limits)
        self.upstream, self.downstream = graph.upstream, graph.downstream
        self.calls = [len(row) for row in graph.microbatches]
        # Deepest stage first: it shortens the way of the oldest microbatch and frees what it holds.
        deepest = sorted(range(len(graph.ranks)), key=lambda stage: (graph.depths[stage], -stage))
        self.stages_of_rank = [
            [stage for stage in deepest if graph.ranks[stage] == rank] for rank in range(graph.num_ranks)
        ]
        self.forward_ends: list[list[int]] = [[] for _ in graph.ranks]
        self.backward_ends: list[list[int]] = [[] for _ in graph.ranks]
        self.graph_of: list[int | None] = [None] * len(graph.ranks)  # the call whose autograd graph a stage keeps
        self.last_of_stage: list[Action | None] = [None] * len(graph.ranks)

    def choose(self, rank: int, now: int) -> Action | None:
        """The rank's best ready action at time `now`: backward before recompute before forward."""
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
        call = len(self.backward_ends[stage])
        if call >= self.calls[stage]:
            return math.inf
        after = self.downstream[stage][call]
        ends, place = (self.forward_ends[stage], call) if after is None else (self.backward_ends[after[0]], after[1])
        return ends[place] if place < len(ends) else math.inf

    def _backward_ready(self, stage: int, now: int) -> bool:
        has_graph = not self.recompute[stage] or self.graph_of[stage] == len(self.backward_ends[stage])
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
        call = len(self.forward_ends[stage])
        in_flight = call - len(self.backward_ends[stage])
        if call == self.calls[stage] or in_flight >= self.limits[stage] or self.graph_of[stage] is not None:
            return False
        before = self.upstream[stage][call]
        if before is None:
            return True
        ends = self.forward_ends[before[0]]
        return before[1] < len(ends) and ends[before[1]] <= now


def list_schedule(
    graph: StageGraph, limits: Sequence[int], *, forwards_first: bool = False, recompute: Sequence[bool] = ()
) -> Schedule:
    """The order in which each rank takes its forwards and backwards (and recomputes, with `recompute`).

    `limits[stage]` >= 1 bounds the microbatches in flight on a stage. `forwards_first`: no backward on a rank before
    its last forward. `recompute[stage]` (default: no stage): an R builds the graph for a backward and starts so that it
    ends when the gradient arrives; from R to B the stage does nothing else. No R where the forward was the stage's last
    action by then: its graph is kept and the stage waits.

    It cannot stall: all stages take microbatches in rising order, so that the first microbatch which has not ended is
    the next one of every stage on its way, and none of these is at its limit. Cost: O(distinct times x stages).
    """
    step = _Step(graph, limits, forwards_first, recompute)
    schedule: Schedule = [[] for _ in step.stages_of_rank]
    free_at = [0] * len(schedule)
    any_again = any(recompute)
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
            if any_again and action.kind == "B":
                heapq.heappush(wake_ups, end - _COST["R"])
    return schedule
