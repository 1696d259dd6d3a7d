"""When each operation of an allocation starts: the periodic schedule of MadPipe (Sec. 3 and 4.3) as a linear program.

An operation o (forward or backward of a stage, or a message between two devices) of d seconds starts at t in [0, T) of
every period and works on a microbatch that entered h periods before. Beaumont et al., "Pipelined Model Parallelism:
Complexity Results and Memory Considerations", 2020, solve for a given T. Divided by T the program is linear with T as a
variable too: x = t / T and f = 1 / T.

    largest f (shortest T), such that
    x' + h' >= x + h + d f              o' needs what o makes: one chain from the first forward to the last backward
    x + d f <= x' + y,  x' + d' f <= x + 1 - y      of two operations on one device or link; y: o starts after o'
    sum over stages s of a device of saved(s) (h_B - h_F + y(B_s, F_r) - y(F_s, F_r)) + what it holds all the time <= M
                                        when the forward of its stage r starts, with r's own call

In a contiguous allocation whose links are shared by both directions, T is that of 1F1B* (Proposition 1).
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from varuna_capslog.planners.madpipe.allocation import Allocation
from varuna_capslog.planners.madpipe.costs import ChainCosts

__all__ = ["Operation", "Pattern", "periodic_pattern"]

_GAP = 1e-4
"""Relative gap at which the search ends."""


@dataclass(frozen=True)
class Operation:
    """kind: "F" or "B" of a stage; "f" the message to its forward, "b" the message of its gradient to the stage before.

    resource: the device or link that can do nothing else meanwhile: ("rank", r), or ("link", r, r').
    """

    kind: str
    stage: int
    seconds: float
    resource: tuple[object, ...]


@dataclass(frozen=True)
class Pattern:
    """operations: in the order in which a microbatch passes them. starts, shifts: of each, in seconds and periods.

    proven: no pattern of the allocation has a shorter period, by more than `_GAP`.
    """

    period: float
    operations: tuple[Operation, ...]
    starts: tuple[float, ...]
    shifts: tuple[int, ...]
    proven: bool

    def ranks(self, microbatches: int) -> list[list[str]]:
        """The list of every rank, as a plan has them, when the pattern fills and drains within a step."""
        rows: dict[int, list[tuple[float, int, str]]] = {}
        for place, (one, start, shift) in enumerate(zip(self.operations, self.starts, self.shifts, strict=True)):
            if one.kind in "FB":
                assert isinstance(one.resource[1], int)
                row = rows.setdefault(one.resource[1], [])
                begun = start / self.period + shift
                row += [(round(begun + call, 6), place, f"{one.stage}{one.kind}{call}") for call in range(microbatches)]
        return [[text for _, _, text in sorted(rows[rank])] for rank in sorted(rows)]


def periodic_pattern(
    costs: ChainCosts, allocation: Allocation, microbatches: int | None = None, limit_seconds: float = 20.0
) -> Pattern | None:
    """The shortest period of an allocation and its pattern; None where no schedule fits, or none was found in time.

    Args:
        microbatches: of a step that the pattern fills and drains; one period more on the way there and back then counts
            as much as if every microbatch took that much longer. None: the period alone counts.
        limit_seconds: when the search ends, with the best that it has.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp

    program = _Program(costs, allocation)
    weight = 1.0 / (microbatches + len(allocation.stages)) if microbatches else 1e-4 / len(program.operations)
    goal = np.zeros(program.count)
    goal[0] = -1.0
    goal[[program.start(-1), program.shift(-1)]] = weight
    matrix, upper = program.rules()
    lows, highs, whole = program.bounds()
    with _quiet():
        found = milp(
            goal,
            constraints=LinearConstraint(matrix, ub=upper),
            bounds=Bounds(lows, highs),
            integrality=whole,
            options={"time_limit": limit_seconds, "mip_rel_gap": _GAP},
        )
    if found.x is None:
        return None
    return program.pattern(found.x, found.status == 0)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """HiGHS prints a line where it repairs a solution, past Python and whatever its options say: it goes nowhere."""
    sys.stdout.flush()
    library, kept = ctypes.CDLL(None), os.dup(1)
    library.fflush(None)
    try:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 1)
            yield
    finally:
        library.fflush(None)  # what C has not written yet
        os.dup2(kept, 1)
        os.close(kept)


