"""Schedules by name. They differ in each stage's limit in flight, and in how lists of actions follow from the limits.

`gpipe` (Huang et al., 2019): all forwards of a rank's stages, then all backwards, so every stage holds all microbatches
at once. GPipe's backwards run in reverse order, ours in ascending order, since gradients are added in this order.

`1f1b` (PipeDream-Flush, Narayanan et al., 2021): one forward, one backward in the steady state; with one stage per rank
exactly the textbook's lists. With several stages per rank, the same limits and the rule "backward first" hold.

`1f1b-star` (MadPipe, Sec. 4.1): the same order under limits that follow from seconds and are stored in the plan
(`planning/cuts`); a stage without a limit has that of `1f1b`.

`interleaved` (Narayanan et al., SC 2021): stages placed round-robin over the ranks, in Megatron's order; see
`interleaved` and `dealt_out`. On any other placement, and where a stage has its own limit, it is `1f1b`.

`kfkb` (GraphPipe, Sec. 3.5): k forwards, then k backwards: `1f1b` of groups of k microbatches.

`zb-h1` (Qi et al., 2024, "Zero Bubble"): `1f1b` with every backward in two halves: the input half I sends the gradient
on, the weight half W may wait. A stage delays its W until it has as many microbatches in flight as the first stage.
This shortens the ends of the step: the idle time is (S - 1)(f + b - 2w) for S equal stages of f, b and weight half w,
instead of (S - 1)(f + b).

`varuna` (Athlur et al., EuroSys 2022): a backward goes before a forward; a recompute starts so that it ends when the
gradient arrives; between recompute and backward the stage does nothing else; the last stage runs forward and backward
of a microbatch back to back. So a stage keeps one live graph at any time, as M_i + sum M_a assumes. The lists are made
from these rules; they are not a copy of the lists of Microsoft's generator.

With recomputation a forward keeps only the stage's input and no graph, and an R builds the graph right before the
backward.
"""

from __future__ import annotations

import difflib
import functools
import heapq
import math
from collections.abc import Sequence
from graphlib import CycleError, TopologicalSorter
from itertools import groupby, pairwise, zip_longest

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.schedules.actions import Action, Schedule, action_of, backwards_at_once
from varuna_capslog.schedules.shape import ALWAYS_RECOMPUTE, DEFAULT_K
from varuna_capslog.schedules.stage_graph import StageGraph

__all__ = [
    "SCHEDULES",
    "dealt_out",
    "in_flight_limits",
    "in_flight_microbatches",
    "insert_offload",
    "insert_recompute",
    "list_schedule",
    "make_schedule",
    "schedule_of",
    "table_3_2",
]


# -- A list scheduler: it simulates a step in unit costs, in which every idle rank starts the best action that is
#    ready.
#
# A forward and a recomputation of a microbatch take 1, a backward 2, messages 0. The order in which a rank starts its
# actions is its list. Real durations are not used, so that a schedule depends only on stages, microbatches and
# placement.


_COST = {"F": 1, "R": 1, "B": 2}


