"""The limits of schedule `1f1b-star`: the fewest microbatches in flight that keep a period.

In the steady state every stage runs one forward and one backward in each period T, at the same places of every period.
Let D be the seconds from the begin of a microbatch's forward to the begin of its backward on a stage. Forward (f) and
backward (b) do not overlap on the stage, so that D lies between f + (g - 1) T and g T - b for a whole number g, and g
microbatches are in flight. D cannot be less than what the stages behind and the links take:

    D(last) = f(last);    D(s) >= D(s + 1) + f(s) + c(s + 1) + b(s + 1) + c(s + 1)

From the last stage to the first, the smallest D in one of these ranges gives the smallest g of every stage at once.
Whether stages are slower than links or not, T is at least the slowest of them.

MadPipe (Sec. 4.1) gives the same limits where a group of stages ends exactly with a period. Otherwise its groups leave
the rest of the period unused and ask for more: in 76 of 400 drawn pipelines (`benchmarks/schedules/limits.py`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from itertools import pairwise

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.planners.seconds import LayerSeconds, Link
from varuna_capslog.planning.stage_seconds import message_bytes, stage_seconds
from varuna_capslog.plans.plan import Plan
from varuna_capslog.profiles.record import Profile
from varuna_capslog.schedules import RunShape, StageGraph

__all__ = ["in_flight_of_period", "with_limits"]

_ROUNDING = 1e-9


def in_flight_of_period(
    forward: Sequence[float], backward: Sequence[float], transfer: Sequence[float], period: float | None = None
) -> list[int]:
    """The smallest number of microbatches in flight of every stage of one pipeline, one stage per rank.

    Args:
        forward, backward: seconds of every stage, the backward with what is computed again for it.
        transfer: seconds of a message over the cut before each stage, in either direction; that of stage 0 is not used.
        period: seconds of one microbatch in the steady state; default: the shortest one, that of the slowest stage or
            link. A longer one needs fewer.

    Raises CapslogError for a period shorter than that.
    """
    busy = [f + b for f, b in zip(forward, backward, strict=True)]
    shortest = max([*busy, *transfer[1:]])
    period = shortest if period is None else period
    if period < shortest * (1 - _ROUNDING):
        raise CapslogError(
            f"a period of {period:g} s is too short: the slowest stage or link takes {shortest:g} s; give one that is "
            "not shorter"
        )
    if period <= 0:
        return [1] * len(busy)
    counts, away = [1], forward[-1]
    for stage in range(len(busy) - 2, -1, -1):
        away += forward[stage] + 2 * transfer[stage + 1] + backward[stage + 1]
        count = max(counts[-1], math.ceil((away + backward[stage]) / period - _ROUNDING))
        away = max(away, forward[stage] + (count - 1) * period)
        counts.append(count)
    return counts[::-1]


def with_limits(profile: Profile, plan: Plan, run: RunShape, link: Link | None = None) -> Plan:
    """Return the plan with the limit of every stage for schedule `1f1b-star`; each path of microbatches alone. With
    direct routes all lines of stages that wait for each other have one period, that of the slowest stage or link.

    Args:
        run: says whether stages whose memory the plan leaves open compute again.
        link: between two ranks; default: transfers take no time.

    Raises CapslogError naming the layer whose seconds the profile does not have, and for stages that take several
    microbatches in one call.
    """
    if any(stage.grain > 1 for stage in plan.stages):
        raise CapslogError(
            "the limits of 1f1b-star are known for one microbatch per call, and the plan has grains; choose 1f1b"
        )
    direct, seconds = plan.routes == "direct", stage_seconds(profile, plan.stages, run)
    if direct:
        graph = plan.stage_graph(profile.known_edges)
        lines, transfer = graph.lines(), _sent(profile, plan, graph, link)
    else:
        lines, transfer = list(plan.paths()), _relayed(profile, plan, link)
    again = [
        row if stage.recomputes(run) else 0.0 for row, stage in zip(seconds.recompute or (), plan.stages, strict=True)
    ]
    backward = [took + more for took, more in zip(seconds.backward, again, strict=True)]
    period = None
    if direct:
        busy = [f + b for f, b in zip(seconds.forward, backward, strict=True)]
        period = max(*busy, *(transfer(*edge) for line in lines for edge in pairwise(line)), 0.0)
    limits: dict[int, int] = {}
    for line in lines:
        counts = in_flight_of_period(
            [seconds.forward[stage] for stage in line],
            [backward[stage] for stage in line],
            [0.0, *(transfer(stage, following) for stage, following in pairwise(line))],
            period,
        )
        for stage, limit in zip(line, counts, strict=True):
            limits[stage] = max(limit, limits.get(stage, 1))
    most = plan.num_microbatches
    stages = [
        dataclasses.replace(stage, in_flight=limits[number] if most is None else min(most, limits[number]))
        for number, stage in enumerate(plan.stages)
    ]
    return dataclasses.replace(plan, stages=tuple(stages))


Transfers = Callable[[int, int], float]
"""(stage, next stage) -> seconds of a message between the two, the mean of both directions."""


def _relayed(profile: Profile, plan: Plan, link: Link | None) -> Transfers:
    transfer = LayerSeconds.of_profile(profile, link).transfer

    def seconds(stage: int, following: int) -> float:
        return (
            0.0
            if plan.stages[stage].rank == plan.stages[following].rank
            else float(transfer[plan.stages[following].first])
        )

    return seconds


def _sent(profile: Profile, plan: Plan, graph: StageGraph, link: Link | None) -> Transfers:
    sizes, link = message_bytes(profile, plan.stages, graph, plan.routes), link or Link()

    def seconds(stage: int, following: int) -> float:
        if plan.stages[stage].rank == plan.stages[following].rank:
            return 0.0
        ways = [sizes[way] or 0 for way in ((stage, following), (following, stage)) if way in sizes]
        return sum(map(link.seconds, ways)) / 2

    return seconds
