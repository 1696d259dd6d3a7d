"""Periodic schedules, simulated over many periods, compared with 1F1B* and with every choice of whole starts."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
import sys

import pytest

from tests.planners.madpipe.chains import draw_chain, every_allocation, fits
from tests.sweeps import some
from varuna_capslog.planners.madpipe.allocation import Allocation, ChainCosts, best_allocation
from varuna_capslog.planners.madpipe.pattern import Operation, Pattern, periodic_pattern

PERIODS = 40


def check(costs: ChainCosts, allocation: Allocation, pattern: Pattern) -> None:
    """Simulate the pattern. Check the order of each microbatch, one operation at a time per resource, and the bytes."""
    runs: dict[tuple[object, ...], list[tuple[float, float, str]]] = {}
    begun: dict[tuple[str, int], float] = {}
    slack, ready = 1e-5 * pattern.period, 0.0
    for operation, start, shift in zip(pattern.operations, pattern.starts, pattern.shifts, strict=True):
        first = start + shift * pattern.period  # of microbatch 0
        assert first >= ready - slack
        ready = begun[operation.kind, operation.stage] = first
        ready += operation.seconds
        for number in range(PERIODS):
            at = first + number * pattern.period
            runs.setdefault(operation.resource, []).append(
                (at, at + operation.seconds, f"{operation.kind}{operation.stage}")
            )
    for row in runs.values():
        row.sort()
        for (_, end, _), (start, _, _) in itertools.pairwise(row):
            assert start >= end - slack
    for rank in {stage.rank for stage in allocation.stages}:
        numbers = [number for number, stage in enumerate(allocation.stages) if stage.rank == rank]
        events = []
        for number in numbers:
            stage = allocation.stages[number]
            size = sum(costs.saved[stage.first : stage.end])
            back = begun["B", number] + sum(costs.backward[stage.first : stage.end])
            for microbatch in range(PERIODS):
                events.append((round(begun["F", number] / pattern.period + microbatch, 5), 1, size))
                events.append((round(back / pattern.period + microbatch, 5), 0, -size))
        held = sum(sum(costs.static[stage.first : stage.end]) for stage in (allocation.stages[at] for at in numbers))
        for number, stage in enumerate(allocation.stages[1:], 1):
            ends = {allocation.stages[number - 1].rank, stage.rank}
            held += 2 * costs.crossing[stage.first] * (len(ends) == 2 and rank in ends)
        for _, _, size in sorted(events):
            held += size
            assert held <= (costs.usable or math.inf) * (1 + 1e-6)


def test_patterns_of_drawn_allocations_are_valid_and_no_shorter_than_their_loads() -> None:
    dice, checked = random.Random(1), 0
    for _ in some(range(50), 28):
        layers, devices = dice.randrange(2, 9), dice.randrange(2, 5)
        costs = draw_chain(dice, layers, devices)
        parts = dice.choice(list(every_allocation(layers, devices - 1)))
        allocation = Allocation.of(costs, parts)
        for microbatches in (None, 8):
            pattern = periodic_pattern(costs, allocation, microbatches)
            if pattern is not None:
                checked += 1
                assert pattern.proven
                assert pattern.period >= allocation.load(costs) * (1 - 1e-6)
                check(costs, allocation, pattern)
    assert checked > 10


def test_contiguous_stages_have_the_period_of_1f1b_star() -> None:
    """Proposition 1: the smallest T for which the groups of stages and messages fit."""
    dice, compared = random.Random(2), 0
    for _ in range(40):
        layers, devices = dice.randrange(2, 8), dice.randrange(2, 5)
        costs = dataclasses.replace(draw_chain(dice, layers, devices), shared=True)
        parts = dice.choice(
            [candidate for candidate in every_allocation(layers, devices) if not any(part[2] for part in candidate)]
        )
        pattern = periodic_pattern(costs, Allocation.of(costs, parts))
        largest = sum(costs.forward) + sum(costs.backward) + 2 * sum(costs.transfer)
        if not fits(costs, parts, largest):
            assert pattern is None
            continue
        low, high = 0.0, largest
        while high - low > 1e-5 * high:
            middle = (low + high) / 2
            low, high = (low, middle) if fits(costs, parts, middle) else (middle, high)
        assert pattern is not None
        assert pattern.period == pytest.approx(high, rel=3e-4)
        compared += 1
    assert compared > 10


def smallest_whole_period(costs: ChainCosts, allocation: Allocation, operations: tuple[Operation, ...]) -> int | None:
    """Return the smallest whole period over all starts at whole seconds, each operation as early as possible."""
    longest = round(sum(operation.seconds for operation in operations))
    for period in range(math.ceil(allocation.load(costs) - 1e-9), longest + 1):
        for starts in itertools.product(range(period), repeat=len(operations) - 1):
            first, shifts, now = (0, *starts), list[int](), 0
            for operation, start in zip(operations, first, strict=True):
                shift = max(0, -(-(now - start) // period))
                shifts.append(shift)
                now = start + shift * period + round(operation.seconds)
            pattern = Pattern(float(period), operations, tuple(map(float, first)), tuple(shifts), True)
            try:
                check(costs, allocation, pattern)
            except AssertionError:
                continue
            return period
    return None


def test_no_choice_of_whole_starts_gives_a_shorter_period(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three stages, the first and the last on the same processor; memory is so small that some must wait."""
    monkeypatch.setattr("tests.planners.madpipe.test_pattern.PERIODS", 6)
    dice, longer, compared = random.Random(6), 0, 0
    for _ in some(range(16), 8):
        seconds = [float(dice.randrange(1, 3)) for _ in range(3)]
        saved = tuple(float(dice.randrange(1, 4)) for _ in range(3))
        costs = ChainCosts(
            (1.0,) * 3, tuple(seconds), (0.0,) * 3, saved, (0.0,) * 4, (0.0,) * 4, 2, float(dice.randrange(3, 7))
        )
        allocation = Allocation.of(costs, [(0, 1, True), (1, 2, False), (2, 3, True)])
        pattern = periodic_pattern(costs, allocation)
        if pattern is None:
            continue
        check(costs, allocation, pattern)
        whole_period = smallest_whole_period(costs, allocation, pattern.operations)
        assert whole_period is not None
        assert pattern.period <= whole_period * (1 + 2e-4)
        assert pattern.period == pytest.approx(whole_period, rel=2e-4)
        compared += 1
        longer += pattern.period > allocation.load(costs) * 1.01
    assert compared > 3
    assert longer > 0


