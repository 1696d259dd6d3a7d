"""Planner `exact`: finds the cut list with the smallest peak for any statistics, and among these lists the most even.

It is the default for runs that `budget` cannot plan. Unlike CAPSlog's search it needs no monotone statistics, because
dynamic programming covers every cut list. Where a stage's bytes depend on its position, in any way, or devices differ,
it searches the ranges of layers that fit, position by position; otherwise `most_even` searches a band of stages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from varuna_capslog.memory.additive import AdditiveCosts
from varuna_capslog.memory.costs import NEVER, StageCosts
from varuna_capslog.memory.inflight import Ranges, ranges_within
from varuna_capslog.planners.capslog import capslog_cuts

__all__ = ["Band", "exact_cuts", "fewest_devices"]


# -- The smallest peak of a band of stages, and the most even of the cut lists that have it.
#
# `exact_cuts` searches a band where bytes do not depend on a stage's position and devices are alike. Only the order of
# stages by their bytes counts here, so a stage's bytes are replaced by integers 1, 2, ... in that order, its *rank*.
#
# A band is an int32 array [B, L + 1]: row i holds the stages of B - i layers, column e those that end before layer e,
# and UNREACHED marks a stage that is not allowed. A slice of columns a .. b is the band of the layers a .. b-1 alone.


Band = NDArray[np.int32]

UNREACHED = 1 << 30
"""Rank of a stage that is not allowed."""

_MANY = 30_000
"""Number of transitions above which splitting the search is faster (L = 48 stays below)."""

_WIDEST = 1 << 17
"""Most bits of the numbers that encode lists of peaks: enough for 1,000 layers on 100 devices, and 16 KiB each."""

_SECONDS_PER_CELL = 1.5e-9
"""Approximate seconds per stage and position in a round of `_ruled_out`."""


def most_even(band: Band, devices: int) -> list[int]:
    """Return the cut list with the smallest peak; ties are broken by the smallest descending list of stage peaks, then
    by the smallest cut list. There must be a cut list.

    A large search is split wherever all cut lists with the smallest peak have the same cut at the same stage: the most
    even cut list then consists of the most even cut lists of its parts, since adding the same stages to two lists of
    peaks does not change their order. Each part in turn has its own smallest peak.
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
    kept = np.where(band <= most, band, UNREACHED)
    return kept[int(np.argmax((kept < UNREACHED).any(axis=1))) :]


def _transitions(band: Band, devices: int) -> int:
    """Return an upper bound of the transitions of `_of_states`: each stage at each position that it may have."""
    return int(np.count_nonzero(band < UNREACHED)) * min(devices, band.shape[1] - devices)


# -- the smallest peak


def _smallest_peaks(band: Band, devices: int) -> list[Band]:
    """Return for g = 1 .. G the smallest peak of each prefix cut into g stages. O(G W B) in G numpy steps.

    State       (g, m): layers 0 .. m-1 in g stages, g <= m < g + W with W = L - G + 1, since G - g layers at least must
                remain. Entry [g - 1][m - g] of the result.
    Transition  (g, l) -> (g + 1, m) with l < m: stage g holds layers l .. m-1, at most B layers.
    Cost        the larger of the state's peak and the stage's.
    """
    rows, width = len(band), band.shape[1] - devices
    reached, by_length = _sliding(rows, width, np.dtype(np.int32))
    reached[:] = UNREACHED
    reached[rows - 1] = 0  # No layer in no stage.
    peaks: list[Band] = []
    for g in range(devices):
        peaks.append(np.maximum(by_length, band[:, g + 1 : g + 1 + width]).min(axis=0))
        reached[rows - 1 :] = peaks[-1]
    return peaks


