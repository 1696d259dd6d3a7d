"""CAPTURE's planner, compared with its Algorithm 4: every placement of every stage on every node."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Iterator

import pytest

from tests.planners.replicas.graphs import draw_costs
from varuna_capslog.base.errors import CapslogError
from varuna_capslog.planners.replicas.capture import DegreePeaks, capture_stages, merged
from varuna_capslog.planners.replicas.costs import GraphCosts, ReplicatedStage
from varuna_capslog.planners.seconds import Link
from varuna_capslog.planning.placed.replicated import stage_limits
from varuna_capslog.plans.parts import Units

Placed = tuple[int, int, int]
"""First layer, end, degree."""


def draw(dice: random.Random, nodes: int, size: int, most: int) -> GraphCosts:
    layers = dice.randrange(nodes * size.bit_count(), most + 1)
    edges = [(layer, layer + 1) for layer in range(layers - 1)]
    costs = draw_costs(dice, edges, layers, nodes * size, False, Link(node_devices=size))
    isolated = tuple(
        static + saved + dice.randrange(9) for static, saved in zip(costs.static, costs.saved, strict=True)
    )
    added = (None, *(dice.randrange(-2, 12) for _ in range(layers - 1)))
    blocks = dice.choice([None, 4, 8])
    return dataclasses.replace(costs, isolated=isolated, added=added, microbatches=16, blocks=blocks)


def every_placement(layers: int, nodes: int, size: int, first: int = 0, room: int = 0) -> Iterator[list[Placed]]:
    """Yield the placements of Algorithm 4: groups in order; the degrees of a node, powers of two, sum to its size."""
    if first == layers:
        if nodes == 0 and room == 0:
            yield []
        return
    if room == 0:
        if nodes == 0:
            return
        nodes, room = nodes - 1, size
    degree = 1
    while degree <= room:
        for end in range(first + 1, layers + 1):
            for later in every_placement(layers, nodes, size, end, room - degree):
                yield [(first, end, degree), *later]
        degree *= 2


def predicted(costs: GraphCosts, placed: list[Placed], number: int, printed: bool) -> float:
    """Return the bytes of a stage by the paper's predictor, or with the calls that 1F1B has in flight there."""
    first, end, degree = placed[number]
    alone = costs.isolated[first] + sum(part or 0 for part in costs.added[first + 1 : end])
    saved = sum(costs.saved[first:end])

    def of(d: int, calls: int) -> int:
        assert d
        return alone + (calls - 1) * saved

    if printed:
        shares = {d: of(d, costs.microbatches // d) for d in (1, 2, 4)}
        if degree <= 4:
            return shares[degree]
        b = (shares[4] - shares[2]) / (math.log(4) - math.log(2))
        return shares[2] - b * math.log(2) + b * math.log(degree)
    stages = [ReplicatedStage(tuple(range(*stage[:2])), stage[2]) for stage in placed]
    blocks = costs.blocks or costs.microbatches
    limits = stage_limits(stages, Units(costs.microbatches, 1, blocks), "relay", None)
    limit, replica_blocks = limits[number] or len(placed) - number, math.ceil(blocks / degree)
    waiting = (replica_blocks - 1) * sum(costs.parameters[first:end]) if degree > 1 else 0
    return of(degree, min(limit, replica_blocks * costs.microbatches // blocks)) + waiting


def devices_of(costs: GraphCosts, placed: list[Placed], printed: bool) -> list[float]:
    """Return the bytes of every device, largest first, as the tie-breaking rule compares them."""
    rows = [[predicted(costs, placed, at, printed)] * stage[2] for at, stage in enumerate(placed)]
    return sorted((size for row in rows for size in row), reverse=True)


@pytest.mark.parametrize("printed", [False, True])
def test_no_placement_has_a_smaller_peak_nor_smaller_ones_below_it(printed: bool) -> None:
    dice = random.Random(7)
    for nodes, size, most, draws in ((1, 1, 5, 20), (1, 4, 6, 150), (2, 2, 7, 150), (3, 2, 6, 80), (2, 3, 6, 80)):
        for _ in range(draws):
            costs = draw(dice, nodes, size, most)
            best = min(
                devices_of(costs, placement, printed) for placement in every_placement(costs.num_layers, nodes, size)
            )
            stages = capture_stages(costs, printed)
            assert [layer for stage in stages for layer in stage.layers] == list(range(costs.num_layers))
            placed = [(stage.layers[0], stage.layers[-1] + 1, stage.replicas) for stage in stages]
            assert placed in list(every_placement(costs.num_layers, nodes, size))
            assert devices_of(costs, placed, printed) == best


def test_the_printed_logarithm_leaves_no_activations_at_eight_devices() -> None:
    """The paper's model has 16 / d calls here; the logarithm through 2 and 4 has none at 8, and minus four at 16."""
    dice = random.Random(1)
    costs = dataclasses.replace(draw(dice, 1, 16, 5), blocks=None)
    model, printed = DegreePeaks(costs), DegreePeaks(costs, printed=True)
    saved = sum(costs.saved[0:2])
    base = printed.of(0, 2, 1, 0) - 16 * saved
    assert [printed.of(0, 2, d, 0) for d in (2, 4)] == [base + 8 * saved, base + 4 * saved]
    assert printed.of(0, 2, 8, 0) == pytest.approx(base)
    assert printed.of(0, 2, 16, 0) == pytest.approx(base - 4 * saved)
    assert model.of(0, 2, 8, 100) == base + 2 * saved + sum(costs.parameters[0:2])  # of its second block
    placed = capture_stages(costs, printed=True)
    rows = [(stage.layers[0], stage.layers[-1] + 1, stage.replicas) for stage in placed]
    best = min(devices_of(costs, placement, True) for placement in every_placement(costs.num_layers, 1, 16))
    assert devices_of(costs, rows, True) == pytest.approx(best)


def test_the_merger_joins_the_neighbours_that_are_smallest_together() -> None:
    costs = GraphCosts((1.0,) * 4, (0,) * 4, (0,) * 4, (0,) * 4, (0,) * 5, (), 2, 4)
    costs = dataclasses.replace(costs, isolated=(9, 1, 1, 9), added=(None, 1, 1, 9))
    assert merged(costs, 3) == [0, 1, 3, 4]  # 1 + 1; then 9 + 2, 1 + 1 + 9
    assert merged(costs, 2) in ([0, 3, 4], [0, 1, 4])
    assert merged(costs, 9) == [0, 1, 2, 3, 4]
    assert [stage.layers for stage in capture_stages(costs, groups=2)] in ([(0, 1, 2), (3,)], [(0,), (1, 2, 3)])


def test_nodes_that_do_not_fit_are_refused_in_a_sentence() -> None:
    costs = draw(random.Random(3), 2, 3, 5)
    with pytest.raises(CapslogError, match=r"6 devices are no whole number of nodes with 4; choose a node size"):
        capture_stages(dataclasses.replace(costs, link=Link(node_devices=4)))
    with pytest.raises(CapslogError, match=r"each of 3 nodes stages .* sum to 2, but 2 layers are too few"):
        capture_stages(dataclasses.replace(costs, link=Link(node_devices=2)), groups=2)
