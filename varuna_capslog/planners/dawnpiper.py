"""DawnPiper's planner: binary partition between balanced seconds and balanced bytes, and Capuchin's greedy per stage.

Algorithms 1 and 2 of the paper (DawnPiper, Sec. 4 and App. B). Theorem 4.1: of two stages, the best cut lies between
the one that balances seconds and the one that balances bytes, where both grow along the chain, transfers take less
than computation, and what may be saved is spread evenly. For more stages the binary scheme is a heuristic: on random
chains the slowest of eight stages was up to 15 % slower than the best (`benchmarks/layerwise`).

What is printed, and what we do:

- Alg. 1 returns a number in line 4, pairs in two orders elsewhere, and `CompMemBalPartition` is not told on which
  stages it works. We give it the first and the last of them, and every part returns its stages.
- Alg. 1 has no case for one or three stages. One stage is treated by itself. Of three, the text cuts off the first.
- `AdjacentPartition` is `BiPar` for two stages whose halves are single stages, so there is one function. Lines 3 to 5,
  which return when the balanced seconds fit, are its first round, after which it stops.
- A candidate without memory optimisation ends the walk also where a stage does not fit and has nothing to treat. We end
  it only where all fits, and where nothing does, take what lacks least.
- Alg. 2's input "GPU peak memory limit" must be what all layers hold, or the M_x do not add up; we take the peak
  that its own loop reaches over all of them.
- Equation (2) multiplies a stage's bytes by the copies that PipeDream keeps, l - x + 1, weights and optimizer state
  among them. Our weights are never stale and kept once. Equation (2) still places the memory-balanced cuts, with
  the microbatches in flight of the run's schedule (those of 1F1B are l - x + 1, while there are as many); whether a
  stage fits is asked of `Layerwise.peak`.
- Its nodes are operators, ours the layers of the chain, and every stage keeps at least one. A balanced position is
  rounded up to the end of a layer, as printed, so that the theorem holds to within one layer: a better cut, or the
  only one that fits, may lie one layer outside the walk.
- App. B.2 leaves out cuts that many tensors cross, but for those that cross all candidates. Where a profile knows the
  tensors, only candidates that one more tensor crosses at most are walked; all where there is none.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

from varuna_capslog.planners.capuchin import treated_stage
from varuna_capslog.planners.layerwise import Layerwise, StageChoice

__all__ = ["compute_balanced", "dawnpiper_stages", "memory_balanced"]

_ROUNDING = 1e-9


class _Partition(NamedTuple):
    """The stages of some layers; lack: the largest of them, seconds: of the slowest."""

    lack: int
    seconds: float
    stages: tuple[StageChoice, ...]

    @property
    def treated(self) -> bool:
        """Whether some memory is optimised, or would have to be."""
        return self.lack > 0 or any(one.intervals for one in self.stages)


def dawnpiper_stages(chain: Layerwise) -> list[StageChoice]:
    """Return the stages of BiPar(N, 1, l), in order; where none of its candidates fits, those that lack least."""
    stage_of = functools.cache(functools.partial(treated_stage, chain))

    @functools.cache
    def partition(first: int, end: int, left: int, right: int) -> _Partition:
        """BiPar of layers first .. end-1 for stages left .. right."""
        if left == right:
            one = stage_of(left, first, end)
            return _Partition(one.lack, one.seconds, (one,))
        middle = left if right - left <= 2 else (left + right) // 2
        best: _Partition | None = None
        for cut in _candidates(chain, first, end, (left, middle, right)):
            halves = partition(first, cut, left, middle), partition(cut, end, middle + 1, right)
            stages = halves[0].stages + halves[1].stages
            found = _Partition(max(one.lack for one in halves), max(one.seconds for one in halves), stages)
            if best is None or found[:2] < best[:2]:
                best = found
            if not found.treated:
                break
        assert best is not None, "both ends of the walk are candidates"
        return best

    return list(partition(0, chain.num_layers, 0, chain.stages - 1).stages)


def _candidates(chain: Layerwise, first: int, end: int, stages: tuple[int, int, int]) -> list[int]:
    """The cuts from the compute-balanced one to the memory-balanced one, in this order."""
    begin, until = compute_balanced(chain, first, end, stages), memory_balanced(chain, first, end, stages)
    step = 1 if until >= begin else -1
    cuts = list(range(begin, until + step, step))
    if chain.crossing is None:
        return cuts
    everywhere = frozenset.intersection(*(chain.crossing[cut] for cut in cuts))
    return [cut for cut in cuts if len(chain.crossing[cut] - everywhere) <= 1] or cuts


def compute_balanced(chain: Layerwise, first: int, end: int, stages: tuple[int, int, int]) -> int:
    """Return the cut behind stage `middle` at which layers first .. end-1 are shared out evenly by their seconds.

    stages: the first, the middle and the last stage that share the layers.
    """
    left, middle, right = stages
    target = chain.seconds(first, end) * (middle - left + 1) / (right - left + 1)
    layer, so_far = first, 0.0
    while layer < end:
        so_far += chain.seconds(layer, layer + 1)
        layer += 1
        if so_far >= target * (1 - _ROUNDING):
            break
    return _within(layer, first, end, stages)


def memory_balanced(chain: Layerwise, first: int, end: int, stages: tuple[int, int, int]) -> int:
    """Return the cut behind stage `middle` of Algorithm 2 for stages left .. right of layers first .. end-1."""
    left, middle, right = stages
    shares = [1 / chain.in_flight[stage] for stage in range(left, right + 1)]
    unit = chain.once(first, end) / sum(shares)
    stage, begin = left, first
    for layer in range(first, end):
        if chain.once(begin, layer + 1) >= unit * shares[stage - left] * (1 - _ROUNDING):
            if stage == middle:
                return _within(layer + 1, first, end, stages)
            stage, begin = stage + 1, layer + 1
    return _within(end, first, end, stages)


def _within(cut: int, first: int, end: int, stages: tuple[int, int, int]) -> int:
    """The cut, moved so that every stage has a layer."""
    left, middle, right = stages
    return max(first + middle - left + 1, min(cut, end - (right - middle)))
