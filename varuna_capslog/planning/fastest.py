"""Plans of planners that choose cuts and memory intervals; for `budget`, the plan with the shortest simulated step."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.base.units import format_bytes
from varuna_capslog.config.defaults import STAGES_PER_RANK
from varuna_capslog.memory import AUTO, resolve
from varuna_capslog.memory.costs import NEVER, Headroom, StageCosts
from varuna_capslog.memory.range_bytes import RangeBytes
from varuna_capslog.planners import BUDGET, LAYERWISE, find_cuts
from varuna_capslog.planners.budget import BudgetSearch, kept_bound, kept_cuts, stages_bound
from varuna_capslog.planners.exact import fewest_devices
from varuna_capslog.planners.intervals import EXACT_LAYERS
from varuna_capslog.planners.layerwise import Intervals, Layerwise, StageChoice
from varuna_capslog.planners.seconds import Link
from varuna_capslog.planning.nearby import LOOPED, STARRED, WIDER, Cheapest, improved, limited, looped, weighings
from varuna_capslog.planning.playing import SAME, even_share_seconds, with_step_seconds
from varuna_capslog.planning.problem import Problem
from varuna_capslog.planning.verdict import check_devices, fold_plan, judge_by_fold, judge_ranks, prediction_gaps
from varuna_capslog.plans.parts import MemoryInterval, PlanStage, Units, ranges_of
from varuna_capslog.plans.plan import Plan
from varuna_capslog.profiles.conditions import UPDATE_RATE, why_few
from varuna_capslog.profiles.record import Profile
from varuna_capslog.schedules import RunShape
from varuna_capslog.schedules.shape import AUTO_SCHEDULE

__all__ = [
    "SCHEDULES_TRIED",
    "PlanOf",
    "all_away",
    "fastest_plan",
    "layerwise_plan",
    "least_seconds",
    "saying_what_fits",
    "schedule_bound",
]


# -- The search of planner `budget` for the shortest simulated step.
#
# `planners.budget` counts recomputation as a part of the backward; `planners.throughput` cuts for stages that
# recompute as a whole, which may happen while a rank waits. So the plans of both, and of `exact`, are folded and
# simulated as they would run, and the best plan is compared with a lower bound of the search space.


SCHEDULES_TRIED = ("1f1b", "zb-h1", "varuna", "gpipe")
"""Schedules to choose from where a run leaves its schedule open."""
_LONGEST: tuple[float, ...] = (1.75, 4.0, np.inf)
"""Factors on the seconds of a call of equal stages; the searches of a long chain leave out longer calls."""
_AS_CLOSE = 1.01
"""Where nothing fits, plans that need fewer bytes by at most this factor are not looked for."""

_SPARE = 1.125
"""Factor on the bytes that a stage may hold in a search (`_Candidates._most_held`)."""

_Key = tuple[str, tuple[tuple[int, Intervals, int | None], ...]]
"""Key of a plan: its schedule, and the first layer, the intervals and the limit in flight of each stage."""
PlanOf = Callable[[Sequence[StageChoice], RunShape], Plan]
"""Stages and a run -> their plan, not judged."""


def fastest_plan(problem: Problem, chain: Layerwise, plan_of: PlanOf, schedules: Sequence[str]) -> Plan:
    """Return the plan with the shortest simulated step among those that fit; ties are broken by the smaller peak. Where
    none fits, return the plan that lacks least. The plan states its step, a lower bound of its `search_space`, and
    whether it is proven to be the fastest there. `search_seconds` is checked between parts of the search, so that at
    least one plan is evaluated.

    chain: one pipeline with a known number of microbatches. Recomputation in its run matters only for the cuts of
        `throughput` and `exact`.
    schedules: to choose from; those for which the profile lacks data are left out if others remain. Those of
        `nearby.WIDER` are outside the search space: only some of their plans are evaluated.

    Raises CapslogError where the schedule splits backwards and the profile lacks their halves.
    """
    search = _Candidates(problem, chain, plan_of, schedules)
    all_fit = search.weigh_kept()
    search.weigh_cuts()
    if not all_fit and not search.is_settled:
        search.weigh_intervals()
    if not all_fit or chain.num_layers <= EXACT_LAYERS:
        search.weigh_nearby()
    search.weigh_wider(all_fit)
    return search.answer()


def schedule_bound(profile: Profile, chain: Layerwise, schedule: str) -> float:
    """Lower bound in seconds of the step of any plan under this schedule, whatever the memory and the devices' speeds;
    infinite where the schedule splits backwards and the profile lacks their halves.
    """
    assert chain.question is not None, "made by Layerwise.of_profile"
    if dataclasses.replace(chain.question.run, schedule=schedule).splits_backwards:
        try:
            chain.question.ranges.input_half(0, 1)
        except CapslogError:
            return np.inf
    costs = None if schedule == LOOPED else _costs_of(profile, chain.question.run, "1f1b", False)
    if costs is None:
        return even_share_seconds(profile, chain.question.run.microbatches, chain.stages)
    return kept_bound(chain.under(schedule), costs)


def _costs_of(profile: Profile, run: RunShape, schedule: str, recompute: bool) -> StageCosts | None:
    """Costs of stages by the memory model of a schedule; None where the profile lacks its inputs."""
    try:
        return resolve(AUTO, profile, dataclasses.replace(run, schedule=schedule, recompute=recompute))[1]
    except CapslogError:
        return None


@dataclass(frozen=True)
class _Weighed:
    """Evaluated plan, with the bytes that it lacks (0: it fits), its step in seconds and its peak."""

    lack: int
    step: float
    peak: int
    plan: Plan
    stages: tuple[StageChoice, ...]

    @property
    def rank(self) -> tuple[int, float, int]:
        return self.lack, self.step, self.peak


class _Candidates:
    """Search for the fastest plan. bound: lower bound in seconds of the search space, without the update."""

    def __init__(self, problem: Problem, chain: Layerwise, plan_of: PlanOf, schedules: Sequence[str]) -> None:
        assert chain.question is not None, "made by Layerwise.of_profile"
        profile, self.chain, self.plan_of = problem.profile, chain, plan_of
        self.profile, self.link, self.tier = profile, problem.link, problem.tier
        self.run, self.seconds = chain.question.run, chain.question.seconds
        self.schedules = schedules
        self.chains = {name: chain.under(name) for name in schedules if name not in WIDER} or {
            "1f1b": chain.under("1f1b")
        }
        self.end = problem.search_seconds and time.perf_counter() + problem.search_seconds
        self.best: _Weighed | None = None
        self._best_asked: _Weighed | None = None
        """Best plan of the requested schedules."""
        self.bound = 0.0
        self._update = _least_update(profile, chain.stages)
        self._fits_by_key: dict[_Key, bool] = {}
        """Plan -> True if it fits."""
        self._played: dict[_Key, Plan] = {}
        """Plans that were simulated but not yet judged."""
        self._fastest: dict[str, _Weighed] = {}
        """Schedule -> the fastest plan that fits."""
        self._searches: list[BudgetSearch] = []
        self._bounds: dict[str, float] = {}
        """Schedule -> lower bound in seconds of its plans, without the update."""
        self._fits_kept: set[str] = set()
        """Schedules whose fastest cuts of stages that keep everything fit."""
        self._kept: set[str] = set()
        """Schedules of `_fits_kept` whose step is the bound."""

    @property
    def is_over(self) -> bool:
        """True once the time of the search is up."""
        return self.end is not None and time.perf_counter() >= self.end

    @property
    def fits(self) -> bool:
        """True once a plan that fits is known."""
        return self.best is not None and not self.best.lack

    @property
    def is_settled(self) -> bool:
        """True once under every schedule either no plan is faster than the best, or the fastest cuts keep everything
        and fit, so that no interval gives a shorter step.
        """
        return all(name in self._fits_kept or self._is_slower(name) for name in self.chains)

    def _is_slower(self, schedule: str) -> bool:
        """Return True where, by its bound, no plan under this schedule is faster than the best plan."""
        best = self.best
        return best is not None and not best.lack and self._bounds.get(schedule, 0.0) + self._update >= best.step

    def weigh(self, stages: Sequence[StageChoice], schedule: str) -> bool:
        """Fold and simulate a plan, and keep it where it is the best. Return True if it fits."""
        key = _key(stages, schedule)
        if key not in self._fits_by_key:
            run = dataclasses.replace(self.run, schedule=schedule)
            plan = self.plan_of(stages, run)
            verdict = judge_by_fold(self.profile, plan, run, None, self.tier)
            if verdict.fits is None and len(self.chains) > 1 and not prediction_gaps(self.profile, run.microbatch_size):
                self.chains.pop(schedule, None)  # the profile lacks the halves of split backwards
                return False
            lack = verdict.shortfall.bytes if verdict.shortfall is not None else int(verdict.fits is False)
            self._fits_by_key[key] = not lack
            incumbent = self.best if schedule not in self.schedules else self._best_asked
            if lack and self.best is not None and incumbent is not None and lack > max(self.best.lack, incumbent.lack):
                return False
            played = self._played.pop(key, None) or with_step_seconds(self.profile, plan, run, self.link)
            self._keep(lack, verdict.peak_bytes or 0, played, stages, schedule)
        return self._fits_by_key[key]

    def _keep(self, lack: int, peak: int, played: Plan, stages: Sequence[StageChoice], schedule: str) -> None:
        """Update the best plan of all, of the requested schedules, and of this schedule among those that fit."""
        assert played.step_seconds is not None, "the profile has seconds"
        candidate = _Weighed(lack, played.step_seconds, peak, played, tuple(stages))
        if self.best is None or _better(candidate, self.best):
            self.best = candidate
        if schedule in self.schedules and (self._best_asked is None or _better(candidate, self._best_asked)):
            self._best_asked = candidate
        if not lack and (schedule not in self._fastest or _better(candidate, self._fastest[schedule])):
            self._fastest[schedule] = candidate

    def weigh_for_shorter(self, stages: Sequence[StageChoice], schedule: str) -> float:
        """Evaluate a plan, and return the shortest step of its schedule; infinite where the plan does not fit or is
        slower than that. A lower bound comes first, then the simulated step: it takes a third of the time of a fold,
        and most plans near a good plan are slower.
        """
        key, fastest = _key(stages, schedule), self._fastest.get(schedule)
        if fastest is not None and key not in self._fits_by_key:
            chain = self.chains.get(schedule)  # None: left out, since the profile lacks the halves of backwards
            if (
                key not in self._played
                and chain is not None
                and stages_bound(chain, stages) > fastest.step * (1 + SAME)
            ):
                return np.inf
            if key not in self._played:
                run = dataclasses.replace(self.run, schedule=schedule)
                self._played[key] = with_step_seconds(self.profile, self.plan_of(stages, run), run, self.link)
            step = self._played[key].step_seconds
            assert step is not None, "the profile has seconds"
            if step > fastest.step * (1 + SAME):
                return np.inf
        return self._fastest[schedule].step if self.weigh(stages, schedule) else np.inf

    def _costs(self, schedule: str, recompute: bool) -> StageCosts | None:
        return _costs_of(self.profile, self.run, schedule, recompute)

    def weigh_cuts(self) -> None:
        """Evaluate the cuts of `throughput` and `exact`, which treat all stages alike."""
        usable = None if min(self.chain.usable) >= NEVER - 1 else self.chain.usable
        for name in [name for name in self.chains if name not in self._kept]:
            run = dataclasses.replace(self.run, schedule=name)
            kinds: list[str | None] = ["recompute"] if run.recomputes else [None]
            if run.recomputes and run.stage_inputs == "host" and any(self.chain.moved):
                kinds.append("recompute+offload")
            costs = self._costs(name, run.recompute)
            if costs is None:
                continue
            for planner in ("throughput", "exact"):
                count, speeds = self.chain.stages, self.chain.speeds
                cuts = find_cuts(planner, self.profile, costs, run, count, usable, self.link, speeds)
                for kind in kinds:
                    if self.weigh_for_shorter(self._alike(cuts, kind), name) < np.inf:
                        break

    def weigh_kept(self) -> bool:
        """Evaluate the fastest cuts of stages that keep everything, under each schedule. Return True where all of them
        fit: then no interval gives a shorter step.
        """
        costs, fit, bounds = self._costs("1f1b", False), [], []
        if costs is None:
            return False
        for name, chain in list(self.chains.items()):
            cuts = kept_cuts(chain, costs)
            fits = self.weigh(self._alike(cuts, None), name)
            if fits:
                self._fits_kept.add(name)
            if name in self.chains:
                fit.append(fits)
                bounds.append(kept_bound(chain, costs))
                self._bounds[name] = bounds[-1]
                if fits and self._fastest[name].step <= (bounds[-1] + self._update) * (1 + SAME):
                    self._kept.add(name)
        self.bound = min(bounds)
        return all(fit)

    def weigh_intervals(self) -> None:
        """Evaluate the plans of `BudgetSearch`. In a long chain, a search leaves out long calls, and calls with which
        no plan is faster than the best so far. The next search has longer calls, where these may give a faster plan,
        or one that lacks less.
        """
        even = float(self.seconds.forward[-1] + self.seconds.backward[-1]) / self.chain.stages
        calls, searched, factors = self.run.microbatches, 0.0, _LONGEST
        if self.chain.num_layers <= EXACT_LAYERS:
            factors = (np.inf,)
        elif not self.fits and self._largest_layer > max(self.chain.usable):  # only what lacks least is looked for
            factors = _LONGEST[1:]
        for number, factor in enumerate(factors):
            longest, looks_closer = factor * even, factor > _LONGEST[0]
            if self.best is not None and self.fits:
                needed = self.best.step / calls
                longest = needed if number else min(longest, needed)
            if longest <= searched or self.is_over:
                return
            search = BudgetSearch(self.chain, longest, self._most_held() if looks_closer else np.inf)
            self._search(search, looks_closer)
            if self.fits and self.bound < longest * calls * (1 - SAME):  # no plan that was left out is better
                return
            if not self.fits and looks_closer and longest < np.inf and not self.is_over and self._none_closer(search):
                return
            searched = longest

    @property
    def _largest_layer(self) -> int:
        """Bytes of one microbatch at the layer that takes the most of all layers alone."""
        return max(self.chain.once(layer, layer + 1) for layer in range(self.chain.num_layers))

    def _none_closer(self, search: BudgetSearch) -> bool:
        """Return True where stages with longer calls than those of this search, which found none that fit, need at most
        `_AS_CLOSE` times fewer bytes, under any schedule.
        """
        lacks, bounds = zip(*(search.least_lack(chain) for chain in self.chains.values()), strict=True)
        usable = max(self.chain.usable)
        return usable + min(lacks) <= _AS_CLOSE * (usable + min(bounds))

    def _most_held(self) -> float:
        """Return the most bytes that a stage may hold in a plan that lacks no more than the best plan so far, with
        some spare: a search counts the bytes of a stage a few percent higher than the fold. Infinite if a plan fits.
        """
        if self.best is None or self.fits:
            return np.inf
        return _SPARE * (max(self.chain.usable) + self.best.lack)

    def weigh_nearby(self) -> None:
        """Evaluate plans near the best plan of every schedule whose bound is below the best step of all."""
        plans = weighings(self.chain)
        for number, candidate in enumerate(sorted(self._fastest.values(), key=lambda candidate: candidate.step)):
            assert self.best is not None, "one fits"
            if self.is_over or self.best.step <= (self.bound + self._update) * (1 + SAME):
                return
            name = candidate.plan.schedule
            assert name is not None, "every plan has one"
            if name in self._kept or self._is_slower(name):
                continue

            def weigh(stages: Sequence[StageChoice], name: str = name) -> float:
                return np.inf if self.is_over else self.weigh_for_shorter(stages, name)

            chain = self.chains[name]
            try:
                improved(chain, candidate.stages, candidate.step, weigh, self._cheapest(chain), plans // (number + 1))
            except CapslogError:
                if len(self.chains) == 1:
                    raise
                # other plans of this schedule split backwards, and the profile lacks the halves

    def weigh_wider(self, all_fit: bool) -> None:
        """Evaluate plans of the requested schedules of `WIDER`. all_fit: stages that keep everything fit under every
        schedule.
        """
        begun = self._best_asked is not None
        if begun and self.is_over:
            return
        if STARRED in self.schedules and not (begun and all_fit and not any(self.chain.transfer)):
            self._weigh_limited()
        costs = self._costs("1f1b", False) if LOOPED in self.schedules else None
        if costs is None or (begun and self.is_over):
            return
        run = dataclasses.replace(self.run, schedule=LOOPED)

        def judge(stages: Sequence[StageChoice]) -> Plan:
            return judge_by_fold(self.profile, self.plan_of(stages, run), run, None, self.tier)

        for stages in looped(self.chain, costs, judge):
            self.weigh(stages, LOOPED)

    def _weigh_limited(self) -> None:
        chain = self.chains["1f1b"] if "1f1b" in self.chains else self.chain.under("1f1b")
        base = self._fastest.get("1f1b") or self.best
        assert base is not None, "some plan was weighed"
        cheapest = self._cheapest(chain)
        for number, stages in enumerate(limited(self.profile, chain, base.stages, self.plan_of, cheapest, self.link)):
            fits = self.weigh(stages, STARRED)
            if (fits and number) or self.is_over:
                return

    def _cheapest(self, chain: Layerwise) -> Cheapest:
        """Return the lookup of the cheapest intervals in the searches so far, the latest search first."""

        def cheapest(stage: int, first: int, end: int, size: float, in_flight: int | None = None) -> Intervals | None:
            lists = (search.cheapest(chain, stage, first, end, size, in_flight) for search in reversed(self._searches))
            return next((intervals for intervals in lists if intervals is not None), None)

        return cheapest

    def _search(self, search: BudgetSearch, looks_closer: bool) -> None:
        """Search under every schedule, and evaluate each plan under all schedules. looks_closer: where no plan fits,
        evaluate what lacks least.
        """
        self._searches.append(search)
        bounds = []
        for name, chain in list(self.chains.items()):
            if name in self._kept:
                bounds.append(self._bounds[name])
                continue
            try:
                solution = search.stages(chain, looks_closer)
                bounds.append(search.bound_seconds(chain))
                self._bounds[name] = max(bounds[-1], self._bounds.get(name, 0.0))
            except CapslogError:
                if len(self.chains) == 1:
                    raise
                del self.chains[name]  # the profile lacks the halves of split backwards
                continue
            for schedule in list(self.chains) if solution is not None else ():
                for stages in (solution or (), [self._whole(stage) for stage in solution or ()]):
                    self.weigh_for_shorter(stages, schedule)
            if self.is_over:
                break
        if len(bounds) == len(self.chains):
            self.bound = max(self.bound, min(bounds))

    def answer(self) -> Plan:
        """Return the best plan, with the bound and whether the plan is proven to be the fastest."""
        assert self._best_asked is not None, "some plan was weighed"
        chain, best = self.chain, self._best_asked
        bound = self._bound_with(best.plan.schedule) + self._update
        if best.lack and self.is_over:
            note = "the search has ended by pipeline.search_seconds; with more time it may find a plan that fits"
            return dataclasses.replace(best.plan, step_seconds=None, notes=(note,))
        if best.lack or not np.isfinite(bound):
            return dataclasses.replace(best.plan, step_seconds=None)
        offloads = any(chain.moved) and chain.host_bandwidth is not None
        names = [*self.chains, *([best.plan.schedule] if best.plan.schedule in WIDER else [])]
        return dataclasses.replace(
            best.plan,
            bound_seconds=min(bound, best.step),
            proven=best.step <= bound * (1 + SAME),
            search_space=(
                f"all plans of one stage on each of {chain.stages} devices with activation checkpointing"
                f"{' and CPU offload' if offloads else ''} and schedule {' or '.join(names)}"
            ),
        )

    def _bound_with(self, schedule: str | None) -> float:
        """Bound of the search space, lowered if needed to hold for plans of this schedule too."""
        if schedule not in WIDER:
            return self.bound
        return min(self.bound, schedule_bound(self.profile, self.chain, schedule))

    def _alike(self, cuts: Sequence[int], kind: str | None) -> list[StageChoice]:
        """Stages of these cuts, each with one interval of this kind; None: without intervals."""
        return [
            self.chain.choice(first, end, () if kind is None else (MemoryInterval(first, end, kind),))
            for first, end in pairwise((*cuts, self.chain.num_layers))
        ]

    def _whole(self, stage: StageChoice) -> StageChoice:
        """Return a stage that recomputes layers as one interval: a whole stage can recompute before its backward."""
        if not any(part.recomputes for part in stage.intervals):
            return stage
        return self.chain.choice(stage.first, stage.end, (MemoryInterval(stage.first, stage.end, "recompute"),))


def _key(stages: Sequence[StageChoice], schedule: str) -> _Key:
    return schedule, tuple((stage.first, stage.intervals, stage.in_flight) for stage in stages)


def _better(candidate: _Weighed, incumbent: _Weighed) -> bool:
    if candidate.lack or incumbent.lack:
        return candidate.rank < incumbent.rank
    if abs(candidate.step - incumbent.step) <= SAME * incumbent.step:
        return candidate.peak < incumbent.peak
    return candidate.step < incumbent.step


def _least_update(profile: Profile, stages: int) -> float:
    """Lower bound in seconds of the slowest rank's update; 0 where the profile lacks the rate of updates."""
    rate, weights = profile.conditions.get(UPDATE_RATE), [layer.parameter_bytes for layer in profile.layers]
    if not isinstance(rate, (int, float)) or None in weights:
        return 0.0
    return float(rate) * sum(size or 0 for size in weights) / stages


