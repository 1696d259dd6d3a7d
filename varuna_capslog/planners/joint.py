"""Planner `joint`: chooses pipelines, their devices, cuts and blocks, and the microbatch size in one search.

It divides N devices of any kinds into pipelines of different lengths (7 = 3 + 4), and the microbatches of a step among
the pipelines in whole accumulation blocks, to minimise the time of the slowest pipeline.
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
from varuna_capslog.memory.costs import Headroom
from varuna_capslog.planners.fleet import (
    DeviceKind,
    Fleet,
    Pipelines,
    combinations,
    compose,
    enough_seconds,
    least_seconds,
)
from varuna_capslog.planners.seconds import Link
from varuna_capslog.plans.parts import PlanRank, PlanStage, Units, intervals_of
from varuna_capslog.plans.plan import Plan
from varuna_capslog.profiles.record import Profile
from varuna_capslog.schedules import DEFAULT_RUN, RunShape

__all__ = ["Device", "JointPlan", "NoFleet", "best_fleet", "best_fleet_of_run"]

_MANY_STAGES = 16
"""Most stages of a pipeline, unless the blocks are so few that only longer pipelines can use all devices."""

_MANY_TEMPLATES = 1_000
"""Most templates (`fleet`); above this number, similar kinds are merged, then pipelines become shorter."""

_MANY_KINDS = 3
"""With more kinds than this, kinds are merged above a fifth of `_MANY_TEMPLATES`."""

_ROUNDS, _LARGE_ROUNDS, _LARGE = 40, 6, 64
"""Most rounds of composing a fleet and simulating its pipelines: for up to `_LARGE` devices, and for more."""

_ENOUGH = 0.005
"""Least relative improvement of the step time for which another composition is tried."""


@dataclass(frozen=True)
class Device:
    """A device: bytes of memory (None: no limit), and speed; at speed 2 a layer takes half its profiled seconds."""

    capacity: int | None = None
    speed: float = 1.0

    def __post_init__(self) -> None:
        if self.capacity is not None:
            fields.whole(self.capacity, "capacity", minimum=1)
        if not 0 < self.speed < float("inf"):
            raise CapslogError(f"speed is {self.speed}; give a number above 0, 1 for the device of the profile")


@dataclass(frozen=True)
class JointPipeline:
    """A pipeline of the plan: its devices in stage order, cuts, number of blocks, and bytes of each stage.
    step_seconds: simulated for this pipeline's microbatches, with the gradient exchange.
    """

    devices: tuple[int, ...]
    cuts: tuple[int, ...]
    blocks: int
    step_seconds: float
    stage_bytes: tuple[int, ...]


@dataclass(frozen=True)
class JointPlan:
    """Result of `best_fleet` where a fleet fits. step_seconds: of the slowest pipeline. bound_seconds: no fleet of
    pipelines of at most `max_stages` stages, in any order of the devices and with any cuts, takes less; None where too
    many kinds of devices were merged to fewer, weaker kinds. idle: devices without a pipeline. blocks:
    `train.accumulation_blocks` of the run.
    """

    plan: Plan
    pipelines: tuple[JointPipeline, ...]
    step_seconds: float
    bound_seconds: float | None
    max_stages: int
    idle: tuple[int, ...]
    blocks: int


@dataclass(frozen=True)
class NoFleet:
    """Result where nothing fits, with the data to explain the missing memory. run: the whole step, with the fewest
    blocks that were tried. memory: the memory model's name, resolved. stage_bytes: from a cut list to the bytes of each
    stage of one pipeline, with the gradients of waiting blocks.
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
    """Choose pipelines, their devices, cuts and microbatches for a step of `minibatch_size` samples; where nothing
    fits, return `NoFleet`. A device is left idle only if using it would lengthen the step, or there are fewer blocks
    and layers than devices. Where devices are of very many kinds, similar kinds are merged to the weaker of them.

    profiles: a profile, or one per microbatch size to choose from (condition `microbatch_size`; without it, 1).
    blocks: `train.accumulation_blocks`; default: every microbatch is a block, or where that does not fit, as many
    blocks as devices, or one. A pipeline owns whole blocks, so there are never more pipelines than blocks. Each of
    several pipelines holds the gradients of each of its blocks until the exchange, and their bytes count.
    run: its schedule, recompute and stage_inputs are read; the numbers and sizes are chosen here. memory: as in
    `memory.resolve`. link: between neighbouring stages, and between the pipelines for the gradient exchange;
    None: no time. max_stages: of a pipeline; default min(L, N, 16), and more where few blocks would leave devices idle.
    Raises CapslogError for sizes that do not divide, no devices, and profiles without seconds.
    """
    begun = time.perf_counter()
    choices = [profiles] if isinstance(profiles, Profile) else list(profiles)
    if not choices or not devices:
        raise CapslogError("a joint plan needs at least one profile and one device")
    searches: list[_FleetSearch] = []
    solved: list[tuple[_FleetSearch, _Composed]] = []
    for profile in choices:
        for number in _numbers_of_blocks(profile, minibatch_size, len(devices)) if blocks is None else [blocks]:
            count, size = _microbatches(profile, minibatch_size)
            number = fields.whole(number, "blocks", minimum=1)
            step = replace(run, num_microbatches=count, microbatch_size=size, num_blocks=number)
            searches.append(_FleetSearch(profile, devices, step, memory, link, max_stages))
            if (fleet := searches[-1].best_fleet()) is not None:
                solved.append((searches[-1], fleet))
                break
    if not solved:
        return searches[-1].nothing_fits()
    search, fleet = min(solved, key=lambda pair: pair[1].step_seconds)
    bounds = [search.bound_seconds for search, _ in solved if search.bound_seconds is not None and not search.merged]
    return search.result(fleet, begun, min(bounds) if len(bounds) == len(solved) else None)


