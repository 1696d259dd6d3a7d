"""Planner `budget` beyond one line of stages: branches side by side, and replicas of single stages.

The stages are those that `graphpipe` finds, or in long lines of layers those of `pipedream`. Both keep what their
forwards save. Under a capacity they are asked for layers that save less as well, and stages that do not fit
as they are get memory intervals (`intervals`). `planning/layerwise` asks here for what is faster than its own line.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.planners import BUDGET, with_microbatches
from varuna_capslog.planners.replicas import NEEDS_TENSORS, REPLICATED, GraphCosts, ReplicatedStage
from varuna_capslog.planners.seconds import Link
from varuna_capslog.planning.placed.intervals import PlacedIntervals
from varuna_capslog.planning.placed.replicated import StagesPlayed, frame_of
from varuna_capslog.planning.playing import SAME, even_share_seconds
from varuna_capslog.planning.verdict import capacities_of_devices, usable_bytes
from varuna_capslog.plans.parts import Units
from varuna_capslog.plans.plan import Plan
from varuna_capslog.profiles.record import Profile
from varuna_capslog.schedules import RunShape

__all__ = ["asked_for_stages", "faster_plan"]

_BRANCHES = 0.9
"""Branches are weighed where the longest way through a model takes less than this part of its seconds."""
_QUICK = 128
"""Layers times devices for which `graphpipe` takes a tenth of a second at most where all layers are one line."""
_SAVED = (1.0, 0.4, 0.0)
"""Under a capacity, stages are searched for layers that save so much of what they do."""


def faster_plan(
    profile: Profile,
    line: Plan,
    devices: int,
    capacity: int | Sequence[int] | None,
    run: RunShape,
    link: Link | None = None,
    until: float | None = None,
    blocks: str = "priced",
) -> Plan:
    """A plan with branches or replicas that is faster than `line`, or fits where that does not; else `line`.

    Args:
        line: of planner `budget`; without `step_seconds` where nothing fits.
        capacity, run, link: as in `replicated_plan`.
        until: time.perf_counter() when the search ends.
        blocks: who says how many accumulation blocks a step has, which replicas share. "run": always `run`, whose
            members may change, so that no replica leaves moments to another one. "any": the plan, where `run` has one.
            "priced": the same; but there are no replicas where `link` does not say what an exchange of gradients costs.
    """
    if devices == 1 or not profile.timed:
        return line
    priced = link is not None and (link.bandwidth is not None or link.latency_seconds > 0)
    replicas = run.num_microbatches is not None and (priced or blocks != "priced")
    count = None if replicas and run.num_blocks == 1 and blocks != "run" else run.num_blocks
    branches, planner = _longest_way(profile) <= _BRANCHES, asked_for_stages(profile, devices)
    shape = dataclasses.replace(with_microbatches(run, devices), schedule="1f1b")
    bound, step = even_share_seconds(profile, shape.microbatches, devices), line.step_seconds
    if not (branches or (replicas and count != 1)) or (step is not None and step <= bound * (1 + SAME)):
        return line
    limits, usable = capacities_of_devices(capacity, devices), usable_bytes(profile, capacity, devices)
    try:
        costs = GraphCosts.of_profile(
            profile, devices, shape.microbatches, None if usable is None else min(usable), count, link
        )
        intervals = None if usable is None else PlacedIntervals(profile, shape)
    except CapslogError:  # the profile tells what a line needs, and not what travels or is exchanged
        return line
    line_of_layers = profile.edges == [(layer, layer + 1) for layer in range(profile.num_layers - 1)]
    routes = "direct" if planner in NEEDS_TENSORS and not line_of_layers else "relay"
    frame = frame_of(profile, shape, limits, devices, BUDGET, routes)
    search = StagesPlayed(profile, shape, link, frame, costs, intervals, blocks != "run")
    search.beat(line)
    for stages in _answers(costs if replicas else dataclasses.replace(costs, blocks=1), planner):
        if until is not None and time.perf_counter() >= until:
            break
        search.weigh(stages)
    best = search.best
    if best is None or best.lack or best.plan is line:
        return line
    found = best.plan
    if run.num_microbatches is None:
        found = dataclasses.replace(found, units=Units(None, run.microbatch_size, None))
    return dataclasses.replace(
        found,
        bound_seconds=min(bound, best.step),
        proven=best.step <= bound * (1 + SAME),
        search_space=f"any stages on {devices} devices",
    )


def asked_for_stages(profile: Profile, devices: int) -> str:
    """The planner whose stages are weighed: `graphpipe`, where branches are worth its search or that is quick."""
    quick = profile.num_layers * devices <= _QUICK
    return "graphpipe" if profile.tensors and (quick or _longest_way(profile) <= _BRANCHES) else "pipedream"


def _answers(costs: GraphCosts, planner: str) -> Iterator[list[ReplicatedStage]]:
    """The stages to weigh: those where all is kept, then those of layers that save less."""
    find, found = REPLICATED[planner], list[list[ReplicatedStage]]()
    for part in _SAVED if costs.usable is not None else _SAVED[:1]:
        try:
            answers = find(dataclasses.replace(costs, saved=tuple(round(part * size) for size in costs.saved)))
        except CapslogError:  # a graph that cannot be searched
            break
        for one in answers:
            if one not in found:
                found.append(one)
                yield one


def _longest_way(profile: Profile) -> float:
    """The part of a model's seconds that its longest way through the layers takes; 1 where no branches are known."""
    if not profile.timed or not profile.tensors:
        return 1.0
    pairs = zip(profile.column("forward_seconds"), profile.column("backward_seconds"), strict=True)
    own = [float(forward + backward) for forward, backward in pairs]
    way = list(own)  # the longest one that ends with each layer
    for writer, reader in profile.edges:
        way[reader] = max(way[reader], way[writer] + own[reader])
    return max(way) / sum(own) if any(own) else 1.0
