"""Cuts of stages that go round the devices (schedule `interleaved`), for the shortest step that fits.

Each rank runs its first stage for a group of microbatches, then its second stage, and so on. A round is one stage of
every rank; all ranks wait for its longest stage, so that a step takes about the sum of the longest stages, and all
stages may be long in a round that contains a long head. Dynamic programming finds the rounds with the smallest sum;
then layers are moved as long as the simulated step gets shorter.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Sequence

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.planning.playing import SAME, with_step_seconds
from varuna_capslog.planning.problem import Problem
from varuna_capslog.planning.verdict import judge_by_fold
from varuna_capslog.plans.parts import PlanRank, Units
from varuna_capslog.plans.plan import Plan, stages_of_pipelines
from varuna_capslog.schedules.shape import AUTO_SCHEDULE

__all__ = ["chunk_bound", "fastest_chunks", "plan_of_rounds"]

_ALL_LISTS = 1000
"""Largest number of cut lists that are all simulated."""
_ACTIONS = 300_000
"""Limit of the forwards in all simulated steps of a search, which takes less than 10 s."""

_OF_HALVES = ("zb-h1", AUTO_SCHEDULE)
"""Schedules in which a device may run a part of its backwards after those of earlier devices."""

_BISECTIONS = 30
"""Number of bisections of the longest stage of a round."""

_Value = tuple[int, float, int]
"""Bytes that the ranks lack, seconds of the step, largest peak in bytes: the smallest tuple is best."""


def chunk_bound(problem: Problem) -> float:
    """Return a lower bound in seconds of the step, for stages of whole layers that go round the devices.

    A device is idle until the stages before its first stage have run a forward, and after its last backward until they
    have run their backwards; each of these stages has at least one layer. In between it computes all microbatches: the
    device of a layer computes that layer, and at least one layer of each of its other stages.
    """
    layers, speeds = _layer_seconds(problem, False), problem.speeds or (1.0,) * problem.width
    placement, microbatches, fastest = problem.placement, problem.share.microbatches, max(speeds)
    halved = problem.run.schedule in _OF_HALVES
    idle = [
        _smallest(problem.profile.column("forward_seconds") if halved else layers, count) / fastest
        for count in range(problem.width)
    ]
    waits = sum(speed * seconds for speed, seconds in zip(speeds, idle, strict=True))
    bounds = [(microbatches * sum(layers) + waits) / sum(speeds)]
    for number, seconds in enumerate(layers):
        others = layers[:number] + layers[number + 1 :]
        ranks = _ranks_of(number, len(layers), placement)
        bounds.append(
            min(
                idle[rank] + microbatches * (seconds + _smallest(others, placement.count(rank) - 1)) / speeds[rank]
                for rank in ranks
            )
        )
    return max(bounds)


def _smallest(seconds: Sequence[float | None], count: int) -> float:
    return sum(sorted(row or 0.0 for row in seconds)[:count])


def _ranks_of(layer: int, num_layers: int, placement: Sequence[int]) -> set[int]:
    """Devices that may hold a layer, if every stage holds at least one."""
    stages = len(placement)
    return set(placement[max(0, stages - (num_layers - layer)) : min(layer, stages - 1) + 1])


def plan_of_rounds(problem: Problem, cuts: Sequence[int]) -> Plan:
    """Return the plan, neither judged nor simulated, whose stages go round the devices of every pipeline.

    cuts: first layers of all stages of a pipeline; where two are equal, a device is left out.
    """
    profile, run = problem.profile, problem.run
    bounds = zip(cuts, (*cuts[1:], profile.num_layers), problem.placement, strict=True)
    filled, placement = zip(*((first, rank) for first, end, rank in bounds if first < end), strict=True)
    return Plan(
        profile.num_layers,
        stages_of_pipelines(profile.num_layers, filled, problem.pipelines, run.num_blocks, placement),
        Units(run.num_microbatches, run.microbatch_size, run.num_blocks),
        run.schedule,
        ranks=problem.devices if any(device != PlanRank() for device in problem.devices) else (),
        model=profile.model,
        profile_digest=profile.digest,
    )


def fastest_chunks(problem: Problem, cuts: Sequence[int]) -> tuple[int, ...]:
    """Return the first layers of all stages of a pipeline with the shortest step that fits. All cut lists of a small
    chain are tried. Else layers are moved between stages, beginning with the better of `cuts` and the rounds with the
    smallest sum. Under a capacity the search begins with each of these, and with equally many layers in each stage,
    since the fastest start that fits may be far from the best cuts.

    Where nothing fits, return the cuts that lack least. Raises CapslogError where the profile lacks seconds.
    """
    size, stages, plays = problem.profile.num_layers, len(problem.placement), _Plays(problem)
    if math.comb(size - 1, stages - 1) <= _ALL_LISTS:
        lists = ((0, *inner) for inner in itertools.combinations(range(1, size), stages - 1))
        return min(lists, key=plays.value)
    rounds = _Rounds(problem)
    starts = [min({tuple(cuts), rounds.shortest()}, key=plays.value)]
    if problem.capacities is not None:
        even = tuple(size * stage // stages for stage in range(stages))
        starts = sorted({tuple(cuts), rounds.shortest(), even}, key=plays.value)
    best, most_plays = starts[0], max(24, _ACTIONS // (problem.share.microbatches * stages))
    for number, start in enumerate(starts, 1):
        best = min(best, _descended(start, rounds, plays, most_plays * number // len(starts)), key=plays.value)
    return _descended(best, rounds, plays, most_plays)


def _descended(cuts: tuple[int, ...], rounds: _Rounds, plays: _Plays, most_plays: int) -> tuple[int, ...]:
    """Move to the first better cuts nearby (`_shorter`) until there are none, and return the last cuts."""
    while plays.count < most_plays and (shorter := _shorter(cuts, rounds, plays, most_plays)) is not None:
        cuts = shorter
    return cuts


def _shorter(best: tuple[int, ...], rounds: _Rounds, plays: _Plays, most_plays: int) -> tuple[int, ...] | None:
    """Return the first cuts near the best that are better; None: none within `most_plays` simulated steps."""
    lack, step, peak = plays.value(best)
    for near in sorted(rounds.moves(best), key=rounds.seconds):
        if plays.count >= most_plays:
            return None
        value = plays.value(near)
        if value[0] < lack or (value[0] == lack and (value[1] * (1 + SAME) < step)):
            return near
        if value[:2] == (lack, step) and value[2] < peak:
            return near
    return None


def _layer_seconds(problem: Problem, recomputes: bool) -> list[float]:
    """Seconds of one microbatch in each layer. recomputes: with its recomputation."""
    profile = problem.profile
    rows = zip(profile.column("forward_seconds"), profile.column("backward_seconds"), strict=True)
    return [(2 if recomputes else 1) * forward + backward for forward, backward in rows]


class _Rounds:
    """Estimates the seconds of a step by the longest stage of each round, and moves layers to other stages."""

    def __init__(self, problem: Problem) -> None:
        self._placement, self._size = problem.placement, problem.profile.num_layers
        self._stages, borders = len(self._placement), [0]
        for stage in range(1, self._stages):
            if self._placement[stage] <= self._placement[stage - 1]:
                borders.append(stage)
        self._rounds = [range(*pair) for pair in itertools.pairwise((*borders, self._stages))]
        self._sums = [0.0, *itertools.accumulate(_layer_seconds(problem, problem.share.settled().recomputes))]
        self._speeds = problem.speeds or (1.0,) * problem.width
        self._round = functools.cache(self._longest)

    def shortest(self) -> tuple[int, ...]:
        """Cuts of the rounds with the smallest sum of their longest stages."""
        size = self._size
        best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
        for number, stages in enumerate(self._rounds):
            is_last = stages.stop == self._stages
            following: dict[int, tuple[float, tuple[int, ...]]] = {}
            for end in [size] if is_last else range(stages.stop, size - (self._stages - stages.stop) + 1):
                options = (
                    (seconds + self._round(number, start, end)[0], start)
                    for start, (seconds, _) in best.items()
                    if end - start >= len(stages)
                )
                seconds, start = min(options)
                following[end] = seconds, (*best[start][1], *self._round(number, start, end)[1])
            best = following
        return best[size][1]

    def _longest(self, number: int, start: int, end: int) -> tuple[float, tuple[int, ...]]:
        """Seconds of the longest stage of a round of these layers, minimized, and the cuts of the round."""
        sums, high = self._sums, self._sums[end] - self._sums[start]
        speeds = [self._speeds[self._placement[stage]] for stage in self._rounds[number]]
        low, cuts = 0.0, tuple(range(start, start + len(speeds)))
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            filled = self._filled(start, end, middle, speeds)
            low, high, cuts = (middle, high, cuts) if filled is None else (low, middle, filled)
        bounds = zip(cuts, (*cuts[1:], end), speeds, strict=True)
        return max((sums[stop] - sums[first]) / speed for first, stop, speed in bounds), cuts

    def _filled(self, start: int, end: int, longest: float, speeds: Sequence[float]) -> tuple[int, ...] | None:
        """Cuts of a round whose stages take up to `longest` seconds, earlier stages with as many layers as fit;
        None: the stages do not hold all layers. speeds: of the stages' devices.
        """
        cuts, place = [], start
        for number, speed in enumerate(speeds):
            cuts.append(place)
            last = end - (len(speeds) - 1 - number)  # every later stage holds a layer
            place = min(last, bisect.bisect_right(self._sums, self._sums[place] + longest * speed * (1 + SAME)) - 1)
            if place <= cuts[-1]:
                return None
        return tuple(cuts) if place == end else None

    def seconds(self, cuts: Sequence[int]) -> tuple[float, float]:
        """Seconds: sum of the rounds' longest stages, but at least the slowest rank; for ties, the sum of squares."""
        stages = [
            (self._sums[end] - self._sums[first]) / self._speeds[self._placement[stage]]
            for stage, (first, end) in enumerate(itertools.pairwise((*cuts, self._size)))
        ]
        longest = sum(max(stages[number] for number in numbers) for numbers in self._rounds)
        busy = dict.fromkeys(self._placement, 0.0)
        for rank, seconds in zip(self._placement, stages, strict=True):
            busy[rank] += seconds
        return max(longest, *busy.values()), sum(row * row for row in stages)

    def moves(self, cuts: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        """Cuts with one layer fewer in one stage and one more in another: the cuts between them move by one."""
        for giver, taker in itertools.permutations(range(self._stages), 2):
            end = self._size if giver + 1 == self._stages else cuts[giver + 1]
            if end - cuts[giver] == 1:
                continue
            if taker < giver:
                yield (*cuts[: taker + 1], *(cut + 1 for cut in cuts[taker + 1 : giver + 1]), *cuts[giver + 1 :])
            else:
                yield (*cuts[: giver + 1], *(cut - 1 for cut in cuts[giver + 1 : taker + 1]), *cuts[taker + 1 :])


class _Plays:
    """Values of cut lists of one pipeline, each judged and simulated once; `count`: lists so far."""

    def __init__(self, problem: Problem) -> None:
        run = problem.share.settled()
        self._problem = dataclasses.replace(problem, devices=problem.devices[: problem.width], run=run, pipelines=1)
        self._values = dict[tuple[int, ...], _Value]()

    @property
    def count(self) -> int:
        return len(self._values)

    def value(self, cuts: tuple[int, ...]) -> _Value:
        if cuts not in self._values:
            self._values[cuts] = self._played(cuts)
        return self._values[cuts]

    def _played(self, cuts: tuple[int, ...]) -> _Value:
        problem, run = self._problem, self._problem.run
        profile, plan = problem.profile, plan_of_rounds(problem, cuts)
        verdict, lack = plan, 0
        if problem.capacities is not None:
            verdict = judge_by_fold(profile, plan, run, None, problem.tier)
            lack = 0 if verdict.shortfall is None else verdict.shortfall.bytes
        step = with_step_seconds(profile, plan, run, problem.link).step_seconds
        if step is None:
            raise CapslogError("the microbatches of a step are not known; set train.minibatch_size")
        return lack, step, verdict.peak_bytes or 0
