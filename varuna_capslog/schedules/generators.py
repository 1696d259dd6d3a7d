"""Schedules by name. They differ in the limits of their stages, and in how the lists are made from them.

`gpipe` (Huang et al., 2019): all forwards of a rank's stages, then all backwards, so every stage holds all microbatches
at once. GPipe runs the backwards in reverse order; ours run in ascending order, because gradients of microbatches are
added in order (the engine's exactness rule).

`1f1b` (PipeDream-Flush, Narayanan et al., 2021): one forward, one backward in the steady state; with one stage per rank
the textbook's lists exactly. With several the same limits and the rule "backward first" hold.

`1f1b-star` (MadPipe, Sec. 4.1): the same order under limits that follow from seconds. They stand in the plan, see
`planning/limits`; a stage without one has that of `1f1b`.

`interleaved` (Narayanan et al., SC 2021): stages placed round-robin over the ranks, in Megatron's order; see
`interleaved`. On any other placement, and where a stage has its own limit, it is `1f1b`.

`kfkb` (GraphPipe, Sec. 3.5): k forwards, then k backwards: `1f1b` of groups of k microbatches.

`zb-h1` (Qi et al., 2024, "Zero Bubble"): `1f1b` with every backward in two halves: the input half I sends the gradient
on, the weight half W may wait. A stage delays its W by as many microbatches as fill its in-flight count up to that of
the deepest stage, so that the ends of the step are shorter: idle (S - 1)(f + b - 2w) for S equal stages of f, b and
weight half w, instead of (S - 1)(f + b).

`varuna` (Athlur et al., EuroSys 2022): a backward goes before a forward; a recompute starts so that it ends when the
gradient arrives; between the recompute and the backward the stage does nothing else; the last stage runs forward and
backward of a microbatch back to back. So a stage keeps one live graph at any time, which is what M_i + sum M_a
predicts. It is made from these rules and is not a copy of the lists that Microsoft's generator prints.

With recomputation a forward runs without a graph, keeps only the stage's input, and an R builds the graph again right
before the backward.
"""

from __future__ import annotations

__all__ = ["SCHEDULES", "in_flight_limits", "make_schedule", "schedule_of"]

import difflib
import functools
import math
from collections.abc import Sequence
from itertools import groupby, zip_longest

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.schedules.actions import Action, Schedule
from varuna_capslog.schedules.in_flight import in_flight_microbatches
from varuna_capslog.schedules.inserting import insert_offload, insert_recompute, split_backwards
from varuna_capslog.schedules.interleaved import interleaved
from varuna_capslog.schedules.list_scheduler import list_schedule
from varuna_capslog.schedules.shape import ALWAYS_RECOMPUTE, DEFAULT_K
from varuna_capslog.schedules.stage_graph import StageGraph

SCHEDULES = ("gpipe", "1f1b", "1f1b-star", "interleaved", "kfkb", "zb-h1", "varuna")
"""The names that `make_schedule` knows."""


def make_schedule(
    name: str,
    num_stages: int,
    num_microbatches: int,
    placement: Sequence[int] | None = None,
    recompute: bool = False,
    k: int = DEFAULT_K,
) -> Schedule:
    """Return the actions of one step of a pipeline, an ordered list per rank; see `schedule_of`, `StageGraph.line`."""
    return schedule_of(name, StageGraph.line(num_stages, num_microbatches, placement), recompute, k=k)


