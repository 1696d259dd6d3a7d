"""Megatron's interleaved order (Narayanan et al., SC 2021, Sec. 2.2), for stages placed round-robin over the ranks.

A rank takes its forwards in rounds of microbatches: all of a round on its first stage, then all of it on its second,
and so on; its backwards likewise from its last stage to its first. After some forwards it runs one forward and one
backward in turn.
"""

from __future__ import annotations

__all__ = ["interleaved"]

from collections.abc import Sequence
from itertools import pairwise

from varuna_capslog.schedules.actions import Action, Schedule
from varuna_capslog.schedules.stage_graph import StageGraph


def interleaved(graph: StageGraph) -> Schedule | None:
    """Return the order of every rank, or None for a graph that is not of this form.

    Every route must be a line of stages, placed round-robin over ranks that no other route uses, equally often on each.
    The number of ranks P need not divide the microbatches: there are M // P rounds (at least one), of sizes that differ
    by at most one.
    """
    if graph.pairs is not None or max(graph.grains) > 1:
        return None
    schedule: Schedule = [[] for _ in range(graph.num_ranks)]
    taken: set[int] = set()
    for route in dict.fromkeys(graph.routes):
        ranks = [graph.ranks[stage] for stage in route]
        ranks_in_turn = list(dict.fromkeys(ranks))
        if (
            taken & set(ranks_in_turn)
            or len(ranks) % len(ranks_in_turn)
            or ranks != ranks_in_turn * (len(ranks) // len(ranks_in_turn))
        ):
            return None
        taken.update(ranks_in_turn)
        calls = len(graph.calls[route[0]])
        if any(len(graph.calls[stage]) != calls for stage in route):
            return None
        for place, rank in enumerate(ranks_in_turn):
            schedule[rank] = _order(route[place :: len(ranks_in_turn)], place, len(ranks_in_turn), calls)
    return schedule


def _order(stages: Sequence[int], place: int, ranks: int, calls: int) -> list[Action]:
    """Return the list of the rank at `place` among `ranks`, which has these stages."""
    count = max(1, calls // ranks)
    borders = [number * calls // count for number in range(count + 1)]
    rounds = [range(first, end) for first, end in pairwise(borders)]
    forwards = [Action(stage, "F", call) for round_ in rounds for stage in stages for call in round_]
    backwards = [Action(stage, "B", call) for round_ in rounds for stage in reversed(stages) for call in round_]
    largest = max(len(round_) for round_ in rounds)
    behind = ranks - 1 - place
    ahead = behind if len(stages) == 1 else 2 * behind + (len(stages) - 1) * largest  # one stage: as 1F1B
    ahead = min(len(forwards), ahead)
    order = forwards[:ahead]
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        order += [forward, backward]
    return order + backwards[len(forwards) - ahead :]
