"""The cuts and memory intervals with the smallest step time of those that fit, for a schedule and its limits in flight.

The cheapest intervals of every range of layers in every place of the pipeline (`intervals`) say how much longer a stage
takes than its layers alone, or that it does not fit. With these seconds `throughput` searches the cuts. What a stage
takes beside its own calls, such as messages on their way, only the fold of its rank tells: it is left free on the
device in a further search, until all stages fit. Nothing is offloaded where nobody says what copies cost.

A call whose backward directly follows its forward keeps everything whatever its intervals (that of the last stage under
1F1B), so such a stage must fit as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from varuna_capslog.memory.costs import NEVER, Bytes, StageCosts
from varuna_capslog.memory.range_bytes import RangeBytes
from varuna_capslog.planners.exact import exact_cuts
from varuna_capslog.planners.intervals import EXACT_LAYERS, Handling, IntervalFronts, stage_bytes
from varuna_capslog.planners.layerwise import Layerwise, Question, StageChoice
from varuna_capslog.planners.seconds import step_player
from varuna_capslog.planners.throughput import fastest_cuts
from varuna_capslog.planners.vpipe import vpipe_stages
from varuna_capslog.plans.parts import INTERVAL_KINDS, MemoryInterval
from varuna_capslog.schedules import RunShape, backwards_at_once, make_schedule

__all__ = ["LABELS", "budget_stages"]

LABELS = 16
"""Choices per first layer and cut that are kept in chains of more than `intervals.EXACT_LAYERS` layers."""
_ROUNDS = 8
"""Searches with more left free, at most."""
_RECOMPUTE = tuple(kind for kind in INTERVAL_KINDS if not MemoryInterval(0, 1, kind).offloads)


def budget_stages(chain: Layerwise) -> list[StageChoice]:
    """Return the stages in order; where nothing fits, the cuts and intervals that lack least.

    Raises CapslogError where the profile does not tell the halves of split backwards, which the schedule has.
    """
    places, left = _Places.of(chain), np.zeros(chain.stages, dtype=np.int64)
    # what runs again is in the seconds of the intervals
    seconds, run = places.question.seconds, replace(places.question.run, recompute=False)
    for _ in range(_ROUNDS):
        usable = [min(NEVER - 1, size) - more for size, more in zip(chain.usable, left.tolist(), strict=True)]
        extra = [places.extra(stage, size) for stage, size in enumerate(usable)]
        found = fastest_cuts(places, seconds, run, chain.stages, usable, width=256, extra=extra)
        if found is None:
            break
        stages = places.stages(found.cuts, usable)
        if not any(one.lack for one in stages):
            return _faster(places, run, stages)
        left += [one.lack for one in stages]
    cuts = exact_cuts(places, chain.stages, usable)
    return places.stages(cuts, [0] * chain.stages)


def _faster(places: _Places, run: RunShape, stages: list[StageChoice]) -> list[StageChoice]:
    """These stages, or those of `vpipe` where they fit and make the step shorter: in long chains the search keeps some
    choices only, and counts of copies more bytes than the fold does.
    """
    chain, player = places.chain, step_player(run, len(stages))
    moved = chain.moved if chain.host_bandwidth is not None else [0] * chain.num_layers
    others = vpipe_stages(replace(chain, moved=moved))

    def step(some: list[StageChoice]) -> float:
        cuts = np.array([[one.first for one in some]])
        forward, backward, inputs, transfer, handover = places.question.seconds.of_cuts(cuts)
        own = [0.0 if at_once else one.seconds for one, at_once in zip(some, places.at_once, strict=True)]
        more = np.maximum(0.0, np.array([own]) - forward - backward)
        return player.seconds_of_one((forward, backward + more, inputs + more, transfer, handover))

    return others if not any(one.lack for one in others) and step(others) < step(stages) else stages


@dataclass(frozen=True)
class _Places(StageCosts):
    """What each range of layers costs at least in each place of the pipeline; as `StageCosts`, its fewest bytes.

    fronts: the cheapest intervals. handling: how their calls are treated. at_once: stages that keep everything.
    kept: [L, L + 1], bytes of such a stage with one call in flight. fewest: [S], the fewest bytes of every range as
    each stage.
    """

    chain: Layerwise
    question: Question
    fronts: IntervalFronts
    handling: Handling
    at_once: Sequence[bool]
    kept: Bytes
    fewest: Sequence[Bytes]
    position_free: ClassVar[bool] = False

    @classmethod
    def of(cls, chain: Layerwise) -> _Places:
        """Search all ranges of the chain."""
        question = chain.question
        assert question is not None, "made by Layerwise.of_profile"
        ranges, run = question.ranges, question.run
        offloads = any(chain.moved) and chain.host_bandwidth is not None
        handling = Handling(
            recomputed=True,
            later=offloads,
            split=run.splits_backwards,
            calls=run.microbatches,
            waiting_blocks=min(1, run.num_blocks - 1),
            host_bandwidth=chain.host_bandwidth,
            copies_beside=chain.copies_beside,
        )
        kinds = INTERVAL_KINDS if offloads else _RECOMPUTE
        labels = None if chain.num_layers <= EXACT_LAYERS else LABELS
        fronts = IntervalFronts(ranges, question.seconds, handling, labels, kinds=kinds)
        rows = make_schedule(run.schedule, chain.stages, run.microbatches, recompute=False, k=run.k)
        at_once = [len(backwards_at_once(row)) == run.microbatches for row in rows]
        kept = _kept(ranges, handling)
        fewest = [
            kept if own else fronts.least(in_flight) for own, in_flight in zip(at_once, chain.in_flight, strict=True)
        ]
        return cls(chain, question, fronts, handling, at_once, kept, fewest)

    @property
    def num_layers(self) -> int:
        """L, the number of layers."""
        return self.chain.num_layers

    def matrix(self, stage: int = 0, stages: int = 1) -> Bytes:
        """The fewest bytes of every range as this stage."""
        return self.fewest[stage]

    def stage_bytes(self, first: int, end: int, stage: int = 0, stages: int = 1) -> int:
        """The fewest bytes of layers first .. end-1 as this stage."""
        return int(self.fewest[stage][first, end])

    def extra(self, stage: int, usable: int) -> NDArray[np.float64]:
        """[L, L + 1]: by how much a call takes longer than its layers; infinite where they do not fit."""
        _, both = self.question.seconds.of_ranges()
        if self.at_once[stage]:
            return np.where(self.kept <= usable, 0.0, np.inf)
        seconds, _ = self.fronts.seconds(self.chain.in_flight[stage], usable)
        return np.maximum(0.0, seconds - both)

    def stages(self, cuts: Sequence[int], usable: Sequence[int]) -> list[StageChoice]:
        """The stages of a cut list: as they are where they fit, with the cheapest intervals that fit, or else those
        of the fewest bytes. What they lack is by the fold.
        """
        chain, found = self.chain, []
        for stage, (first, end) in enumerate(zip(cuts, [*cuts[1:], self.num_layers], strict=True)):
            seconds, intervals = chain.seconds(first, end), tuple[MemoryInterval, ...]()
            in_flight = chain.in_flight[stage]
            kept = stage_bytes(self.question.ranges, first, end, (), in_flight, self.handling)
            if not self.at_once[stage] and kept > usable[stage]:
                most = max(usable[stage], self.stage_bytes(first, end, stage))
                choice = self.fronts.cheapest(first, end, in_flight, most)
                assert choice is not None, "the fewest bytes fit into themselves"
                seconds, intervals = choice.seconds, choice.intervals
            lack = max(0, chain.peak(stage, first, end, intervals) - chain.usable[stage])
            found.append(StageChoice(first, end, intervals, seconds, lack))
        return found


def _kept(ranges: RangeBytes, handling: Handling) -> Bytes:
    size = ranges.num_layers
    found = np.full((size, size + 1), NEVER, dtype=np.int64)
    for first in range(size):
        for end in range(first + 1, size + 1):
            found[first, end] = stage_bytes(ranges, first, end, (), 1, handling)
    return found
