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

import copy
from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.memory.costs import NEVER, Bytes
from varuna_capslog.memory.range_bytes import RangeBytes
from varuna_capslog.memory.segments import Before, Beside, CallSegment
from varuna_capslog.planners.intervals.choice import (
    DEFAULT_HANDLING,
    Handling,
    IntervalChoice,
    combined_seconds,
    others_bytes,
    stage_bytes,
)
from varuna_capslog.planners.intervals.finished import Finished
from varuna_capslog.planners.intervals.labels import ON_DEVICE, WHOLE, Kin, Labels, Thinning, fewer, joined
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
        within = (self._own <= longest) & may[:-1, None] & may
        self._table = SegmentTable(ranges, seconds, handling.split, within, self._kinds)
        self._states = States(ranges, handling.later)
        self._peak = "first_weights" if handling.split else "first_backward"
        self._made = np.concatenate([[0.0], np.cumsum(ranges.gradients)])
        self._gradient = np.array([*(ranges.gradient[cut] for cut in range(size)), 0], dtype=np.float64)
        self._steps = np.full(size, 2.0**-12)
        names = ["waits", "held", "host", "back", self._peak]
        names += ["again"] * handling.recomputed + ["between", "inputs"] * handling.split
        self._names = tuple(names)
        self._at: list[Labels] = []
        """cut -> the labels there, by their first layers"""
        firsts = [first for first in (range(size) if firsts is None else sorted(firsts)) if may[first]]
        ends: list[Labels] = []
        for cut in range(size + 1):
            some = [self._reached(cut)] if may[cut] and any(map(len, self._at)) else []
            if handling.at_once:
                kept = [one[one.whole[WHOLE.index("kind")] == KINDS.index(KEEP)] for one in some]
                ends.append(joined([*(self._fewer(one) for one in kept if len(one)), self._empty(cut, 0)]))
            self._at.append(
                joined([*(self._fewer(one) for one in some if len(one)), self._empty(cut, int(cut in firsts))])
            )
        self._finished = Finished.of(
            [
                self._of_end(cut, [first for first in firsts if first < cut and may[cut]], one)
                for cut, one in enumerate(ends or self._at)
            ]
        )
        made, statistics = np.zeros((2, size, size + 1))
        for first, cut in self._finished.ranges:
            made[first, cut], statistics[first, cut] = ranges.made(first, cut), ranges.statistics(first, cut)
        self.made, self.statistics = made, statistics
        """[L, L + 1]: of every range that has a choice, bytes of the gradients of parameters, and of the running
        statistics of one call"""
        self._call, self._resident = self._call_seconds(), self._resident_bytes()

    def with_ranges(self, ranges: RangeBytes) -> IntervalFronts:
        """The same choices of layers of which other bytes are resident, since their moments wait in the host tier."""
        found = copy.copy(self)
        found._ranges = ranges
        found._resident = found._resident_bytes()
        return found

    def cheapest(self, first: int, end: int, in_flight: int, budget: float) -> IntervalChoice | None:
        """The fastest choice for a stage of layers first .. end-1 that takes at most `budget` bytes.

        Of equally fast ones it is one of the fewest bytes. None: nothing was found that fits; `least_bytes` says what
        would.
        """
        own = self._of_range(first, end)
        labels = self._finished.labels[own]
        sizes, seconds, sums = self._bytes(in_flight, own), self._call[:, own], labels.sums
        fit = np.flatnonzero(sizes[0] <= budget)
        if not len(fit):
            return None
        best = fit[np.lexsort((sums.host[0, fit], sizes[0, fit], seconds[0, fit]))[0]]
        intervals = self._intervals(own.start + int(best), end)
        return IntervalChoice(
            intervals,
            float(seconds[0, best]),
            float(seconds[-1, sizes[-1] <= budget].min()),
            stage_bytes(self._ranges, first, end, intervals, in_flight, self._handling),
            int(sums.host[0, best]),
            float(labels.again[0, best]),
        )

    def least_bytes(self, first: int, end: int, in_flight: int) -> tuple[int, int]:
        """The fewest bytes of all choices that were found for such a stage, and bytes below which none is.

        Both are the same where the search was exact.
        """
        sizes = self._bytes(in_flight, self._of_range(first, end))
        return int(sizes[0].min()), int(sizes[-1].min())

    def least(self, in_flight: int) -> Bytes:
        """The first number of `least_bytes` for all ranges: [L, L + 1], `NEVER` where there is none."""
        found = self._finished.least(self._bytes(in_flight)[:1])[0]
        there = np.isfinite(found)
        return np.where(there, np.where(there, found, 0).astype(np.int64), NEVER)

    def seconds(self, in_flight: int, budget: float | Floats) -> tuple[Floats, Floats]:
        """`cheapest` of all ranges without their intervals: [L, L + 1], seconds of layers first .. end-1, and bounds.

        Infinite where nothing was found that fits, and where nothing can fit. budget: of all, or [L, L + 1].
        """
        found = self._least_fitting(self._bytes(in_flight), self._call, budget)
        return found[0], found[-1]

    def bounds(self, in_flight: int, budget: float | Floats, copied: Sequence[int], entering: Sequence[int]) -> Floats:
        """[L, L + 1]: seconds of a call of layers first .. end-1 below which no list is that a rank can hold; infinite
        where it can hold none. The arguments are those of `seconds`, and of `layerwise.Layerwise`.

        A list with an O may take less than `stage_bytes` says of it: that counts what one waiting call moves as well.
        At least, each call in flight but the one at work holds what stays of it on the device, and the one at work
        all that its F, R or B needs. A simulated step may count fewer bytes for its copies than are moved here: for
        every interval at least the part that is the least of all intervals (`_counted`). Without copies both are the
        numbers of `seconds`.
        """
        handling = self._handling
        if handling.host_bandwidth is None:
            part, at_least = 1.0, handling
        else:
            part = self._counted(copied, entering)
            at_least = replace(handling, host_bandwidth=handling.host_bandwidth / max(part, 1e-12))
        sizes = self._bytes(in_flight, at_least=handling.later)[-1:]
        labels = self._finished.labels
        own = self._own[labels.first, self._finished.ends]
        again, host = labels.again[-1:], labels.sums.host[-1:]
        if handling.copies_beside:
            seconds = combined_seconds(at_least, own + again, host)
        else:  # what labels were left out by is the sum of both, of which the part is less than what is counted
            seconds = own + part * combined_seconds(handling, again, host)
        return self._least_fitting(sizes, seconds, budget)[0]

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
        state = self._states.number(cut, Before(), False)
        whole = np.repeat(np.array([[cut], [state], [_NONE_YET], [-1], [-1], [-1]]), count, axis=1)
        numbers = np.zeros((1 + len(self._names), 2 if self._most else 1, count))
        numbers[1 + self._names.index(self._peak)] = self._ranges.crossing[cut]
        return Labels(whole, numbers, self._names)

    def _reached(self, end: int) -> Labels:
        """All choices up to the cut that labels before it and one more segment make."""
        kept, states = self._table.kept(end), self._states.columns()
        low = int(np.argmax(self._own[:end, end] <= self._longest)) if end else 0
        there = self._at[low:]
        before, counts = joined(there), [len(one) for one in there]
        cuts, places = np.repeat(np.arange(low, end), counts), np.concatenate([*map(np.arange, counts)])
        own = self._own[before.first, end]
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
            chosen = np.flatnonzero(allowed & (own + again[-1] <= self._longest))
            if not len(chosen):
                continue
            old, segments = before[chosen], self._table.behind(kind, cuts[chosen], end)
            state = self._next_states(old, kind, end)
            for ready, phase in phases:
                whole = old.whole.copy()
                whole[1], whole[3:] = state, (cuts[chosen], places[chosen], np.full(len(chosen), kind))
                if phase is not None:
                    whole[2] = phase
                numbers = np.empty_like(old.numbers)
                numbers[0] = again[:, chosen]
                self._add(numbers[1:], old, segments, states.beside[:, old.state], end, ready)
                some.append(Labels(whole, numbers, self._names))
        return joined(some) if some else self._empty(end, 0)

    def _next_states(self, old: Labels, kind: int, end: int) -> NDArray[np.intp]:
        there, which = np.unique(old.state, return_inverse=True)
        kept = self._table.kept(end)
        behind = [self._states.behind(state, kind, end, kept) for state in there.tolist()]
        return np.array(behind, dtype=np.intp)[which]

    def _add(self, numbers: Floats, old: Labels, segments: CallSegment, beside: Floats, end: int, ready: bool) -> None:
        """Write the sums with one more segment to [C, V, N]. One of them, `_peak`, is the most of F, of B or W, and of
        the first B or W, all with the gradients of the parameters so far: each grows by these from segment to segment.
        """
        sums = old.sums.behind(segments, Beside(*beside * segments.kept), self._handling.later, ready)
        made = self._made[end] - self._made[old.first]
        usual = np.maximum(sums.forward, sums.weights if self._handling.split else sums.backward) + made
        for row, name in zip(numbers, self._names, strict=True):
            row[:] = np.maximum(getattr(sums, name), usual) if name == self._peak else getattr(sums, name)

    def _fewer(self, labels: Labels) -> Labels:
        states = self._states.columns()
        own = labels.state
        kin = Kin(states.family[own], states.keeps[own], states.outputs[own], labels.phase)
        columns = self._columns(labels)
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
                peak = one.numbers[1 + self._names.index(self._peak)]
                np.maximum(peak, most, out=peak)
                some.append(one)
            return joined([*some, self._empty(end, 0)])
        return labels[(labels.phase != _STILL_TO_COME) & (labels.first < end)]

    def _of_range(self, first: int, end: int) -> slice:
        """The finished choices of a range."""
        if (first, end) not in self._finished.places:
            raise CapslogError(
                f"no stage of layers {first} to {end - 1} was searched; name {first} among the firsts, and both it and "
                f"{end} among the borders"
            )
        return self._finished.places[first, end]

    def _least_fitting(self, sizes: Floats, seconds: Floats, budget: float | Floats) -> Floats:
        """[V, L, L + 1]: the fewest of the seconds [V, N] of finished choices that take no more than the budget."""
        first, ends = self._finished.labels.first, self._finished.ends
        most = budget if np.ndim(budget) == 0 else np.asarray(budget)[first, ends]
        return self._finished.least(np.where(sizes <= most, seconds, np.inf))

    def _bytes(self, in_flight: int, own: slice = slice(None), at_least: bool = False) -> Floats:
        """`choice.stage_bytes` of finished choices; at_least: every waiting call counts with what stays of it alone."""
        labels, ends, handling = self._finished.labels[own], self._finished.ends[own], self._handling
        made, always, sums = self.made[labels.first, ends], self._resident[labels.first, ends], labels.sums
        actions = sums.back + self._gradient[ends]
        for more in (sums.again, sums.inputs):  # 0 where no list has an R, or an I
            actions = np.maximum(actions, more)
        most = np.maximum(getattr(sums, self._peak), actions + made)
        others = others_bytes(handling, in_flight, sums.waits, sums.held, sums.host, handling.split * sums.between)
        others = (in_flight - 1) * sums.waits if at_least else others
        found: Floats = always + others + most
        return found

    def _resident_bytes(self) -> Floats:
        """[L, L + 1], of every range that has a choice: what is there beside its calls."""
        found = self._handling.calls * self.statistics + self._handling.waiting_blocks * self.made
        for first, cut in self._finished.ranges:
            found[first, cut] += self._ranges.resident(range(first, cut))
        return found

    def _call_seconds(self) -> Floats:
        """[V, N], of one call of each finished choice."""
        labels, ends = self._finished.labels, self._finished.ends
        own = sum(row[ends] - row[labels.first] for row in (self._seconds.forward, self._seconds.backward))
        found: Floats = combined_seconds(self._handling, own + labels.again, labels.sums.host)
        return found

    def _intervals(self, number: int, end: int) -> tuple[MemoryInterval, ...]:
        """The choice of a finished label, from its last segment to its first."""
        found: list[MemoryInterval] = []
        labels, source, parent, of_kind = (
            self._finished.labels,
            *(WHOLE.index(name) for name in ("source", "parent", "kind")),
        )
        while (before := int(labels.whole[source, number])) >= 0:
            if (kind := KINDS[labels.whole[of_kind, number]]) != KEEP:
                found.append(MemoryInterval(before, end, kind))
            labels, number, end = self._at[before], int(labels.whole[parent, number]), before
        return tuple(reversed(found))
