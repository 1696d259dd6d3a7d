"""Choice of the layers whose optimizer moments wait in the host tier: as few bytes as the devices allow.

A plan for devices that are too small otherwise is searched with the moments of all layers away; here those that the
devices have room for come back.
"""

from __future__ import annotations

import dataclasses

from varuna_capslog.memory.costs import NEVER
from varuna_capslog.memory.headroom import Headroom
from varuna_capslog.memory.range_bytes import RangeBytes
from varuna_capslog.planning.ranks import Known, fold_plan, judged
from varuna_capslog.plans.parts import MemoryInterval, PlanStage, ranges_of
from varuna_capslog.plans.plan import Plan
from varuna_capslog.profiles.record import Profile
from varuna_capslog.schedules import RunShape

__all__ = ["all_away", "with_room_used"]


def all_away(plan: Plan) -> Plan:
    """The plan with the moments of all layers in the host tiers."""
    return dataclasses.replace(plan, stages=tuple(_away(stage, frozenset(stage.numbers)) for stage in plan.stages))


def with_room_used(profile: Profile, plan: Plan, run: RunShape, ranges: RangeBytes) -> Plan:
    """A plan that fits with all moments away, and still does with those on the devices that these have room for.

    The moments of the largest layers come back first, so that few copies are left.

    Args:
        ranges: of the profile, with the moments of all layers on the device.
    """
    headroom, stages = Headroom.of(profile), list(plan.stages)
    range_bytes: Known = {}
    for rank, fold in enumerate(fold_plan(profile, plan, run, range_bytes)):
        numbers = [number for number, stage in enumerate(stages) if stage.rank == rank]
        layers = frozenset(layer for number in numbers for layer in stages[number].numbers)
        limit, sizes, away = plan.ranks[rank].capacity_bytes, ranges.moments.of(layers, layers), layers
        usable = NEVER if limit is None else headroom.usable(limit)
        begun, most = ranges.resident(layers, layers), max(fold.bytes, default=0)
        at_end = begun + ranges.update(layers, layers)
        for layer in sorted(sizes, key=lambda layer: -sizes[layer]):
            less = away - {layer}
            resident = ranges.resident(layers, less)
            # at the end of the step the moments come back: its bytes rise by a known amount
            end = fold.end_bytes + resident + ranges.update(layers, less) - at_end
            if max(most + resident - begun, end) <= usable:
                away = less
        for number in numbers:
            stages[number] = _away(stages[number], away.intersection(stages[number].numbers))
    candidate = dataclasses.replace(plan, stages=tuple(stages))
    return candidate if judged(profile, candidate, run, known=range_bytes).fits else plan


def _away(stage: PlanStage, layers: frozenset[int]) -> PlanStage:
    intervals = []
    for first, end in stage.layers:
        numbers = sorted(layers.intersection(range(first, end)))
        intervals += [MemoryInterval(*piece, "host") for piece in ranges_of(numbers)] if numbers else []
    return dataclasses.replace(stage, moments=tuple(intervals))
