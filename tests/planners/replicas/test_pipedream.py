"""PipeDream's dynamic program, compared with every cut list with every number of replicas."""

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
    """Return max of T and the transfers (Sec. 3.1) of stages (first, end, replicas); infinite if one does not fit."""
    worst = 0.0
    for place, (first, end, m) in enumerate(stages):
        layers = range(first, end)
        devices = sum(stage[2] for stage in stages[place:]) + (costs.devices - sum(stage[2] for stage in stages))
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
    """Return every cut list with replicas that use exactly `devices` devices."""
    stage_lists = []
    for count in range(1, min(layers, devices) + 1):
        for cuts in itertools.combinations(range(1, layers), count - 1):
            bounds = list(itertools.pairwise([0, *cuts, layers]))
            for replicas in itertools.product(range(1, min(devices, most) + 1), repeat=count):
                if sum(replicas) == devices:
                    stage_lists.append([(*pair, m) for pair, m in zip(bounds, replicas, strict=True)])
    return stage_lists


@pytest.mark.parametrize("link", [Link(), Link(3.0, 0.1)])
def test_nothing_in_its_search_space_has_a_faster_slowest_stage(link: Link) -> None:
    dice = random.Random(str(link))
    nothing = 0
    for _ in range(500):
        layers, devices = dice.randrange(1, 7), dice.randrange(1, 5)
        edges = [(layer, layer + 1) for layer in range(layers - 1)]
        costs = draw_costs(dice, edges, layers, devices, True, link)
        best = min(value(costs, stages) for stages in every(layers, devices, costs.most_replicas))
        plan = pipedream_stages(costs)
        if math.isinf(best):
            nothing += 1  # no plan on exactly these devices; fewer may fit
            continue
        assert plan is not None
        assert [layer for stage in plan for layer in stage.layers] == list(range(layers))
        stages = [(stage.layers[0], stage.layers[-1] + 1, stage.replicas) for stage in plan]
        assert sum(stage.replicas for stage in plan) == devices
        assert value(costs, stages) == pytest.approx(best)
    assert 20 < nothing < 200


def test_a_slow_stage_gets_the_devices_that_are_left() -> None:
    """The paper's idea: seconds of 1 : 3 on four devices give a stage on one device and a stage on three."""
    costs = GraphCosts((1.0, 3.0), (0, 0), (0, 0), (9_000_000, 9), (0, 1, 0), ((0, 1, 1),), 4, 12, link=Link(1e3))
    assert pipedream_stages(costs) == [ReplicatedStage((0,), 1), ReplicatedStage((1,), 3)]