# -- Choice of the layers whose optimizer states (moments) are in the host tier: as few bytes as the devices allow.
#
# For devices that are too small otherwise, a plan is searched with the moments of all layers in the host tiers. Then
# moments move back to devices that have room.


def all_away(plan: Plan) -> Plan:
    """Return the plan with the moments of all layers in the host tiers."""
    return dataclasses.replace(plan, stages=tuple(_away(stage, frozenset(stage.numbers)) for stage in plan.stages))


def with_room_used(profile: Profile, plan: Plan, run: RunShape, ranges: RangeBytes) -> Plan:
    """Move moments back to the devices as far as there is room, in a plan that fits with all moments there;
    the largest layers first, so that few copies remain. ranges: of the profile, with all moments on the device.
    """
    headroom, stages = Headroom.of(profile), list(plan.stages)
    for rank, fold in enumerate(fold_plan(profile, plan, run)):
        numbers = [number for number, stage in enumerate(stages) if stage.rank == rank]
        layers = frozenset(layer for number in numbers for layer in stages[number].numbers)
        limit, sizes, away = plan.ranks[rank].capacity_bytes, ranges.moments.of(layers, layers), layers
        usable = NEVER if limit is None else headroom.usable(limit)
        begun, peak = ranges.resident(layers, layers), max(fold.bytes, default=0)
        at_end = begun + ranges.update(layers, layers)
        for layer in sorted(sizes, key=lambda layer: -sizes[layer]):
            less = away - {layer}
            resident = ranges.resident(layers, less)
            # moments come back for the update at the end of the step, and add known bytes there
            end = fold.end_bytes + resident + ranges.update(layers, less) - at_end
            if max(peak + resident - begun, end) <= usable:
                away = less
        for number in numbers:
            stages[number] = _away(stages[number], away.intersection(stages[number].numbers))
    candidate = dataclasses.replace(plan, stages=tuple(stages))
    return candidate if judge_by_fold(profile, candidate, run).fits else plan


