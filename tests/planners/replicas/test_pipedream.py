"""PipeDream's dynamic program against every cut list with every number of replicas."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from tests.planners.replicas.graphs import draw_costs
from varuna_capslog.planners.replicas.costs import GraphCosts, ReplicatedStage
from varuna_capslog.planners.replicas.pipedream import pipedream_stages
from varuna_capslog.planners.seconds import Link


def value(costs: GraphCosts, stages: list[tuple[int, int, int]]) -> float:
    """max of T and the transfers (Sec. 3.1) of stages (first, end, replicas); infinite where one does not fit."""
    worst = 0.0
    for place, (first, end, m) in enumerate(stages):
        layers = range(first, end)
        devices = sum(one[2] for one in stages[place:]) + (costs.devices - sum(one[2] for one in stages))
        noam = math.ceil(devices / m)
        if costs.usable is not None and sum(costs.static[l] + noam * costs.saved[l] for l in layers) > costs.usable:
            return math.inf
        turns = math.ceil(costs.microbatches / m) / costs.microbatches
        size = sum(costs.parameters[l] for l in layers)
        exchange = (m - 1) * (size / (costs.link.bandwidth or math.inf) + costs.link.latency_seconds)
        worst = max(worst, sum(costs.seconds[l] for l in layers) * turns, exchange / costs.microbatches)
        worst = max(worst, costs.link.seconds(costs.cuts[first]) if first else 0.0)
    return worst


def every(layers: int, devices: int, most: int) -> list[list[tuple[int, int, int]]]:
    """Every cut list with replicas that use exactly these devices."""
    found = []
    for count in range(1, min(layers, devices) + 1):
        for cuts in itertools.combinations(range(1, layers), count - 1):
            bounds = list(itertools.pairwise([0, *cuts, layers]))
            for replicas in itertools.product(range(1, min(devices, most) + 1), repeat=count):
                if sum(replicas) == devices:
                    found.append([(*pair, m) for pair, m in zip(bounds, replicas, strict=True)])
    return found


@pytest.mark.parametrize("link", [Link(), Link(3.0, 0.1)])
def test_nothing_in_its_search_space_has_a_faster_slowest_stage(link: Link) -> None:
    dice = random.Random(str(link))
    nothing = 0
    for _ in range(500):
        layers, devices = dice.randrange(1, 7), dice.randrange(1, 5)
        edges = [(one, one + 1) for one in range(layers - 1)]
        costs = draw_costs(dice, edges, layers, devices, True, link)
        best = min(value(costs, stages) for stages in every(layers, devices, costs.most_replicas))
        found = pipedream_stages(costs)
        if math.isinf(best):
            nothing += 1  # exactly these devices do not do; fewer may
            continue
        assert found is not None
        assert [layer for one in found for layer in one.layers] == list(range(layers))
        stages = [(one.layers[0], one.layers[-1] + 1, one.replicas) for one in found]
        assert sum(one.replicas for one in found) == devices
        assert value(costs, stages) == pytest.approx(best)
    assert 20 < nothing < 200


def test_a_slow_stage_gets_the_devices_that_are_left() -> None:
    """The paper's idea in numbers: 1 : 3 over four devices is a stage alone and one on three."""
    costs = GraphCosts((1.0, 3.0), (0, 0), (0, 0), (9_000_000, 9), (0, 1, 0), ((0, 1, 1),), 4, 12, link=Link(1e3))
    assert pipedream_stages(costs) == [ReplicatedStage((0,), 1), ReplicatedStage((1,), 3)]
