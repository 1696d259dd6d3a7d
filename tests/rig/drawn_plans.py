"""Plans drawn at random for the rig: any rectangles that a generation could be told to run."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from varuna_capslog.plans.parts import INTERVAL_KINDS, KEEP, MemoryInterval, PlanStage, Units, ranges_of
from varuna_capslog.plans.plan import Plan, stages_of_pipelines
from varuna_capslog.schedules import Edge

__all__ = ["WITHOUT_LIMITS", "draw_memory", "draw_moments", "draw_plan", "draw_round"]

WITHOUT_LIMITS = ("gpipe", "kfkb")
"""Schedules that keep no limit of a stage below their own."""

_TRIES = 200
_MOST_WAYS, _MOST_STAGES = 3, 5


def draw_plan(
    dice: random.Random,
    num_layers: int,
    units: Units,
    ranks: int,
    schedule: str | None = None,
    edges: Sequence[Edge] | None = None,
) -> Plan:
    """Draw a valid plan of a chain on at most `ranks` ranks.

    It may have pipelines of unequal length, cuts and shares of the blocks, replicas of single stages, several stages on
    a rank in any order, limits in flight, ranks without a stage, also between others, and memory intervals. For half of
    the stages the config decides what they keep. For a quarter of them the optimizer's moments of some layers wait in
    the host tier. Where the schedule keeps no limits, none is drawn.

    edges: edges of the chain's graph; if given, the plan has direct routes, and stages of any layers that can be
        ordered.
    """
    for _ in range(_TRIES):
        drawn = _draw_stages(dice, num_layers, units.blocks or 1, ranks, edges)
        if drawn is not None:
            stages = [
                stage if dice.random() < 0.5 else replace(stage, memory=draw_memory(dice, stage)) for stage in drawn
            ]
            stages = [
                replace(stage, moments=draw_moments(dice, stage)) if dice.random() < 0.25 else stage for stage in stages
            ]
            if schedule in WITHOUT_LIMITS:
                stages = [replace(stage, in_flight=None) for stage in stages]
            return Plan(num_layers, tuple(stages), units, schedule, routes="relay" if edges is None else "direct")
    single_stage = PlanStage(((0, num_layers),), (dice.randrange(ranks),), memory=None)
    return Plan(num_layers, (single_stage,), units, schedule)


def draw_round(dice: random.Random, num_layers: int, units: Units, ranks: int, schedule: str | None = None) -> Plan:
    """Draw a pipeline whose stages are placed round-robin on some of the ranks, in one to three rounds, layers
    permitting.
    """
    devices = dice.randint(1, min(ranks, num_layers))
    stages = devices * dice.randint(1, min(3, num_layers // devices))
    cuts = [0, *sorted(dice.sample(range(1, num_layers), stages - 1))]
    placement = [number % devices for number in range(stages)]
    drawn = stages_of_pipelines(num_layers, cuts, 1, units.blocks or 1, placement)
    return Plan(num_layers, drawn, units, schedule)


def draw_memory(
    dice: random.Random, stage: PlanStage, kinds: Sequence[str] = (KEEP, *INTERVAL_KINDS)
) -> tuple[MemoryInterval, ...]:
    """Memory intervals of these kinds over the layers of a stage; "keep" leaves some out."""
    pieces = []
    for begin, end in stage.layers:
        inner = sorted(dice.sample(range(begin + 1, end), dice.randint(0, min(3, end - begin - 1))))
        pieces += [(first, last, dice.choice(kinds)) for first, last in pairwise([begin, *inner, end])]
    return tuple(MemoryInterval(*piece) for piece in pieces if piece[2] != KEEP)


def draw_moments(dice: random.Random, stage: PlanStage) -> tuple[MemoryInterval, ...]:
    """Ranges of the layers of a stage whose optimizer's moments wait in the host tier."""
    return draw_memory(dice, stage, (KEEP, "host"))


def _draw_order(dice: random.Random, num_layers: int, edges: Sequence[Edge]) -> list[int]:
    """Draw a topological order of the layers. Cut anywhere, it gives convex sets of layers without circular waits, and
    every such partition has such an order.
    """
    unordered, order = set(range(num_layers)), list[int]()
    while unordered:
        waiting = {reader for writer, reader in edges if writer in unordered}
        order.append(dice.choice(sorted(unordered - waiting)))
        unordered.remove(order[-1])
    return order


def _draw_stages(
    dice: random.Random, num_layers: int, blocks: int, ranks: int, edges: Sequence[Edge] | None
) -> list[PlanStage] | None:
    """Draw stages in any order; None where no rank could hold one of them."""
    stages: list[PlanStage] = []
    free = [set(range(ranks)) for _ in range(num_layers)]
    for group in _shares(dice, range(blocks), dice.randint(1, min(_MOST_WAYS, blocks))):
        count = dice.randint(1, min(_MOST_STAGES, num_layers))
        cuts = [0, *sorted(dice.sample(range(1, num_layers), count - 1)), num_layers]
        order = list(range(num_layers)) if edges is None else _draw_order(dice, num_layers, edges)
        for first, end in pairwise(cuts):
            layers = sorted(order[first:end])
            for part in _shares(dice, group, dice.choice((1, 1, 1, min(2, len(group))))):
                candidates = sorted(set.intersection(*(free[layer] for layer in layers)))
                if not candidates:
                    return None
                rank, limit = dice.choice(candidates), dice.choice((None, None, 1, 2))
                for layer in layers:
                    free[layer].remove(rank)
                served = None if len(part) == blocks else tuple(part)
                stages.append(PlanStage(tuple(ranges_of(layers)), (rank,), served, in_flight=limit, memory=None))
    dice.shuffle(stages)
    return stages


def _shares(dice: random.Random, blocks: Sequence[int], count: int) -> list[list[int]]:
    """Deal the blocks out into `count` parts of at least one block."""
    dealt = list(blocks)
    dice.shuffle(dealt)
    parts = [[block] for block in dealt[:count]]
    for block in dealt[count:]:
        dice.choice(parts).append(block)
    return [sorted(part) for part in parts]
