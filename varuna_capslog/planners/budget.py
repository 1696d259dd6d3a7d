"""The cuts and memory intervals of the smallest step time that fit, for a schedule and its limits in flight.

The cheapest intervals of every range of layers at every position of the pipeline (`intervals`) determine how much
longer a stage takes than its layers alone, or that it does not fit. With these seconds `throughput` searches the cuts.
Bytes beside a stage's own calls, such as messages on their way, are known only from the fold of its rank: a further
search reserves them on the device, until all stages fit. Nothing is offloaded where the cost of copies is unknown.

Where every backward directly follows its forward (on the last stage under 1F1B), the last segment of a stage keeps its
graph, and the others recompute in the backward: such a stage has intervals of its own (`Handling.at_once`).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from varuna_capslog.memory.costs import NEVER, Bytes, StageCosts
from varuna_capslog.planners.exact import exact_cuts
from varuna_capslog.planners.intervals import EXACT_LAYERS, Handling, IntervalSearch, again_seconds
from varuna_capslog.planners.layerwise import Intervals, Layerwise, Question, StageChoice
from varuna_capslog.planners.throughput import fastest_cuts, least_step
from varuna_capslog.plans.parts import INTERVAL_KINDS, MemoryInterval
from varuna_capslog.schedules import Action, RunShape, StageGraph, backwards_at_once, make_schedule, schedule_of
from varuna_capslog.schedules.shape import ALWAYS_RECOMPUTE

__all__ = ["BudgetSearch", "budget_stages", "kept_bound", "kept_cuts", "stages_bound"]

LABELS = 32
"""Choices per first layer and cut that are kept in chains of more than `intervals.EXACT_LAYERS` layers."""
PLACES = 64
"""Chains longer than 1.5 times this have cuts and interval borders at so many places at most."""
_ROUNDS = 8
"""Most searches with more bytes reserved each time."""
_ALL_STAGES, _ALL_CALLS = 5, 40
"""Most stages, and calls of all stages together, for which every list of a schedule whose lists vary is examined."""
_RECOMPUTE = tuple(kind for kind in INTERVAL_KINDS if not MemoryInterval(0, 1, kind).offloads)


def budget_stages(chain: Layerwise) -> list[StageChoice]:
    """Return the stages in order; where nothing fits, the cuts and intervals that exceed the memory least. Raises
    CapslogError where the schedule splits backwards and the profile lacks their halves.
    """
    stages = BudgetSearch(chain).stages(chain)
    assert stages is not None, "no stage was too long"
    return stages


def kept_bound(chain: Layerwise, costs: StageCosts) -> float:
    """Return a lower bound of the step under the schedule of this chain, whatever the memory."""
    assert chain.question is not None, "made by Layerwise.of_profile"
    nothing = [np.zeros((chain.num_layers, chain.num_layers + 1))] * chain.stages
    return least_step(costs, chain.question.seconds, chain.question.run, nothing)


def kept_cuts(chain: Layerwise, costs: StageCosts) -> list[int]:
    """Return the cuts of the shortest step of stages that keep everything, whatever the memory."""
    assert chain.question is not None, "made by Layerwise.of_profile"
    nothing = [np.zeros((chain.num_layers, chain.num_layers + 1))] * chain.stages
    seconds, run = chain.question.seconds, chain.question.run
    fastest = fastest_cuts(costs, seconds, run, chain.stages, speeds=chain.speeds, width=256, extra=nothing)
    assert fastest is not None, "there is no limit"
    return list(fastest.cuts)


def stages_bound(chain: Layerwise, stages: Sequence[StageChoice]) -> float:
    """Return a lower bound in seconds of the step of these stages: of each the work of its calls, the forwards of the
    stages before it, which come first, and their backwards, which come last where gradients cross the cuts and
    backwards are whole. As in `BudgetSearch._work`, a last call may recompute nothing.
    """
    assert chain.question is not None, "made by Layerwise.of_profile"
    ranges, seconds, run = chain.question.ranges, chain.question.seconds, chain.question.run
    at_once = _always_at_once(run.schedule, chain.stages, run.microbatches, run.k)
    held = _held_at_least(run.schedule, chain.stages, run.microbatches, run.k)
    least = before = behind = 0.0
    for stage, never, (_, _, last_at_once) in zip(stages, at_once, held, strict=True):
        forward, backward = (float(row[stage.end] - row[stage.first]) for row in (seconds.forward, seconds.backward))
        again = 0.0 if never else again_seconds(ranges, seconds, stage.first, stage.end, stage.intervals)
        work = run.microbatches * (forward + backward) + (run.microbatches - last_at_once) * again
        behind *= ranges.carries[stage.first]
        least = max(least, before + work + behind)
        before, behind = before + forward, 0.0 if run.splits_backwards else behind + backward
    return least


class BudgetSearch:
    """Searches one chain under several schedules, which share the cheapest intervals of its stages. longest: stages
    whose call takes more seconds are left out, so that no plan's step takes longer than such a stage's calls;
    default: no limit. most: stages that always hold more bytes are left out, too; larger than what every stage may hold
    in a plan that fits or lacks least. borders: cuts of a long chain where stages and intervals may begin and end;
    None: all.
    """

    def __init__(self, chain: Layerwise, longest: float = np.inf, most: float = np.inf) -> None:
        self._chain, self.longest, self._most = chain, longest, most
        self.borders = _borders(chain)
        self._offloads = any(chain.moved) and chain.host_bandwidth is not None
        self._fronts: dict[tuple[bool, bool, bool], IntervalSearch] = {}
        self._places_of: dict[str, _Places] = {}

    def stages(self, chain: Layerwise) -> list[StageChoice] | None:
        """Return the stages under this chain's schedule. Where nothing fits, return those that exceed the memory least,
        or None where stages were left out. Raises as `budget_stages` does.
        """
        places, reserved = self._places(chain), np.zeros(chain.stages, dtype=np.int64)
        seconds, run = places.question.seconds, places.question.run
        for _ in range(_ROUNDS):
            usable = [min(NEVER - 1, size) - more for size, more in zip(chain.usable, reserved.tolist(), strict=True)]
            extra = [places.extra(stage, size) for stage, size in enumerate(usable)]
            fastest = fastest_cuts(places, seconds, run, chain.stages, usable, chain.speeds, 256, extra)
            if fastest is None:
                break
            stages = places.stages(fastest.cuts, usable)
            if not any(stage.lack for stage in stages):
                return stages
            reserved += [stage.lack for stage in stages]
        if self.longest < np.inf or not places.can_divide:
            return None
        cuts = exact_cuts(places, chain.stages, usable)
        return places.stages(cuts, [0] * chain.stages)

    def cheapest(
        self, chain: Layerwise, stage: int, first: int, end: int, size: float, in_flight: int | None = None
    ) -> Intervals | None:
        """Return the cheapest intervals of layers first .. end-1 as this stage that take at most `size` bytes of its
        own; None where there are none, or such stages were left out. in_flight: calls; default: those of `chain`.
        """
        if chain.seconds(first, end) > self.longest or (self.borders is not None and not {first, end} <= self.borders):
            return None
        fronts = self._places(chain).fronts[stage]
        if not fronts.searched(first, end):
            return None
        choice = fronts.cheapest(first, end, in_flight or chain.in_flight[stage], size)
        return None if choice is None else choice.intervals

    def bound_seconds(self, chain: Layerwise) -> float:
        """Return a lower bound of the step over all cuts and intervals for this schedule; infinite if no plan can fit.
        Each range at each position counts at least the seconds of the cheapest list that the memory allows (`_work`),
        and `throughput.least_step` adds the time that no schedule can avoid for stages of such seconds, that on the
        links included. Where backwards are split, and for long chains, the cost of limited memory is not counted.
        """
        assert chain.question is not None, "made by Layerwise.of_profile"
        run = chain.question.run
        places = self._places(chain)
        if run.splits_backwards or self.borders is not None:
            return kept_bound(chain, places)
        held = _held_at_least(run.schedule, chain.stages, run.microbatches, run.k)
        work = [self._work(places, stage, *limits) for stage, limits in enumerate(held)]
        bound = least_step(places, places.question.seconds, run, work)
        return min(bound, run.microbatches * self.longest)

    def _work(
        self, places: _Places, stage: int, in_flight: int, early: bool, last_at_once: bool
    ) -> NDArray[np.float64]:
        """Return [L, L + 1]: least seconds for which every call of a stage occupies its rank, or the copies beside it,
        beyond the seconds of its layers; the other arguments are those of `_held_at_least`. Admissible: by
        `IntervalSearch.bounds` no list that fits takes less, and a list fits only if the rank can hold it at a forward
        and at a backward with so many calls in flight. Both come after the first backward, with gradients of parameters
        beside them. Where they may come earlier, the rank has more room for these gradients, and for the running
        statistics of calls not yet begun. The sum of earlier blocks may not exist yet.
        """
        run, usable = places.question.run, min(NEVER - 1, places.chain.usable[stage])
        calls, fronts = run.microbatches, places.fronts[stage]
        budget = usable + _waiting_blocks(run) * fronts.made
        budget = budget + (fronts.made + (calls - in_flight) * fronts.statistics if early else 0.0)
        bound = fronts.bounds(in_flight, budget, places.chain.copied, places.chain.entering)
        _, both = places.question.seconds.of_ranges()
        return np.maximum(0.0, bound - both) * ((calls - last_at_once) / calls)

    def _places(self, chain: Layerwise) -> _Places:
        assert chain.question is not None, "made by Layerwise.of_profile"
        run = chain.question.run
        if run.schedule not in self._places_of:
            at_once = _always_at_once(run.schedule, chain.stages, run.microbatches, run.k)
            last = at_once == [False] * (chain.stages - 1) + [True]
            fronts = [
                self._fronts_of(chain.question, stage_at_once, last and stage_at_once) for stage_at_once in at_once
            ]
            least = [stage_fronts.least(count) for stage_fronts, count in zip(fronts, chain.in_flight, strict=True)]
            self._places_of[run.schedule] = _Places(chain, chain.question, fronts, least)
        return self._places_of[run.schedule]

    def _fronts_of(self, question: Question, at_once: bool, last: bool) -> IntervalSearch:
        """Return the cheapest intervals of stages whose backwards all directly follow their forwards, or none of them.
        last: they are needed for the last stage alone.
        """
        chain, run = self._chain, question.run
        key = at_once, run.splits_backwards, last
        if key not in self._fronts:
            handling = Handling(
                recomputed=not at_once,
                later=self._offloads and not at_once,
                split=run.splits_backwards,
                calls=run.microbatches,
                waiting_blocks=_waiting_blocks(run),
                host_bandwidth=chain.host_bandwidth,
                copies_beside=chain.copies_beside,
                at_once=at_once,
            )
            seconds, firsts = question.seconds, None
            if last:
                _, layer_seconds = seconds.of_ranges()
                firsts = tuple(first for first in range(chain.num_layers) if layer_seconds[first, -1] <= self.longest)
            kinds = INTERVAL_KINDS if handling.later else _RECOMPUTE
            labels = None if chain.num_layers <= EXACT_LAYERS else LABELS
            arguments = handling, labels, firsts, kinds, (self.longest, self._most), self.borders
            waits = self._most < np.inf and question.ranges.moments_wait
            fronts = question.ranges.once(
                (IntervalSearch, seconds.forward.tobytes(), seconds.backward.tobytes(), *arguments, waits),
                lambda: IntervalSearch(question.ranges, seconds, *arguments),
            )
            self._fronts[key] = fronts.with_ranges(question.ranges)
        return self._fronts[key]


def _waiting_blocks(run: RunShape) -> int:
    """Return the gradient sums held beside the one being accumulated, where no other pipeline holds the layers."""
    return min(1, run.num_blocks - 1)


def _borders(chain: Layerwise) -> frozenset[int] | None:
    """Return cuts of a long chain between which the shares of seconds and freed bytes are about equal; None: all."""
    count = chain.num_layers
    if count <= 1.5 * PLACES:
        return None
    columns = np.array([chain.forward, chain.backward, chain.freed], dtype=np.float64)
    weights = (columns / np.maximum(columns.sum(axis=1, keepdims=True), 1e-300)).sum(axis=0)
    reached = np.concatenate([[0.0], np.cumsum(weights)])
    wanted = np.linspace(0.0, reached[-1], PLACES + 1)[1:-1]
    return frozenset({0, count, *np.abs(reached[:, None] - wanted).argmin(axis=0).tolist()})


@functools.lru_cache(maxsize=256)
def _always_at_once(schedule: str, stages: int, calls: int, k: int) -> list[bool]:
    """Return for each stage True where every backward directly follows its forward."""
    rows = make_schedule(schedule, stages, calls, recompute=False, k=k)
    return [len(backwards_at_once(row)) == calls for row in rows]


@functools.lru_cache(maxsize=256)
def _held_at_least(schedule: str, stages: int, calls: int, k: int) -> list[tuple[int, bool, bool]]:
    """Return for each stage, over every list of the schedule: the fewest calls in flight; True where they may be early
    (`_in_flight`); True where only the last call's backward may directly follow its forward, and recompute nothing. The
    lists of schedules that always recompute depend on the set of stages that do. None has fewer calls in flight than
    that in which all recompute, nor a direct backward except the last call's (`tests/planners/test_budget.py`). All
    else is looked up in all lists of short steps, and taken to be possible in long ones.
    """
    varies, graph = schedule in ALWAYS_RECOMPUTE, StageGraph.line(stages, calls)
    short = varies and stages <= _ALL_STAGES and stages * calls <= _ALL_CALLS
    recomputing = itertools.product((False, True), repeat=stages) if short else iter([(varies,) * stages])
    rows = zip(*(schedule_of(schedule, graph, again, k=k) for again in recomputing), strict=True)
    limits = []
    for lists in rows:
        of_lists = [_in_flight(row) for row in lists]
        at_once = [len(backwards_at_once(row)) for row in lists]
        unknown = varies and not short and at_once[0] < calls
        limits.append(
            (
                min(count for count, _ in of_lists),
                unknown or any(early for _, early in of_lists),
                unknown or any(0 < count < calls for count in at_once),
            )
        )
    return limits


def _in_flight(row: Sequence[Action]) -> tuple[int, bool]:
    """Return the calls that a stage has in flight both in a forward and in a backward behind the first backward, and
    False. Where more are in flight before that, return their number, and True.
    """
    count = most = forward = backward = 0
    begun = False
    for action in row:
        count += action.kind == "F"
        most = max(most, count)
        if begun and action.kind == "F":
            forward = max(forward, count)
        elif begun and action.kind in "BI":
            backward = max(backward, count)
        begun |= action.kind in "BI"
        count -= action.kind in "BI"
    both = min(forward, backward)
    return (both, False) if both == most else (most, True)


@dataclass(frozen=True)
class _Places(StageCosts):
    """Least cost of each range of layers at each position of the pipeline; as `StageCosts`, its fewest bytes.
    fronts: the cheapest intervals as each stage. fewest: [S], the fewest bytes of every range as each stage.
    """

    chain: Layerwise
    question: Question
    fronts: Sequence[IntervalSearch]
    fewest: Sequence[Bytes]
    position_free: ClassVar[bool] = False

    @property
    def num_layers(self) -> int:
        """L, the number of layers."""
        return self.chain.num_layers

    def matrix(self, stage: int = 0, stages: int = 1) -> Bytes:
        """Return the fewest bytes of every range as this stage."""
        return self.fewest[stage]

    def stage_bytes(self, first: int, end: int, stage: int = 0, stages: int = 1) -> int:
        """Return the fewest bytes of layers first .. end-1 as this stage."""
        return int(self.fewest[stage][first, end])

    @property
    def can_divide(self) -> bool:
        """True where some cut list has stages with choices only."""
        cuts = np.arange(self.num_layers + 1) == 0
        for least in self.fewest:
            cuts = ((least < NEVER) & cuts[:-1, None]).any(axis=0)
        return bool(cuts[-1])

    def extra(self, stage: int, usable: int) -> NDArray[np.float64]:
        """Return [L, L + 1]: seconds of a call beyond those of its layers; infinite where they do not fit."""
        _, both = self.question.seconds.of_ranges()
        seconds, _ = self.fronts[stage].seconds(self.chain.in_flight[stage], usable)
        return np.maximum(0.0, seconds - both)

    def stages(self, cuts: Sequence[int], usable: Sequence[int]) -> list[StageChoice]:
        """Return the stages of a cut list, with the cheapest intervals that fit, or else those of the fewest bytes."""
        chain, stages = self.chain, []
        for stage, (first, end) in enumerate(zip(cuts, [*cuts[1:], self.num_layers], strict=True)):
            most = max(usable[stage], self.stage_bytes(first, end, stage))
            choice = self.fronts[stage].cheapest(first, end, chain.in_flight[stage], most)
            assert choice is not None, "the fewest bytes fit into themselves"
            lack = max(0, chain.peak(stage, first, end, choice.intervals) - chain.usable[stage])
            stages.append(StageChoice(first, end, choice.intervals, choice.seconds, lack))
        return stages
