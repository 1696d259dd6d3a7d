"""Looks for a plan that fits and is faster than a given step, among all cuts with every choice of memory intervals.

An oracle for longer chains than `test_fastest.every_plan` can fold and play one by one. Plans are left out only where
their step cannot be shorter: a play in which some stages take the least seconds of any choice is not shorter, or
another choice that fits is no slower in any action. Bytes are those of the fold, seconds those of the play.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from functools import cache

from tests.planners.intervals.stages import all_choices
from varuna_capslog.memory.fold import fold
from varuna_capslog.memory.inflight import RANKS
from varuna_capslog.memory.range_bytes import RangeBytes
from varuna_capslog.planners.layerwise import Intervals
from varuna_capslog.planners.seconds import Link
from varuna_capslog.planning.playing import copy_seconds, gradient_edges, message_bytes, stage_seconds
from varuna_capslog.plans.parts import PlanStage, Units, scheduled
from varuna_capslog.profiles.record import Profile
from varuna_capslog.schedules import RunShape, Schedule, StageGraph
from varuna_capslog.schedules.simulate import StageSeconds, simulated
from varuna_capslog.schedules.stage_graph import Edge

Flags = tuple[bool, bool]
"""True where a stage recomputes, and where it offloads: with these flags of all stages the action lists are known."""
Numbers = tuple[float, ...]
"""Seconds of one stage's actions."""

_FIELDS = ("forward", "backward", "recompute", "bare_forward", "backward_again", "backward_at_once")


def seconds_of_actions(
    profile: Profile, run: RunShape, link: Link, intervals: Intervals, layers: tuple[int, int] = (0, 3)
) -> Numbers:
    """Return the seconds of every kind of action of a stage of these layers; the last are those of a copy."""
    stage = PlanStage((layers,), (0,), memory=intervals)
    seconds = stage_seconds(profile, [stage], run)
    copy = copy_seconds(profile, [stage], "relay", link.host_bandwidth)["O"][0]
    return (*(float(getattr(seconds, name)[0]) for name in _FIELDS), float(copy))


def faster_plan(
    profile: Profile, devices: int, run: RunShape, link: Link, capacity: int, step_seconds: float
) -> tuple[float, list[PlanStage]] | None:
    """Return the step and the stages of a plan that fits every device and is faster than `step_seconds`; None: none."""
    search = _Enumeration(profile, devices, run, link, capacity)
    plans = (
        plan
        for inner in itertools.combinations(range(1, profile.num_layers), devices - 1)
        for plan in search.faster(list(itertools.pairwise((0, *inner, profile.num_layers))), step_seconds)
    )
    return next(plans, None)


