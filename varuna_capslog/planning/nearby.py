"""Plans near those that a search has found: other intervals on one stage, a cut one layer further, all by their play.

A search counts what runs again as a part of the backward, and bytes by what a stage needs alone. The play knows that an
R may run while its rank waits, and the fold of a rank that less is there than the search counts. So what was found is
changed stage by stage as long as the played step gets shorter. Small chains have so few plans that all of them are
weighed, but for those that a bound rules out.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from varuna_capslog.planners.intervals import Handling, stage_bytes
from varuna_capslog.planners.layerwise import Intervals, Layerwise, StageChoice
from varuna_capslog.planning.playing import SAME
from varuna_capslog.plans.parts import INTERVAL_KINDS, MemoryInterval
from varuna_capslog.schedules import Action, StageGraph, backwards_at_once, make_schedule, schedule_of
from varuna_capslog.schedules.shape import ALWAYS_RECOMPUTE

__all__ = ["Cheapest", "Turn", "Ways", "fullest_turn", "improved", "weighings"]

_ALL_LISTS = 500
"""Ranges with at most so many lists of intervals have all of them looked at."""
_ALL_PLANS = 2000
"""Chains with at most so many plans have all of them weighed that a bound does not rule out."""
_LEAST_WEIGHED = 24
"""With 8, larger budgets had up to 15 % slower plans than smaller ones on the paper's models (`benchmarks/budget`)."""
_PARTS = (1.0, 1.03, 1.1, 1.25, 1.5, 2.0)
"""Longer ranges: the cheapest intervals for so many times the bytes that the device has."""

Weigh = Callable[[Sequence[StageChoice]], float]
"""The played step of a plan that fits, infinite for one that does not."""


class Cheapest(Protocol):
    """The cheapest intervals by the search."""

    def __call__(self, stage: int, first: int, end: int, size: float, in_flight: int | None = None) -> Intervals | None:
        """Of layers first .. end-1 as this stage, within `size` bytes; in_flight: default: as the schedule has them."""
        ...


