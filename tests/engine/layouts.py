"""Layouts for the tests: equal pipelines by their cuts, whatever chain they cut, and random ones of any shape."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from varuna_capslog.engine.layout import Layout
from varuna_capslog.engine.segments import KEEP
from varuna_capslog.plans.parts import INTERVAL_KINDS, MemoryInterval, PlanStage

__all__ = ["Cuts", "layout_for", "random_layout", "rectangle", "with_intervals"]


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
    """The layout that a test means, for a chain of so many layers and a step of so many blocks."""
    if isinstance(layout, Layout):
        return layout
    return Layout.pipelines(layout.cuts, num_layers, layout.placement, layout.replicas, num_blocks)


def random_layout(seed: int, num_layers: int, num_blocks: int, ranks: int) -> Layout:
    """Stages of any shape on at most so many ranks, all of which have work: several stages on a rank, single stages in
    replicas of unequal shares, pipelines of unequal length and cuts."""
    draw = random.Random(seed)
    while True:
        stages: list[PlanStage] = []
        for group in _shares(draw, list(range(num_blocks)), draw.randint(1, min(3, num_blocks))):
            count = draw.randint(1, min(5, num_layers))
            cuts = [0, *sorted(draw.sample(range(1, num_layers), count - 1)), num_layers]
            for first, end in pairwise(cuts):
                parts = _shares(draw, group, draw.choice([1, 1, 1, min(2, len(group))]))
                for blocks in parts:
                    everything = len(blocks) == num_blocks
                    stages.append(rectangle(first, end, draw.randrange(ranks), None if everything else tuple(blocks)))
        draw.shuffle(stages)
        used = sorted({stage.rank for stage in stages})
        renumbered = [
            rectangle(one.first, one.end, used.index(one.rank), one.blocks, draw.choice([None, None, 1, 2]))
            for one in stages
        ]
        held = [(stage.rank, layer) for stage in renumbered for layer in range(stage.first, stage.end)]
        if len(set(held)) == len(held):
            return Layout(tuple(renumbered), num_blocks)


def with_intervals(layout: Layout, seed: int, kinds: Sequence[str] = (KEEP, *INTERVAL_KINDS)) -> Layout:
    """The layout with memory intervals of these kinds drawn for every stage."""
    draw = random.Random(seed)
    stages = []
    for stage in layout.stages:
        size = stage.end - stage.first
        inner = sorted(draw.sample(range(stage.first + 1, stage.end), draw.randint(0, min(3, size - 1))))
        pieces = [(first, end, draw.choice(kinds)) for first, end in pairwise([stage.first, *inner, stage.end])]
        memory = tuple(MemoryInterval(*piece) for piece in pieces if piece[2] != KEEP)
        stages.append(dataclasses.replace(stage, memory=memory))
    return dataclasses.replace(layout, stages=tuple(stages))


def _shares(draw: random.Random, blocks: Sequence[int], count: int) -> list[list[int]]:
    """The blocks dealt out to so many, each of them with one at least."""
    dealt = list(blocks)
    draw.shuffle(dealt)
    parts = [[block] for block in dealt[:count]]
    for block in dealt[count:]:
        draw.choice(parts).append(block)
    return [sorted(part) for part in parts]
