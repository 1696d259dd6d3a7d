"""How many microbatches a stage must have in flight so that the stages behind it never wait for it.

Where every stage takes one microbatch per call that is the number of stages on the longest way to the loss. Where calls
have different sizes it is GraphPipe's Table 3.2 (Jeon et al., 2025) with one change: a stage's neighbour stands there
with the largest call of the stages from it to the loss, since gradients come back as many at a time. Applied to each
pair of neighbours by itself, as printed, the table is right for two stages and too little for three: before calls of 1
and 2, calls of 1 need 6 microbatches in flight, it says 5, and a step takes a third longer
(`benchmarks/schedules/in_flight.py`).
"""

from __future__ import annotations

__all__ = ["in_flight_microbatches", "table_3_2"]

from graphlib import CycleError, TopologicalSorter

from varuna_capslog.schedules.stage_graph import StageGraph


def in_flight_microbatches(graph: StageGraph) -> list[int]:
    """stage -> the microbatches that it has in flight under 1F1B, a multiple of its grain; 0 for one without any."""
    found, at_once = [0] * len(graph.ranks), list(graph.grains)
    behind: dict[int, set[int]] = {}
    for one, other in graph.edges:
        behind.setdefault(one, set()).add(other)
    for stage in _last_first(graph, behind):
        if graph.depths[stage]:
            grain, others = graph.grains[stage], behind.get(stage, ())
            needed = [table_3_2(1, grain, 1, at_once[other], found[other]) for other in others]
            found[stage] = -(-max(needed, default=grain) // grain) * grain
            at_once[stage] = max([grain, *(at_once[other] for other in others)])
    return found


def _last_first(graph: StageGraph, behind: dict[int, set[int]]) -> list[int]:
    """All stages, each after those that take what it makes.

    Depths alone do not tell that: they are counted along single routes, and of two stages of one depth on different
    routes one may take what the other makes.
    """
    order = TopologicalSorter({stage: sorted(behind.get(stage, ())) for stage in range(len(graph.ranks))})
    try:
        return list(order.static_order())
    except CycleError:  # routes that pass the same stages in opposite directions
        return sorted(range(len(graph.ranks)), key=lambda stage: graph.depths[stage])


def table_3_2(k_x: int, b_x: int, k_y: int, b_y: int, i_y: int) -> int:
    """The microbatches that a stage x has in flight before a stage y that has `i_y` in flight.

    Stage x runs `k_x` forwards and then `k_x` backwards in turn, with `b_x` microbatches each; stage y likewise. Not
    rounded up to a multiple of `b_x`.
    """
    larger, group_x, group_y = max(b_x, b_y), k_x * b_x, k_y * b_y
    if group_x < b_y:
        return i_y + b_y
    if group_y < b_x:
        return i_y + group_x - group_y + b_x
    if group_x > group_y:
        return i_y + group_x if larger == group_y else i_y + group_x - group_y + 2 * larger
    return i_y + (larger if larger == group_x else 2 * larger)
