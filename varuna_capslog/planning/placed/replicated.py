"""Plans of planners that choose replicas of stages, and perhaps branches: `pipedream`, `piper`, `graphpipe`, `capture`.

Each of r replicas takes every r-th accumulation block, so that replicas run at the same time. Plans of a graph with
branches have direct routes; those of `pipedream` relay all tensors from stage to stage. Several results of a planner
are simulated; of those that fit, the result with the shortest step is the plan.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.memory.costs import Headroom
from varuna_capslog.memory.range_bytes import RangeBytes
from varuna_capslog.planners import BUDGET
from varuna_capslog.planners.intervals import EXACT_LAYERS, Handling, IntervalSearch, stage_bytes
from varuna_capslog.planners.replicas import (
    COMPARES_PEAKS,
    NEEDS_TENSORS,
    REPLICATED,
    GraphCosts,
    ReplicatedStage,
    check_tensors,
    placements_by_bound,
)
from varuna_capslog.planners.seconds import LayerSeconds, Link
from varuna_capslog.planning.placed.equal_pipelines import with_shared_moments
from varuna_capslog.planning.playing import SAME, even_share_seconds, with_step_seconds
from varuna_capslog.planning.problem import Problem
from varuna_capslog.planning.verdict import judge_by_fold
from varuna_capslog.plans.parts import INTERVAL_KINDS, MemoryInterval, PlanRank, PlanStage, Units, ranges_of, scheduled
from varuna_capslog.plans.plan import Plan
from varuna_capslog.profiles.conditions import ONE_MICROBATCH
from varuna_capslog.profiles.record import Profile
from varuna_capslog.schedules import RunShape, Schedule, from_strings, to_strings
from varuna_capslog.schedules.generators import in_flight_microbatches, table_3_2

__all__ = [
    "PlacedIntervals",
    "StagesPlayed",
    "frame_of",
    "plan_of_stages",
    "replicated_plan",
    "stage_limits",
    "with_larger_calls",
    "with_least_limits",
    "with_lists",
    "with_wider_limits",
]


# -- Memory intervals for stages that may have replicas, or hold pieces of several branches: the cheapest that fit.
#
# `planners/intervals` finds the cheapest intervals of one piece of a stage within a budget. Only the fold of the plan
# counts all bytes of a rank: the next search reduces the stage's budget by the bytes that the rank lacks, until all
# ranks fit. The bytes that a stage of several pieces must save are divided among the pieces at the least cost.


_MOST_PEAKS = 200
"""Largest number of placements that are simulated for planner `capture` beyond those by its sums."""
_CHOOSES_LIMITS = ("graphpipe", BUDGET)
"""Planners that choose the limits in flight for the shortest step."""
_WIDER, _WORTH = (2, 3, 4, 8), 0.01
"""Factors on the limits of 1F1B that are tried, and the least part of a step that a change must save."""
_CHOOSES_CALLS = ("graphpipe",)
"""Planners that choose each stage's microbatches per call, and groups of k calls (kFkB)."""
_GRAINS, _GROUPS = (2, 4), (2, 4)
"""Microbatches per call that are tried besides 1, and values of k."""
_MOST_PLAYED = 1 << 14
"""Limit of microbatches times stages in all simulations by `with_larger_calls`: some seconds."""
_MOST_CALLS = 256
"""Largest microbatches times stages at which limits are chosen by the simulated step; above, by `stage_limits`."""
_ROUNDS = 6
"""Largest number of searches, each with smaller budgets."""
_LABELS, _PLACES = 32, 48
"""Choices kept per cut of a piece of more than `EXACT_LAYERS` layers, and places where intervals may begin or end."""
_PARTS = 8
"""Number of equal parts in which the bytes that a stage must save are divided among its pieces."""
_KINDS = tuple(kind for kind in INTERVAL_KINDS if not MemoryInterval(0, 1, kind).offloads)

Judge = Callable[[Plan], Plan]
"""Plan -> the plan with the bytes of its ranks, and whether it fits."""