def _away(stage: PlanStage, layers: frozenset[int]) -> PlanStage:
    intervals = []
    for first, end in stage.layers:
        numbers = sorted(layers.intersection(range(first, end)))
        intervals += [MemoryInterval(*piece, "host") for piece in ranges_of(numbers)] if numbers else []
    return dataclasses.replace(stage, moments=tuple(intervals))


# -- The plan of `budget`, `dawnpiper` or `vpipe`. It has memory intervals, so it has the full form and is judged by the
#    bytes of its ranks (memory model `ranks`).


def layerwise_plan(problem: Problem, planner: str) -> Plan:
    """Return the plan of a planner of `LAYERWISE` for one pipeline of the problem, not judged yet.

    Where `budget` chooses the schedule, it gives a device several stages, which send more messages, only if the link
    has a bandwidth or latency. Nothing is offloaded where the host tier is the device's own memory, or has capacity 0.

    Raises CapslogError for seconds or runs that the profile lacks, and for more devices than layers.
    """
    profile, devices, run, link, tier = problem.profile, problem.width, problem.share, problem.link, problem.tier
    check_devices(devices, profile)
    begun = time.perf_counter()
    names = _schedules(run, link) if planner == BUDGET else (run.settled().schedule,)
    if names == (LOOPED,) and STAGES_PER_RANK * devices > profile.num_layers:
        raise CapslogError(
            f"{devices} devices with {STAGES_PER_RANK} stages each, but only {profile.num_layers} layers; every stage "
            f"holds at least one layer, so set devices lower, or choose schedule 1f1b{why_few(profile.conditions)}"
        )
    shape = dataclasses.replace(run, schedule="1f1b" if names[0] in WIDER else names[0])
    has_tier = tier.capacity != 0 and not tier.is_device(profile)
    chain = Layerwise.of_profile(profile, shape, devices, problem.usable, link, has_tier, problem.speeds)

    def plan_of(stages: Sequence[StageChoice], shape: RunShape) -> Plan:
        return Plan(
            profile.num_layers,
            tuple(
                PlanStage(
                    ((stage.first, stage.end),),
                    (number % devices,),
                    memory=stage.intervals,
                    seconds=stage.seconds,
                    in_flight=stage.in_flight,
                )
                for number, stage in enumerate(stages)
            ),
            Units(shape.num_microbatches, shape.microbatch_size, shape.num_blocks),
            shape.schedule,
            ranks=problem.devices[:devices],
            planner=planner,
            model=profile.model,
            profile_digest=profile.digest,
        )

    if planner == BUDGET:
        plan = fastest_plan(problem, chain, plan_of, names)
        if plan.step_seconds is None and has_tier and plan.fits is not True:
            remaining = problem.search_seconds and max(0.0, problem.search_seconds - (time.perf_counter() - begun))
            limited = dataclasses.replace(problem, search_seconds=remaining)
            plan = _with_waiting_moments(limited, chain, plan_of, names) or plan
    else:
        plan = plan_of(LAYERWISE[planner](chain), dataclasses.replace(run, schedule=names[0]))
    return dataclasses.replace(plan, search_seconds=time.perf_counter() - begun)


