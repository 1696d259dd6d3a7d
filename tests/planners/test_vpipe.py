"""vPipe's moves of layers: worked examples, the passes read once more, and what no move may improve."""

from __future__ import annotations

import random

import pytest

from tests.planners.layered import chain_of, random_chain
from varuna_capslog.planners.layerwise import Layerwise, StageChoice
from varuna_capslog.planners.vpipe import vpipe_stages


def cuts(stages: list[StageChoice]) -> list[int]:
    return [one.first for one in stages]


def intervals(stages: list[StageChoice]) -> list[list[tuple[int, int, str]]]:
    return [[(one.first, one.end, one.kind) for one in stage.intervals] for stage in stages]


def test_without_a_limit_the_seconds_are_balanced() -> None:
    chain = chain_of([4.0, 3.0, 3.0], [1] * 3, [2, 1])
    # half of 30 s is reached behind layer 1 (21 s and 9 s); a move makes it 12 s and 18 s
    assert cuts(vpipe_stages(chain)) == [0, 1]


def test_a_stage_swaps_first_and_then_runs_its_last_layers_again_as_one_interval() -> None:
    """Copies of 8 bytes take 4 s; three of them overlap with the 12 s of four layers. Each frees 16 of 80 bytes, and a
    layer that runs again 18."""
    for usable, expected, seconds in (
        (64, [(0, 1, "offload")], 12.0),
        (32, [(0, 1, "offload"), (1, 2, "offload"), (2, 3, "offload")], 12.0),
        (31, [(0, 1, "offload"), (1, 2, "offload"), (2, 3, "offload"), (3, 4, "recompute")], 13.0),
        (13, [(0, 1, "offload"), (1, 2, "offload"), (2, 4, "recompute")], 14.0),
    ):
        chain = chain_of([1.0] * 4, [10] * 4, [2], [usable], freed=[9] * 4, moved=[8] * 4, host_bandwidth=2.0)
        (found,) = vpipe_stages(chain)
        assert (intervals([found]), found.seconds) == ([expected], seconds)


def test_layers_move_away_from_a_stage_that_must_treat_its_own() -> None:
    """Six layers, two microbatches in flight in front: at cut 3 the front needs 12 bytes of 8. Two layers must run
    again: 11 s. At cut 2 it fits, and the stage behind takes 12 s: the cut stays. With 3 s for a forward it moves."""
    chain = chain_of([1.0] * 6, [2] * 6, [2, 1], [8, 8], freed=[1] * 6)
    assert (cuts(vpipe_stages(chain)), intervals(vpipe_stages(chain))) == ([0, 3], [[(1, 3, "recompute")], []])
    chain = chain_of([3.0] * 6, [2] * 6, [2, 1], [8, 8], freed=[1] * 6, backward=[2.0] * 6)
    assert (cuts(vpipe_stages(chain)), intervals(vpipe_stages(chain))) == ([0, 2], [[], []])


def test_a_pass_goes_on_through_plans_that_are_worse() -> None:
    """From cut 4, which balances the seconds but has a message of 50 s, the way to cut 2 leads over cut 3 with 60 s."""
    transfer = [0.0, 90.0, 1.0, 60.0, 50.0, 90.0, 90.0, 90.0]
    chain = chain_of([1.0] * 8, [1] * 8, [2, 1], transfer=[*transfer, 0.0])
    assert cuts(vpipe_stages(chain)) == [0, 2]


def test_one_stage_and_what_cannot_fit() -> None:
    (found,) = vpipe_stages(chain_of([1.0] * 3, [4] * 3, [1], [11], freed=[1] * 3))
    assert (found.intervals[0].first, found.lack, found.seconds) == (2, 0, 10.0)
    found, other = vpipe_stages(chain_of([1.0] * 4, [4] * 4, [2, 1], [5, 5], freed=[1] * 4))
    assert (found.end, found.lack, other.lack) == (1, 1, 4)


