"""Candidate plans for a number of devices: replicas, stages and cuts, their bytes and the seconds of a step."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import numpy as np
from numpy.typing import NDArray

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.membership.recovery import Seat, speeds_of
from varuna_capslog.memory import AUTO, MEMORY_MODELS, NEVER, StageCosts, resolve
from varuna_capslog.memory.costs import Headroom, RangeCosts, raised
from varuna_capslog.planners import BUDGET, JOINT, PLANNERS
from varuna_capslog.planners.exact import exact_cuts, fewest_devices
from varuna_capslog.planners.fleet import waiting_blocks
from varuna_capslog.planners.seconds import LayerSeconds, Link, step_player
from varuna_capslog.planners.throughput import fastest_cuts
from varuna_capslog.planning.fastest import least_seconds
from varuna_capslog.planning.placed.whole_runs import GRAPH_SCHEDULES
from varuna_capslog.planning.playing import even_share_seconds, with_step_seconds
from varuna_capslog.planning.problem import Problem
from varuna_capslog.planning.registry import NOT_ASKED_ANEW, planner_named
from varuna_capslog.planning.simulation import UPDATE_RATE
from varuna_capslog.planning.solve import solve
from varuna_capslog.planning.verdict import HostMemory, judge_by_fold, with_stage_bytes
from varuna_capslog.plans.parts import PlanRank
from varuna_capslog.plans.plan import Plan
from varuna_capslog.profiles.record import Profile, with_beside
from varuna_capslog.schedules import RunShape

__all__ = ["BY_TIME", "NO_LIMIT", "TICK", "Budgeted", "Candidate", "LayoutCandidates", "neighbours"]


# -- candidates
#
# `placing` asks here for the quickest candidate that fits. All that does not depend on the present devices (memory
# costs, bounds, schedules, cuts) is cached, so that a change of membership only chooses. Pure; no torch.


Floats = NDArray[np.float64]
Speeds = tuple[float, ...] | None
"""Speed of each stage's device relative to the fastest, at most 1; None: all are equal."""

BY_TIME = ("throughput", BUDGET, JOINT)
"""Planners that consider seconds and capacities."""

_NARROW = 32
"""Beam width of planner `throughput`: narrow, since members wait for the result."""

TICK = 1e-9
"""Seconds to which step times are rounded before they are compared, so that all members see the same ties."""


@dataclass(frozen=True)
class Candidate:
    """Equal pipelines for a number of devices. cuts: first layer of each stage.

    stage_bytes: None where no memory model describes the run. step_ticks: simulated step with gradient exchange and
    update, in nanoseconds; None without seconds.
    """

    replicas: int
    cuts: tuple[int, ...]
    stage_bytes: tuple[int, ...] | None
    step_ticks: int | None

    @property
    def devices(self) -> int:
        """Number of devices in use."""
        return self.replicas * len(self.cuts)

    @property
    def order(self) -> tuple[int, int, int]:
        """Sort key; the smallest is best: the quickest, then most devices, then fewest replicas."""
        return (self.step_ticks or 0, -self.devices, self.replicas)

    def fits(self, usable: Sequence[int] | None) -> bool:
        """True where each stage fits the bytes that its devices can use, or where no limit or no bytes are known."""
        if usable is None or self.stage_bytes is None:
            return True
        return all(held <= limit for held, limit in zip(self.stage_bytes, usable, strict=True))