class _Program:
    """The variables f, the starts x, the shifts h, and one y for each two operations of a device or link; the rules.

    Seconds are counted in those of the busiest device or link, so that f <= 1.
    """

    def __init__(self, costs: ChainCosts, allocation: Allocation) -> None:
        self.costs, self.stages = costs, allocation.stages
        self.operations = _operations(costs, allocation)
        self.unit = allocation.load(costs) or 1.0
        size = len(self.operations)
        shared: dict[tuple[object, ...], list[int]] = {}
        for place, one in enumerate(self.operations):
            shared.setdefault(one.resource, []).append(place)
        every = [pair for row in shared.values() for pair in itertools.combinations(row, 2)]
        self.pairs = {pair: 1 + 2 * size + number for number, pair in enumerate(every)}
        self.count = 1 + 2 * size + len(every)
        self.place = {(one.kind, one.stage): place for place, one in enumerate(self.operations)}

    def start(self, place: int) -> int:
        """The variable x of an operation."""
        return 1 + place % len(self.operations)

    def shift(self, place: int) -> int:
        """The variable h of an operation."""
        return 1 + len(self.operations) + place % len(self.operations)

    def bounds(self) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.int_]]:
        """Lower and upper bounds of the variables, and which are whole numbers. The first forward begins a period."""
        lows, highs, whole = np.zeros(self.count), np.ones(self.count), np.ones(self.count, dtype=np.int_)
        size, every = len(self.operations), sum(one.seconds for one in self.operations)
        lows[0] = self.unit / every if every else 1.0  # one microbatch after the other
        whole[: 1 + size] = 0
        highs[1 + size : 1 + 2 * size] = size
        highs[[self.start(0), self.shift(0)]] = 0
        return lows, highs, whole

    def rules(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """The matrix A and the limits b of A v <= b."""
        rows = [{0: self._units(one)} for one in range(len(self.operations) - 1)]
        for one, row in enumerate(rows):
            row |= {self.start(one): 1.0, self.shift(one): 1.0, self.start(one + 1): -1.0, self.shift(one + 1): -1.0}
        limits = [0.0] * len(rows)
        for (one, other), after in self.pairs.items():
            rows.append({0: self._units(one), self.start(one): 1.0, self.start(other): -1.0, after: -1.0})
            rows.append({0: self._units(other), self.start(other): 1.0, self.start(one): -1.0, after: 1.0})
            limits += [0.0, 1.0]
        if self.costs.usable is not None:
            for number in range(len(self.stages)):
                row, limit = self._memory(number, self.costs.usable)
                rows.append(row)
                limits.append(limit)
        matrix = np.zeros((len(rows), self.count))
        for number, row in enumerate(rows):
            for column, value in row.items():
                matrix[number, column] += value
        return matrix, np.array(limits)

    def _units(self, place: int) -> float:
        return self.operations[place].seconds / self.unit

    def _memory(self, number: int, usable: float) -> tuple[dict[int, float], float]:
        """What the device of a stage holds when a forward of the stage starts, in parts of what it may hold."""
        row, left = dict[int, float](), usable
        rank, here = self.stages[number].rank, self.place["F", number]
        for other, one in enumerate(self.stages):
            if one.rank != rank:
                continue
            size = self.costs.of("saved", one.first, one.end)
            left -= self._always(other)
            forward, backward = self.place["F", other], self.place["B", other]
            row[self.shift(backward)] = row.get(self.shift(backward), 0.0) + size / usable
            row[self.shift(forward)] = row.get(self.shift(forward), 0.0) - size / usable
            for place, sign in ((backward, 1.0), (forward, -1.0)):
                if place == here:
                    continue
                # y of a pair says that its first operation starts after its second
                pair, turned = ((place, here), False) if place < here else ((here, place), True)
                row[self.pairs[pair]] = row.get(self.pairs[pair], 0.0) + (-sign if turned else sign) * size / usable
                left -= sign * size if turned else 0.0
        return row, left / usable + 1e-9

    def _always(self, number: int) -> float:
        """What a stage holds all the time: two buffers for each message over its cuts to other devices as well."""
        one = self.stages[number]
        cuts = [one.first] if number and self.stages[number - 1].rank != one.rank else []
        cuts += [after.first for after in self.stages[number + 1 : number + 2] if after.rank != one.rank]
        return self.costs.of("static", one.first, one.end) + 2.0 * sum(self.costs.crossing[cut] for cut in cuts)

    def pattern(self, values: NDArray[np.float64], proven: bool) -> Pattern:
        """What a solution says."""
        size, period = len(self.operations), self.unit / float(values[0])
        starts = [float(value) * period for value in values[1 : 1 + size]]
        shifts = [round(float(value)) for value in values[1 + size : 1 + 2 * size]]
        return Pattern(period, self.operations, tuple(starts), tuple(shifts), proven)


def _operations(costs: ChainCosts, allocation: Allocation) -> tuple[Operation, ...]:
    """In the order in which a microbatch passes them, without messages that take no time or stay on a device."""
    stages = allocation.stages
    there, back = list[Operation](), list[Operation]()
    for number, one in enumerate(stages):
        if number and stages[number - 1].rank != one.rank and costs.transfer[one.first]:
            ends = stages[number - 1].rank, one.rank
            ways = [tuple(sorted(ends))] * 2 if costs.shared else [ends, ends[::-1]]
            for row, kind, way in zip((there, back), "fb", ways, strict=True):
                row.append(Operation(kind, number, costs.transfer[one.first], ("link", *way)))
        for row, kind, seconds in ((there, "F", costs.forward), (back, "B", costs.backward)):
            row.append(Operation(kind, number, sum(seconds[one.first : one.end]), ("rank", one.rank)))
    return (*there, *back[::-1])
