"""The exact search for costs of any form: a stage's bytes may depend on its place in the pipeline in any way.

`exact` calls it for every memory model that is not additive. It promises what `exact_cuts` promises, from the cost
matrices alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from varuna_capslog.memory.costs import NEVER, StageCosts

__all__ = ["general_cuts", "general_fewest_devices"]

Matrix = NDArray[np.int64]


def general_cuts(costs: StageCosts, devices: int, capacities: Sequence[int] | None = None) -> list[int]:
    """Return the first layer of each of `devices` stages, 1 <= devices <= L; see `exact.exact_cuts`."""
    matrices = _windows(costs, devices)
    if capacities is not None and len(set(capacities)) > 1:
        within = [np.where(bytes_ <= most, bytes_, NEVER) for bytes_, most in zip(matrices, capacities, strict=True)]
        reached = _smallest_peaks(within)
        if reached[-1][-1] < NEVER:
            return _most_even(within, reached, costs.num_layers)
        # No cut list fits devices that differ: the smallest peak is still an answer.
    return _most_even(matrices, _smallest_peaks(matrices), costs.num_layers)


def _windows(costs: StageCosts, devices: int) -> list[Matrix]:
    """Return for each stage s the bytes [i, j] of layers s + i .. s + j, NEVER where j < i; 0 <= i, j <= L - G.

    Every stage holds a layer at least, so stage s begins at one of layers s .. s + L - G and ends behind one of them.
    """
    slack = costs.num_layers - devices + 1
    matrices = []
    for stage in range(devices):
        matrices.append(costs.matrix(stage, devices)[stage : stage + slack, stage + 1 : stage + 1 + slack])
    return matrices


def _smallest_peaks(matrices: Sequence[Matrix]) -> list[NDArray[np.int64]]:
    """Return for g = 1 .. G the smallest peak of each prefix cut into g stages; entry [g - 1][j] is of g + j layers.

    State       (g, m): layers 0 .. m-1 in stages 0 .. g-1, g <= m <= g + L - G.
    Transition  (g, l) -> (g + 1, m) with l < m: stage g holds layers l .. m-1.
    Cost        the larger of the state's peak and the stage's bytes; NEVER where there is none.
    Complexity  O(G W^2) in G numpy steps, W = L - G + 1.
    """
    before = np.full(len(matrices[0]), NEVER, dtype=np.int64)
    before[0] = 0
    peaks = []
    for bytes_ in matrices:
        before = np.maximum(before[:, None], bytes_).min(axis=0)
        peaks.append(before)
    return peaks


def _most_even(matrices: Sequence[Matrix], peaks: Sequence[NDArray[np.int64]], num_layers: int) -> list[int]:
    """Return, of all cut lists with the smallest peak, the one with the smallest descending list of stage peaks.

    State       (g, l): layers l .. L-1 in the stages g .. G-1. Only states that layers 0 .. l-1 reach in g stages
                within the peak, and only stages within the peak, so few are left.
    Transition  (g + 1, m) -> (g, l) with l < m: stage g holds layers l .. m-1.
    Cost        the stages' peaks as a multiset, written as one whole number: a digit per distinct peak, the largest
                first, that counts the stages with this peak. No count exceeds G, so digits never carry.
    Complexity  O(G W^2) additions of numbers of O(E log G) bits, for E distinct bytes within the peak.

    Ends are tried in rising order and only a smaller number replaces one, hence the smallest cut list among equals.
    """
    devices = len(matrices)
    peak = peaks[-1][-1]
    starts = [np.zeros(1, dtype=np.int64), *(np.flatnonzero(row <= peak) for row in peaks[:-1])]
    within = [matrix[rows] <= peak for matrix, rows in zip(matrices, starts, strict=True)]
    distinct = np.unique(np.concatenate([m[r][k] for m, r, k in zip(matrices, starts, within, strict=True)]))
    digit = devices.bit_length()
    units = [1 << (digit * rank) for rank in range(len(distinct))]
    later = {num_layers - devices: 0}
    choices: list[dict[int, int]] = []
    for matrix, rows, kept in zip(reversed(matrices), reversed(starts), reversed(within), strict=True):
        now: dict[int, int] = {}
        choice: dict[int, int] = {}
        numbers, ends = np.nonzero(kept)
        ranks = np.searchsorted(distinct, matrix[rows[numbers], ends])
        for start, end, rank in zip(rows[numbers].tolist(), ends.tolist(), ranks.tolist(), strict=True):
            if end in later:
                total = later[end] + units[rank]
                if start not in now or total < now[start]:
                    now[start], choice[start] = total, end
        later = now
        choices.append(choice)
    cuts, place = [0], 0
    for stage, choice in enumerate(reversed(choices[1:]), start=1):
        place = choice[place]
        cuts.append(stage + place)
    return cuts


def general_fewest_devices(costs: StageCosts, capacity: int) -> int | None:
    """Return the smallest number of devices of `capacity` bytes that some cut list fits, None if L do not suffice.

    Costs that depend on the place are asked anew for every number of devices: O(L) searches of `_smallest_peaks`.
    """
    for devices in range(1, costs.num_layers + 1):
        if _smallest_peaks(_windows(costs, devices))[-1][-1] <= capacity:
            return devices
    return None