def schedule_of(
    name: str,
    graph: StageGraph,
    recompute: bool | Sequence[bool] = False,
    in_flight: Sequence[int | None] = (),
    offload: Sequence[bool] = (),
    k: int = DEFAULT_K,
) -> Schedule:
    """Return the actions of one step of all stages, one ordered list per rank.

    Args:
        name: one of `SCHEDULES`; `varuna` always recomputes.
        recompute: put an R before each backward whose forward was not the stage's last action: one value for all stages
            (`varuna` then recomputes on all), or one per stage.
        in_flight: stage -> maximum of microbatches in flight; None, or a shorter list: the schedule's own limit.
        offload: stage -> True where it moves tensors to the host tier between F and B; default: no stage does.
        k: microbatches of a group of `kfkb`.

    Raises `CapslogError` for an unknown name, and for a limit that the schedule cannot keep.
    """
    _known(name)
    always = name in ALWAYS_RECOMPUTE
    calls, in_flight_of = [len(row) for row in graph.calls], in_flight_microbatches(graph)
    depths = [-(-count // grain) for count, grain in zip(in_flight_of, graph.grains, strict=True)]
    deepest = [-(-max(in_flight_of) // grain) for grain in graph.grains]
    limits = [_limit(name, *stage, k) for stage in zip(depths, calls, deepest, strict=True)]
    together = [k * math.lcm(*graph.grains) // grain for grain in graph.grains]  # calls of a group of kfkb
    for stage, (limit, plan_limit) in enumerate(zip(limits, in_flight, strict=False)):
        least = {"gpipe": limit, "kfkb": min(together[stage], calls[stage])}.get(name, 1)
        if plan_limit is not None and plan_limit < least:
            why = (
                "gpipe runs all forwards before the first backward"
                if name == "gpipe"
                else f"kfkb runs {together[stage]} at a time"
            )
            raise CapslogError(
                f"stage {stage} takes {calls[stage]} microbatches and may have {plan_limit} in flight, but {why}; "
                "leave in_flight out, or choose another schedule"
            )
    limited = any(plan_limit is not None for plan_limit in in_flight)
    limits = [limit if plan_limit is None else plan_limit for limit, plan_limit in zip_longest(limits, in_flight)]
    again = [recompute or always] * len(limits) if isinstance(recompute, bool) else list(recompute)
    if always:
        return insert_offload(_listed(graph, tuple(limits), tuple(again)), offload)
    if name == "kfkb":
        schedule = _in_groups(graph, [max(1, most // size) for most, size in zip(limits, together, strict=True)], k)
    elif name == "zb-h1":
        kept = [min(depth, limit) for depth, limit in zip(depths, limits, strict=True)]
        delays = [limit - count for limit, count in zip(limits, kept, strict=True)]
        schedule = split_backwards(_listed(graph, tuple(kept)), delays)
    else:
        looped = interleaved(graph) if name == "interleaved" and not limited else None
        schedule = looped or _listed(graph, tuple(limits), forwards_first=name == "gpipe")
    return insert_offload(insert_recompute(schedule, again), offload)


def _listed(
    graph: StageGraph, limits: tuple[int, ...], recompute: tuple[bool, ...] = (), forwards_first: bool = False
) -> Schedule:
    """Return `list_schedule`, cached, since a search asks for the same lists again and again."""
    return [list(row) for row in _known_lists(graph, limits, recompute, forwards_first)]


@functools.lru_cache(maxsize=32)
def _known_lists(
    graph: StageGraph, limits: tuple[int, ...], recompute: tuple[bool, ...], forwards_first: bool
) -> Schedule:
    return list_schedule(graph, limits, recompute=recompute, forwards_first=forwards_first)


def in_flight_limits(name: str, num_stages: int, num_microbatches: int, k: int = DEFAULT_K) -> list[int]:
    """Return the maximum of microbatches in flight (forward begun, backward not ended) under the schedule, for each
    stage of one pipeline with one stage per rank."""
    _known(name)
    StageGraph.line(num_stages, num_microbatches)  # raises for invalid numbers
    return [_limit(name, num_stages - stage, num_microbatches, num_stages, k) for stage in range(num_stages)]


def _limit(name: str, depth: int, calls: int, deepest: int, k: int) -> int:
    """Return the limit of calls in flight of a stage.

    A microbatch in flight under `varuna` keeps only the stage's input (no graph), so the limit is wider than 1F1B's: it
    is away from a stage for up to three units per deeper stage (one forward, one backward of two). In unit costs a
    smaller limit makes the step longer, and a larger one does not make it shorter.

    depth: calls in flight under 1F1B: the number of stages from this one to the loss, S - s in one pipeline, where all
        grains are equal. calls: of a step. deepest: the largest depth, in calls of this stage.
    """
    limit = {"gpipe": calls, "kfkb": k * depth, "zb-h1": deepest, "varuna": max(1, 3 * (depth - 1))}.get(name, depth)
    return min(limit, calls)


def _known(name: str) -> None:
    if name not in SCHEDULES:
        near = difflib.get_close_matches(name.lower(), SCHEDULES, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"use one of {', '.join(SCHEDULES)}"
        raise CapslogError(f"unknown schedule {name!r}; {hint}")


def _in_groups(graph: StageGraph, limits: Sequence[int], k: int) -> Schedule:
    """Return 1F1B of groups: microbatches of up to k calls of every stage, on the same route, are scheduled as one.

    limits: in groups.
    """
    size = k * math.lcm(*graph.grains)
    sizes: list[int] = []
    routes: list[tuple[int, ...]] = []
    for route, same in groupby(graph.routes):
        count = len(list(same))
        sizes += [min(size, count - done) for done in range(0, count, size)]
        routes += [route] * -(-count // size)
    groups = StageGraph(graph.ranks, tuple(routes), graph.pairs)
    firsts: list[list[int]] = []  # stage -> the first call of each of its groups, and the number of its calls
    for row, grain in zip(groups.calls, graph.grains, strict=True):
        firsts.append([0])
        for (group,) in row:
            firsts[-1].append(firsts[-1][-1] + sizes[group] // grain)
    schedule = list_schedule(groups, limits)
    return [
        [
            Action(action.stage, action.kind, call)
            for action in row
            if action.microbatch is not None
            for call in range(*firsts[action.stage][action.microbatch : action.microbatch + 2])
        ]
        for row in schedule
    ]
