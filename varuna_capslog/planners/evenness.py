"""The smallest peak of a band of stages, and the most even of the cut lists that have it.

`exact` calls it where bytes do not depend on a stage's position and devices are alike. Only the order of stages by
their bytes counts here, so a stage's bytes are replaced by integers 1, 2, ... in that order, its *rank*.

A band is an int32 array [B, L + 1]: row i holds the stages of B - i layers, column e those that end before layer e, and
NEVER marks a stage that is not allowed. A slice of columns a .. b is the band of the layers a .. b-1 alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["NEVER", "Band", "most_even"]

Band = NDArray[np.int32]

NEVER = 1 << 30
"""Rank of a stage that is not allowed."""

_MANY = 30_000
"""Transitions from which on it pays to split the search (L = 48 stays below)."""

_WIDEST = 1 << 17
"""Most bits of the numbers that encode lists of peaks: enough for 1,000 layers on 100 devices, and 16 KiB each."""

_SECONDS_PER_CELL = 1.5e-9
"""Approximate seconds of one stage at one position in a round of ruling out."""


def most_even(band: Band, devices: int) -> list[int]:
    """Return, of all cut lists with the smallest peak, the one with the smallest descending list of stage peaks.

    Ties are broken by the smallest cut list. There must be a cut list.

    A large search is split wherever all cut lists with the smallest peak have the same cut at the same stage: the most
    even cut list then consists of those of its parts, since adding stages to two lists of peaks does not change their
    order. Each part in turn has a smaller peak of its own.
    """
    cuts = [0] * devices
    parts = [(band, devices, 0, 0)]
    while parts:
        band, devices, stage, layer = parts.pop()
        if devices == 1:
            cuts[stage] = layer
            continue
        peaks = _smallest_peaks(band, devices)
        peak = int(peaks[-1][-1])
        band = _within(band, peak)
        if _transitions(band, devices) <= _MANY:
            states: Sequence[Iterable[int]] = _reached(peaks)
        else:
            band, alive = _ruled_out(band, devices, peak)
            joints = _joints(alive)
            if len(joints) > 2:
                for (begin, first), (end, last) in pairwise(joints):
                    longest = last - first - (end - begin) + 1
                    parts.append((band[-longest:, first : last + 1], end - begin, stage + begin, layer + first))
                continue
            states = [_bits(row) for row in alive]
        cuts[stage : stage + devices] = [layer + cut for cut in _of_states(band, devices, states)]
    return cuts


def _within(band: Band, most: int) -> Band:
    """Return the band of the stages up to a rank, without rows that become empty."""
    kept = np.where(band <= most, band, NEVER)
    return kept[int(np.argmax((kept < NEVER).any(axis=1))) :]


def _transitions(band: Band, devices: int) -> int:
    """Return an upper bound of the transitions of `_of_states`: each stage at each position that it may have."""
    return int(np.count_nonzero(band < NEVER)) * min(devices, band.shape[1] - devices)


# -- the smallest peak


def _smallest_peaks(band: Band, devices: int) -> list[Band]:
    """Return for g = 1 .. G the smallest peak of each prefix cut into g stages.

    State       (g, m): layers 0 .. m-1 in g stages, g <= m < g + W with W = L - G + 1, since G - g layers at least must
                remain. Entry [g - 1][m - g] of the result.
    Transition  (g, l) -> (g + 1, m) with l < m: stage g holds layers l .. m-1, at most B layers.
    Cost        the larger of the state's peak and the stage's.
    Complexity  O(G W B) in G numpy steps.
    """
    rows, width = len(band), band.shape[1] - devices
    reached, by_length = _sliding(rows, width, np.dtype(np.int32))
    reached[:] = NEVER
    reached[rows - 1] = 0  # No layer in no stage.
    peaks: list[Band] = []
    for g in range(devices):
        peaks.append(np.maximum(by_length, band[:, g + 1 : g + 1 + width]).min(axis=0))
        reached[rows - 1 :] = peaks[-1]
    return peaks


def _sliding(rows: int, width: int, dtype: np.dtype[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return a vector of rows - 1 missing states and one level's states, and its view with one row per stage length.

    Column j of the view's row i is the state rows - i layers before the state j of the next level.
    """
    states = np.empty(rows - 1 + width, dtype=dtype)
    return states, np.lib.stride_tricks.as_strided(states, (rows, width), (states.itemsize,) * 2)


