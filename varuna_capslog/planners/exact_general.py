"""The exact search for costs of any form: a stage's bytes may depend on its place in the pipeline in any way.

`exact` calls it for every memory model that is not additive. It promises what `exact_cuts` promises, from the cost
matrices alone, and always tells all peaks apart. Costs that do not depend on the place go on to `evenness`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from varuna_capslog.memory.costs import NEVER, StageCosts
from varuna_capslog.planners import evenness

__all__ = ["general_cuts", "general_fewest_devices"]

Bytes = NDArray[np.int64]

_FEW = 3000
"""Transitions up to which adding long whole numbers one by one is faster than ruling out in numpy steps."""

_KEPT_CELLS = 1 << 21
"""Cost matrices of up to so many cells are kept between two passes; larger ones are asked for again."""

Window = Callable[[int], Bytes]
"""Stage s -> bytes [i, j] of layers s + i .. s + j as that stage, 0 <= i, j <= L - G; NEVER where it may not be."""


def general_cuts(costs: StageCosts, devices: int, capacities: Sequence[int] | None = None) -> list[int]:
    """Return the first layer of each of `devices` stages, 1 <= devices <= L; see `exact.exact_cuts`."""
    unequal = capacities is not None and len(set(capacities)) > 1
    if unequal:
        window = _windows(costs, devices, capacities)
        peak = _smallest_peak(window, devices)
        if peak < NEVER:
            return _most_even(_transitions_within(window, devices, peak))
        # No cut list fits devices that differ: the smallest peak is still an answer.
    if costs.position_free:
        return evenness.most_even(_band(costs, devices), devices)
    window = _windows(costs, devices)
    return _most_even(_transitions_within(window, devices, _smallest_peak(window, devices)))


def general_fewest_devices(costs: StageCosts, capacity: int) -> int | None:
    """Return the smallest number of devices of `capacity` bytes that some cut list fits, None if L do not suffice.

    Costs that depend on the place are asked anew for every number of devices: whether stages fit is then one pass over
    bits, O(G W) numpy steps of up to W bits each. Else one pass over layers does, as in `exact.fewest_devices`.
    """
    if costs.position_free:
        fits = costs.matrix() <= capacity
        unreached = costs.num_layers + 1
        fewest = np.full(costs.num_layers + 1, unreached)
        fewest[0] = 0
        for first, ends in enumerate(fits):
            fewest[ends & (fewest > fewest[first] + 1)] = fewest[first] + 1
        return int(fewest[-1]) if fewest[-1] < unreached else None
    for devices in range(1, costs.num_layers + 1):
        window = _windows(costs, devices)
        reached: NDArray[np.bool_] = np.arange(costs.num_layers - devices + 1) == 0
        for stage in range(devices):
            reached = np.logical_or.reduce(window(stage)[reached] <= capacity)
        if reached[-1]:
            return devices
    return None


# -- costs as arrays


def _windows(costs: StageCosts, devices: int, capacities: Sequence[int] | None = None) -> Window:
    """Every stage holds a layer at least, so stage s begins at one of layers s .. s + L - G and ends behind one."""
    slack = costs.num_layers - devices + 1

    def window(stage: int) -> Bytes:
        found = costs.matrix(stage, devices)[stage : stage + slack, stage + 1 : stage + 1 + slack]
        return found if capacities is None else np.where(found <= capacities[stage], found, NEVER)

    if devices * slack * slack > _KEPT_CELLS:
        return window
    return [window(stage) for stage in range(devices)].__getitem__


def _band(costs: StageCosts, devices: int) -> evenness.Band:
    """The costs as `evenness` reads them: ranks by length and end, of stages below a peak that some cut list has."""
    matrix = costs.matrix()
    num_layers = costs.num_layers
    most = min(
        max(costs.peaks(cuts))
        for cuts in (
            [stage * num_layers // devices for stage in range(devices)],
            [*range(devices)],
            [0, *range(num_layers - devices + 1, num_layers)],
        )
    )
    within = matrix <= most
    firsts, ends = np.nonzero(within)
    rows = int(min(num_layers - devices + 1, np.max(ends - firsts)))
    ranks = np.unique(matrix[within], return_inverse=True)[1]
    band = np.full((rows, num_layers + 1), evenness.NEVER, dtype=np.int32)
    kept = ends - firsts <= rows
    band[rows - (ends - firsts)[kept], ends[kept]] = ranks[kept] + 1
    return band


def _smallest_peak(window: Window, devices: int) -> int:
    """Return the smallest peak of all cut lists, NEVER if there is none.

    State       (g, m): layers 0 .. m-1 in stages 0 .. g-1, g <= m <= g + L - G.
    Transition  (g, l) -> (g + 1, m) with l < m: stage g holds layers l .. m-1.
    Cost        the larger of the state's peak and the stage's bytes; NEVER where there is none.
    Complexity  O(G W^2) in G numpy steps, W = L - G + 1.
    """
    peaks = window(0)[0]
    for stage in range(1, devices):
        peaks = np.maximum(peaks[:, None], window(stage)).min(axis=0)
    return int(peaks[-1])


# -- the most even of the cut lists with the smallest peak


@dataclass
class _Stage:
    """The transitions of one stage that are still in question, in rising order of (start, end).

    bytes: of the stage; 0 once settled. Starts and ends count from the stage's first possible layer.
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


def _transitions_within(window: Window, devices: int, peak: int) -> list[_Stage]:
    """Every stage of at most `peak` bytes that is part of some cut list of such stages; there is one."""
    width = len(window(0))
    stages = []
    reached: NDArray[np.bool_] = np.arange(width) == 0
    for number in range(devices):
        bytes_ = window(number)
        within = (bytes_ <= peak) & reached[:, None]
        reached = np.logical_or.reduce(within)
        starts, ends = within.nonzero()
        stages.append(_Stage(starts, ends, bytes_[starts, ends]))
    leads_on = np.zeros(width, dtype=np.bool_)
    leads_on[-1] = True
    for stage in reversed(stages):
        stage.keep(leads_on[stage.ends])
        leads_on = np.zeros(width, dtype=np.bool_)
        leads_on[stage.starts] = True
    return stages


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
    cuts, place = [0], 0
    for number, choice in enumerate(reversed(choices[1:]), start=1):
        place = choice[place]
        cuts.append(number + place)
    return cuts