def best_fleet_of_run(
    profile: Profile,
    devices: Sequence[Device],
    run: RunShape,
    memory: str = AUTO,
    link: Link | None = None,
    beside: Sequence[int] | None = None,
) -> JointPlan | NoFleet:
    """Choose the fleet of a run with fixed profile, microbatches and blocks, for a live change of its members. run: the
    whole step. beside: bytes on the device beside training, for each layer that a rank holds; default none. They count
    against the capacities but are not part of the plan's bytes. The other arguments are those of `best_fleet`.
    """
    begun = time.perf_counter()
    search = _FleetSearch(profile, devices, run, memory, link, None, beside)
    fleet = search.best_fleet()
    if fleet is None:
        return search.nothing_fits()
    return search.result(fleet, begun, None if search.merged else search.bound_seconds)


def _microbatches(profile: Profile, minibatch_size: int) -> tuple[int, int]:
    """Return the number of microbatches of a step, and the samples of each."""
    size = profile.conditions.get("microbatch_size", 1)
    count, remainder = divmod(minibatch_size, size)
    if remainder or count < 1:
        raise CapslogError(f"a minibatch of {minibatch_size} is not a whole number of microbatches of {size}")
    return count, size


def _numbers_of_blocks(profile: Profile, minibatch_size: int, devices: int) -> list[int]:
    """Return the numbers of blocks to try, from most freedom to least memory: per microbatch, about per device, 1."""
    count, _ = _microbatches(profile, minibatch_size)
    few = next(number for number in range(min(count, devices), count + 1) if count % number == 0)
    return list(dict.fromkeys((count, few, 1)))


@dataclass(frozen=True)
class _Composed:
    """A fleet: its pipelines as (template's number, blocks), all laid out."""

    step_seconds: float
    shares: list[tuple[int, int]]