class PlacedIntervals:
    """Cheapest intervals of the stages of many plans for one profile and run (the whole step), with a cache. Raises
    CapslogError for seconds and runs that the profile lacks.
    """

    def __init__(self, profile: Profile, run: RunShape) -> None:
        self._profile, self._run = profile, run
        self._seconds = LayerSeconds.of_profile(profile)
        self._ranges = RangeBytes.of_ranks(profile, run.recomputes)
        self._of_stage: dict[tuple[int, ...], RangeBytes] = {}
        self._interval_searches: dict[tuple[int, int, tuple[int, ...], Handling], IntervalSearch] = {}

    def treated(self, plan: Plan, verdict: Plan, judge: Judge, redone: Callable[[Plan], Plan]) -> Plan | None:
        """Return the plan with intervals with which it fits; None where the search finds none.

        plan: its stages keep everything. verdict: the plan, judged.
        redone: returns the plan with the lists of actions that stages with such intervals need.
        """
        first, calls = plan, self._calls(plan)
        kept = [self._kept(plan, stage, *stage_calls) for stage, stage_calls in zip(plan.stages, calls, strict=True)]
        reserved = [0] * len(plan.stages)
        for _ in range(_ROUNDS):
            lacks = self._lacks(verdict)
            if not any(lacks.values()):
                return None  # the plan lacks something else
            spare = [lacks[stage.rank] for stage in plan.stages]
            for layers in {stage.layers for stage in plan.stages}:  # replicas are treated alike
                numbers = [number for number, stage in enumerate(plan.stages) if stage.layers == layers]
                more = max(spare[number] for number in numbers)
                for number in numbers:
                    reserved[number] += more
            stages = [
                self._with_less(first, stage, how, sizes, less)
                for stage, how, sizes, less in zip(first.stages, calls, kept, reserved, strict=True)
            ]
            if [stage.memory for stage in stages] == [stage.memory for stage in plan.stages]:
                return None
            plan = redone(dataclasses.replace(first, stages=tuple(stages), actions=None))
            verdict = judge(plan)
            if verdict.fits:
                return plan
            if verdict.fits is None:
                return None
        return None

    def _lacks(self, verdict: Plan) -> Counter[int]:
        """Bytes that each rank lacks."""
        headroom = Headroom.of(self._profile)
        return Counter(
            {
                rank: max(0, headroom.device(device.bytes or 0) - device.capacity_bytes)
                for rank, device in enumerate(verdict.ranks)
                if device.capacity_bytes is not None
            }
        )

    def _kept(self, plan: Plan, stage: PlanStage, in_flight: int, handling: Handling) -> list[int]:
        """Bytes of each piece of a stage that keeps everything."""
        ranges = self._ranges_of(plan, stage)
        return [stage_bytes(ranges, first, end, (), in_flight, handling) for first, end in stage.layers]

    def _with_less(
        self, plan: Plan, stage: PlanStage, calls: tuple[int, Handling], kept: Sequence[int], less: int
    ) -> PlanStage:
        """Return the stage with the cheapest intervals that save `less` bytes of `kept`; if there are none, with the
        intervals that save most.
        """
        if not less:
            return dataclasses.replace(stage, memory=())
        count, handling = calls
        pieces, parts = list(zip(stage.layers, kept, strict=True)), 1 if len(kept) == 1 else _PARTS
        # number of parts of `less` that the pieces so far save -> seconds of recomputation, intervals
        ways: dict[int, tuple[float, tuple[MemoryInterval, ...]]] = {0: (0.0, ())}
        for (first, end), size in pieces:
            search, behind = self._search_of(plan, stage, first, end, handling), dict[int, tuple[float, Any]]()
            least = search.least_bytes(first, end, count)[0]
            for part in range(parts + 1):
                choice = search.cheapest(first, end, count, max(least, size - less * part / parts))
                assert choice is not None, "the fewest bytes fit into themselves"
                saved = int((size - choice.bytes) * parts / less)
                for before, (seconds, intervals) in ways.items():
                    way = seconds + choice.again_seconds, (*intervals, *choice.intervals)
                    key = min(parts, before + saved)
                    behind[key] = min(way, behind.get(key, way), key=lambda way: way[0])
            ways = behind
        return dataclasses.replace(stage, memory=ways[max(ways)][1])

    def _calls(self, plan: Plan) -> list[tuple[int, Handling]]:
        """For each stage, its most calls in flight, and how its action list handles calls."""
        units, blocks, stage_calls = plan.units, plan.units.blocks or 1, []
        alike, rows = Counter(stage.layers for stage in plan.stages), self._rows(plan)
        for stage in plan.stages:
            served, in_flight, most_in_flight = len(stage.blocks or range(blocks)), 0, 0
            for action in rows[stage.rank]:
                in_flight += {"F": 1, "B": -1}.get(action.kind, 0)
                most_in_flight = max(most_in_flight, in_flight)
            waiting = min(1, blocks - 1) if alike[stage.layers] == 1 else served - 1
            at_once, calls = most_in_flight == 1, served * units.of_block
            handling = Handling(recomputed=not at_once, calls=calls, waiting_blocks=waiting, at_once=at_once)
            stage_calls.append((most_in_flight, handling))
        return stage_calls

    def _rows(self, plan: Plan) -> Schedule:
        """Action lists of a plan if its stages keep everything."""
        if plan.actions is not None:
            return from_strings(plan.actions)
        stages = [dataclasses.replace(stage, memory=()) for stage in plan.stages]
        return scheduled(plan.schedule or "1f1b", stages, plan.stage_graph(self._profile.known_edges), self._run)

    def _ranges_of(self, plan: Plan, stage: PlanStage) -> RangeBytes:
        if plan.routes != "direct":
            return self._ranges
        if (layers := tuple(stage.numbers)) not in self._of_stage:
            self._of_stage[layers] = self._ranges.of_stage(layers)
        return self._of_stage[layers]

    def _search_of(self, plan: Plan, stage: PlanStage, first: int, end: int, handling: Handling) -> IntervalSearch:
        layers = tuple(stage.numbers) if plan.routes == "direct" else ()
        key = first, end, layers, dataclasses.replace(handling, calls=1, waiting_blocks=0)
        if key not in self._interval_searches:
            size = end - first
            borders = {first, end, *np.linspace(first, end, min(size, _PLACES) + 1).astype(int).tolist()}
            self._interval_searches[key] = IntervalSearch(
                self._ranges_of(plan, stage),
                self._seconds,
                handling,
                0 if size <= EXACT_LAYERS else _LABELS,
                firsts=(first,),
                kinds=_KINDS,
                borders=borders,
            )
        return self._interval_searches[key].with_blocks(handling.calls, handling.waiting_blocks)