def weighings(chain: Layerwise) -> int:
    """How many plans may be weighed: fewer where a play takes longer, so that all take about half a second."""
    assert chain.question is not None, "made by Layerwise.of_profile"
    return max(_LEAST_WEIGHED, min(2000, 2000 // (chain.question.run.microbatches * chain.stages)))


def improved(
    chain: Layerwise, stages: Sequence[StageChoice], step: float, weigh: Weigh, cheapest: Cheapest, most: int
) -> None:
    """Weighs plans near the given one, which takes `step` seconds, and near each that is shorter than all before.

    chain: under the schedule of the plan. most: plans to weigh.
    """
    ways = Ways(chain, cheapest, step)
    if ways.all_plans() <= _ALL_PLANS:
        _weigh_all(chain, ways, step, weigh)
        return
    best, here, left = step, tuple(stages), most
    while left > 0:
        found = None
        for near in _neighbours(here, ways):
            if left == 0 or found is not None:
                break
            if ways.least_step(near) >= best:
                continue
            left -= 1
            taken = weigh(near)
            if taken < best * (1 - SAME):
                found, best = near, taken
                ways.longest = best
        if found is None:
            return
        here = found


def _weigh_all(chain: Layerwise, ways: Ways, step: float, weigh: Weigh) -> None:
    size, best = chain.num_layers, step
    for cuts in itertools.combinations(range(1, size), chain.stages - 1):
        bounds = list(itertools.pairwise((0, *cuts, size)))
        rows = [ways.of(stage, *bound) for stage, bound in enumerate(bounds)]
        for stages in itertools.product(*rows):
            if ways.least_step(stages) < best:
                best = min(best, weigh(stages))


def _neighbours(stages: Sequence[StageChoice], ways: Ways) -> Iterator[tuple[StageChoice, ...]]:
    """Plans that differ in the intervals of one stage or in one cut, those of the slowest stages first."""
    order = sorted(range(len(stages)), key=lambda stage: -stages[stage].seconds)
    for stage in order:
        one = stages[stage]
        for other in ways.of(stage, one.first, one.end):
            if other.intervals != one.intervals:
                yield (*stages[:stage], other, *stages[stage + 1 :])
        for left, right in ((stage - 1, stage), (stage, stage + 1)):
            if left < 0 or right == len(stages):
                continue
            # the slow stage gives a layer away
            cut = stages[right].first + (1 if left != stage else -1)
            if not stages[left].first < cut < stages[right].end:
                continue
            fronts = ways.of(left, stages[left].first, cut)[:2], ways.of(right, cut, stages[right].end)[:2]
            for both in itertools.product(*fronts):
                yield (*stages[:left], *both, *stages[right + 1 :])


@dataclass(frozen=True)
class _Way:
    """Intervals of a range, and what decides when a rank that holds it ends.

    again: seconds that run again. inside: those of them that a backward cannot begin before.
    key: what makes no plan shorter where it is more. order: ways of other orders are not compared.
    """

    intervals: Intervals
    again: float
    inside: float
    key: tuple[float, ...]
    order: bool


def _in_order(way: _Way) -> tuple[tuple[float, ...], list[tuple[int, int, str]]]:
    return way.key, [(one.first, one.end, one.kind) for one in way.intervals]


class Ways:
    """The intervals with which a range fits as a stage, without those that are worse in all ways than another.

    longest: seconds of a step; intervals whose calls alone take as long are left out.
    """

    def __init__(self, chain: Layerwise, cheapest: Cheapest, longest: float) -> None:
        self._chain, self._cheapest, self.longest = chain, cheapest, longest
        self._found: dict[tuple[int, int, int], list[StageChoice]] = {}
        self._in_backward: dict[tuple[int, int, Intervals], float] = {}
        offloads = any(chain.moved) and chain.host_bandwidth is not None
        self._kinds = [kind for kind in INTERVAL_KINDS if offloads or not MemoryInterval(0, 1, kind).offloads]
        counts = [1]  # lists of intervals for so many layers
        while counts[-1] <= _ALL_LISTS:
            counts.append(len(self._kinds) * sum(counts) + counts[-1])
        self._short = len(counts) - 2
        assert chain.question is not None, "made by Layerwise.of_profile"
        run = chain.question.run
        rows = make_schedule(run.schedule, chain.stages, run.microbatches, recompute=False, k=run.k)
        self._at_once = [len(backwards_at_once(row)) for row in rows]
        self._calls, self._own_order = run.microbatches, run.schedule in ALWAYS_RECOMPUTE
        self._places: dict[tuple[int, bool, bool], Turn | None] = {}

    def of(self, stage: int, first: int, end: int) -> list[StageChoice]:
        """By rising seconds."""
        key = stage, first, end
        if key not in self._found:
            self._found[key] = self._fitting(*key)
        return self._found[key]

    def all_plans(self) -> float:
        """An upper bound of the plans of all cuts; infinite for long chains."""
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
        """No step of these stages is shorter: the calls of the slowest one."""
        assert self._chain.question is not None, "made by Layerwise.of_profile"
        calls = self._chain.question.run.microbatches
        slowest = max(
            self._chain.seconds(one.first, one.end) + self._in_backward.get((one.first, one.end, one.intervals), 0.0)
            for one in stages
        )
        return calls * slowest

    def _fitting(self, stage: int, first: int, end: int) -> list[StageChoice]:
        chain, own = self._chain, self._chain.seconds(first, end)
        ways = [self._way(stage, end, one) for one in self._lists(stage, first, end)]
        kept: list[_Way] = []
        # a way comes behind all that are no more than it in every number of the key
        for way in sorted(ways, key=_in_order):
            if self._calls * (own + way.inside) >= self.longest:
                continue
            alike = (one.key for one in kept if one.order == way.order)
            if any(all(a <= b for a, b in zip(key, way.key, strict=True)) for key in alike):
                continue
            if self.least_bytes(stage, first, end, way.intervals) > chain.usable[stage]:
                continue
            if chain.peak(stage, first, end, way.intervals) <= chain.usable[stage]:
                kept.append(way)
        for way in kept:
            self._in_backward[first, end, way.intervals] = way.inside
        return [StageChoice(first, end, way.intervals, own + way.again, 0) for way in kept]

    def least_bytes(self, stage: int, first: int, end: int, intervals: Intervals) -> int:
        """Bytes that the rank takes at least with this stage, which are found several times faster than its peak: at a
        forward, and at the backward of another call behind it, with as many calls in flight and forwards done.
        0 where the stage's list has no such place, or splits its backwards.
        """
        assert self._chain.question is not None, "made by Layerwise.of_profile"
        ranges, run = self._chain.question.ranges, self._chain.question.run
        again, offloads = any(one.recomputes for one in intervals), any(one.offloads for one in intervals)
        if (stage, again, offloads) not in self._places:
            own = [number == stage for number in range(self._chain.stages)]
            graph, moved = StageGraph.line(self._chain.stages, run.microbatches), [offloads and one for one in own]
            rows = schedule_of(run.schedule, graph, [again and one for one in own], offload=moved, k=run.k)
            self._places[stage, again, offloads] = None if run.splits_backwards else fullest_turn(rows[stage])
        found = self._places[stage, again, offloads]
        if found is None:
            return 0
        handling = Handling(recomputed=True, later=offloads, calls=found.forwards)
        least = stage_bytes(ranges, first, end, intervals, found.in_flight, handling, at_least=True)
        return least - (0 if found.begun else ranges.made(first, end))

    def _way(self, stage: int, end: int, intervals: Intervals) -> _Way:
        chain, at_once = self._chain, self._at_once[stage]
        runs = [one for one in intervals if one.recomputes]
        again = [sum(chain.forward[one.first : one.end]) for one in runs]
        ahead, rest = (again[-1], sum(again[:-1])) if again else (0.0, 0.0)
        copied = float(sum(self._copied(one) for one in intervals if one.offloads))
        # of such a call the last segment keeps its graph, and the others run in the backward
        inside = rest if runs and runs[-1].end == end else rest + ahead
        if at_once == self._calls:
            return _Way(intervals, inside, inside, (inside, copied), False)
        # a forward of the last layers of all may be left out where they run again
        left_out = ahead if runs and runs[-1].end == chain.num_layers else 0.0
        key = (rest + ahead, rest, ahead, -left_out, copied, *([inside] if at_once else []))
        least = min(rest, inside) if at_once else rest
        return _Way(intervals, rest + ahead, least, key, self._own_order and bool(runs))

    def _copied(self, one: MemoryInterval) -> int:
        """Bytes that go to the host tier for each call."""
        if one.recomputes:
            assert self._chain.question is not None, "made by Layerwise.of_profile"
            return self._chain.question.ranges.crossing[one.first]
        return sum(self._chain.moved[one.first : one.end])

    def _lists(self, stage: int, first: int, end: int) -> set[Intervals]:
        if end - first <= self._short:
            return set(_every_list(first, end, self._kinds))
        found: set[Intervals] = {(), (MemoryInterval(first, end, "recompute"),)}
        for part in _PARTS:
            one = self._cheapest(stage, first, end, part * self._chain.usable[stage])
            if one is not None:
                found.add(one)
                for at, interval in enumerate(one):  # the same with one interval less, or a layer shorter
                    found.add(one[:at] + one[at + 1 :])
                    if interval.end - interval.first > 1:
                        for short in (
                            replace(interval, first=interval.first + 1),
                            replace(interval, end=interval.end - 1),
                        ):
                            found.add((*one[:at], short, *one[at + 1 :]))
        return found


class Turn(NamedTuple):
    """A forward, and behind it the backward of an earlier call.

    in_flight: calls, both at work in the forward and in the backward included. forwards: of the list so far.
    begun: there was a backward before.
    """

    in_flight: int
    forwards: int
    begun: bool


def fullest_turn(row: Sequence[Action]) -> Turn | None:
    """That of the most calls in flight in a list, the last of these; None: there is none."""
    found: list[Turn] = []
    at_once, forward, done, ended = {call for _, call in backwards_at_once(row)}, None, 0, 0
    for action in row:
        if action.kind == "F":
            forward, done = action.microbatch, done + 1
        elif action.kind == "B":
            if forward is not None and not {forward, action.microbatch} & at_once:
                found.append(Turn(done - ended, done, ended > 0))
            forward, ended = None, ended + 1
    return max(found, default=None)


def _every_list(first: int, end: int, kinds: Sequence[str]) -> Iterator[Intervals]:
    """Every list of intervals of these kinds for layers first .. end-1."""
    if first == end:
        yield ()
        return
    for middle in range(first + 1, end + 1):
        for rest in _every_list(middle, end, kinds):
            for kind in kinds:
                yield (MemoryInterval(first, middle, kind), *rest)
            if middle == first + 1:  # a layer that is kept
                yield rest
