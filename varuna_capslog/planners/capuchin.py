"""Capuchin's greedy choice between swapping and recomputation, for each layer of a stage.

Peng et al., "Capuchin: Tensor-based GPU Memory Management for Deep Learning", ASPLOS 2020, as used by DawnPiper (Sec.
4.3): swap as long as the copies overlap with the computation; from then on take the cheaper of swapping and
recomputation. FreeTime and MSPS (memory saved per second) order the candidates.

Choices where the text is silent or refers to tensors:

- A candidate is all saved tensors of a layer, since a plan treats layers and not tensors.
- FreeTime is the time from the end of the copy out to the beginning of the copy back. Between them a stage computes its
  later layers forward and backward, and one whole forward and backward for each further microbatch in flight.
- Swaps are taken by falling FreeTime, and stop at the first layer whose copies do not overlap: its FreeTime is below
  zero, or the copies of all swapped layers in one direction take longer than the stage computes for one microbatch.
- Afterwards every remaining layer has both options. A swap costs the part that does not overlap. The option that saves
  most bytes per second is taken; ties go to the earlier layer, and within a layer to the swap.
- A recomputed layer runs from its own input, which stays; so layers do not change each other's savings, and Capuchin's
  case of recomputed sources does not occur.
- Where copies take the device's own time, nothing overlaps.
- Where a call's saved tensors leave the device only when the call has ended, as in this engine, a swap frees nothing of
  two of the calls in flight: at the peak of a stage one computes, and the copy of another is on its way. So nothing is
  swapped on a stage with up to two microbatches in flight.
- Where all layers are treated and the stage does not fit, each layer gets the treatment that frees most of its bytes;
  where the stage still does not fit, the choice is made again without swaps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from varuna_capslog.planners.layerwise import Choice, Layerwise, StageChoice
from varuna_capslog.plans.parts import MemoryInterval

__all__ = ["overlapped_swaps", "treated_stage"]

_ROUNDING = 1e-9


class _Pick(NamedTuple):
    layer: int
    kind: str
    seconds: float


def treated_stage(chain: Layerwise, stage: int, first: int, end: int) -> StageChoice:
    """Return layers first .. end-1 as stage `stage`, with the fewest picks of the greedy choice that make it fit; where
    all picks together do not fit, with the fewest picks of the choice without a host tier (`Layerwise.fewest` where
    these do not fit either). So the speed of the host tier does not decide if a stage fits.
    """
    treated = chain.fewest(stage, first, end, lambda: _choices(chain, stage, first, end))
    if not treated.lack or not any(chain.moved):
        return treated
    without_tier = replace(chain, moved=[0] * chain.num_layers)
    recomputed = chain.fewest(stage, first, end, lambda: _choices(without_tier, stage, first, end))
    return min(treated, recomputed, key=lambda choice: choice.lack)


def overlapped_swaps(chain: Layerwise, stage: int, first: int, end: int) -> list[int]:
    """Return the layers whose copies overlap with the computation, by falling FreeTime."""
    if not chain.copies_beside and chain.host_bandwidth is not None:
        return []
    busy, copied, overlapped = chain.seconds(first, end), 0.0, []
    free = {
        layer: _free_seconds(chain, stage, layer, end, busy)
        for layer in range(first, end)
        if chain.moved_on(stage, layer) > 0
    }
    for layer in sorted(free, key=lambda layer: (-free[layer], layer)):
        copied += chain.copy_seconds(layer)
        if free[layer] < -_ROUNDING * busy or copied > busy * (1 + _ROUNDING):
            break
        overlapped.append(layer)
    return overlapped


def _choices(chain: Layerwise, stage: int, first: int, end: int) -> list[Choice]:
    """Return the choices of the first pick, of the first two picks, and so on; a later pick of a layer replaces the
    earlier one.
    """
    choices: list[Choice] = []
    picks: dict[int, _Pick] = {}
    for pick in _picks(chain, stage, first, end):
        picks[pick.layer] = pick
        cost = sum(chosen.seconds for chosen in picks.values())
        choices.append((tuple(MemoryInterval(at, at + 1, picks[at].kind) for at in sorted(picks)), cost))
    return choices


def _picks(chain: Layerwise, stage: int, first: int, end: int) -> Iterator[_Pick]:
    swapped = overlapped_swaps(chain, stage, first, end)
    picks = [_Pick(layer, "offload", 0.0) for layer in swapped]
    yield from picks
    busy, copied = chain.seconds(first, end), sum(map(chain.copy_seconds, swapped))
    remaining = [layer for layer in range(first, end) if layer not in swapped]
    while True:
        best: tuple[float, _Pick] | None = None
        for layer in remaining:
            for saved, pick in _ways(chain, stage, layer, end, copied, busy):
                rate = saved / pick.seconds if pick.seconds > 0 else math.inf
                if best is None or rate > best[0]:
                    best = rate, pick
        if best is None:
            break
        pick = best[1]
        remaining.remove(pick.layer)
        copied += chain.copy_seconds(pick.layer) if pick.kind == "offload" else 0.0
        picks.append(pick)
        yield pick
    for pick in picks:
        ways = _ways(chain, stage, pick.layer, end, copied, busy)
        # ties go to recomputation, so that the last choice does not depend on the speed of the tier
        best_pick = max(ways, key=lambda way: (way[0], way[1].kind == "recompute"))[1]
        if best_pick.kind != pick.kind:
            copied += chain.copy_seconds(pick.layer) * (1 if best_pick.kind == "offload" else -1)
            yield best_pick


def _ways(chain: Layerwise, stage: int, layer: int, end: int, copied: float, busy: float) -> list[tuple[float, _Pick]]:
    """Return, for each way to treat a layer, the bytes that it frees per call in flight, and its pick."""
    ways = list[tuple[float, _Pick]]()
    if (moved := chain.moved_on(stage, layer)) > 0:
        shown = _exposed_seconds(chain, layer, copied, busy, _free_seconds(chain, stage, layer, end, busy))
        ways.append((moved, _Pick(layer, "offload", shown)))
    if chain.freed[layer] > 0:
        ways.append((chain.freed[layer], _Pick(layer, "recompute", chain.forward[layer])))
    return ways


def _free_seconds(chain: Layerwise, stage: int, layer: int, end: int, busy: float) -> float:
    """Return FreeTime; below zero by the seconds that the two copies take beyond the computation between them."""
    meanwhile = chain.seconds(layer + 1, end) + (chain.in_flight[stage] - 1) * busy
    return meanwhile - 2 * chain.copy_seconds(layer)


def _exposed_seconds(chain: Layerwise, layer: int, copied: float, busy: float, free: float) -> float:
    """Return the seconds of one more swap that do not overlap. copied: seconds of copies in one direction so far."""
    once = chain.copy_seconds(layer)
    if not chain.copies_beside:
        return 2 * once
    return max(0.0, -free, min(once, copied + once - busy))
