"""GraphPipe's search, compared with every stage graph of its search space, and the tree that it searches."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from tests.planners.replicas.graphs import draw_costs, draw_tree, slowest, splits
from varuna_capslog.planners.replicas.costs import GraphCosts
from varuna_capslog.planners.replicas.graphpipe import (
    CostedTree,
    Parallel,
    Series,
    StageGraphs,
    Together,
    Tree,
    coarsened,
    downset_count,
    graphpipe_stages,
    layers_of,
    tree_of,
)
from varuna_capslog.planners.replicas.piper import downsets
from varuna_capslog.planners.seconds import Link
from varuna_capslog.plans.parts import PlanStage, ranges_of
from varuna_capslog.plans.rules import check_graph

Sets = list[frozenset[int]]


def every_series(parts: Sequence[Tree]) -> Iterator[Sets]:
    """Yield every way to make stages of parts in series: Algorithm 2 without values and states."""
    if not parts:
        yield []
        return
    for begin in range(len(parts)):
        stage = together(parts[begin:])
        yield from ([*earlier, stage] for earlier in every_series(parts[:begin]))
    for place, part in enumerate(parts):
        if not isinstance(part, Parallel):
            continue
        behind = together(parts[place + 1 :])
        for begin in range(1, len(part.parts) - 1) if behind else ():  # a join merged with the last branches
            stage = behind | together(part.parts[begin:])
            for beside in every_parallel(part.parts[:begin]):
                yield from ([*earlier, *beside, stage] for earlier in every_series(parts[:place]))
        for number, branch in enumerate(part.parts):
            line = branch.parts if isinstance(branch, Series) else (branch,)
            for cut in range(len(line) + 1):
                if behind and cut < len(line):  # a join merged with the end of a branch
                    for beside in every_parallel(without(part, number, line[:cut])):
                        stage = behind | together(line[cut:])
                        yield from ([*earlier, *beside, stage] for earlier in every_series(parts[:place]))
                if cut and place == len(parts) - 1:  # a fork merged with the start of a branch
                    for beside in every_parallel(without(part, number, line[cut:])):
                        for begin in range(place - 1, -1, -1):
                            if isinstance(parts[begin], Parallel):
                                break
                            stage = together(parts[begin:place]) | together(line[:cut])
                            yield from ([*earlier, stage, *beside] for earlier in every_series(parts[:begin]))
    if isinstance(parts[-1], Parallel):
        for beside in every_parallel(parts[-1].parts):
            yield from ([*earlier, *beside] for earlier in every_series(parts[:-1]))


def every_parallel(branches: Sequence[Tree]) -> Iterator[Sets]:
    if not branches:
        yield []
        return
    for begin in range(len(branches)):
        stage = together(branches[begin:])
        yield from ([*earlier, stage] for earlier in every_parallel(branches[:begin]))
    last = branches[-1]
    if isinstance(last, Series):
        for alone in every_series(last.parts):
            yield from ([*earlier, *alone] for earlier in every_parallel(branches[:-1]))


def together(parts: Sequence[Tree]) -> frozenset[int]:
    return frozenset(layer for part in parts for layer in layers_of(part))


def without(part: Parallel, number: int, line: Sequence[Tree]) -> list[Tree]:
    branch: list[Tree] = []
    if len(line) == 1:
        branch = list(line[0].parts) if isinstance(line[0], Parallel) else [line[0]]
    elif line:
        branch = [Series(tuple(line))]
    return [*part.parts[:number], *branch, *part.parts[number + 1 :]]


@pytest.mark.parametrize("link", [Link(), Link(3.0, 0.1)])
def test_no_stage_graph_of_its_search_space_has_a_faster_slowest_stage(link: Link) -> None:
    dice = random.Random(str(link))
    nothing = branched = 0
    for _ in range(500):
        layers, devices = dice.randrange(1, 8), dice.randrange(1, 5)
        edges, _ = draw_tree(dice, layers)
        costs = draw_costs(dice, edges, layers, devices, True, link)
        tree = tree_of(layers, edges)
        parts = tree.parts if isinstance(tree, Series) else (tree,)
        ways = {frozenset(sets) for sets in every_series(parts) if len(sets) <= devices}
        best = min(
            slowest(costs, list(zip(sets, replicas, strict=True)))
            for sets in map(list, ways)
            for replicas in splits(devices, len(sets))
        )
        graphs = graphpipe_stages(costs)
        if math.isinf(best):
            nothing += 1
            assert graphs == []
            continue
        values = []
        for stages in graphs:
            check_graph([PlanStage(tuple(ranges_of(stage.layers)), (0,)) for stage in stages], 1, edges)
            assert sorted(layer for stage in stages for layer in stage.layers) == list(range(layers))
            assert sum(stage.replicas for stage in stages) <= devices
            values.append(slowest(costs, [(frozenset(stage.layers), stage.replicas) for stage in stages]))
        branched += any(len(stage.layers) < layers for stage in graphs[0]) and isinstance(tree, (Series, Parallel))
        assert best * (1 - 1e-9) <= min(values) <= best * 1.0101
        # a stage graph within a limit is found if there is one
        assert StageGraphs(CostedTree(costs, tree), best * (1 + 1e-9)).ranked_graphs()
        assert not StageGraphs(CostedTree(costs, tree), best * (1 - 1e-6)).ranked_graphs()
    assert nothing > 20
    assert branched > 60


def test_a_join_shares_the_stage_of_a_branchs_end_and_the_depth_is_that_of_a_branch() -> None:
    """The case study of Sec. 3.7.4: eight blocks in two branches, a join of no work, eight devices. The way from one
    branch to the loss has five stages (the paper says four, and forgets the one with the join), that of a line eight.
    """
    edges = [(at, at + 1, 1) for branch in (0, 4) for at in range(branch, branch + 3)] + [(3, 8, 1), (7, 8, 1)]
    seconds = (1.0,) * 8 + (0.0,)
    # with memory for one block a stage cannot hold more, and replicas do not help
    costs = GraphCosts(seconds, (6,) * 8 + (0,), (1,) * 8 + (0,), (9,) * 9, (0,) * 10, tuple(edges), 8, 16, usable=11)
    stages = graphpipe_stages(costs)[0]
    assert sorted(stage.layers for stage in stages) == [*((layer,) for layer in range(7)), (7, 8)]
    assert {stage.replicas for stage in stages} == {1}
    # a line of the same blocks has eight microbatches in flight, for which the memory is too small
    line = replace(costs, edges=tuple((layer, layer + 1, 1) for layer in range(8)))
    assert graphpipe_stages(line) == []
    assert graphpipe_stages(replace(line, usable=14)) != []


def nested(tree: Tree) -> object:
    if not isinstance(tree, Series | Parallel):
        return tree
    return type(tree).__name__[0], *(nested(part) for part in tree.parts)


@pytest.mark.parametrize(
    ("edges", "expected"),
    [
        ([(0, 1), (1, 2), (0, 2)], ("S", 0, 1, 2)),
        ([(0, 2), (1, 2)], ("S", ("P", 0, 1), 2)),
        ([(0, 2), (0, 3), (1, 2), (1, 3)], ("S", ("P", 0, 1), ("P", 2, 3))),
        ([], ("P", 0, 1)),
        ([(0, 1), (0, 3), (1, 2), (3, 4), (2, 5), (4, 5)], ("S", 0, ("P", ("S", 1, 2), ("S", 3, 4)), 5)),
        # a decoder that needs the encoder's end beside its own start: only the decoder's start is parallel
        ([(0, 1), (1, 3), (2, 3), (1, 4), (3, 4)], ("S", ("P", ("S", 0, 1), 2), 3, 4)),
        # an N is a single branch, between layers that are on all paths
        ([(0, 1), (0, 2), (1, 3), (2, 3), (2, 4), (3, 5), (4, 5)], ("S", 0, 1, 2, 3, 4, 5)),
    ],
)
def test_the_tree_says_what_is_in_series_and_what_in_parallel(edges: list[tuple[int, int]], expected: object) -> None:
    layers = 1 + max((layer for edge in edges for layer in edge), default=1)
    assert nested(tree_of(layers, edges)) == expected


def test_the_tree_of_a_series_parallel_graph_has_its_ways_and_no_others() -> None:
    dice = random.Random(5)
    for _ in range(200):
        layers = dice.randrange(1, 12)
        edges, _ = draw_tree(dice, layers)
        ways = {(a, b) for a, b in edges}
        for middle, first, last in itertools.product(range(layers), repeat=3):
            if (first, middle) in ways and (middle, last) in ways:
                ways.add((first, last))
        pairs: set[tuple[int, int]] = set()
        collect(tree_of(layers, edges), pairs)
        assert pairs == ways
        triples = tuple((writer, reader, 0) for writer, reader in edges)
        assert downset_count(tree_of(layers, edges)) == len(downsets(layers, triples, 10_000))


def collect(tree: Tree, pairs: set[tuple[int, int]]) -> None:
    if not isinstance(tree, Series | Parallel):
        return
    for part in tree.parts:
        collect(part, pairs)
    if isinstance(tree, Series):
        for earlier, later in itertools.combinations(tree.parts, 2):
            pairs |= set(itertools.product(layers_of(earlier), layers_of(later)))


def test_long_series_are_searched_in_groups_of_their_smallest_layers() -> None:
    """A chain of 100 layers used to take 42 s; a chain of 390 ended in a recursion error."""
    tree = coarsened(tree_of(6, [(at, at + 1) for at in range(5)]), [5.0, 1.0, 1.0, 5.0, 1.5, 5.0], 4)
    assert tree == Series((0, Together((1, 2)), Together((3, 4)), 5))
    towers = [(at, at + 1) for at in range(200) if at != 99] + [(99, 200)]
    grouped = coarsened(tree_of(201, towers), [1.0] * 201, 8)
    assert isinstance(grouped, Series)
    assert [len(layers_of(part)) for part in grouped.parts] == [200, 1]
    assert isinstance(grouped.parts[0], Parallel)
    assert [len(branch.parts) for branch in grouped.parts[0].parts if isinstance(branch, Series)] == [8, 8]
    costs = GraphCosts((1.0,) * 390, *((0,) * 390,) * 3, (0,) * 391, tuple((at, at + 1, 1) for at in range(389)), 4, 8)
    stages = graphpipe_stages(costs)[0]
    assert [layer for stage in stages for layer in stage.layers] == list(range(390))
    assert slowest(costs, [(frozenset(stage.layers), stage.replicas) for stage in stages]) == pytest.approx(
        390 / 4, rel=0.01
    )