# -- the plan of a planner that gives stages replicas


def replicated_plan(problem: Problem, planner: str) -> Plan:
    """Return the plan of a planner of `REPLICATED`, not judged yet. The planners assume the smallest capacity on every
    device, and schedule 1f1b without recomputation for every run.

    Raises CapslogError for what the profile lacks, and for a graph that the planner cannot search.
    """
    profile, devices, usable = problem.profile, problem.width, problem.usable
    if planner in NEEDS_TENSORS:
        check_tensors(profile, planner)
    begun, by_peak = time.perf_counter(), planner in COMPARES_PEAKS
    shape = dataclasses.replace(problem.run, schedule="1f1b")
    least = None if usable is None else min(usable)
    costs = GraphCosts.of_profile(profile, devices, shape.microbatches, least, problem.blocks, problem.link, by_peak)
    answers = REPLICATED[planner](costs)
    if not answers:  # the plan says what it lacks
        unlimited = dataclasses.replace(costs, usable=None)
        answers = REPLICATED[planner](unlimited)[:1]
    line = profile.edges == [(layer, layer + 1) for layer in range(profile.num_layers - 1)]
    routes = "relay" if line or planner not in NEEDS_TENSORS else "direct"
    search = StagesPlayed(profile, shape, problem.link, frame_of(problem, shape, planner, routes), costs)
    if by_peak and not profile.observations:
        answers = answers[:1]
    for stages in sorted(answers, key=search.bound):
        search.weigh(stages)
    if by_peak and profile.observations:
        search.weigh_smaller()
    return dataclasses.replace(search.answer(), search_seconds=time.perf_counter() - begun)


@dataclass(frozen=True)
class PlayedPlan:
    """Simulated plan, the bytes that it lacks (0: none are known), its step, and its peak where peaks are compared."""

    lack: int
    step: float
    plan: Plan
    peak: int = 0

    def beats(self, rival: PlayedPlan) -> bool:
        """True where this plan lacks fewer bytes, or as many with a smaller peak, or with an equal peak is faster."""
        key = (self.lack, self.peak, self.step * (1 + SAME))
        return key < (rival.lack, rival.peak, rival.step)


def frame_of(problem: Problem, run: RunShape, planner: str, routes: str) -> Plan:
    """Return a plan whose stages are replaced by those of each candidate."""
    profile = problem.profile
    return Plan(
        profile.num_layers,
        (PlanStage(((0, profile.num_layers),), (0,)),),
        Units(run.microbatches, run.microbatch_size, 1),
        run.schedule,
        routes=routes,
        ranks=problem.devices,
        planner=planner,
        model=profile.model,
        profile_digest=profile.digest,
    )