def _reached(peaks: Sequence[Band]) -> list[list[int]]:
    """Return the possible first layers of stage g = 0 .. G-1 in cut lists whose earlier stages are within the peak."""
    peak = peaks[-1][-1]
    return [[0], *((np.flatnonzero(row <= peak) + g).tolist() for g, row in enumerate(peaks[:-1], start=1))]


# -- splitting the search where all cut lists meet


def _alive(band: Band, devices: int) -> list[int]:
    """Return for g = 0 .. G the set of m such that some cut list of the band has g stages of layers 0 .. m-1.

    A set is an integer with a bit per layer; a stage of d layers shifts it by d. O(G B) shifts of L bits.
    """
    num_layers = band.shape[1] - 1
    packed = np.packbits(band < NEVER, axis=1, bitorder="little")
    ends = [(len(band) - i, int.from_bytes(row.tobytes(), "little")) for i, row in enumerate(packed)]
    ends = [(length, mask) for length, mask in ends if mask]
    forward = [1]
    for _ in range(devices):
        states = forward[-1]
        following = 0
        for length, mask in ends:
            following |= (states << length) & mask
        forward.append(following)
    alive = [1 << num_layers]
    for g in range(devices - 1, -1, -1):
        before = 0
        for length, mask in ends:
            before |= (alive[-1] & mask) >> length
        alive.append(before & forward[g])
    return alive[::-1]


def _joints(alive: Sequence[int]) -> list[tuple[int, int]]:
    """Return the (g, m) that every cut list passes: layers 0 .. m-1 in its first g stages. Includes both ends."""
    return [(g, states.bit_length() - 1) for g, states in enumerate(alive) if states & (states - 1) == 0]


def _bits(number: int) -> list[int]:
    """Return the positions of the set bits of a number, rising."""
    size = (number.bit_length() + 7) // 8
    bits = np.unpackbits(np.frombuffer(number.to_bytes(size, "little"), dtype=np.uint8), bitorder="little")
    return [int(place) for place in np.flatnonzero(bits)]


# -- ruling stages out


def _ruled_out(band: Band, devices: int, peak: int) -> tuple[Band, list[int]]:
    """Rule out stages until all remaining cut lists meet somewhere; return the band and its `_alive`.

    The smallest descending list has the smallest peak as few times as possible, and then the smallest next peak; stages
    between the two peaks are useless. Each round settles one peak in this way. Stages that every remaining cut list
    holds do not distinguish them: their rank becomes 0, and the peak needs no digit in the rounds that follow.

    It also ends when the rounds have cost as much as searching the remaining stages would.
    """
    settled: list[int] = []
    spent = 0.0
    while len(_joints(alive := _alive(band, devices))) == 2:
        spent += band.size * devices * (_SECONDS_PER_CELL if settled else _SECONDS_PER_CELL / 4)
        if peak == 0 or spent > _search_seconds(band, devices, alive, peak):
            break
        holders = band == peak
        total = int(np.count_nonzero(holders))
        if total == 1:
            # It is in every remaining cut list, or there would be a smaller peak.
            band = np.where(holders, 0, band)
        else:
            settled.append(peak)
        if settled:
            following = _next_peak(band, devices, settled)
            if following is None:
                break
            peak, count = following
            if count == total > 1:
                band = np.where(holders, 0, band)
                settled.pop()
        else:
            peak = int(_smallest_peaks(band, devices)[-1][-1])
        keep = band <= peak
        for settled_peak in settled:
            keep |= band == settled_peak
        band = _within(np.where(keep, band, NEVER), NEVER - 1)
    return band, alive


