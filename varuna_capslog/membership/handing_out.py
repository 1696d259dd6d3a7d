"""The stages of lost members given to those that are left, which keep all that they have: plans of a small motion.

A stage goes whole to one member, or in two parts to two. It becomes a stage more there, or part of one that it
continues. Pure; no torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from functools import cache

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.membership.generation import Generation
from varuna_capslog.membership.state import State
from varuna_capslog.plans.parts import MemoryInterval, PlanStage
from varuna_capslog.plans.plan import Plan

__all__ = ["Part", "among", "bare", "follows_a_loss", "given", "ways_to_give"]

Part = tuple[int, int, int]
"""Of a stage's layers [first, end) and who gets them, by rank. A stage of several pieces goes whole, from its first
layer to its last one.
"""


def follows_a_loss(state: State, record: Generation) -> bool:
    """Whether a member may found this generation by handing out the stages of those that are lost: nothing else has
    changed, and it has applied a step of the generation that lost them, all copies of which are therefore there.
    """
    members, left = state.record.members, record.members
    lost = left != members and left == tuple(one for one in members if one in left) and not record.leaving
    return lost and state.at.generation == state.record.number


def bare(plan: Plan) -> Plan | None:
    """The plan without its predictions and devices, whose stages may be given away; None where its lists of actions
    hold for these ranks only.
    """
    if plan.actions is not None or any(len(stage.ranks) != 1 for stage in plan.stages):
        return None
    stages = tuple(dataclasses.replace(stage, bytes=None, seconds=None) for stage in plan.stages)
    return Plan(plan.num_layers, stages, plan.units, plan.schedule, routes=plan.routes, variants=plan.variants)


def ways_to_give(plan: Plan, number: int, ranks: Sequence[int]) -> Iterator[tuple[Part, ...]]:
    """Every way to give a stage to one of these ranks, or its first layers to one and its last ones to another.

    A rank that has some of these layers for other blocks takes them only as the very stage that it has.
    """
    stage = plan.stages[number]
    own: dict[int, list[PlanStage]] = {}
    for at, one in enumerate(plan.stages):
        if at != number:
            own.setdefault(one.rank, []).append(one)

    @cache
    def takes(rank: int, first: int, end: int) -> bool:
        part = {layer for layer in stage.numbers if first <= layer < end}
        return all(part.isdisjoint(one.numbers) or part == set(one.numbers) for one in own.get(rank, ()))

    for rank in ranks:
        if takes(rank, stage.first, stage.end):
            yield ((stage.first, stage.end, rank),)
    if len(stage.layers) == 1 and plan.routes == "relay":
        for cut in range(stage.first + 1, stage.end):
            first = [rank for rank in ranks if takes(rank, stage.first, cut)]
            last = [rank for rank in ranks if takes(rank, cut, stage.end)]
            yield from (
                ((stage.first, cut, one), (cut, stage.end, other)) for one in first for other in last if one != other
            )


def given(plan: Plan, number: int, parts: Sequence[Part]) -> Plan | None:
    """The plan with a stage given away so; None where that is no plan, as a rank holds a layer once only."""
    stages = list(plan.stages)
    gone = stages.pop(number)
    for part in reversed(parts):
        stages.insert(number, _part(gone, part))
    for first, end, rank in parts:
        own = next(at for at, one in enumerate(stages) if one.rank == rank and (one.first, one.end) == (first, end))
        for at, other in enumerate(stages):
            if at != own and other.rank == rank and (joined := _joined(stages[own], other, plan.routes)) is not None:
                stages[min(own, at)] = joined
                del stages[max(own, at)]
                break
    try:
        return dataclasses.replace(plan, stages=tuple(stages))
    except CapslogError:
        return None


def among(plan: Plan, places: Mapping[int, int]) -> Plan:
    """The plan with the ranks of those that are left; places: rank -> its new number."""
    stages = [dataclasses.replace(stage, ranks=(places[stage.rank],)) for stage in plan.stages]
    return dataclasses.replace(plan, stages=tuple(stages))


def _part(stage: PlanStage, part: Part) -> PlanStage:
    first, end, rank = part
    if (first, end) == (stage.first, stage.end):
        return dataclasses.replace(stage, ranks=(rank,))
    memory = None if stage.memory is None else _within(stage.memory, first, end)
    moments = _within(stage.moments, first, end)
    return dataclasses.replace(stage, layers=((first, end),), ranks=(rank,), memory=memory, moments=moments)


def _within(intervals: Sequence[MemoryInterval], first: int, end: int) -> tuple[MemoryInterval, ...]:
    """What these intervals are among the layers [first, end)."""
    return tuple(
        MemoryInterval(max(first, one.first), min(end, one.end), one.kind)
        for one in intervals
        if max(first, one.first) < min(end, one.end)
    )


def _joined(one: PlanStage, other: PlanStage, routes: str) -> PlanStage | None:
    """Two stages of one rank as one: the same layers for more blocks, or a longer range of the chain for the same."""
    if one.grain != other.grain or (one.memory is None) != (other.memory is None):
        return None
    limits = (one.in_flight, other.in_flight)
    in_flight = None if None in limits else max(limit for limit in limits if limit is not None)
    treated = (one.memory, one.moments) == (other.memory, other.moments)
    if one.layers == other.layers and treated and one.blocks is not None and other.blocks is not None:
        return dataclasses.replace(one, blocks=tuple(sorted({*one.blocks, *other.blocks})), in_flight=in_flight)
    before, after = (one, other) if one.first < other.first else (other, one)
    single = len(one.layers) == len(other.layers) == 1 and routes == "relay"
    if not single or before.end != after.first or one.blocks != other.blocks:
        return None
    return dataclasses.replace(
        before,
        layers=((before.first, after.end),),
        memory=None if before.memory is None or after.memory is None else (*before.memory, *after.memory),
        moments=(*before.moments, *after.moments),
        in_flight=in_flight,
    )
