"""The graph of the stages: convex, without a circle, against a search through every order of the layers."""

from __future__ import annotations

import random
from itertools import permutations

import pytest

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.plans.parts import PlanStage
from varuna_capslog.plans.rules import check_graph

# Two branches of two layers each between a fork (0) and a join (5): 1, 2 and 3, 4.
FORK = [(0, 1), (1, 2), (0, 3), (3, 4), (2, 5), (4, 5)]


def stages_of(*pieces: list[list[int]]) -> list[PlanStage]:
    return [PlanStage(tuple(tuple(piece) for piece in ranges), (rank,)) for rank, ranges in enumerate(pieces)]  # type: ignore[misc]


def test_branches_may_be_stages_of_their_own_and_share_one_with_the_join() -> None:
    check_graph(stages_of([[0, 1]], [[1, 3]], [[3, 5]], [[5, 6]]), 1, FORK)
    check_graph(stages_of([[0, 1]], [[1, 3], [5, 6]], [[3, 5]]), 1, FORK)
    check_graph(stages_of([[0, 1], [3, 5]], [[1, 3]], [[5, 6]]), 1, FORK)


def test_a_stage_that_is_left_and_entered_again_is_refused() -> None:
    with pytest.raises(CapslogError, match=r"stage 0 \(rank 0, layers 0 and 2\) reaches its layer 2 only through"):
        check_graph(stages_of([[0, 1], [2, 3]], [[1, 2], [3, 6]]), 1, FORK)


def test_stages_that_wait_for_each_other_are_refused() -> None:
    """Each of them is convex: 1 -> 4 and 3 -> 2 join the branches crosswise."""
    edges = [(0, 1), (0, 2), (1, 3), (2, 4)]
    with pytest.raises(CapslogError, match=r"stages 1 .* and 2 .* wait for each other"):
        check_graph(stages_of([[0, 1]], [[1, 2], [4, 5]], [[2, 4]]), 1, edges)


def test_against_every_order_of_the_stages() -> None:
    """A partition into stages is valid if some order of the stages keeps every edge forward: convexity follows."""
    generator = random.Random(1)
    seen = {True: 0, False: 0}
    for _ in range(400):
        layers = generator.randint(2, 6)
        edges = [(a, b) for b in range(1, layers) for a in range(b) if generator.random() < 0.4]
        count = generator.randint(1, 4)
        owner = [generator.randrange(count) for _ in range(layers)]
        pieces = [
            [[layer, layer + 1] for layer in range(layers) if owner[layer] == stage] for stage in sorted(set(owner))
        ]
        names = sorted(set(owner))
        right = any(
            all(order.index(owner[a]) <= order.index(owner[b]) for a, b in edges) for order in permutations(names)
        )
        seen[right] += 1
        if right:
            check_graph(stages_of(*pieces), 1, edges)
        else:
            with pytest.raises(CapslogError, match=r"convex|wait for each other"):
                check_graph(stages_of(*pieces), 1, edges)
    assert min(seen.values()) > 50, seen
