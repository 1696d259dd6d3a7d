"""The cut list with the smallest peak, whatever the statistics look like, and among those the most even one.

Needs no monotone statistics, unlike CAPSlog's search, because it weighs every cut list by dynamic programming. The
default planner. Also answers how few devices would do.

A stage's bytes may depend on its place in the pipeline in any way. Where they do, and where devices differ, the search
goes through the ranges of layers that fit, place by place; otherwise `evenness` searches a band of stages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from varuna_capslog.memory.additive import AdditiveCosts
from varuna_capslog.memory.costs import NEVER, StageCosts
from varuna_capslog.memory.ranges import Ranges, ranges_within
from varuna_capslog.planners import evenness
from varuna_capslog.planners.capslog import capslog_cuts

__all__ = ["exact_cuts", "fewest_devices"]

Bytes = NDArray[np.int64]

_FEW = 3000
"""Transitions up to which adding long whole numbers one by one is faster than ruling out in numpy steps."""

_KEPT = 1 << 22
"""Transitions kept while the smallest peak is looked for; where they are more, those within it are looked for again."""

_NARROWED = 8
"""Every so many stages, from the last on, the ranges that no earlier stage can hold are left out: ranges of late stages
may be longer, since less waits there.
"""

_FEW_RANGES = 10_000
"""Below this number of ranges, leaving some out costs more than it saves."""

_SMALL = 100_000
"""Ranges times stages up to which weighing them all is faster than looking for a tight bound first."""


def exact_cuts(costs: StageCosts, devices: int, capacities: Sequence[int] | None = None) -> list[int]:
    """Return the first layer of each of `devices` stages, 1 <= devices <= L.

    The cut list has the smallest peak; among those, the smallest list of stage peaks in descending order (the second
    largest stage is as small as it can be, and so on); among those, it is the smallest cut list.

    At thousands of layers on hundreds of devices, where very many cut lists have the smallest peak and bytes do not
    depend on the place, the list of peaks is cut short to bound memory: the peak is still the smallest, but peaks below
    the 2^17 / log2(G) largest ones that a stage may have are not told apart.

    `capacities` is one number of bytes per stage. Where they differ and some cut list fits, only those that fit are
    weighed; otherwise they change nothing.
    """
    if capacities is not None and len(set(capacities)) > 1:
        even = costs.peaks(_even_split(costs, devices))
        fits = all(used <= size for used, size in zip(even, capacities, strict=True))
        # Where capacities are loose, most ranges that fit are longer than any in a cut list as good as this one.
        most = max(even if fits else capacities)
        limits = [min(most, capacity) for capacity in capacities]
        if stages := _with_smallest_peak(ranges_within(costs, devices, most), devices, limits):
            return _most_even(stages)
        # No cut list fits devices that differ: the smallest peak is still an answer.
    if costs.position_free:
        return evenness.most_even(_band(costs, devices), devices)
    most = _attained(costs, devices)
    return _most_even(_with_smallest_peak(ranges_within(costs, devices, most), devices, [most] * devices))


def fewest_devices(costs: StageCosts, capacity: int) -> int | None:
    """Return the smallest number of devices of `capacity` bytes that some cut list fits, None if L do not suffice.

    Costs that depend on the place are searched anew for every number of devices. Others need one pass over the layers:

    State       m: layers 0 .. m-1 in the fewest stages.
    Transition  l -> m with l < m where the stage of layers l .. m-1 fits.
    Cost        the number of stages.
    Complexity  O(L^2) in as many numpy steps as there are stages.
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
    """Return the cut list whose stages differ by one layer at most."""
    return [stage * costs.num_layers // devices for stage in range(devices)]


# -- costs that do not depend on the place, as arrays


def _band(costs: StageCosts, devices: int) -> evenness.Band:
    """Return the ranks, from 1 on, of the stages up to a peak that some cut list has, as `evenness` reads them."""
    num_layers = costs.num_layers
    if isinstance(costs, AdditiveCosts):
        # Any cut list bounds the smallest peak from above; CAPSlog's is cheap and often the best already.
        most = max(costs.peaks(capslog_cuts(costs, devices)))
        head, running = np.array(costs.head, dtype=np.int64), np.array(costs.running, dtype=np.int64)
        # The last layer up to which a stage may come back under `most`: running need not rise.
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
    band = np.full(bytes_.shape, evenness.NEVER, dtype=np.int32)
    band[within] = np.unique(bytes_[within], return_inverse=True)[1] + 1
    return band


# -- ranges of layers, place by place


def _attained(costs: StageCosts, devices: int) -> int:
    """Return the peak of some cut list: the smaller, the fewer ranges are weighed. Within a thirtieth of the smallest
    peak in large instances where bytes never fall when a layer joins a stage.
    """
    high = max(costs.peaks(_even_split(costs, devices)))
    low = high if costs.num_layers**2 * devices <= _SMALL else 0
    while high - low > high // 32 + 1:
        threshold = (low + high) // 2
        peak = max(costs.peaks(_filled(costs, devices, threshold)))
        low, high = (low, peak) if peak <= threshold else (threshold, min(high, peak))
    return high


def _filled(costs: StageCosts, devices: int, threshold: int) -> list[int]:
    """FILL_FIRST of the paper's Algorithm 2, where the last layer that still fits is found by bisection."""
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
    """Return the stages, by their number, of all cut lists with the smallest peak of those that keep to limits[s] in
    stage s; empty where there is none.
    """
    peak, weighed = _weighed(ranges, devices, limits, _KEPT)
    if peak == NEVER:
        return []
    if not weighed:
        _, weighed = _weighed(ranges, devices, [min(limit, peak) for limit in limits], None)
    stages = []
    reached: NDArray[np.bool_] = np.arange(ranges.num_layers + 1) == 0
    for stage, peaks in reversed(weighed):
        stage.keep(reached[stage.starts] & (peaks <= peak))
        reached = np.zeros_like(reached)
        reached[stage.ends] = True
        stages.append(stage)
    return stages


def _weighed(
    ranges: Ranges, devices: int, limits: Sequence[int], most: int | None
) -> tuple[int, list[tuple[_Stage, Bytes]]]:
    """Return the smallest peak of the cut lists that keep to the limits, NEVER if there is none; and transitions, from
    the last stage to the first, with the smallest peak from there on: all that such cut lists have, or none if they are
    more than `most`.

    State       (s, l): layers from l on in the stages s .. G-1, s <= l <= s + L - G.
    Transition  (s + 1, m) -> (s, l) with l < m: stage s holds layers l .. m-1.
    Cost        the larger of the state's peak and the stage's bytes; NEVER above the limit and where there is none.
    Complexity  O(G N) in G numpy steps for N ranges.
    """
    size = ranges.num_layers + 1
    later = np.full(size, NEVER, dtype=np.int64)
    later[-1] = 0
    weighed: list[tuple[_Stage, Bytes]] = []
    count = 0
    begins = _begins(ranges)
    for number in reversed(range(devices)):
        if number % _NARROWED == 0 and len(ranges.firsts) > _FEW_RANGES:
            ranges = ranges.within(max(limits[: number + 1]), number + 1)
            begins = _begins(ranges)
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
            weighed.append((stage, peaks))
    if most is not None and count > most:
        weighed.clear()
    return int(later[0]), weighed


def _begins(ranges: Ranges) -> list[int]:
    """Where the ranges that begin at each layer begin."""
    return np.searchsorted(ranges.firsts, np.arange(ranges.num_layers + 1)).tolist()


# -- the most even of the cut lists with the smallest peak


@dataclass
class _Stage:
    """The transitions of one stage that are still in question, in rising order of (start, end).

    starts, ends: layers starts .. ends-1. bytes: of the stage; 0 once settled.
    """

    starts: NDArray[np.int64]
    ends: NDArray[np.int64]
    bytes: Bytes

    def keep(self, kept: NDArray[np.bool_]) -> None:
        """Drop all others."""
        self.starts, self.ends, self.bytes = self.starts[kept], self.ends[kept], self.bytes[kept]

    def least(self, costs: Bytes, nothing: int, width: int) -> Bytes:
        """The smallest cost of the transitions of each start, `nothing` where there are none."""
        found = np.full(width, nothing, dtype=np.int64)
        segments = self.segments()
        found[self.starts[segments]] = np.minimum.reduceat(costs, segments)
        return found

    def segments(self) -> NDArray[np.int64]:
        """Where the transitions of each start begin."""
        begins = np.ones(len(self.starts), dtype=np.bool_)
        np.not_equal(self.starts[1:], self.starts[:-1], out=begins[1:])
        return begins.nonzero()[0]


def _most_even(stages: list[_Stage]) -> list[int]:
    """Return the cut list with the smallest descending list of peaks, of those the smallest cut list.

    The smallest descending list holds the largest of its peaks as few times as can be; of the lists that do, it has the
    smallest next peak. A round settles one peak so: it rules out what is above the smallest peak of the stages not yet
    settled, then what is not part of a list with the fewest stages of that peak. All lists left hold equally many of
    them; they are settled and count as 0. At most G rounds of O(E) in G numpy steps for E transitions in question.
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
    """Keep the stages of the cut lists whose costs join to the least, which is returned, in no stage to more.

    State       (g, l): layers from l on in the stages g .. G-1.
    Transition  (g + 1, m) -> (g, l): stage g holds layers l .. m-1.
    Cost        `join` (maximum or sum) of the stages' costs.
    """
    nothing = 1 << 61
    later = np.full(width, nothing, dtype=np.int64)
    later[-1] = 0
    totals = []
    for stage in reversed(stages):
        totals.append(join(cost(stage.bytes), later[stage.ends]))
        later = stage.least(totals[-1], nothing, width)
    least = int(later[0])
    # What the stages before have used of the sum; a maximum is kept to by every stage alone.
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
    """The most even cut list by comparing whole lists of peaks, each written as one whole number.

    State       (g, l): layers from l on in the stages g .. G-1.
    Transition  (g + 1, m) -> (g, l): stage g holds layers l .. m-1.
    Cost        a digit per distinct peak, the largest first, that counts the stages with this peak. No count exceeds G,
                so digits never carry, and numbers of equally many stages compare as their descending lists do.
    Complexity  O(E) additions of numbers of O(E log G) bits for E transitions.

    Ends are tried in rising order and only a smaller number replaces one, hence the smallest cut list among equals.
    """
    every, ranks = np.unique(np.concatenate([stage.bytes for stage in stages]), return_inverse=True)
    digit = len(stages).bit_length()
    units = [1 << (digit * rank) for rank in range(len(every))]
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
        # One sum at a time, not a list of them: numbers of a kilobyte are best forgotten at once.
        for start, end, rank in zip(stage.starts.tolist(), stage.ends.tolist(), of_stage, strict=True):
            total = later[end] + units[rank]
            if start not in now or total < best:
                now[start] = best = total
                choice[start] = end
        later = now
        choices.append(choice)
    cuts = [0]
    for choice in reversed(choices[1:]):
        cuts.append(choice[cuts[-1]])
    return cuts
