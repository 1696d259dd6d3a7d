"""Integer program of `joint`: the number of pipelines of each template.

From the devices of each kind and the seconds of each template for 1, 2, ... blocks, it finds the least time in which
all blocks are done, and a fleet that uses most devices within it. Dynamic programming composes small fleets exactly; of
large ones the bulk is the rounded-down linear relaxation (HiGHS, scipy), and the remaining devices are composed
exactly.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["Fleet", "compose", "enough_seconds", "least_seconds"]

Numbers = NDArray[np.int64]
Floats = NDArray[np.float64]

_SMALL = 1_000_000
"""States times templates of the dynamic program up to which a fleet is small."""

_SLOTS = 6
"""Most pipelines beside the rounded bulk of a large fleet."""

_NONE = -(1 << 40)
"""Blocks of a set of devices that no pipelines use up exactly."""


@dataclass(frozen=True)
class Fleet:
    """Pipelines as (template's number, blocks that it can take within `seconds`, number of such pipelines)."""

    seconds: float
    pipelines: list[tuple[int, int, int]]


def compose(sizes: Numbers, counts: Sequence[int], blocks: int, times: Floats, least: float = 0.0) -> Fleet | None:
    """Return the fleet of the least time that uses most devices; None if there is none.

    sizes: [T, K], devices of kind k in template t. counts: [K], available devices. times: [shares, T], seconds of a
    template with 1, 2, ... blocks; inf where it cannot hold them. least: known lower bound of the time.

    Within a time each template has a gain, the blocks that it can take. A time is enough if pipelines whose gains sum
    to at least `blocks` can be made of the devices; more pipelines than blocks are never needed, since a gain is 1 or
    more. The gains rise with the time, so bisection over the times of the table finds the least. Exact for small
    fleets; for large ones the fleet exists but may not be the fastest, and `least_seconds` bounds the difference.
    """
    candidates = _candidates(sizes, counts, blocks, times, least)
    index = _first(len(candidates), lambda i: _used(sizes, counts, blocks, _gains(times, candidates[i])) is not None)
    if index is None:
        return None
    gains = _gains(times, candidates[index])
    used = _used(sizes, counts, blocks, gains, most_devices=True) or _used(sizes, counts, blocks, gains)
    assert used is not None, "the time was found to be enough"
    pipelines = [(number, int(gains[number]), count) for number, count in enumerate(used) if count]
    return Fleet(float(candidates[index]), pipelines)


def least_seconds(sizes: Numbers, counts: Sequence[int], blocks: int, times: Floats) -> float | None:
    """Return a lower bound of a fleet's time for all blocks, exact or, for large fleets, relaxed; None if none can."""
    candidates = _candidates(sizes, counts, blocks, times, 0.0)

    def enough(i: int) -> bool:
        useful = _not_dominated(sizes, gains := _gains(times, candidates[i]))
        if not useful or _is_small(sizes[useful], counts, blocks):
            return _used(sizes, counts, blocks, gains) is not None
        return _relaxed(sizes[useful], counts, blocks, gains[useful], gains[useful]) is not None

    index = _first(len(candidates), enough)
    return None if index is None else float(candidates[index])


def enough_seconds(sizes: Numbers, counts: Sequence[int], blocks: int, times: Floats) -> float:
    """Return a time that is enough, from fleets of one template or of one per kind; inf if none of these can."""
    candidates = np.unique(times[np.isfinite(times)])
    index = _first(len(candidates), lambda i: _uniform(sizes, counts, _gains(times, candidates[i]), blocks) is not None)
    return float("inf") if index is None else float(candidates[index])


def _uniform(sizes: Numbers, counts: Sequence[int], gains: Numbers, blocks: int) -> Numbers | None:
    """Return a fleet for all blocks, of one template, or of one per kind with devices of this kind; None if none."""
    number_of = np.min(np.where(sizes > 0, np.asarray(counts) // np.maximum(sizes, 1), 1 << 40), axis=1)
    done = number_of * gains
    used = np.zeros(len(sizes), dtype=np.int64)
    if done.max() >= blocks:
        used[np.argmax(done)] = number_of[np.argmax(done)]
        return used
    alone = (sizes > 0).sum(axis=1) == 1
    for kind in range(len(counts)):
        best = int(np.argmax(np.where(alone & (sizes[:, kind] > 0), done, -1)))
        used[best] = number_of[best] if alone[best] and sizes[best, kind] else used[best]
    return used if int(used @ gains) >= blocks else None


def _candidates(sizes: Numbers, counts: Sequence[int], blocks: int, times: Floats, least: float) -> Floats:
    most = enough_seconds(sizes, counts, blocks, times)
    return np.unique(times[np.isfinite(times) & (times >= least * (1 - 1e-12)) & (times <= most)])


def _gains(times: Floats, limit: float) -> Numbers:
    """Return [T]: the most blocks that each template does within the limit; 0 if none."""
    shares = np.arange(1, len(times) + 1)[:, None]
    return np.asarray(np.where(times <= limit, shares, 0).max(axis=0))


def _first(length: int, holds: Callable[[int], bool]) -> int | None:
    """Return the first i in 0 .. length-1 that holds, or None. All later ones must hold too. Fast where i is small."""
    low, high = 0, 1
    while high < length and not holds(high - 1):
        low, high = high, 2 * high
    index = bisect_left(range(min(high, length)), True, low, key=holds)
    return index if index < length else None


def _used(
    sizes: Numbers, counts: Sequence[int], blocks: int, gains: Numbers, most_devices: bool = False
) -> list[int] | None:
    """Return the number of pipelines of each template in a fleet that does all blocks; None if no fleet was found.

    The fleet has at most one pipeline per block.

    most_devices: use as many devices as possible. Otherwise dominated templates are ignored.
    """
    useful = np.flatnonzero(gains).tolist() if most_devices else _not_dominated(sizes, gains)
    if not useful:
        return None
    own_sizes, own_gains = sizes[useful], gains[useful]
    bulk = np.zeros(len(useful), dtype=np.int64)
    slots = blocks
    if not _is_small(own_sizes, counts, blocks):
        worth = own_sizes.sum(axis=1) if most_devices else own_gains
        relaxed = _relaxed(own_sizes, counts, blocks, own_gains, worth)
        if relaxed is None:
            return None
        bulk = np.floor(relaxed + 1e-9).astype(np.int64)
        slots = min(blocks - int(bulk.sum()), _SLOTS)
    remaining = np.asarray(counts) - bulk @ own_sizes
    composed = _composed(own_sizes, remaining.tolist(), slots, own_gains, blocks - int(bulk @ own_gains))
    if composed is None:
        bulk, composed = bulk * 0, _uniform(own_sizes, counts, own_gains, blocks)
    if composed is None:
        return None
    used = [0] * len(sizes)
    for number, count in zip(useful, (bulk + composed).tolist(), strict=True):
        used[number] = count
    return _lengthened(sizes, counts, gains, used) if most_devices else used


def _lengthened(sizes: Numbers, counts: Sequence[int], gains: Numbers, used: list[int]) -> list[int]:
    """Add unused devices to pipelines that then take as many blocks; exact fleets have no such devices."""
    number_of = {tuple(size): number for number, size in enumerate(sizes.tolist())}
    remaining = np.asarray(counts) - np.asarray(used) @ sizes
    for kind in np.flatnonzero(remaining):
        for number in np.flatnonzero(used).tolist():
            longer = sizes[number].copy()
            longer[kind] += 1
            target = number_of.get(tuple(longer.tolist()))
            if target is not None and gains[target] >= gains[number]:
                moved = min(used[number], int(remaining[kind]))
                used[number], used[target] = used[number] - moved, used[target] + moved
                remaining[kind] -= moved
    return used


def _not_dominated(sizes: Numbers, gains: Numbers) -> list[int]:
    """Return the templates that no other one dominates: none takes as many blocks with no more devices of any kind."""
    order = [int(number) for number in np.lexsort((sizes.sum(axis=1), -gains)) if gains[number] > 0]
    kept: list[int] = []
    for number in order:
        if not kept or not (sizes[kept] <= sizes[number]).all(axis=1).any():
            kept.append(number)
    return kept


def _is_small(sizes: Numbers, counts: Sequence[int], blocks: int) -> bool:
    slots = blocks if blocks < sum(counts) else 0  # as `_composed` counts them
    return float(np.prod([count + 1.0 for count in (*counts, slots)])) * len(sizes) <= _SMALL


def _relaxed(sizes: Numbers, counts: Sequence[int], blocks: int, gains: Numbers, worth: Numbers) -> Floats | None:
    """Return fractional numbers of pipelines x >= 0 that maximise worth x, or None, such that sizes^T x <= counts,
    gains x >= blocks and sum of x <= blocks.
    """
    from scipy.optimize import linprog

    rules = np.concatenate([sizes.T, -gains[None, :], np.ones((1, len(sizes)))])
    solution = linprog(-worth.astype(np.float64), A_ub=rules, b_ub=[*counts, -blocks, blocks], method="highs")
    return None if solution.x is None else np.asarray(solution.x)


def _composed(sizes: Numbers, counts: Sequence[int], slots: int, gains: Numbers, blocks: int) -> Numbers | None:
    """Return the number of pipelines of each template, at most `slots` in all, that do `blocks` on most devices; None
    if there are none.

    Where the slots could be too few, they count as a kind of device of which each template needs one.
    """
    if slots < sum(counts):
        sizes, counts = np.concatenate([sizes, np.ones((len(sizes), 1), dtype=np.int64)], axis=1), [*counts, slots]
        kinds = len(counts) - 1
    else:
        kinds = len(counts)
    most = _most_blocks(sizes, counts, gains)
    enough = np.argwhere(most >= max(blocks, 0))
    if not len(enough):
        return None
    order = np.lexsort((most[tuple(enough.T)], enough[:, :kinds].sum(axis=1)))
    state = enough[order[-1]]
    used = np.zeros(len(sizes), dtype=np.int64)
    while state.any():
        before = state - sizes
        fits = np.flatnonzero((before >= 0).all(axis=1))
        number = next(t for t in fits if most[tuple(before[t])] + gains[t] == most[tuple(state)])
        state = before[number]
        used[number] += 1
    return used


def _most_blocks(sizes: Numbers, counts: Sequence[int], gains: Numbers) -> Numbers:
    """Return, for every n, the most blocks that exactly n[k] devices of kind k can take; below 0 where none can.

    State       n: devices of each kind in use, the index of the result.
    Transition  n - c sizes[t] -> n: c more pipelines of template t, c = 1, 2, 4, ...: any number is a sum of these.
    Cost        the sum of gains, to be maximised.
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
