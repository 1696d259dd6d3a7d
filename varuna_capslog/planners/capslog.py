"""CAPSlog's recommender: fill devices one after the other up to a threshold, and bisect the threshold.

Algorithms 1 and 2 of the paper (Sec. III-B) find the smallest peak where the peak of a stage grows with every layer
added at either end. Otherwise the result may be larger than the smallest peak, which `exact` always finds.

Unlike `exact`, fill-first does not balance the stages below the peak. The paper mentions this (end of Sec. III-B)
without a remedy; the tie-breaker is in the program published with it (henkdr/CAPSlog at cc11640, mode `bs_tb`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from varuna_capslog.memory.additive import AdditiveCosts
from varuna_capslog.memory.costs import NEVER, StageCosts, full_matrix, peaks_of

__all__ = ["capslog_cuts", "capslog_tb_cuts"]


def capslog_cuts(costs: StageCosts, devices: int, capacities: Sequence[int] | None = None) -> list[int]:
    """Return the first layer of each of `devices` stages, 1 <= devices <= L.

    This is Algorithm 1 with tighter bounds and longer steps. The paper begins with l = 0 and r = the memory of a
    device; here r is the peak of fill-first without a threshold, so that the smallest peak is found whether or not it
    fits. The paper continues with threshold - 1 or threshold + 1; here thresholds at which fill-first would return the
    same stages are skipped. If all thresholds above a feasible threshold are feasible, the result is that of Algorithm
    1. The paper has only the additive model; with other costs, stages are filled layer by layer, each at its position.
    O(G log L) per threshold where every M_a >= 0, O(L) otherwise; at most log2(first peak) thresholds.
    """
    low, most = 0, NEVER
    fill_first: Callable[[Any, int, int], _Filled] = _fill_any_costs
    if isinstance(costs, AdditiveCosts):
        running = costs.running
        # No stage costs more than this, so fill-first never stops early.
        most = max(costs.head) + max(running)
        fill_first = _fill_by_walking
        if all(before <= after for before, after in pairwise(running)):
            fill_first = _fill_by_bisection
            low = costs.head[0]  # Layer 0 begins the first stage, and M_p(0, m) >= M_i(0) where M_a >= 0.
    recommended, high, _ = fill_first(costs, devices, most)
    high -= 1
    while low <= high:
        threshold = (low + high) // 2
        cuts, predicted_peak, next_threshold = fill_first(costs, devices, threshold)
        if predicted_peak <= threshold:
            recommended = cuts
            high = predicted_peak - 1
        else:
            low = next_threshold
    return recommended


_Filled = tuple[list[int], int, int]


def _fill_by_bisection(costs: AdditiveCosts, devices: int, threshold: int) -> _Filled:
    """Run FILL_FIRST of Algorithm 2 where every M_a >= 0, so that bisection finds the last layer that still fits.
    Devices 0 .. G-2 are filled in turn, each with at least one layer and leaving one for each later device; device G-1
    takes the remaining layers (the algorithm's text; its printed indices would give G + 1 stages). Return the cuts, the
    predicted peak, and the smallest threshold above `threshold` that could change the result. Filling ends at the first
    stage above the threshold: then the threshold is too low, and the cuts are not used.
    """
    head, running = costs.head, costs.running
    num_layers = len(head)
    first, peak, following = 0, 0, 1 << 200
    cuts = [0]
    for end_limit in range(num_layers - devices + 1, num_layers):
        begin = head[first]
        end = bisect_right(running, threshold - begin, first + 1, end_limit)
        used = begin + running[end - 1]
        if used > peak:
            if used > threshold:
                return cuts, used, min(used, following)
            peak = used
        if end < end_limit and begin + running[end] < following:
            following = begin + running[end]
        cuts.append(end)
        first = end
    peak = max(peak, head[first] + running[-1])
    return cuts, peak, min(peak, following)


def _fill_by_walking(costs: AdditiveCosts, devices: int, threshold: int) -> _Filled:
    """Run FILL_FIRST of Algorithm 2 layer by layer, as printed except for its indices: any M_a may be negative."""
    num_layers, running = costs.num_layers, costs.running
    cuts = [0]
    for end_limit in range(num_layers - devices + 1, num_layers):
        end = cuts[-1] + 1
        limit = threshold - costs.head[cuts[-1]]
        while end < end_limit and running[end] <= limit:
            end += 1
        cuts.append(end)
    return cuts, max(costs.peaks(cuts)), threshold + 1


def _fill_any_costs(costs: StageCosts, devices: int, threshold: int) -> _Filled:
    """Run FILL_FIRST of Algorithm 2 for costs that are not additive or depend on the stage's position."""
    cuts = [0]
    for stage in range(devices - 1):
        end = cuts[-1] + 1
        while end < costs.num_layers - (devices - 1 - stage):
            if costs.stage_bytes(cuts[-1], end + 1, stage, devices) > threshold:
                break
            end += 1
        cuts.append(end)
    return cuts, max(costs.peaks(cuts)), threshold + 1


# -- the tie-breaker


def capslog_tb_cuts(costs: StageCosts, devices: int, capacities: Sequence[int] | None = None) -> list[int]:
    """Return the first layer of each of `devices` stages, 1 <= devices <= L, with the tie-breaker:

        plan the layers by Algorithm 1; fix the stage with the highest prediction (of several, the first);
        do the same with the layers and devices before it, and with those behind it.

    The peak is that of `capslog_cuts`. One deviation: a part keeps its stages where its new plan has a higher peak
    (possible only where peaks do not grow with every layer). O(G) ever smaller searches of `capslog_cuts`.
    """
    cuts = capslog_cuts(costs, devices)
    used = costs.peaks(cuts)
    parts = [(0, devices)]
    while parts:
        begin, end = parts.pop()
        highest = max(range(begin, end), key=used.__getitem__)
        for side_begin, side_end in ((begin, highest), (highest + 1, end)):
            if side_end - side_begin < 2:
                continue
            first = cuts[side_begin]
            last = cuts[side_end] if side_end < devices else costs.num_layers
            part = _part(costs, first, last, side_begin, devices)
            planned = capslog_cuts(part, side_end - side_begin)
            bytes_ = part.peaks(planned)
            if max(bytes_) <= max(used[side_begin:side_end]):
                cuts[side_begin:side_end] = [first + cut for cut in planned]
                used[side_begin:side_end] = bytes_
            parts.append((side_begin, side_end))
    return cuts


def _part(costs: StageCosts, first: int, last: int, stage: int, stages: int) -> StageCosts:
    """Return the costs of layers first .. last-1 alone, whose first stage is stage `stage` of `stages`."""
    if isinstance(costs, AdditiveCosts):
        return AdditiveCosts(costs.head[first:last], costs.running[first:last])
    return _Part(costs, first, last - first, stage, stages)


@dataclass(frozen=True)
class _Part:
    """Costs of a range of layers, at their position in the whole pipeline."""

    whole: StageCosts
    first: int
    num_layers: int
    begin: int
    devices: int

    @property
    def position_free(self) -> bool:
        return self.whole.position_free

    def stage_bytes(self, first: int, end: int, stage: int = 0, stages: int = 1) -> int:
        return self.whole.stage_bytes(self.first + first, self.first + end, self.begin + stage, self.devices)

    def matrix(self, stage: int = 0, stages: int = 1) -> NDArray[np.int64]:
        return full_matrix(self, stage, stages)

    def peaks(self, cuts: Sequence[int]) -> list[int]:
        return peaks_of(self, cuts)