def _search_seconds(band: Band, devices: int, alive: Sequence[int], peak: int) -> float:
    """Estimate the seconds of `_of_states`: a loop over transitions, with an addition of long integers in each."""
    stages = int(np.count_nonzero(band < NEVER))
    transitions = sum(states.bit_count() for states in alive) * stages / (band.shape[1] - 1)
    bits = min(_WIDEST, min(stages, peak) * devices.bit_length())
    return transitions * (1e-7 + 2e-11 * bits)


def _next_peak(band: Band, devices: int, settled: Sequence[int]) -> tuple[int, int] | None:
    """Return the largest stage after the settled ones in the most even cut list, and the number of its stages with the
    last settled peak; None if the numbers get too long.

    State       (g, m) as in `_smallest_peaks`.
    Transition  as there.
    Cost        an integer: the number of stages with the first settled peak, the second, ..., and in the lowest digits
                the rank of the largest other stage. Adding a stage to two such numbers keeps their order.
    Complexity  O(G W B).
    """
    rows, width = len(band), band.shape[1] - devices
    low_bits, digit = settled[0].bit_length(), devices.bit_length()
    bits = low_bits + digit * len(settled)
    if bits > 60:
        return None
    dtype, far = (np.dtype(np.int32), 1 << 29) if bits < 29 else (np.dtype(np.int64), 1 << 61)
    low = (1 << low_bits) - 1
    unsettled = np.where((band == NEVER) | np.isin(band, settled), 0, band).astype(dtype)
    step = np.where(band == NEVER, far, 0).astype(dtype)
    for place, settled_peak in enumerate(reversed(settled)):
        step[band == settled_peak] = 1 << (low_bits + digit * place)
    reached, by_length = _sliding(rows, width, dtype)
    high, settled_by_length = _sliding(rows, width, dtype)
    reached[:], high[:] = 0, far
    high[rows - 1] = 0
    total = np.empty((rows, width), dtype=dtype)
    for g in range(devices):
        columns = slice(g + 1, g + 1 + width)
        np.maximum(by_length, unsettled[:, columns], out=total)
        total += settled_by_length
        total += step[:, columns]
        best = np.minimum(total.min(axis=0), far)
        reached[rows - 1 :] = best & low
        high[rows - 1 :] = best & ~low
    number = int(best[-1])
    return number & low, (number >> low_bits) & ((1 << digit) - 1)


# -- the search itself


def _of_states(band: Band, devices: int, states: Sequence[Iterable[int]]) -> list[int]:
    """Return the most even cut list of a band that passes only the given states.

    State       (g, l): layers l .. L-1 in the stages g .. G-1, for l in states[g].
    Transition  (g + 1, m) -> (g, l) with l < m: stage g holds layers l .. m-1.
    Cost        the stages' peaks as a multiset, encoded as an integer: a digit per distinct peak, the largest first,
                that counts the stages with this peak. No count exceeds G, so digits never carry; adding a stage adds
                its unit, and numbers of equally many stages compare as their descending lists do.
    Complexity  O(G E) additions for E stages, of numbers of O(E log G) bits.

    Ends are tried in rising order and only a smaller number replaces one, hence the smallest cut list among equals.
    """
    num_layers = band.shape[1] - 1
    lengths, ends = np.nonzero(band < NEVER)
    distinct, ranks = np.unique(band[lengths, ends], return_inverse=True)
    digit = devices.bit_length()
    lumped = max(0, len(distinct) - max(2, _WIDEST // digit))
    units = [1 << (digit * max(0, rank - lumped)) for rank in range(len(distinct))]
    stages: list[list[tuple[int, int]]] = [[] for _ in range(num_layers)]
    firsts = ends + lengths - len(band)
    # Rows run from the longest stages to the shortest.
    for first, end, rank in zip(firsts[::-1].tolist(), ends[::-1].tolist(), ranks[::-1].tolist(), strict=True):
        if first >= 0:
            stages[first].append((end, units[rank]))

    beyond = units[-1] << digit
    choices: list[dict[int, int]] = []
    later = {num_layers: 0}
    for g in range(devices - 1, -1, -1):
        now: dict[int, int] = {}
        choice: dict[int, int] = {}
        for first in states[g]:
            best = beyond
            for end, unit in stages[first]:
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
