"""DawnPiper's planner: binary partition between balanced seconds and balanced bytes, and Capuchin's greedy per stage.

Algorithms 1 and 2 of the paper (DawnPiper, Sec. 4 and App. B). Theorem 4.1: for two stages, the best cut lies between
the cut that balances seconds and the cut that balances bytes, if both grow along the chain, transfers take less time
than computation, and the bytes that can be saved are spread evenly. For more stages the binary scheme is a heuristic:
on random chains the slowest of eight stages was up to 15 % slower than that of the best cuts (`benchmarks/layerwise`).

Deviations from the printed text:

- Alg. 1 returns a number in line 4, pairs in two orders elsewhere, and `CompMemBalPartition` does not receive its
  stages. Here it receives the first and the last stage, and every part returns its stages.
- Alg. 1 has no case for one or three stages. One stage is treated by itself. The text divides three into one and two.
- `AdjacentPartition` is `BiPar` for two stages whose halves are single stages, so there is one function. Lines 3 to 5,
  which return when the balanced seconds fit, are its first round, after which it stops.
- In the text, a candidate without memory optimisation also ends the walk where a stage does not fit and has nothing to
  treat. Here the walk ends only where all stages fit; if no candidate fits, the candidate that lacks least is taken.
- Alg. 2's input "GPU peak memory limit" must be the bytes of all layers, or the M_x do not add up; here it is the peak
  that the algorithm's loop reaches over all layers.
- Equation (2) multiplies a stage's bytes by the copies that PipeDream keeps, l - x + 1, also of weights and optimizer
  state. Here weights are never stale: one copy is kept. Equation (2) still places memory-balanced cuts, with the run's
  microbatches in flight (l - x + 1 under 1F1B, while there are as many); `Layerwise.peak` decides if a stage fits.
- The paper's nodes are operators; here they are layers of the chain, and every stage keeps at least one. A balanced
  position is rounded up to the end of a layer, as printed, so the theorem holds to within one layer: a better cut may
  lie one layer below the walk, which is tried where no cut of the walk fits.
- App. B.2 leaves out cuts that many tensors cross, not counting tensors that cross all candidates. Where a profile has
  the tensors, only candidates that at most one further tensor crosses are walked, or all if there is none of these.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

from varuna_capslog.planners.capuchin import treated_stage
from varuna_capslog.planners.layerwise import Layerwise, StageChoice

__all__ = ["compute_balanced", "dawnpiper_stages", "memory_balanced"]

_ROUNDING = 1e-9


class _Partition(NamedTuple):
    """Stages of a range of layers. lack: bytes, of the stage that lacks most. seconds: of the slowest stage."""

    lack: int
    seconds: float
    stages: tuple[StageChoice, ...]

    @property
    def treated(self) -> bool:
        """True where some memory is optimised, or would have to be."""
        return self.lack > 0 or any(stage.intervals for stage in self.stages)


def dawnpiper_stages(chain: Layerwise) -> list[StageChoice]:
    """Return the stages of BiPar(N, 1, l), in order; where no candidate fits, the stages that lack least."""
    stage_of = functools.cache(functools.partial(treated_stage, chain))

    @functools.cache
    def partition(first: int, end: int, first_stage: int, last_stage: int) -> _Partition:
        """Run BiPar on layers first .. end-1 for stages first_stage .. last_stage."""
        if first_stage == last_stage:
            stage = stage_of(first_stage, first, end)
            return _Partition(stage.lack, stage.seconds, (stage,))
        middle = first_stage if last_stage - first_stage <= 2 else (first_stage + last_stage) // 2

        def at(cut: int) -> _Partition:
            halves = partition(first, cut, first_stage, middle), partition(cut, end, middle + 1, last_stage)
            stages = halves[0].stages + halves[1].stages
            return _Partition(max(half.lack for half in halves), max(half.seconds for half in halves), stages)

        cuts, walked = _candidates(chain, first, end, (first_stage, middle, last_stage)), list[_Partition]()
        for cut in cuts:
            walked.append(at(cut))
            if not walked[-1].treated:
                break
        lower = min(cuts) - 1
        if all(candidate.lack for candidate in walked) and lower - first > middle - first_stage:
            walked.append(at(lower))
        return min(walked, key=lambda candidate: candidate[:2])

    return list(partition(0, chain.num_layers, 0, chain.stages - 1).stages)


def _candidates(chain: Layerwise, first: int, end: int, stages: tuple[int, int, int]) -> list[int]:
    """Return the cuts from the compute-balanced cut to the memory-balanced cut, in this order."""
    begin, until = compute_balanced(chain, first, end, stages), memory_balanced(chain, first, end, stages)
    step = 1 if until >= begin else -1
    cuts = list(range(begin, until + step, step))
    if chain.crossing is None:
        return cuts
    everywhere = frozenset.intersection(*(chain.crossing[cut] for cut in cuts))
    return [cut for cut in cuts if len(chain.crossing[cut] - everywhere) <= 1] or cuts


def compute_balanced(chain: Layerwise, first: int, end: int, stages: tuple[int, int, int]) -> int:
    """Return the cut behind stage `middle` that divides the layers' seconds evenly. stages: first, middle, last."""
    first_stage, middle, last_stage = stages
    target = chain.seconds(first, end) * (middle - first_stage + 1) / (last_stage - first_stage + 1)
    layer, so_far = first, 0.0
    while layer < end:
        so_far += chain.seconds(layer, layer + 1)
        layer += 1
        if so_far >= target * (1 - _ROUNDING):
            break
    return _within(layer, first, end, stages)


def memory_balanced(chain: Layerwise, first: int, end: int, stages: tuple[int, int, int]) -> int:
    """Return the cut of Algorithm 2 behind stage `middle`; the arguments are those of `compute_balanced`."""
    first_stage, middle, last_stage = stages
    shares = [1 / chain.in_flight[stage] for stage in range(first_stage, last_stage + 1)]
    unit = chain.once(first, end) / sum(shares)
    stage, begin = first_stage, first
    for layer in range(first, end):
        if chain.once(begin, layer + 1) >= unit * shares[stage - first_stage] * (1 - _ROUNDING):
            if stage == middle:
                return _within(layer + 1, first, end, stages)
            stage, begin = stage + 1, layer + 1
    return _within(end, first, end, stages)


def _within(cut: int, first: int, end: int, stages: tuple[int, int, int]) -> int:
    """Return the cut, moved so that every stage has a layer."""
    first_stage, middle, last_stage = stages
    return max(first + middle - first_stage + 1, min(cut, end - (last_stage - middle)))