class StagesPlayed:
    """Search that keeps the best of the plans that it evaluates.

    frame: from `frame_of`. intervals: for stages that do not fit without intervals; None: these stages do not fit.
    may_share: replicas share the optimizer's moments where nothing fits otherwise.
    """

    def __init__(
        self,
        profile: Profile,
        run: RunShape,
        link: Link | None,
        frame: Plan,
        costs: GraphCosts,
        intervals: PlacedIntervals | None = None,
        may_share: bool = True,
    ) -> None:
        self.profile, self.run, self.link, self.costs = profile, run, link, costs
        self.frame, self._intervals, self._may_share = frame, intervals, may_share
        self.best: PlayedPlan | None = None

    def beat(self, plan: Plan, longest: float | None = None) -> None:
        """Accept only plans that are faster than this plan, if it has a step, and take at most `longest` seconds."""
        steps = [] if plan.step_seconds is None else [plan.step_seconds]
        steps += [] if longest is None else [longest * (1 + 4 * SAME)]  # plans of `longest` seconds are accepted, too
        if steps:
            self.best = PlayedPlan(0, min(steps), plan)

    def bound(self, stages: Sequence[ReplicatedStage], routes: str = "direct") -> float:
        """Lower bound in seconds of the stages' step: a device's work, and one microbatch on the stages before it."""
        costs = self.costs
        stage_of = {layer: number for number, stage in enumerate(stages) for layer in stage.layers}
        links = {(stage_of[writer], stage_of[reader]) for writer, reader in self.profile.edges}
        if routes == "relay":
            links = {(number, number + 1) for number in range(len(stages) - 1)}
        seconds = [costs.total("seconds", stage.layers) for stage in stages]
        before, longest = [0.0] * len(stages), 0.0
        for number, stage in enumerate(stages):
            before[number] = max((before[a] + seconds[a] for a, b in links if b == number != a), default=0.0)
            longest = max(longest, before[number] + seconds[number] * costs.share(stage.replicas) * costs.microbatches)
        return longest

    def weigh(self, stages: Sequence[ReplicatedStage]) -> None:
        """Simulate the stages with several numbers of blocks (two, if memory has no limit), and keep the best plan."""
        best = self.best
        if best is not None and not best.lack and not self.by_peak and self.bound(stages) >= best.step * (1 - SAME):
            return
        most = max(stage.replicas for stage in stages)
        microbatches = self.run.microbatches
        counts = [count for count in range(most, microbatches + 1) if microbatches % count == 0] if most > 1 else [1]
        counts = [self.costs.blocks] if self.costs.blocks else counts
        limited = self.costs.usable is not None or self.by_peak
        rising = limited and self._intervals is not None  # what lacks memory with few blocks lacks it with more
        first_tried = (counts[0], counts[-1]) if self.frame.planner == BUDGET else (counts[-1], counts[0])
        tried = counts[:: 1 if rising else -1] if limited else list(dict.fromkeys(first_tried))
        for blocks in tried:
            fits, lacks = self._weigh_in_blocks(stages, blocks)
            if limited and (lacks and not fits if rising else fits and not self.by_peak):
                return  # where the numbers fall: fewer blocks fit as well, and are not faster

    def _weigh_in_blocks(self, stages: Sequence[ReplicatedStage], blocks: int) -> tuple[bool, bool]:
        """Simulate the stages with so many blocks for each kind of routes. Return (some fit, some do not fit)."""
        fits = lacks = False
        for routes in self.routes_of(stages):
            if fits and self.best is not None and self.bound(stages, routes) >= self.best.step * (1 - SAME):
                continue
            frame = dataclasses.replace(self.frame, routes=routes)
            played = self._weighed(plan_of_stages(frame, stages, blocks, self.profile.known_edges))
            if played is None:
                continue
            fits, lacks = fits or not played.lack, lacks or played.lack > 0
            if self.best is None or played.beats(self.best):
                self.best = played
        return fits, lacks

    def weigh_smaller(self) -> None:
        """Simulate placements by rising bound of their peak, until the bound reaches the best peak, `_MOST_PEAKS` at
        most: the sums that planner `capture` compares leave out bytes that the fold counts. Does nothing where the
        profile lacks the bytes of ranges.
        """
        try:
            ranges = RangeBytes.of_ranks(self.profile, self.run.recomputes)
        except CapslogError:
            return
        assert self.best is not None, "the placements of its sums were weighed"
        for placement in itertools.islice(placements_by_bound(self.costs, ranges, self.best.peak), _MOST_PEAKS):
            if placement.bound >= self.best.peak:
                return
            self._weigh_in_blocks(placement.stages, placement.blocks or self.costs.blocks or 1)

    @property
    def by_peak(self) -> bool:
        """True where the planner looks for the smallest peak, not the shortest step."""
        return self.frame.planner in COMPARES_PEAKS

    def routes_of(self, stages: Sequence[ReplicatedStage]) -> tuple[str, ...]:
        """Routes to try: a line of ranges may also relay, which sends the gradients of several readers together."""
        if any(stage.devices for stage in stages):
            return ("direct",)
        routes = self.frame.routes
        line = [layer for stage in stages for layer in stage.layers] == list(range(self.costs.num_layers))
        return (routes, "relay") if routes == "direct" and line and self.frame.planner != "piper" else (routes,)

    def _weighed(self, plan: Plan) -> PlayedPlan | None:
        """Simulate the plan, and count the bytes that it lacks; None where the best plan fits and is as fast."""
        first, played = plan, self._played(plan)
        best, lack, peak = self.best, 0, 0
        if best is not None and not best.lack and not self.by_peak and not played.beats(best):
            return None
        can_fold = bool(self.profile.observations)  # without observations the fold has no bytes
        if can_fold and (self.costs.usable is not None or self.by_peak):
            verdict = self._judged(plan)
            lack = _lack(verdict)
            if lack and not self.by_peak:  # peaks are compared under the limits of the schedule
                plan = with_least_limits(self.profile, played.plan, self.run, self.link)
                verdict = self._judged(plan)
                lack = _lack(verdict)
            shared = with_shared_moments(self.profile, plan) if lack and self._may_share else None
            if shared is not None and _lack(less := self._judged(shared)) < lack:
                note = "replicas share the optimizer's moments (stages[].moments), which do not fit otherwise"
                verdict, plan = less, dataclasses.replace(shared, notes=(*shared.notes, note))
                lack = _lack(less)
            if lack and self._intervals is not None:
                treated = self._intervals.treated(plan, verdict, self._judged, with_lists)
                plan, lack = (plan, lack) if treated is None else (treated, 0)
            peak = (verdict.peak_bytes or 0) if self.by_peak else 0
        if plan is first:
            return PlayedPlan(lack, played.step, played.plan, peak)
        return self._played(plan, lack, peak)

    def _played(self, plan: Plan, lack: int = 0, peak: int = 0) -> PlayedPlan:
        played = with_step_seconds(self.profile, plan, self.run, self.link)
        assert played.step_seconds is not None, "the profile has seconds, and tensors where they are needed"
        return PlayedPlan(lack, played.step_seconds, played, peak)

    def _judged(self, plan: Plan) -> Plan:
        return judge_by_fold(self.profile, plan, self.run)

    def settle(self) -> None:
        """Give the best plan the least limits in flight that keep its step; where the planner chooses limits and calls,
        also those that shorten its step. Changes by which the plan lacks more bytes than before, such as for messages
        that wait, are not made.
        """
        best = self.best
        assert best is not None, "without a limit some stages always fit"
        plan = with_least_limits(self.profile, best.plan, self.run, self.link)
        if plan is not best.plan:
            best = self._take(best, plan)
        if self.frame.planner in _CHOOSES_LIMITS and not best.lack:
            shorter = with_wider_limits(self.profile, best.plan, self.run, self.link)
            if shorter is not best.plan:
                best = self._take(best, shorter)
        if self.frame.planner in _CHOOSES_CALLS and not best.lack:
            limited = bool(self.profile.observations) and self.costs.usable is not None
            fits = lambda plan: not (limited and _lack(self._judged(plan)))  # noqa: E731
            larger = with_larger_calls(self.profile, best.plan, self.run, self.link, fits)
            if larger is not best.plan:
                best = self._take(best, _with_grains_named(larger))
        self.best = best

    def _take(self, best: PlayedPlan, plan: Plan) -> PlayedPlan:
        """Return the plan if it lacks no more bytes, and has no larger peak where peaks count; else the best so far."""
        lack = peak = 0
        if self.profile.observations and (self.costs.usable is not None or self.by_peak):
            verdict = self._judged(plan)
            lack, peak = _lack(verdict), (verdict.peak_bytes or 0) if self.by_peak else 0
        worse = (lack, peak) > (best.lack, best.peak)
        return best if worse else PlayedPlan(lack, plan.step_seconds or best.step, plan, peak)

    def answer(self) -> Plan:
        """Return the best plan, for `graphpipe` with a bound."""
        self.settle()
        assert self.best is not None, "without a limit some stages always fit"
        plan, step = self.best.plan, self.best.step
        if plan.planner != "graphpipe" or self.best.lack:
            return plan
        bound = even_share_seconds(self.profile, self.costs.microbatches, self.costs.devices)
        return dataclasses.replace(
            plan,
            bound_seconds=min(bound, step),
            proven=step <= bound * (1 + SAME),
            search_space=f"all plans on {self.costs.devices} devices without activation checkpointing",
        )


