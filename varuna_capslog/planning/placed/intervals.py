"""Memory intervals for stages that may have replicas, or hold pieces of several branches: the cheapest that fit.

`planners/intervals` finds the cheapest intervals of one piece of a stage within a budget. Only the fold of the plan
tells the other bytes of a rank: a stage gets so much less of its device in a further search, until the ranks of all
stages fit. The bytes that a stage of several pieces has to save are shared out among the pieces at the least cost.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from varuna_capslog.memory.headroom import Headroom
from varuna_capslog.memory.inflight import RANKS
from varuna_capslog.memory.range_bytes import RangeBytes
from varuna_capslog.planners.intervals import EXACT_LAYERS, Handling, IntervalFronts, stage_bytes
from varuna_capslog.planners.seconds import LayerSeconds
from varuna_capslog.plans.parts import INTERVAL_KINDS, MemoryInterval, PlanStage, scheduled
from varuna_capslog.plans.plan import Plan
from varuna_capslog.profiles.record import Profile
from varuna_capslog.schedules import RunShape, Schedule, from_strings

__all__ = ["PlacedIntervals"]

_ROUNDS = 6
"""Searches, at most, each with more bytes reserved."""
_LABELS, _PLACES = 32, 48
"""Choices that are kept per cut of a piece of more than `EXACT_LAYERS` layers, and the places at which its intervals
may begin and end."""
_PARTS = 8
"""The bytes that a stage of several pieces must save are shared out among the pieces in so many parts."""
_KINDS = tuple(kind for kind in INTERVAL_KINDS if not MemoryInterval(0, 1, kind).offloads)

Judge = Callable[[Plan], Plan]
"""The plan with the bytes of its ranks, and whether it fits."""


class PlacedIntervals:
    """The cheapest intervals of the stages of many plans for one profile and run; what is found is remembered.

    run: the whole step. Raises CapslogError for seconds and runs that the profile lacks.
    """

    def __init__(self, profile: Profile, run: RunShape) -> None:
        self._profile, self._run = profile, run
        self._seconds = LayerSeconds.of_profile(profile)
        self._ranges = RangeBytes(profile, RANKS, run.recomputes)
        self._of_stage: dict[tuple[int, ...], RangeBytes] = {}
        self._fronts: dict[tuple[int, int, tuple[int, ...], Handling], IntervalFronts] = {}

    def treated(self, plan: Plan, verdict: Plan, judge: Judge, redone: Callable[[Plan], Plan]) -> Plan | None:
        """The plan with intervals with which it fits; None where none were found.

        Args:
            plan: its stages keep everything. verdict: the same, judged.
            redone: the plan with the lists of actions that stages with such intervals need.
        """
        first, calls = plan, self._calls(plan)
        kept = [self._kept(plan, stage, *stage_calls) for stage, stage_calls in zip(plan.stages, calls, strict=True)]
        reserved = [0] * len(plan.stages)
        for _ in range(_ROUNDS):
            lacks = self._lacks(verdict)
            if not any(lacks.values()):
                return None  # not the device's memory is short
            spare = [lacks[stage.rank] for stage in plan.stages]
            for layers in {stage.layers for stage in plan.stages}:  # replicas are treated alike
                numbers = [number for number, stage in enumerate(plan.stages) if stage.layers == layers]
                more = max(spare[number] for number in numbers)
                for number in numbers:
                    reserved[number] += more
            stages = [
                self._with_less(first, stage, how, sizes, less)
                for stage, how, sizes, less in zip(first.stages, calls, kept, reserved, strict=True)
            ]
            if [stage.memory for stage in stages] == [stage.memory for stage in plan.stages]:
                return None
            plan = redone(dataclasses.replace(first, stages=tuple(stages), actions=None))
            verdict = judge(plan)
            if verdict.fits:
                return plan
            if verdict.fits is None:
                return None
        return None

    def _lacks(self, verdict: Plan) -> Counter[int]:
        """Bytes that each rank lacks."""
        headroom = Headroom.of(self._profile)
        return Counter(
            {
                rank: max(0, headroom.device(device.bytes or 0) - device.capacity_bytes)
                for rank, device in enumerate(verdict.ranks)
                if device.capacity_bytes is not None
            }
        )

    def _kept(self, plan: Plan, stage: PlanStage, in_flight: int, handling: Handling) -> list[int]:
        """Bytes of each piece of a stage that keeps everything."""
        ranges = self._ranges_of(plan, stage)
        return [stage_bytes(ranges, first, end, (), in_flight, handling) for first, end in stage.layers]

    def _with_less(
        self, plan: Plan, stage: PlanStage, calls: tuple[int, Handling], kept: Sequence[int], less: int
    ) -> PlanStage:
        """The stage with the cheapest intervals that take so much less than `kept`; where none do, those that take
        least.
        """
        if not less:
            return dataclasses.replace(stage, memory=())
        count, handling = calls
        pieces, parts = list(zip(stage.layers, kept, strict=True)), 1 if len(kept) == 1 else _PARTS
        # parts of `less` that the pieces so far save -> seconds that run again for it, and the intervals
        ways: dict[int, tuple[float, tuple[MemoryInterval, ...]]] = {0: (0.0, ())}
        for (first, end), size in pieces:
            fronts, behind = self._fronts_of(plan, stage, first, end, handling), dict[int, tuple[float, Any]]()
            least = fronts.least_bytes(first, end, count)[0]
            for part in range(parts + 1):
                choice = fronts.cheapest(first, end, count, max(least, size - less * part / parts))
                assert choice is not None, "the fewest bytes fit into themselves"
                saved = int((size - choice.bytes) * parts / less)
                for before, (seconds, intervals) in ways.items():
                    way = seconds + choice.again_seconds, (*intervals, *choice.intervals)
                    key = min(parts, before + saved)
                    behind[key] = min(way, behind.get(key, way), key=lambda way: way[0])
            ways = behind
        return dataclasses.replace(stage, memory=ways[max(ways)][1])

    def _calls(self, plan: Plan) -> list[tuple[int, Handling]]:
        """Return the calls that each stage has in flight, and how its list handles them."""
        units, blocks, stage_calls = plan.units, plan.units.blocks or 1, []
        alike, rows = Counter(stage.layers for stage in plan.stages), self._rows(plan)
        for stage in plan.stages:
            served, in_flight, most = len(stage.blocks or range(blocks)), 0, 0
            for action in rows[stage.rank]:
                in_flight += {"F": 1, "B": -1}.get(action.kind, 0)
                most = max(most, in_flight)
            waiting = min(1, blocks - 1) if alike[stage.layers] == 1 else served - 1
            alone, calls = most == 1, served * units.of_block
            handling = Handling(recomputed=not alone, calls=calls, waiting_blocks=waiting, at_once=alone)
            stage_calls.append((most, handling))
        return stage_calls

    def _rows(self, plan: Plan) -> Schedule:
        """The lists of a plan whose stages keep everything."""
        if plan.actions is not None:
            return from_strings(plan.actions)
        stages = [dataclasses.replace(stage, memory=()) for stage in plan.stages]
        return scheduled(plan.schedule or "1f1b", stages, plan.stage_graph(self._profile.known_edges), self._run)

    def _ranges_of(self, plan: Plan, stage: PlanStage) -> RangeBytes:
        if plan.routes != "direct":
            return self._ranges
        if (layers := tuple(stage.numbers)) not in self._of_stage:
            self._of_stage[layers] = self._ranges.of_stage(layers)
        return self._of_stage[layers]

    def _fronts_of(self, plan: Plan, stage: PlanStage, first: int, end: int, handling: Handling) -> IntervalFronts:
        layers = tuple(stage.numbers) if plan.routes == "direct" else ()
        key = first, end, layers, handling
        if key not in self._fronts:
            size = end - first
            borders = {first, end, *np.linspace(first, end, min(size, _PLACES) + 1).astype(int).tolist()}
            self._fronts[key] = IntervalFronts(
                self._ranges_of(plan, stage),
                self._seconds,
                handling,
                0 if size <= EXACT_LAYERS else _LABELS,
                firsts=(first,),
                kinds=_KINDS,
                borders=borders,
            )
        return self._fronts[key]
