"""The stages of lost members given to the remaining ones, which keep all that they have: plans of a small motion.

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
"""Layers [first, end) of a stage, and the rank that gets them. A stage of several pieces goes whole, from its first
layer to its last one.
"""


def follows_a_loss(state: State, record: Generation) -> bool:
    """Return True if a member may found this generation by handing out the stages of lost members: nothing else has
    changed, and it has applied a step of the generation that lost them, so all copies of that generation are there.
    """
    members, remaining = state.record.members, record.members
    lost = (
        remaining != members
        and remaining == tuple(member for member in members if member in remaining)
        and not record.leaving
    )
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
    """Yield every way to give a stage to one of these ranks, or its first layers to one and its last ones to another.

    A rank that has some of these layers for other blocks takes them only as the very stage that it has.
    """
    stage = plan.stages[number]
    held: dict[int, list[PlanStage]] = {}
    for at, kept in enumerate(plan.stages):
        if at != number:
            held.setdefault(kept.rank, []).append(kept)

    @cache
    def takes(rank: int, first: int, end: int) -> bool:
        part = {layer for layer in stage.numbers if first <= layer < end}
        return all(part.isdisjoint(kept.numbers) or part == set(kept.numbers) for kept in held.get(rank, ()))

    for rank in ranks:
        if takes(rank, stage.first, stage.end):
            yield ((stage.first, stage.end, rank),)
    if len(stage.layers) == 1 and plan.routes == "relay":
        for cut in range(stage.first + 1, stage.end):
            first = [rank for rank in ranks if takes(rank, stage.first, cut)]
            last = [rank for rank in ranks if takes(rank, cut, stage.end)]
            yield from (
                ((stage.first, cut, rank), (cut, stage.end, following))
                for rank in first
                for following in last
                if rank != following
            )


def given(plan: Plan, number: int, parts: Sequence[Part]) -> Plan | None:
    """Return the plan with a stage given away in these parts; None where a rank would hold a layer twice."""
    stages = list(plan.stages)
    gone = stages.pop(number)
    for part in reversed(parts):
        stages.insert(number, _part(gone, part))
    for first, end, rank in parts:
        place = next(
            at for at, stage in enumerate(stages) if stage.rank == rank and (stage.first, stage.end) == (first, end)
        )
        for at, stage in enumerate(stages):
            if (
                at != place
                and stage.rank == rank
                and (joined := _joined(stages[place], stage, plan.routes)) is not None
            ):
                stages[min(place, at)] = joined
                del stages[max(place, at)]
                break
    try:
        return dataclasses.replace(plan, stages=tuple(stages))
    except CapslogError:
        return None


def among(plan: Plan, places: Mapping[int, int]) -> Plan:
    """Return the plan with the ranks of the remaining members; places: rank -> its new number."""
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
    """Return the parts of these intervals within the layers [first, end)."""
    return tuple(
        MemoryInterval(max(first, interval.first), min(end, interval.end), interval.kind)
        for interval in intervals
        if max(first, interval.first) < min(end, interval.end)
    )


def _joined(stage: PlanStage, joining: PlanStage, routes: str) -> PlanStage | None:
    """Join two stages of one rank: the same layers for more blocks, or a longer range of the chain for the same."""
    if stage.grain != joining.grain or (stage.memory is None) != (joining.memory is None):
        return None
    limits = (stage.in_flight, joining.in_flight)
    in_flight = None if None in limits else max(limit for limit in limits if limit is not None)
    treated = (stage.memory, stage.moments) == (joining.memory, joining.moments)
    if stage.layers == joining.layers and treated and stage.blocks is not None and joining.blocks is not None:
        return dataclasses.replace(stage, blocks=tuple(sorted({*stage.blocks, *joining.blocks})), in_flight=in_flight)
    before, after = (stage, joining) if stage.first < joining.first else (joining, stage)
    single = len(stage.layers) == len(joining.layers) == 1 and routes == "relay"
    if not single or before.end != after.first or stage.blocks != joining.blocks:
        return None
    return dataclasses.replace(
        before,
        layers=((before.first, after.end),),
        memory=None if before.memory is None or after.memory is None else (*before.memory, *after.memory),
        moments=(*before.moments, *after.moments),
        in_flight=in_flight,
    )