def _schedules(run: RunShape, link: Link) -> tuple[str, ...]:
    """The run's schedule, or where the run leaves it open, those from which `budget` chooses."""
    if run.schedule != AUTO_SCHEDULE:
        return (run.schedule,)
    loops = link.bandwidth is not None or link.latency_seconds > 0
    return (*SCHEDULES_TRIED, *(name for name in WIDER if loops or name != LOOPED))


def least_seconds(problem: Problem) -> float:
    """Lower bound in seconds of the step of planner `budget` for one pipeline, whatever the devices' memory and speeds.
    Takes some hundredths of a second.
    """
    run = problem.share
    shape = dataclasses.replace(run, schedule="1f1b")
    chain = Layerwise.of_profile(problem.profile, shape, problem.width, None, problem.link)
    return min(schedule_bound(problem.profile, chain, name) for name in _schedules(run, problem.link))


def _with_waiting_moments(problem: Problem, chain: Layerwise, plan_of: PlanOf, schedules: Sequence[str]) -> Plan | None:
    """Return the fastest plan with as few optimizer moments as possible in the host tier; where none fits, the plan
    that lacks least. None where the profile lacks the moments. Arguments as in `fastest_plan`.
    """
    assert chain.question is not None, "made by Layerwise.of_profile"
    ranges = chain.question.ranges
    if not ranges.moments.known:
        return None

    def away(stages: Sequence[StageChoice], shape: RunShape) -> Plan:
        return all_away(plan_of(stages, shape))

    profile, link = problem.profile, problem.link
    plan = fastest_plan(problem, chain.with_waiting_moments(), away, schedules)
    if plan.step_seconds is None:
        return plan
    run = dataclasses.replace(chain.question.run, schedule=plan.schedule or chain.question.run.schedule)
    plan = with_step_seconds(profile, with_room_used(profile, plan, run, ranges), run, link)
    notes: tuple[str, ...] = ()
    if link.host_bandwidth is None:
        notes = (
            "the copies of moments to the host tier and back are not counted in the step: no pipeline.host_bandwidth",
        )
    return dataclasses.replace(
        plan,
        proven=False if plan.proven else plan.proven,
        search_space=f"{plan.search_space}, optimizer states of some layers in host memory",
        notes=(*plan.notes, *notes),
    )


