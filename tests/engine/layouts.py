"""Layouts for the tests: equal pipelines by their cuts, for any chain, and random layouts of any shape."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from tests.rig.drawn_plans import draw_memory, draw_moments, draw_plan
from varuna_capslog.engine.layout import Layout
from varuna_capslog.plans.parts import INTERVAL_KINDS, KEEP, MemoryInterval, PlanStage, Units

__all__ = ["Cuts", "layout_for", "random_layout", "rectangle", "round_layout", "with_intervals", "with_shares"]


def rectangle(
    first: int, end: int, rank: int, blocks: tuple[int, ...] | None = None, in_flight: int | None = None
) -> PlanStage:
    """The layers [first, end) on one rank, kept or recomputed as the run says."""
    return PlanStage(((first, end),), (rank,), blocks, in_flight=in_flight, memory=None)


@dataclass(frozen=True)
class Cuts:
    """Equal pipelines of a chain of any length: stage s on device `placement[s]` of each replica."""

    cuts: tuple[int, ...]
    placement: tuple[int, ...]
    replicas: int = 1

    @property
    def world_size(self) -> int:
        return (max(self.placement) + 1) * self.replicas


def layout_for(layout: Layout | Cuts, num_layers: int, num_blocks: int = 1) -> Layout:
    """The layout that a test means, for a chain of this number of layers and a step of this number of blocks."""
    if isinstance(layout, Layout):
        return layout
    return Layout.pipelines(layout.cuts, num_layers, layout.placement, layout.replicas, num_blocks)


def random_layout(
    seed: int, num_layers: int, num_blocks: int, ranks: int, edges: Sequence[tuple[int, int]] | None = None
) -> Layout:
    """Stages of any shape on at most `ranks` ranks, all of which have work: several stages on a rank, single stages in
    replicas of unequal shares, pipelines of unequal length and cuts. The run decides what the stages keep.

    edges: of the chain's graph: direct routes, and stages of any layers that can be put in an order."""
    stages = draw_plan(random.Random(seed), num_layers, Units(num_blocks, 1, num_blocks), ranks, None, edges).stages
    used = sorted({stage.rank for stage in stages})
    placed = tuple(dataclasses.replace(stage, ranks=(used.index(stage.rank),), memory=None) for stage in stages)
    return Layout(placed, num_blocks, direct=edges is not None)


def round_layout(seed: int, num_layers: int, num_blocks: int, ranks: int) -> Layout:
    """Two to four uneven chunks on each of two ranks or more, as schedule interleaved has them; from the second round
    on a rank may be passed over, which is an empty chunk of other systems."""
    dice = random.Random(seed)
    devices = dice.randint(2, min(ranks, num_layers // 2))
    stages = devices * dice.randint(2, min(4, num_layers // devices))
    placement = [number % devices for number in range(stages) if number < devices or dice.random() < 0.85]
    cuts = [0, *sorted(dice.sample(range(1, num_layers), len(placement) - 1))]
    return Layout.pipelines(cuts, num_layers, placement, 1, num_blocks)


def with_intervals(layout: Layout, seed: int, kinds: Sequence[str] = (KEEP, *INTERVAL_KINDS)) -> Layout:
    """The layout with memory intervals of these kinds drawn for every stage, and the moments of some layers away."""
    dice = random.Random(seed)
    stages = [dataclasses.replace(stage, memory=draw_memory(dice, stage, kinds)) for stage in layout.stages]
    stages = [dataclasses.replace(stage, moments=draw_moments(dice, stage)) for stage in stages]
    return dataclasses.replace(layout, stages=tuple(stages))


def with_shares(layout: Layout, seed: int, apart: Collection[int] = ()) -> Layout:
    """The layout where of many layers with several holders some leave the optimizer's moments to the others.

    apart: layers of which all keep them, since they share parameters.
    """
    dice, holders = random.Random(seed), dict[int, list[int]]()
    for number, stage in enumerate(layout.stages):
        for layer in stage.numbers:
            holders.setdefault(layer, []).append(number)
    elsewhere: list[set[int]] = [set() for _ in layout.stages]
    for layer, numbers in holders.items():
        if len(numbers) > 1 and layer not in apart and dice.random() < 0.8:
            for number in dice.sample(numbers, dice.randint(1, len(numbers) - 1)):
                elsewhere[number].add(layer)
    stages = []
    for stage, layers in zip(layout.stages, elsewhere, strict=True):
        kinds = dict.fromkeys(stage.moments_away, "host") | dict.fromkeys(layers, "replica")
        moments = tuple(MemoryInterval(layer, layer + 1, kind) for layer, kind in sorted(kinds.items()))
        stages.append(dataclasses.replace(stage, moments=moments))
    return dataclasses.replace(layout, stages=tuple(stages))
