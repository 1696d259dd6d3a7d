"""Planner `budget`, the default: chooses cuts and memory intervals together, for the smallest step time that fits.

`intervals.IntervalSearch` finds the front of every range of layers: its undominated choices of intervals (no other is
better in seconds and in bytes). `IntervalSearch.cheapest` chooses for one stage, from its front and by its memory. The
seconds that intervals add to each range go to `throughput`, which searches the cuts. Bytes beside a stage's own calls,
such as messages on their way, follow only from its rank's fold: the next search reserves them, until all stages fit.
Nothing is offloaded where the cost of copies is unknown. Where every backward directly follows its forward (last stage
of 1F1B), a stage's last segment keeps its graph, and the others recompute in the backward (`Handling.at_once`).
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
from varuna_capslog.memory.range_bytes import RangeBytes
from varuna_capslog.planners.exact import exact_cuts
from varuna_capslog.planners.intervals import EXACT_LAYERS, Handling, IntervalSearch, again_seconds, resident_bytes
from varuna_capslog.planners.layerwise import Intervals, Layerwise, Question, StageChoice
from varuna_capslog.planners.throughput import fastest_cuts, least_step
from varuna_capslog.plans.parts import INTERVAL_KINDS, MemoryInterval
from varuna_capslog.schedules import Action, RunShape, StageGraph, backwards_at_once, make_schedule, schedule_of
from varuna_capslog.schedules.shape import ALWAYS_RECOMPUTE

__all__ = ["BudgetSearch", "budget_stages", "kept_bound", "kept_cuts", "stages_bound"]

LABELS = 32
"""Choices per first layer and cut that are kept in chains of more than `intervals.EXACT_LAYERS` layers."""
MOST_BORDERS = 64
"""Most cuts where stages and intervals may begin and end, in a chain of more than 1.5 times as many layers."""
_ROUNDS = 8
"""Most searches of the cuts; each reserves more bytes than the search before."""
_ALL_STAGES, _ALL_CALLS = 5, 40
"""Most stages, and most calls of all stages together, for which `_held_at_least` examines every list of a schedule."""
_RECOMPUTE = tuple(kind for kind in INTERVAL_KINDS if not MemoryInterval(0, 1, kind).offloads)


def budget_stages(chain: Layerwise) -> list[StageChoice]:
    """Return the stages in order; where nothing fits, the cuts and intervals that exceed the memory least. Raises
    CapslogError where the schedule splits backwards and the profile lacks their halves.
    """
    stages = BudgetSearch(chain).stages(chain)
    assert stages is not None, "no stage was too long"
    return stages


def kept_bound(chain: Layerwise, costs: StageCosts) -> float:
    """Return a lower bound of the step seconds under this chain's schedule, without a limit of memory."""
    assert chain.question is not None, "made by Layerwise.of_profile"
    nothing = [np.zeros((chain.num_layers, chain.num_layers + 1))] * chain.stages
    return least_step(costs, chain.question.seconds, chain.question.run, nothing)


def kept_cuts(chain: Layerwise, costs: StageCosts) -> list[int]:
    """Return the cuts of the shortest step of stages that keep all activations, without a limit of memory."""
    assert chain.question is not None, "made by Layerwise.of_profile"
    nothing = [np.zeros((chain.num_layers, chain.num_layers + 1))] * chain.stages
    seconds, run = chain.question.seconds, chain.question.run
    fastest = fastest_cuts(costs, seconds, run, chain.stages, speeds=chain.speeds, width=256, extra=nothing)
    assert fastest is not None, "there is no limit"
    return list(fastest.cuts)


