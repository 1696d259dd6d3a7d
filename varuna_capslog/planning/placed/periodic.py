"""Plan of planner `madpipe`: a rank may have several stages, and the action lists are those of a periodic schedule.

The pattern fills and drains within a step, so that one version of the weights is enough. Each way to count the special
processor, the rank with several stages, gives its own allocation; another has no such rank. Of the allocations that fit
by the fold, the one with the shortest simulated step is the plan.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterator, Sequence

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.planners import MADPIPE
from varuna_capslog.planners.madpipe import (
    CLOSE,
    COMPARED_COUNTINGS,
    Allocation,
    ChainCosts,
    Pattern,
    allocations_by_counting,
    best_allocation,
    periodic_pattern,
    shortest_pattern,
)
from varuna_capslog.planners.madpipe.allocation import allocation_within
from varuna_capslog.planning.playing import SAME, with_step_seconds
from varuna_capslog.planning.problem import Problem
from varuna_capslog.planning.verdict import check_devices, judge_by_fold
from varuna_capslog.plans.parts import PlanStage, Units
from varuna_capslog.plans.plan import Plan

__all__ = ["two_versions_note"]

MOST_LAYERS = 64
"""In longer chains, neighbouring layers are merged before the search, those of the fewest seconds first."""

_SEARCH_SECONDS = 30.0
"""Time after which the search ends with its best plan, where `Problem.search_seconds` is None."""

_PROGRAM_SECONDS = 20.0, 0.5
"""Largest and smallest time limit of one allocation's linear program; most programs take well under a second."""

_SHORT = 7
"""Largest number of layers of which all allocations are simulated, where no allocation by the chain's sums fits."""

_ATTEMPTS = 7
"""Largest number of allocations for each counting, each for another number of bytes."""

_FINE = 1e-3
"""Relative difference of bytes at which `weigh_smallest` ends."""

_MORE = 1.5
"""Factor on the bytes of the chain's sums for the next attempt, as long as plans fit by the fold."""


def periodic_plan(problem: Problem, planner: str = MADPIPE) -> Plan:
    """Return MadPipe's plan, not judged yet. Every device is taken to have the smallest capacity. For every run the
    action lists are those of the pattern, and everything is kept.

    Raises CapslogError for more devices than layers, for seconds or bytes that the profile lacks, and where all plans
    are known to take `Problem.longest` at least.
    """
    profile, devices, usable = problem.profile, problem.width, problem.usable
    check_devices(devices, profile)
    begun = time.perf_counter()
    costs = ChainCosts.of_profile(profile, devices, None if usable is None else min(usable), problem.link)
    costs, bounds = costs.merged(MOST_LAYERS)
    search = _Periodic(problem, bounds, costs)
    by_counting, tried = allocations_by_counting(costs), set[object]()
    for counting in COMPARED_COUNTINGS if devices > 1 else ("none",):
        allocation = by_counting.get(counting)
        if allocation is None or allocation.stages not in tried or search.lacks:
            search.weigh(costs, counting, allocation)
        tried.add(None if allocation is None else allocation.stages)
    if search.limited and search.lacks and not search.has_slower:
        search.weigh_smallest(costs)
    if search.best is None and search.has_slower:
        raise CapslogError(f"planner {planner} has no plan with a step of less than {problem.longest:.4g} s")
    if search.best is None:  # the plan says what it lacks, however slow it is
        search.longest = None
        search.weigh(search.unlimited, "none", search.free_allocation("none"))
    assert search.best is not None, "without a limit some stages always fit"
    notes = ("the search has ended by its time; with a larger pipeline.search_seconds it may find a better plan",)
    return dataclasses.replace(
        search.best[1],
        planner=planner,
        search_seconds=time.perf_counter() - begun,
        notes=notes if search.is_over else (),
    )


def two_versions_note(problem: Problem) -> str | None:
    """Return a text on the period that MadPipe promises in its paper: without filling and draining, and with two
    versions of the weights (PipeDream-2BW). None where the profile lacks data. No plan is made with this period.
    """
    least = None if problem.usable is None else min(problem.usable)
    try:
        costs = ChainCosts.of_profile(problem.profile, problem.width, least, problem.link, True)
    except CapslogError:
        return None
    pattern = shortest_pattern(costs.merged(MOST_LAYERS)[0], problem.search_seconds or _SEARCH_SECONDS)
    if pattern is None:
        return "as printed, with two versions of the weights (2BW) and without a flush, MadPipe finds nothing that fits"
    return (
        "as printed, with two versions of the weights (2BW) and without a flush, MadPipe has a period of "
        f"{pattern.period:.4g} s per microbatch; no plan trains so"
    )


