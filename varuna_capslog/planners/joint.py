"""Pipelines, stages and microbatch size together, for any number of devices of any kinds.

N devices become pipelines of different length and cuts (7 = 3 + 4), and the microbatches of a step are shared out among
them in whole accumulation blocks, so that the slowest pipeline ends as early as can be. A run's start calls it with a
profile per microbatch size; a live change of the membership calls it again with the run's one profile and blocks.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from varuna_capslog.base import fields
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.memory import AUTO, MEMORY_MODELS, NEVER, resolve
from varuna_capslog.memory.headroom import Headroom
from varuna_capslog.planners.fleet import Fleet, compose, enough_seconds, least_seconds
from varuna_capslog.planners.pipelines import DeviceKind, Pipelines, combinations
from varuna_capslog.planners.seconds import Link
from varuna_capslog.plans.parts import PlanRank, PlanStage, Units, intervals_of
from varuna_capslog.plans.plan import Plan
from varuna_capslog.profiles.record import Profile
from varuna_capslog.schedules import DEFAULT_RUN, RunShape

__all__ = ["Device", "JointPipeline", "JointPlan", "NoFleet", "best_fleet", "best_fleet_of_run"]

_MANY_STAGES = 16
"""Stages of a pipeline that are always weighed; more only where the blocks are too few to use the devices otherwise."""

_MANY_TEMPLATES = 1_000
"""Combinations of kinds from which on similar kinds are taken for one, and pipelines become shorter."""

_MANY_KINDS = 3
"""Kinds from which on a fifth of these combinations are many."""

_ROUNDS, _LARGE_ROUNDS, _LARGE = 40, 6, 64
"""How often a fleet is composed again with simulated step times in place of bounds, at most, and how often one of more
than 64 devices."""

_ENOUGH = 0.005
"""Share of the step time that another composition must promise to be tried."""


@dataclass(frozen=True)
class Device:
    """A device: bytes of memory (None: no limit), and speed; at speed 2 everything takes half the profile's seconds."""

    capacity: int | None = None
    speed: float = 1.0

    def __post_init__(self) -> None:
        if self.capacity is not None:
            fields.whole(self.capacity, "capacity", minimum=1)
        if not 0 < self.speed < float("inf"):
            raise CapslogError(f"speed is {self.speed}; give a number above 0, 1 for the device of the profile")


@dataclass(frozen=True)
class JointPipeline:
    """One pipeline of the answer: its devices in stage order, its cuts, its blocks, and what it takes.

    step_seconds: of the simulator for this pipeline's microbatches, and the exchange of gradients.
    """

    devices: tuple[int, ...]
    cuts: tuple[int, ...]
    blocks: int
    step_seconds: float
    stage_bytes: tuple[int, ...]


@dataclass(frozen=True)
class JointPlan:
    """The answer of `best_fleet`, and of `search.joint_plan` also where nothing fits.

    step_seconds: of the slowest pipeline; None where nothing fits. bound_seconds: no fleet of pipelines of at most
    `max_stages` stages, in any order of the devices and with any cuts, takes less; None where nothing fits, or where
    kinds of devices were too many and were taken for fewer, weaker ones.
    idle: devices that no pipeline uses. blocks: `train.accumulation_blocks` of a run of this plan.
    """

    plan: Plan
    pipelines: tuple[JointPipeline, ...]
    step_seconds: float | None
    bound_seconds: float | None
    max_stages: int
    idle: tuple[int, ...]
    blocks: int


@dataclass(frozen=True)
class NoFleet:
    """Nothing fits these devices: what is needed to say what is missing.

    run: the whole step, with the fewest blocks that were tried. memory: the memory model's name, resolved.
    stage_bytes: from a cut list to the bytes of each stage of one pipeline, with the gradients of blocks that wait.
    """

    profile: Profile
    devices: Sequence[Device]
    run: RunShape
    memory: str
    max_stages: int
    stage_bytes: Callable[[Sequence[int]], list[int]]