def saying_what_fits(profile: Profile, plan: Plan, run: RunShape) -> Plan:
    """Return a judged plan; where it lacks memory, a note says how many devices, or bytes on each, are enough."""
    sizes = [rank.bytes for rank in plan.ranks]
    if plan.fits is not False or plan.shortfall is None or None in sizes:
        return plan
    headroom = Headroom.of(profile)
    verdict = judge_ranks(plan, [size or 0 for size in sizes], headroom)
    if verdict is None or verdict.fits:  # the host tier lacks memory, not the devices
        return plan
    least = min(verdict.capacities)
    costs = resolve(AUTO, profile, dataclasses.replace(run, schedule="varuna"))[1]
    enough, count = fewest_devices(costs, headroom.usable(least)), profile.num_layers
    layer_bytes = [headroom.device(costs.stage_bytes(layer, layer + 1, layer, count)) for layer in range(count)]
    largest = max(range(count), key=lambda layer: layer_bytes[layer])
    why = f"layer {largest} ({profile.layers[largest].name}) alone needs {format_bytes(layer_bytes[largest])} there"
    # `exact` has a closed form; the plan's own planner would have to search for every number of devices
    way = "planner exact under schedule varuna"
    if enough is not None and enough > len(plan.ranks) + 1:
        way += f", and perhaps fewer with planner {plan.planner}"
    sentence = verdict.sentence(enough, why if layer_bytes[largest] > least else None, way)
    note = f"{sentence}; with {format_bytes(max(verdict.needed))} on every device this plan fits"
    return dataclasses.replace(plan, notes=(note,), shortfall=verdict.shortfall(enough))