@dataclass
class LayoutCandidates:
    """Every pipeline that is possible for one run.

    Args:
        profile: of the chain; None: cuts balance `layer_bytes`, and neither bytes nor seconds are predicted.
        layer_bytes: state of each layer. run: the whole step, over all replicas, which share its blocks.
        planner, memory: see `Problem`; with `joint` and `budget` equal pipelines are cut by `throughput`.
        beside: bytes per layer that a rank owns, on the device beside training; default none.
        link: between ranks, within and between pipelines; by default transfers take no time.

    Raises:
        CapslogError: unknown names, a planner too slow for a waiting run, a profile of another chain, or a profile
            that lacks values for the memory model or the link.
    """

    profile: Profile | None
    layer_bytes: Sequence[int]
    run: RunShape
    planner: str = "exact"
    memory: str = AUTO
    max_replicas: int | None = None
    beside: Sequence[int] | None = None
    link: Link = field(default_factory=Link)
    described: bool = field(init=False)
    """True where the predicted stage bytes hold for this run; otherwise none is compared with a capacity."""
    headroom: Headroom = field(init=False)

    def __post_init__(self) -> None:
        self.num_layers = len(self.layer_bytes)
        if not planner_named(self.planner).elastic:
            raise CapslogError(f"planner {self.planner!r} {NOT_ASKED_ANEW}")
        if self.planner == JOINT and self.max_replicas is not None:
            raise CapslogError(
                f"planner 'joint' shares devices out among pipelines, but at most {self.max_replicas} can run here; "
                "choose throughput"
            )
        profile = self.profile
        if profile is not None and profile.num_layers != self.num_layers:
            raise CapslogError(
                f"the profile has {profile.num_layers} layers, the chain {self.num_layers}; profile this model"
            )
        self.headroom = Headroom() if profile is None else Headroom.of(profile)
        self._seconds: LayerSeconds | None = None
        if profile is not None and profile.timed:
            self._seconds = LayerSeconds.of_profile(profile, self.link)
        parameters = [] if profile is None else [layer.parameter_bytes for layer in profile.layers]
        sizes = [size for size in parameters if size is not None]
        self._parameters = _running(sizes if len(sizes) == self.num_layers else [0] * self.num_layers)
        sized = profile is not None and len(sizes) == self.num_layers
        self._update_rate: float = profile.conditions.get(UPDATE_RATE, 0.0) if profile is not None and sized else 0.0
        profiled = None if profile is None else profile.conditions.get("microbatch_size")
        same_size = None in (profiled, self.run.microbatch_size) or profiled == self.run.microbatch_size
        self.described = profile is not None and same_size
        self._costs = {replicas: self._costs_of(replicas) for replicas in self._replicas(self.run.num_blocks)}
        self._weighed = functools.cache(self._weigh)
        self._bounds = functools.cache(self._least_seconds)
        self._stage_seconds = functools.cache(self._find_stage_seconds)
        self._least_bytes = functools.cache(self._find_least_bytes)
        self.fewest_devices = functools.cache(self._find_fewest_devices)

    @property
    def timed(self) -> bool:
        """True where the profile has the seconds of every layer."""
        return self._seconds is not None

    def _replicas(self, most: int) -> list[int]:
        if self._seconds is None:
            return [1]
        most = min(most, self.max_replicas or most)
        return [number for number in range(1, most + 1) if self.run.num_blocks % number == 0]

    def _costs_of(self, replicas: int) -> StageCosts:
        """Bytes of every possible stage of one of `replicas` pipelines, with those beside training."""
        profile = self.profile
        if profile is None:
            return RangeCosts(_ranges(self.layer_bytes, NEVER))
        shape = self.run.share(replicas)
        memory, costs = resolve(self.memory, profile, shape)
        if MEMORY_MODELS[memory].gap(shape) is not None:
            self.described = False
        waiting = waiting_blocks(profile, self.run.num_blocks // replicas, self.run.num_blocks)
        more = waiting * _ranges([layer.parameter_bytes or 0 for layer in profile.layers], 0)
        if self.beside is not None:
            more = more + _ranges(self.beside, 0)
        return raised(costs, more) if more.any() else costs

    # -- the search

    def quickest(
        self,
        devices: int,
        usable: Callable[[int, int], list[int] | None],
        speeds: Callable[[int, int], Speeds] = lambda replicas, stages: None,
        *,
        rank: Callable[[Candidate], int] = lambda candidate: 0,
        best_rank: int = 0,
    ) -> Candidate | None:
        """Return the fitting candidate with the smallest `rank` (none is below `best_rank`), then the smallest `order`.

        First tries the planner's cuts without limits, then, where a bound allows a gain, its cuts within limits.

        Args:
            usable: (replicas, stages) -> bytes that each stage's devices can use; None: no limit.
            speeds: (replicas, stages) -> speed of each stage's slowest device, at most 1; None: all are equal.
        """
        best: tuple[int, tuple[int, int, int]] | None = None
        best_candidate = None

        def may_win(replicas: int, stages: int, bound: int) -> bool:
            return best is None or best[0] > best_rank or (bound, -replicas * stages, replicas) < best[1]

        def consider(candidate: Candidate) -> None:
            nonlocal best, best_candidate
            if may_win(candidate.replicas, len(candidate.cuts), candidate.step_ticks or 0):
                key = (rank(candidate), candidate.order)
                if best is None or key < best:
                    best, best_candidate = key, candidate

        limited = []
        for replicas, stages in self._in_order(devices):
            if not may_win(replicas, stages, self.bound_ticks(replicas, stages)):
                continue
            limits, stage_speeds = usable(replicas, stages), speeds(replicas, stages)
            candidate = self._weighed(replicas, stages, None, stage_speeds)
            if candidate.fits(limits):
                consider(candidate)
            elif limits is not None and self._limits_matter(limits):
                limited.append((replicas, stages, limits, stage_speeds))
        bounds = [
            (bound, -replicas * stages, replicas, stages, limits, stage_speeds)
            for replicas, stages, limits, stage_speeds in limited
            if may_win(replicas, stages, self.bound_ticks(replicas, stages))
            and (bound := self._limited_bound(replicas, stages, limits)) is not None
        ]
        for bound, _, replicas, stages, limits, stage_speeds in sorted(bounds, key=lambda entry: entry[:4]):
            if not may_win(replicas, stages, bound):
                continue
            candidate = self._weighed(replicas, stages, tuple(limits), stage_speeds)
            if candidate.fits(limits):
                consider(candidate)
        return best_candidate

    def _in_order(self, devices: int) -> list[tuple[int, int]]:
        """(replicas, stages), the smallest bound first, then most devices."""
        shapes = [
            (replicas, stages)
            for replicas in self._replicas(min(devices, self.run.num_blocks))
            for stages in range(1, min(devices // replicas, self.num_layers) + 1)
        ]
        return sorted(shapes, key=lambda shape: (self.bound_ticks(*shape), -shape[0] * shape[1], shape[0]))

    def candidate(self, replicas: int, stages: int, usable: Sequence[int] | None) -> Candidate:
        """Return the planner's candidate, cached; limits are used only where the cuts without them do not fit."""
        candidate = self._weighed(replicas, stages, None, None)
        if usable is None or candidate.fits(usable):
            return candidate
        return self._weighed(replicas, stages, tuple(usable), None) if self._limits_matter(usable) else candidate

    def _limits_matter(self, usable: Sequence[int]) -> bool:
        """True where the planner considers capacities: `exact` only if they differ, others outside `BY_TIME` never."""
        return self.planner in BY_TIME or (self.planner == "exact" and len(set(usable)) > 1)

    def _weigh(self, replicas: int, stages: int, usable: tuple[int, ...] | None, speeds: Speeds) -> Candidate:
        return self.of_cuts(replicas, tuple(self._cuts(replicas, stages, usable, speeds)), speeds)

    def of_cuts(self, replicas: int, cuts: tuple[int, ...], speeds: Speeds = None) -> Candidate:
        """Return the candidate of these cuts; the replicas share the blocks evenly."""
        held = None
        if self.described:
            costs = self._costs[replicas] if replicas in self._costs else self._costs_of(replicas)
            held = tuple(costs.peaks(cuts))
        return Candidate(replicas, cuts, held, self._step_ticks(replicas, cuts, speeds))

    def _cuts(self, replicas: int, stages: int, usable: Sequence[int] | None, speeds: Speeds) -> Sequence[int]:
        costs = self._costs[replicas]
        if self.planner not in BY_TIME:
            return PLANNERS[self.planner](costs, stages, usable)
        if self._seconds is None:
            return exact_cuts(costs, stages, usable)
        solution = fastest_cuts(costs, self._seconds, self.run.share(replicas), stages, usable, speeds, _NARROW)
        return exact_cuts(costs, stages, usable) if solution is None else solution.cuts

    def _step_ticks(self, replicas: int, cuts: tuple[int, ...], speeds: Speeds = None) -> int | None:
        """Ticks of the simulated step of one pipeline, the exchange with the others, and the slowest update."""
        if self._seconds is None:
            return None
        player = step_player(self.run.share(replicas), len(cuts))
        seconds = player.seconds_of_one(self._seconds.of_cuts(np.array([cuts]), speeds))
        weights = np.diff(self._parameters[[*cuts, self.num_layers]]).max()
        return round((seconds + self._after(replicas, float(weights))) / TICK)

    def _after(self, replicas: int, parameter_bytes: float) -> float:
        """Seconds after a stage's last backward: other pipelines' gradients come block by block, then the update."""
        blocks = self.run.num_blocks
        foreign = blocks - blocks // replicas
        exchange = foreign * self.link.seconds(round(parameter_bytes)) if foreign and parameter_bytes else 0.0
        return exchange + self._update_rate * parameter_bytes

    def bound_ticks(self, replicas: int, stages: int) -> int:
        """Lower bound of a candidate's step, in ticks; 0 without seconds."""
        if self._seconds is None:
            return 0
        return self._in_ticks(replicas, stages, float(self._bounds(replicas)[stages]))

    def _in_ticks(self, replicas: int, stages: int, seconds: float) -> int:
        """Bound of one pipeline in ticks, with exchange and update after its last backward."""
        # The stage with most parameters has at least an even share of them. One tick less, since rounding may add one.
        after = self._after(replicas, float(self._parameters[-1]) / stages)
        return int((seconds + after) * (1 - 1e-12) / TICK) - 1

    def _find_stage_seconds(self, replicas: int) -> tuple[Floats, Floats]:
        """[L, L + 1], [L]: unavoidable seconds of layers first .. end-1 as a stage, and of a last stage that begins at
        `first`.

        Counts the first forward and the last backward of one microbatch on the layers before the stage, and the stage's
        work on all microbatches. With recomputation every stage but the last repeats all forwards except one, which its
        backward follows at once. 0 without seconds.
        """
        size = self.num_layers
        inner, last = np.zeros((size, size + 1)), np.zeros(size)
        if self._seconds is not None:
            microbatches = self.run.microbatches // replicas
            forward, backward = self._seconds.forward, self._seconds.backward
            passed = (forward + backward)[:-1, None]
            both = (forward + backward)[None, :] - passed
            last = np.maximum(microbatches * both[:, -1] + passed[:, 0], forward[-1] + backward[-1])
            inner = microbatches * both + passed
            if self.run.recomputes:
                inner = inner + (microbatches - 1) * (forward[None, :] - forward[:-1, None])
        inner[np.tri(size, size + 1, dtype=np.bool_)] = np.inf
        return inner, last

    def _least_seconds(self, replicas: int) -> Floats:
        """[L + 1]: lower bound of the step of one pipeline, by number of stages.

        State       (s, m): layers 0 .. m-1 in s stages.
        Transition  (s, l) -> (s + 1, m) with l < m: stage s holds layers l .. m-1.
        Cost        the largest of the stages' seconds, as `_stage_seconds` gives them.
        Complexity  O(L^3) in L numpy steps, once per number of replicas.
        """
        size, (inner, last) = self.num_layers, self._stage_seconds(replicas)
        bounds = np.full(size + 1, np.inf)
        reached = np.where(np.arange(size) == 0, 0.0, np.inf)
        for stages in range(1, size + 1):
            bounds[stages] = np.maximum(reached, last).min()
            reached = np.maximum(reached[:, None], inner).min(axis=0)[:-1]
        return bounds

    def _limited_bound(self, replicas: int, stages: int, usable: Sequence[int]) -> int | None:
        """Lower bound as `bound_ticks`, over the cut lists that fit; None where none fits. The search of
        `_least_seconds` for one number of stages: stage s begins at one of layers s .. s + L - S.
        """
        if any(least > size for least, size in zip(self._least_bytes(replicas, stages), usable, strict=True)):
            return None
        costs, (inner, last) = self._costs[replicas], self._stage_seconds(replicas)
        slack = self.num_layers - stages + 1
        reached = np.where(np.arange(slack) == 0, 0.0, np.inf)
        for stage in range(stages - 1):
            window = np.s_[stage : stage + slack, stage + 1 : stage + 1 + slack]
            fits = costs.matrix(stage, stages)[window] <= usable[stage]
            reached = np.where(fits, np.maximum(reached[:, None], inner[window]), np.inf).min(axis=0)
            if np.isinf(reached).all():
                return None
        fits = costs.matrix(stages - 1, stages)[stages - 1 :, -1] <= usable[-1]
        bound = float(np.where(fits, np.maximum(reached, last[stages - 1 :]), np.inf).min())
        return None if np.isinf(bound) else self._in_ticks(replicas, stages, bound)

    def _find_least_bytes(self, replicas: int, stages: int) -> list[int]:
        """Bytes of the smallest possible stage at each place."""
        costs, slack = self._costs[replicas], self.num_layers - stages + 1
        return [
            int(costs.matrix(stage, stages)[stage : stage + slack, stage + 1 : stage + 1 + slack].min())
            for stage in range(stages)
        ]

    # -- ahead of time, and when nothing fits

    def prepare(self, devices: int) -> None:
        """Compute all candidates for up to `devices` devices without a limit, while no member waits for them; later
        searches then take milliseconds where the devices are equal (benchmarks/morph/search).
        """
        for replicas, stages in self._in_order(devices):
            self.candidate(replicas, stages, None)
            self._least_bytes(replicas, stages)

    def _find_fewest_devices(self, capacity: int) -> int | None:
        """Fewest devices of `capacity` bytes for one pipeline with the best cuts; None where no number is enough."""
        return fewest_devices(self._costs[1], self.headroom.usable(capacity))


def _running(sizes: Sequence[int]) -> NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(np.asarray(sizes, dtype=np.int64))])


def _ranges(sizes: Sequence[int], nothing: int) -> NDArray[np.int64]:
    """[L, L + 1]: summed sizes of layers first .. end-1, `nothing` where end <= first."""
    running = _running(sizes)
    sums = running[None, :] - running[:-1, None]
    return np.where(np.tri(*sums.shape, dtype=np.bool_), nothing, sums)


# -- Plans of planner `budget` for the members of a run: equal pipelines with memory intervals, so that they fit their
#    devices.
#
# Searched by the member that proposes a generation, and ahead of time for likely next ones. Snapshots, and the copies
# that a rank keeps for others, lie beside training and use memory of its device. Pure; no torch.


NO_LIMIT = 1 << 62
"""Assumed bytes of a device of unknown capacity among devices of known capacity."""


class Budgeted:
    """Plans of planner `budget` by capacities, speeds and copies of the devices, cached.

    Args:
        profile: with seconds. run: the whole step; its schedule may be left open.
        beside: bytes per layer that a rank owns, on the device beside training.
        tier, link: see `Problem`. limit_seconds: longest search; None: no limit.
    """

    def __init__(
        self,
        profile: Profile,
        run: RunShape,
        beside: Sequence[int],
        tier: HostMemory | None = None,
        link: Link | None = None,
        limit_seconds: float | None = None,
    ) -> None:
        self._profile, self._run, self._tier, self._link = profile, run, tier or HostMemory(), link or Link()
        self._held, self._limit_seconds = with_beside(profile, beside), limit_seconds
        self._known: dict[tuple[int, tuple[int, ...], tuple[int, ...], tuple[float, ...]], Plan] = {}
        self._new: list[Any] = []
        self._least: dict[tuple[int, int], float] = {}

    @classmethod
    def of(
        cls,
        candidates: LayoutCandidates,
        run: RunShape,
        tier: HostMemory,
        link: Link,
        limit_seconds: float | None = None,
    ) -> Budgeted | None:
        """Return the plans of a run; None where it has another planner, or the profile lacks seconds or bytes."""
        profile, beside = candidates.profile, candidates.beside
        ours = candidates.planner == BUDGET and candidates.described and candidates.timed
        if not ours or profile is None:
            return None
        return cls(profile, run, beside or [0] * profile.num_layers, tier, link, limit_seconds)

    def plan(self, seats: Sequence[Seat], copies: Sequence[int] = (), replicas: int = 1) -> Plan:
        """Return a plan of `replicas` equal pipelines for these seats, by rank: one that fits, or the one that lacks
        least.

        Its bytes are those of training alone; its verdict also counts snapshots and copies.
        copies: bytes that each rank keeps for others; default none. replicas: a divisor of the run's blocks.
        """
        capacities, held = tuple(seat.capacity for seat in seats), tuple(copies) if any(copies) else ()
        key = replicas, capacities, held, speeds_of(seats) or ()
        if key not in self._known:
            self._known[key] = plan = self._search(*key)
            self._new.append([*key, plan.to_json()])
        return self._known[key]

    def replicas(self, devices: int) -> list[int]:
        """Possible numbers of equal pipelines for these devices, those with the smallest lower bound first."""
        counts = [
            count for count in range(1, min(devices, self._run.num_blocks) + 1) if self._run.num_blocks % count == 0
        ]
        if len(counts) == 1:  # usual, with one block: bounds would only delay the start
            return counts
        return sorted(counts, key=lambda count: (self.least_seconds(devices, count), -count))

    def least_seconds(self, devices: int, replicas: int) -> float:
        """Lower bound of the step of `replicas` equal pipelines in seconds, without limits of memory."""
        key = min(devices // replicas, self._profile.num_layers), replicas
        if replicas == 1 and self._run.schedule in GRAPH_SCHEDULES:
            return even_share_seconds(self._profile, self._run.microbatches, key[0])
        if key not in self._least:
            share = self._run if replicas == 1 else self._run.share(replicas)
            self._least[key] = least_seconds(Problem.of(self._profile, key[0], None, share, self._link))
        return self._least[key]

    def prepare(self, devices: int) -> None:
        """Compute the lower bounds for up to `devices` devices, while no member waits for them."""
        for count in range(1, devices + 1):
            self.replicas(count)

    def lack_sentence(self, plan: Plan, capacities: Sequence[int]) -> str | None:
        """Sentence on what a plan lacks on these devices, by a simulation with snapshots; None: it fits."""
        limits = tuple(PlanRank(capacity_bytes=size or None) for size in capacities[: plan.num_ranks])
        bare = dataclasses.replace(plan, ranks=limits, fits=None, shortfall=None, notes=())
        verdict = judge_by_fold(self._held, bare, self._run.settled(), tier=self._tier)
        return None if verdict.fits else "; ".join(verdict.notes)

    def step_seconds(self, plan: Plan) -> float | None:
        """Simulated step seconds of any plan; None where it cannot be simulated."""
        return with_step_seconds(self._profile, plan, self._run.settled(), self._link).step_seconds

    def taken(self) -> list[Any]:
        """Return the plans found since the last call, as JSON values for `learn` of other members."""
        searched, self._new = self._new, []
        return searched

    def learn(self, entries: Sequence[Any]) -> None:
        """Add plans from another member's `taken`. Raises CapslogError for an invalid plan."""
        for replicas, capacities, copies, speeds, plan in entries:
            key = replicas, tuple(capacities), tuple(copies), tuple(speeds)
            self._known.setdefault(key, Plan.from_json(plan, "a plan that was prepared for a change"))

    def _search(
        self, replicas: int, capacities: tuple[int, ...], copies: tuple[int, ...], speeds: tuple[float, ...]
    ) -> Plan:
        profile, headroom = self._profile, Headroom.of(self._profile)
        used = capacities[: replicas * min(len(capacities) // replicas, profile.num_layers)]
        limits: list[int | None] = [None] * len(used)
        if any(used):
            kept = copies or (0,) * len(used)
            room = [max(0, headroom.usable(size or NO_LIMIT) - more) for size, more in zip(used, kept, strict=False)]
            limits = [max(1, headroom.device(size)) for size in room]
        of_rank = zip_longest(limits, speeds[: len(used)])
        devices = [PlanRank(capacity_bytes=size, speed=speed) for size, speed in of_rank]
        problem = Problem(
            self._held,
            tuple(devices),
            self._run,
            pipelines=replicas,
            link=self._link,
            tier=self._tier,
            members_change=True,
            search_seconds=self._limit_seconds,
        )
        verdict = solve(problem, BUDGET)
        run = dataclasses.replace(self._run, schedule=verdict.schedule or self._run.schedule)
        bare = dataclasses.replace(
            verdict,
            ranks=tuple(
                dataclasses.replace(rank, capacity_bytes=size or None)
                for rank, size in zip(verdict.ranks, used, strict=True)
            ),
            profile_digest=profile.digest,
            fits=None,
            shortfall=None,
            notes=(),
        )
        plan = judge_by_fold(profile, bare, run, tier=self._tier)
        if not verdict.fits:
            plan = dataclasses.replace(plan, fits=verdict.fits, shortfall=verdict.shortfall, notes=verdict.notes)
        return with_stage_bytes(plan)


def neighbours(seats: Sequence[Seat], least: int = 1) -> Iterator[list[Seat]]:
    """Yield the seats after possible next changes, the likelier first: one less, one more, then fewer and fewer.

    Of lists with equal devices and hosts, by rank, only one comes. least: fewest devices that the run trains with.
    """
    hosts = {seat.host for seat in seats}
    extra_seat = Seat("?", min(hosts) if len(hosts) == 1 else "?", min(seat.capacity for seat in seats))
    groups = [[*seats[:dropped], *seats[dropped + 1 :]] for dropped in range(len(seats))]
    groups += [[*seats, extra_seat], *(list(seats[:count]) for count in range(len(seats) - 2, 0, -1))]
    seen = set()
    for group in groups:
        order: dict[str, int] = {}
        alike = tuple((seat.capacity, seat.speed, order.setdefault(seat.host, len(order))) for seat in group)
        if len(group) >= least and alike not in seen:
            seen.add(alike)
            yield group
