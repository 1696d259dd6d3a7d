"""Which layers' optimizer moments wait in the host tier: as few bytes as the devices allow.

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
    known: Known = {}
    for rank, fold in enumerate(fold_plan(profile, plan, run, known)):
        own = [number for number, stage in enumerate(stages) if stage.rank == rank]
        layers = frozenset(layer for number in own for layer in stages[number].numbers)
        limit, sizes, away = plan.ranks[rank].capacity_bytes, ranges.moments.of(layers, layers), layers
        usable = NEVER if limit is None else headroom.usable(limit)
        begun, most = ranges.resident(layers, layers), max(fold.bytes, default=0)
        at_end = begun + ranges.update(layers, layers)
        for layer in sorted(sizes, key=lambda layer: -sizes[layer]):
            less = away - {layer}
            resident = ranges.resident(layers, less)
            # of the end of the step, where moments come back, it is known by how much it rises
            end = fold.end_bytes + resident + ranges.update(layers, less) - at_end
            if max(most + resident - begun, end) <= usable:
                away = less
        for number in own:
            stages[number] = _away(stages[number], away.intersection(stages[number].numbers))
    found = dataclasses.replace(plan, stages=tuple(stages))
    return found if judged(profile, found, run, known=known).fits else plan


def _away(stage: PlanStage, layers: frozenset[int]) -> PlanStage:
    found = []
    for first, end in stage.layers:
        own = sorted(layers.intersection(range(first, end)))
        found += [MemoryInterval(*piece, "host") for piece in ranges_of(own)] if own else []
    return dataclasses.replace(stage, moments=tuple(found))
