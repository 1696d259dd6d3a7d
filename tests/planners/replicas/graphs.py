"""Small random graphs with costs, and the time of given stages: the oracles of planners with replicas."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from varuna_capslog.planners.replicas.costs import GraphCosts
from varuna_capslog.planners.seconds import Link
from varuna_capslog.schedules.generators import table_3_2

Stage = tuple[frozenset[int], int]
"""Layers and replicas."""


def draw_costs(
    dice: random.Random, edges: Sequence[tuple[int, int]], layers: int, devices: int, limited: bool, link: Link
) -> GraphCosts:
    """Draw the costs of a graph. limited: 70 % of the graphs get a limit of bytes."""
    static, saved = ([dice.randrange(1, 9) for _ in range(layers)] for _ in range(2))
    usable = dice.randrange(10, 5 * layers + 20) if limited and dice.random() < 0.7 else None
    cuts = [0, *(dice.randrange(1, 9) for _ in range(layers - 1)), 0]
    return GraphCosts(
        tuple(float(dice.randrange(1, 9)) for _ in range(layers)),
        tuple(static),
        tuple(saved),
        tuple(dice.randrange(1, 9) for _ in range(layers)),
        tuple(cuts),
        tuple((writer, reader, dice.randrange(1, 9)) for writer, reader in edges),
        devices,
        dice.choice([4, 6, 8]),
        usable,
        None,
        link,
    )


def draw_tree(dice: random.Random, layers: int, nested: bool = True) -> tuple[list[tuple[int, int]], list[int]]:
    """Draw the edges of a series-parallel graph, and its sinks; layers are numbered in topological order."""
    edges: list[tuple[int, int]] = []
    count = 0

    def build(size: int, sources: list[int], deep: int) -> list[int]:
        """Add `size` layers behind `sources`; return the last ones."""
        nonlocal count
        while size:
            if size > 2 and deep and dice.random() < 0.6:
                width = dice.randrange(2, min(3, size) + 1)
                inside = dice.randrange(width, size + 1)
                sizes = [1] * width
                for _ in range(inside - width):
                    sizes[dice.randrange(width)] += 1
                ends: list[int] = []
                for branch_size in sizes:
                    ends += build(branch_size, sources, deep - 1)
                sources, size = ends, size - inside
            else:
                edges.extend((source, count) for source in sources)
                sources, size, count = [count], size - 1, count + 1
        return sources

    last = build(layers, [], 2 if nested else 1)
    return edges, last


def splits(devices: int, count: int) -> Iterator[tuple[int, ...]]:
    """Yield the replicas of `count` stages on at most `devices` devices."""
    if count == 0:
        yield ()
        return
    for first in range(1, devices - count + 2):
        for later in splits(devices - first, count - 1):
            yield (first, *later)


def slowest(costs: GraphCosts, stages: Sequence[Stage]) -> float:
    """Return GraphPipe's time per microbatch of the slowest stage; infinite if a stage does not fit.

    Edges determine the order of stages. A stage with several followers takes their largest numbers.
    """
    stage_of = {layer: number for number, (layers, _) in enumerate(stages) for layer in layers}
    behind: dict[int, set[int]] = {number: set() for number in range(len(stages))}
    for writer, reader, _ in costs.edges:
        if stage_of[writer] != stage_of[reader]:
            behind[stage_of[writer]].add(stage_of[reader])
    states: dict[int, tuple[int, int]] = {}

    def of(number: int) -> tuple[int, int]:
        if number not in states:
            size, later = stages[number][1], [of(reader) for reader in behind[number]]
            in_flight, at_once = (
                max((state[0] for state in later), default=0),
                max((state[1] for state in later), default=0),
            )
            needed = min(table_3_2(1, size, 1, at_once, in_flight), costs.microbatches) if later else size
            states[number] = needed, max(size, at_once)
        return states[number]

    worst = 0.0
    for number, (layers, replicas) in enumerate(stages):
        held = sum(costs.static[layer] + -(-of(number)[0] // replicas) * costs.saved[layer] for layer in layers)
        if costs.usable is not None and held > costs.usable:
            return float("inf")
        turns = -(-costs.microbatches // replicas) / costs.microbatches
        wire = sum(costs.parameters[layer] for layer in layers) / (costs.link.bandwidth or float("inf"))
        exchange = (replicas - 1) * (wire + costs.link.latency_seconds) / costs.microbatches
        worst = max(worst, sum(costs.seconds[layer] for layer in layers) * turns + exchange)
    return worst