def _lack(verdict: Plan) -> int:
    """Bytes that a judged plan lacks; 0 where it fits, or where that is not known."""
    return verdict.shortfall.bytes if verdict.shortfall is not None else int(verdict.fits is False)


def plan_of_stages(
    frame: Plan, stages: Sequence[ReplicatedStage], blocks: int, edges: Sequence[tuple[int, int]] | None
) -> Plan:
    """Return the frame's plan with these stages. Ranks are counted stage by stage; replica k of r takes the blocks k,
    k + r, k + 2 r, ... edges: of the graph of the layers, for direct routes.
    """
    units, rows, rank = dataclasses.replace(frame.units, blocks=blocks), list[PlanStage](), 0
    limits = stage_limits(stages, units, frame.routes, edges)
    for stage, limit in zip(stages, limits, strict=True):
        if stage.devices:
            rows += [
                PlanStage((piece,), (rank + device,), in_flight=limit, memory=()) for device, piece in stage.pieces
            ]
            rank += max(stage.devices) + 1
            continue
        for number in range(stage.replicas):
            served = None if stage.replicas == 1 else tuple(range(number, blocks, stage.replicas))
            pieces = tuple(ranges_of(stage.layers))
            rows.append(PlanStage(pieces, (rank,), served, in_flight=limit, memory=()))
            rank += 1
    ranks = frame.ranks or (PlanRank(),) * rank
    return with_lists(dataclasses.replace(frame, stages=tuple(rows), units=units, ranks=ranks))