class _FleetSearch:
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
        """Group equal devices to kinds, and set the largest number of stages. While there are too many templates, merge
        the two kinds that lose least, with the smaller memory and speed of both; then make pipelines shorter.
        """
        most_stages = min(self.profile.num_layers, len(self.devices))
        if max_stages is not None:
            self.max_stages = min(most_stages, fields.whole(max_stages, "max_stages", minimum=1))
        else:
            self.max_stages = min(most_stages, max(_MANY_STAGES, 2 * -(-len(self.devices) // self.blocks)))
        headroom = Headroom.of(self.profile)
        members: dict[DeviceKind, list[int]] = {}
        for rank, device in enumerate(self.devices):
            usable = None if device.capacity is None else headroom.usable(device.capacity)
            members.setdefault(DeviceKind(usable, device.speed), []).append(rank)
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
        """Compose a fleet from bounds, lay out and simulate its pipelines, and repeat until all of them are simulated.
        A bound is never above the simulated time, so a fleet of simulated columns that is the best among bounds and
        simulated times is the best of all columns, each in the layout that attains its bound.
        """
        times = self._bounds()
        best: _Composed | None = None
        simulated: set[tuple[int, int]] = set()
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
            fresh = set(shares) - simulated
            for number, share in sorted(fresh):
                column = self.pipelines.column(number, share)
                times[share - 1, number] = np.inf if column is None else column.step_seconds
            slowest = float(max(times[share - 1, number] for number, share in shares))
            if np.isfinite(slowest) and (best is None or slowest < best.step_seconds):
                best = _Composed(slowest, shares)
            if not fresh:
                break
            simulated |= fresh
        return None if best is None else _Composed(self._polished(best.shares), best.shares)

    def _polished(self, shares: list[tuple[int, int]]) -> float:
        """Lay out the slowest pipeline with a wide beam, until the slowest already has this layout; return its time."""
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
        """Return [shares, T]: the bound of each template with 1, 2, ... blocks, for all shares that may be needed.
        Shares grow until no template can take that many blocks within a time that is enough with smaller shares.
        """
        rows = [self.pipelines.bounds(1)]
        while len(rows) < self.blocks:
            following = self.pipelines.bounds(len(rows) + 1)
            if following.min() > enough_seconds(self.pipelines.sizes, self.counts, self.blocks, np.stack(rows)):
                break
            rows.append(following)
        return np.stack(rows)

    def result(self, fleet: _Composed, begun: float, bound_seconds: float | None) -> JointPlan:
        """Return the plan of a fleet."""
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
        for pipeline in pipelines:
            speeds = [self.devices[rank].speed for rank in pipeline.devices]
            forward, backward, *_ = self.pipelines.seconds.of_cuts(np.array([pipeline.cuts]), speeds)
            blocks = tuple(range(begin, begin + pipeline.blocks))
            ends = [*pipeline.cuts[1:], num_layers]
            for stage, (first, end, rank) in enumerate(zip(pipeline.cuts, ends, pipeline.devices, strict=True)):
                size = max(0, pipeline.stage_bytes[stage] - int(lies[end] - lies[first]))
                seconds = float(forward[0, stage] + backward[0, stage])
                memory = intervals_of(self.run, [(first, end)], str(self.profile.conditions.get("device", "cpu")))
                stages.append(PlanStage(((first, end),), (rank,), blocks, memory=memory, bytes=size, seconds=seconds))
                of_rank[rank] = size, seconds
            begin += pipeline.blocks
        ranks = []
        for number, device in enumerate(self.devices):
            costs = of_rank.get(number, (None, None))
            speed = device.speed if device.speed < 1 else None
            ranks.append(PlanRank(costs[0], None, costs[1], device.capacity, speed))
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
        """Return the data to explain that no fleet was found."""
        return NoFleet(
            self.profile, self.devices, self.run, self.memory, self.max_stages,
            self.pipelines.costs(self.blocks).peaks,
        )  # fmt: skip


def _strength(kind: DeviceKind) -> tuple[float, int]:
    return -kind.speed, -(kind.capacity or NEVER)


def _number_of_templates(members: Mapping[DeviceKind, Sequence[int]], most: int) -> int:
    """Return the number of templates of at most `most` devices, with the empty template."""
    ways = [1] + [0] * most
    for ranks in members.values():
        ways = [sum(ways[max(0, total - len(ranks)) : total + 1]) for total in range(most + 1)]
    return sum(ways)


def _with_two_merged(members: Mapping[DeviceKind, list[int]]) -> dict[DeviceKind, list[int]]:
    """Merge the two kinds whose devices lose the smallest share of memory and speed; return the new kinds."""

    def loss(pair: tuple[DeviceKind, DeviceKind]) -> float:
        weaker = _weaker(*pair)
        kept = [_share(weaker.capacity, kind.capacity) * weaker.speed / kind.speed for kind in pair]
        return sum(len(members[kind]) * (1 - share) for kind, share in zip(pair, kept, strict=True))

    pair = min(itertools.combinations(sorted(members, key=_strength), 2), key=loss)
    others = {kind: ranks for kind, ranks in members.items() if kind not in pair}
    weaker = _weaker(*pair)
    return others | {weaker: [*others.get(weaker, []), *members[pair[0]], *members[pair[1]]]}


def _weaker(first: DeviceKind, second: DeviceKind) -> DeviceKind:
    limits = [kind.capacity for kind in (first, second) if kind.capacity is not None]
    return DeviceKind(min(limits, default=None), min(first.speed, second.speed))


def _share(part: int | None, total: int | None) -> float:
    """Return the share of a device's memory that remains; estimated as half where only one size has a limit."""
    return 1.0 if part == total else 0.5 if total is None or part is None else part / max(1, total)


def _shared_out(fleet: Fleet, times: NDArray[np.float64], blocks: int) -> list[tuple[int, int]]:
    """Assign blocks to every pipeline; return pairs (template's number, blocks). Each pipeline first gets as many
    blocks as it may take. Surplus blocks are then taken from the slowest pipeline, one by one; each keeps at least 1.
    """
    shares = [[number, gain] for number, gain, count in fleet.pipelines for _ in range(count)]
    for _ in range(sum(share for _, share in shares) - blocks):
        several = [pipeline for pipeline in shares if pipeline[1] > 1]
        slowest = max(several, key=lambda pipeline: (times[pipeline[1] - 1, pipeline[0]], pipeline[1]))
        slowest[1] -= 1
    return [
        (number, share)
        for number, share in sorted(map(tuple, shares), key=lambda pipeline: (-pipeline[1], pipeline[0]))
    ]