class _Step:
    """Actions started so far in the simulated step. Times are in units; an end may lie in the future."""

    def __init__(
        self, graph: StageGraph, limits: Sequence[int], forwards_first: bool, recompute: Sequence[bool]
    ) -> None:
        self.limits, self.forwards_first = limits, forwards_first
        self.recompute = recompute or [False] * len(limits)
        self.upstream, self.downstream = graph.upstream, graph.downstream
        self.calls, self.grains = [len(row) for row in graph.calls], graph.grains
        # The stage nearest to the loss first: the oldest microbatch ends earlier, and its memory is freed.
        nearest_to_loss = sorted(range(len(graph.ranks)), key=lambda stage: (graph.depths[stage], -stage))
        self.stages_of_rank = [
            [stage for stage in nearest_to_loss if graph.ranks[stage] == rank] for rank in range(graph.num_ranks)
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
                    return action_of(stage, "B", len(self.backward_ends[stage]))
        for stage in stages:
            if self.recompute[stage] and self.graph_of[stage] is None and self._gradient_due(stage, now):
                return action_of(stage, "R", len(self.backward_ends[stage]))
        for stage in stages:
            if self._forward_ready(stage, now):
                return action_of(stage, "F", len(self.forward_ends[stage]))
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
        """Return when the gradient of the stage's next backward arrives; inf before it is computed."""
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
        """True once the next gradient arrives before an R would end: an earlier R would delay forwards."""
        return self._gradient_end(stage) <= now + _COST["R"] * self.grains[stage]

    def _keep_graph_if_due(self, stage: int, now: int) -> None:
        """Keep the forward's graph instead of an R, if the forward is the stage's last action; the stage then waits."""
        microbatch = len(self.backward_ends[stage])
        if self.last_of_stage[stage] == action_of(stage, "F", microbatch) and self._gradient_due(stage, now):
            self.graph_of[stage] = microbatch

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
    ends when the gradient arrives; from R to B the stage does nothing else. Where the forward was the stage's last
    action by then, its graph is kept without an R, and the stage waits. Cost: O(distinct times x stages).

    Where all grains are equal it cannot stall: all stages take microbatches in rising order, so the first microbatch
    that has not ended is the next one of every stage on its route, and none of these stages is at its limit. Otherwise
    it raises CapslogError where a limit holds back microbatches that a stage with a larger grain waits for.
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


# -- The number of microbatches that a stage must have in flight so that the stages behind it never wait for it.
#
# Where every stage takes one microbatch per call, it is the number of stages on the longest path to the loss. Where
# calls have different sizes, it is GraphPipe's Table 3.2 (Jeon et al., 2025) with one change: the neighbour's call size
# is replaced by the largest call size of the stages from the neighbour to the loss, since that many gradients come back
# together. The table as printed, applied to each pair of neighbours, is right for two stages and too small for three:
# a stage with calls of 1 before stages with calls of 1 and 2 needs 6 microbatches in flight, the table gives 5, and a
# step takes a third longer (`benchmarks/schedules/in_flight.py`).


def in_flight_microbatches(graph: StageGraph) -> list[int]:
    """Return stage -> its microbatches in flight under 1F1B, a multiple of its grain; 0 if it takes no microbatches."""
    in_flight, at_once = [0] * len(graph.ranks), list(graph.grains)
    behind: dict[int, set[int]] = {}
    for maker, reader in graph.edges:
        behind.setdefault(maker, set()).add(reader)
    for stage in _last_first(graph, behind):
        if graph.depths[stage]:
            grain, others = graph.grains[stage], behind.get(stage, ())
            needed = [table_3_2(1, grain, 1, at_once[reader], in_flight[reader]) for reader in others]
            in_flight[stage] = -(-max(needed, default=grain) // grain) * grain
            at_once[stage] = max([grain, *(at_once[reader] for reader in others)])
    return in_flight


def _last_first(graph: StageGraph, behind: dict[int, set[int]]) -> list[int]:
    """Return all stages, each after the stages that read its outputs. Depths do not give this order: they are counted
    along single routes, and a stage may read from a stage of equal depth on another route.
    """
    order = TopologicalSorter({stage: sorted(behind.get(stage, ())) for stage in range(len(graph.ranks))})
    try:
        return list(order.static_order())
    except CycleError:  # routes that pass the same stages in opposite directions
        return sorted(range(len(graph.ranks)), key=lambda stage: graph.depths[stage])


def table_3_2(k_x: int, b_x: int, k_y: int, b_y: int, i_y: int) -> int:
    """Return the microbatches in flight on a stage x before a stage y that has `i_y` in flight, not rounded to calls.
    Stage x runs `k_x` forwards, then `k_x` backwards in turn, with `b_x` microbatches each; stage y likewise.
    """
    larger, group_x, group_y = max(b_x, b_y), k_x * b_x, k_y * b_y
    if group_x < b_y:
        return i_y + b_y
    if group_y < b_x:
        return i_y + group_x - group_y + b_x
    if group_x > group_y:
        return i_y + group_x if larger == group_y else i_y + group_x - group_y + 2 * larger
    return i_y + (larger if larger == group_x else 2 * larger)


# -- Megatron's interleaved order (Narayanan et al., SC 2021, Sec. 2.2), for stages placed round-robin over the
#    ranks.
#
# A rank takes its forwards in rounds of microbatches: all of a round on its first stage, then all of it on its
# second, and so on; its backwards likewise from its last stage to its first. After some forwards it runs one forward
# and one backward in turn.


def interleaved(graph: StageGraph) -> Schedule | None:
    """Return the order of every rank; None unless every route is a line of stages that are dealt out (`dealt_out`) to
    ranks that no other route uses. The P ranks need not divide the microbatches: there are M // P rounds (at least
    one), of sizes that differ by at most one. A rank without a stage waits where Megatron would run an empty chunk.
    """
    if graph.pairs is not None or max(graph.grains) > 1:
        return None
    schedule: Schedule = [[] for _ in range(graph.num_ranks)]
    taken: set[int] = set()
    for route in dict.fromkeys(graph.routes):
        ranks = [graph.ranks[stage] for stage in route]
        dealt = dealt_out(ranks)
        if taken & set(ranks) or dealt is None:
            return None
        taken.update(ranks)
        ranks_in_turn, places = dealt
        turns = [None if place is None else route[place] for place in places]
        calls = len(graph.calls[route[0]])
        if any(len(graph.calls[stage]) != calls for stage in route):
            return None
        for place, rank in enumerate(ranks_in_turn):
            schedule[rank] = _order(turns[place :: len(ranks_in_turn)], place, len(ranks_in_turn), calls)
    return schedule


def dealt_out(ranks: Sequence[int]) -> tuple[list[int], list[int | None]] | None:
    """Return how the stages of a line go round their ranks: the ranks of a round, and for each rank of every round, in
    order, its stage's place in `ranks`, or None if it has no stage in this round. ranks: of each stage of the line.

    The ranks of a round are in the order of their first stages, whatever their numbers. Return None for more rounds
    than any rank has stages, which is usual where a rank is passed over in the first round.
    """
    around = list(dict.fromkeys(ranks))
    places: list[int | None] = []
    for place, rank in enumerate(ranks):
        while around[len(places) % len(around)] != rank:
            places.append(None)
        places.append(place)
    rounds = -(-len(places) // len(around))
    if rounds > max(map(ranks.count, around)):
        return None
    return around, places + [None] * (rounds * len(around) - len(places))


def _order(stages: Sequence[int | None], place: int, ranks: int, calls: int) -> list[Action]:
    """Return the list of the rank at `place` among `ranks`. stages: of the rank, by round; None: no stage in it."""
    count = max(1, calls // ranks)
    borders = [number * calls // count for number in range(count + 1)]
    rounds = [range(first, end) for first, end in pairwise(borders)]
    forwards = [(stage, "F", call) for round_ in rounds for stage in stages for call in round_]
    backwards = [(stage, "B", call) for round_ in rounds for stage in reversed(stages) for call in round_]
    largest = max(len(round_) for round_ in rounds)
    behind = ranks - 1 - place
    ahead = behind if len(stages) == 1 else 2 * behind + (len(stages) - 1) * largest  # one stage: as 1F1B
    ahead = min(len(forwards), ahead)
    order = forwards[:ahead]
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        order += [forward, backward]
    order += backwards[len(forwards) - ahead :]
    return [action_of(stage, kind, call) for stage, kind, call in order if stage is not None]


# -- Inserts recomputations, copies to and from the host tier, and halves of backwards into a finished order.


def insert_recompute(schedule: Sequence[Sequence[Action]], recompute: Sequence[bool] | None = None) -> Schedule:
    """Insert an R directly before every B or I, except where the forward of the same microbatch is the stage's last
    action before it: keeping this graph costs no more than building it again. recompute: stage -> True where it
    recomputes; default: every stage.
    """
    result: Schedule = []
    for actions in schedule:
        row: list[Action] = []
        kept = backwards_at_once(actions)
        for action in actions:
            recomputes = action.kind in "BI" and (recompute is None or recompute[action.stage])
            if recomputes and (action.stage, action.microbatch) not in kept:
                row.append(action_of(action.stage, "R", action.microbatch))
            row.append(action)
        result.append(row)
    return result


def insert_offload(schedule: Sequence[Sequence[Action]], offload: Sequence[bool]) -> Schedule:
    """Insert an O behind every F of the stages that offload, except where the backward follows at once, and an L before
    the R, B or I. The L is one computation earlier than the action that needs it, so that both copies run beside a
    computation; if this place is directly behind the O, the L comes directly before the action. offload: stage -> True
    where it offloads; stages beyond a shorter list do not.
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
                just_left = action_of(action.stage, "O", action.microbatch) in row[max(0, begin - 1) :]
                row.insert(len(row) if just_left else begin, action_of(action.stage, "L", action.microbatch))
            begin = len(row)
            row.append(action)
            if action.kind == "F" and call not in kept and action.stage < len(offload) and offload[action.stage]:
                row.append(action_of(action.stage, "O", action.microbatch))
                away.add(call)
        result.append(row)
    return result


def split_backwards(schedule: Sequence[Sequence[Action]], delays: Sequence[int]) -> Schedule:
    """Split every B into two halves: I in its place, and W behind the I of the call that is `delays[stage]` calls
    later. Remaining W come at the end of the rank's list, those of the last stages first.
    """
    result: Schedule = []
    for actions in schedule:
        row: list[Action] = []
        waiting: dict[int, list[Action]] = {}
        for action in actions:
            if action.kind != "B":
                row.append(action)
                continue
            row.append(action_of(action.stage, "I", action.microbatch))
            queue = waiting.setdefault(action.stage, [])
            queue.append(action_of(action.stage, "W", action.microbatch))
            if len(queue) > delays[action.stage]:
                row.append(queue.pop(0))
        result.append(
            [*row, *(weight_half for stage in sorted(waiting, reverse=True) for weight_half in waiting[stage])]
        )
    return result


# -- Schedules by name


SCHEDULES = ("gpipe", "1f1b", "1f1b-star", "interleaved", "kfkb", "zb-h1", "varuna")
"""The names that `make_schedule` accepts."""


def make_schedule(
    name: str,
    num_stages: int,
    num_microbatches: int,
    placement: Sequence[int] | None = None,
    recompute: bool = False,
    k: int = DEFAULT_K,
) -> Schedule:
    """Return the actions of one step of a pipeline, an ordered list per rank; see `schedule_of`, `StageGraph.line`."""
    return schedule_of(name, StageGraph.line(num_stages, num_microbatches, placement), recompute, k=k)


def schedule_of(
    name: str,
    graph: StageGraph,
    recompute: bool | Sequence[bool] = False,
    in_flight: Sequence[int | None] = (),
    offload: Sequence[bool] = (),
    k: int = DEFAULT_K,
) -> Schedule:
    """Return the actions of one step of all stages, one ordered list per rank.

    Args:
        name: one of `SCHEDULES`; `varuna` always recomputes.
        recompute: put an R before each backward whose forward was not the stage's last action: one value for all stages
            (`varuna` then recomputes on all), or one per stage.
        in_flight: stage -> maximum of microbatches in flight; None, or a shorter list: the schedule's own limit.
        offload: stage -> True where it moves tensors to the host tier between F and B; default: no stage does.
        k: microbatches of a group of `kfkb`.

    Raises `CapslogError` for an unknown name, and for a limit that the schedule cannot keep.
    """
    recomputes = recompute if isinstance(recompute, bool) else tuple(recompute)
    return [list(row) for row in _known_schedule(name, graph, recomputes, tuple(in_flight), tuple(offload), k)]


@functools.lru_cache(maxsize=128)
def _known_schedule(
    name: str,
    graph: StageGraph,
    recompute: bool | tuple[bool, ...],
    in_flight: tuple[int | None, ...],
    offload: tuple[bool, ...],
    k: int,
) -> Schedule:
    """Return `schedule_of`, cached, since searches need the same lists many times."""
    _known(name)
    always = name in ALWAYS_RECOMPUTE
    calls, in_flight_of = [len(row) for row in graph.calls], in_flight_microbatches(graph)
    depths = [-(-count // grain) for count, grain in zip(in_flight_of, graph.grains, strict=True)]
    max_depths = [-(-max(in_flight_of) // grain) for grain in graph.grains]
    limits = [_limit(name, *stage, k) for stage in zip(depths, calls, max_depths, strict=True)]
    together = [k * math.lcm(*graph.grains) // grain for grain in graph.grains]  # calls of a group of kfkb
    for stage, (limit, plan_limit) in enumerate(zip(limits, in_flight, strict=False)):
        least = {"gpipe": limit, "kfkb": min(together[stage], calls[stage])}.get(name, 1)
        if plan_limit is not None and plan_limit < least:
            why = (
                "gpipe runs all forwards before the first backward"
                if name == "gpipe"
                else f"kfkb runs {together[stage]} at a time"
            )
            raise CapslogError(
                f"stage {stage} takes {calls[stage]} microbatches and may have {plan_limit} in flight, but {why}; "
                "leave in_flight out, or choose another schedule"
            )
    limited = any(plan_limit is not None for plan_limit in in_flight)
    limits = [limit if plan_limit is None else plan_limit for limit, plan_limit in zip_longest(limits, in_flight)]
    recomputes = [recompute or always] * len(limits) if isinstance(recompute, bool) else list(recompute)
    if always:
        return insert_offload(_known_lists(graph, tuple(limits), tuple(recomputes), False), offload)
    if name == "kfkb":
        schedule = _in_groups(graph, [max(1, most // size) for most, size in zip(limits, together, strict=True)], k)
    elif name == "zb-h1":
        kept = [min(depth, limit) for depth, limit in zip(depths, limits, strict=True)]
        delays = [limit - count for limit, count in zip(limits, kept, strict=True)]
        schedule = split_backwards(_known_lists(graph, tuple(kept), (), False), delays)
    else:
        looped = interleaved(graph) if name == "interleaved" and not limited else None
        schedule = looped or _known_lists(graph, tuple(limits), (), name == "gpipe")
    return insert_offload(insert_recompute(schedule, recomputes), offload)


@functools.lru_cache(maxsize=32)
def _known_lists(
    graph: StageGraph, limits: tuple[int, ...], recompute: tuple[bool, ...], forwards_first: bool
) -> Schedule:
    """Return `list_schedule`, cached, since several schedules and offloads are made from the same lists."""
    return list_schedule(graph, limits, recompute=recompute, forwards_first=forwards_first)


def in_flight_limits(name: str, num_stages: int, num_microbatches: int, k: int = DEFAULT_K) -> list[int]:
    """Return stage -> maximum of microbatches in flight (forward begun, backward not ended), one stage per rank."""
    _known(name)
    StageGraph.line(num_stages, num_microbatches)  # raises for invalid numbers
    return [_limit(name, num_stages - stage, num_microbatches, num_stages, k) for stage in range(num_stages)]


def _limit(name: str, depth: int, calls: int, max_depth: int, k: int) -> int:
    """Return the limit of calls in flight of a stage.

    Under `varuna` a microbatch in flight keeps only the stage's input (no graph), so the limit is larger than 1F1B's: a
    microbatch is away for up to three units per stage behind this stage (one forward, one backward of two). In unit
    costs a smaller limit makes the step longer, and a larger limit does not make it shorter.

    depth: calls in flight under 1F1B: number of stages from this stage to the loss (S - s in one pipeline) where all
        grains are equal. calls: of a step. max_depth: the largest depth, in calls of this stage.
    """
    limit = {"gpipe": calls, "kfkb": k * depth, "zb-h1": max_depth, "varuna": max(1, 3 * (depth - 1))}.get(name, depth)
    return min(limit, calls)


def _known(name: str) -> None:
    if name not in SCHEDULES:
        near = difflib.get_close_matches(name.lower(), SCHEDULES, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"use one of {', '.join(SCHEDULES)}"
        raise CapslogError(f"unknown schedule {name!r}; {hint}")


def _in_groups(graph: StageGraph, limits: Sequence[int], k: int) -> Schedule:
    """Return 1F1B of groups: up to k calls of every stage, on one route, are scheduled as one. limits: in groups."""
    size = k * math.lcm(*graph.grains)
    sizes: list[int] = []
    routes: list[tuple[int, ...]] = []
    for route, same in groupby(graph.routes):
        count = len(list(same))
        sizes += [min(size, count - done) for done in range(0, count, size)]
        routes += [route] * -(-count // size)
    groups = StageGraph(graph.ranks, tuple(routes), graph.pairs)
    firsts: list[list[int]] = []  # stage -> the first call of each of its groups, and the number of its calls
    for row, grain in zip(groups.calls, graph.grains, strict=True):
        firsts.append([0])
        for (group,) in row:
            firsts[-1].append(firsts[-1][-1] + sizes[group] // grain)
    schedule = list_schedule(groups, limits)
    return [
        [
            action_of(action.stage, action.kind, call)
            for action in row
            if action.microbatch is not None
            for call in range(*firsts[action.stage][action.microbatch : action.microbatch + 2])
        ]
        for row in schedule
    ]
