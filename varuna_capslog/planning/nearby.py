"""Improves the plans of a search by their simulated step: other intervals on one stage, a cut moved by one layer.

The search counts recomputation as a part of the backward, and the bytes of each stage by itself. When simulated, an
R may run while its rank waits, and the fold of a rank counts fewer bytes. So the plan is changed stage by stage as long
as the simulated step gets shorter. All plans of a small chain are simulated except those that a bound rules out.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from varuna_capslog.config.defaults import STAGES_PER_RANK
from varuna_capslog.memory.costs import StageCosts
from varuna_capslog.planners.intervals import Handling, stage_bytes
from varuna_capslog.planners.layerwise import Intervals, Layerwise, StageChoice
from varuna_capslog.planners.seconds import Link
from varuna_capslog.planners.throughput import fastest_cuts
from varuna_capslog.planning.cuts import with_limits
from varuna_capslog.planning.playing import SAME
from varuna_capslog.plans.parts import INTERVAL_KINDS, MemoryInterval
from varuna_capslog.plans.plan import Plan
from varuna_capslog.profiles.record import Profile
from varuna_capslog.schedules import Action, RunShape, StageGraph, backwards_at_once, make_schedule, schedule_of
from varuna_capslog.schedules.shape import ALWAYS_RECOMPUTE

__all__ = [
    "LOOPED",
    "STARRED",
    "WIDER",
    "Cheapest",
    "Turn",
    "Ways",
    "improved",
    "last_fullest_pair",
    "limited",
    "looped",
    "weighings",
]


_ALL_LISTS = 500
"""Largest number of lists of intervals that are all examined for a range."""
_ALL_PLANS = 2000
"""Largest number of plans of a chain that are all evaluated, except those that a bound rules out."""
_LEAST_WEIGHED = 24
"""With 8, larger budgets had plans up to 15 % slower than smaller budgets on the paper's models (benchmarks/budget)."""
_PARTS = (1.0, 1.03, 1.1, 1.25, 1.5, 2.0)
"""For longer ranges, the cheapest intervals within these multiples of the device's bytes are examined."""

Weigh = Callable[[Sequence[StageChoice]], float]
"""Stages of a plan -> its simulated step in seconds; infinite where the plan does not fit."""


class Cheapest(Protocol):
    """Lookup of the cheapest intervals by the search."""

    def __call__(self, stage: int, first: int, end: int, size: float, in_flight: int | None = None) -> Intervals | None:
        """Return the intervals of layers first .. end-1 as this stage, within `size` bytes; None: none fit.

        in_flight: most calls in flight; default: as in the schedule.
        """
        ...


