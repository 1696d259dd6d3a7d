"""How many microbatches a stage must have in flight so that the stages behind it never wait for it.

Where every stage takes one microbatch per call that is the number of stages on the longest way to the loss. Where calls
have different sizes it is GraphPipe's Table 3.2 (Jeon et al., 2025).
"""

from __future__ import annotations

__all__ = ["in_flight_microbatches", "table_3_2"]

from varuna_capslog.base.errors import CapslogError
from varuna_capslog.schedules.stage_graph import StageGraph


def in_flight_microbatches(graph: StageGraph) -> list[int]:
    """stage -> the microbatches that it has in flight under 1F1B, a multiple of its grain; 0 for one without any."""
    found = [0] * len(graph.ranks)
    behind: dict[int, set[int]] = {}
    for one, other in graph.edges:
        behind.setdefault(one, set()).add(other)
    for stage in sorted(range(len(found)), key=lambda stage: graph.depths[stage]):
        if graph.depths[stage]:
            grain = graph.grains[stage]
            needed = [table_3_2(1, grain, 1, graph.grains[other], found[other]) for other in behind.get(stage, ())]
            found[stage] = -(-max(needed, default=grain) // grain) * grain
    return found


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
    if group_x >= larger:
        return i_y + (larger if larger == group_x else 2 * larger)
    raise CapslogError(
        f"calls of {b_x} and {b_y} microbatches in groups of {k_x} and {k_y} do not fit; one of the two call sizes "
        "must divide the other"
    )
