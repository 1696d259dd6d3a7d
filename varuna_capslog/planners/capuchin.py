"""Capuchin's greedy choice between swapping and computing again, per layer of one stage.

Peng et al., "Capuchin: Tensor-based GPU Memory Management for Deep Learning", ASPLOS 2020, as DawnPiper (Sec. 4.3)
takes it: swap as long as the copies overlap with the computation; from then on take whichever of swapping and computing
again costs least. FreeTime and MSPS (memory saved per second) put the candidates in order.

What we do where the text is silent or means tensors:

- A candidate is all that one layer saves, since a plan treats layers and not tensors.
- FreeTime is the time from the end of the copy out to the begin of the copy back. Between them a stage computes its
  later layers forward and backward, and one whole forward and backward for each further microbatch in flight.
- Swaps go by falling FreeTime, and stop at the first layer whose copies do not overlap: its FreeTime is below zero, or
  the copies of all swapped layers in one direction take longer than the stage computes for one microbatch.
- Afterwards every layer that is left counts with both ways. A swap costs what does not overlap. The larger number of
  bytes saved per second is taken, of equals the earlier layer, of its ways the swap.
- A recomputed layer runs from its own input, which stays; so layers do not change each other's savings, and the
  recomputed sources that Capuchin follows do not arise.
- Where copies take the device's own time nothing overlaps.
- Where a call's saved tensors leave the device only when the call has ended, as in our engine, nothing is swapped on a
  stage with one microbatch in flight, as its backward follows at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
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
    """Layers first .. end-1 as stage `stage`, with as few picks of the greedy choice as make it fit.

    Where all of them together do not fit, nothing is taken to; `lack` then says how much is missing.
    """
    return chain.fewest(stage, first, end, lambda: _choices(chain, stage, first, end))


def overlapped_swaps(chain: Layerwise, stage: int, first: int, end: int) -> list[int]:
    """The layers whose copies overlap with the computation, by falling FreeTime."""
    if not chain.copies_beside and chain.host_bandwidth is not None:
        return []
    busy, copied, found = chain.seconds(first, end), 0.0, []
    free = {
        layer: _free_seconds(chain, stage, layer, end, busy)
        for layer in range(first, end)
        if chain.moved_on(stage, layer) > 0
    }
    for layer in sorted(free, key=lambda one: (-free[one], one)):
        copied += chain.copy_seconds(layer)
        if free[layer] < -_ROUNDING * busy or copied > busy * (1 + _ROUNDING):
            break
        found.append(layer)
    return found


def _choices(chain: Layerwise, stage: int, first: int, end: int) -> list[Choice]:
    """Nothing but the first pick, the first two, and so on."""
    found: list[Choice] = []
    kinds: dict[int, str] = {}
    cost = 0.0
    for pick in _picks(chain, stage, first, end):
        kinds[pick.layer] = pick.kind
        cost += pick.seconds
        found.append((tuple(MemoryInterval(at, at + 1, kinds[at]) for at in sorted(kinds)), cost))
    return found


def _picks(chain: Layerwise, stage: int, first: int, end: int) -> Iterator[_Pick]:
    swapped = overlapped_swaps(chain, stage, first, end)
    yield from (_Pick(layer, "offload", 0.0) for layer in swapped)
    busy, copied = chain.seconds(first, end), sum(map(chain.copy_seconds, swapped))
    left = [layer for layer in range(first, end) if layer not in swapped]
    while True:
        best: tuple[float, _Pick] | None = None
        for layer in left:
            ways = []
            if (moved := chain.moved_on(stage, layer)) > 0:
                shown = _exposed_seconds(chain, layer, copied, busy, _free_seconds(chain, stage, layer, end, busy))
                ways.append((moved, _Pick(layer, "offload", shown)))
            if chain.freed[layer] > 0:
                ways.append((chain.freed[layer], _Pick(layer, "recompute", chain.forward[layer])))
            for saved, pick in ways:
                rate = saved / pick.seconds if pick.seconds > 0 else math.inf
                if best is None or rate > best[0]:
                    best = rate, pick
        if best is None:
            return
        pick = best[1]
        left.remove(pick.layer)
        copied += chain.copy_seconds(pick.layer) if pick.kind == "offload" else 0.0
        yield pick


def _free_seconds(chain: Layerwise, stage: int, layer: int, end: int, busy: float) -> float:
    """FreeTime: below zero by as much as the two copies take longer than what is computed meanwhile."""
    meanwhile = chain.seconds(layer + 1, end) + (chain.in_flight[stage] - 1) * busy
    return meanwhile - 2 * chain.copy_seconds(layer)


def _exposed_seconds(chain: Layerwise, layer: int, copied: float, busy: float, free: float) -> float:
    """What one more swap costs: the part of its copies that does not overlap.

    copied: seconds of the copies in one direction so far.
    """
    once = chain.copy_seconds(layer)
    if not chain.copies_beside:
        return 2 * once
    return max(0.0, -free, min(once, copied + once - busy))
