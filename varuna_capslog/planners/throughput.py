"""Planner `throughput`: finds the cut list with the smallest step time among those that fit the memory.

Dynamic programming gives a lower bound of the step time of every cut list that fits, and the simulator gives the step
time of a list; both are exact. The search is a heuristic: a beam, then local changes of its best list and of other
planners' lists. Its result is `Fastest.proven` where no list that was dropped can be faster, by the bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from varuna_capslog.memory.costs import NEVER, RangeCosts, StageCosts
from varuna_capslog.planners.baselines import varuna_cuts
from varuna_capslog.planners.exact import exact_cuts
from varuna_capslog.planners.seconds import LayerSeconds, StepPlayer, step_player
from varuna_capslog.schedules import ALWAYS_RECOMPUTE, RunShape, in_flight_limits

__all__ = ["Fastest", "fastest_cuts", "least_step", "pareto_front", "steady_cuts"]

Floats = NDArray[np.float64]
Cuts = NDArray[np.intp]

_SAME = 1e-9
"""Relative difference up to which two step times count as equal."""

_NARROW = 64
"""Width up to which the search is quick: one beam, then few changes."""

_HASTY_CHANGES, _CHANGES = 3, 1000
"""Most changes of the best list, in a quick search and otherwise."""

_LONGEST_MOVE = 12
"""Most neighbouring cuts that move together."""

_LOWEST = (128, 1024)
"""Numbers of cut lists with the lowest bounds that `least_step` examines; the second if the first are too few."""

_ORDER_KNOWN = ("1f1b", "1f1b-star", "varuna")
"""Schedules whose step `_CutSearch.least_played` bounds."""


@dataclass(frozen=True)
class Fastest:
    """Best cut list; its simulated step; a bound: no cut list that fits takes less; bytes of its largest stage."""

    cuts: tuple[int, ...]
    step_seconds: float
    bound_seconds: float
    peak_bytes: int

    @property
    def proven(self) -> bool:
        """True where no cut list that fits is faster, to 1e-9 of the step time."""
        return self.step_seconds <= self.bound_seconds * (1 + _SAME)


def fastest_cuts(
    costs: StageCosts,
    seconds: LayerSeconds,
    run: RunShape,
    devices: int,
    capacities: Sequence[int] | None = None,
    speeds: Sequence[float] | None = None,
    width: int = 1024,
    extra: Sequence[Floats] | None = None,
) -> Fastest | None:
    """Return the cut list of `devices` stages, 1 <= devices <= L, with the smallest step time; None if none fits. Ties
    are broken by the smaller peak, then by the smaller list.

    run: of one pipeline; its number of microbatches must be known. capacities: usable bytes of the device of each
    stage; None: no limit. The bytes of a stage may depend on its position (`StageCosts`). speeds: of the device of each
    stage; its seconds are those of the profile divided by it. width: cut lists that the beam keeps; more take longer
    and are more reliable. Up to 64: a quick search. extra: for each stage, [L, L + 1]: seconds of its backwards, or
    input halves, beyond those of layers first .. end-1; infinite for ranges that cannot be this stage.
    """
    search = _CutSearch(costs, seconds, run, devices, capacities, speeds, extra)
    if not np.isfinite(search.step[0][0]):
        return None
    best: _Ranked | None = None
    bound = 0.0
    for kept, by_bound in ((min(width, 256), True), (width, False)) if width > _NARROW else ((width, False),):
        lists, _, dropped = search.beam(kept, np.inf if best is None else best.step, by_bound)
        best = search.best_of(lists, best)
        if best.step > dropped * (1 + _SAME):
            best = search.improved(best, _HASTY_CHANGES if width <= _NARROW else _CHANGES)
        bound = max(bound, min(dropped, best.step))
        if best.step <= bound * (1 + _SAME):
            break
    assert best is not None
    if best.step > bound * (1 + _SAME) and width > _NARROW:
        best = search.best_from_planners(best)
    return Fastest(tuple(int(cut) for cut in best.cuts), best.step, bound, best.peak)


def least_step(costs: StageCosts, seconds: LayerSeconds, run: RunShape, work: Sequence[Floats]) -> float:
    """Return a lower bound of the step seconds of every cut list, infinite where none fits. Where the order of the
    work is known, the cut lists with the lowest bounds are enumerated and played, and the bound is that of the others,
    or the shortest step of these if that is less.
    work: for each stage, [L, L + 1]: additional busy seconds of its device per microbatch, at any time of the step;
    infinite where layers first .. end-1 do not fit.
    """
    search = _CutSearch(costs, seconds, run, len(work), None, None, work, True)
    least = float(search.step[0][0])
    if run.schedule not in _ORDER_KNOWN or not np.isfinite(least):
        return least
    for width in _LOWEST:
        lists, of_lists, dropped = search.beam(width, np.inf, by_bound=True)
        shortest = float(np.maximum(of_lists, search.least_played(lists)).min())
        if shortest <= dropped:
            break
    return min(dropped, shortest)


def pareto_front(
    costs: StageCosts,
    seconds: LayerSeconds,
    run: RunShape,
    devices: int,
    capacities: Sequence[int] | None = None,
    width: int = 1024,
) -> list[Fastest]:
    """Return the cut lists that no other beats in both peak and step time, the smallest peak first; [] if none fits.

    Each point has a larger peak and a smaller step time than the point before. The last point is the result of
    `fastest_cuts`, the first has the smallest possible peak; `bound_seconds` holds for every cut list within its peak.

    Only limits at which the result may change are tried: the fastest list within a peak P stays the fastest for all
    limits from its own peak to P, so the next limit is one byte below its peak. The number of searches is that of the
    points, plus one for each tie, plus the last, which finds nothing.
    """
    usable = [NEVER - 1] * devices if capacities is None else list(capacities)
    limit = NEVER - 1
    points: list[Fastest] = []
    while True:
        point = fastest_cuts(costs, seconds, run, devices, [min(limit, most) for most in usable], width=width)
        if point is None:
            break
        points.append(point)
        limit = point.peak_bytes - 1
    front: list[Fastest] = []
    for point in reversed(points):  # from the smallest peak
        # A list with a smaller peak that is no slower dominates this list.
        if not front or point.step_seconds < front[-1].step_seconds:
            front.append(point)
    return front


def steady_cuts(
    costs: StageCosts, seconds: LayerSeconds, devices: int, capacities: Sequence[int] | None = None
) -> list[int] | None:
    """Return the cut list whose slowest stage takes the fewest seconds, for inference, where forwards follow each other
    without end; ties are broken by `exact_cuts`. None if none fits. costs: the same at every position.

    Bisection over the seconds of all ranges finds the least limit at which some cut list fits.
    """
    assert costs.position_free, "a stage of forwards holds the same at every place"
    work, range_bytes = seconds.of_ranges()[1], costs.matrix()
    limits, best = np.unique(work[range_bytes < NEVER]), None
    first, end = 0, len(limits)
    while first < end:
        middle = (first + end) // 2
        quick = RangeCosts(np.where(work > limits[middle] * (1 + _SAME), NEVER, range_bytes))
        cuts = exact_cuts(quick, devices, capacities)
        pairs = zip(quick.peaks(cuts), capacities or [NEVER - 1] * devices, strict=True)
        if all(peak <= most for peak, most in pairs):
            best, end = cuts, middle
        else:
            first = middle + 1
    return best


@dataclass(frozen=True)
class _Ranked:
    step: float
    peak: int
    cuts: Cuts


class _CutSearch:
    """Searches the cuts with the seconds of every stage at every position and their lower bounds. step, round_trip,
    work: [S + 1] rows of [L + 1], for stage s and layer l: lower bounds of the seconds that the stages s .. S-1 add
    where they hold layers l .. L-1; inf where none fits. step: from the beginning of stage s until these stages end
    (`_find_bounds`). round_trip: of one microbatch from stage s to the last and back. work: computation of the busiest
    of these stages. paces: for each stage, pairs (round trips, own calls) that must follow one another. anywhere: the
    seconds of `extra` may be spent at any time, and include all recomputation.
    """

    def __init__(
        self,
        costs: StageCosts,
        seconds: LayerSeconds,
        run: RunShape,
        devices: int,
        capacities: Sequence[int] | None,
        speeds: Sequence[float] | None,
        extra: Sequence[Floats] | None = None,
        anywhere: bool = False,
    ) -> None:
        self.costs, self.seconds, self.devices = costs, seconds, devices
        self.capacities, self.speeds = capacities, speeds
        self.num_microbatches = run.microbatches
        self.num_layers = costs.num_layers
        self.player: StepPlayer = step_player(run, devices, extra is not None)
        self._schedule = run.schedule
        self._limits = in_flight_limits(run.schedule, devices, self.num_microbatches, run.k)
        if anywhere and run.limits_by_plan:  # a plan may have more calls in flight
            self._limits = [self.num_microbatches] * devices
        self.paces = [_in_flight_bounds(run.schedule, self.num_microbatches, limit) for limit in self._limits]
        self._forward, self._both = seconds.of_ranges()
        self._trip, self._ahead, self._transfers = seconds.of_ways(run)
        self._extra = extra
        self._slows = (False, False, True) if anywhere else (True, *[not run.splits_backwards] * 2)
        self._fits = [self._fitting(stage) for stage in range(devices)]
        # Row behind the last stage: 0 where all layers are placed.
        nothing = np.where(np.arange(self.num_layers + 1) == self.num_layers, 0.0, np.inf)
        self.step: list[Floats] = [nothing] * (devices + 1)
        self.round_trip, self.work = list(self.step), list(self.step)
        self._find_bounds()

    def _fitting(self, stage: int) -> NDArray[np.bool_]:
        """Return [L, L + 1]: True where layers first .. end-1 may be this stage."""
        num_layers, devices = self.num_layers, self.devices
        first, end = np.arange(num_layers)[:, None], np.arange(num_layers + 1)[None, :]
        fits = (end > first) & (first >= stage) & (num_layers - end >= devices - 1 - stage)
        if self._extra is not None:
            fits &= np.isfinite(self._extra[stage])
        if stage == 0:
            fits &= first == 0
        if stage == devices - 1:
            fits &= end == num_layers
        if self.capacities is not None:
            fits &= self.costs.matrix(stage, devices) <= self.capacities[stage]
        return fits

    def stage_terms(self, stage: int, first: Cuts | slice) -> tuple[Floats, Floats, Floats, Floats, NDArray[np.bool_]]:
        """Return for stages that begin at `first`, each [.., L + 1]: the work of a step; the round trip of one
        microbatch with both transfers, and without; the delay of the stages behind; True where the stage fits.
        """
        sends = self.seconds.handover
        speed = 1.0 if self.speeds is None else self.speeds[stage]
        compute, trip, ahead = self._both[first], self._trip[first], self._ahead[first]
        call = trip
        if self._extra is not None:
            added = np.where(self._fits[stage][first], self._extra[stage][first], 0.0)
            compute = compute + added
            trip, ahead, call = (
                part + added * slow for part, slow in zip((trip, ahead, call), self._slows, strict=True)
            )
        compute = compute / speed
        recomputed_calls = self.player.forwards[stage] - self.num_microbatches if self._slows[0] else 0
        work = compute * self.num_microbatches + self._forward[first] * (recomputed_calls / speed)
        # Sending after the last backward is part of the way back.
        work = work + self.num_microbatches * sends
        work += (self.num_microbatches - 1) * sends[:-1][first][..., None]
        across = np.maximum(self.seconds.transfer, sends)
        trip = trip / speed + 2 * across
        ahead = ahead / speed + self._transfers * across
        return work, trip, call / speed, ahead, self._fits[stage][first]

    def least(self, stage: int, work: Floats, trip: Floats, call: Floats) -> Floats:
        """Return a lower bound of `step` at this stage, by its work, its link and its limit of calls in flight."""
        one_trip = trip + self.round_trip[stage + 1]
        by_limit = np.maximum.reduce([trips * one_trip + calls * call for trips, calls in self.paces[stage]])
        by_link = one_trip + (self.num_microbatches - 1) * self.seconds.transfer
        return np.maximum(work, np.maximum(by_limit, by_link))

    def _find_bounds(self) -> None:
        """Fill `step`, `round_trip` and `work` from the last stage to the first. O(S L^2) in S numpy steps.

        State       (s, l): layers l .. L-1 in the stages s .. S-1, timed from the beginning of stage s.
        Transition  (s + 1, m) -> (s, l) with l < m: stage s holds layers l .. m-1, if they fit its device.
        Cost        the largest of these times, which no schedule can avoid; w is the stage's forward and backward of
                    one microbatch and t the transfer over the cut behind it:
                      all its work, with recomputation and its own time of sending;
                      w + 2 t + the cost of (s + 1, m), since stage s + 1 cannot begin before the first forward has come
                      over, and its last gradient must come back (where backwards are split, it ends with weight halves:
                      the forward and t);
                      the link: w + 2 t + (M - 1) t + the shortest round trip of a microbatch behind;
                      the limit of K microbatches in flight: ceil(M / K) round trips, one after the other; and with
                      K < M the round trips of the first and the last microbatch, beside which at most K forwards and K
                      backwards of this stage are done, and the other M - K - 1 of each between the two;
                      of gpipe: a round trip, and M - 1 forwards and M - 1 backwards one after the other, since no
                      backward begins before the last stage has done all forwards.
                    Each rises with the cost behind it, so the smallest of (s, l) needs only the smallest of (s + 1, m):
                    the bound is the exact minimum of this cost over all cut lists that fit.
        """
        for stage in reversed(range(self.devices)):
            work, trip, call, ahead, fits = self.stage_terms(stage, slice(None))
            cost = np.maximum(self.least(stage, work, trip, call), ahead + self.step[stage + 1])
            for bound, part in (
                (self.step, cost),
                (self.round_trip, trip + self.round_trip[stage + 1]),
                (self.work, np.maximum(work, self.work[stage + 1])),
            ):
                bound[stage] = np.append(np.where(fits, part, np.inf).min(axis=1), np.inf)

    def beam(self, width: int, incumbent: float, by_bound: bool = False) -> tuple[Cuts, Floats, float]:
        """Return at most `width` cut lists [K, S], their bounds, and the bound of the best list that was dropped. Stage
        by stage, keep the partial lists with the smallest estimated step: the larger of their bound and of round trip +
        (M - 1) / M x the busiest stage's work, which is the step of a pipeline that never waits. by_bound: keep those
        with the smallest bound. Lists whose bound is not below the incumbent cannot improve it, and do not count as
        dropped.
        """
        num_microbatches = self.num_microbatches
        prefix = np.zeros((1, 0), dtype=np.intp)
        first = np.zeros(1, dtype=np.intp)
        passed, least, busiest = np.zeros(1), np.zeros(1), np.zeros(1)
        dropped = np.inf
        for stage in range(self.devices):
            work, trip, call, ahead, fits = self.stage_terms(stage, first)
            stage_bound = passed[:, None] + self.least(stage, work, trip, call)
            gone = passed[:, None] + ahead
            most = np.maximum(least[:, None], stage_bound)
            bound = np.maximum(most, gone + self.step[stage + 1])
            busy = np.maximum(busiest[:, None], work)
            period = np.maximum(busy, self.work[stage + 1]) / num_microbatches
            with np.errstate(invalid="ignore"):  # 0 x inf where nothing fits, which is not used
                promise = np.maximum(bound, gone + self.round_trip[stage + 1] + (num_microbatches - 1) * period)
            allowed = fits & (bound < incumbent)
            rows, ends = np.nonzero(allowed & np.isfinite(bound))
            if len(rows) > width:
                order = np.lexsort((ends, rows, bound[rows, ends], (bound if by_bound else promise)[rows, ends]))
                excluded = order[width:]
                dropped = min(dropped, float(bound[rows[excluded], ends[excluded]].min()))
                rows, ends = rows[order[:width]], ends[order[:width]]
            prefix = np.concatenate([prefix[rows], first[rows, None]], axis=1)
            first = ends
            passed, least, busiest = gone[rows, ends], most[rows, ends], busy[rows, ends]
        return prefix, least, dropped

    def least_played(self, lists: Cuts) -> Floats:
        """Return a lower bound of the step of each cut list [K, S], whatever recomputes and, under `1f1b-star`,
        whatever the limits in flight. Under `1f1b`, and under `varuna` where no stage but the last recomputes, the
        order of the work is known, and the bound is the step in which nothing recomputes. What else is used of the
        lists of these schedules is tested in `tests/planners/test_throughput.py`.
        """
        forward, backward, inputs, transfer, handover = self.seconds.of_cuts(lists)
        count, none, across = self.num_microbatches, np.zeros((len(lists), 1)), np.maximum(transfer, handover)
        both = forward + backward
        ahead = np.concatenate([none, np.cumsum(both[:, :-1] + 2 * across, axis=1)], axis=1)
        work = ahead + count * both
        # The first backward of stage j comes behind its first K forwards; all stages and links before it have done K.
        slowest = np.maximum.accumulate(np.maximum(forward[:, :-1], transfer), axis=1)
        waits = np.maximum(0.0, np.concatenate([none, slowest], axis=1) - forward)
        if self._schedule == "1f1b-star":
            return self._least_of_any_limits(ahead, work, waits)
        steps = self.player.step_seconds(forward, backward, inputs, transfer, handover)
        if self._schedule not in ALWAYS_RECOMPUTE:
            return steps
        recomputing = np.full(len(lists), np.inf)
        for stage, limit in enumerate(self._limits[:-1]):
            # The last stage that recomputes, except stage S-1, goes in rounds: `limit` forwards, then their backwards,
            # since behind each of these the next gradient is due. The stages behind it have no work between rounds.
            rounds = -(-count // limit)
            ways = work[:, stage:] + (rounds - 1) * (ahead[:, stage:] - ahead[:, stage, None])
            recomputing = np.minimum(recomputing, ways.max(axis=1))
        first = (work + waits * (np.array(self._limits) - 1)).max(axis=1)
        return np.minimum(steps, np.maximum(first, recomputing))

    def _least_of_any_limits(self, ahead: Floats, work: Floats, waits: Floats) -> Floats:
        """Return `least_played` under `1f1b-star`. A stage has time for 3 (S - 1 - s) + 1 forwards before its first
        gradient comes. If it runs only K of these first, then this stage or one before it has a limit of at most K, and
        every K-th microbatch takes its round trip after the one before.
        """
        count, least = self.num_microbatches, np.zeros(len(work))
        trips = ahead[:, -1] + (work[:, -1] - ahead[:, -1]) / count
        for stage in range(self.devices):
            most = min(count, 3 * (self.devices - 1 - stage) + 1)
            of_stage = work[:, stage] + (most - 1) * waits[:, stage]
            for limit in range(1, most):
                by_limit = ahead[:, stage] + (1 + (count - 1) // limit) * (trips - ahead[:, stage])
                filled = work[:, stage] + (limit - 1) * waits[:, stage]
                of_stage = np.minimum(of_stage, np.maximum(filled, by_limit))
            least = np.maximum(least, of_stage)
        return least

    def step_seconds(self, lists: Cuts) -> Floats:
        """Return the simulator's step time of each cut list [K, S]."""
        forward, backward, inputs, *links = self.seconds.of_cuts(lists, self.speeds)
        if self._extra is None:
            return self.player.step_seconds(forward, backward, inputs, *links)
        ends = np.concatenate([lists[:, 1:], np.full((len(lists), 1), self.num_layers)], axis=1)
        added = np.stack([extra[lists[:, stage], ends[:, stage]] for stage, extra in enumerate(self._extra)], axis=1)
        added = added if self.speeds is None else added / np.asarray(self.speeds)
        return self.player.step_seconds(forward, backward + added, inputs + added, *links)

    def best_of(self, lists: Cuts, best: _Ranked | None = None) -> _Ranked:
        """Return the best of the lists and of `best`."""
        if len(lists):
            steps = self.step_seconds(lists)
            near = lists[steps <= steps.min() * (1 + _SAME)]
            candidate = min((self._ranked(float(steps.min()), cuts) for cuts in near[:64]), key=_order)
            best = candidate if best is None else _better(candidate, best)
        assert best is not None
        return best

    def _ranked(self, step: float, cuts: Cuts) -> _Ranked:
        return _Ranked(step, max(self.costs.peaks([int(cut) for cut in cuts])), cuts)

    def improved(self, best: _Ranked, changes: int) -> _Ranked:
        """Move runs of neighbouring cuts by one or two layers as long as this shortens the step."""
        for _ in range(changes):
            lists = self._neighbours(best.cuts)
            better = self.best_of(lists, best)
            if better.step >= best.step * (1 - _SAME):
                return better
            best = better
        return best

    def best_from_planners(self, best: _Ranked) -> _Ranked:
        """Return the best of `best` and two improved lists, where they fit: the list with the smallest peak, and the
        list with equally many layers in each stage.
        """
        for cuts in (exact_cuts(self.costs, self.devices, self.capacities), varuna_cuts(self.costs, self.devices)):
            places = enumerate(zip(cuts, [*cuts[1:], self.num_layers], strict=True))
            if all(self._fits[stage][first, end] for stage, (first, end) in places):
                best = _better(self.improved(self.best_of(np.array([cuts], dtype=np.intp)), _CHANGES), best)
        return best

    def _neighbours(self, cuts: Cuts) -> Cuts:
        """Return every list that fits and has cuts i .. j moved by -2, -1, 1 or 2 layers."""
        stages = self.devices
        moves = [
            (begin, end, by)
            for begin in range(1, stages)
            for end in range(begin + 1, min(stages, begin + _LONGEST_MOVE) + 1)
            for by in (-2, -1, 1, 2)
        ]
        if not moves:
            return np.zeros((0, stages), dtype=np.intp)
        lists = np.repeat(cuts[None, :], len(moves), axis=0)
        for row, (begin, end, by) in zip(lists, moves, strict=True):
            row[begin:end] += by
        ends = np.concatenate([lists[:, 1:], np.full((len(lists), 1), self.num_layers)], axis=1)
        good = (lists >= 0).all(axis=1) & (ends > lists).all(axis=1)
        lists, ends = lists[good], ends[good]
        fits = np.ones(len(lists), dtype=bool)
        for stage in range(stages):
            fits &= self._fits[stage][lists[:, stage], ends[:, stage]]
        return lists[fits]


def _in_flight_bounds(schedule: str, count: int, limit: int) -> list[tuple[int, int]]:
    """Return lower bounds of a step of `count` microbatches, as (round trips, own calls); see `_find_bounds`."""
    paces = [(1 + (count - 1) // limit, 0)]
    if schedule == "gpipe":
        paces.append((1, count - 1))
    elif limit < count:
        paces.append((2, count - limit - 1))
    return paces


def _better(candidate: _Ranked, best: _Ranked) -> _Ranked:
    if candidate.step <= best.step * (1 + _SAME):
        return candidate if candidate.step < best.step * (1 - _SAME) else min(candidate, best, key=_order)
    return best


def _order(ranked: _Ranked) -> tuple[int, list[int]]:
    return ranked.peak, ranked.cuts.tolist()
