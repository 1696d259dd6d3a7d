"""Pipelines, stages and microbatch size together, for any number of devices of any kinds.

N devices become pipelines of different length and cuts (7 = 3 + 4), and the microbatches of a step are shared out among
them in whole accumulation blocks, so that the slowest pipeline ends as early as can be. A run's start calls it with a
profile per microbatch size; a live change of the membership calls it again with the run's one profile and blocks.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from varuna_capslog import fields
from varuna_capslog.errors import CapslogError
from varuna_capslog.memory import AUTO, MEMORY_MODELS, RunShape, StageCosts, resolve
from varuna_capslog.memory.headroom import Headroom
from varuna_capslog.plan import Plan, Stage
from varuna_capslog.planners.fleet import Fleet, compose, enough_seconds
from varuna_capslog.planners.seconds import LayerSeconds, Link
from varuna_capslog.planners.templates import Kind, Templates, combinations
from varuna_capslog.planners.throughput import Run, fastest_cuts
from varuna_capslog.profiles.record import Profile

__all__ = ["Device", "JointPlan", "Pipeline", "joint_plan"]

_MANY_STAGES = 16
"""Stages of a pipeline that are always weighed; more only where the blocks are too few to use the devices otherwise."""

_MANY_TEMPLATES = 4_000
"""Combinations of kinds from which on shorter pipelines must do."""

_ROUNDS = 40
"""How often the fleet is composed again with simulated step times in place of bounds, at most."""

_ENOUGH = 0.005
"""Share of the step time that another composition must promise to be tried."""

_BEAM = 32
_LAST_BEAM = 256
"""Width of the beam that lays out a pipeline while the fleet is composed, and of those of the answer."""


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
class Pipeline:
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
    """The answer of `joint_plan`.

    step_seconds: of the slowest pipeline; None where nothing fits. bound_seconds: no fleet of pipelines of at most
    `max_stages` stages, in any order of the devices and with any cuts, takes less.
    idle: devices that no pipeline uses.
    """

    plan: Plan
    pipelines: tuple[Pipeline, ...]
    step_seconds: float | None
    bound_seconds: float | None
    max_stages: int
    idle: tuple[int, ...]


def joint_plan(
    profiles: Profile | Sequence[Profile],
    devices: Sequence[Device],
    minibatch_size: int,
    blocks: int | None = None,
    memory: str = AUTO,
    schedule: str = "varuna",
    recompute: bool = True,
    stage_inputs: str = "host",
    link: Link | None = None,
    max_stages: int | None = None,
) -> JointPlan:
    """Choose pipelines, their devices, cuts and microbatches for a step of `minibatch_size` samples.

    profiles: one, or one per microbatch size (condition `microbatch_size`, 1 where there is none) to choose from.
    blocks: `train.accumulation_blocks`; default: every microbatch is a block. A pipeline owns whole blocks, so there
    are never more pipelines than blocks.
    memory, schedule, recompute, stage_inputs: as in `planners.plan`.
    link: between neighbouring stages, and between the pipelines for the gradients of other blocks; None costs nothing.
    max_stages: of one pipeline; default min(L, N, 16), and more where the blocks are so few that shorter pipelines
    would leave devices idle.

    A device is left idle only if using it would lengthen the step, or there are fewer blocks and layers than devices.
    Where nothing fits, the plan is the smallest-peak pipeline over all devices with `fits` False and the shortfall.

    Raises CapslogError for sizes that do not divide, no devices, and profiles without seconds.
    """
    begun = time.perf_counter()
    choices = [profiles] if isinstance(profiles, Profile) else list(profiles)
    if not choices or not devices:
        raise CapslogError("a joint plan needs at least one profile and one device")
    answers = [
        _Search(profile, devices, minibatch_size, blocks, memory, schedule, recompute, stage_inputs, link, max_stages)
        for profile in choices
    ]
    found = [(answer, fleet) for answer in answers if (fleet := answer.best_fleet()) is not None]
    if not found:
        return answers[0].nothing_fits(begun)
    answer, _ = min(found, key=lambda one: one[1].step_seconds)
    return answer.result(begun, min(one.bound_seconds for one, _ in found))


@dataclass(frozen=True)
class _Column:
    """A template with its share of blocks, laid out: the kind of each stage, cuts and seconds."""

    kinds: tuple[int, ...]
    cuts: tuple[int, ...]
    step_seconds: float
    stage_bytes: tuple[int, ...]


@dataclass(frozen=True)
class _Composed:
    """Pipelines as (template's number, blocks), all laid out."""

    step_seconds: float
    shares: list[tuple[int, int]]


class _Search:
    """The search for one profile."""

    def __init__(
        self,
        profile: Profile,
        devices: Sequence[Device],
        minibatch_size: int,
        blocks: int | None,
        memory: str,
        schedule: str,
        recompute: bool,
        stage_inputs: str,
        link: Link | None,
        max_stages: int | None,
    ) -> None:
        self.profile, self.devices, self.schedule = profile, list(devices), schedule
        self.recompute, self.stage_inputs, self.link = recompute, stage_inputs, link or Link()
        self.microbatch_size = fields.whole(profile.conditions.get("microbatch_size", 1), "microbatch_size", minimum=1)
        self.num_microbatches, left = divmod(minibatch_size, self.microbatch_size)
        if left or self.num_microbatches < 1:
            raise CapslogError(
                f"a minibatch of {minibatch_size} is not a whole number of microbatches of {self.microbatch_size}"
            )
        self.memory, _ = resolve(memory, profile, RunShape(self.num_microbatches, schedule, recompute, stage_inputs))
        if (gap := MEMORY_MODELS[self.memory].gap(schedule, recompute, stage_inputs)) is not None:
            raise CapslogError(f"a joint plan needs peaks, but {gap}")
        self.blocks = self.num_microbatches if blocks is None else fields.whole(blocks, "blocks", minimum=1)
        if self.num_microbatches % self.blocks:
            raise CapslogError(
                f"{self.blocks} blocks do not divide the {self.num_microbatches} microbatches of a step; "
                "choose a number that does"
            )
        self.of_block = self.num_microbatches // self.blocks
        self.seconds = LayerSeconds.of_profile(profile, link)
        headroom = Headroom.of(profile)
        kind_of = [Kind(None if one.capacity is None else headroom.usable(one.capacity), one.speed) for one in devices]
        self.kinds = sorted(set(kind_of), key=_strength)
        self.members = [[rank for rank, own in enumerate(kind_of) if own == kind] for kind in self.kinds]
        self.counts = [len(members) for members in self.members]
        self.max_stages = self._longest(max_stages)
        self.templates = combinations(self.counts, self.max_stages)
        self.sizes = np.array(self.templates, dtype=np.int64)
        # The gradients of every block wait until all are added in order; the first block's are in the profile.
        parameters = [layer.parameter_bytes or 0 for layer in profile.layers]
        running = np.concatenate([[0], np.cumsum(np.array(parameters, dtype=np.int64))])
        self.parameter_bytes: NDArray[np.int64] = running
        self._of_share: dict[int, Templates] = {}
        self._columns: dict[tuple[int, int], _Column | None] = {}
        self.bound_seconds = 0.0
        self._composed: _Composed | None = None

    def _longest(self, max_stages: int | None) -> int:
        most = min(self.profile.num_layers, len(self.devices))
        if max_stages is not None:
            return min(most, fields.whole(max_stages, "max_stages", minimum=1))
        longest = min(most, max(_MANY_STAGES, 2 * -(-len(self.devices) // self.blocks)))
        while longest > 1 and _number_of_templates(self.counts, longest) > _MANY_TEMPLATES:
            longest -= 1
        return longest

    def costs(self, microbatches: int) -> StageCosts:
        """The bytes of every stage of a pipeline that runs so many microbatches."""
        run = RunShape(microbatches, self.schedule, self.recompute, self.stage_inputs)
        return MEMORY_MODELS[self.memory].stage_costs(self.profile, run)

    def copy_bytes(self, share: int) -> NDArray[np.int64]:
        """[L, L + 1]: bytes of the gradients that wait beside the first block's, where a pipeline has `share` blocks.

        A single pipeline adds its blocks as they end, several keep all of theirs until the exchange.
        """
        copies = min(share, 2) - 1 if share == self.blocks else share - 1
        ranges = self.parameter_bytes[None, :] - self.parameter_bytes[:-1, None]
        return np.asarray(copies * np.maximum(ranges, 0), dtype=np.int64)

    def exchange_seconds(self, share: int, stage_parameters: float) -> float:
        """What a stage with so many bytes of parameters waits for the gradients of the other pipelines' blocks."""
        if share == self.blocks or self.link.bandwidth is None:
            return 0.0
        return (self.blocks - share) * stage_parameters / self.link.bandwidth

    def bounds(self, share: int) -> NDArray[np.float64]:
        """Bounds of all templates with `share` blocks."""
        if share not in self._of_share:
            microbatches = share * self.of_block
            self._of_share[share] = Templates(
                self.templates, self.kinds, self.costs(microbatches), self.seconds, self.schedule, self.recompute,
                microbatches, self.copy_bytes(share),
            )  # fmt: skip
        # The stage with most parameters has at least an even part of them.
        least = self.exchange_seconds(share, float(self.parameter_bytes[-1])) / self.sizes.sum(axis=1)
        return self._of_share[share].seconds_of + least

    def column(self, number: int, share: int, beam: int = _BEAM) -> _Column | None:
        """A template with a share of blocks, laid out and simulated; None where the order of kinds does not fit."""
        key = (number, share)
        if key not in self._columns or beam > _BEAM:
            order, _ = self._of_share[share].layout(self.templates[number])
            kinds = [self.kinds[kind] for kind in order]
            microbatches = share * self.of_block
            costs = _WithCopies(self.costs(microbatches), self.copy_bytes(share))
            capacities = [2**61 if kind.capacity is None else kind.capacity for kind in kinds]
            run = Run(self.schedule, microbatches, self.recompute)
            speeds = [kind.speed for kind in kinds]
            best = fastest_cuts(costs, self.seconds, run, len(kinds), capacities, speeds, beam)
            self._columns[key] = None
            if best is not None:
                ends = [*best.cuts[1:], self.profile.num_layers]
                held = [self.parameter_bytes[b] - self.parameter_bytes[a] for a, b in zip(best.cuts, ends, strict=True)]
                step = best.step_seconds + self.exchange_seconds(share, float(max(held)))
                stage_bytes = tuple(costs.peaks(best.cuts))
                self._columns[key] = _Column(tuple(order), best.cuts, step, stage_bytes)
        return self._columns[key]

    def best_fleet(self) -> _Composed | None:
        """Compose the fleet with bounds, lay out and simulate what was chosen, and again, until nothing is left to do.

        A bound is never above the simulated time, so a fleet made of simulated columns alone that is the best among
        bounds and simulated times is the best of all columns, each in the layout that attains its bound.
        """
        table = self._table()
        best: _Composed | None = None
        times = table.copy()
        least = 0.0
        for number_of_round in range(_ROUNDS):
            fleet = compose(self.sizes, self.counts, self.blocks, times, least)
            if fleet is None:
                break
            least = fleet.seconds
            if number_of_round == 0:
                self.bound_seconds = fleet.seconds
            if best is not None and fleet.seconds >= best.step_seconds * (1 - _ENOUGH):
                break
            shares = _shared_out(fleet, times, self.blocks)
            fresh = [key for key in dict.fromkeys(shares) if key not in self._columns]
            for number, share in fresh:
                column = self.column(number, share)
                times[share - 1, number] = np.inf if column is None else column.step_seconds
            slowest = float(max(times[share - 1, number] for number, share in shares))
            if np.isfinite(slowest) and (best is None or slowest < best.step_seconds):
                best = _Composed(slowest, shares)
            if not fresh:
                break
        if best is not None:
            laid_out = [self.column(number, share, _LAST_BEAM) for number, share in dict.fromkeys(best.shares)]
            best = _Composed(max(one.step_seconds for one in laid_out if one is not None), best.shares)
        self._composed = best
        return best

    def _table(self) -> NDArray[np.float64]:
        """[shares, T]: the bound of each template with 1, 2, ... blocks, for as many as the best fleet could need.

        More blocks are looked at until no template could take them within the time in which fewer are enough.
        """
        rows = [self.bounds(1)]
        while len(rows) < self.blocks:
            following = self.bounds(len(rows) + 1)
            if following.min() > enough_seconds(self.sizes, self.counts, self.blocks, np.stack(rows)):
                break
            rows.append(following)
        return np.stack(rows)

    def result(self, begun: float, bound_seconds: float) -> JointPlan:
        """The plan of the fleet that was found."""
        assert self._composed is not None
        pools = [list(members) for members in self.members]
        pipelines = []
        for number, share in self._composed.shares:
            column = self._columns[number, share]
            assert column is not None
            placed = tuple(pools[kind].pop(0) for kind in column.kinds)
            pipelines.append(Pipeline(placed, column.cuts, share, column.step_seconds, column.stage_bytes))
        idle = tuple(sorted(number for pool in pools for number in pool))
        return JointPlan(
            self._plan(pipelines, time.perf_counter() - begun), tuple(pipelines), self._composed.step_seconds,
            min(bound_seconds, self._composed.step_seconds), self.max_stages, idle,
        )  # fmt: skip

    def _plan(self, pipelines: Sequence[Pipeline], search_seconds: float) -> Plan:
        num_layers = self.profile.num_layers
        stages, microbatches, begin = [], [], 0
        for number, one in enumerate(pipelines):
            speeds = [self.devices[rank].speed for rank in one.devices]
            forward, backward, _ = self.seconds.of_cuts(np.array([one.cuts]), speeds)
            ends = [*one.cuts[1:], num_layers]
            for stage, (first, end, rank) in enumerate(zip(one.cuts, ends, one.devices, strict=True)):
                took = float(forward[0, stage] + backward[0, stage])
                stages.append(
                    Stage(number, ((first, end),), (rank,), bytes=max(0, one.stage_bytes[stage]), seconds=took)
                )
            microbatches.append(tuple(range(begin, begin + one.blocks * self.of_block)))
            begin += one.blocks * self.of_block
        capacities = [one.capacity for one in self.devices]
        limited = all(capacity is not None for capacity in capacities)
        return Plan(
            num_layers=num_layers,
            cuts=pipelines[0].cuts,
            planner="joint",
            memory_model=self.memory,
            model=self.profile.model,
            profile_digest=self.profile.digest,
            schedule=self.schedule,
            num_microbatches=self.num_microbatches,
            microbatch_size=self.microbatch_size,
            peak_bytes=max(peak for one in pipelines for peak in one.stage_bytes),
            capacity_bytes=tuple(capacity or 0 for capacity in capacities) if limited else None,
            fits=True,
            search_seconds=search_seconds,
            placed=tuple(stages),
            microbatches_of_pipeline=tuple(microbatches),
        )

    def nothing_fits(self, begun: float) -> JointPlan:
        """The smallest-peak pipeline over as many devices as there are layers, and what it lacks."""
        from varuna_capslog.planners import plan

        strongest = sorted(self.devices, key=lambda one: one.capacity or 2**61, reverse=True)
        used = strongest[: self.profile.num_layers]
        answer = plan(
            self.profile, len(used), "exact", self.memory, [one.capacity or 2**61 for one in used], self.schedule,
            self.num_microbatches, self.microbatch_size, self.recompute, self.stage_inputs,
        )  # fmt: skip
        answer = replace(answer, planner="joint", search_seconds=time.perf_counter() - begun)
        return JointPlan(answer, (), None, None, self.max_stages, ())


class _WithCopies:
    """Stage costs with the gradients that wait added to every stage."""

    def __init__(self, costs: StageCosts, copies: NDArray[np.int64]) -> None:
        self._costs, self._copies = costs, copies
        self.num_layers, self.position_free = costs.num_layers, costs.position_free

    def stage_bytes(self, first: int, end: int, stage: int = 0, stages: int = 1) -> int:
        return self._costs.stage_bytes(first, end, stage, stages) + int(self._copies[first, end])

    def matrix(self, stage: int = 0, stages: int = 1) -> NDArray[np.int64]:
        return np.asarray(self._costs.matrix(stage, stages) + self._copies)

    def peaks(self, cuts: Sequence[int]) -> list[int]:
        ends = [*cuts[1:], self.num_layers]
        held = zip(self._costs.peaks(cuts), cuts, ends, strict=True)
        return [peak + int(self._copies[first, end]) for peak, first, end in held]


def _strength(kind: Kind) -> tuple[float, int]:
    return -kind.speed, -(kind.capacity or 2**61)


def _number_of_templates(counts: Sequence[int], most: int) -> int:
    """How many templates of at most `most` devices there are, the empty one included."""
    ways = [1] + [0] * most
    for count in counts:
        ways = [sum(ways[max(0, total - count) : total + 1]) for total in range(most + 1)]
    return sum(ways)


def _shared_out(fleet: Fleet, times: NDArray[np.float64], blocks: int) -> list[tuple[int, int]]:
    """Give every pipeline (a template's number) its blocks: as many as it may take, less what is too much in all.

    Blocks are taken back one by one from whoever then takes longest, and nobody is left without.
    """
    shares = [[number, gain] for number, gain, count in fleet.pipelines for _ in range(count)]
    for _ in range(sum(share for _, share in shares) - blocks):
        several = [one for one in shares if one[1] > 1]
        slowest = max(several, key=lambda one: (times[one[1] - 1, one[0]], one[1]))
        slowest[1] -= 1
    return [(number, share) for number, share in sorted(map(tuple, shares), key=lambda one: (-one[1], one[0]))]