def _sliding(rows: int, width: int, dtype: np.dtype[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return a vector of rows - 1 missing states and one level's states, and its view with one row per stage
    length: column j of the view's row i is the state rows - i layers before the state j of the next level.
    """
    states = np.empty(rows - 1 + width, dtype=dtype)
    return states, np.lib.stride_tricks.as_strided(states, (rows, width), (states.itemsize,) * 2)


def _reached(peaks: Sequence[Band]) -> list[list[int]]:
    """Return the possible first layers of stage g = 0 .. G-1 in cut lists whose earlier stages are within the peak."""
    peak = peaks[-1][-1]
    return [[0], *((np.flatnonzero(row <= peak) + g).tolist() for g, row in enumerate(peaks[:-1], start=1))]


# -- splitting the search where all cut lists have the same cut


def _alive(band: Band, devices: int) -> list[int]:
    """Return for g = 0 .. G the set of m such that some cut list of the band has g stages of layers 0 .. m-1. A set is
    an integer with a bit per layer; a stage of d layers shifts it by d. O(G B) shifts of L bits.
    """
    num_layers = band.shape[1] - 1
    packed = np.packbits(band < UNREACHED, axis=1, bitorder="little")
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
    """Rule out stages until all remaining cut lists have a common cut, or until the rounds have taken as long as
    searching the remaining stages would; return the band and its `_alive`. The smallest descending list has the
    smallest peak as few times as possible, and then the smallest next peak; stages between the two peaks are useless.
    Each round settles one peak in this way. Stages that every remaining cut list has do not distinguish these lists:
    their rank becomes 0, and the peak needs no digit in the next rounds.
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
        band = _within(np.where(keep, band, UNREACHED), UNREACHED - 1)
    return band, alive


def _search_seconds(band: Band, devices: int, alive: Sequence[int], peak: int) -> float:
    """Estimate the seconds of `_of_states`: a loop over transitions, with an addition of long integers in each."""
    stages = int(np.count_nonzero(band < UNREACHED))
    transitions = sum(states.bit_count() for states in alive) * stages / (band.shape[1] - 1)
    bits = min(_WIDEST, min(stages, peak) * devices.bit_length())
    return transitions * (1e-7 + 2e-11 * bits)


def _next_peak(band: Band, devices: int, settled: Sequence[int]) -> tuple[int, int] | None:
    """Return the next peak after the settled peaks in the most even cut list, and the number of its stages with the
    last settled peak; None if the numbers get too long. State, transition and complexity: as in `_smallest_peaks`.
    Cost: an integer with a digit per settled peak, which counts its stages, and in the lowest digits the rank of the
    largest other stage; adding a stage keeps the order.
    """
    rows, width = len(band), band.shape[1] - devices
    low_bits, digit = settled[0].bit_length(), devices.bit_length()
    bits = low_bits + digit * len(settled)
    if bits > 60:
        return None
    dtype, far = (np.dtype(np.int32), 1 << 29) if bits < 29 else (np.dtype(np.int64), 1 << 61)
    low = (1 << low_bits) - 1
    unsettled = np.where((band == UNREACHED) | np.isin(band, settled), 0, band).astype(dtype)
    step = np.where(band == UNREACHED, far, 0).astype(dtype)
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
    Ties        ends are tried in rising order and only a smaller number replaces another: the smallest cut list.
    Complexity  O(G E) additions for E stages, of numbers of O(E log G) bits.
    """
    num_layers = band.shape[1] - 1
    lengths, ends = np.nonzero(band < UNREACHED)
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

    return _cuts_of(choices)


def _cuts_of(choices: Sequence[Mapping[int, int]]) -> list[int]:
    """Return the cut list of choices (first layer of a stage -> its end), given from the last stage to the first."""
    cuts = [0]
    for choice in reversed(choices[1:]):
        cuts.append(choice[cuts[-1]])
    return cuts


# -- The cut list with the smallest peak


Bytes = NDArray[np.int64]

_FEW = 3000
"""Transitions up to which adding long integers one by one is faster than ruling out in numpy steps."""

_KEPT = 1 << 22
"""Most transitions kept in the search for the smallest peak; if there are more, a second search keeps those within it.
"""

_NARROWED = 8
"""Number of stages, from the last on, after which ranges that no earlier stage can hold are dropped: late stages may
have longer ranges, since fewer calls are in flight there.
"""

_FEW_RANGES = 10_000
"""Below this number of ranges, filtering costs more than it saves."""

_SMALL = 100_000
"""Ranges times stages up to which evaluating them all is faster than finding a tight bound first."""


def exact_cuts(costs: StageCosts, devices: int, capacities: Sequence[int] | None = None) -> list[int]:
    """Return the first layer of each of `devices` stages, 1 <= devices <= L: the cut list with the smallest peak; among
    those, with the smallest list of stage peaks in descending order (the second largest stage is as small as it can be,
    and so on); among those, the smallest cut list. capacities: bytes per stage. Where they differ and some cut list
    fits, only cut lists that fit are considered; otherwise capacities have no effect.

    At thousands of layers on hundreds of devices, where very many cut lists have the smallest peak and bytes do not
    depend on the position, the list of peaks is truncated to bound memory: the peak is still the smallest, but only the
    2^17 / log2(G) largest peaks that a stage may have are distinguished.
    """
    if capacities is not None and len(set(capacities)) > 1:
        even = costs.peaks(_even_split(costs, devices))
        fits = all(used <= size for used, size in zip(even, capacities, strict=True))
        # Where capacities are loose, most ranges that fit are longer than any range of a cut list as good as `even`.
        most = max(even if fits else capacities)
        limits = [min(most, capacity) for capacity in capacities]
        if stages := _with_smallest_peak(ranges_within(costs, devices, most), devices, limits):
            return _most_even(stages)
        # No cut list fits devices that differ: return the smallest peak.
    if costs.position_free:
        return most_even(_band(costs, devices), devices)
    most = _attained(costs, devices)
    return _most_even(_with_smallest_peak(ranges_within(costs, devices, most), devices, [most] * devices))


def fewest_devices(costs: StageCosts, capacity: int) -> int | None:
    """Return the smallest number of devices of `capacity` bytes that some cut list fits; None if L devices are too few.
    Costs that depend on the position are searched again for every number of devices. Other costs need one pass over
    the layers, O(L^2) in as many numpy steps as there are stages. State m: layers 0 .. m-1 in the fewest stages.
    Transition: l -> m with l < m where the stage of layers l .. m-1 fits. Cost: the number of stages.
    """
    if not costs.position_free:
        for devices in range(1, costs.num_layers + 1):
            if _with_smallest_peak(ranges_within(costs, devices, capacity), devices, [capacity] * devices):
                return devices
        return None
    fits = costs.matrix() <= capacity
    reached = np.arange(costs.num_layers + 1) == 0
    newly = reached
    for devices in range(1, costs.num_layers + 1):
        newly = fits[newly[:-1]].any(axis=0) & ~reached
        reached = reached | newly
        if reached[-1]:
            return devices
    return None


def _even_split(costs: StageCosts, devices: int) -> list[int]:
    """Return the cut list whose stages differ by at most one layer."""
    return [stage * costs.num_layers // devices for stage in range(devices)]


# -- costs that do not depend on the position, as arrays


def _band(costs: StageCosts, devices: int) -> Band:
    """Return the band of `most_even`: ranks, from 1 on, of the stages up to a peak that some cut list has."""
    num_layers = costs.num_layers
    if isinstance(costs, AdditiveCosts):
        # Any cut list bounds the smallest peak from above; CAPSlog's is cheap and often the best already.
        most = max(costs.peaks(capslog_cuts(costs, devices)))
        head, running = np.array(costs.head, dtype=np.int64), np.array(costs.running, dtype=np.int64)
        # The last layer at which a stage may be within `most` again: running need not rise.
        lowest = np.minimum.accumulate(running[::-1])[::-1]
        longest = np.max(np.searchsorted(lowest, most - head, side="right") - np.arange(num_layers))
        rows = int(np.clip(longest, 1, num_layers - devices + 1))
        first = np.lib.stride_tricks.sliding_window_view(np.append(np.full(rows, NEVER), head), num_layers + 1)
        bytes_ = first + np.append(0, running)
    else:
        most = min(
            max(costs.peaks(cuts))
            for cuts in (
                _even_split(costs, devices),
                [*range(devices)],
                [0, *range(num_layers - devices + 1, num_layers)],
            )
        )
        matrix = costs.matrix()
        firsts, ends = np.nonzero(matrix <= most)
        lengths = np.arange(min(num_layers - devices + 1, np.max(ends - firsts)), 0, -1)
        every_end = np.arange(num_layers + 1)
        firsts = every_end - lengths[:, None]
        bytes_ = np.where(firsts < 0, NEVER, matrix[firsts, every_end])
    within = bytes_ <= most
    band = np.full(bytes_.shape, UNREACHED, dtype=np.int32)
    band[within] = np.unique(bytes_[within], return_inverse=True)[1] + 1
    return band


# -- ranges of layers, position by position


def _attained(costs: StageCosts, devices: int) -> int:
    """Return the peak of some cut list. The smaller it is, the fewer ranges are evaluated. In large instances it is
    within a thirtieth of the smallest peak, if bytes never fall when a layer joins a stage.
    """
    high = max(costs.peaks(_even_split(costs, devices)))
    low = high if costs.num_layers**2 * devices <= _SMALL else 0
    while high - low > high // 32 + 1:
        threshold = (low + high) // 2
        peak = max(costs.peaks(_filled(costs, devices, threshold)))
        low, high = (low, peak) if peak <= threshold else (threshold, min(high, peak))
    return high


def _filled(costs: StageCosts, devices: int, threshold: int) -> list[int]:
    """Run FILL_FIRST of CAPSlog's Algorithm 2, with bisection for the last layer that still fits."""
    cuts = [0]
    for stage in range(devices - 1):
        first, low, high = cuts[-1], cuts[-1] + 1, costs.num_layers - (devices - 1 - stage)
        while low < high:
            end = (low + high + 1) // 2
            if costs.stage_bytes(first, end, stage, devices) <= threshold:
                low = end
            else:
                high = end - 1
        cuts.append(low)
    return cuts


def _with_smallest_peak(ranges: Ranges, devices: int, limits: Sequence[int]) -> list[_Stage]:
    """Return the stages of all cut lists of the smallest peak with stage s within limits[s]; empty if there is none."""
    peak, peaks_by_stage = _smallest_peaks_by_stage(ranges, devices, limits, _KEPT)
    if peak == NEVER:
        return []
    if not peaks_by_stage:
        _, peaks_by_stage = _smallest_peaks_by_stage(ranges, devices, [min(limit, peak) for limit in limits], None)
    stages = []
    reached: NDArray[np.bool_] = np.arange(ranges.num_layers + 1) == 0
    for stage, peaks in reversed(peaks_by_stage):
        stage.keep(reached[stage.starts] & (peaks <= peak))
        reached = np.zeros_like(reached)
        reached[stage.ends] = True
        stages.append(stage)
    return stages


def _smallest_peaks_by_stage(
    ranges: Ranges, devices: int, limits: Sequence[int], most: int | None
) -> tuple[int, list[tuple[_Stage, Bytes]]]:
    """Return the smallest peak of the cut lists within the limits, NEVER if there is none; and for each stage, from the
    last, its transitions with the smallest peak of this and all later stages, or [] if there are more than `most`.

    State       (s, l): layers from l on in the stages s .. G-1, s <= l <= s + L - G.
    Transition  (s + 1, m) -> (s, l) with l < m: stage s holds layers l .. m-1.
    Cost        the larger of the state's peak and the stage's bytes; NEVER above the limit and where there is none.
    Complexity  O(G N) in G numpy steps for N ranges.
    """
    size = ranges.num_layers + 1
    later = np.full(size, NEVER, dtype=np.int64)
    later[-1] = 0
    peaks_by_stage: list[tuple[_Stage, Bytes]] = []
    count = 0
    begins = _first_range_of_layer(ranges)
    for number in reversed(range(devices)):
        if number % _NARROWED == 0 and len(ranges.firsts) > _FEW_RANGES:
            ranges = ranges.within(max(limits[: number + 1]), number + 1)
            begins = _first_range_of_layer(ranges)
        begin, behind = begins[number], begins[size - devices + number]
        bytes_ = ranges.bytes(number, slice(begin, behind))
        within = (bytes_ <= limits[number]).nonzero()[0]
        ends = ranges.ends[begin:behind][within]
        leads_on = later[ends] < NEVER
        within, ends = within[leads_on], ends[leads_on]
        stage = _Stage(ranges.firsts[begin:behind][within], ends, bytes_[within])
        peaks = np.maximum(stage.bytes, later[ends])
        later = stage.least(peaks, NEVER, size)
        count += len(peaks)
        if most is None or count <= most:
            peaks_by_stage.append((stage, peaks))
    if most is not None and count > most:
        peaks_by_stage.clear()
    return int(later[0]), peaks_by_stage


def _first_range_of_layer(ranges: Ranges) -> list[int]:
    """Return the index of the first range of each first layer."""
    return np.searchsorted(ranges.firsts, np.arange(ranges.num_layers + 1)).tolist()


# -- the most even of the cut lists with the smallest peak


@dataclass
class _Stage:
    """Remaining transitions of a stage, by (start, end): layers start .. end-1. bytes: of each; 0 once settled."""

    starts: NDArray[np.int64]
    ends: NDArray[np.int64]
    bytes: Bytes

    def keep(self, kept: NDArray[np.bool_]) -> None:
        """Keep only these transitions."""
        self.starts, self.ends, self.bytes = self.starts[kept], self.ends[kept], self.bytes[kept]

    def least(self, costs: Bytes, nothing: int, width: int) -> Bytes:
        """Return the smallest cost of the transitions of each start, `nothing` where there are none."""
        least = np.full(width, nothing, dtype=np.int64)
        segments = self.segments()
        least[self.starts[segments]] = np.minimum.reduceat(costs, segments)
        return least

    def segments(self) -> NDArray[np.int64]:
        """Return the index of the first transition of each start."""
        begins = np.ones(len(self.starts), dtype=np.bool_)
        np.not_equal(self.starts[1:], self.starts[:-1], out=begins[1:])
        return begins.nonzero()[0]


def _most_even(stages: list[_Stage]) -> list[int]:
    """Return the cut list with the smallest descending list of peaks; ties are broken by the smallest cut list. The
    smallest descending list has its largest peak as few times as possible, and then the smallest next peak. A round
    settles one peak in this way: it rules out transitions above the smallest peak of the stages not yet settled, then
    transitions that are in no list with the fewest stages of this peak. All remaining lists have equally many stages
    of this peak, which now count as 0. At most G rounds of O(E) in G numpy steps for E remaining transitions.
    """
    width = int(stages[-1].ends[-1]) + 1
    while sum(len(stage.starts) for stage in stages) > _FEW:
        peak = _rule_out(stages, width, lambda bytes_: bytes_, np.maximum)
        if peak == 0:
            break
        _rule_out(stages, width, lambda bytes_: (bytes_ == peak).astype(np.int64), np.add)  # noqa: B023
        for stage in stages:
            stage.bytes = np.where(stage.bytes == peak, 0, stage.bytes)
    return _by_long_numbers(stages)


def _rule_out(
    stages: list[_Stage], width: int, cost: Callable[[Bytes], Bytes], join: Callable[[Bytes, Bytes], Bytes]
) -> int:
    """Keep the transitions of the cut lists whose costs join to the least total, and return this total. State and
    transition are those of `_smallest_peaks_by_stage`; the cost is `join` (maximum or sum) of the stages' costs.
    """
    nothing = 1 << 61
    later = np.full(width, nothing, dtype=np.int64)
    later[-1] = 0
    totals = []
    for stage in reversed(stages):
        totals.append(join(cost(stage.bytes), later[stage.ends]))
        later = stage.least(totals[-1], nothing, width)
    least = int(later[0])
    # The part of the sum that earlier stages have used; a maximum holds for every stage alone.
    spent = np.zeros(width, dtype=np.int64)
    reached = np.zeros(width, dtype=np.bool_)
    reached[0] = True
    for stage, total in zip(stages, reversed(totals), strict=True):
        kept = reached[stage.starts] & (join(total, spent[stage.starts]) <= least)
        stage.keep(kept)
        spent_then = join(cost(stage.bytes), spent[stage.starts])
        spent, reached = np.full(width, nothing, dtype=np.int64), np.zeros(width, dtype=np.bool_)
        reached[stage.ends] = True
        np.minimum.at(spent, stage.ends, spent_then)
    return least


def _by_long_numbers(stages: Sequence[_Stage]) -> list[int]:
    """Return the most even cut list; states are those of `_smallest_peaks_by_stage`, and transitions, costs and
    ties those of `_of_states`. O(E) additions of numbers of O(E log G) bits for E transitions.
    """
    distinct, ranks = np.unique(np.concatenate([stage.bytes for stage in stages]), return_inverse=True)
    digit = len(stages).bit_length()
    units = [1 << (digit * rank) for rank in range(len(distinct))]
    ranked = ranks.tolist()
    behind = len(ranked)
    choices: list[dict[int, int]] = []
    later = {int(stages[-1].ends[-1]): 0}
    best = 0
    for stage in reversed(stages):
        behind -= len(stage.starts)
        of_stage = ranked[behind : behind + len(stage.starts)]
        now: dict[int, int] = {}
        choice: dict[int, int] = {}
        # One sum at a time, not a list of sums, since these numbers may have a kilobyte each.
        for start, end, rank in zip(stage.starts.tolist(), stage.ends.tolist(), of_stage, strict=True):
            total = later[end] + units[rank]
            if start not in now or total < best:
                now[start] = best = total
                choice[start] = end
        later = now
        choices.append(choice)
    return _cuts_of(choices)