class _Enumeration:
    def __init__(self, profile: Profile, devices: int, run: RunShape, link: Link, capacity: int) -> None:
        self.profile, self.devices, self.run, self.link, self.capacity = profile, devices, run, link, capacity
        self.ranges, self.graph = RangeBytes(profile, RANKS, run.recomputes), StageGraph.line(devices, run.microbatches)
        self.units = Units(run.microbatches, None, run.num_blocks)
        self.choices = cache(self._choices)
        self.peaks: dict[tuple[object, ...], int] = {}
        self.lists: dict[tuple[Flags, ...], Schedule] = {}
        self.crossing: dict[object, Mapping[Edge, int | None]] = {}

    def faster(self, bounds: Sequence[tuple[int, int]], limit: float) -> Iterator[tuple[float, list[PlanStage]]]:
        rows = [self.choices(*layers) for layers in bounds]
        for flags in itertools.product(*rows):
            choices = [row[flag] for row, flag in zip(rows, flags, strict=True)]
            stages = [
                PlanStage((layers,), (rank,), memory=next(iter(choice.values()))[0])
                for rank, (layers, choice) in enumerate(zip(bounds, choices, strict=True))
            ]
            least = [tuple(map(min, *choice, *[next(iter(choice))])) for choice in choices]
            if self._step(stages, least) >= limit:
                continue
            fitting = []
            for rank, choice in enumerate(choices):
                fitting.append(list(self._fitting(stages, least, rank, choice, limit)))
                if not fitting[-1]:
                    break
            else:
                for plan in itertools.product(*fitting):
                    numbers, memory = zip(*plan, strict=True)
                    if (step := self._step(stages, numbers)) < limit:
                        yield step, [_with(stage, part) for stage, part in zip(stages, memory, strict=True)]

    def _choices(self, first: int, end: int) -> dict[Flags, dict[Numbers, list[Intervals]]]:
        """Return flags -> seconds of the actions -> the choices with these, for layers first .. end-1."""
        rows: dict[Flags, dict[Numbers, list[Intervals]]] = {}
        for intervals in all_choices(first, end):
            stage = PlanStage(((first, end),), (0,), memory=intervals)
            numbers = seconds_of_actions(self.profile, self.run, self.link, intervals, (first, end))
            flags = stage.recomputes(self.run), stage.offloads
            rows.setdefault(flags, {}).setdefault(numbers, []).append(intervals)
        return rows

    def _fitting(
        self,
        stages: Sequence[PlanStage],
        least: Sequence[Numbers],
        rank: int,
        choice: dict[Numbers, list[Intervals]],
        limit: float,
    ) -> Iterator[tuple[Numbers, Intervals]]:
        """Yield the choices of a stage that fit and may be faster, without those that are slower in every action."""
        kept: list[Numbers] = []
        for numbers in sorted(choice):
            if any(all(map(float.__le__, rival, numbers)) for rival in kept):
                continue
            if self._step(stages, [*least[:rank], numbers, *least[rank + 1 :]]) >= limit:
                continue
            for intervals in choice[numbers]:
                if self._peak(stages, rank, intervals) <= self.capacity:
                    kept.append(numbers)
                    yield numbers, intervals
                    break

    def _peak(self, stages: Sequence[PlanStage], rank: int, intervals: Intervals) -> int:
        """Return the peak of a rank. Of the other stages only their lists matter to it, and of these only those of its
        neighbours, which send it messages: stages with the same flags beside it are folded once.
        """
        beside = tuple((near.recomputes(self.run), near.offloads) for near in stages[max(0, rank - 1) : rank + 2])
        key = rank, stages[rank].layers, intervals, beside
        if key not in self.peaks:
            self.peaks[key] = self._folded(stages, rank, intervals)
        return self.peaks[key]

    def _folded(self, stages: Sequence[PlanStage], rank: int, intervals: Intervals) -> int:
        of_rank = [_with(stage, intervals) if number == rank else stage for number, stage in enumerate(stages)]
        actions = self._actions(of_rank)
        return fold(self.ranges, of_rank, self.units, actions, self.run, only=rank)[0].peak_bytes

    def _actions(self, stages: Sequence[PlanStage]) -> Schedule:
        flags = tuple((stage.recomputes(self.run), stage.offloads) for stage in stages)
        if flags not in self.lists:
            self.lists[flags] = scheduled(self.run.schedule, stages, self.graph, self.run)
        return self.lists[flags]

    def _step(self, stages: Sequence[PlanStage], numbers: Sequence[Numbers]) -> float:
        """Return the played step of stages whose actions take these seconds."""
        *columns, copies = zip(*numbers, strict=True)
        layers = tuple(stage.layers for stage in stages)
        if layers not in self.crossing:
            self.crossing[layers] = message_bytes(self.profile, stages, self.graph, "relay")
        crossing = self.crossing[layers]
        transfer = {way: self.link.seconds(size or 0) for way, size in crossing.items()}
        handover = {way: self.link.handover_seconds(size or 0) for way, size in crossing.items()}
        seconds = StageSeconds(
            **dict(zip(_FIELDS, columns, strict=True)),
            transfer=transfer,
            handover=handover,
            other={"O": copies, "L": copies},
        )
        actions = self._actions(stages)
        gradients, beside = gradient_edges(crossing, self.graph), self.link.copies_beside is not False
        played = simulated(actions, seconds, None, gradients, self.graph, self.link.shared, beside)
        return played.step_seconds


def _with(stage: PlanStage, intervals: Intervals) -> PlanStage:
    return PlanStage(stage.layers, stage.ranks, memory=intervals)
