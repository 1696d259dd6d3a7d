"""Finds the cheapest memory intervals of a stage: one search for all ranges of layers, calls in flight and budgets.

The undominated choices of a range are its front, from which `IntervalSearch.cheapest` chooses.
State: at a cut, the state of `tables.States`, and, in an action list with an R, the phase: whether the last recomputed
segment has come. A label is a choice for the layers from a first layer up to the cut: its seconds, and its bytes as
sums (`memory.segments.Sums`) that grow from segment to segment. Transition: one more segment of any length and kind; a
segment of kind KEEP does not follow another, since both would be one segment. Dominance: a label is dropped if another
label of its first layer, cut and state is at most as large in every number, since any following segments add the same
to both, or take the same maximum (`Dominance`: labels of two states). Cost: `tables.combined_seconds` of labels that
fit. With n labels per first layer and cut there are O(L^3 n) transitions, in 4 L array operations for all first layers.
Labels of ranges that equal earlier ranges (`equal_ranges`) are copied: in a chain of equal layers O(L^2 n) remain.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.memory.costs import NEVER, Bytes
from varuna_capslog.memory.range_bytes import RangeBytes
from varuna_capslog.memory.segments import CallSegment, PrecedingSegments, SharedInputs
from varuna_capslog.planners.intervals.equal_ranges import Copies, EqualRanges
from varuna_capslog.planners.intervals.partial_choices import (
    ON_DEVICE,
    WHOLE,
    Dominance,
    Finished,
    PartialChoices,
    Thinning,
    by_first,
    fewer,
    joined,
)
from varuna_capslog.planners.intervals.tables import (
    DEFAULT_HANDLING,
    KINDS,
    Handling,
    IntervalChoice,
    SegmentTable,
    States,
    combined_seconds,
    others_bytes,
    stage_bytes,
)
from varuna_capslog.planners.seconds import LayerSeconds
from varuna_capslog.plans.parts import INTERVAL_KINDS, KEEP, MemoryInterval

__all__ = ["DEFAULT_LABELS", "EXACT_LAYERS", "IntervalSearch", "resident_bytes"]


EXACT_LAYERS = 8
"""Most layers of a chain that is searched exactly by default."""
DEFAULT_LABELS = 64
"""Most labels per first layer and cut in longer chains, by default."""
_NONE_YET, _STILL_TO_COME, _HAS_COME = range(3)
"""Phases in a list with an R: no segment recomputes so far; the last recomputed segment is still to come; it has come.
"""
_EXTREMES = (0.0, 1.0, 3.0, 7.0)
"""Numbers of other waiting calls; for each, thinning always keeps the choices with the fewest bytes."""
_RECOMPUTES = [MemoryInterval(0, 1, kind).recomputes for kind in KINDS]

Floats = NDArray[np.float64]


class IntervalSearch:
    """Cheapest intervals of every range of layers as one stage, for any number of calls in flight and any byte budget.

    ranges, seconds: of one profile. handling: how the action lists handle their calls, and the cost of copies.
    labels: most labels per first layer and cut; 0: all, so that every answer is exact. Default: all for chains of at
    most `EXACT_LAYERS` layers, else `DEFAULT_LABELS`. kinds: of memory intervals that may be used.
    firsts: first layers of the stages that may be queried; default: all. borders: cuts at which stages and intervals
    may begin and end; default: all. With a single first layer, a range of a long chain can be searched again exactly.
    limits: a stage whose call takes more seconds, or that always holds more bytes, is treated as one that does not fit.
    Raises CapslogError where the profile lacks the halves of split backwards.
    """

    def __init__(
        self,
        ranges: RangeBytes,
        seconds: LayerSeconds,
        handling: Handling = DEFAULT_HANDLING,
        labels: int | None = None,
        firsts: Collection[int] | None = None,
        kinds: Collection[str] = INTERVAL_KINDS,
        limits: tuple[float, float] = (np.inf, np.inf),
        borders: Collection[int] | None = None,
    ) -> None:
        size = ranges.num_layers
        self._ranges, self._seconds, self._handling, self._kinds = ranges, seconds, handling, {KEEP, *kinds}
        self._most = (0 if size <= EXACT_LAYERS else DEFAULT_LABELS) if labels is None else labels
        _, self._own = seconds.of_ranges()
        self._longest, most = limits
        may = np.isin(np.arange(size + 1), range(size + 1) if borders is None else list(borders))
        within = (self._own <= self._longest) & may[:-1, None] & may & _holding_at_most(ranges, most)
        self._within = within
        self._table = SegmentTable(ranges, seconds, handling.split, within, self._kinds)
        self._states = States(ranges, handling.later)
        self._peak = "first_weights" if handling.split else "first_backward"
        self._made = np.concatenate([[0.0], np.cumsum(ranges.gradients)])
        self._gradient = np.array([*(ranges.gradient[cut] for cut in range(size)), 0], dtype=np.float64)
        self._steps = np.full(size, 2.0**-12)
        names = ["waits", "held", "host", "back", self._peak]
        names += ["again"] * handling.recomputed + ["between", "inputs"] * handling.split
        self._names = tuple(names)
        self._at: list[PartialChoices] = []
        """Labels at each cut, sorted by first layer."""
        firsts = [first for first in (range(size) if firsts is None else sorted(firsts)) if may[first]]
        ends: list[PartialChoices] = []
        copies = Copies(self._equal_ranges(within, firsts), self._states)
        for cut in range(size + 1):
            (copied, copied_ends), new = copies.up_to(cut, self._steps, (self._at, ends))
            some = [self._reached(cut, new)] if may[cut] and any(map(len, self._at)) else []
            if handling.at_once:
                kept = [choices[choices.whole[WHOLE.index("kind")] == KINDS.index(KEEP)] for choices in some]
                fewest = [self._fewer(choices) for choices in kept if len(choices)]
                ends.append(by_first([*copied_ends, *fewest, self._empty(cut, 0)]))
            fewest = [self._fewer(choices) for choices in some if len(choices)]
            self._at.append(by_first([*copied, *fewest, self._empty(cut, int(cut in firsts))]))
            copies.note(self._at[-1], self._steps)
        self._finished = Finished.of(
            [
                self._of_end(cut, [first for first in firsts if first < cut and may[cut]], choices)
                for cut, choices in enumerate(ends or self._at)
            ]
        )
        made, statistics = np.zeros((2, size, size + 1))
        for first, cut in self._finished.ranges:
            made[first, cut], statistics[first, cut] = ranges.made(first, cut), ranges.statistics(first, cut)
        self.made, self.statistics = made, statistics
        """[L, L + 1], for every range that has a choice: bytes of the parameters' gradients, and of the running
        statistics of one call."""
        self._call, self._resident = self._call_seconds(), self._resident_bytes()

    def with_ranges(self, ranges: RangeBytes) -> IntervalSearch:
        """Return the same choices with the resident bytes of `ranges`, whose moments may be in the host tier."""
        search = copy.copy(self)
        search._ranges = ranges
        search._resident = search._resident_bytes()
        return search

    def with_blocks(self, calls: int, waiting_blocks: int) -> IntervalSearch:
        """Return the same choices for other numbers of calls and waiting blocks, which change only resident bytes."""
        search = copy.copy(self)
        search._handling = replace(self._handling, calls=calls, waiting_blocks=waiting_blocks)
        search._resident = search._resident_bytes()
        return search

    def searched(self, first: int, end: int) -> bool:
        """True where there are choices for a stage of layers first .. end-1."""
        return (first, end) in self._finished.places

    def cheapest(self, first: int, end: int, in_flight: int, budget: float) -> IntervalChoice | None:
        """Return the fastest choice for layers first .. end-1 as one stage, with at most `budget` bytes; ties are
        broken by fewer bytes. None where no choice fits; `least_bytes` returns the bytes needed.
        """
        place = self._of_range(first, end)
        labels = self._finished.labels[place]
        sizes, seconds, sums = self._bytes(in_flight, place), self._call[:, place], labels.sums
        fit = np.flatnonzero(sizes[0] <= budget)
        if not len(fit):
            return None
        best = fit[np.lexsort((sums.host[0, fit], sizes[0, fit], seconds[0, fit]))[0]]
        intervals = self._intervals(place.start + int(best), end)
        return IntervalChoice(
            intervals,
            float(seconds[0, best]),
            float(seconds[-1, sizes[-1] <= budget].min()),
            stage_bytes(self._ranges, first, end, intervals, in_flight, self._handling),
            int(sums.host[0, best]),
            float(labels.again[0, best]),
        )

    def least_bytes(self, first: int, end: int, in_flight: int) -> tuple[int, int]:
        """Return the fewest bytes of this stage's labels, and a bound for all choices; equal after an exact search."""
        sizes = self._bytes(in_flight, self._of_range(first, end))
        return int(sizes[0].min()), int(sizes[-1].min())

    def least(self, in_flight: int) -> Bytes:
        """Return the first number of `least_bytes` for all ranges: [L, L + 1], `NEVER` where there is none."""
        least = self._finished.least(self._bytes(in_flight)[:1])[0]
        exists = np.isfinite(least)
        return np.where(exists, np.where(exists, least, 0).astype(np.int64), NEVER)

    def seconds(self, in_flight: int, budget: float | Floats) -> tuple[Floats, Floats]:
        """Return the seconds of `cheapest` for all ranges, and their lower bounds, each [L, L + 1]; infinite where no
        label fits, or (bounds) no choice can fit. budget: one number for all ranges, or [L, L + 1].
        """
        seconds = self._least_fitting(self._bytes(in_flight), self._call, budget)
        return seconds[0], seconds[-1]

    def bounds(self, in_flight: int, budget: float | Floats, copied: Sequence[int], entering: Sequence[int]) -> Floats:
        """Return [L, L + 1]: a lower bound of the seconds of a call of layers first .. end-1 in any list that fits a
        rank; infinite where none fits. The arguments are those of `seconds`, and of `layerwise.Layerwise`.
        Bytes: a list with an O may take less than `stage_bytes`, which also counts the bytes that one waiting call
        moves. Counted here: of each waiting call the bytes that stay on the device, of the current call all that its F,
        R or B needs. Seconds: a simulated step may count fewer bytes for copies than are moved here, but of each
        interval at least the fraction `_counted`. Without copies, bytes and seconds are those of `seconds`.
        """
        handling = self._handling
        if handling.host_bandwidth is None:
            part, at_least = 1.0, handling
        else:
            part = self._counted(copied, entering)
            at_least = replace(handling, host_bandwidth=handling.host_bandwidth / max(part, 1e-12))
        sizes = self._bytes(in_flight, at_least=handling.later)[-1:]
        labels = self._finished.labels
        layer_seconds = self._own[labels.first, self._finished.ends]
        again, host = labels.again[-1:], labels.sums.host[-1:]
        if handling.copies_beside:
            seconds = combined_seconds(at_least, layer_seconds + again, host)
        else:  # labels were dropped by compute + copies; `part` of the copies is at most what a simulated step counts
            seconds = layer_seconds + part * combined_seconds(handling, again, host)
        return self._least_fitting(sizes, seconds, budget)[0]

    # -- the search

    def _counted(self, copied: Sequence[int], entering: Sequence[int]) -> float:
        """Return the least fraction, over all intervals, of the moved bytes that a simulated step counts; at most 1."""
        saved = np.concatenate([[0], np.cumsum(copied)])
        counted = {
            "offload": saved[None, :] - saved[:-1, None],
            "recompute+offload": np.broadcast_to(np.array(entering)[:-1, None], self._own.shape),
        }
        least = 1.0
        for kind, sizes in counted.items():
            taken = self._table.taken(kind)
            if kind in self._kinds and (moves := taken > 0).any():
                least = min(least, float((sizes[moves] / taken[moves]).min()))
        return least

    def _empty(self, cut: int, count: int) -> PartialChoices:
        """Return the label of a stage that begins at the cut; no label where `count` is 0."""
        state = self._states.number(cut, PrecedingSegments(), False)
        integers = np.repeat(np.array([[cut], [state], [_NONE_YET], [-1], [-1], [-1]]), count, axis=1)
        numbers = np.zeros((1 + len(self._names), 2 if self._most else 1, count))
        numbers[1 + self._names.index(self._peak)] = self._ranges.crossing[cut]
        return PartialChoices(integers, numbers, self._names)

    def _equal_ranges(self, within: NDArray[np.bool_], firsts: Sequence[int]) -> EqualRanges:
        size = self._ranges.num_layers
        used = [KINDS.index(kind) for kind in KINDS if kind in self._kinds]
        numbers = self._table.numbers[used].reshape(-1, size, size + 1)
        whether = within, self._table.again > 0
        at_cuts = [self._ranges.crossing, [self._table.kept(cut) for cut in range(size + 1)]]
        return EqualRanges.of(
            np.concatenate([numbers, np.array(whether, dtype=np.float64)]),
            np.array([self._own, self._table.again]),
            np.array(at_cuts, dtype=np.float64),
            np.isin(np.arange(size), firsts),
        )

    def _reached(self, end: int, new: NDArray[np.bool_]) -> PartialChoices:
        """Return all choices up to the cut, for `new` [L] first layers, that extend an earlier label by one segment."""
        kept, states = self._table.kept(end), self._states.columns()
        if not self._within[:end, end].any():
            return self._empty(end, 0)
        low = int(np.argmax(self._within[:end, end]))
        chosen_places = [np.flatnonzero(new[labels.first]) for labels in self._at[low:]]
        earlier = [labels[chosen] for labels, chosen in zip(self._at[low:], chosen_places, strict=True)]
        before, counts = joined(earlier), [len(labels) for labels in earlier]
        cuts, places = np.repeat(np.arange(low, end), counts), np.concatenate(chosen_places)
        layer_seconds = self._own[before.first, end]
        near, some = before.first >= low, []
        for kind, name in enumerate(KINDS):
            if name not in self._kinds:
                continue
            again, allowed = before.again, near
            phases: list[tuple[bool, int | None]] = [(False, None)]
            if _RECOMPUTES[kind]:
                again = again + self._table.again[cuts, end]
            if name == KEEP:
                allowed = near & ~states.keeps[before.state]
            elif self._handling.recomputed and _RECOMPUTES[kind] and kept:
                allowed, phases = near & (before.phase != _HAS_COME), [(False, _STILL_TO_COME), (True, _HAS_COME)]
            chosen = np.flatnonzero(allowed & (layer_seconds + again[-1] <= self._longest))
            if not len(chosen):
                continue
            old, segments = before[chosen], self._table.behind(kind, cuts[chosen], end)
            state = self._next_states(old, kind, end)
            for ready, phase in phases:
                integers = old.whole.copy()
                integers[1], integers[3:] = state, (cuts[chosen], places[chosen], np.full(len(chosen), kind))
                if phase is not None:
                    integers[2] = phase
                numbers = np.empty_like(old.numbers)
                numbers[0] = again[:, chosen]
                self._add(numbers[1:], old, segments, states.beside[:, old.state], end, ready)
                some.append(PartialChoices(integers, numbers, self._names))
        return joined(some) if some else self._empty(end, 0)

    def _next_states(self, old: PartialChoices, kind: int, end: int) -> NDArray[np.intp]:
        distinct, inverse = np.unique(old.state, return_inverse=True)
        kept = self._table.kept(end)
        behind = [self._states.behind(state, kind, end, kept) for state in distinct.tolist()]
        return np.array(behind, dtype=np.intp)[inverse]

    def _add(
        self, numbers: Floats, old: PartialChoices, segments: CallSegment, beside: Floats, end: int, ready: bool
    ) -> None:
        """Write the sums with one more segment to `numbers` [C, V, N]. The sum `_peak` is the largest peak of F, of B
        (W if backwards are split) and of the first B or W, each with the parameters' gradients of the segments so far.
        """
        sums = old.sums.behind(segments, SharedInputs(*beside * segments.kept), self._handling.later, ready)
        made = self._made[end] - self._made[old.first]
        usual = np.maximum(sums.forward, sums.weights if self._handling.split else sums.backward) + made
        for row, name in zip(numbers, self._names, strict=True):
            row[:] = np.maximum(getattr(sums, name), usual) if name == self._peak else getattr(sums, name)

    def _fewer(self, labels: PartialChoices) -> PartialChoices:
        states = self._states.columns()
        state = labels.state
        dominance = Dominance(states.family[state], states.keeps[state], states.outputs[state], labels.phase)
        columns = self._columns(labels)
        points = np.stack([column[0] - (name in ON_DEVICE) * dominance.outputs for name, column in columns], axis=1)
        names = [name for name, _ in columns]
        extremes = np.zeros((len(_EXTREMES) + 1, len(names)))
        extremes[0, 0] = 1.0
        extremes[1:, names.index(self._peak)] = 1.0
        extremes[1:, names.index("waits")] = _EXTREMES
        return fewer(
            labels, Thinning(points, extremes, dominance, self._most, self._steps).stand_ins(labels.first), dominance
        )

    def _columns(self, labels: PartialChoices) -> list[tuple[str, Floats]]:
        """Return the columns in which a label may be better than another label of its state, by names of `Sums`."""
        sums, handling = labels.sums, self._handling
        names, seconds = {"waits", self._peak, "back"}, labels.again
        if handling.host_bandwidth is not None and handling.copies_beside:
            names |= {"host"}
        else:
            seconds = combined_seconds(handling, labels.again, sums.host)
        if handling.later:
            names |= {"held", "host"}
        if handling.recomputed:
            names |= {"again"}
        if handling.split:
            names |= {"between", "inputs"}
        return [("", seconds), *((name, getattr(sums, name)) for name in sorted(names))]

    # -- the answers

    def _of_end(self, end: int, firsts: Sequence[int], labels: PartialChoices) -> PartialChoices:
        """Return the finished choices up to a cut, by their first layers."""
        if not self._table.kept(end):  # frozen layers: nothing is kept, whatever the intervals
            some = []
            for first in sorted(firsts):
                empty = self._empty(first, 1)
                most = self._made[end] - self._made[first] + self._ranges.bare(first, end)
                peak = empty.numbers[1 + self._names.index(self._peak)]
                np.maximum(peak, most, out=peak)
                some.append(empty)
            return joined([*some, self._empty(end, 0)])
        return labels[(labels.phase != _STILL_TO_COME) & (labels.first < end)]

    def _of_range(self, first: int, end: int) -> slice:
        if (first, end) not in self._finished.places:
            raise CapslogError(
                f"no stage of layers {first} to {end - 1} was searched; name {first} among the firsts, and both it and "
                f"{end} among the borders"
            )
        return self._finished.places[first, end]

    def _least_fitting(self, sizes: Floats, seconds: Floats, budget: float | Floats) -> Floats:
        """Return [V, L, L + 1]: the least of `seconds` [V, N] over the finished choices within the budget."""
        first, ends = self._finished.labels.first, self._finished.ends
        most = budget if np.ndim(budget) == 0 else np.asarray(budget)[first, ends]
        return self._finished.least(np.where(sizes <= most, seconds, np.inf))

    def _bytes(self, in_flight: int, place: slice = slice(None), at_least: bool = False) -> Floats:
        """Return `tables.stage_bytes` of finished choices, [V, N]; `at_least` has the same meaning there."""
        labels, ends, handling = self._finished.labels[place], self._finished.ends[place], self._handling
        made, always, sums = self.made[labels.first, ends], self._resident[labels.first, ends], labels.sums
        actions = sums.back + self._gradient[ends]
        for more in (sums.again, sums.inputs):  # 0 where no list has an R, or an I
            actions = np.maximum(actions, more)
        most = np.maximum(getattr(sums, self._peak), actions + made)
        others = others_bytes(handling, in_flight, sums.waits, sums.held, sums.host, handling.split * sums.between)
        others = (in_flight - 1) * sums.waits if at_least else others
        total: Floats = always + others + most
        return total

    def _resident_bytes(self) -> Floats:
        """Return [L, L + 1]: for every range that has a choice, the bytes held beside its calls."""
        resident = self._handling.calls * self.statistics + self._handling.waiting_blocks * self.made
        ranges = self._ranges
        for first, cut in self._finished.ranges:  # cached in `ranges`, for searches with another handling
            resident[first, cut] += resident_bytes(ranges, first, cut)
        return resident

    def _call_seconds(self) -> Floats:
        """Return [V, N]: seconds of one call of each finished choice."""
        labels, ends = self._finished.labels, self._finished.ends
        layer_seconds = sum(row[ends] - row[labels.first] for row in (self._seconds.forward, self._seconds.backward))
        seconds: Floats = combined_seconds(self._handling, layer_seconds + labels.again, labels.sums.host)
        return seconds

    def _intervals(self, number: int, end: int) -> tuple[MemoryInterval, ...]:
        """Return the intervals of a finished label, traced back from its last segment."""
        intervals: list[MemoryInterval] = []
        labels, source, parent, of_kind = (
            self._finished.labels,
            *(WHOLE.index(name) for name in ("source", "parent", "kind")),
        )
        while (before := int(labels.whole[source, number])) >= 0:
            if (kind := KINDS[labels.whole[of_kind, number]]) != KEEP:
                intervals.append(MemoryInterval(before, end, kind))
            labels, number, end = self._at[before], int(labels.whole[parent, number]), before
        return tuple(reversed(intervals))


def resident_bytes(ranges: RangeBytes, first: int, end: int) -> int:
    """Return the bytes that a stage of layers first .. end-1 always holds; computed once per profile."""
    key = "resident", first, end, ranges.moments_wait
    resident: int = ranges.once(key, functools.partial(ranges.resident, range(first, end)))
    return resident


def _holding_at_most(ranges: RangeBytes, most: float) -> NDArray[np.bool_]:
    """Return [L, L + 1]: True for ranges of which no part holds more than `most` bytes beside its calls."""
    size = ranges.num_layers
    light = np.ones((size, size + 1), dtype=np.bool_)
    if most < np.inf:
        last = size
        for first in reversed(range(size)):
            while last > first and resident_bytes(ranges, first, last) > most:
                last -= 1
            light[first, last + 1 :] = False
    return light