class _Periodic:
    """Search that keeps the best of the plans that it evaluates.

    bounds: for each layer of the searched chain, its first layer in the profile; last, the number of layers.
    costs: of the searched chain, with the limit of memory; `unlimited` are the same without. free: seconds of the
    shortest period without it. has_slower: a plan that fits was left out; its step is not below `Problem.longest`.
    """

    def __init__(self, problem: Problem, bounds: Sequence[int], costs: ChainCosts) -> None:
        self.profile, self.link, self.ranks = problem.profile, problem.link, problem.devices
        self.run = dataclasses.replace(problem.run, schedule="1f1b", recompute=False)
        self.limited, self.bounds = problem.capacities is not None, bounds
        self.longest, self.has_slower = problem.longest, False
        self.best: tuple[tuple[float, float], Plan] | None = None
        self.unlimited = dataclasses.replace(costs, usable=None)
        self._free_allocations: dict[str, Allocation] = {}  # by counting
        self._free_patterns: dict[str, Pattern | None] = {}
        self.free = self.free_allocation("least" if costs.devices > 1 else "none").period
        self.ends = time.perf_counter() + (problem.search_seconds or _SEARCH_SECONDS)

    @property
    def is_over(self) -> bool:
        """True once the time of the search is up and it has a plan."""
        return self.best is not None and time.perf_counter() > self.ends

    @property
    def lacks(self) -> bool:
        """True while no plan is known that fits."""
        return self.best is None or self.best[0][0] > 0

    def weigh(self, costs: ChainCosts, counting: str, allocation: Allocation | None) -> None:
        """Simulate the plan of an allocation, and of allocations for other limits: the bytes by the chain's sums differ
        from those of the fold, so the limit up to which plans fit is bisected. allocation: for these costs by
        `counting`; None: there is none.
        """
        if allocation is not None and self._is_slow(costs, counting, allocation):
            self.has_slower = True
            return
        low, high, less = 0.0, math.inf, 0.0
        for _ in range(_ATTEMPTS):
            if self.is_over:
                return
            calls, limit = self.run.microbatches, self._program_seconds()
            pattern = None if allocation is None else periodic_pattern(costs, allocation, calls, limit)
            if allocation is not None and pattern is not None and (lack := self._add(allocation, pattern.ranks(calls))):
                high, less = costs.usable or 0.0, max(2 * less, lack)
            elif costs.usable is None or (pattern is not None and pattern.period <= self.free * (1 + CLOSE)):
                return
            else:
                if math.isinf(high) and allocation and pattern and self._is_free(counting, allocation, pattern):
                    return
                low = costs.usable
            between = (low + high) / 2 if low else max(high - less, high / 2)
            costs = dataclasses.replace(costs, usable=_MORE * low if math.isinf(high) else between)
            allocation = best_allocation(costs, counting)

    def _is_slow(self, costs: ChainCosts, counting: str, allocation: Allocation) -> bool:
        """Return True where all that `weigh` would simulate takes `longest` at least: more memory gives no other
        allocation, and this one holds all microbatches in half of what there is, so that less is not tried either.
        """
        calls = self.run.microbatches
        if self.longest is None or allocation.step_bound(costs, calls) * (1 + SAME) < self.longest:
            return False
        held = sum(costs.memory(stage.first, stage.end, calls) for stage in allocation.stages)
        return costs.usable is None or (
            2 * held <= costs.usable and self.free_allocation(counting).stages == allocation.stages
        )

    def free_allocation(self, counting: str) -> Allocation:
        """Return the best allocation without a limit of memory."""
        if counting not in self._free_allocations:
            allocation = best_allocation(self.unlimited, counting)
            assert allocation is not None, "without a limit some stages always fit"
            self._free_allocations[counting] = allocation
        return self._free_allocations[counting]

    def _is_free(self, counting: str, allocation: Allocation, pattern: Pattern) -> bool:
        """True if allocation and pattern are as good as those without a limit of memory: more bytes change nothing."""
        calls, free = self.run.microbatches, self.free_allocation(counting)
        if counting not in self._free_patterns:
            seconds = self._program_seconds()
            self._free_patterns[counting] = periodic_pattern(self.unlimited, free, calls, seconds)
        free_pattern = self._free_patterns[counting]
        if free_pattern is None or free.stages != allocation.stages:
            return False
        return pattern.step_seconds(calls) <= free_pattern.step_seconds(calls) * (1 + CLOSE)

    def _program_seconds(self) -> float:
        longest, shortest = _PROGRAM_SECONDS
        return max(shortest, min(longest, self.ends - time.perf_counter()))

    def weigh_smallest(self, costs: ChainCosts) -> None:
        """Simulate plans that run one microbatch after the other, which hold the fewest bytes. The limit of the chain's
        sums is bisected, to `_FINE`, until a plan fits. If none does, all allocations of a short chain are simulated.
        """
        low, high, tried = 0.0, _MORE * (costs.usable or 0.0), set[object]()
        long = costs.of("seconds", 0, costs.num_layers) + sum(map(costs.delay, range(1, costs.num_layers)))
        usable, counting = high, "most" if costs.devices > 1 else "none"
        while high > low * (1 + _FINE) and self.lacks and not self.is_over:
            allocation = allocation_within(dataclasses.replace(costs, usable=usable), long, counting=counting)
            low, high = (usable, high) if allocation is None else (low, usable)
            usable = (low + high) / 2
            if allocation is not None and allocation.stages not in tried:
                tried.add(allocation.stages)
                self._add(allocation, _one_after_the_other(allocation, self.run.microbatches))
        parts = _all_parts(0, costs.num_layers, costs.devices - 1) if costs.num_layers <= _SHORT else ()
        for allocation in (Allocation.of(costs, row) for row in parts):
            if not self.lacks or self.is_over:
                return
            self._add(allocation, _one_after_the_other(allocation, self.run.microbatches))

    def _add(self, allocation: Allocation, rows: Sequence[Sequence[str]]) -> float:
        """Keep the plan of these lists if it is the best. Return the bytes that it lacks."""
        plan, lack = self._plan(allocation, rows), 0.0
        if self.limited and self.profile.observations:  # without observations the fold has no bytes
            verdict = judge_by_fold(self.profile, plan, self.run)
            lack = float(verdict.shortfall.bytes) if verdict.shortfall is not None else float(verdict.fits is False)
        played = with_step_seconds(self.profile, plan, self.run, self.link)
        key = lack, played.step_seconds or 0.0
        if self.best is None or key < self.best[0]:
            self.best = key, played
        return lack

    def _plan(self, allocation: Allocation, rows: Sequence[Sequence[str]]) -> Plan:
        run, profile = self.run, self.profile
        actions = tuple(map(tuple, rows))
        limits = _in_flight(actions, len(allocation.stages))
        stages = tuple(
            PlanStage(((self.bounds[stage.first], self.bounds[stage.end]),), (stage.rank,), in_flight=limit)
            for stage, limit in zip(allocation.stages, limits, strict=True)
        )
        return Plan(
            profile.num_layers,
            stages,
            Units(run.microbatches, run.microbatch_size, run.num_blocks),
            run.schedule,
            ranks=self.ranks,
            actions=(*actions, *[()] * (len(self.ranks) - len(actions))),
            model=profile.model,
            profile_digest=profile.digest,
        )