def stages_bound(chain: Layerwise, stages: Sequence[StageChoice]) -> float:
    """Return a lower bound of the step seconds of these stages: the largest sum of a stage's calls, one forward of each
    stage before it (before its first call), and one backward of each (after its last call; counted only where gradients
    cross the cuts and backwards are not split). As in `BudgetSearch._work`, the last call may recompute nothing.
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
    """Searches one chain under several schedules, which share the interval searches of its stages. longest: most
    seconds of a stage's call. Longer stages are left out: a step with such a stage takes more than `longest` times the
    microbatches. most_bytes: stages that hold more at all times are left out, too; no plan that fits, or that lacks the
    fewest bytes, may have such a stage. borders: cuts of a long chain where stages and intervals may begin and end;
    None: all.
    """

    def __init__(self, chain: Layerwise, longest: float = np.inf, most_bytes: float = np.inf) -> None:
        assert chain.question is not None, "made by Layerwise.of_profile"
        self._chain, self.longest = chain, longest
        # where all layers together hold less, one table serves searches with and without waiting moments
        whole = chain.question.ranges.resident(range(chain.num_layers))
        self._most_bytes = most_bytes if most_bytes < whole else np.inf
        self.borders = _borders(chain)
        self._offloads = any(chain.moved) and chain.host_bandwidth is not None
        self._interval_searches: dict[tuple[bool, bool, bool], IntervalSearch] = {}
        self._options_by_schedule: dict[str, _StageOptions] = {}

    def stages(self, chain: Layerwise, closest: bool = True) -> list[StageChoice] | None:
        """Return the stages under this chain's schedule. Where no plan fits, return the stages that exceed the memory
        least; None if not `closest`, or where stages were left out without which the chain cannot be divided. Raises as
        `budget_stages` does.
        """
        options, reserved = self._options(chain), np.zeros(chain.stages, dtype=np.int64)
        seconds, run = options.question.seconds, options.question.run
        for _ in range(_ROUNDS):
            usable = [size - more for size, more in zip(options.usable, reserved.tolist(), strict=True)]
            extra = [options.extra(stage, size) for stage, size in enumerate(usable)]
            fastest = fastest_cuts(options, seconds, run, chain.stages, usable, chain.speeds, 256, extra)
            if fastest is None:
                break
            stages = options.stages(fastest.cuts, usable)
            if not any(stage.lack for stage in stages):
                return stages
            reserved += [stage.lack for stage in stages]
        if not closest or np.isinf(_least_excess(options.fewest, usable)):
            return None
        return options.stages(exact_cuts(options, chain.stages, usable), [0] * chain.stages)

    def least_lack(self, chain: Layerwise) -> tuple[float, float]:
        """Return the fewest bytes by which the fullest stage of a cut list exceeds its device, infinite without a list;
        and a lower bound for stages of any length: those of which `longest` may have left out choices count `_floors`.
        """
        options = self._options(chain)
        assert chain.question is not None, "made by Layerwise.of_profile"
        forward, both = options.question.seconds.of_ranges()
        longer = forward + both > self.longest
        floors = _floors(chain.question.ranges, chain.question.run)
        fewest = [np.where(longer, np.minimum(least, floors), least) for least in options.fewest]
        return _least_excess(options.fewest, options.usable), _least_excess(fewest, options.usable)

    def cheapest(
        self, chain: Layerwise, stage: int, first: int, end: int, size: float, in_flight: int | None = None
    ) -> Intervals | None:
        """Return the cheapest intervals for layers first .. end-1 as this stage, with at most `size` bytes by
        `intervals.stage_bytes`; None where none fit, or the range was left out. in_flight: calls; default: of `chain`.
        """
        if chain.seconds(first, end) > self.longest or (self.borders is not None and not {first, end} <= self.borders):
            return None
        search = self._options(chain).interval_searches[stage]
        if not search.searched(first, end):
            return None
        choice = search.cheapest(first, end, in_flight or chain.in_flight[stage], size)
        return None if choice is None else choice.intervals

    def bound_seconds(self, chain: Layerwise) -> float:
        """Return a lower bound of the step over all cuts and intervals for this schedule; infinite if no plan can fit.
        Each range as each stage counts the least seconds that the memory allows (`_work`), and `throughput.least_step`
        adds the time that no schedule can avoid for such stages, including transfers. Where backwards are split, and
        for long chains, the seconds that limited memory costs are not counted.
        """
        assert chain.question is not None, "made by Layerwise.of_profile"
        run = chain.question.run
        options = self._options(chain)
        if run.splits_backwards or self.borders is not None:
            return kept_bound(chain, options)
        held = _held_at_least(run.schedule, chain.stages, run.microbatches, run.k)
        work = [self._work(options, stage, *limits) for stage, limits in enumerate(held)]
        bound = least_step(options, options.question.seconds, run, work)
        return min(bound, run.microbatches * self.longest)

    def _work(
        self, options: _StageOptions, stage: int, in_flight: int, early: bool, last_at_once: bool
    ) -> NDArray[np.float64]:
        """Return [L, L + 1]: least seconds, beyond those of its layers, for which each call of a stage occupies its
        rank or the copies beside it. in_flight, early, last_at_once: of `_held_at_least`. The bound is admissible: by
        `IntervalSearch.bounds` no list that fits takes less, and a list fits only if the rank can hold `in_flight`
        calls at a forward and at a backward. Both come after the first backward, so the parameters' gradients exist.
        If they may come earlier (`early`), these gradients may not exist, nor the running statistics of later calls:
        the budget grows by their bytes, and by those of the sum of earlier blocks, which may not exist either.
        """
        run, usable = options.question.run, options.usable[stage]
        calls, search = run.microbatches, options.interval_searches[stage]
        budget = usable + _waiting_blocks(run) * search.made
        budget = budget + (search.made + (calls - in_flight) * search.statistics if early else 0.0)
        bound = search.bounds(in_flight, budget, options.chain.copied, options.chain.entering)
        _, both = options.question.seconds.of_ranges()
        return np.maximum(0.0, bound - both) * ((calls - last_at_once) / calls)

    def _options(self, chain: Layerwise) -> _StageOptions:
        assert chain.question is not None, "made by Layerwise.of_profile"
        run = chain.question.run
        if run.schedule not in self._options_by_schedule:
            at_once = _always_at_once(run.schedule, chain.stages, run.microbatches, run.k)
            last = at_once == [False] * (chain.stages - 1) + [True]
            searches = [
                self._search_of(chain.question, stage_at_once, last and stage_at_once) for stage_at_once in at_once
            ]
            least = [search.least(count) for search, count in zip(searches, chain.in_flight, strict=True)]
            self._options_by_schedule[run.schedule] = _StageOptions(chain, chain.question, searches, least)
        return self._options_by_schedule[run.schedule]

    def _search_of(self, question: Question, at_once: bool, last: bool) -> IntervalSearch:
        """Return the interval search of stages. at_once: every backward directly follows its forward; else none does.
        last: only ranges that can be the last stage are needed.
        """
        chain, run = self._chain, question.run
        key = at_once, run.splits_backwards, last
        if key not in self._interval_searches:
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
            arguments = handling, labels, firsts, kinds, (self.longest, self._most_bytes), self.borders
            waits = self._most_bytes < np.inf and question.ranges.moments_wait
            search = question.ranges.once(
                (IntervalSearch, seconds.forward.tobytes(), seconds.backward.tobytes(), *arguments, waits),
                lambda: IntervalSearch(question.ranges, seconds, *arguments),
            )
            self._interval_searches[key] = search.with_ranges(question.ranges)
        return self._interval_searches[key]


def _waiting_blocks(run: RunShape) -> int:
    """Return the number of gradient sums held beside the current sum, where no other pipeline holds the layers."""
    return min(1, run.num_blocks - 1)


def _borders(chain: Layerwise) -> frozenset[int] | None:
    """Return cuts of a long chain between which the shares of seconds and freed bytes are about equal; None: all."""
    count = chain.num_layers
    if count <= 1.5 * MOST_BORDERS:
        return None
    columns = np.array([chain.forward, chain.backward, chain.freed], dtype=np.float64)
    weights = (columns / np.maximum(columns.sum(axis=1, keepdims=True), 1e-300)).sum(axis=0)
    reached = np.concatenate([[0.0], np.cumsum(weights)])
    wanted = np.linspace(0.0, reached[-1], MOST_BORDERS + 1)[1:-1]
    return frozenset({0, count, *np.abs(reached[:, None] - wanted).argmin(axis=0).tolist()})


def _least_excess(fewest: Sequence[Bytes], usable: Sequence[int]) -> float:
    """Return the fewest bytes by which the fullest stage of a cut list exceeds its device; infinite without a list.
    fewest: [S], bytes of every range as each stage. O(S L^2).
    """
    excess = np.where(np.arange(len(fewest[0]) + 1) == 0, -np.inf, np.inf)
    for least, size in zip(fewest, usable, strict=True):
        stage = np.where(least < NEVER, least.astype(np.float64) - size, np.inf)
        excess = np.maximum(excess[:-1, None], stage).min(axis=0)
    return float(excess[-1])


def _floors(ranges: RangeBytes, run: RunShape) -> Bytes:
    """Return [L, L + 1]: a lower bound of `intervals.stage_bytes` of every range as a stage, whatever its intervals and
    its place; `NEVER` where there is no range. In a backward the stage holds its resident bytes, the running
    statistics, its parameters' gradients, and at each of its segments at least that segment's graph and work. Inputs in
    this graph may count in segments before it, but then these hold them. Of an offloaded segment, the inputs that only
    its graph needs are gone. Of all divisions of a range into segments, the one whose largest segment needs the fewest
    bytes counts. Other calls in flight count nothing, nor do split backwards, whose halves need less.
    """
    size = ranges.num_layers
    work, floors = np.zeros((size, size + 1), dtype=np.int64), np.full((size, size + 1), NEVER)
    if not run.splits_backwards:
        for first, end in itertools.combinations(range(size + 1), 2):
            if end == size or ranges.carries[end]:
                rest = ranges.saved(first, end) - ranges.staying(first, end) - ranges.moved(first, end)
                work[first, end] = ranges.backward(first, end).peak - max(0, rest)
    for end in range(1, size + 1):
        # largest[first, cut]: of the best division of layers first .. cut-1, and of the segment from the cut on
        largest = np.maximum(np.where(np.eye(end, dtype=np.bool_), 0, floors[:end, :end]), work[None, :end, end])
        floors[:end, end] = largest.min(axis=1)
    for first, end in itertools.combinations(range(size + 1), 2):
        lasting = run.microbatches * ranges.statistics(first, end)
        gradients = (1 + _waiting_blocks(run)) * ranges.made(first, end)
        floors[first, end] += resident_bytes(ranges, first, end) + lasting + gradients
    return floors


@functools.lru_cache(maxsize=256)
def _always_at_once(schedule: str, stages: int, calls: int, k: int) -> list[bool]:
    """Return for each stage True where every backward directly follows its forward."""
    rows = make_schedule(schedule, stages, calls, recompute=False, k=k)
    return [len(backwards_at_once(row)) == calls for row in rows]


@functools.lru_cache(maxsize=256)
def _held_at_least(schedule: str, stages: int, calls: int, k: int) -> list[tuple[int, bool, bool]]:
    """Return for each stage, over every list of the schedule: the fewest calls in flight; True where they may be early
    (`_in_flight`); True where only the last call's backward may directly follow its forward, and recompute nothing. A
    list of a schedule in `ALWAYS_RECOMPUTE` depends on which stages recompute. None has fewer calls in flight than the
    list in which all stages recompute, nor a direct backward except the last call's (`tests/planners/test_budget.py`).
    The truth values come from all these lists of a short step; for a long step they are True.
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
    """Return the most calls that a stage has in flight both at a forward and at a backward, after its first backward,
    and False. If the stage has more calls in flight at any other time, return their number, and True.
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
class _StageOptions(StageCosts):
    """Cheapest intervals of each range of layers as each stage. The methods of `StageCosts` return the fewest bytes.
    interval_searches: [S], of each stage. fewest: [S], the fewest bytes of every range as each stage.
    """

    chain: Layerwise
    question: Question
    interval_searches: Sequence[IntervalSearch]
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
    def usable(self) -> list[int]:
        """Bytes that each stage may hold, [S]; without a limit, one less than `NEVER`."""
        return [min(NEVER - 1, size) for size in self.chain.usable]

    def extra(self, stage: int, usable: int) -> NDArray[np.float64]:
        """Return [L, L + 1]: seconds of a call beyond those of its layers; infinite where the range does not fit."""
        _, both = self.question.seconds.of_ranges()
        seconds, _ = self.interval_searches[stage].seconds(self.chain.in_flight[stage], usable)
        return np.maximum(0.0, seconds - both)

    def stages(self, cuts: Sequence[int], usable: Sequence[int]) -> list[StageChoice]:
        """Return the stages of a cut list, each with the cheapest intervals that fit, or else with the fewest bytes."""
        chain, stages = self.chain, []
        for stage, (first, end) in enumerate(zip(cuts, [*cuts[1:], self.num_layers], strict=True)):
            budget = max(usable[stage], self.stage_bytes(first, end, stage))
            choice = self.interval_searches[stage].cheapest(first, end, chain.in_flight[stage], budget)
            assert choice is not None, "the fewest bytes fit into themselves"
            lack = max(0, chain.peak(stage, first, end, choice.intervals) - chain.usable[stage])
            stages.append(StageChoice(first, end, choice.intervals, choice.seconds, lack))
        return stages
