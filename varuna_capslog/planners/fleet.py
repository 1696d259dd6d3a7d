"""How many pipelines of which template: the whole-number program behind `joint`.

Given the devices of each kind and what each template takes for 1, 2, ... blocks, it finds the least time in which all
blocks are done, and of the fleets that keep it one that uses most devices. Small fleets are weighed by dynamic
programming in a millisecond, large ones by HiGHS (scipy).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["Fleet", "compose", "enough_seconds"]

Numbers = NDArray[np.int64]
Floats = NDArray[np.float64]

_SMALL = 200_000
"""Steps of the dynamic program up to which it is faster than HiGHS."""

_NONE = -(1 << 40)
"""Blocks of devices that no pipelines use up exactly."""


@dataclass(frozen=True)
class Fleet:
    """Pipelines as (template's number, blocks that it can take within `seconds`, how many of them)."""

    seconds: float
    pipelines: list[tuple[int, int, int]]


def compose(sizes: Numbers, counts: Sequence[int], blocks: int, times: Floats, least: float = 0.0) -> Fleet | None:
    """Return a fleet of the least time, which uses most devices of those that take as long; None if there is none.

    sizes: [T, K], devices of kind k in template t. counts: [K], devices there are. times: [shares, T], seconds of a
    template with 1, 2, ... blocks; inf where it cannot. least: a time below which no fleet is known to be.

    Within a time each template has a gain, the blocks it can take. The time is enough if the gains of some pipelines
    that the devices suffice for reach `blocks`; with more pipelines than blocks some are left out, since a gain is 1 or
    more. That rises with the time, so the least one is found by bisection over the times of the table.
    """
    most = enough_seconds(sizes, counts, blocks, times)
    candidates = np.unique(times[np.isfinite(times) & (times >= least * (1 - 1e-12)) & (times <= most)])
    found = _first(len(candidates), lambda i: _enough(sizes, counts, blocks, _gains(times, candidates[i])))
    if found is None:
        return None
    gains = _gains(times, candidates[found])
    used = _most_devices(sizes, counts, blocks, gains)
    pipelines = [(number, int(gains[number]), count) for number, count in enumerate(used) if count]
    return Fleet(float(candidates[found]), pipelines)


def enough_seconds(sizes: Numbers, counts: Sequence[int], blocks: int, times: Floats) -> float:
    """Return a time that is enough, by fleets of one template per kind or of one template; inf if none of these can."""
    candidates = np.unique(times[np.isfinite(times)])
    number_of = np.min(np.where(sizes > 0, np.asarray(counts) // np.maximum(sizes, 1), 1 << 40), axis=1)
    pure = [(sizes > 0).sum(axis=1) == 1] * len(counts)
    pure = [alone & (sizes[:, kind] > 0) for kind, alone in enumerate(pure)]

    def enough(i: int) -> bool:
        done = number_of * _gains(times, candidates[i])
        return bool(max(done.max(), sum(done[of_kind].max(initial=0) for of_kind in pure)) >= blocks)

    found = _first(len(candidates), enough)
    return float("inf") if found is None else float(candidates[found])


def _gains(times: Floats, limit: float) -> Numbers:
    """[T]: the most blocks that each template does within the limit, 0 if not one."""
    shares = np.arange(1, len(times) + 1)[:, None]
    return np.asarray(np.where(times <= limit, shares, 0).max(axis=0))


def _first(length: int, holds: Callable[[int], bool]) -> int | None:
    """The first i in 0 .. length-1 that holds, where all that follow hold too; quickly found if it is small."""
    low, high = 0, 1
    while high < length and not holds(high - 1):
        low, high = high, 2 * high
    high = min(high, length)
    while low < high:
        middle = (low + high) // 2
        if holds(middle):
            high = middle
        else:
            low = middle + 1
    return low if low < length else None


def _enough(sizes: Numbers, counts: Sequence[int], blocks: int, gains: Numbers) -> bool:
    useful = _not_dominated(sizes, gains)
    if not useful:
        return False
    sizes, gains = sizes[useful], gains[useful]
    if _steps(sizes, counts) <= _SMALL:
        return int(_most_blocks(sizes, counts, gains).max()) >= blocks
    return _whole_program(sizes, counts, -gains, blocks, gains) is not None


def _not_dominated(sizes: Numbers, gains: Numbers) -> list[int]:
    """Templates of which no other takes as many blocks with no more devices of any kind."""
    order = [int(number) for number in np.lexsort((sizes.sum(axis=1), -gains)) if gains[number] > 0]
    kept: list[int] = []
    for number in order:
        if not kept or not (sizes[kept] <= sizes[number]).all(axis=1).any():
            kept.append(number)
    return kept


def _steps(sizes: Numbers, counts: Sequence[int]) -> int:
    return int(np.prod([count + 1 for count in counts], dtype=np.float64)) * len(sizes)


def _most_blocks(sizes: Numbers, counts: Sequence[int], gains: Numbers) -> Numbers:
    """Return, for every n, the most blocks that exactly n[k] devices of kind k can take; below 0 where none can.

    State       n: devices of each kind in use, the index of the answer.
    Transition  n - c sizes[t] -> n: c more pipelines of template t, c = 1, 2, 4, ...: any number is a sum of these.
    Cost        the sum of gains, to be as large as can be.
    Complexity  O(T log N prod_k (counts[k] + 1)), T log N numpy steps.
    """
    most = np.full([count + 1 for count in counts], _NONE)
    most.flat[0] = 0
    for size, gain in zip(sizes.tolist(), gains.tolist(), strict=True):
        copies = 1
        while all(copies * each <= count for each, count in zip(size, counts, strict=True)):
            begins = [copies * each for each in size]
            after = tuple(slice(begin, None) for begin in begins)
            before = tuple(slice(0, length - begin) for begin, length in zip(begins, most.shape, strict=True))
            np.maximum(most[after], most[before] + copies * gain, out=most[after])
            copies *= 2
    return most


def _most_devices(sizes: Numbers, counts: Sequence[int], blocks: int, gains: Numbers) -> list[int]:
    """How many pipelines of each template: enough for all blocks, and in use as many devices as can be."""
    able = np.flatnonzero(gains)
    used = [0] * len(sizes)
    if sum(counts) <= blocks and _steps(sizes[able], counts) <= _SMALL:
        # Never more pipelines than devices, hence none without a block.
        most = _most_blocks(sizes[able], counts, gains[able])
        state = np.array(max(np.argwhere(most >= blocks).tolist(), key=lambda n: (sum(n), most[tuple(n)])))
        while state.any():
            number = next(t for t in able if (rest := state - sizes[t]).min() >= 0
                          and most[tuple(rest)] + gains[t] == most[tuple(state)])  # fmt: skip
            state = state - sizes[number]
            used[number] += 1
        return used
    found = _whole_program(sizes[able], counts, -sizes[able].sum(axis=1), blocks, gains[able])
    assert found is not None, "the time was found to be enough"
    for number, count in zip(able, found, strict=True):
        used[number] = count
    return used


def _whole_program(
    sizes: Numbers, counts: Sequence[int], cost: Numbers, blocks: int, gains: Numbers
) -> list[int] | None:
    """Minimise cost x over whole x >= 0: sizes^T x <= counts, gains x >= blocks, sum of x <= blocks; None if empty."""
    from scipy.optimize import Bounds, LinearConstraint, milp

    rules = np.concatenate([sizes.T, -gains[None, :], np.ones((1, len(sizes)))])
    at_most = np.array([*counts, -blocks, blocks], dtype=np.float64)
    found = milp(
        cost,
        constraints=LinearConstraint(rules, ub=at_most),
        integrality=np.ones(len(sizes)),
        bounds=Bounds(0, np.inf),
        options={"mip_rel_gap": 1e-3, "time_limit": 2.0},
    )
    return None if found.x is None else [round(count) for count in found.x]