def read_again(chain: Layerwise) -> tuple[float, list[int]]:
    """Stages as lists of layers, which hand each other their last or first; all plans of a pass are written down."""

    def treat(stage: int, layers: list[int]) -> tuple[int, float]:
        first, end = layers[0], layers[-1] + 1

        def lack(kinds: dict[int, str]) -> int:
            held = chain.peak(stage, first, end, ())
            for n, kind in kinds.items():
                held -= chain.in_flight[stage] * (chain.freed if kind == "recompute" else chain.moved)[n]
            return max(0, held - chain.usable[stage])

        took = [chain.forward[n] + chain.backward[n] for n in layers]
        swaps: list[int] = []
        if chain.copies_beside or chain.host_bandwidth is None:
            lane, rate = 0.0, chain.host_bandwidth or float("inf")
            idle = {
                n: sum(took[n + 1 - first :]) + (chain.in_flight[stage] - 1) * sum(took) - 2 * chain.moved[n] / rate
                for n in layers
                if chain.moved[n]
            }
            for n in sorted(idle, key=lambda n: (-idle[n], n)):
                lane += chain.moved[n] / rate
                if idle[n] < 0 or lane > sum(took):
                    break
                swaps.append(n)
        plans = [(dict.fromkeys(swaps[:n], "offload"), 0.0) for n in range(len(swaps) + 1)]
        for n in reversed(layers):
            tail = dict.fromkeys(range(n, end), "recompute")
            plans.append((dict.fromkeys((m for m in swaps if m < n), "offload") | tail, sum(chain.forward[n:end])))
        lacking = [lack(kinds) for kinds, _ in plans]
        if lacking[0] and lacking[-1]:
            chosen = 0 if lacking[0] <= lacking[-1] else len(plans) - 1
        elif not lacking[0]:
            chosen = 0
        else:  # the border that a bisection between the two ends comes to
            low, high = 0, len(plans) - 1
            while high - low > 1:
                low, high = ((low + high) // 2, high) if lacking[(low + high) // 2] else (low, (low + high) // 2)
            chosen = high
        return lacking[chosen], sum(took) + plans[chosen][1]

    def worth(parts: list[list[int]]) -> tuple[int, float]:
        found = [treat(stage, layers) for stage, layers in enumerate(parts)]
        slowest = [seconds for _, seconds in found] + [chain.transfer[layers[0]] for layers in parts[1:]]
        return max(lack for lack, _ in found), max(slowest)

    whole = sum(chain.forward) + sum(chain.backward)
    parts: list[list[int]] = []
    left = list(range(chain.num_layers))
    for stage in range(chain.stages):
        behind, here = chain.stages - stage - 1, [left.pop(0)]
        while left and len(left) > behind and chain.seconds(0, here[-1] + 1) < whole * (stage + 1) / chain.stages:
            here.append(left.pop(0))
        parts.append([*here, *(left if not behind else [])])
    while True:
        written, here, locked = [(worth(parts), parts)], parts, set()
        while True:
            steps = []
            for border in range(1, chain.stages):
                for giver, taker in ((border - 1, border), (border, border - 1)):
                    layer = here[giver][-1 if giver < taker else 0]
                    if len(here[giver]) > 1 and layer not in locked:
                        after = [sorted({*one, layer} if n == taker else {*one} - {layer} if n == giver else one)
                                 for n, one in enumerate(here)]  # fmt: skip
                        steps.append((worth(after), [one[0] for one in after], layer, after))
            if not steps:
                break
            value, _, layer, here = min(steps, key=lambda one: one[:2])
            locked.add(layer)
            written.append((value, here))
        best = min(written, key=lambda one: one[0])
        if best[0] >= written[0][0]:
            return written[0][0][1], [layers[0] for layers in parts]
        parts = best[1]


@pytest.mark.parametrize("seed", range(150))
def test_the_passes_read_again_end_at_the_same_cuts(seed: int) -> None:
    chain = random_chain(random.Random(f"vpipe {seed}"), seed % 5 + 1)
    found = vpipe_stages(chain)
    seconds, expected = read_again(chain)
    assert cuts(found) == expected
    assert max([*(one.seconds for one in found), *(chain.transfer[cut] for cut in expected[1:])]) == seconds


@pytest.mark.parametrize("seed", range(20))
def test_a_start_that_is_the_best_is_kept_and_nothing_is_worse_than_the_start(seed: int) -> None:
    dice = random.Random(f"start {seed}")
    stages = dice.randint(2, 4)
    size = stages * dice.randint(1, 3)
    chain = chain_of([2.0] * size, [1] * size, [stages] * stages)
    assert cuts(vpipe_stages(chain)) == list(range(0, size, size // stages))