def with_lists(plan: Plan) -> Plan:
    """Return the plan with an action list of every rank if some stages have replicas or share a rank; else without
    lists, so that its schedule makes them.
    """
    numbers = dict[int, list[int]]()
    for number, stage in enumerate(plan.stages):
        numbers.setdefault(stage.rank, []).append(number)
    if all(stage.blocks is None for stage in plan.stages) and len(numbers) == len(plan.stages):
        return dataclasses.replace(plan, actions=None)
    rows = (_one_by_one(numbers[rank], plan.stages[numbers[rank][0]], plan.units) for rank in sorted(numbers))
    return dataclasses.replace(plan, actions=tuple(rows))


def _one_by_one(numbers: Sequence[int], stage: PlanStage, units: Units) -> tuple[str, ...]:
    """Return the action list of a rank under 1F1B: as many forwards as may be in flight, then a backward and a forward
    in turn, with recomputation directly before its backward. Lists of a schedule assume that all calls take equally
    long, but calls of a stage with more replicas take longer. numbers: of the rank's stages, of which `stage` is the
    first; a call passes all of them, and its backward in reverse.
    """
    blocks = units.blocks if stage.blocks is None else len(stage.blocks)
    calls = (blocks or 1) * units.of_block // stage.grain
    ahead = min(stage.in_flight or calls, calls)
    names = [f"{number}F{call}" for call in range(ahead) for number in numbers]
    recomputes = ahead > 1 and any(interval.recomputes for interval in stage.memory or ())
    for call in range(calls):
        for number in reversed(numbers):
            names += [f"{number}R{call}"] if recomputes else []
            names.append(f"{number}B{call}")
        names += [f"{number}F{call + ahead}" for number in numbers] if call + ahead < calls else []
    return tuple(names)


def with_least_limits(profile: Profile, plan: Plan, run: RunShape, link: Link | None) -> Plan:
    """Return a simulated plan with the fewest calls in flight that make its step no longer, one limit for all replicas.

    `stage_limits` assumes that all calls are equally long and messages take no time. Here each limit is bisected by the
    simulated step, from the last stage to the first, since the calls that a stage needs depend on the stages after it.
    A plan without limits is unchanged.
    """
    shared = len({stage.rank for stage in plan.stages}) < len(plan.stages)
    if shared or all(stage.in_flight is None for stage in plan.stages) or _is_long(plan):
        return plan
    assert plan.step_seconds is not None, "the plan was played"
    step = plan.step_seconds
    for stage in {stage.layers: stage for stage in reversed(plan.stages)}.values():
        too_few, enough = 0, stage.in_flight or 1
        while enough - too_few > 1:
            limit = (too_few + enough) // 2
            try:
                limited = with_step_seconds(profile, _with_limit(plan, stage.layers, limit), run, link)
            except CapslogError:  # with so few calls the lists deadlock
                too_few = limit
                continue
            if limited.step_seconds is not None and limited.step_seconds <= step * (1 + SAME):
                plan, enough, step = limited, limit, min(step, limited.step_seconds)
            else:
                too_few = limit
    return plan


