"""The cheapest memory intervals of every stage: one search for all ranges of layers, calls in flight and budgets.

State: before a cut, what `tables.States` says, and of a list with an R whether the segment that it runs again has come
(phase). A label is a choice for the layers from a first one up to the cut: its seconds, and its bytes as sums
(`memory.segments.Sums`) that grow from segment to segment. Transition: one more segment of any length and kind; a
segment of kind KEEP does not follow another one, since both would be one. Dominance: of two labels of one first layer,
cut and state, the one that is not better in any number is left out, as what may follow adds the same to both, or takes
the same maximum (`labels.Kin` says when this holds between two states). Cost at the end: `choice.combined_seconds`,
among the labels that fit.

With n labels per first layer and cut there are O(L^3 n) transitions, in 4 L array operations for all first layers
together.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.memory.costs import NEVER, Bytes
from varuna_capslog.memory.range_bytes import RangeBytes
from varuna_capslog.memory.segments import Before, Beside, CallSegment, Sums
from varuna_capslog.planners.intervals.choice import (
    DEFAULT_HANDLING,
    Handling,
    IntervalChoice,
    combined_seconds,
    others_bytes,
    stage_bytes,
)
from varuna_capslog.planners.intervals.labels import ON_DEVICE, Kin, Labels, Thinning, fewer, joined
from varuna_capslog.planners.intervals.tables import KINDS, SegmentTable, States
from varuna_capslog.planners.seconds import LayerSeconds
from varuna_capslog.plans.parts import INTERVAL_KINDS, KEEP, MemoryInterval

__all__ = ["DEFAULT_LABELS", "EXACT_LAYERS", "IntervalFronts"]

EXACT_LAYERS = 8
"""Chains of at most so many layers are searched exactly where nothing else is asked for."""
DEFAULT_LABELS = 64
"""Labels per first layer and cut of longer chains."""
_NONE_YET, _STILL_TO_COME, _HAS_COME = range(3)
"""Phases of a list with an R: no segment recomputes so far; some do, and the last one is still to come; it has come."""
_EXTREMES = (0.0, 1.0, 3.0, 7.0)
"""The choices of least bytes with so many other calls waiting are kept also where there are too many choices."""
_RECOMPUTES = [MemoryInterval(0, 1, kind).recomputes for kind in KINDS]

_MOST = ("forward", "backward", "first_backward", "weights", "first_weights")

Floats = NDArray[np.float64]


class IntervalFronts:
    """What any range of layers costs at least as one stage, by the calls in flight and the bytes that it may take.

    Args:
        ranges, seconds: of one profile.
        handling: what the lists do with their calls, and what copies cost.
        labels: how many to keep per first layer and cut; 0: all of them, so that every answer is exact. Default: all
            for chains of at most `EXACT_LAYERS` layers, else `DEFAULT_LABELS`.
        kinds: of memory intervals that may be used.
        firsts: first layers of the stages that will be asked for; default: all.
        longest: seconds of a call beyond which a stage is left out as if nothing fitted; default: none is.
        borders: cuts at which stages and intervals may begin and end; default: all. With `firsts`, one range of a long
            chain may be asked for again, exactly.

    Raises CapslogError where the profile does not tell the halves of split backwards.
    """

    def __init__(
        self,
        ranges: RangeBytes,
        seconds: LayerSeconds,
        handling: Handling = DEFAULT_HANDLING,
        labels: int | None = None,
        firsts: Collection[int] | None = None,
        kinds: Collection[str] = INTERVAL_KINDS,
        longest: float = np.inf,
        borders: Collection[int] | None = None,
    ) -> None:
        size = ranges.num_layers
        self._ranges, self._seconds, self._handling, self._kinds = ranges, seconds, handling, {KEEP, *kinds}
        self._most = (0 if size <= EXACT_LAYERS else DEFAULT_LABELS) if labels is None else labels
        _, self._own = seconds.of_ranges()
        self._longest = longest
        may = np.isin(np.arange(size + 1), range(size + 1) if borders is None else list(borders))
        self._table = SegmentTable(ranges, seconds, handling.split, (self._own <= longest) & may[:-1, None] & may)
        self._states = States(ranges, handling.later)
        self._peak = "first_weights" if handling.split else "first_backward"
        self._made = np.concatenate([[0.0], np.cumsum(ranges.gradients)])
        self._steps = np.full(size, 2.0**-12)
        self._at: list[Labels] = []
        """cut -> the labels there, by their first layers"""
        firsts = [first for first in (range(size) if firsts is None else sorted(firsts)) if may[first]]
        ends: list[Labels] = []
        for cut in range(size + 1):
            some = [self._reached(cut)] if may[cut] and any(map(len, self._at)) else []
            if handling.at_once:
                kept = [one[one.kind == KINDS.index(KEEP)] for one in some]
                ends.append(joined([*(self._fewer(one) for one in kept if len(one)), self._empty(cut, 0)]))
            self._at.append(
                joined([*(self._fewer(one) for one in some if len(one)), self._empty(cut, int(cut in firsts))])
            )
        there = ends or self._at
        self._finished = [
            self._of_end(cut, [first for first in firsts if first < cut and may[cut]], there[cut])
            for cut in range(size + 1)
        ]
        made, statistics, resident = np.zeros((3, size, size + 1))
        for first in firsts:
            for cut in (np.flatnonzero(may[first + 1 :]) + first + 1).tolist():
                if self._own[first, cut] > longest:
                    break
                made[first, cut] = ranges.made(first, cut)
                statistics[first, cut] = ranges.statistics(first, cut)
                resident[first, cut] = ranges.resident(range(first, cut))
        self.made, self.statistics = made, statistics
        """[L, L + 1]: of every range that was searched, bytes of the gradients of parameters, and of the running
        statistics of one call"""
        self._resident = resident + handling.calls * statistics + handling.waiting_blocks * made

    def cheapest(self, first: int, end: int, in_flight: int, budget: float) -> IntervalChoice | None:
        """The fastest choice for a stage of layers first .. end-1 that takes at most `budget` bytes.

        Of equally fast ones it is one of the fewest bytes. None: nothing was found that fits; `least_bytes` says what
        would.
        """
        labels = self._of_range(first, end)
        sizes, seconds = self._bytes(labels, end, in_flight), self._call_seconds(labels, end)
        fit = np.flatnonzero(sizes[0] <= budget)
        if not len(fit):
            return None
        best = fit[np.lexsort((labels.sums.host[0, fit], sizes[0, fit], seconds[0, fit]))[0]]
        intervals = self._intervals(labels, int(best), end)
        return IntervalChoice(
            intervals,
            float(seconds[0, best]),
            float(seconds[-1, sizes[-1] <= budget].min()),
            stage_bytes(self._ranges, first, end, intervals, in_flight, self._handling),
            int(labels.sums.host[0, best]),
            float(labels.again[0, best]),
        )

    def least_bytes(self, first: int, end: int, in_flight: int) -> tuple[int, int]:
        """The fewest bytes of all choices that were found for such a stage, and bytes below which none is.

        Both are the same where the search was exact.
        """
        sizes = self._bytes(self._of_range(first, end), end, in_flight)
        return int(sizes[0].min()), int(sizes[-1].min())

    def least(self, in_flight: int) -> Bytes:
        """The first number of `least_bytes` for all ranges: [L, L + 1], `NEVER` where there is none."""
        found = np.full((self._ranges.num_layers, self._ranges.num_layers + 1), NEVER, dtype=np.int64)
        for end, labels in enumerate(self._finished):
            if len(labels):
                begins = np.flatnonzero(np.diff(labels.first, prepend=-1))
                sizes = self._bytes(labels, end, in_flight)[0]
                found[labels.first[begins], end] = np.minimum.reduceat(sizes, begins)
        return found

    def seconds(self, in_flight: int, budget: float | Floats) -> tuple[Floats, Floats]:
        """`cheapest` of all ranges without their intervals: [L, L + 1], seconds of layers first .. end-1, and bounds.

        Infinite where nothing was found that fits, and where nothing can fit. budget: of all, or [L, L + 1].
        """
        found = np.full((2, self._ranges.num_layers, self._ranges.num_layers + 1), np.inf)
        budgets = np.broadcast_to(budget, found.shape[1:])
        for end, labels in enumerate(self._finished):
            if len(labels):
                sizes, seconds = self._bytes(labels, end, in_flight), self._call_seconds(labels, end)
                begins = np.flatnonzero(np.diff(labels.first, prepend=-1))
                fit = sizes <= budgets[labels.first, end]
                least = np.minimum.reduceat(np.where(fit, seconds, np.inf), begins, axis=1)
                found[:, labels.first[begins], end] = least[[0, -1]]
        return found[0], found[1]

    def bounds(self, in_flight: int, budget: float | Floats, copied: Sequence[int], entering: Sequence[int]) -> Floats:
        """[L, L + 1]: seconds of a call of layers first .. end-1 below which no list is that a rank can hold; infinite
        where it can hold none. The arguments are those of `seconds`, and of `layerwise.Layerwise`.

        A list with an O may take less than `stage_bytes` says of it: that counts what one waiting call moves as well.
        At least, each call in flight but the one at work holds what stays of it on the device, and the one at work
        all that its F, R or B needs. A simulated step may count fewer bytes for its copies than are moved here: for
        every interval at least the part that is the least of all intervals (`_counted`). Without copies both are the
        numbers of `seconds`.
        """
        found = np.full(self._own.shape, np.inf)
        budgets, handling = np.broadcast_to(budget, found.shape), self._handling
        if handling.host_bandwidth is None:
            part, at_least = 1.0, handling
        else:
            part = self._counted(copied, entering)
            at_least = replace(handling, host_bandwidth=handling.host_bandwidth / max(part, 1e-12))
        for end, labels in enumerate(self._finished):
            if not len(labels):
                continue
            sizes = self._bytes(labels, end, in_flight, handling.later)[-1]
            own, again = self._own[labels.first, end], labels.again[-1]
            if handling.copies_beside:
                seconds = combined_seconds(at_least, own + again, labels.sums.host[-1])
            else:  # what labels were left out by is the sum of both, of which the part is less than what is counted
                seconds = own + part * combined_seconds(handling, again, labels.sums.host[-1])
            begins = np.flatnonzero(np.diff(labels.first, prepend=-1))
            fit = np.where(sizes <= budgets[labels.first, end], seconds, np.inf)
            found[labels.first[begins], end] = np.minimum.reduceat(fit, begins)
        return found

    # -- the search

    def _counted(self, copied: Sequence[int], entering: Sequence[int]) -> float:
        """The least part of what an interval moves by these tables that a simulated step counts; at most 1."""
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

    def _empty(self, cut: int, count: int) -> Labels:
        """A stage that begins at the cut; `count` 0: none does."""
        ones, values = np.ones(count, dtype=np.intp), np.zeros((2 if self._most else 1, count))
        sums = Sums(*[values] * len(Sums._fields))
        sums = sums._replace(**{self._peak: values + self._ranges.crossing[cut]})
        state = self._states.number(cut, Before(), False)
        return Labels(ones * cut, ones * state, ones * _NONE_YET, -ones, -ones, -ones, values, sums)

    def _reached(self, end: int) -> Labels:
        """All choices up to the cut that labels before it and one more segment make."""
        kept, near = self._table.kept(end), [self._own[one.first, end] <= self._longest for one in self._at]
        before = joined([one[own] for one, own in zip(self._at, near, strict=True)])
        cuts = np.repeat(np.arange(end), [np.count_nonzero(own) for own in near])
        places = np.concatenate([np.flatnonzero(own) for own in near])
        keeps = np.array(self._states.keeps)[before.state]
        some = []
        for kind, name in enumerate(KINDS):
            if name not in self._kinds:
                continue
            allowed, ways = np.ones(len(before), dtype=np.bool_), [(False, before.phase)]
            if name == KEEP:
                allowed = ~keeps
            elif self._handling.recomputed and _RECOMPUTES[kind] and kept:
                allowed = before.phase != _HAS_COME
                ways = [(ready, np.full(len(before), phase)) for ready, phase in ((False, 1), (True, 2))]
            chosen = np.flatnonzero(allowed)
            if len(chosen):
                old, segments = before[chosen], self._table.behind(kind, cuts[chosen], end)
                state, again = self._next_states(old, kind, end), old.again
                if _RECOMPUTES[kind]:
                    again = again + self._table.again[cuts[chosen], end]
                own = cuts[chosen], places[chosen], np.full(len(chosen), kind), again
                some += [
                    Labels(old.first, state, phase[chosen], *own, sums=self._behind(old, segments, end, ready))
                    for ready, phase in ways
                ]
        if not some:
            return self._empty(end, 0)
        found = joined(some)
        return found[self._own[found.first, end] + found.again[-1] <= self._longest]

    def _next_states(self, old: Labels, kind: int, end: int) -> NDArray[np.intp]:
        there = np.unique(old.state).tolist()
        behind = np.zeros(there[-1] + 1, dtype=np.intp)
        behind[there] = [self._states.behind(state, kind, end, self._table.kept(end)) for state in there]
        return behind[old.state]

    def _behind(self, old: Labels, segments: CallSegment, end: int, ready: bool) -> Sums:
        """The sums with one more segment. One of them, `_peak`, is the most of F, of B or W, and of the first B or W,
        all with the gradients of the parameters so far: each grows by these from segment to segment.
        """
        beside = np.array(self._states.beside, dtype=np.float64)[old.state].T * segments.kept
        peak, zero = getattr(old.sums, self._peak), np.zeros_like(old.again)
        sums = old.sums._replace(**dict.fromkeys(_MOST, zero) | {self._peak: peak})
        sums = sums.behind(segments, Beside(*beside), self._handling.later, ready)
        made = self._made[end] - self._made[old.first]
        usual = np.maximum(sums.forward, sums.weights if self._handling.split else sums.backward) + made
        return sums._replace(**{self._peak: np.maximum(getattr(sums, self._peak), usual)})

    def _fewer(self, labels: Labels) -> Labels:
        states = self._states
        family, keeps, outputs = (
            np.array(column)[labels.state] for column in (states.family, states.keeps, states.outputs)
        )
        columns = self._columns(labels)
        kin = Kin(family, keeps, outputs.astype(np.float64), labels.phase)
        points = np.stack([column[0] - (name in ON_DEVICE) * kin.outputs for name, column in columns], axis=1)
        names = [name for name, _ in columns]
        extremes = np.zeros((len(_EXTREMES) + 1, len(names)))
        extremes[0, 0] = 1.0
        extremes[1:, names.index(self._peak)] = 1.0
        extremes[1:, names.index("waits")] = _EXTREMES
        return fewer(labels, Thinning(points, extremes, kin, self._most, self._steps).stand_ins(labels.first), kin)

    def _columns(self, labels: Labels) -> list[tuple[str, Floats]]:
        """All that makes one label better than another one of the same state, by the names of `Sums`."""
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

    def _of_end(self, end: int, firsts: Sequence[int], labels: Labels) -> Labels:
        """The finished choices up to a cut, by their first layers."""
        if not self._table.kept(end):  # frozen layers: nothing is kept, whatever the intervals
            some = []
            for first in sorted(firsts):
                one = self._empty(first, 1)
                most = self._made[end] - self._made[first] + self._ranges.bare(first, end)
                peak = np.maximum(getattr(one.sums, self._peak), most)
                some.append(replace(one, sums=one.sums._replace(**{self._peak: peak})))
            return joined([*some, self._empty(end, 0)])
        return labels[(labels.phase != _STILL_TO_COME) & (labels.first < end)]

    def _of_range(self, first: int, end: int) -> Labels:
        """The finished choices of a range."""
        found = self._finished[end]
        begin, behind = np.searchsorted(found.first, (first, first + 1))
        if begin == behind:
            raise CapslogError(
                f"no stage of layers {first} to {end - 1} was searched; name {first} among the firsts, and both it and "
                f"{end} among the borders"
            )
        return found[begin:behind]

    def _bytes(self, labels: Labels, end: int, in_flight: int, at_least: bool = False) -> Floats:
        """`choice.stage_bytes` of every label; at_least: every waiting call counts with what stays of it alone."""
        made, always = self.made[labels.first, end], self._resident[labels.first, end]
        handling, sums = self._handling, labels.sums
        out = 0 if end == self._ranges.num_layers else self._ranges.gradient[end]
        actions = [sums.again, sums.back + out, *([sums.inputs] if handling.split else [])]
        most = np.maximum(getattr(sums, self._peak), np.maximum.reduce(actions) + made)
        others = others_bytes(handling, in_flight, sums.waits, sums.held, sums.host, handling.split * sums.between)
        others = (in_flight - 1) * sums.waits if at_least else others
        found: Floats = always + others + most
        return found

    def _call_seconds(self, labels: Labels, end: int) -> Floats:
        own = sum(row[end] - row[labels.first] for row in (self._seconds.forward, self._seconds.backward))
        found: Floats = combined_seconds(self._handling, own + labels.again, labels.sums.host)
        return found

    def _intervals(self, labels: Labels, number: int, end: int) -> tuple[MemoryInterval, ...]:
        """The choice of a label, from its last segment to its first."""
        found: list[MemoryInterval] = []
        while (source := int(labels.source[number])) >= 0:
            if (kind := KINDS[labels.kind[number]]) != KEEP:
                found.append(MemoryInterval(source, end, kind))
            labels, number, end = self._at[source], int(labels.parent[number]), source
        return tuple(reversed(found))
