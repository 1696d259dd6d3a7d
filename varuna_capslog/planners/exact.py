"""The cut list with the smallest peak, whatever the statistics look like, and among those the most even one.

Needs no monotone statistics, unlike CAPSlog's search, because it weighs every cut list by dynamic programming. The
default planner. Also answers how few devices would do.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from varuna_capslog.memory.additive import AdditiveCosts
from varuna_capslog.memory.costs import StageCosts
from varuna_capslog.planners.capslog import capslog_cuts
from varuna_capslog.planners.evenness import NEVER, Band, most_even, smallest_peak
from varuna_capslog.planners.exact_general import general_cuts, general_fewest_devices

__all__ = ["exact_cuts", "fewest_devices"]

_MOST = 1 << 60
"""Bytes that no stage reaches; AdditiveCosts keeps sums below it."""


def exact_cuts(costs: StageCosts, devices: int, capacities: Sequence[int] | None = None) -> list[int]:
    """Return the first layer of each of `devices` stages, 1 <= devices <= L.

    The cut list has the smallest peak; among those, the smallest list of stage peaks in descending order (the second
    largest stage is as small as it can be, and so on); among those, it is the smallest cut list.

    At thousands of layers on hundreds of devices, where very many cut lists have the smallest peak, the list of peaks
    is cut short to bound memory: the peak is still the smallest, but peaks below the 2^17 / log2(G) largest ones that a
    stage may have are not told apart.

    `capacities` is one number of bytes per stage. Where they differ and some cut list fits, only those that fit are
    weighed; otherwise they change nothing.

    Additive costs are searched here, by what they can be separated into; any others by `exact_general`.
    """
    if not isinstance(costs, AdditiveCosts):
        return general_cuts(costs, devices, capacities)
    if capacities is not None and len(set(capacities)) > 1:
        band, distinct = _band(costs, devices, min(max(capacities), _MOST))
        limits = np.searchsorted(distinct, capacities, side="right").tolist()
        if len(distinct) and smallest_peak(band, devices, limits) < NEVER:
            return most_even(band, devices, limits)
        # No cut list fits devices that differ: the smallest peak is still an answer.
    # Any cut list bounds the smallest peak from above; CAPSlog's is cheap and often the best already.
    band, _ = _band(costs, devices, max(costs.peaks(capslog_cuts(costs, devices))))
    return most_even(band, devices)


def _band(costs: AdditiveCosts, devices: int, most: int) -> tuple[Band, NDArray[np.int64]]:
    """Return the ranks of all stages of at most `most` bytes as `evenness` reads them, and the bytes of each rank.

    Rank r, from 1 on, stands for entry r - 1 of the rising bytes.
    """
    head, running = np.array(costs.head, dtype=np.int64), np.array(costs.running, dtype=np.int64)
    num_layers = len(head)
    # The last layer up to which a stage may come back under `most`: running need not rise.
    lowest = np.minimum.accumulate(running[::-1])[::-1]
    longest = np.max(np.searchsorted(lowest, most - head, side="right") - np.arange(num_layers))
    rows = int(np.clip(longest, 1, num_layers - devices + 1))
    first = np.lib.stride_tricks.sliding_window_view(np.append(np.full(rows, 2 * _MOST), head), num_layers + 1)
    bytes_ = first + np.append(0, running)
    within = bytes_ <= most
    distinct, ranks = np.unique(bytes_[within], return_inverse=True)
    band = np.full(bytes_.shape, NEVER, dtype=np.int32)
    band[within] = ranks + 1
    return band, distinct


def fewest_devices(costs: StageCosts, capacity: int) -> int | None:
    """Return the smallest number of devices of `capacity` bytes that some cut list fits, None if L do not suffice.

    State       m: layers 0 .. m-1 in the fewest stages.
    Transition  l -> m with l < m where the stage of layers l .. m-1 fits.
    Cost        the number of stages.
    Complexity  O(L^2) in L numpy steps.
    """
    if not isinstance(costs, AdditiveCosts):
        return general_fewest_devices(costs, capacity)
    running = np.array(costs.running, dtype=np.int64)
    unreached = costs.num_layers + 1
    fewest = np.full(costs.num_layers + 1, unreached)
    fewest[0] = 0
    for first, head in enumerate(costs.head):
        ends = fewest[first + 1 :]
        ends[(running[first:] <= capacity - head) & (ends > fewest[first] + 1)] = fewest[first] + 1
    return int(fewest[-1]) if fewest[-1] < unreached else None