def with_wider_limits(profile: Profile, plan: Plan, run: RunShape, link: Link | None) -> Plan:
    """Return a simulated plan with more calls in flight if its step gets shorter by `_WORTH`; else the plan itself.

    GraphPipe's kFkB has k times the calls of 1F1B in flight, which hides messages. 1F1B with larger limits needs fewer
    calls for a step as short (`benchmarks/graphpipe`): k times the limits of 1F1B, then the least that keep the step.
    """
    if plan.step_seconds is None or _is_long(plan):
        return plan
    graph, rows = plan.stage_graph(profile.known_edges), list[Plan]()
    limits = [stage.in_flight or count for stage, count in zip(plan.stages, in_flight_microbatches(graph), strict=True)]
    for times in _WIDER:
        raised = [min(times * limit, len(calls)) for limit, calls in zip(limits, graph.calls, strict=True)]
        stages = [dataclasses.replace(stage, in_flight=limit) for stage, limit in zip(plan.stages, raised, strict=True)]
        try:
            wider = with_lists(dataclasses.replace(plan, stages=tuple(stages), actions=None))
            rows.append(with_step_seconds(profile, wider, run, link))
        except CapslogError:  # with these limits the lists deadlock
            continue
    best = min(rows, key=lambda wider: wider.step_seconds or 0.0, default=plan)
    if (best.step_seconds or 0.0) > plan.step_seconds * (1 - _WORTH):
        return plan
    return with_least_limits(profile, best, run, link)


def with_larger_calls(
    profile: Profile, plan: Plan, run: RunShape, link: Link | None, fits: Callable[[Plan], bool] = lambda plan: True
) -> Plan:
    """Return a simulated plan whose stages take several microbatches in a call, or whose ranks run k calls of a kind in
    a row (kFkB), if its step gets shorter by `_WORTH`; else the plan itself.

    GraphPipe, thesis Sec. 3: a stage has its own microbatch size and its own k; here all stages have one k. A grain
    above 1 must be one for which the profile has seconds, and all layers of its stage must take several microbatches
    (`ONE_MICROBATCH` names those that do not).

    state: the grain of each stage, and the order of calls: 1F1B with a multiple of its limits, or kFkB with k
    starts: one grain for all stages that may have it, with its best order; the start with the shortest step first
    moves: the best grain of each stage, from the last stage to the first, then the best order, until no move makes the
        step shorter; no more than `_MOST_PLAYED` calls are simulated
    """
    if plan.step_seconds is None or _is_long(plan):
        return plan
    one_microbatch = frozenset(profile.conditions.get(ONE_MICROBATCH, ()))
    kinds = list(dict.fromkeys(stage.layers for stage in plan.stages))
    sizes = [1, *(grain for grain in _GRAINS if grain in profile.call_seconds)]
    choices = [[1] if any(one_microbatch & {*range(*span)} for span in kind) else sizes for kind in kinds]
    orders = [("1f1b", times) for times in (1, *_WIDER)]
    orders += [("kfkb", k) for k in _GROUPS if plan.actions is None]
    plays = itertools.count(1)

    @functools.cache
    def played(grains: tuple[int, ...], order: tuple[str, int]) -> Plan | None:
        if next(plays) * len(kinds) * run.microbatches > _MOST_PLAYED:
            return None
        try:
            larger = _with_calls(profile, plan, dict(zip(kinds, grains, strict=True)), order, run)
            larger = with_step_seconds(profile, larger, run, link)
        except CapslogError:  # grains that do not divide, lists that deadlock
            return None
        return None if seconds_of(larger) < seconds_of(plan) and not fits(larger) else larger

    def seconds_of(choice: Plan | None) -> float:
        return math.inf if choice is None or choice.step_seconds is None else choice.step_seconds

    def shortest(moves: Iterable[tuple[tuple[int, ...], tuple[str, int]]]) -> tuple[tuple[int, ...], tuple[str, int]]:
        return min(moves, key=lambda move: seconds_of(played(*move)))

    best, enough = plan, plan.step_seconds * (1 - _WORTH)
    starts = dict.fromkeys(tuple(max(set(row) & {1, size}) for row in choices) for size in sizes)
    states = [shortest((grains, order) for order in orders) for grains in starts]
    for state in sorted(states, key=lambda state: seconds_of(played(*state))):
        before = math.inf
        while (step := seconds_of(played(*state))) < before * (1 - SAME):
            before = step
            for place in reversed(range(len(kinds))):
                grains, order = state
                state = shortest(((*grains[:place], grain, *grains[place + 1 :]), order) for grain in choices[place])
            state = shortest((state[0], order) for order in orders)
        if step <= enough:
            best, enough = played(*state) or best, step
    return best if best is plan else with_least_limits(profile, best, run, link)


