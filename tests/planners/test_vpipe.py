"""vPipe's moves of layers: worked examples, a second implementation of its passes, and a best start that is kept."""

from __future__ import annotations

import random

import pytest

from tests.planners.layered import chain_of, random_chain
from tests.sweeps import some
from varuna_capslog.planners.layerwise import Layerwise, StageChoice
from varuna_capslog.planners.vpipe import vpipe_stages


def cuts(stages: list[StageChoice]) -> list[int]:
    return [stage.first for stage in stages]


def intervals(stages: list[StageChoice]) -> list[list[tuple[int, int, str]]]:
    return [[(interval.first, interval.end, interval.kind) for interval in stage.intervals] for stage in stages]


def test_without_a_limit_the_seconds_are_balanced() -> None:
    chain = chain_of([4.0, 3.0, 3.0], [1] * 3, [2, 1])
    # half of 30 s is reached behind layer 1 (21 s and 9 s); a move gives 12 s and 18 s
    assert cuts(vpipe_stages(chain)) == [0, 1]


def test_a_stage_swaps_first_and_then_runs_its_last_layers_again_as_one_interval() -> None:
    """Copies of 8 bytes take 4 s; three of them overlap with the 12 s of four layers. Each copy frees 16 of 80 bytes,
    and each recomputed layer 18."""
    for usable, expected, seconds in (
        (64, [(0, 1, "offload")], 12.0),
        (32, [(0, 1, "offload"), (1, 2, "offload"), (2, 3, "offload")], 12.0),
        (31, [(0, 1, "offload"), (1, 2, "offload"), (2, 3, "offload"), (3, 4, "recompute")], 13.0),
        (13, [(0, 1, "offload"), (1, 2, "offload"), (2, 4, "recompute")], 14.0),
    ):
        chain = chain_of([1.0] * 4, [10] * 4, [2], [usable], freed=[9] * 4, moved=[8] * 4, host_bandwidth=2.0)
        (stage,) = vpipe_stages(chain)
        assert (intervals([stage]), stage.seconds) == ([expected], seconds)


def test_layers_move_away_from_a_stage_that_must_treat_its_own() -> None:
    """Six layers, two microbatches in flight in stage 0. At cut 3 stage 0 needs 12 bytes of 8 and must recompute two
    layers: 11 s. At cut 2 it fits, but stage 1 takes 12 s: the cut stays. With 3 s per forward the cut moves."""
    chain = chain_of([1.0] * 6, [2] * 6, [2, 1], [8, 8], freed=[1] * 6)
    assert (cuts(vpipe_stages(chain)), intervals(vpipe_stages(chain))) == ([0, 3], [[(1, 3, "recompute")], []])
    chain = chain_of([3.0] * 6, [2] * 6, [2, 1], [8, 8], freed=[1] * 6, backward=[2.0] * 6)
    assert (cuts(vpipe_stages(chain)), intervals(vpipe_stages(chain))) == ([0, 2], [[], []])


def test_a_pass_goes_on_through_plans_that_are_worse() -> None:
    """Cut 4 balances the seconds but has a message of 50 s; the pass reaches cut 2 through cut 3, with 60 s."""
    transfer = [0.0, 90.0, 1.0, 60.0, 50.0, 90.0, 90.0, 90.0]
    chain = chain_of([1.0] * 8, [1] * 8, [2, 1], transfer=[*transfer, 0.0])
    assert cuts(vpipe_stages(chain)) == [0, 2]


def test_one_stage_and_what_cannot_fit() -> None:
    (stage,) = vpipe_stages(chain_of([1.0] * 3, [4] * 3, [1], [11], freed=[1] * 3))
    assert (stage.intervals[0].first, stage.lack, stage.seconds) == (2, 0, 10.0)
    front, back = vpipe_stages(chain_of([1.0] * 4, [4] * 4, [2, 1], [5, 5], freed=[1] * 4))
    assert (front.end, front.lack, back.lack) == (1, 1, 4)


def read_again(chain: Layerwise) -> tuple[float, list[int]]:
    """Run the passes on lists of layers: neighbours exchange a last or first layer; all plans of a pass are kept."""

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
        else:  # the border that bisection between the two ends finds
            low, high = 0, len(plans) - 1
            while high - low > 1:
                low, high = ((low + high) // 2, high) if lacking[(low + high) // 2] else (low, (low + high) // 2)
            chosen = high
        return lacking[chosen], sum(took) + plans[chosen][1]

    def worth(parts: list[list[int]]) -> tuple[int, float]:
        outcomes = [treat(stage, layers) for stage, layers in enumerate(parts)]
        slowest = [seconds for _, seconds in outcomes] + [chain.transfer[layers[0]] for layers in parts[1:]]
        return max(lack for lack, _ in outcomes), max(slowest)

    total = sum(chain.forward) + sum(chain.backward)
    parts: list[list[int]] = []
    queue = list(range(chain.num_layers))
    for stage in range(chain.stages):
        behind, layers = chain.stages - stage - 1, [queue.pop(0)]
        while queue and len(queue) > behind and chain.seconds(0, layers[-1] + 1) < total * (stage + 1) / chain.stages:
            layers.append(queue.pop(0))
        parts.append([*layers, *(queue if not behind else [])])
    while True:
        written, current, locked = [(worth(parts), parts)], parts, set()
        while True:
            steps = []
            for border in range(1, chain.stages):
                for giver, taker in ((border - 1, border), (border, border - 1)):
                    layer = current[giver][-1 if giver < taker else 0]
                    if len(current[giver]) > 1 and layer not in locked:
                        after = [sorted({*part, layer} if n == taker else {*part} - {layer} if n == giver else part)
                                 for n, part in enumerate(current)]  # fmt: skip
                        steps.append((worth(after), [part[0] for part in after], layer, after))
            if not steps:
                break
            score, _, layer, current = min(steps, key=lambda step: step[:2])
            locked.add(layer)
            written.append((score, current))
        best = min(written, key=lambda record: record[0])
        if best[0] >= written[0][0]:
            return written[0][0][1], [layers[0] for layers in parts]
        parts = best[1]


@pytest.mark.parametrize("seed", some(range(150), 50))
def test_the_passes_read_again_end_at_the_same_cuts(seed: int) -> None:
    chain = random_chain(random.Random(f"vpipe {seed}"), seed % 5 + 1)
    stages = vpipe_stages(chain)
    seconds, expected = read_again(chain)
    assert cuts(stages) == expected
    assert max([*(stage.seconds for stage in stages), *(chain.transfer[cut] for cut in expected[1:])]) == seconds


@pytest.mark.parametrize("seed", range(20))
def test_a_start_that_is_the_best_is_kept_and_nothing_is_worse_than_the_start(seed: int) -> None:
    dice = random.Random(f"start {seed}")
    stages = dice.randint(2, 4)
    size = stages * dice.randint(1, 3)
    chain = chain_of([2.0] * size, [1] * size, [stages] * stages)
    assert cuts(vpipe_stages(chain)) == list(range(0, size, size // stages))
