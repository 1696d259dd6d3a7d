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
from varuna_capslog.planners.exact_general import general_cuts, general_fewest_devices

__all__ = ["exact_cuts", "fewest_devices"]

_NEVER = 1 << 62
"""Bytes of a stage that may not be; AdditiveCosts keeps sums of real ones below a quarter of it."""

_MANY = 30_000
"""Transitions from which on looking for more stages to rule out pays for itself (L = 48 stays below)."""

_WIDEST = 1 << 17
"""Bits of the numbers that stand for lists of peaks: enough for 1,000 layers on 100 devices, and 16 KiB each."""


def exact_cuts(costs: StageCosts, devices: int, capacities: Sequence[int] | None = None) -> list[int]:
    """Return the first layer of each of `devices` stages, 1 <= devices <= L.

    The cut list has the smallest peak; among those, the smallest list of stage peaks in descending order (the second
    largest stage is as small as it can be, and so on); among those, it is the smallest cut list.

    At thousands of layers on hundreds of devices the list of peaks is cut short to bound memory: the peak is still the
    smallest, but peaks below the 2^17 / log2(G) largest ones that a stage may have are not told apart.

    `capacities` is one number of bytes per stage. Where they differ and some cut list fits, only those that fit are
    weighed; otherwise they change nothing.

    Additive costs are searched here, by what they can be separated into; any others by `exact_general`.
    """
    if not isinstance(costs, AdditiveCosts):
        return general_cuts(costs, devices, capacities)
    if capacities is not None and len(set(capacities)) > 1:
        band = _band(costs, devices, min(max(capacities), _NEVER // 4))
        peaks = _smallest_peaks(band, devices, capacities)
        if peaks[-1][-1] < _NEVER:
            return _most_even(band, peaks, capacities)
        # No cut list fits devices that differ: the smallest peak is still an answer.
    limits = [_NEVER] * devices
    # Any cut list bounds the smallest peak from above; CAPSlog's is cheap and often the best already.
    band = _band(costs, devices, max(costs.peaks(capslog_cuts(costs, devices))))
    peaks = _smallest_peaks(band, devices, limits)
    band[band > peaks[-1][-1]] = _NEVER
    if _transitions(band, devices) > _MANY:
        band = _without_what_evenness_excludes(band, devices)
        peaks = _smallest_peaks(band, devices, limits)
    return _most_even(band, peaks, limits)


def _band(costs: AdditiveCosts, devices: int, most: int) -> NDArray[np.int64]:
    """Return the bytes of every stage of at most `most` bytes, and _NEVER for the others.

    Row i holds the stages of B - i layers, column e those that end before layer e, 0 <= e <= L, where B is the largest
    number of layers of any such stage.
    """
    head, running = np.array(costs.head, dtype=np.int64), np.array(costs.running, dtype=np.int64)
    num_layers = len(head)
    # The last layer up to which a stage may come back under `most`: running need not rise.
    lowest = np.minimum.accumulate(running[::-1])[::-1]
    longest = np.max(np.searchsorted(lowest, most - head, side="right") - np.arange(num_layers))
    rows = int(np.clip(longest, 1, num_layers - devices + 1))
    first = np.lib.stride_tricks.sliding_window_view(np.append(np.full(rows, _NEVER), head), num_layers + 1)
    band = first + np.append(0, running)
    band[band > most] = _NEVER
    return band


def _transitions(band: NDArray[np.int64], devices: int) -> int:
    """An upper bound of the transitions of `_most_even`: each stage at each place in the pipeline it may have."""
    return int(np.count_nonzero(band < _NEVER)) * min(devices, band.shape[1] - devices)


def _smallest_peaks(band: NDArray[np.int64], devices: int, limits: Sequence[int]) -> list[NDArray[np.int64]]:
    """Return for g = 1 .. G the smallest peak of each prefix cut into g stages, of which stage s keeps to limits[s].

    State       (g, m): layers 0 .. m-1 in g stages, g <= m < g + W with W = L - G + 1, since G - g layers at least must
                remain. Entry [g - 1][m - g] of the answer.
    Transition  (g, l) -> (g + 1, m) with l < m: stage g holds layers l .. m-1, at most B layers.
    Cost        the larger of the state's peak and the stage's bytes; _NEVER above the stage's limit.
    Complexity  O(G W B) in G numpy steps.
    """
    rows, width = len(band), band.shape[1] - devices
    capped = min(limits) < _NEVER
    reached, by_length = _sliding(rows, width)
    reached[:] = _NEVER
    reached[rows - 1] = -_NEVER  # No layer in no stage.
    peaks: list[NDArray[np.int64]] = []
    for g in range(devices):
        stage = band[:, g + 1 : g + 1 + width]
        if capped:
            stage = np.where(stage <= limits[g], stage, _NEVER)
        peaks.append(np.maximum(by_length, stage).min(axis=0))
        reached[rows - 1 :] = peaks[-1]
    return peaks


def _sliding(rows: int, width: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return a vector for one level's states behind rows - 1 states that are not, and its view with one row per length.

    Column j of the view's row i is the state rows - i layers before the state j of the next level.
    """
    states = np.empty(rows - 1 + width, dtype=np.int64)
    return states, np.lib.stride_tricks.as_strided(states, (rows, width), (states.itemsize,) * 2)


def _without_what_evenness_excludes(band: NDArray[np.int64], devices: int) -> NDArray[np.int64]:
    """Return the band without stages that cannot be part of the most even of the cut lists with the smallest peak.

    The smallest descending list holds the smallest peak as few times as can be, and then has the smallest next peak; no
    stage between the two is of use. Each round settles one more peak in this way, until few stages are left.

    State       (g, m) as in `_smallest_peaks`.
    Transition  as there.
    Cost        one whole number: how many stages have the first settled peak, the second, ..., and in the lowest digits
                the rank of the largest other stage. The order of such numbers survives adding a stage to both.
    Complexity  O(G W B) a round; as many rounds as digits fit into 60 bits.
    """
    rows, width = len(band), band.shape[1] - devices
    far = 1 << 61
    distinct = np.unique(band[band < _NEVER])
    rank = np.searchsorted(distinct, band) + 1
    low_bits, digit = (len(distinct) + 1).bit_length(), devices.bit_length()
    low = (1 << low_bits) - 1
    reached, by_length = _sliding(rows, width)
    _, settled_by_length = high_view = _sliding(rows, width)
    high = high_view[0]

    settled: list[int] = []
    largest = len(distinct)
    while _transitions(band, devices) > _MANY and low_bits + digit * (len(settled) + 1) <= 60:
        settled.append(largest)
        rest = np.where(np.isin(rank, settled), 0, rank)
        step = np.where(band < _NEVER, 0, far)
        for place, value in enumerate(reversed(settled)):
            step[rank == value] = 1 << (low_bits + digit * place)
        reached[:], high[:] = 0, far
        high[rows - 1] = 0
        for g in range(devices):
            columns = slice(g + 1, g + 1 + width)
            total = np.maximum(by_length, rest[:, columns])
            total += settled_by_length
            total += step[:, columns]
            best = np.minimum(total.min(axis=0), far)
            reached[rows - 1 :] = best & low
            high[rows - 1 :] = best & ~low
        largest = int(best[-1]) & low
        band = np.where((rest <= largest) & (band < _NEVER), band, _NEVER)
        if largest == 0:
            break
    return band


def _most_even(band: NDArray[np.int64], peaks: Sequence[NDArray[np.int64]], limits: Sequence[int]) -> list[int]:
    """Return, of all cut lists with the smallest peak, the one with the smallest descending list of stage peaks.

    State       (g, l): layers l .. L-1 in the stages g .. G-1. Only states that layers 0 .. l-1 reach in g stages
                within the peak, and only stages within the peak, so few are left.
    Transition  (g + 1, m) -> (g, l) with l < m: stage g holds layers l .. m-1.
    Cost        the stages' peaks as a multiset, written as one whole number: a digit per distinct peak, the largest
                first, that counts the stages with this peak. No count exceeds G, so digits never carry; adding a stage
                adds its unit, and numbers of equally many stages compare as their descending lists do.
    Complexity  O(G E) additions for E stages within the peak, of numbers of O(E log G) bits.

    Ends are tried in rising order and only a smaller number replaces one, hence the smallest cut list among equals.
    """
    devices, num_layers = len(peaks), band.shape[1] - 1
    peak = int(peaks[-1][-1])
    lengths, ends = np.nonzero(band <= peak)
    distinct, ranks = np.unique(band[lengths, ends], return_inverse=True)
    digit = devices.bit_length()
    # Stages above their own limit must keep units of their own, by which they are left out below.
    lumped = max(0, len(distinct) - max(2, _WIDEST // digit)) if min(limits) >= peak else 0
    units = [1 << (digit * max(0, rank - lumped)) for rank in range(len(distinct))]
    stages: list[list[tuple[int, int]]] = [[] for _ in range(num_layers)]
    firsts = ends + lengths - len(band)
    # Rows run from the longest stages to the shortest.
    for first, end, rank in zip(firsts[::-1].tolist(), ends[::-1].tolist(), ranks[::-1].tolist(), strict=True):
        stages[first].append((end, units[rank]))

    beyond = units[-1] << digit
    choices: list[dict[int, int]] = []
    later = {num_layers: 0}
    for g in range(devices - 1, -1, -1):
        reached = [0] if g == 0 else (np.nonzero(peaks[g - 1] <= peak)[0] + g).tolist()
        here = stages
        if limits[g] < peak:
            # Some distinct peak is within the limit, or no cut list would keep to it.
            allowed = units[int(np.searchsorted(distinct, limits[g], side="right")) - 1]
            here = [[stage for stage in row if stage[1] <= allowed] for row in stages]
        now: dict[int, int] = {}
        choice: dict[int, int] = {}
        for first in reached:
            best = beyond
            for end, unit in here[first]:
                if end in later:
                    total = later[end] + unit
                    if total < best:
                        best = total
                        choice[first] = end
            if first in choice:
                now[first] = best
        later = now
        choices.append(choice)

    cuts = [0]
    for choice in reversed(choices[1:]):
        cuts.append(choice[cuts[-1]])
    return cuts


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
