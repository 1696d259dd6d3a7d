"""torchgpipe's balance: the bound of its proof, and a second implementation of its steps."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.memory.additive import AdditiveCosts
from varuna_capslog.planners import find_cuts
from varuna_capslog.planners.baselines import block_partition, seconds_balanced_cuts, size_balanced_cuts
from varuna_capslog.profiles.record import LayerProfile, Profile
from varuna_capslog.schedules import DEFAULT_RUN


def read_again(sequence: list[int], count: int) -> list[list[int]]:
    """Run the proof's steps on lists of elements."""
    edges = [len(sequence) * i // count for i in range(count + 1)]
    blocks = [sequence[a:b] for a, b in pairwise(edges)]
    top = max(sequence)
    while True:
        p = max(range(count), key=lambda i: (sum(blocks[i]), i))
        while True:
            least = min(map(sum, blocks))
            if max(map(sum, blocks)) <= least + top:
                return blocks
            q = min((i for i in range(count) if sum(blocks[i]) == least), key=lambda i: (abs(i - p), i))
            h = q - 1 if p < q else q + 1
            if p < q:
                blocks[q].insert(0, blocks[h].pop())
            else:
                blocks[q].append(blocks[h].pop(0))
            if h == p:
                break


def test_blocks_differ_by_at_most_the_largest_element_and_are_those_of_the_proofs_steps() -> None:
    dice = random.Random(3)
    for _ in range(600):
        sequence = [2 ** dice.randrange(8) for _ in range(dice.randrange(1, 14))]
        count = dice.randrange(1, len(sequence) + 1)
        cuts = block_partition(sequence, count)
        sums = [sum(sequence[a:b]) for a, b in pairwise([*cuts, len(sequence)])]
        assert all(a < b for a, b in pairwise([*cuts, len(sequence)]))
        assert max(sums) - min(sums) <= max(sequence)
        expected = [len(block) for block in read_again(sequence, count)]
        assert [b - a for a, b in pairwise([*cuts, len(sequence)])] == expected


def test_layers_of_nothing_do_not_leave_a_stage_empty() -> None:
    assert block_partition([0, 0, 0, 0], 3) == [0, 1, 2]
    cuts = block_partition([0, 0, 0, 5, 5, 5, 0], 5)
    assert all(a < b for a, b in pairwise([*cuts, 7]))


def test_one_planner_balances_seconds_and_the_other_bytes() -> None:
    rows = [
        LayerProfile(str(at), 1, 1 if at else None, size, size, forward_seconds=took, backward_seconds=0)
        for at, (size, took) in enumerate([(8, 1), (8, 1), (8, 1), (1, 5), (1, 5), (1, 5)])
    ]
    profile = Profile(tuple(rows))
    assert seconds_balanced_cuts(profile, 2) == [0, 4]  # 8 and 10
    assert size_balanced_cuts(profile, 2) == [0, 2]  # 32 and 22
    costs = AdditiveCosts.of_statistics([1] * 6, [0] * 6)
    assert find_cuts("gpipe", profile, costs, DEFAULT_RUN, 2) == [0, 4]
    assert find_cuts("gpipe-size", profile, costs, DEFAULT_RUN, 2) == [0, 2]
    with pytest.raises(CapslogError, match=r"the profile has no forward_seconds for layers\[0\]"):
        seconds_balanced_cuts(Profile((LayerProfile("a", 1),)), 1)
