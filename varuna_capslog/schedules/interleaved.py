"""Megatron's interleaved order (Narayanan et al., SC 2021, Sec. 2.2), for stages that go round the ranks.

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
    """The order of every rank; None unless every way of microbatches is a line of stages and has ranks of its own,
    which its stages go round in one order, equally often.

    The number of ranks P need not divide the microbatches: there are M // P rounds (at least one), of sizes that differ
    by at most one.
    """
    if graph.pairs is not None or max(graph.grains) > 1:
        return None
    schedule: Schedule = [[] for _ in range(graph.num_ranks)]
    taken: set[int] = set()
    for route in dict.fromkeys(graph.routes):
        ranks = [graph.ranks[stage] for stage in route]
        own = list(dict.fromkeys(ranks))
        if taken & set(own) or len(ranks) % len(own) or ranks != own * (len(ranks) // len(own)):
            return None
        taken.update(own)
        calls = len(graph.calls[route[0]])
        if any(len(graph.calls[stage]) != calls for stage in route):
            return None
        for place, rank in enumerate(own):
            schedule[rank] = _order(route[place :: len(own)], place, len(own), calls)
    return schedule


def _order(stages: Sequence[int], place: int, ranks: int, calls: int) -> list[Action]:
    """The list of one rank: the stages that it has, and its place in the round of ranks."""
    count = max(1, calls // ranks)
    borders = [number * calls // count for number in range(count + 1)]
    rounds = [range(first, end) for first, end in pairwise(borders)]
    forwards = [Action(stage, "F", call) for one in rounds for stage in stages for call in one]
    backwards = [Action(stage, "B", call) for one in rounds for stage in reversed(stages) for call in one]
    largest = max(len(one) for one in rounds)
    behind = ranks - 1 - place
    ahead = behind if len(stages) == 1 else 2 * behind + (len(stages) - 1) * largest  # one stage: as 1F1B
    ahead = min(len(forwards), ahead)
    order = forwards[:ahead]
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        order += [forward, backward]
    return order + backwards[len(forwards) - ahead :]