def best_fleet(
    profiles: Profile | Sequence[Profile],
    devices: Sequence[Device],
    minibatch_size: int,
    blocks: int | None = None,
    run: RunShape = DEFAULT_RUN,
    memory: str = AUTO,
    link: Link | None = None,
    max_stages: int | None = None,
) -> JointPlan | NoFleet:
    """Choose pipelines, their devices, cuts and microbatches for a step of `minibatch_size` samples.

    profiles: one, or one per microbatch size (condition `microbatch_size`, 1 where there is none) to choose from.
    blocks: `train.accumulation_blocks`; default: every microbatch is a block, or where that fits no memory as many as
    there are devices, or one. A pipeline owns whole blocks, so there are never more pipelines than blocks, and among
    others it keeps the gradients of each of its blocks until all are exchanged, which counts as memory.
    run: its schedule, recompute and stage_inputs are read; the numbers and sizes are chosen here.
    memory: as in `search.plan`.
    link: between neighbouring stages, and between the pipelines for the gradients of other blocks; None costs nothing.
    max_stages: of one pipeline; default min(L, N, 16), and more where the blocks are so few that shorter pipelines
    would leave devices idle.

    Where devices are of very many kinds, similar ones are taken for the weaker of them.

    A device is left idle only if using it would lengthen the step, or there are fewer blocks and layers than devices.
    Where nothing fits, the answer is what is needed to say what is missing.

    Raises CapslogError for sizes that do not divide, no devices, and profiles without seconds.
    """
    begun = time.perf_counter()
    choices = [profiles] if isinstance(profiles, Profile) else list(profiles)
    if not choices or not devices:
        raise CapslogError("a joint plan needs at least one profile and one device")
    answers: list[_FleetSearch] = []
    found: list[tuple[_FleetSearch, _Composed]] = []
    for profile in choices:
        for number in _numbers_of_blocks(profile, minibatch_size, len(devices)) if blocks is None else [blocks]:
            count, size = _microbatches(profile, minibatch_size)
            number = fields.whole(number, "blocks", minimum=1)
            step = replace(run, num_microbatches=count, microbatch_size=size, num_blocks=number)
            answers.append(_FleetSearch(profile, devices, step, memory, link, max_stages))
            if (fleet := answers[-1].best_fleet()) is not None:
                found.append((answers[-1], fleet))
                break
    if not found:
        return answers[-1].nothing_fits()
    answer, fleet = min(found, key=lambda one: one[1].step_seconds)
    bounds = [one.bound_seconds for one, _ in found if one.bound_seconds is not None and not one.merged]
    return answer.result(fleet, begun, min(bounds) if len(bounds) == len(found) else None)


def best_fleet_of_run(
    profile: Profile,
    devices: Sequence[Device],
    run: RunShape,
    memory: str = AUTO,
    link: Link | None = None,
    beside: Sequence[int] | None = None,
) -> JointPlan | NoFleet:
    """As `best_fleet` for a run whose profile, microbatches and blocks are constants, for a live change of its members.

    run: the whole step. beside: bytes on the device beside training, per layer that a rank holds; default none. They
    count against the capacities and are no part of the plan's bytes.
    """
    begun = time.perf_counter()
    answer = _FleetSearch(profile, devices, run, memory, link, None, beside)
    fleet = answer.best_fleet()
    if fleet is None:
        return answer.nothing_fits()
    return answer.result(fleet, begun, None if answer.merged else answer.bound_seconds)


def _microbatches(profile: Profile, minibatch_size: int) -> tuple[int, int]:
    """Microbatches of a step, and the samples of one."""
    size = profile.conditions.get("microbatch_size", 1)
    count, left = divmod(minibatch_size, size)
    if left or count < 1:
        raise CapslogError(f"a minibatch of {minibatch_size} is not a whole number of microbatches of {size}")
    return count, size


def _numbers_of_blocks(profile: Profile, minibatch_size: int, devices: int) -> list[int]:
    """From the most freedom to the least memory: every microbatch a block, a block per device or so, one block."""
    count, _ = _microbatches(profile, minibatch_size)
    few = next(number for number in range(min(count, devices), count + 1) if count % number == 0)
    return list(dict.fromkeys((count, few, 1)))


@dataclass(frozen=True)
class _Composed:
    """Pipelines as (template's number, blocks), all laid out."""

    step_seconds: float
    shares: list[tuple[int, int]]