def _all_parts(first: int, end: int, ordinary: int) -> Iterator[list[tuple[int, int, bool]]]:
    """Yield all divisions of layers first .. end-1 into (first, end, special), with at most `ordinary` not special."""
    if first == end:
        yield []
    for border in range(first + 1, end + 1):
        for special in (True, False)[: 1 + (ordinary > 0)]:
            for behind in _all_parts(border, end, ordinary - (not special)):
                yield [(first, border, special), *behind]


def _one_after_the_other(allocation: Allocation, microbatches: int) -> list[list[str]]:
    """Return the action list of every rank where each microbatch ends before the next one begins."""
    rows: list[list[str]] = [[] for _ in {stage.rank for stage in allocation.stages}]
    stages = [(number, stage.rank) for number, stage in enumerate(allocation.stages)]
    for call in range(microbatches):
        for kind, order in (("F", stages), ("B", stages[::-1])):
            for number, rank in order:
                rows[rank].append(f"{number}{kind}{call}")
    return rows


def _in_flight(actions: Sequence[Sequence[str]], stages: int) -> list[int]:
    """Most calls of each stage between the begin of a forward and the end of its backward."""
    peaks, now = [0] * stages, [0] * stages
    for text in (text for row in actions for text in row):
        kind = "F" if "F" in text else "B"
        stage = int(text.split(kind)[0])
        now[stage] += 1 if kind == "F" else -1
        peaks[stage] = max(peaks[stage], now[stage])
    return peaks