def weighings(chain: Layerwise) -> int:
    """Number of plans to evaluate: fewer where a simulation takes longer, so that all take about half a second."""
    assert chain.question is not None, "made by Layerwise.of_profile"
    return max(_LEAST_WEIGHED, min(2000, 2000 // (chain.question.run.microbatches * chain.stages)))


def improved(
    chain: Layerwise, stages: Sequence[StageChoice], step: float, weigh: Weigh, cheapest: Cheapest, most: int
) -> None:
    """Evaluate up to `most` plans near `stages`, whose step takes `step` seconds, and near each new fastest plan."""
    ways = Ways(chain, cheapest, step)
    if ways.all_plans() <= _ALL_PLANS:
        _weigh_all(chain, ways, step, weigh)
        return
    best, current, remaining = step, tuple(stages), most
    while remaining > 0:
        shorter = None
        for near in _neighbours(current, ways):
            if remaining == 0 or shorter is not None:
                break
            if ways.least_step(near) >= best:
                continue
            remaining -= 1
            taken = weigh(near)
            if taken < best * (1 - SAME):
                shorter, best = near, taken
                ways.longest = best
        if shorter is None:
            return
        current = shorter


def _weigh_all(chain: Layerwise, ways: Ways, step: float, weigh: Weigh) -> None:
    size, best = chain.num_layers, step
    for cuts in itertools.combinations(range(1, size), chain.stages - 1):
        bounds = list(itertools.pairwise((0, *cuts, size)))
        rows = [ways.of(stage, *bound) for stage, bound in enumerate(bounds)]
        for stages in itertools.product(*rows):
            if ways.least_step(stages) < best:
                best = min(best, weigh(stages))


def _neighbours(stages: Sequence[StageChoice], ways: Ways) -> Iterator[tuple[StageChoice, ...]]:
    """Yield plans that differ in the intervals of one stage or in one cut, the slowest stages first."""
    order = sorted(range(len(stages)), key=lambda stage: -stages[stage].seconds)
    for stage in order:
        current = stages[stage]
        for choice in ways.of(stage, current.first, current.end):
            if choice.intervals != current.intervals:
                yield (*stages[:stage], choice, *stages[stage + 1 :])
        for before, behind in ((stage - 1, stage), (stage, stage + 1)):
            if before < 0 or behind == len(stages):
                continue
            # the slow stage loses a layer
            cut = stages[behind].first + (1 if before != stage else -1)
            if not stages[before].first < cut < stages[behind].end:
                continue
            fronts = ways.of(before, stages[before].first, cut, 2), ways.of(behind, cut, stages[behind].end, 2)
            for both in itertools.product(*fronts):
                yield (*stages[:before], *both, *stages[behind + 1 :])


@dataclass(frozen=True)
class _Way:
    """Intervals of a range, and the numbers that decide how long its rank takes.

    again: seconds of recomputation. inside: seconds of the part that a backward must wait for.
    key: numbers that are each better if smaller. order: ways of different `order` are not compared.
    """

    intervals: Intervals
    again: float
    inside: float
    key: tuple[float, ...]
    order: bool


def _in_order(way: _Way) -> tuple[tuple[float, ...], list[tuple[int, int, str]]]:
    return way.key, [(interval.first, interval.end, interval.kind) for interval in way.intervals]


class Ways:
    """Lists of intervals with which a range fits as a stage, without lists that another list beats in every number.

    longest: seconds of a step; lists with which the stage's calls alone take as long are left out.
    """

    def __init__(self, chain: Layerwise, cheapest: Cheapest, longest: float) -> None:
        self._chain, self._cheapest, self.longest = chain, cheapest, longest
        self._choices: dict[tuple[int, int, int], tuple[list[StageChoice], Iterator[StageChoice]]] = {}
        """(stage, first, end) -> the choices computed so far, and the iterator over further choices."""
        self._in_backward: dict[tuple[int, int, Intervals], float] = {}
        offloads = any(chain.moved) and chain.host_bandwidth is not None
        self._kinds = [kind for kind in INTERVAL_KINDS if offloads or not MemoryInterval(0, 1, kind).offloads]
        counts = [1]  # number of layers -> number of lists of intervals
        while counts[-1] <= _ALL_LISTS:
            counts.append(len(self._kinds) * sum(counts) + counts[-1])
        self._short = len(counts) - 2
        assert chain.question is not None, "made by Layerwise.of_profile"
        run = chain.question.run
        rows = make_schedule(run.schedule, chain.stages, run.microbatches, recompute=False, k=run.k)
        self._at_once = [len(backwards_at_once(row)) for row in rows]
        self._calls, self._own_order = run.microbatches, run.schedule in ALWAYS_RECOMPUTE
        self._places: dict[tuple[int, bool, bool], Turn | None] = {}

    def of(self, stage: int, first: int, end: int, most: int | None = None) -> list[StageChoice]:
        """Return the first `most` choices for a range as this stage, by rising seconds; None: all."""
        key = stage, first, end
        if key not in self._choices:
            self._choices[key] = [], self._fitting(*key, self.longest)
        choices, others = self._choices[key]
        choices += itertools.islice(others, None if most is None else max(0, most - len(choices)))
        return choices[:most]

    def all_plans(self) -> float:
        """Upper bound of the number of plans over all cuts; infinite for long chains."""
        size, stages = self._chain.num_layers, self._chain.stages
        if size - stages + 1 > self._short:
            return math.inf
        count = 0
        for cuts in itertools.combinations(range(1, size), stages - 1):
            bounds = itertools.pairwise((0, *cuts, size))
            count += math.prod(len(self.of(stage, *bound)) for stage, bound in enumerate(bounds))
            if count > _ALL_PLANS:
                break
        return count

    def least_step(self, stages: Sequence[StageChoice]) -> float:
        """Lower bound in seconds of the step of these stages: the calls of the slowest stage."""
        assert self._chain.question is not None, "made by Layerwise.of_profile"
        calls = self._chain.question.run.microbatches
        slowest = max(
            self._chain.seconds(stage.first, stage.end)
            + self._in_backward.get((stage.first, stage.end, stage.intervals), 0.0)
            for stage in stages
        )
        return calls * slowest

    def _fitting(self, stage: int, first: int, end: int, longest: float) -> Iterator[StageChoice]:
        """Yield the choices for a range; each takes a fold. longest: value of the attribute at the first request."""
        chain, seconds = self._chain, self._chain.seconds(first, end)
        ways = [self._way(stage, end, intervals) for intervals in self._lists(stage, first, end)]
        kept: list[_Way] = []
        # a way comes after all ways that are no larger in any number of the key
        for way in sorted(ways, key=_in_order):
            if self._calls * (seconds + way.inside) >= longest:
                continue
            alike = (rival.key for rival in kept if rival.order == way.order)
            if any(all(a <= b for a, b in zip(key, way.key, strict=True)) for key in alike):
                continue
            if self.least_bytes(stage, first, end, way.intervals) > chain.usable[stage]:
                continue
            if chain.peak(stage, first, end, way.intervals) <= chain.usable[stage]:
                kept.append(way)
                self._in_backward[first, end, way.intervals] = way.inside
                yield StageChoice(first, end, way.intervals, seconds + way.again, 0)

    def least_bytes(self, stage: int, first: int, end: int, intervals: Intervals) -> int:
        """Lower bound of the rank's bytes with this stage, computed several times faster than its peak: the bytes at a
        forward and the backward of another call after it (`Turn`). 0 where the stage's list has no turn, or splits its
        backwards.
        """
        assert self._chain.question is not None, "made by Layerwise.of_profile"
        ranges, run = self._chain.question.ranges, self._chain.question.run
        again, offloads = (
            any(interval.recomputes for interval in intervals),
            any(interval.offloads for interval in intervals),
        )
        if (stage, again, offloads) not in self._places:
            selected = [number == stage for number in range(self._chain.stages)]
            graph, moved = (
                StageGraph.line(self._chain.stages, run.microbatches),
                [offloads and is_selected for is_selected in selected],
            )
            rows = schedule_of(
                run.schedule, graph, [again and is_selected for is_selected in selected], offload=moved, k=run.k
            )
            self._places[stage, again, offloads] = None if run.splits_backwards else last_fullest_pair(rows[stage])
        turn = self._places[stage, again, offloads]
        if turn is None:
            return 0
        handling = Handling(recomputed=True, later=offloads, calls=turn.forwards)
        least = stage_bytes(ranges, first, end, intervals, turn.in_flight, handling, at_least=True)
        return least - (0 if turn.begun else ranges.made(first, end))

    def _way(self, stage: int, end: int, intervals: Intervals) -> _Way:
        chain, at_once = self._chain, self._at_once[stage]
        runs = [interval for interval in intervals if interval.recomputes]
        again = [sum(chain.forward[interval.first : interval.end]) for interval in runs]
        ahead, earlier = (again[-1], sum(again[:-1])) if again else (0.0, 0.0)
        copied = float(sum(self._copied(interval) for interval in intervals if interval.offloads))
        # in a call whose backward follows its forward, the last segment keeps its graph; the others run in the backward
        inside = earlier if runs and runs[-1].end == end else earlier + ahead
        if at_once == self._calls:
            return _Way(intervals, inside, inside, (inside, copied), False)
        # the forward of the chain's last layers may be left out if these layers recompute
        left_out = ahead if runs and runs[-1].end == chain.num_layers else 0.0
        key = (earlier + ahead, earlier, ahead, -left_out, copied, *([inside] if at_once else []))
        least = min(earlier, inside) if at_once else earlier
        return _Way(intervals, earlier + ahead, least, key, self._own_order and bool(runs))

    def _copied(self, interval: MemoryInterval) -> int:
        """Bytes that the simulation counts for the copies of one call; they differ from those that leave the device."""
        if interval.recomputes:
            return self._chain.entering[interval.first]
        return sum(self._chain.copied[interval.first : interval.end])

    def _lists(self, stage: int, first: int, end: int) -> set[Intervals]:
        if end - first <= self._short:
            return set(_every_list(first, end, self._kinds))
        lists: set[Intervals] = {(), (MemoryInterval(first, end, "recompute"),)}
        for part in _PARTS:
            intervals = self._cheapest(stage, first, end, part * self._chain.usable[stage])
            if intervals is not None:
                lists.add(intervals)
                for at, interval in enumerate(intervals):  # without this interval, or with it one layer shorter
                    lists.add(intervals[:at] + intervals[at + 1 :])
                    if interval.end - interval.first > 1:
                        for short in (
                            replace(interval, first=interval.first + 1),
                            replace(interval, end=interval.end - 1),
                        ):
                            lists.add((*intervals[:at], short, *intervals[at + 1 :]))
        return lists


class Turn(NamedTuple):
    """Forward followed by the backward of an earlier call.

    in_flight: calls, including these two. forwards: number in the list so far. begun: True after an earlier backward.
    """

    in_flight: int
    forwards: int
    begun: bool


def last_fullest_pair(row: Sequence[Action]) -> Turn | None:
    """Return the last turn with the most calls in flight in a list; None where the list has no turn."""
    turns: list[Turn] = []
    at_once, forward, done, ended = {call for _, call in backwards_at_once(row)}, None, 0, 0
    for action in row:
        if action.kind == "F":
            forward, done = action.microbatch, done + 1
        elif action.kind == "B":
            if forward is not None and not {forward, action.microbatch} & at_once:
                turns.append(Turn(done - ended, done, ended > 0))
            forward, ended = None, ended + 1
    return max(turns, default=None)


def _every_list(first: int, end: int, kinds: Sequence[str]) -> Iterator[Intervals]:
    """Yield every list of intervals of these kinds for layers first .. end-1."""
    if first == end:
        yield ()
        return
    for middle in range(first + 1, end + 1):
        for tail in _every_list(middle, end, kinds):
            for kind in kinds:
                yield (MemoryInterval(first, middle, kind), *tail)
            if middle == first + 1:  # the first layer is kept
                yield tail


# -- Plans outside the search space: limits in flight that follow from the stages' seconds, and several stages on each
#    device.
#
# `limited` starts from stages of a search. The limits of `1f1b-star` allow fewer calls in flight where stages have time
# to spare, so that fewer layers recompute, and more calls where links are slow. `looped` cuts the chain into several
# times as many stages as there are devices (`interleaved`). Only the simulation tells if such plans are faster.


STARRED = "1f1b-star"
"""Schedule of `limited`."""
LOOPED = "interleaved"
"""Schedule of `looped`."""
WIDER = (STARRED, LOOPED)
_LIMIT_PARTS = (1.0, 0.97, 0.92, 0.85)
"""Parts of a device's bytes for which intervals are chosen, since messages in flight need some bytes, too."""


def limited(
    profile: Profile,
    chain: Layerwise,
    stages: Sequence[StageChoice],
    plan_of: Callable[[Sequence[StageChoice], RunShape], Plan],
    cheapest: Cheapest,
    link: Link | None,
) -> Iterator[tuple[StageChoice, ...]]:
    """Yield the stages with limits of schedule `1f1b-star`: with their own intervals, and with the cheapest intervals
    for these limits; last, with their own intervals and at most the calls in flight of the chain's schedule, so that
    a plan that fits there fits here. Limits follow from seconds, so each choice of intervals has its own limits.
    """
    assert chain.question is not None, "made by Layerwise.of_profile"
    run = replace(chain.question.run, schedule=STARRED)

    def with_own_limits(some: Sequence[StageChoice]) -> tuple[StageChoice, ...]:
        bare = [replace(choice, in_flight=None) for choice in some]
        plan = with_limits(profile, plan_of(bare, run), run, link)
        return tuple(
            replace(choice, in_flight=stage.in_flight) for choice, stage in zip(bare, plan.stages, strict=True)
        )

    first = with_own_limits(stages)
    yield first
    for part in _LIMIT_PARTS:
        current = first
        for _ in range(2):
            changed = []
            for number, choice in enumerate(current):
                size = part * chain.usable[number]
                intervals = cheapest(number, choice.first, choice.end, size, choice.in_flight or 1)
                changed.append(choice if intervals is None else chain.choice(choice.first, choice.end, intervals))
            current = with_own_limits(changed)
        yield current
    pairs = zip(first, chain.in_flight, strict=True)
    yield tuple(replace(choice, in_flight=min(choice.in_flight or limit, limit)) for choice, limit in pairs)


def looped(
    chain: Layerwise, costs: StageCosts, judge: Callable[[Sequence[StageChoice]], Plan]
) -> Iterator[tuple[StageChoice, ...]]:
    """Yield stages that go round the devices. A rank that fits keeps everything; on others the stages recompute, the
    first stages first, until the rank fits or all recompute. costs: of stages that keep everything. judge: returns the
    plan with the bytes of its ranks.
    """
    assert chain.question is not None, "made by Layerwise.of_profile"
    devices, count = chain.stages, STAGES_PER_RANK * chain.stages
    if count > chain.num_layers:
        return
    run = replace(chain.question.run, schedule="1f1b", recompute=False)
    speeds = None if chain.speeds is None else [*chain.speeds] * STAGES_PER_RANK
    solution = fastest_cuts(costs, chain.question.seconds, run, count, speeds=speeds, width=64)
    if solution is None:
        return
    bounds = list(zip(solution.cuts, [*solution.cuts[1:], chain.num_layers], strict=True))
    stages = [chain.choice(first, end, ()) for first, end in bounds]
    recomputing = [chain.choice(first, end, (MemoryInterval(first, end, "recompute"),)) for first, end in bounds]
    treated = 0
    while True:
        verdict = judge(stages)
        lacking = [rank for rank, plan_rank in enumerate(verdict.ranks) if (plan_rank.bytes or 0) > chain.usable[rank]]
        if not lacking or treated == STAGES_PER_RANK:
            yield tuple(stages)
            return
        for rank in lacking:
            for number in range(rank, rank + (treated + 1) * devices, devices):
                stages[number] = recomputing[number]
        treated += 1
