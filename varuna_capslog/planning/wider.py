"""Plans beyond cuts, intervals and the limits of a schedule: limits that follow from the stages' seconds, and several
stages on each device.

Both begin with stages that a search has found. `limited` gives them the limits of schedule `1f1b-star`: fewer calls in
flight where stages have time to spare, so that less has to run again, and more where links are slow. `looped` cuts the
chain into several times as many stages as there are devices, which go round them (`interleaved`); ranks that do not
fit have their stages run again. Whether such plans are faster only their play tells.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from varuna_capslog.config.defaults import STAGES_PER_RANK
from varuna_capslog.memory.costs import StageCosts
from varuna_capslog.planners.layerwise import Layerwise, StageChoice
from varuna_capslog.planners.seconds import Link
from varuna_capslog.planners.throughput import fastest_cuts
from varuna_capslog.planning.limits import with_limits
from varuna_capslog.planning.nearby import Cheapest
from varuna_capslog.plans.parts import MemoryInterval
from varuna_capslog.plans.plan import Plan
from varuna_capslog.profiles.record import Profile
from varuna_capslog.schedules import RunShape

__all__ = ["LOOPED", "STARRED", "WIDER", "limited", "looped"]

STARRED = "1f1b-star"
"""The schedule of `limited`."""
LOOPED = "interleaved"
"""The schedule of `looped`."""
WIDER = (STARRED, LOOPED)
_PARTS = (1.0, 0.97, 0.92, 0.85)
"""Intervals are chosen for so much of a device, since messages on their way need some of it too."""


def limited(
    profile: Profile,
    chain: Layerwise,
    stages: Sequence[StageChoice],
    plan_of: Callable[[Sequence[StageChoice], RunShape], Plan],
    cheapest: Cheapest,
    link: Link | None,
) -> Iterator[tuple[StageChoice, ...]]:
    """The stages with limits of their own: as they are, and with the cheapest intervals for these limits. Last as they
    are with no more in flight than the chain's schedule has, so that what fits there fits here.

    Intervals change the seconds from which limits follow, so each choice has the limits of its own intervals.
    """
    assert chain.question is not None, "made by Layerwise.of_profile"
    run = replace(chain.question.run, schedule=STARRED)

    def with_own_limits(some: Sequence[StageChoice]) -> tuple[StageChoice, ...]:
        bare = [replace(choice, in_flight=None) for choice in some]
        plan = with_limits(profile, plan_of(bare, run), run, link)
        return tuple(
            replace(choice, in_flight=stage.in_flight) for choice, stage in zip(bare, plan.stages, strict=True)
        )

    first = with_own_limits(stages)
    yield first
    for part in _PARTS:
        current = first
        for _ in range(2):
            changed = []
            for number, choice in enumerate(current):
                size = part * chain.usable[number]
                intervals = cheapest(number, choice.first, choice.end, size, choice.in_flight or 1)
                changed.append(choice if intervals is None else chain.choice(choice.first, choice.end, intervals))
            current = with_own_limits(changed)
        yield current
    most = zip(first, chain.in_flight, strict=True)
    yield tuple(replace(choice, in_flight=min(choice.in_flight or limit, limit)) for choice, limit in most)


def looped(
    chain: Layerwise, costs: StageCosts, judge: Callable[[Sequence[StageChoice]], Plan]
) -> Iterator[tuple[StageChoice, ...]]:
    """Stages that go round the devices: of every rank all keep everything where that fits, and else those run again
    that must, the first ones first. Where not even that fits, all that could run again does.

    costs: of stages that keep everything. judge: the plan of such stages, with the bytes of its ranks.
    """
    assert chain.question is not None, "made by Layerwise.of_profile"
    devices, count = chain.stages, STAGES_PER_RANK * chain.stages
    if count > chain.num_layers:
        return
    run = replace(chain.question.run, schedule="1f1b", recompute=False)
    speeds = None if chain.speeds is None else [*chain.speeds] * STAGES_PER_RANK
    solution = fastest_cuts(costs, chain.question.seconds, run, count, speeds=speeds, width=64)
    if solution is None:
        return
    bounds = list(zip(solution.cuts, [*solution.cuts[1:], chain.num_layers], strict=True))
    stages = [chain.choice(first, end, ()) for first, end in bounds]
    again = [chain.choice(first, end, (MemoryInterval(first, end, "recompute"),)) for first, end in bounds]
    treated = 0
    while True:
        verdict = judge(stages)
        lacking = [rank for rank, plan_rank in enumerate(verdict.ranks) if (plan_rank.bytes or 0) > chain.usable[rank]]
        if not lacking or treated == STAGES_PER_RANK:
            yield tuple(stages)
            return
        for rank in lacking:
            for number in range(rank, rank + (treated + 1) * devices, devices):
                stages[number] = again[number]
        treated += 1
