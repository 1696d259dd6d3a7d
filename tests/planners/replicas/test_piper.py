"""Piper's dynamic program, compared with every chain of downsets with every degree."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from itertools import combinations

import pytest

from tests.planners.replicas.graphs import draw_costs, splits
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.planners.replicas.costs import GraphCosts
from varuna_capslog.planners.replicas.piper import downsets, piper_stages
from varuna_capslog.planners.seconds import Link


def draw_edges(dice: random.Random, layers: int) -> list[tuple[int, int]]:
    pairs = list(combinations(range(layers), 2))
    return sorted(dice.sample(pairs, dice.randrange(len(pairs) + 1))) if pairs else []


def chains(layers: frozenset[int], edges: list[tuple[int, int]]) -> Iterator[list[frozenset[int]]]:
    """Yield every partition into ordered stages, where no stage reads from a later one."""
    if not layers:
        yield []
        return
    for count in range(1, len(layers) + 1):
        for chosen in combinations(sorted(layers), count):
            stage = frozenset(chosen)
            if not any(reader in stage and writer in layers - stage for writer, reader in edges):
                for later in chains(layers - stage, edges):
                    yield [stage, *later]


def value(costs: GraphCosts, stages: list[frozenset[int]], degrees: tuple[int, ...]) -> float:
    worst = 0.0
    for place, (stage, d) in enumerate(zip(stages, degrees, strict=True)):
        if costs.microbatches % d:
            return math.inf
        in_flight = math.ceil(sum(degrees[place:]) / d)
        held = sum(costs.static[layer] + in_flight * costs.saved[layer] for layer in stage)
        if costs.usable is not None and held > costs.usable:
            return math.inf
        time = sum(costs.seconds[layer] for layer in stage)
        if costs.link.bandwidth is not None:
            crossing = [size for writer, reader, size in costs.edges if (writer in stage) != (reader in stage)]
            time += sum(2 * costs.link.seconds(size) for size in crossing)
        size = sum(costs.parameters[layer] for layer in stage)
        exchange = (d - 1) * (size / (costs.link.bandwidth or math.inf) + costs.link.latency_seconds)
        worst = max(worst, time / d + exchange / costs.microbatches)
    return worst


@pytest.mark.parametrize("link", [Link(), Link(3.0, 0.1)])
def test_nothing_in_its_search_space_has_a_faster_slowest_stage(link: Link) -> None:
    dice = random.Random(str(link))
    nothing = 0
    for _ in range(400):
        layers, devices = dice.randrange(1, 6), dice.randrange(1, 5)
        edges = draw_edges(dice, layers)
        costs = draw_costs(dice, edges, layers, devices, True, link)
        best = math.inf
        for stages in chains(frozenset(range(layers)), edges):
            if len(stages) <= devices:
                best = min(best, *(value(costs, stages, degrees) for degrees in splits(devices, len(stages))))
        plan = piper_stages(costs)
        assert (plan is None) == math.isinf(best)
        if plan is None:
            nothing += 1
            continue
        sets, degrees = [frozenset(stage.layers) for stage in plan], tuple(stage.replicas for stage in plan)
        assert value(costs, sets, degrees) == pytest.approx(best)
    assert 20 < nothing < 200


def test_a_stage_may_hold_parts_of_two_branches() -> None:
    """Two towers with layers of 2 and 1 s on three devices: only a stage across both towers balances the seconds."""
    edges = ((0, 1, 1), (1, 4, 1), (2, 3, 1), (3, 4, 1))
    costs = GraphCosts((2.0, 1.0, 2.0, 1.0, 0.0), (2,) * 5, (0,) * 5, (0,) * 5, (0,) * 6, edges, 3, 1, usable=6)
    plan = piper_stages(costs)
    assert plan is not None
    assert sorted(stage.layers for stage in plan) == [(0,), (1, 3, 4), (2,)]


def test_downsets_are_counted_and_too_many_are_refused() -> None:
    branches = tuple((4 * branch + at, 4 * branch + at + 1, 1) for branch in range(3) for at in range(3))
    assert len(downsets(12, branches, 1000)) == 5**3
    with pytest.raises(CapslogError, match="more than 100 downsets, whose pairs planner 'piper' weighs"):
        downsets(12, branches, 100)
