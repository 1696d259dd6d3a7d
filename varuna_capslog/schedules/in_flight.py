"""The number of microbatches that a stage must have in flight so that the stages behind it never wait for it.

Where every stage takes one microbatch per call, it is the number of stages on the longest path to the loss. Where calls
have different sizes, it is GraphPipe's Table 3.2 (Jeon et al., 2025) with one change: as the neighbour's call the
largest call of the stages from the neighbour to the loss is used, since that many gradients come back at a time. The
table as printed, applied to each pair of neighbours, is right for two stages and too small for three: before calls of 1
and 2, calls of 1 need 6 microbatches in flight, the table gives 5, and a step takes a third longer
(`benchmarks/schedules/in_flight.py`).
"""

from __future__ import annotations

__all__ = ["in_flight_microbatches", "table_3_2"]

from graphlib import CycleError, TopologicalSorter

from varuna_capslog.schedules.stage_graph import StageGraph


def in_flight_microbatches(graph: StageGraph) -> list[int]:
    """Return stage -> its microbatches in flight under 1F1B, a multiple of its grain; 0 for a stage without any."""
    in_flight, at_once = [0] * len(graph.ranks), list(graph.grains)
    behind: dict[int, set[int]] = {}
    for maker, reader in graph.edges:
        behind.setdefault(maker, set()).add(reader)
    for stage in _last_first(graph, behind):
        if graph.depths[stage]:
            grain, others = graph.grains[stage], behind.get(stage, ())
            needed = [table_3_2(1, grain, 1, at_once[reader], in_flight[reader]) for reader in others]
            in_flight[stage] = -(-max(needed, default=grain) // grain) * grain
            at_once[stage] = max([grain, *(at_once[reader] for reader in others)])
    return in_flight


def _last_first(graph: StageGraph, behind: dict[int, set[int]]) -> list[int]:
    """Return all stages, each after those that read its outputs.

    Depths do not give this order: they are counted along single routes, and of two stages of equal depth on different
    routes one may read the outputs of the other.
    """
    order = TopologicalSorter({stage: sorted(behind.get(stage, ())) for stage in range(len(graph.ranks))})
    try:
        return list(order.static_order())
    except CycleError:  # routes that pass the same stages in opposite directions
        return sorted(range(len(graph.ranks)), key=lambda stage: graph.depths[stage])


def table_3_2(k_x: int, b_x: int, k_y: int, b_y: int, i_y: int) -> int:
    """Return the number of microbatches in flight on a stage x before a stage y that has `i_y` in flight.

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