def _with_grains_named(plan: Plan) -> Plan:
    grains = {stage.layers: stage.grain for stage in plan.stages}
    if max(grains.values()) == 1:
        return plan
    note = f"the stages take {', '.join(map(str, grains.values()))} microbatches in a call, constants of the run"
    return dataclasses.replace(plan, notes=(*plan.notes, f"{note} (stages[].grain)"))


def _with_calls(
    profile: Profile,
    plan: Plan,
    grains: Mapping[tuple[tuple[int, int], ...], int],
    order: tuple[str, int],
    run: RunShape,
) -> Plan:
    """Return the plan with the grain of each stage, by its layers, and an order of its calls."""
    name, times = order
    stages = [dataclasses.replace(stage, grain=grains[stage.layers], in_flight=None) for stage in plan.stages]
    larger = dataclasses.replace(plan, stages=tuple(stages), actions=None)
    graph = larger.stage_graph(profile.known_edges)
    if name == "kfkb":
        rows = to_strings(scheduled(name, stages, graph, dataclasses.replace(run, k=times)))
        return dataclasses.replace(larger, schedule=name, actions=tuple(map(tuple, rows)))
    limits = in_flight_microbatches(graph)
    if plan.actions is not None:  # with replicas, whose calls the table counts as one
        limits = [stage.in_flight or limit for stage, limit in zip(plan.stages, limits, strict=True)]
    limits = [times * -(-limit // stage.grain) for limit, stage in zip(limits, stages, strict=True)]
    limits = [min(limit, len(calls)) for limit, calls in zip(limits, graph.calls, strict=True)]
    stages = [dataclasses.replace(stage, in_flight=limit) for stage, limit in zip(stages, limits, strict=True)]
    return with_lists(dataclasses.replace(larger, stages=tuple(stages)))


def _is_long(plan: Plan) -> bool:
    """Return True where a step has so many calls that simulating it for each limit would take seconds."""
    return (plan.num_microbatches or 0) * len({stage.layers for stage in plan.stages}) > _MOST_CALLS


def _with_limit(plan: Plan, layers: tuple[tuple[int, int], ...], limit: int) -> Plan:
    """Return the plan with at most `limit` calls in flight on each replica of the stage with these layers."""
    rows = [dataclasses.replace(stage, in_flight=limit) if stage.layers == layers else stage for stage in plan.stages]
    return with_lists(dataclasses.replace(plan, stages=tuple(rows), actions=None))


def stage_limits(
    stages: Sequence[ReplicatedStage], units: Units, routes: str, edges: Sequence[tuple[int, int]] | None
) -> list[int | None]:
    """Calls that each replica of a stage may have in flight, such that no later stage waits; None: the schedule's
    limits, where no stage has replicas. The replicas of a stage run one block each at a time; Table 3.2 counts these
    blocks as one call.
    """
    if all(stage.replicas == 1 and not stage.devices for stage in stages):
        return [None] * len(stages)
    sizes = [1 if stage.replicas == 1 else stage.replicas * units.of_block for stage in stages]
    behind: list[set[int]] = [set() for _ in stages]
    if routes == "relay":
        for number in range(len(stages) - 1):
            behind[number].add(number + 1)
    else:
        stage_of = {layer: number for number, stage in enumerate(stages) for layer in stage.layers}
        for writer, reader in edges or ():
            if stage_of[writer] != stage_of[reader]:
                behind[stage_of[writer]].add(stage_of[reader])
    limits, at_once = [0] * len(stages), list(sizes)
    for number in reversed(range(len(stages))):
        size, successors = sizes[number], behind[number]
        needed = [table_3_2(1, size, 1, at_once[successor], limits[successor]) for successor in successors]
        limits[number] = -(-max(needed, default=size) // size) * size
        at_once[number] = max([size, *(at_once[successor] for successor in successors)])
    return [-(-in_flight // stage.replicas) for in_flight, stage in zip(limits, stages, strict=True)]
