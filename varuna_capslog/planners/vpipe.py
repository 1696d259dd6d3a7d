"""vPipe's planner: moves layers between neighbouring stages as long as this makes the slowest stage faster.

Zhao et al., "vPipe: A Virtualized Acceleration System for Achieving Efficient and Scalable Pipeline Parallel DNN
Training", TPDS 33(3), 2022. It searches cuts and memory management together: an iterative algorithm in the manner of
Kernighan and Lin moves layers, and swaps and recomputes in every stage. DawnPiper (Sec. 2, 5) compares with it and says
that it balances seconds, considers communication, and treats memory more coarsely than by operators.

The text of its algorithm was not available, and the published program (hku-systems/vpipe at 42ade99) has plans, but no
search. A plan there is the number of layers of each stage, and the share of these that recompute: its last layers, as
one checkpoint. This planner follows these plans; all else is an interpretation:

- The first cuts divide the seconds of the layers evenly.
- A stage that does not fit swaps layers while their copies overlap, in the order of `capuchin`; then its last layers
  recompute, as one interval and as few as make it fit. Layers of this interval are not swapped.
- A pass moves one layer at a time over the border of two stages, to the best plan, even where this is worse than the
  plan before; a layer moves once in a pass. The best plan of a pass begins the next pass, until no plan is better.
- A plan is better if it lacks fewer bytes; ties are broken by the time of the slowest stage or transfer.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

from varuna_capslog.planners.capuchin import overlapped_swaps
from varuna_capslog.planners.dawnpiper import compute_balanced
from varuna_capslog.planners.layerwise import Choice, Layerwise, StageChoice
from varuna_capslog.plans.parts import MemoryInterval

__all__ = ["tail_treated_stage", "vpipe_stages"]


class _Split(NamedTuple):
    """Cuts and their stages. lack: bytes, of the stage that lacks most. seconds: of the slowest stage or transfer."""

    lack: int
    seconds: float
    cuts: tuple[int, ...]
    stages: tuple[StageChoice, ...]


def vpipe_stages(chain: Layerwise) -> list[StageChoice]:
    """Return the stages in order; where no plan of the search fits, the stages that lack least."""
    stage_of = functools.cache(functools.partial(tail_treated_stage, chain))

    def split_at(cuts: tuple[int, ...]) -> _Split:
        bounds = [*cuts, chain.num_layers]
        stages = tuple(stage_of(stage, *bounds[stage : stage + 2]) for stage in range(chain.stages))
        slowest = max(stage.seconds for stage in stages)
        slowest = max([slowest, *(chain.transfer[cut] for cut in cuts[1:])])
        return _Split(max(stage.lack for stage in stages), slowest, cuts, stages)

    best = split_at(_first_cuts(chain))
    while True:
        best_of_pass = best
        current, moved = best, set[int]()
        while True:
            moves = [(cuts, layer) for cuts, layer in _moves(current.cuts, chain.num_layers) if layer not in moved]
            if not moves:
                break
            current, layer = min(((split_at(cuts), layer) for cuts, layer in moves), key=lambda move: move[0][:3])
            moved.add(layer)
            best_of_pass = min(best_of_pass, current, key=lambda split: split[:2])
        if best_of_pass[:2] >= best[:2]:
            return list(best.stages)
        best = best_of_pass


def tail_treated_stage(chain: Layerwise, stage: int, first: int, end: int) -> StageChoice:
    """Return layers first .. end-1 as stage `stage`, with the fewest swaps that make it fit, then with the fewest of
    its last layers recomputed. Where recomputing the whole stage does not fit either, see `Layerwise.fewest`.
    """
    return chain.fewest(stage, first, end, lambda: _choices(chain, stage, first, end))


def _first_cuts(chain: Layerwise) -> tuple[int, ...]:
    last = chain.stages - 1
    behind = (compute_balanced(chain, 0, chain.num_layers, (0, stage, last)) for stage in range(last))
    cuts = [0]
    for stage, cut in enumerate(behind, 1):
        cuts.append(max(cuts[-1] + 1, min(cut, chain.num_layers - (chain.stages - stage))))
    return tuple(cuts)


def _moves(cuts: tuple[int, ...], num_layers: int) -> list[tuple[tuple[int, ...], int]]:
    """Return every cut list that differs by one moved layer, and this layer."""
    bounds, moves = [*cuts, num_layers], []
    for number in range(1, len(cuts)):
        before, cut, after = bounds[number - 1 : number + 2]
        for moved, layer in ((cut - 1, cut - 1), (cut + 1, cut)):
            if before < moved < after:
                moves.append(((*cuts[:number], moved, *cuts[number + 1 :]), layer))
    return moves


def _choices(chain: Layerwise, stage: int, first: int, end: int) -> list[Choice]:
    """Return choices with one more swap at a time, then with one more of the last layers recomputed."""
    swapped = overlapped_swaps(chain, stage, first, end)
    choices: list[Choice] = [(_offloaded(swapped[: count + 1]), 0.0) for count in range(len(swapped))]
    cost = 0.0
    for begin in range(end - 1, first - 1, -1):
        cost += chain.forward[begin]
        before = _offloaded([layer for layer in swapped if layer < begin])
        choices.append(((*before, MemoryInterval(begin, end, "recompute")), cost))
    return choices


def _offloaded(layers: list[int]) -> tuple[MemoryInterval, ...]:
    return tuple(MemoryInterval(layer, layer + 1, "offload") for layer in sorted(layers))
