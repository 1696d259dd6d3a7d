"""Distribution of the optimizer's moments of layers over replicas: about as many bytes on each.

`replicated` asks it for plans that do not fit where every replica keeps all of them.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict

from varuna_capslog.planning.stage_seconds import moment_bytes
from varuna_capslog.plans.parts import MemoryInterval, PlanStage, ranges_of
from varuna_capslog.plans.plan import Plan
from varuna_capslog.profiles.record import Profile

__all__ = ["with_shared_moments"]


def with_shared_moments(profile: Profile, plan: Plan) -> Plan | None:
    """The plan where one holder alone keeps the moments of each layer: the one with the fewest bytes of them so far,
    the largest layers first. None where no layer has several holders whose moments the profile tells.

    Layers that share parameters keep theirs everywhere, as the engine wants it.
    """
    sizes, apart = moment_bytes(profile), {layer for parameter in profile.shared for layer in parameter.layers}
    holders = defaultdict[int, list[int]](list)
    for number, stage in enumerate(plan.stages):
        for layer in stage.numbers:
            holders[layer].append(number)
    several = [layer for layer, numbers in holders.items() if len(numbers) > 1 and layer not in apart]
    shared = [layer for layer in several if sizes.get(layer)]
    if not shared:
        return None
    kept: dict[int, int] = defaultdict(int)
    for layer in holders.keys() - set(shared):
        for number in holders[layer]:
            kept[plan.stages[number].rank] += sizes.get(layer) or 0
    elsewhere: dict[int, set[int]] = defaultdict(set)
    for layer in sorted(shared, key=lambda layer: (-(sizes[layer] or 0), layer)):
        keeper = min(holders[layer], key=lambda number: kept[plan.stages[number].rank])
        kept[plan.stages[keeper].rank] += sizes[layer] or 0
        for number in set(holders[layer]) - {keeper}:
            elsewhere[number].add(layer)
    stages = tuple(_leaving(stage, elsewhere[number]) for number, stage in enumerate(plan.stages))
    return dataclasses.replace(plan, stages=stages)


def _leaving(stage: PlanStage, layers: set[int]) -> PlanStage:
    """The stage whose rank keeps no moments of these layers."""
    pieces = tuple(MemoryInterval(*piece, "replica") for piece in ranges_of(sorted(layers))) if layers else ()
    return dataclasses.replace(stage, moments=pieces)
