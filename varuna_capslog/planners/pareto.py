"""The Pareto front of peak against step time: for every peak that pays, the fastest cut list within it.

`capslog plan --pareto` asks here. It is `throughput` again and again under a falling limit of the peak, so a point is
as exact as that search is for its limit: each says whether it is proven.
"""

from __future__ import annotations

from collections.abc import Sequence

from varuna_capslog.memory.costs import NEVER, StageCosts
from varuna_capslog.planners.seconds import LayerSeconds
from varuna_capslog.planners.throughput import Fastest, fastest_cuts
from varuna_capslog.schedules import RunShape

__all__ = ["pareto_front"]


def pareto_front(
    costs: StageCosts,
    seconds: LayerSeconds,
    run: RunShape,
    devices: int,
    capacities: Sequence[int] | None = None,
    speeds: Sequence[float] | None = None,
    width: int = 1024,
) -> list[Fastest]:
    """Return the points of the front from the smallest peak to the smallest step time; empty if nothing fits.

    No two points have the same peak or step time, and each that follows has a larger peak and a smaller step time.
    The last is what `fastest_cuts` answers, the first has the smallest peak there is. `bound_seconds` of a point is
    below the step time of every cut list within its peak.

    Only limits at which the answer may change are tried: the fastest list within a peak P stays the fastest for all
    limits from its own peak to P, so the next limit is one byte below its peak. As many searches as the front has
    points, plus one that finds nothing, plus one for each tie.
    """
    own = [NEVER - 1] * devices if capacities is None else list(capacities)
    limit = NEVER - 1
    found: list[Fastest] = []
    while True:
        point = fastest_cuts(costs, seconds, run, devices, [min(limit, most) for most in own], speeds, width)
        if point is None:
            break
        found.append(point)
        limit = point.peak_bytes - 1
    front: list[Fastest] = []
    for point in reversed(found):  # from the smallest peak
        # A list that was found within a smaller peak and is no slower makes this one worthless.
        if not front or point.step_seconds < front[-1].step_seconds:
            front.append(point)
    return front
