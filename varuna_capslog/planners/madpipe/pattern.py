"""Periodic schedule of MadPipe (Sec. 3 and 4.3): the start of each operation of an allocation, by a linear program.

An operation o (forward or backward of a stage, or a message between two devices) of d seconds starts at t in [0, T) of
every period, for a microbatch that entered h periods before. Beaumont et al., "Pipelined Model Parallelism: Complexity
Results and Memory Considerations", 2020, solve for a given T. Divided by T, the program is also linear with T as a
variable: x = t / T and f = 1 / T.

    largest f (shortest T), such that
    x' + h' >= x + h + d f              o' needs the output of o: one chain from the first forward to the last backward
    x + d f <= x' + y,  x' + d' f <= x + 1 - y      for two operations on one device or link; y = 1: o starts after o'
    sum over stages s of a device of saved(s) (h_B - h_F + y(B_s, F_r) - y(F_s, F_r)) + its constant bytes <= M
                                        when an operation of its stage r starts, including its call and the working
                                        bytes of r (where they are 0, or r is alone, only when its forward starts)

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

from varuna_capslog.planners.madpipe.allocation import Allocation, ChainCosts

__all__ = ["Operation", "Pattern", "periodic_pattern"]

_GAP = 1e-4
"""Relative gap at which the search ends."""


@dataclass(frozen=True)
class Operation:
    """Operation of a stage, or message between two devices. kind: "F" or "B" of a stage; "f": message to its forward;
    "b": message of its gradient to the stage before. resource: device or link: ("rank", r), or ("link", r, r').
    """

    kind: str
    stage: int
    seconds: float
    resource: tuple[object, ...]


@dataclass(frozen=True)
class Pattern:
    """Periodic schedule. operations: in the order in which a microbatch passes them. starts: t of each, in seconds.
    shifts: h of each. proven: no pattern of the allocation has a period that is shorter by more than `_GAP`.
    """

    period: float
    operations: tuple[Operation, ...]
    starts: tuple[float, ...]
    shifts: tuple[int, ...]
    proven: bool

    def step_seconds(self, microbatches: int) -> float:
        """Return the seconds from a step's first start of an operation to its last start."""
        return self.period * (microbatches - 1 + self.shifts[-1]) + self.starts[-1]

    def ranks(self, microbatches: int) -> list[list[str]]:
        """Return the action list of every rank, in a plan's notation, of a step that fills and drains the pattern."""
        rows: dict[int, list[tuple[float, int, str]]] = {}
        for place, (operation, start, shift) in enumerate(zip(self.operations, self.starts, self.shifts, strict=True)):
            if operation.kind in "FB":
                assert isinstance(operation.resource[1], int)
                row = rows.setdefault(operation.resource[1], [])
                begun = start / self.period + shift
                row += [
                    (round(begun + call, 6), place, f"{operation.stage}{operation.kind}{call}")
                    for call in range(microbatches)
                ]
        return [[text for _, _, text in sorted(rows[rank])] for rank in sorted(rows)]


def periodic_pattern(
    costs: ChainCosts, allocation: Allocation, microbatches: int | None = None, limit_seconds: float = 20.0
) -> Pattern | None:
    """Return the pattern of the shortest period; None where no schedule fits, or none was found in time.
    microbatches: of a step that the pattern fills and drains; then the periods between a microbatch's first and last
    operation also count, weighted by 1 / (microbatches + stages). None: only the period counts. limit_seconds: of the
    search, which then returns its best pattern so far.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp

    program = _Program(costs, allocation)
    weight = 1.0 / (microbatches + len(allocation.stages)) if microbatches else 1e-4 / len(program.operations)
    goal = np.zeros(program.count)
    goal[0] = -1.0
    goal[[program.start(-1), program.shift(-1)]] = weight
    matrix, upper = program.rules()
    lows, highs, integrality = program.bounds()
    with _quiet():
        solution = milp(
            goal,
            constraints=LinearConstraint(matrix, ub=upper),
            bounds=Bounds(lows, highs),
            integrality=integrality,
            options={"time_limit": limit_seconds, "mip_rel_gap": _GAP},
        )
    if solution.x is None:
        return None
    return program.pattern(solution.x, solution.status == 0)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Discard the line that HiGHS prints from C when it repairs a solution, whatever its options say."""
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
    """Linear program of variables f, starts x, shifts h, and a y for each pair of operations of a device or link. The
    unit of time is the load of the busiest device or link, so that f <= 1.
    """

    def __init__(self, costs: ChainCosts, allocation: Allocation) -> None:
        self.costs, self.stages = costs, allocation.stages
        self.operations = _operations(costs, allocation)
        self.unit = allocation.load(costs) or 1.0
        size = len(self.operations)
        shared: dict[tuple[object, ...], list[int]] = {}
        for place, operation in enumerate(self.operations):
            shared.setdefault(operation.resource, []).append(place)
        pairs = [pair for row in shared.values() for pair in itertools.combinations(row, 2)]
        self.pairs = {pair: 1 + 2 * size + number for number, pair in enumerate(pairs)}
        self.count = 1 + 2 * size + len(pairs)
        self.place = {(operation.kind, operation.stage): place for place, operation in enumerate(self.operations)}

    def start(self, place: int) -> int:
        """Return the index of an operation's variable x."""
        return 1 + place % len(self.operations)

    def shift(self, place: int) -> int:
        """Return the index of an operation's variable h."""
        return 1 + len(self.operations) + place % len(self.operations)

    def bounds(self) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.int_]]:
        """Return the variables' bounds, low and high, and 1 if they are integers. The first forward begins a period."""
        lows, highs, integrality = np.zeros(self.count), np.ones(self.count), np.ones(self.count, dtype=np.int_)
        size, total = len(self.operations), sum(operation.seconds for operation in self.operations)
        lows[0] = self.unit / total if total else 1.0  # one microbatch after the other
        integrality[: 1 + size] = 0
        highs[1 + size : 1 + 2 * size] = size
        highs[[self.start(0), self.shift(0)]] = 0
        return lows, highs, integrality

    def rules(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the matrix A and the limits b of A v <= b."""
        rows = [{0: self._units(place)} for place in range(len(self.operations) - 1)]
        for place, row in enumerate(rows):
            row |= {
                self.start(place): 1.0,
                self.shift(place): 1.0,
                self.start(place + 1): -1.0,
                self.shift(place + 1): -1.0,
            }
        limits = [0.0] * len(rows)
        for (first, second), after in self.pairs.items():
            rows.append({0: self._units(first), self.start(first): 1.0, self.start(second): -1.0, after: -1.0})
            rows.append({0: self._units(second), self.start(second): 1.0, self.start(first): -1.0, after: 1.0})
            limits += [0.0, 1.0]
        if self.costs.usable is not None:
            ranks = [stage.rank for stage in self.stages]
            for number, rank in enumerate(ranks):
                # a device with one stage holds the most in a forward or after it
                kinds = "FB" if self.costs.working is not None and ranks.count(rank) > 1 else "F"
                for kind in kinds:
                    row, limit = self._memory(number, kind, self.costs.usable)
                    rows.append(row)
                    limits.append(limit)
        matrix = np.zeros((len(rows), self.count))
        for number, row in enumerate(rows):
            for column, coefficient in row.items():
                matrix[number, column] += coefficient
        return matrix, np.array(limits)

    def _units(self, place: int) -> float:
        return self.operations[place].seconds / self.unit

    def _memory(self, number: int, kind: str, usable: float) -> tuple[dict[int, float], float]:
        """Return coefficients and limit, as shares of `usable`: bytes on a stage's device when its F or B starts."""
        row, running = dict[int, float](), self.stages[number]
        at, room = self.place[kind, number], usable - self.costs.of("working", running.first, running.end)
        for index, stage in enumerate(self.stages):
            if stage.rank != running.rank:
                continue
            size = self.costs.of("saved", stage.first, stage.end)
            room -= self._always(index)
            forward, backward = self.place["F", index], self.place["B", index]
            row[self.shift(backward)] = row.get(self.shift(backward), 0.0) + size / usable
            row[self.shift(forward)] = row.get(self.shift(forward), 0.0) - size / usable
            for place, sign in ((backward, 1.0), (forward, -1.0)):
                if place == at:  # its call is held
                    room -= size * (kind == "B")
                    continue
                # y of a pair is 1 where its first operation starts after its second
                pair, turned = ((place, at), False) if place < at else ((at, place), True)
                row[self.pairs[pair]] = row.get(self.pairs[pair], 0.0) + (-sign if turned else sign) * size / usable
                room -= sign * size if turned else 0.0
        return row, room / usable + 1e-9

    def _always(self, number: int) -> float:
        """Return the bytes that a stage always holds, with the buffers of its messages to other devices."""
        stage = self.stages[number]
        cuts = [stage.first] if number and self.stages[number - 1].rank != stage.rank else []
        cuts += [after.first for after in self.stages[number + 1 : number + 2] if after.rank != stage.rank]
        return self.costs.of("static", stage.first, stage.end) + sum(map(self.costs.buffers, cuts))

    def pattern(self, values: NDArray[np.float64], proven: bool) -> Pattern:
        """Return the pattern of a solution."""
        size, period = len(self.operations), self.unit / float(values[0])
        starts = [float(start) * period for start in values[1 : 1 + size]]
        shifts = [round(float(shift)) for shift in values[1 + size : 1 + 2 * size]]
        return Pattern(period, self.operations, tuple(starts), tuple(shifts), proven)


def _operations(costs: ChainCosts, allocation: Allocation) -> tuple[Operation, ...]:
    """Return the operations in a microbatch's order, without messages that take no time or stay on a device."""
    stages = allocation.stages
    there, back = list[Operation](), list[Operation]()
    for number, stage in enumerate(stages):
        if number and stages[number - 1].rank != stage.rank and costs.transfer[stage.first]:
            ends = stages[number - 1].rank, stage.rank
            ways = [tuple(sorted(ends))] * 2 if costs.shared else [ends, ends[::-1]]
            for row, kind, way in zip((there, back), "fb", ways, strict=True):
                row.append(Operation(kind, number, costs.transfer[stage.first], ("link", *way)))
        for row, kind, seconds in ((there, "F", costs.forward), (back, "B", costs.backward)):
            row.append(Operation(kind, number, sum(seconds[stage.first : stage.end]), ("rank", stage.rank)))
    return (*there, *back[::-1])
