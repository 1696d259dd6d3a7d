"""CAPSlog with its tie-breaker: the highest stage is settled, and the layers on either side are planned again.

Fill-first leaves the stages below the peak as the threshold happened to fill them. The paper says so (end of Sec.
III-B) and leaves it there; the recursion is in the program published with it (henkdr/CAPSlog at cc11640, mode `bs_tb`).
The peak is that of `capslog`. `exact` gives the most even of all cut lists instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from varuna_capslog.memory.additive import AdditiveCosts
from varuna_capslog.memory.costs import StageCosts, full_matrix, peaks_of
from varuna_capslog.planners.capslog import capslog_cuts

__all__ = ["capslog_tb_cuts"]


def capslog_tb_cuts(costs: StageCosts, devices: int, capacities: Sequence[int] | None = None) -> list[int]:
    """Return the first layer of each of `devices` stages, 1 <= devices <= L.

        plan the layers by Algorithm 1; fix the stage with the highest prediction (of several, the first);
        do the same with the layers and devices before it, and with those behind it.

    We deviate in one point: a part keeps its stages where its new plan has a higher peak (possible only where peaks do
    not grow with every layer), so that nothing gets worse.

    O(G) searches of CAPSlog, of ever smaller parts.
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
    """The costs of layers first .. last-1 alone, whose first stage is stage `stage` of `stages`."""
    if isinstance(costs, AdditiveCosts):
        return AdditiveCosts(costs.head[first:last], costs.running[first:last])
    return _Part(costs, first, last - first, stage, stages)


@dataclass(frozen=True)
class _Part:
    """Costs of some layers in the middle, at their place in the whole pipeline."""

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