class _FleetSearch:
    """The search for one profile."""

    def __init__(
        self,
        profile: Profile,
        devices: Sequence[Device],
        run: RunShape,
        memory: str,
        link: Link | None,
        max_stages: int | None,
        beside: Sequence[int] | None = None,
    ) -> None:
        self.profile, self.devices, self.run = profile, list(devices), run
        self.blocks = run.num_blocks
        self.memory, _ = resolve(memory, profile, run)
        if (gap := MEMORY_MODELS[self.memory].gap(run)) is not None:
            raise CapslogError(f"a joint plan needs peaks, but {gap}")
        self._choose_kinds(max_stages)
        templates = combinations(self.counts, self.max_stages)
        self.pipelines = Pipelines(profile, self.kinds, templates, self.memory, run, link or Link(), beside)
        self.bound_seconds: float | None = None

    def _choose_kinds(self, max_stages: int | None) -> None:
        """Group the devices that are alike, and decide how long pipelines may be.

        Where that makes too many templates, the two kinds between which least is lost become one that has the smaller
        memory and speed, and at last pipelines become shorter.
        """
        most = min(self.profile.num_layers, len(self.devices))
        if max_stages is not None:
            self.max_stages = min(most, fields.whole(max_stages, "max_stages", minimum=1))
        else:
            self.max_stages = min(most, max(_MANY_STAGES, 2 * -(-len(self.devices) // self.blocks)))
        headroom = Headroom.of(self.profile)
        members: dict[DeviceKind, list[int]] = {}
        for rank, one in enumerate(self.devices):
            usable = None if one.capacity is None else headroom.usable(one.capacity)
            members.setdefault(DeviceKind(usable, one.speed), []).append(rank)
        self.merged = False
        while len(members) > 2 and _number_of_templates(members, self.max_stages) > (
            _MANY_TEMPLATES if len(members) <= _MANY_KINDS else _MANY_TEMPLATES / 5
        ):
            members = _with_two_merged(members)
            self.merged = True
        while self.max_stages > 1 and _number_of_templates(members, self.max_stages) > _MANY_TEMPLATES:
            self.max_stages -= 1
        self.kinds = sorted(members, key=_strength)
        self.members = [sorted(members[kind]) for kind in self.kinds]
        self.counts = [len(ranks) for ranks in self.members]

    def best_fleet(self) -> _Composed | None:
        """Compose the fleet with bounds, lay out and simulate what was chosen, and again, until nothing is left to do.

        A bound is never above the simulated time, so a fleet made of simulated columns alone that is the best among
        bounds and simulated times is the best of all columns, each in the layout that attains its bound.
        """
        times = self._bounds()
        best: _Composed | None = None
        known: set[tuple[int, int]] = set()
        self.bound_seconds = least_seconds(self.pipelines.sizes, self.counts, self.blocks, times)
        least = self.bound_seconds or 0.0
        for _ in range(_ROUNDS if len(self.devices) <= _LARGE else _LARGE_ROUNDS):
            fleet = compose(self.pipelines.sizes, self.counts, self.blocks, times, least)
            if fleet is None:
                break
            least = fleet.seconds
            if best is not None and least >= best.step_seconds * (1 - _ENOUGH):
                break
            shares = _shared_out(fleet, times, self.blocks)
            fresh = set(shares) - known
            for number, share in sorted(fresh):
                column = self.pipelines.column(number, share)
                times[share - 1, number] = np.inf if column is None else column.step_seconds
            slowest = float(max(times[share - 1, number] for number, share in shares))
            if np.isfinite(slowest) and (best is None or slowest < best.step_seconds):
                best = _Composed(slowest, shares)
            if not fresh:
                break
            known |= fresh
        return None if best is None else _Composed(self._polished(best.shares), best.shares)

    def _polished(self, shares: list[tuple[int, int]]) -> float:
        """Search longer for the layout of the slowest pipeline, as long as that is another one; return its seconds."""
        polished: set[tuple[int, int]] = set()
        while True:
            seconds = {
                key: column.step_seconds for key in shares if (column := self.pipelines.column(*key)) is not None
            }
            slowest = max(seconds, key=lambda key: seconds[key])
            if slowest in polished:
                return seconds[slowest]
            self.pipelines.column(*slowest, wide=True)
            polished.add(slowest)

    def _bounds(self) -> NDArray[np.float64]:
        """[shares, T]: the bound of each template with 1, 2, ... blocks, for as many as the best fleet could need.

        More blocks are looked at until no template could take them within a time in which fewer are enough.
        """
        rows = [self.pipelines.bounds(1)]
        while len(rows) < self.blocks:
            following = self.pipelines.bounds(len(rows) + 1)
            if following.min() > enough_seconds(self.pipelines.sizes, self.counts, self.blocks, np.stack(rows)):
                break
            rows.append(following)
        return np.stack(rows)

    def result(self, fleet: _Composed, begun: float, bound_seconds: float | None) -> JointPlan:
        """The plan of the fleet that was found."""
        pools = [list(members) for members in self.members]
        pipelines = []
        for number, share in fleet.shares:
            column = self.pipelines.column(number, share)
            assert column is not None
            placed = tuple(pools[kind].pop(0) for kind in column.kinds)
            pipelines.append(JointPipeline(placed, column.cuts, share, column.step_seconds, column.stage_bytes))
        idle = tuple(sorted(number for pool in pools for number in pool))
        bound = None if bound_seconds is None else min(bound_seconds, fleet.step_seconds)
        plan = self._plan(pipelines, time.perf_counter() - begun)
        space = f"pipelines of at most {self.max_stages} stages on {len(self.devices)} devices"
        plan = replace(plan, step_seconds=fleet.step_seconds, bound_seconds=bound, search_space=space)
        return JointPlan(plan, tuple(pipelines), fleet.step_seconds, bound, self.max_stages, idle, self.blocks)

    def _plan(self, pipelines: Sequence[JointPipeline], search_seconds: float) -> Plan:
        num_layers, lies = self.profile.num_layers, self.pipelines.beside_bytes
        stages, begin = [], 0
        of_rank: dict[int, tuple[int | None, float | None]] = {}
        for one in pipelines:
            speeds = [self.devices[rank].speed for rank in one.devices]
            forward, backward, *_ = self.pipelines.seconds.of_cuts(np.array([one.cuts]), speeds)
            blocks = tuple(range(begin, begin + one.blocks))
            ends = [*one.cuts[1:], num_layers]
            for stage, (first, end, rank) in enumerate(zip(one.cuts, ends, one.devices, strict=True)):
                size = max(0, one.stage_bytes[stage] - int(lies[end] - lies[first]))
                took = float(forward[0, stage] + backward[0, stage])
                memory = intervals_of(self.run, [(first, end)], str(self.profile.conditions.get("device", "cpu")))
                stages.append(PlanStage(((first, end),), (rank,), blocks, memory=memory, bytes=size, seconds=took))
                of_rank[rank] = size, took
            begin += one.blocks
        ranks = []
        for number, device in enumerate(self.devices):
            known = of_rank.get(number, (None, None))
            speed = device.speed if device.speed < 1 else None
            ranks.append(PlanRank(known[0], None, known[1], device.capacity, speed))
        return Plan(
            num_layers,
            tuple(stages),
            Units(self.run.num_microbatches, self.run.microbatch_size, self.blocks),
            self.run.schedule,
            ranks=tuple(ranks),
            peak_bytes=max(stage.bytes or 0 for stage in stages),
            fits=True,
            planner="joint",
            memory_model=self.memory,
            model=self.profile.model,
            profile_digest=self.profile.digest,
            search_seconds=search_seconds,
        )

    def nothing_fits(self) -> NoFleet:
        """What to judge where no fleet was found."""
        return NoFleet(
            self.profile, self.devices, self.run, self.memory, self.max_stages,
            self.pipelines.costs(self.blocks).peaks,
        )  # fmt: skip


def _strength(kind: DeviceKind) -> tuple[float, int]:
    return -kind.speed, -(kind.capacity or NEVER)


def _number_of_templates(members: Mapping[DeviceKind, Sequence[int]], most: int) -> int:
    """How many templates of at most `most` devices there are, the empty one included."""
    ways = [1] + [0] * most
    for ranks in members.values():
        ways = [sum(ways[max(0, total - len(ranks)) : total + 1]) for total in range(most + 1)]
    return sum(ways)


def _with_two_merged(members: Mapping[DeviceKind, list[int]]) -> dict[DeviceKind, list[int]]:
    """The kinds with two of them made one, those whose devices lose the smallest share of memory and speed by it."""

    def loss(pair: tuple[DeviceKind, DeviceKind]) -> float:
        weaker = _weaker(*pair)
        kept = [_share(weaker.capacity, kind.capacity) * weaker.speed / kind.speed for kind in pair]
        return sum(len(members[kind]) * (1 - share) for kind, share in zip(pair, kept, strict=True))

    pair = min(itertools.combinations(sorted(members, key=_strength), 2), key=loss)
    rest = {kind: ranks for kind, ranks in members.items() if kind not in pair}
    weaker = _weaker(*pair)
    return rest | {weaker: [*rest.get(weaker, []), *members[pair[0]], *members[pair[1]]]}


def _weaker(one: DeviceKind, other: DeviceKind) -> DeviceKind:
    limits = [kind.capacity for kind in (one, other) if kind.capacity is not None]
    return DeviceKind(min(limits, default=None), min(one.speed, other.speed))


def _share(part: int | None, whole: int | None) -> float:
    """What is left of a device's memory; of one without limit half, for want of a number."""
    return 1.0 if part == whole else 0.5 if whole is None or part is None else part / max(1, whole)


def _shared_out(fleet: Fleet, times: NDArray[np.float64], blocks: int) -> list[tuple[int, int]]:
    """Give every pipeline (a template's number) its blocks: as many as it may take, less what is too much in all.

    Blocks are taken back one by one from the pipeline that then takes longest; each keeps at least one.
    """
    shares = [[number, gain] for number, gain, count in fleet.pipelines for _ in range(count)]
    for _ in range(sum(share for _, share in shares) - blocks):
        several = [one for one in shares if one[1] > 1]
        slowest = max(several, key=lambda one: (times[one[1] - 1, one[0]], one[1]))
        slowest[1] -= 1
    return [(number, share) for number, share in sorted(map(tuple, shares), key=lambda one: (-one[1], one[0]))]