def test_the_solver_writes_nothing_to_the_standard_output(capfd: pytest.CaptureFixture[str]) -> None:
    """HiGHS prints a line for some of these allocations, which would end up in the JSON output of a command."""
    dice = random.Random(1)
    for _ in range(12):
        layers, devices = dice.randrange(2, 9), dice.randrange(2, 5)
        costs = draw_chain(dice, layers, devices)
        periodic_pattern(costs, Allocation.of(costs, dice.choice(list(every_allocation(layers, devices - 1)))))
    sys.stdout.write("said\n")
    assert capfd.readouterr().out == "said\n"


def test_the_lists_of_a_step_fill_and_drain() -> None:
    costs = ChainCosts((1.0, 1.0), (1.0, 1.0), (0.0, 0.0), (1.0, 1.0), (0.0, 0.0, 0.0), (0.0, 0.0, 0.0), 2, 2.0)
    allocation = best_allocation(costs)
    assert allocation is not None
    pattern = periodic_pattern(costs, allocation)
    assert pattern is not None
    assert pattern.period == pytest.approx(2.0, rel=1e-3)
    assert pattern.ranks(3) == [["0F0", "0F1", "0B0", "0F2", "0B1", "0B2"], ["1F0", "1B0", "1F1", "1B1", "1F2", "1B2"]]
